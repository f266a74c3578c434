"""The console command `xtok`: one sub-command a module, each with the same four names (NAME, HELP, add_arguments, run)."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from xtok.errors import XtokError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("preprocess", "inspect", "verify", "repair", "projection")

EPILOG = """\
a first look:
  xtok preprocess infra/configs/preprocess.yaml     build and publish a dataset
  xtok verify out/bundled                           check every file of it
  xtok inspect out/bundled                          see how two tokenizers meet in one row

`xtok COMMAND --help` explains each. The same pipeline as a Prefect flow: `python -m flows.preprocess --help`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command. Returns the exit code: 0 done, 1 refused or damaged (the reason is on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="xtok",
        description="Distillation across tokenizers: aligned Parquet shards, made once, offline.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"xtok.cli.{name}_command")
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except XtokError as error:
        message = Text.assemble((type(error).__name__, "bold red"), ": ", str(error))
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues where it stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os._exit(0)  # the reader (`| head`) has enough; at a normal exit Python would complain about what is left to write
