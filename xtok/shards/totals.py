"""Adding figures up: blocks to a part, parts to a dataset."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.manifest import SideCounts

__all__ = ["add_counts", "add_reasons", "sum_counts"]

_NUMBERS = tuple(name for name in SideCounts.model_fields if name.startswith("num_"))


def add_counts(left: SideCounts, right: SideCounts) -> SideCounts:
    """The sum of two; of the differences the first is kept."""
    sums = {name: getattr(left, name) + getattr(right, name) for name in _NUMBERS}
    rejects = dict(left.rejects)
    for reason, count in right.rejects.items():
        rejects[reason] = rejects.get(reason, 0) + count
    return SideCounts(
        **sums,
        rejects=dict(sorted(rejects.items())),
        backend_difference=_first(left.backend_difference, right.backend_difference),
        renderer_difference=_first(left.renderer_difference, right.renderer_difference),
    )


def _first(left: str | None, right: str | None) -> str | None:
    return right if left is None else left


def sum_counts(counts: Iterable[SideCounts]) -> SideCounts:
    """The sum of all."""
    total = SideCounts()
    for one in counts:
        total = add_counts(total, one)
    return total


def add_reasons(into: dict[str, int], reasons: Iterable[str]) -> None:
    """Counts reasons into a dictionary."""
    for reason in reasons:
        into[reason] = into.get(reason, 0) + 1
