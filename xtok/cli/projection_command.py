"""Build the vocabulary projection between two tokenizers, and see how much of one vocabulary the other has.

  xtok projection out/qwen3 out/llama3_2                          overlap, and some rows to read
  xtok projection out/qwen3 out/llama3_2 --output q-l.parquet     also write it
  xtok projection out/qwen3 out/llama3_2 out/gpt_oss              overlap with several teachers, one line each

A token is mapped exactly when the teacher has a token of the same bytes (` foo` is not `foo`). Every other one is written in the
teacher's own pieces, with weights falling by ten.
"""

from __future__ import annotations

import argparse
import random

import numpy as np
from rich.console import Console
from rich.table import Table

from xtok.errors import ConfigError
from xtok.projection import ProjectionTable, build_projection, write_projection
from xtok.tokenizers import TokenizerAdapter, load_tokenizer

__all__ = ["HELP", "NAME", "add_arguments", "overlap_table", "run"]

NAME = "projection"
HELP = "map one vocabulary onto another: overlap, rows to read, the Parquet file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `xtok projection`."""
    parser.add_argument("student", help="folder or hub id of the student's tokenizer")
    parser.add_argument("teachers", nargs="+", metavar="teacher", help="folder or hub id of a teacher's tokenizer (one or more)")
    parser.add_argument("--output", metavar="FILE", help="write the projection here (one teacher only)")
    parser.add_argument("--entries", type=int, default=4, metavar="K", help="teacher pieces a student token may have (default 4)")
    parser.add_argument("--reverse", action="store_true", help="also write lonely teacher tokens in student pieces")
    parser.add_argument("--rows", type=int, default=12, metavar="N", help="rows to print (default 12, 0 for none)")
    parser.add_argument("--seed", type=int, default=0, help="which rows (default 0)")


def run(options: argparse.Namespace) -> int:
    """Build, print, and write on request."""
    if options.output and len(options.teachers) > 1:
        raise ConfigError(f"--output takes one projection, but {len(options.teachers)} teachers are given")
    console = Console(highlight=False)
    student = load_tokenizer(options.student, backend="auto")
    built = []
    for name in options.teachers:
        teacher = load_tokenizer(name, backend="auto")
        built.append((teacher, build_projection(student, teacher, k=options.entries, reverse=options.reverse)))
    console.print(overlap_table(student, built))
    if options.rows > 0:
        console.print(_rows_table(student, *built[0], num_rows=options.rows, seed=options.seed))
    if options.output:
        write_projection(built[0][1], options.output)
        console.print(f"{options.output}: {built[0][1].indices.shape[0]} rows")
    return 0


def overlap_table(student: TokenizerAdapter, built: list[tuple[TokenizerAdapter, ProjectionTable]]) -> Table:
    """One line a teacher: sizes, exact share, share with an entry, entries a row."""
    table = Table("student", "teacher", "student tokens", "teacher tokens", "mapped exactly", "mapped at all", "pieces a token")
    for teacher, projection in built:
        used = projection.indices[:, 0] >= 0
        table.add_row(
            student.name,
            teacher.name,
            f"{student.num_tokens:,}",
            f"{teacher.num_tokens:,}",
            f"{projection.is_exact.sum() / student.num_tokens:.1%}",
            f"{used.sum() / student.num_tokens:.1%}",
            f"{(projection.indices[used] >= 0).sum(axis=1).mean():.2f}",
        )
    return table


def _rows_table(
    student: TokenizerAdapter, teacher: TokenizerAdapter, projection: ProjectionTable, *, num_rows: int, seed: int
) -> Table:
    """Rows a person can read: half of them exact, half of them written in pieces."""
    draw = random.Random(seed)
    mapped = projection.indices[:, 0] >= 0
    groups = [np.flatnonzero(mapped & projection.is_exact), np.flatnonzero(mapped & ~projection.is_exact)]
    chosen = [i for g in groups for i in draw.sample(g.tolist(), min(len(g), (num_rows + 1) // 2))][:num_rows]
    table = Table("student id", "student token", "teacher pieces and weights", title=f"{student.name} → {teacher.name}")
    for student_id in chosen:
        entries = zip(projection.indices[student_id], projection.weights[student_id], strict=True)
        pieces = "  ".join(f"{_readable(teacher, int(i))} {w:.3g}" for i, w in entries if i >= 0)
        table.add_row(str(student_id), _readable(student, student_id), pieces)
    return table


def _readable(tokenizer: TokenizerAdapter, token_id: int) -> str:
    """A token as Python would print its text or bytes; a special token by its own text."""
    special = tokenizer.table.special_content.get(token_id)
    data = special if special is not None else tokenizer.table.values[token_id].as_py()
    try:
        return repr(data.decode("utf-8")).replace("[", "\\[")
    except UnicodeDecodeError:
        return repr(data).replace("[", "\\[")
