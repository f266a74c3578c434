"""The rendered table: what each model was shown, written row by row, and read back so that nothing is rendered twice.

Shape legend: R = rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.manifest import FileEntry
from schemas.tables import REGION_TYPE, RENDERED_SCHEMA, reject_side
from xtok import storage
from xtok.chat import RegionSpan, RenderedChat, RenderedPart
from xtok.chat.rendered import ANSWER
from xtok.errors import RowRefused
from xtok.shards.records import HeldSides, PartJob

__all__ = ["HeldRendering", "held_renderings", "regions_column", "rendered_columns"]


def rendered_columns(names: dict[str, pa.Array], chats: Sequence[RenderedChat | None]) -> dict[str, pa.Array]:
    """The table's columns. names: `sample_id` and `idx` of the R rows; chats: one a row, None for a refused one."""
    content = [chat.content if chat is not None else (None, None) for chat in chats]
    return {
        **names,
        "text": pa.array([chat.text if chat is not None else None for chat in chats], pa.string()),
        "content_start": pa.array([start for start, _ in content], pa.int64()),
        "content_end": pa.array([end for _, end in content], pa.int64()),
        "regions": regions_column([_all_spans(chat) if chat is not None else None for chat in chats]),
        "calls_start": pa.array(
            [chat.calls_start if chat is not None and chat.calls_start >= 0 else None for chat in chats], pa.int64()
        ),
        "reasoning": pa.array([chat.reasoning if chat is not None else None for chat in chats], pa.string()),
    }


def regions_column(regions: Sequence[Iterable[RegionSpan] | None]) -> pa.Array:
    """A `regions` column: the spans of every row, None for a null row."""
    spans = [() if row is None else tuple(row) for row in regions]
    flat = [span for row in spans for span in row]
    values = pa.StructArray.from_arrays(
        [
            pa.array([span.name for span in flat], pa.string()),
            pa.array([span.start for span in flat], pa.int32()),
            pa.array([span.end for span in flat], pa.int32()),
        ],
        fields=list(REGION_TYPE),
    )
    offsets = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in spans], out=offsets[1:])
    is_null = [row is None for row in regions]
    mask = pa.array(is_null) if any(is_null) else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=RENDERED_SCHEMA.field("regions").type, mask=mask)


def _all_spans(chat: RenderedChat) -> tuple[RegionSpan, ...]:
    mark = chat.eot_span
    return chat.spans if mark is None else (*chat.spans, mark)


@dataclass(frozen=True, slots=True)
class HeldRendering:
    """One side's renderings of a part that an earlier run left whole: by `idx`, and its refusals by (source, line)."""

    side: str
    chats: dict[int, RenderedChat]
    refusals: dict[tuple[str, int], RowRefused]

    @classmethod
    def read(cls, output: str, side: int | None, rendered: FileEntry, rejects: FileEntry, *, separate: bool) -> HeldRendering:
        """From the side's rendered file and the rejects. separate: native alignment, where every region stands alone."""
        name = reject_side(side)
        chats = {row["idx"]: _chat_of(row, separate=separate) for row in _read(output, rendered) if row["text"] is not None}
        refusals = {
            (row["source"], row["line"]): RowRefused(row["reason"], row["message"], stage=row["stage"], side=name)
            for row in _read(output, rejects)
            if row["side"] == name
        }
        return cls(name, chats, refusals)

    def part(self, idx: Sequence[int], places: Sequence[tuple[str, int]]) -> RenderedPart:
        """The rows with these `idx` and (source, line), as rendering them gave them."""
        return RenderedPart(self.side, [self.chats.get(row) for row in idx], [self.refusals.get(place) for place in places])


def held_renderings(job: PartJob, held: HeldSides, teachers: Iterable[int]) -> dict[int | None, HeldRendering]:
    """The renderings of the student and of `teachers` that need not be made again."""
    record = held.record
    if record is None:
        return {}
    wanted: list[int | None] = [None, *teachers]
    found: dict[int | None, HeldRendering] = {}
    for side in (side for side in wanted if side in held.rendered):
        file = record.rendered_files[0 if side is None else side + 1]
        assert file is not None, "a rendering that holds has a file"
        separate = job.config.native_thinking_alignment
        found[side] = HeldRendering.read(job.config.output, side, file, record.rejects_file, separate=separate)
    return found


def _read(output: str, entry: FileEntry) -> list[dict[str, Any]]:
    with storage.open_arrow(storage.join(output, entry.path)) as handle:
        rows: list[dict[str, Any]] = pq.read_table(handle).to_pylist()
    return rows


def _chat_of(row: dict[str, Any], *, separate: bool) -> RenderedChat:
    spans = [RegionSpan(region["name"], region["start"], region["end"]) for region in row["regions"]]
    has_mark = spans[-1].name == "eot"
    assert spans[0].name in ("reasoning", "close", ANSWER), "a rendered chat has supervised text"
    return RenderedChat(
        text=row["text"],
        spans=tuple(spans[:-1] if has_mark else spans),
        eot=spans[-1].start if has_mark else -1,
        separate=separate,
        calls_start=-1 if row["calls_start"] is None else row["calls_start"],
        reasoning=row["reasoning"],
    )
