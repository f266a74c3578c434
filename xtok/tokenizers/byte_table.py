"""The bytes of every token id, known once and for all: what makes an alignment exact without offsets.

Shape legend: V = vocab_size (largest id + 1), N = ids asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xtok.errors import TokenizerError
from xtok.tokenizers.pieces import PieceSpelling, encode_pieces

__all__ = ["TokenByteTable", "build_byte_table"]


@dataclass(frozen=True, slots=True)
class TokenByteTable:
    """Bytes and role of every token id.

    values: large_binary [V], bytes of each id, b"" for special ids and for ids nothing uses.
    lengths: int32 [V], bytes per id. is_special: bool [V]. special_content: id -> UTF-8 of a special token's text.
    role_code: int8 [V], 0 for none, else 1 + index into `xtok.tokenizers.ROLES`.
    """

    values: pa.LargeBinaryArray
    lengths: npt.NDArray[np.int32]
    is_special: npt.NDArray[np.bool_]
    special_content: dict[int, bytes]
    role_code: npt.NDArray[np.int8]

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.lengths)

    def take(self, ids: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Concatenated bytes of `ids` and their cuts.

        ids: integer [N]. Returns uint8 [total bytes] and int64 [N + 1]: id i spans bytes cuts[i]:cuts[i + 1] (half-open).
        TokenizerError when an id is outside the vocabulary.
        """
        try:
            taken = self.values.take(pa.array(ids))
        except (pa.ArrowIndexError, IndexError) as error:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)]
            raise TokenizerError(f"token id {bad[:1].tolist()} is outside the vocabulary of {self.vocab_size} ids") from error
        _, cut_buffer, byte_buffer = taken.buffers()
        cuts = np.frombuffer(cut_buffer, dtype=np.int64, count=len(taken) + 1, offset=taken.offset * 8)
        if byte_buffer is None:
            return np.empty(0, dtype=np.uint8), cuts
        flat = np.frombuffer(byte_buffer, dtype=np.uint8)[cuts[0] : cuts[-1]]
        return flat, (cuts if cuts[0] == 0 else cuts - cuts[0])


def build_byte_table(
    pieces: Mapping[str, int],
    *,
    spelling: PieceSpelling,
    added: Mapping[int, str],
    special: Mapping[int, str],
    role_code: Mapping[int, int],
) -> TokenByteTable:
    """Table of a vocabulary.

    pieces: spelling -> id of the whole vocabulary. spelling: how pieces spell bytes. added: id -> text of the ordinary added
    tokens, whose text stands for itself. special: id -> text of the special tokens, which hold no content bytes.
    role_code: id -> 1 + index into ROLES.
    """
    vocab_size = 1 + max((max(ids) for ids in (pieces.values(), added, special) if ids), default=-1)
    by_id = [""] * vocab_size
    for piece, token_id in pieces.items():
        by_id[token_id] = piece
    for token_id in (*added, *special):
        by_id[token_id] = ""
    literal = {token_id: text.encode("utf-8") for token_id, text in added.items() if token_id not in special}
    values, lengths = encode_pieces(by_id, spelling, literal)
    is_special = np.zeros(vocab_size, dtype=bool)
    is_special[list(special)] = True
    codes = np.zeros(vocab_size, dtype=np.int8)
    codes[list(role_code)] = list(role_code.values())
    contents = {token_id: text.encode("utf-8") for token_id, text in sorted(special.items())}
    for array in (lengths, is_special, codes):
        array.setflags(write=False)
    return TokenByteTable(values, lengths, is_special, contents, codes)
