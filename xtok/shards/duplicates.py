"""Which rows bear an id that an earlier row has, over all parts: the second look at the sources that a plan needs.

Each accepted row's sample_id counts, as a 128-bit digest. To know whether a row will be accepted it must be read as building will read it,
which costs; so the ids are looked at first, of all rows that have one, refused or not. Only parts that hold an id twice are read in full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schemas.plan import Segment
from xtok.shards.parse import RowFields
from xtok.shards.pool import Runner
from xtok.shards.rows import SourceAt, read_blocks

__all__ = ["IdScan", "ScanJob", "duplicate_rows", "find_duplicates", "parts_with_repeats", "scan_ids"]

_LABEL = "the scan for duplicate ids"


@dataclass(frozen=True, slots=True)
class ScanJob:
    """What `scan_ids` needs: a part's segments, and the sources they name."""

    segments: tuple[Segment, ...]
    sources: dict[int, SourceAt]
    fields: RowFields


@dataclass(frozen=True, slots=True)
class IdScan:
    """Rows of one part. idx: int64 [num_rows]; digests: uint64 [num_rows, 2] of the sample_ids."""

    idx: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]


def duplicate_rows(
    jobs: Sequence[ScanJob], runner: Runner, watched: Callable[[Iterator[IdScan], int], Iterator[IdScan]]
) -> list[tuple[int, ...]]:
    """For each part, the `idx` of its accepted rows whose sample_id an earlier accepted row has. watched: shows the progress."""
    quick = [replace(job, fields=replace(job.fields, only_ids=True)) for job in jobs]
    scans = list(watched(runner.map(scan_ids, quick, lambda job: _LABEL), len(jobs)))
    found: list[tuple[int, ...]] = [()] * len(jobs)
    suspects = parts_with_repeats(scans)
    in_full = list(runner.map(scan_ids, [jobs[part] for part in suspects], lambda job: _LABEL))
    for part, rows in zip(suspects, find_duplicates(in_full), strict=True):
        found[part] = rows
    return found


def scan_ids(job: ScanJob) -> IdScan:
    """Reads the rows of one part as building it will, and digests the sample_ids of those it accepts.

    With `only_ids` rows that have an id are not looked into, so that some are among them which will be refused.
    """
    idx: list[int] = []
    digests: list[bytes] = []
    for block in read_blocks(job.segments, job.sources, job.fields, frozenset()):
        idx.extend(block.idx)
        digests.extend(hashlib.blake2b(sample_id.encode(), digest_size=16).digest() for sample_id in block.sample_id)
    return IdScan(np.array(idx, dtype=np.int64), np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2))


def find_duplicates(scans: Sequence[IdScan]) -> list[tuple[int, ...]]:
    """For each part, the `idx` of rows whose sample_id an earlier row has. Parts in plan order."""
    if not scans:
        return []
    order, repeats_before = _in_order(scans)
    repeats = np.zeros(len(order), dtype=bool)
    repeats[order] = repeats_before
    bounds = np.cumsum([0, *(len(scan.idx) for scan in scans)])
    return [tuple(scan.idx[repeats[bounds[i] : bounds[i + 1]]].tolist()) for i, scan in enumerate(scans)]


def parts_with_repeats(scans: Sequence[IdScan]) -> list[int]:
    """The parts that hold a sample_id which stands in two rows or more, the first of them included."""
    if not scans:
        return []
    order, repeats_before = _in_order(scans)
    repeated = repeats_before.copy()
    repeated[:-1] |= repeats_before[1:]
    bounds = np.cumsum([0, *(len(scan.idx) for scan in scans)])
    parts: list[int] = np.unique(np.searchsorted(bounds, order[repeated], side="right") - 1).tolist()
    return parts


def _in_order(scans: Sequence[IdScan]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Rows of all parts ordered by digest, and whether each has the digest of the one before it."""
    digests = np.concatenate([scan.digests for scan in scans])
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ids stay in plan order
    ordered = digests[order]
    repeats = np.zeros(len(order), dtype=bool)
    repeats[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return order, repeats
