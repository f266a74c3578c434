"""The vocabulary projection: build it from two tokenizers, store it, use it in the losses."""

from xtok.projection.projection import Projection

__all__ = ["Projection"]
