"""The slow oracle of the projection: token by token, with dictionaries, from the rules alone. For tests."""

from __future__ import annotations

from xtok.tokenizers import TokenizerAdapter

__all__ = ["reference_row"]


def _ordinary(tokenizer: TokenizerAdapter) -> dict[int, bytes]:
    values = tokenizer.table.values.to_pylist()
    return {i: data for i, data in enumerate(values) if data and not tokenizer.table.is_special[i]}


def _pieces(tokenizer: TokenizerAdapter, ordinary: dict[int, bytes], data: bytes) -> list[int]:
    """Pieces of `data` as inside a document, else longest match over all tokens."""
    try:
        ids = [int(i) for i in tokenizer.encode_flat(["\n" + data.decode("utf-8")]).ids]
    except UnicodeDecodeError:
        ids = []
    for start in range(len(ids)):
        tail = ids[start:]
        if all(i in ordinary for i in ids) and b"".join(ordinary[i] for i in tail) == data:
            return tail
    found: list[int] = []
    rest = data
    while rest:
        fitting = [(len(piece), -_is_fallback(tokenizer, i), -i) for i, piece in ordinary.items() if rest.startswith(piece)]
        if not fitting:
            return []
        length, _, negative = max(fitting)
        found.append(-negative)
        rest = rest[length:]
    return found


def _is_fallback(tokenizer: TokenizerAdapter, token_id: int) -> int:
    return int((tokenizer.token_text(token_id) or "").startswith("<0x"))


def reference_row(student: TokenizerAdapter, teacher: TokenizerAdapter, student_id: int, *, k: int) -> dict[int, float]:
    """Teacher id -> weight of one ordinary student token, forward pass only; empty when nothing fits."""
    data = _ordinary(student)[student_id]
    ordinary = _ordinary(teacher)
    equal = [i for i, piece in ordinary.items() if piece == data]
    if equal:
        return {min(equal, key=lambda i: (_is_fallback(teacher, i), i)): 1.0}
    weights: dict[int, float] = {}
    for place, piece in enumerate(_pieces(teacher, ordinary, data)):
        weights[piece] = weights.get(piece, 0.0) + 0.9 * 0.1**place
    heaviest = sorted(weights.items(), key=lambda entry: (-entry[1], entry[0]))[:k]
    total = sum(weight for _, weight in heaviest)
    return {index: weight / total for index, weight in heaviest}
