"""Opening a published dataset and reading its row groups.

A table of one side is read one row group at a time; the same `RowGroupRef` addresses the same rows on every side, because all
sides of a part have the same rows in the same order and the same row groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from schemas.manifest import FileEntry, Manifest, PartEntry
from schemas.plan import FORMAT_VERSION
from xtok import storage
from xtok.errors import DamagedPartError, DatasetError, UnpublishedDatasetError

__all__ = ["Dataset", "RowGroupRef", "Side", "open_dataset"]

Side = Literal["student"] | int


@dataclass(frozen=True, slots=True)
class RowGroupRef:
    """Row group `row_group` of part `part`, with `num_rows` rows."""

    part: int
    row_group: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Dataset:
    """A published dataset: its manifest and where it lies."""

    manifest: Manifest
    url: str

    def row_groups(self) -> list[RowGroupRef]:
        """Every row group, parts in order."""
        return [
            RowGroupRef(part.index, group, num_rows)
            for part in self.manifest.parts
            for group, num_rows in enumerate(part.student_file.row_group_rows)
        ]

    def file(self, part: int, side: Side) -> FileEntry:
        """The file of one side of a part. Raises DatasetError for a teacher without files here."""
        entry = self._part(part)
        if side == "student":
            return entry.student_file
        if not 0 <= side < len(entry.teacher_files):
            raise DatasetError(f"{self.url} has teachers 0 to {len(entry.teacher_files) - 1}, not {side}")
        file = entry.teacher_files[side]
        if file is None:
            raise DatasetError(f"teacher {side} of {self.url} has the student's tokenizer and no files: read the student's ids")
        return file

    def rendered_file(self, part: int, side: Side) -> FileEntry:
        """What one side of a part was shown. Raises DatasetError in text mode, and for a teacher without files here."""
        self.file(part, side)
        files = self._part(part).rendered_files
        if not files:
            raise DatasetError(f"{self.url} holds text, which is shown to every model as it is: there is nothing rendered")
        file = files[0 if side == "student" else side + 1]
        assert file is not None, "a side with a file has a rendered one"
        return file

    def read_rendered(self, ref: RowGroupRef, side: Side = "student", columns: Sequence[str] | None = None) -> pa.Table:
        """What one side was shown in one row group: the rows of `read_row_group`. Raises DamagedPartError naming the file."""
        return self._read(self.rendered_file(ref.part, side), ref, columns)

    def read_row_group(self, ref: RowGroupRef, side: Side = "student", columns: Sequence[str] | None = None) -> pa.Table:
        """One row group of one side, `ref.num_rows` rows. Raises DamagedPartError naming the file."""
        return self._read(self.file(ref.part, side), ref, columns)

    def _read(self, entry: FileEntry, ref: RowGroupRef, columns: Sequence[str] | None) -> pa.Table:
        try:
            with self.open_parquet(entry) as parquet:
                names = None if columns is None else list(columns)
                table = parquet.read_row_group(ref.row_group, columns=names, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            if storage.is_no_damage(error):
                raise
            raise _damaged(self.url, entry, ref.part, str(error)) from error
        if table.num_rows != ref.num_rows:
            raise _damaged(self.url, entry, ref.part, f"row group {ref.row_group} has {table.num_rows} rows, not {ref.num_rows}")
        return table

    def open_parquet(self, entry: FileEntry) -> pq.ParquetFile:
        """The open Parquet file of an entry; a context manager. Raises StorageError when it is not there."""
        # Keeps the handle: a caller that reads many row groups of one file opens it once.
        return pq.ParquetFile(storage.open_arrow(storage.join(self.url, entry.path)))

    def _part(self, index: int) -> PartEntry:
        if not 0 <= index < len(self.manifest.parts):
            raise DatasetError(f"{self.url} has parts 0 to {len(self.manifest.parts) - 1}, not {index}")
        return self.manifest.parts[index]


def open_dataset(url: str) -> Dataset:
    """The published dataset at `url` (a folder or any fsspec URL).

    Raises UnpublishedDatasetError when there is no manifest, DatasetError when the manifest is of another format version,
    DamagedPartError when it cannot be read.
    """
    path = storage.join(url, "manifest.json")
    if not storage.exists(path):
        raise UnpublishedDatasetError(
            f"{url} has no manifest.json: it was never published or is still being written. "
            "Run the same preprocess command again: it continues where it stopped."
        )
    try:
        manifest = Manifest.model_validate_json(storage.read_bytes(path))
    except ValidationError as error:
        raise DamagedPartError(
            f"{path} is not a manifest of format version {FORMAT_VERSION}: {_first(error)}. `xtok repair {url}`, or the same "
            "preprocess command again, writes it anew; what is built is kept."
        ) from error
    if manifest.format_version != FORMAT_VERSION:
        raise DatasetError(
            f"{path} has format version {manifest.format_version}, this library reads {FORMAT_VERSION}: build the dataset again"
        )
    return Dataset(manifest, url)


def _first(error: ValidationError) -> str:
    """The first of what is wrong, and how many more things are."""
    first, *others = error.errors(include_url=False, include_input=False)
    place = ".".join(map(str, first["loc"]))
    return f"{place or 'the file'}: {first['msg']}" + (f", and {len(others)} more" if others else "")


def _damaged(url: str, entry: FileEntry, part: int, what: str) -> DamagedPartError:
    return DamagedPartError(
        f"{entry.path} (part {part} of {url}): {what}. Rebuild that part alone with `xtok repair {url} --part {part}`."
    )
