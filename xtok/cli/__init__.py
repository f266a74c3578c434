"""The console command `xtok`: one sub-command a module, `<name>_command`, with `add_arguments(parser)` and `run(options)`.

Only the module of the command that is called is imported, so each starts as light as it can be.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from xtok.cli.visible import visible
from xtok.errors import XtokError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "preprocess": "raw text or chats in, an aligned and published dataset out",
    "inspect": "rows as coloured chunks, in the terminal or as an HTML file",
    "verify": "check digests, row counts and invariants of a published dataset",
    "repair": "rebuild damaged parts of a published dataset",
    "projection": "map one vocabulary onto another",
    "export": "write a training run's student and draft as folders to use",
    "speculate": "decode prompts with a draft: accepted length by round, and whether the output is plain decoding's",
}

EPILOG = """\
a first look:
  xtok preprocess infra/configs/preprocess.yaml     build and publish a dataset
  xtok verify out/bundled                           check every file of it
  xtok inspect out/bundled                          see how two tokenizers meet in one row

`xtok COMMAND --help` explains each. The same pipeline as a Prefect flow: `python -m flows.preprocess --help`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command. Returns the exit code: 0 done, 1 refused or damaged (the reason is on stderr), 2 wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        _overview().parse_args(words or ["--help"])
    command = importlib.import_module(f"xtok.cli.{words[0]}_command")
    parser = argparse.ArgumentParser(
        prog=f"xtok {words[0]}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    options = parser.parse_args(words[1:])
    try:
        return int(command.run(options))
    except XtokError as error:
        message = Text.assemble((type(error).__name__, "bold red"), ": ", visible(str(error)))
        Console(stderr=True, highlight=False).print(message, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues where it stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os._exit(0)  # the reader (`| head`) has enough; at a normal exit Python would complain about what is left to write


def _overview() -> argparse.ArgumentParser:
    """Prints the list of commands, or says that a word is none of them."""
    parser = argparse.ArgumentParser(
        prog="xtok",
        usage="xtok [-h] COMMAND ...",
        description="Distillation across tokenizers: aligned Parquet shards, made once, offline.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for name, explanation in COMMANDS.items():
        commands.add_parser(name, help=explanation)
    return parser
