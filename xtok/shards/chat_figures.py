"""What a report says about chats, side by side: how many were rendered, what is supervised, how much of it is covered.

Pure functions of the manifest; only the examples of refused rows are read from the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow.parquet as pq

from schemas.manifest import Manifest, PartEntry, SideCounts
from schemas.tables import reject_side
from xtok import storage

__all__ = ["NUM_EXAMPLES", "chat_figures", "chat_figures_table", "first_refusals", "refusals_table"]

NUM_EXAMPLES = 3
_MAX_MESSAGE = 160


def chat_figures(manifest: Manifest) -> list[dict[str, Any]]:
    """One dictionary for the student and each teacher with files; shares are fractions, None where nothing is counted.

    rendered: rows this side's template showed; refused: rows it refused, at any stage. supervised: tokens under the side's mask.
    coverage: supervised student tokens in a chunk. one_to_one: chunks of one token on each side. thinking_rows: accepted rows whose
    reasoning is shown; thinking_tokens: supervised tokens that are reasoning. dropped_reasoning: rows whose reasoning the template
    drops, accepted all the same.
    """
    sides: list[tuple[str, SideCounts, float | None]] = [("student", manifest.student_totals, None)]
    for index, (planned, totals) in enumerate(zip(manifest.teachers, manifest.teacher_totals, strict=True)):
        if not planned.same_as_student:
            sides.append((reject_side(index), totals, manifest.coverage[index]))
    return [_figures(name, counts, coverage) for name, counts, coverage in sides]


def _figures(name: str, counts: SideCounts, coverage: float | None) -> dict[str, Any]:
    return {
        "side": name,
        "rendered": counts.num_rendered,
        "refused": counts.num_rejects,
        "supervised": counts.num_mask_tokens,
        "coverage": coverage,
        "one_to_one": _share(counts.num_one_to_one, counts.num_chunks),
        "thinking_rows": _share(counts.num_thinking_rows, counts.num_rows - counts.num_null_rows),
        "thinking_tokens": _share(counts.num_thinking_tokens, counts.num_mask_tokens),
        "dropped_reasoning": counts.num_dropped_reasoning,
    }


def chat_figures_table(manifest: Manifest) -> str:
    """The same as a table for people, and what fell back to Jinja."""
    rows = chat_figures(manifest)
    header = (
        f"{'side':<12} {'rendered':>10} {'refused':>10} {'supervised':>14} {'coverage':>9} {'one to one':>10} "
        f"{'rows thinking':>13} {'tokens thinking':>15} {'reasoning dropped':>17}"
    )
    lines = [header]
    for row in rows:
        lines.append(
            f"{row['side']:<12} {row['rendered']:>10} {row['refused']:>10} {row['supervised']:>14} {_percent(row['coverage']):>9} "
            f"{_percent(row['one_to_one']):>10} {_percent(row['thinking_rows']):>13} {_percent(row['thinking_tokens']):>15} "
            f"{row['dropped_reasoning']:>17}"
        )
    for name, planned, counts in zip(
        ("student", *map(reject_side, range(len(manifest.teachers)))),
        (manifest.student, *manifest.teachers),
        (manifest.student_totals, *manifest.teacher_totals),
        strict=True,
    ):
        if planned.renderer_note is not None:
            lines.append(f"{name}: rendered by {planned.renderer}: {planned.renderer_note}")
        if counts.num_renderer_fallbacks:
            lines.append(f"{name}: {counts.num_renderer_fallbacks} parts rendered again by Jinja: {counts.renderer_difference}")
    return "\n".join(lines)


def first_refusals(output: str, parts: Iterable[PartEntry]) -> dict[tuple[str, str], list[str]]:
    """The first few refused rows of every side and reason, as `source:line (id): message`, in plan order."""
    found: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        if not part.rejects_file.num_rows:
            continue
        with storage.open_arrow(storage.join(output, part.rejects_file.path)) as handle:
            rows = pq.read_table(handle).to_pylist()
        for row in rows:
            examples = found.setdefault((row["side"], row["reason"]), [])
            if len(examples) < NUM_EXAMPLES:
                examples.append(_example(row))
    return found


def refusals_table(output: str, parts: Iterable[PartEntry]) -> str:
    """The examples as lines for people."""
    lines = []
    for (side, reason), examples in sorted(first_refusals(output, parts).items()):
        lines.append(f"refused by {side}, {reason}, for example:")
        lines += [f"  {example}" for example in examples]
    return "\n".join(lines)


def _example(row: dict[str, Any]) -> str:
    name = "" if row["sample_id"] is None else f" ({row['sample_id'][:60]})"
    message = row["message"] if len(row["message"]) <= _MAX_MESSAGE else row["message"][: _MAX_MESSAGE - 1] + "…"
    return f"{row['source']}:{row['line']}{name}: {message}"


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"
