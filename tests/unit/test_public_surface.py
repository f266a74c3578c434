"""The library as others import it: typed, explicit about its public names, clean under the type checker and the linter."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
MODULES = sorted(path for package in ("schemas", "xtok") for path in (REPOSITORY / package).rglob("*.py"))

# The names that code outside may count on to stay where they are.
FIXED_NAMES = {
    "schemas.config": ["ModelSide", "PreprocessConfig"],
    "schemas.manifest": ["Manifest", "PartEntry", "SideCounts"],
    "schemas.train_config": ["TrainConfig"],
    "xtok.align": ["AlignmentBatch", "AlignmentPair", "TokenAligner"],
    "xtok.batch": ["BatchedDataDict", "DatumSpec"],
    "xtok.chat": ["RenderedChatDocument"],
    "xtok.collate": ["CrossTokenizerCollator", "CrossTokenizerCollatorConfig"],
    "xtok.loader": ["AlignedShardLoader"],
    "xtok.losses.cross_tokenizer": ["CrossTokenizerDistillationConfig", "CrossTokenizerDistillationLoss", "HiddenLogits"],
    "xtok.projection": ["Projection"],
    "xtok.shards.pipeline": ["preprocess"],
    "xtok.shards.read": ["open_dataset"],
}


def run(*command: str) -> str:
    """Runs a tool on the repository; its output. Fails with that output when the tool is not content."""
    answer = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=REPOSITORY)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mypy_strict_is_content() -> None:
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert run("mypy", "--strict", "schemas", "xtok", "flows").startswith("Success")


def test_ruff_is_content_with_everything() -> None:
    run("ruff", "check", "--quiet", ".")


@pytest.mark.parametrize("package", ["schemas", "xtok"])
def test_type_checkers_of_users_see_our_types(package: str) -> None:
    assert (REPOSITORY / package / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]


def test_every_module_says_what_is_public() -> None:
    """`tests/unit/test_architecture.py` checks that the names are sorted and there."""
    silent = []
    for path in MODULES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        defines = any(isinstance(node, ast.ClassDef | ast.FunctionDef | ast.ImportFrom) for node in body)
        names = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
        if defines and not names and path.name != "__main__.py":
            silent.append(str(path.relative_to(REPOSITORY)))
    assert not silent, f"no __all__: {silent}"


@pytest.mark.parametrize("module", FIXED_NAMES)
def test_fixed_names_are_public_and_explained(module: str) -> None:
    found = importlib.import_module(module)
    for name in FIXED_NAMES[module]:
        assert name in found.__all__, f"{module}.{name}"
        text = inspect.getdoc(getattr(found, name))
        assert text, f"{module}.{name} has no docstring"
        assert not text.startswith(f"{name}("), f"{module}.{name} has no docstring of its own"


def test_the_version_is_said_once_and_has_its_changes() -> None:
    version = PROJECT["project"]["version"]
    assert importlib.import_module("xtok").__version__ == version
    changes = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("\n## Changelog\n")
    assert len(changes) == 2, "README.md has a section `## Changelog`"
    newest = re.search(r"^\*\*(\S+)\*\*", changes[1], flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


def test_paths_that_the_readme_names_exist() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:infra|flows|schemas|tests|xtok)/[\w./-]*[\w/])", text))
    assert len(named) > 5
    missing = {name for name in named if not (REPOSITORY / name).exists() and not list(Path(REPOSITORY).glob(f"{name}*"))}
    assert not missing, missing
