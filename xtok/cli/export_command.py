"""Write the student and the draft of a training run as folders to use: a Hugging Face model, and the draft's published layout.

  xtok export --config train.yaml                     from the newest checkpoint
  xtok export --config train.yaml --checkpoint best   from the best, or from the one of a step

The end of a run exports by itself; this is for a run that goes on, or for another of its checkpoints.
"""

from __future__ import annotations

from xtok.train.export import add_arguments, run

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "export"
HELP = "write a training run's student and draft as folders to use"
