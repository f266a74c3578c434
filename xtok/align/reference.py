"""The byte lattice the slow way: Python loops over bytes and tokens, one document at a time. The oracle of the parity tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from xtok.align.specials import BOS, EOS, UNK
from xtok.tokenizers.adapter import TokenizerAdapter

__all__ = ["ReferenceAlignment", "reference_align", "reference_chunks"]


@dataclass(frozen=True)
class ReferenceAlignment:
    """One document: chunk of each token (-1 = none), how many chunks, and whether the bytes verified."""

    student_chunk_id: list[int]
    teacher_chunk_id: list[int]
    num_chunks: int
    is_verified: bool


def reference_align(
    student: TokenizerAdapter, teacher: TokenizerAdapter, student_ids: Sequence[int], teacher_ids: Sequence[int]
) -> ReferenceAlignment:
    """Align one document by bytes; a document that does not verify has role pairs only."""
    best: tuple[bool, int, list[bytes | None], list[bytes | None]] | None = None
    for one, other in READINGS:
        # What a tokenizer adds by itself is quoted text only where nothing else fits.
        if (best and "all" in (one, other) and (best[0] or best[1] > 0)) or (best and one == "none"):
            continue
        lefts, rights = list(_readings(student, student_ids, one)), list(_readings(teacher, teacher_ids, other))
        if not lefts or not rights:
            continue
        views = list(product(lefts, rights))
        views.sort(key=lambda view: not _is_declared_view(student, teacher, lefts, rights, *view))
        for left, right in views:
            whole_left, whole_right = (b"".join(piece or b"" for piece in side) for side in (left, right))
            shorter = min(len(whole_left), len(whole_right))
            if whole_left[:shorter] == whole_right[:shorter]:
                is_whole = len(whole_left) == len(whole_right)
                have_content = [
                    not all(adapter.table.is_special[token_id] for token_id in ids)
                    for adapter, ids in ((student, student_ids), (teacher, teacher_ids))
                ]
                # A first blank that may be a dummy is no text yet: with nothing after it, there is nothing to compare.
                kept = len(lefts) > 1 and left is lefts[-1], len(rights) > 1 and right is rights[-1]
                has_text = len(whole_left) > kept[0] and len(whole_right) > kept[1]
                if not is_whole and ("offset" in (student.route, teacher.route) or (not has_text and all(have_content))):
                    continue
                if best is None or (not best[0] and (is_whole or shorter > best[1])):
                    best = (is_whole, shorter, left, right)
                break
    if best is not None:
        return _number(student, teacher, student_ids, teacher_ids, best[2], best[3], is_verified=True)
    outside: list[list[bytes | None]] = [[None] * len(ids) for ids in (student_ids, teacher_ids)]
    return _number(student, teacher, student_ids, teacher_ids, outside[0], outside[1], is_verified=False)


READINGS = (
    ("marks", "marks"),
    ("amid", "amid"),
    ("undeclared", "undeclared"),
    ("all", "undeclared"),
    ("undeclared", "all"),
    ("all", "all"),
    ("none", "none"),
)


def _is_declared_view(
    student: TokenizerAdapter,
    teacher: TokenizerAdapter,
    lefts: list[list[bytes | None]],
    rights: list[list[bytes | None]],
    left: list[bytes | None],
    right: list[bytes | None],
) -> bool:
    """Whether the dummy prefix blanks left out are those that the tokenizers add; lefts, rights: without (where there may be one), with."""
    kinds = student.prefix_space, teacher.prefix_space
    for kind, views, view, other, other_views in (
        (kinds[0], lefts, left, kinds[1], rights),
        (kinds[1], rights, right, kinds[0], lefts),
    ):
        if len(views) == 1:
            continue
        # The text as the other side has it: its own view where it adds no blank, the view without where it always does.
        text = b"".join(piece or b"" for piece in (other_views[0] if other == "always" else other_views[-1]))
        leaves_out = kind == "always" or (other != "unless_blank" and not text.startswith(b" "))
        if (view is views[0]) != leaves_out:
            return False
    return True


def reference_chunks(student: Sequence[bytes | None], teacher: Sequence[bytes | None]) -> tuple[list[int], list[int]]:
    """Chunks of two lists of token bytes (None = outside the lattice) of equal content, up to the shorter side's end."""
    student_cuts, teacher_cuts = _cut_places(student), _cut_places(teacher)
    shared = [place for place in range(max(student_cuts) + 1) if place in student_cuts and place in teacher_cuts]
    return _members(student, shared), _members(teacher, shared)


def _cut_places(pieces: Sequence[bytes | None]) -> set[int]:
    places, at = {0}, 0
    for piece in pieces:
        for _ in piece or b"":
            at += 1
        places.add(at)
    return places


def _members(pieces: Sequence[bytes | None], shared: list[int]) -> list[int]:
    total = sum(len(piece or b"") for piece in pieces)
    ids, at = [], 0
    for piece in pieces:
        found = -1
        for chunk, (begin, end) in enumerate(pairwise(shared)):
            if piece and begin <= at and at + len(piece) <= end:
                found = chunk
            if piece == b"" and (begin <= at < end or (at == end == total and chunk == len(shared) - 2)):
                found = chunk
        ids.append(found)
        at += len(piece or b"")
    return ids


def _readings(adapter: TokenizerAdapter, ids: Sequence[int], reading: str) -> Iterator[list[bytes | None]]:
    """Bytes of each token, without and with the dummy prefix blank; None for a special token outside the lattice.

    Nothing where an id does not tell its text.
    """
    table = adapter.table
    special = [bool(table.is_special[token_id]) for token_id in ids]
    leading = next((at for at, is_special in enumerate(special) if not is_special), len(ids))
    trailing = next((at for at, is_special in enumerate(reversed(special)) if not is_special), len(ids))
    prefix, suffix = list(adapter.prefix_ids), list(adapter.suffix_ids)
    pieces: list[bytes | None] = []
    for at, token_id in enumerate(ids):
        from_end = len(ids) - 1 - at
        is_amid = at >= leading and from_end >= trailing
        is_declared = (at < len(prefix) and prefix[at] == token_id) or (
            from_end < len(suffix) and suffix[-1 - from_end] == token_id
        )
        if not special[at]:
            pieces.append(table.values[int(token_id)].as_py())
        elif reading == "all" or (reading == "undeclared" and not is_declared) or (reading == "amid" and is_amid):
            pieces.append(table.special_content[int(token_id)])
        elif reading == "marks" and is_amid and table.role_code[token_id] in (BOS, EOS):
            pieces.append(b"\xf8" + bytes([table.role_code[token_id]]))
        elif table.role_code[token_id] == UNK:
            return  # its text is unknown
        else:
            pieces.append(None)
    first = pieces[leading] if leading < len(ids) else None
    if adapter.prefix_space != "never" and first and first.startswith(b" "):
        stripped = list(pieces)
        stripped[leading] = first[1:]
        yield stripped
    yield pieces


def _number(
    student: TokenizerAdapter,
    teacher: TokenizerAdapter,
    student_ids: Sequence[int],
    teacher_ids: Sequence[int],
    left: list[bytes | None],
    right: list[bytes | None],
    *,
    is_verified: bool,
) -> ReferenceAlignment:
    """Add role pairs to the lattice and number all by first student position."""
    left_chunks, right_chunks = reference_chunks(left, right)
    keys_left: list[object] = [chunk if chunk >= 0 else None for chunk in left_chunks]
    keys_right: list[object] = [chunk if chunk >= 0 else None for chunk in right_chunks]
    last = -1
    for one, other in sorted(_role_pairs(_roles(student, student_ids, left), _roles(teacher, teacher_ids, right))):
        if other > last:
            keys_left[one] = keys_right[other] = ("role", one)
            last = other
    numbers: dict[object, int] = {}
    for key in keys_left:
        if key is not None:
            numbers.setdefault(key, len(numbers))
    return ReferenceAlignment(
        [-1 if key is None else numbers[key] for key in keys_left],
        [-1 if key is None else numbers[key] for key in keys_right],
        len(numbers),
        is_verified,
    )


def _roles(adapter: TokenizerAdapter, ids: Sequence[int], pieces: list[bytes | None]) -> dict[tuple[str, int], list[int]]:
    """(end, role) -> token indices of the special tokens on that end of the document."""
    special = [piece is None and bool(adapter.table.is_special[token_id]) for piece, token_id in zip(pieces, ids, strict=True)]
    leading = next((at for at, is_special in enumerate(special) if not is_special), len(ids))
    trailing = next((at for at, is_special in enumerate(reversed(special)) if not is_special), len(ids))
    found: dict[tuple[str, int], list[int]] = {}
    for at, token_id in enumerate(ids):
        if at < leading or len(ids) - 1 - at < trailing:
            role = int(adapter.table.role_code[token_id])
            end = "leading" if at < leading else "trailing"
            if all(special):
                end = "leading" if role == BOS else "trailing"
            if end == "leading" and token_id == adapter.bos_token_id:
                role = BOS
            if end == "trailing" and token_id == adapter.eos_token_id:
                role = EOS
            found.setdefault((end, role), []).append(at)
    return found


def _role_pairs(student: dict[tuple[str, int], list[int]], teacher: dict[tuple[str, int], list[int]]) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for end, role in product(("leading", "trailing"), (BOS, EOS)):
        pairs += zip(student.get((end, role), []), teacher.get((end, role), []), strict=False)
    return pairs
