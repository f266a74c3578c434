"""Finds rows of a dataset, by id or at random, and makes them readable with the tokenizers that made them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from schemas.config import ModelSide
from schemas.plan import PlannedSide
from xtok.cli.chat_view import ShownText, final_turn, shown_text
from xtok.cli.row_view import RowView, TokenView, pair_chunks, token_views
from xtok.cli.run_record import recorded_config
from xtok.errors import ConfigError, DatasetError, FingerprintMismatchError
from xtok.shards.read import Dataset, RowGroupRef, Side
from xtok.shards.sides import load_side
from xtok.tokenizers import TokenizerAdapter

__all__ = ["RowAddress", "RowSource"]

STUDENT_COLUMNS = ["sample_id", "source", "line", "input_ids", "token_mask"]
TEACHER_COLUMNS = ["input_ids", "token_mask", "student_chunk_id", "teacher_chunk_id", "pair_is_correct", "route", "coverage"]


@dataclass(frozen=True, slots=True)
class RowAddress:
    """Row `offset` of a row group."""

    group: RowGroupRef
    offset: int


class RowSource:
    """Rows of `dataset`. tokenizers: `student` or a teacher's index -> folder or hub id, where it is no longer where the run
    found it. Raises ConfigError for an unknown side, FingerprintMismatchError for another tokenizer."""

    def __init__(self, dataset: Dataset, tokenizers: Mapping[str, str]) -> None:
        self.dataset = dataset
        self._sides: list[PlannedSide] = [dataset.manifest.student, *dataset.manifest.teachers]
        self._labels = ["student", *(str(index) for index in range(len(dataset.manifest.teachers)))]
        unknown = sorted(set(tokenizers) - set(self._labels))
        if unknown:
            raise ConfigError(f"--tokenizer {unknown[0]}=…: the sides of {dataset.url} are {', '.join(self._labels)}")
        self._given = tokenizers
        config = recorded_config(dataset.url)
        self._recorded = [config.student, *config.teachers] if config is not None else []
        self._loaded: dict[int, TokenizerAdapter] = {}

    def draw(self, num_rows: int, seed: int | None) -> list[RowAddress]:
        """`num_rows` rows, all equally likely, none twice; in the dataset's order."""
        groups = self.dataset.row_groups()
        total = sum(group.num_rows for group in groups)
        if not total:
            raise DatasetError(f"{self.dataset.url} has no rows to show; its rejects table says why")
        chosen = sorted(random.Random(seed).sample(range(total), min(num_rows, total)))
        addresses, before = [], 0
        for group in groups:
            while chosen and chosen[0] < before + group.num_rows:
                addresses.append(RowAddress(group, chosen.pop(0) - before))
            before += group.num_rows
        return addresses

    def find(self, sample_ids: Sequence[str]) -> list[RowAddress]:
        """Rows by id, in the given order. DatasetError for one that is not there, with the reason if it was refused."""
        wanted = dict.fromkeys(sample_ids)
        found: dict[str, RowAddress] = {}
        for group in self.dataset.row_groups():
            if len(found) == len(wanted):
                break
            column = self.dataset.read_row_group(group, "student", ["sample_id"])["sample_id"]
            for sample_id in wanted.keys() - found.keys():
                offset = pc.index(column, sample_id).as_py()
                if offset >= 0:
                    found[sample_id] = RowAddress(group, offset)
        for sample_id in wanted:
            if sample_id not in found:
                why = self._windows_of(sample_id) or self._why_refused(sample_id)
                raise DatasetError(f"no row of {self.dataset.url} has the id {sample_id!r}{why}")
        return [found[sample_id] for sample_id in sample_ids]

    def views(self, address: RowAddress, teacher: int | None) -> Iterator[RowView]:
        """The row against one teacher, or against each in turn."""
        num_teachers = len(self.dataset.manifest.teachers)
        if teacher is not None and not 0 <= teacher < num_teachers:
            raise ConfigError(f"--teacher {teacher}: {self.dataset.url} has teachers 0 to {num_teachers - 1}")
        row = self._read(address, "student", STUDENT_COLUMNS)
        student = token_views(self._tokenizer(0), row["input_ids"], row["token_mask"])
        for index in range(num_teachers) if teacher is None else [teacher]:
            yield self._view(address, row, student, index)

    def _view(self, address: RowAddress, row: Mapping[str, Any], student: tuple[TokenView, ...], index: int) -> RowView:
        planned = self._sides[index + 1]
        coverage, route, note = None, None, None
        if planned.same_as_student:
            teacher, own = student, list(range(len(student)))
            ids, correct, note = (own, own), [True] * len(student), "same tokenizer as the student"
        else:
            other = self._read(address, index, TEACHER_COLUMNS)
            if other["input_ids"] is None:
                teacher, ids, correct = (), ([-1] * len(student), []), []
                note = "this teacher refuses the row" + self._why_refused(row["sample_id"])
            else:
                teacher = token_views(self._tokenizer(index + 1), other["input_ids"], other["token_mask"])
                ids, correct = (other["student_chunk_id"], other["teacher_chunk_id"]), other["pair_is_correct"]
                coverage, route = other["coverage"], other["route"]
        chunks = pair_chunks(student, teacher, ids[0], ids[1], correct)
        is_chat = self.dataset.manifest.mode == "chat"
        return RowView(
            sample_id=row["sample_id"],
            source=row["source"],
            line=row["line"],
            teacher_index=index,
            student_name=self._sides[0].name,
            teacher_name=planned.name,
            route=route,
            coverage=coverage,
            note=note,
            chunks=final_turn(chunks) if is_chat else chunks,
            shown=tuple(self._shown(address, index)) if is_chat else (),
        )

    def _shown(self, address: RowAddress, index: int) -> Iterator[ShownText]:
        """What the student and this teacher were shown; nothing for a side that refuses the row or sees what the student sees."""
        sides: list[tuple[str, Side]] = [(f"student {self._sides[0].name}", "student")]
        if not self._sides[index + 1].same_as_student:
            sides.append((f"teacher {index} {self._sides[index + 1].name}", index))
        for label, side in sides:
            table = self.dataset.read_rendered(address.group, side, ["text", "regions"])
            shown = shown_text(label, table.slice(address.offset, 1).to_pylist()[0])
            if shown is not None:
                yield shown

    def _read(self, address: RowAddress, side: Any, columns: list[str]) -> dict[str, Any]:
        table = self.dataset.read_row_group(address.group, side, columns)
        row: dict[str, Any] = table.slice(address.offset, 1).to_pylist()[0]
        return row

    def _tokenizer(self, position: int) -> TokenizerAdapter:
        if position not in self._loaded:
            label, planned = self._labels[position], self._sides[position]
            side = self._recorded[position] if position < len(self._recorded) else None
            if label in self._given:
                side = (side or ModelSide(tokenizer="-")).model_copy(update={"tokenizer": self._given[label]})
            if side is None:
                raise ConfigError(
                    f"where does the tokenizer {planned.name} of side {label} lie? {self.dataset.url} keeps no record of its run here: "
                    f"give --tokenizer {label}=FOLDER"
                )
            adapter = load_side(side)
            if adapter.content_fingerprint != planned.content_fingerprint:
                raise FingerprintMismatchError(
                    f"{side.tokenizer} has the fingerprint {adapter.content_fingerprint}, side {label} of {self.dataset.url} was made "
                    f"with {planned.content_fingerprint}: give --tokenizer {label}=FOLDER of that one"
                )
            self._loaded[position] = adapter
        return self._loaded[position]

    def _windows_of(self, document_id: str) -> str:
        """What to ask for instead, where the id is that of a document of which the rows are windows."""
        found: list[str] = []
        for group in self.dataset.row_groups():
            table = self.dataset.read_row_group(group, "student", ["sample_id", "document_id"])
            found += table.filter(pc.equal(table["document_id"], document_id))["sample_id"].to_pylist()
        return f"; it is a document in {len(found)} windows, {found[0]} to {found[-1]}" if found else ""

    def _why_refused(self, sample_id: str) -> str:
        reasons = []
        for part in self.dataset.manifest.parts:
            if part.rejects_file.num_rows:
                with self.dataset.open_parquet(part.rejects_file) as parquet:
                    table = parquet.read(use_threads=False)
                for row in table.filter(pc.field("sample_id") == sample_id).to_pylist():
                    reasons.append(
                        f"{row['source']}:{row['line']} was refused by {row['side']}: {row['reason']} ({row['message']})"
                    )
        return "; " + "; ".join(reasons) if reasons else ""
