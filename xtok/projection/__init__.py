"""The vocabulary projection: build it from two tokenizers (torch-free), store it as Parquet, use it in the losses.

table = build_projection(load_tokenizer("out/qwen3"), load_tokenizer("out/llama3_2"))
write_projection(table, "out/qwen3-llama3_2.parquet")
projection = Projection.from_table(read_projection("out/qwen3-llama3_2.parquet"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xtok.projection.build import ProjectionTable, build_projection
from xtok.projection.store import read_projection, write_projection

if TYPE_CHECKING:
    from xtok.projection.projection import Projection

__all__ = ["Projection", "ProjectionTable", "build_projection", "read_projection", "write_projection"]


def __getattr__(name: str) -> Any:
    # Projection is a torch class; builders run in preprocessing workers, which never load torch.
    if name == "Projection":
        import importlib

        return importlib.import_module("xtok.projection.projection").Projection
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
