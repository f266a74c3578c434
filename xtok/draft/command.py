"""What a trained draft is worth: decode prompts speculatively with a target and print how many drafted tokens it accepts.

  xtok speculate models/target out/draft --prompts prompts.jsonl

Prints the accepted length of every round, their mean (tau), and whether greedy output equals plain greedy decoding; the exit code is
1 when it does not. A line of a .jsonl file holds `messages`, `prompt` or `text`; of any other file, a prompt.
"""

from __future__ import annotations

import argparse
import sys

import torch

from xtok.draft.decoding import DecodingResult
from xtok.draft.speculate import speculate

__all__ = ["add_arguments", "run"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok speculate`."""
    parser.add_argument("target", help="folder or hub id of the target, with its tokenizer")
    parser.add_argument("draft", help="folder or URL of an exported draft")
    parser.add_argument("--prompts", required=True, help="file of prompts")
    parser.add_argument("--limit", type=int, default=None, help="first prompts only")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=None, help="keep the last tokens of longer prompts")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--confidence-threshold", type=float, default=0.0, help="DSpark: draft up to the first slot below it")
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), default="float32", help="greedy output is guaranteed in float32 alone"
    )
    parser.add_argument(
        "--baselines", action="store_true", help="also decode with an untrained draft and with a guess of one token"
    )
    parser.add_argument("--no-check", action="store_true", help="do not decode plainly as well")


def run(options: argparse.Namespace) -> int:
    """Decode and print; 0 unless a checked greedy output differs from plain decoding."""

    def progress(number: int, result: DecodingResult) -> None:
        print(f"prompt {number}: {len(result.tokens)} tokens in {len(result.round_lengths)} rounds", file=sys.stderr)

    report = speculate(
        options.target,
        options.draft,
        options.prompts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        confidence_threshold=options.confidence_threshold,
        limit=options.limit,
        max_prompt_tokens=options.max_prompt_tokens,
        dtype=_DTYPES[options.dtype],
        check=not options.no_check,
        baselines=options.baselines,
        progress=progress,
    )
    print(report.text())
    return 0 if report.agrees else 1
