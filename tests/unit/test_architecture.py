"""The house rules that a program can check: who imports whom, who opens files, how long a file is, what the root holds."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 320
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", ".gitignore", ".ci", "schemas", "xtok", "flows", "infra", "tests"}

TORCH_FREE = (
    "xtok.errors",
    "xtok.storage",
    "xtok.tokenizers",
    "xtok.chat",
    "xtok.align",
    "xtok.shards",
    "xtok.projection",
)
# Layers, lowest first. A module may import its own layer and those below it. Of `xtok.align` all is numpy but the torch view, and
# of `xtok.projection` all but the class the losses use: preprocessing builds projections without torch.
LAYERS = (
    ("schemas",),
    TORCH_FREE,
    (
        "xtok.align.aligner",
        "xtok.align.batch",
        "xtok.batch",
        "xtok.collate",
        "xtok.draft",
        "xtok.loader",
        "xtok.losses",
        "xtok.order",
        "xtok.padding",
        "xtok.projection.projection",
        "xtok.settings",
    ),
    ("xtok.train",),
    ("xtok.cli",),
    ("flows",),
    ("infra",),
    ("tests",),
)
SOURCES = sorted(path for folder in ("schemas", "xtok", "flows", "infra", "tests") for path in (ROOT / folder).rglob("*.py"))
LIBRARY = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("schemas", "xtok", "flows")]
FILE_OPENERS = {"open", "read_bytes", "read_text", "write_bytes", "write_text", "urlopen", "FileIO", "mkstemp"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer_of(module: str) -> int | None:
    """The layer whose entry is the longest that names `module` or a package around it."""
    fitting = [(len(name), layer) for layer, names in enumerate(LAYERS) for name in names if is_in(module, (name,))]
    return max(fitting)[1] if fitting else None


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def type_checking_lines(tree: ast.Module) -> set[int]:
    """Lines under `if TYPE_CHECKING:`: those imports never happen."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions included, those for type checkers left out.

    `from package import name` counts as package.name where that is a module of ours, else as package.
    """
    tree = tree_of(path)
    skipped = type_checking_lines(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write the whole name"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else str(node.module) for name in inner]
        else:
            continue
        if node.lineno not in skipped:
            yield from ((node.lineno, name) for name in found)


MODULES = {name_of(path) for path in SOURCES}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_one_way() -> None:
    wrong = []
    for path in LIBRARY:
        module = name_of(path)
        own = layer_of(module)
        if own is None:
            assert module in ("xtok", "flows"), f"{module} has no place in the order of layers; DESIGN's house has to name one"
            continue
        for line, imported in dict.fromkeys(imports_of(path)):
            other = layer_of(imported)
            if other is not None and other > own:
                wrong.append(f"{relative(path)}:{line} ({module}) imports {imported} from a layer above it")
    assert not wrong, "\n".join(wrong)


def test_only_flows_imports_prefect() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {imported}"
        for path in LIBRARY
        if not is_in(name_of(path), ("flows",))
        for line, imported in imports_of(path)
        if is_in(imported, ("prefect", "prefect_ray"))
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_without_torch_never_name_it() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {imported}"
        for path in LIBRARY
        if layer_of(name_of(path)) in (0, 1)
        for line, imported in imports_of(path)
        if is_in(imported, ("torch",))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("schemas.config", ["torch", "transformers", "prefect"]),
        ("xtok.shards.part", ["torch", "prefect"]),
        ("xtok.shards.pipeline", ["torch", "prefect"]),
        ("xtok.shards.read", ["torch", "prefect"]),
        ("xtok.tokenizers", ["torch", "prefect"]),
        ("xtok.align.lattice", ["torch", "prefect"]),
        ("xtok.chat", ["torch", "prefect"]),
        ("xtok.cli.preprocess_command", ["torch", "prefect"]),
    ],
)
def test_a_worker_starts_without_the_heavy_packages(module: str, absent: list[str]) -> None:
    """The parse above cannot see what other packages import in turn; this can."""
    program = f"import json, sys, {module}; print(json.dumps([name for name in {absent!r} if name in sys.modules]))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == []


def test_only_storage_opens_files() -> None:
    wrong = []
    for path in LIBRARY:
        module = name_of(path)
        if is_in(module, ("xtok.storage", "flows")):
            continue
        for line, imported in imports_of(path):
            if is_in(imported, ("fsspec", "urllib.request", "requests", "httpx")):
                wrong.append(f"{relative(path)}:{line} imports {imported}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                from_storage = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "storage"
                if name in FILE_OPENERS and not from_storage:
                    wrong.append(f"{relative(path)}:{node.lineno} calls {ast.unparse(node.func)}")
    assert not wrong, "these go through xtok.storage:\n" + "\n".join(wrong)


def test_no_pickle() -> None:
    wrong = [
        f"{relative(path)}:{line}"
        for path in LIBRARY
        for line, imported in imports_of(path)
        if is_in(imported, ("pickle", "cloudpickle", "dill", "joblib", "shelve"))
    ]
    assert not wrong, wrong


def test_files_are_short_and_say_what_they_are_for() -> None:
    wrong = []
    for path in SOURCES:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_LINES:
            wrong.append(f"{relative(path)} has {num_lines} lines; more than {MAX_LINES} are two ideas")
        if num_lines and path in LIBRARY and ast.get_docstring(tree_of(path)) is None:
            wrong.append(f"{relative(path)} has no module docstring")
    assert not wrong, "\n".join(wrong)


def test_public_names_are_sorted_and_there() -> None:
    wrong = []
    for path in LIBRARY:
        for node in tree_of(path).body:
            if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
                continue
            if not isinstance(node.value, ast.List | ast.Tuple):
                continue
            names = [ast.literal_eval(element) for element in node.value.elts]
            # CONSTANTS, then Classes, then functions: the order that ruff's RUF022 keeps.
            expected = sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
            if names != expected or len(set(names)) != len(names):
                wrong.append(f"{relative(path)}: __all__ should read {expected}")
    assert not wrong, "\n".join(wrong)


def test_flows_package_is_empty() -> None:
    """Prefect imports `flows.plugin` while Prefect itself is half imported: nothing may come along."""
    assert (ROOT / "flows" / "__init__.py").read_text() == ""


def test_the_root_holds_nothing_else() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:
        names = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    else:  # an exported tree without its history
        names = {path.name for path in ROOT.iterdir() if path.name in TOP_LEVEL}
    assert names <= TOP_LEVEL, f"{sorted(names - TOP_LEVEL)} do not belong in the root"


def test_the_checks_see_what_they_look_for() -> None:
    """A rule that matches nothing passes always: the parser must find imports known to be there."""
    storage_imports = {name for _, name in imports_of(ROOT / "xtok" / "storage" / "remote.py")}
    assert "fsspec" in storage_imports
    assert any(is_in(name, ("prefect",)) for _, name in imports_of(ROOT / "flows" / "serve.py"))
    assert layer_of("xtok.align.lattice") == layer_of("xtok.shards.part") == 1
    assert layer_of("xtok.align.aligner") == 2
    assert layer_of("os") is None
