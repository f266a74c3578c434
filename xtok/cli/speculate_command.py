"""What a trained draft is worth: decode prompts speculatively with a target and print how many drafted tokens it accepts.

  xtok speculate models/target out/draft --prompts prompts.jsonl

Prints the accepted length of every round, their mean (tau), and whether greedy output equals plain greedy decoding; the exit code is
1 when it does not. A line of a .jsonl file holds `messages`, `prompt` or `text`; of any other file, a prompt.
"""

from __future__ import annotations

from xtok.draft.command import add_arguments, run

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "speculate"
HELP = "what a trained draft is worth: accepted length by round"
