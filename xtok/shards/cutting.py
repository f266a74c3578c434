"""Cutting the concatenated sources into parts of nearly equal bytes, always between two lines.

A part may end inside a file and may span many files, so that one huge file and ten thousand small ones both make even parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.plan import PlannedPart, Segment
from xtok.shards.scan import SourceScan

__all__ = ["balanced_parts"]


def balanced_parts(scans: Sequence[SourceScan], part_bytes: int) -> list[PlannedPart]:
    """Cuts the concatenated sources at the checkpoints next to equal shares of about `part_bytes`."""
    marks = _global_marks(scans)
    total = int(marks[-1, 0])
    num_parts = max(1, -(-total // part_bytes))
    targets = np.array([total * (part + 1) // num_parts for part in range(num_parts)], dtype=np.int64)
    chosen = np.unique(np.append(np.searchsorted(marks[:, 0], targets), len(marks) - 1))
    parts: list[PlannedPart] = []
    start = np.zeros(6, dtype=np.int64)
    for cut in marks[chosen]:
        num_rows = int(cut[5] - start[5])
        if num_rows:
            segments = tuple(_segments(scans, start, cut))
            parts.append(PlannedPart(index=len(parts), segments=segments, num_bytes=int(cut[0] - start[0]), num_rows=num_rows))
        start = cut
    return parts


def _global_marks(scans: Sequence[SourceScan]) -> npt.NDArray[np.int64]:
    """int64 [num marks, 6]: weight over all sources, source, position, lines of the source, rows of the source, rows over all."""
    marks = []
    weight = rows = 0
    for source, scan in enumerate(scans):
        points = scan.checkpoints
        weights, owner, rows_before = weight + points[:, 0], np.full(len(points), source), rows + points[:, 3]
        marks.append(np.stack([weights, owner, points[:, 1], points[:, 2], points[:, 3], rows_before], axis=1))
        weight, rows = weight + int(points[-1, 0]), rows + int(points[-1, 3])
    return np.concatenate(marks)


def _segments(scans: Sequence[SourceScan], start: npt.NDArray[np.int64], cut: npt.NDArray[np.int64]) -> list[Segment]:
    _, source, position, lines, _, idx = start.tolist()
    segments = []
    while source <= int(cut[1]):
        end = int(cut[2]) if source == int(cut[1]) else int(scans[source].checkpoints[-1, 1])
        if end > position:
            segments.append(Segment(source=source, start=position, end=end, first_line=lines + 1, first_idx=idx))
        # What is left of this source's rows lies before the next source.
        idx = sum(scan.planned.num_rows for scan in scans[: source + 1])
        source, position, lines = source + 1, 0, 0
    return segments
