"""Whether a teacher added to a dataset of windows fits the windows that are there."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.manifest import FileEntry
from xtok import storage
from xtok.errors import DatasetMismatchError
from xtok.shards.records import HeldSides, PartJob

__all__ = ["WindowCheck"]


class WindowCheck:
    """A teacher added to a dataset of windows must fit the windows that are there."""

    def __init__(self, job: PartJob, held: HeldSides) -> None:
        """Checks only where the student's windows stand and all sides had a say in them."""
        self._job = job
        self._active = job.config.overlength == "split" and held.student
        self._found: list[tuple[pa.Array, pa.Array]] = []

    def add(self, student: dict[str, pa.Array]) -> None:
        """Takes note of the windows of one block."""
        if self._active:
            self._found.append((student["sample_id"], student["num_tokens"]))

    def finish(self, file: FileEntry) -> None:
        """Raises DatasetMismatchError when the windows found are not those of the student's file."""
        if not self._active:
            return
        with storage.open_arrow(storage.join(self._job.config.output, file.path)) as handle:
            existing = pq.read_table(handle, columns=["sample_id", "num_tokens"])
        columns = [pa.chunked_array([pair[side] for pair in self._found], existing.schema.types[side]) for side in (0, 1)]
        if not all(column.equals(existing.column(side)) for side, column in enumerate(columns)):
            raise DatasetMismatchError(
                f"{self._job.config.output}, part {self._job.part.index}: the added teacher does not fit the windows that are "
                f"there ({existing.num_rows} windows, {len(columns[0])} with it): its cuts or its context ask for others. "
                "Give it a larger context_length, or build a new dataset with all teachers."
            )
