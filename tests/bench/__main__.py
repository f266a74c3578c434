"""Measure: each figure as a ratio with its baseline of the same run, and whether it keeps its limit.

    python -m tests.bench               all of them
    python -m tests.bench align disk    these
    python -m tests.bench --list        what there is

A benchmark is a module of this folder with NAME, DESCRIPTION and `run() -> list[dict]` (keys: `tests.bench.report.figure_of`).
Bundled data by default; XTOK_SHARED=../shared takes the larger sets. The exit code is 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import time
from types import ModuleType

from rich.console import Console

import tests.bench
from tests.bench.report import Figure, figure_of, print_figures


def benchmarks() -> dict[str, ModuleType]:
    """NAME -> module, for every module of this folder that is a benchmark."""
    found: dict[str, ModuleType] = {}
    for info in sorted(pkgutil.iter_modules(tests.bench.__path__), key=lambda info: info.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"tests.bench.{info.name}")
        if hasattr(module, "NAME") and hasattr(module, "run"):
            if module.NAME in found:
                raise ValueError(f"{module.__name__} and {found[module.NAME].__name__} are both named {module.NAME!r}")
            found[module.NAME] = module
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print what there is and end")
    options = parser.parse_args()
    available = benchmarks()
    unknown = [name for name in options.names if name not in available]
    if unknown:
        parser.error(f"no benchmark is named {', '.join(unknown)}; there are: {', '.join(available) or 'none'}")
    if options.list:
        for name, module in available.items():
            print(f"{name:<16}{module.DESCRIPTION}")
        return 0

    # Wide enough for a file or a CI log, where there is no terminal to ask.
    console = Console(width=None if sys.stdout.isatty() else 132)
    data = os.environ.get("XTOK_SHARED")
    print(f"{os.cpu_count()} cores; data: {data or 'bundled'}")
    missed: list[Figure] = []
    for name in options.names or available:
        began = time.perf_counter()
        figures = [figure_of(row) for row in available[name].run()]
        print_figures(f"{name}: {available[name].DESCRIPTION} ({time.perf_counter() - began:.0f} s)", figures, console)
        missed += [figure for figure in figures if not figure.passed]
    for figure in missed:
        print(f"MISSED: {figure.metric}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
