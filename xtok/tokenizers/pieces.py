"""How a vocabulary spells bytes: byte-level characters, SentencePiece blanks and byte pieces, or plain text.

Shape legend: V = number of ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["BYTE_CHARACTERS", "METASPACE", "PieceSpelling", "encode_pieces", "piece_bytes"]

METASPACE = "▁"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> tuple[str, ...]:
    """The printable character that byte-level vocabularies write for each byte.

    A byte that is a visible Latin-1 character stands for itself; the 68 others are numbered upwards from U+0100.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in characters]
    characters.update({byte: chr(0x100 + order) for order, byte in enumerate(hidden)})
    return tuple(characters[byte] for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


@dataclass(frozen=True, slots=True)
class PieceSpelling:
    """kind: "byte_level", "metaspace" (blanks as U+2581) or "plain". byte_pieces: `<0xNN>` stands for one byte."""

    kind: Literal["byte_level", "metaspace", "plain"]
    byte_pieces: bool = False


def piece_bytes(piece: str, spelling: PieceSpelling) -> bytes:
    """Bytes of one piece: the slow form of `encode_pieces`."""
    if spelling.kind == "byte_level":
        if all(character in BYTE_OF_CHARACTER for character in piece):
            return bytes(BYTE_OF_CHARACTER[character] for character in piece)
        return piece.encode("utf-8")
    if spelling.byte_pieces and (match := BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match.group(1), 16)])
    if spelling.kind == "metaspace":
        piece = piece.replace(METASPACE, " ")
    return piece.encode("utf-8")


def encode_pieces(
    pieces: Sequence[str], spelling: PieceSpelling, literal: Mapping[int, bytes]
) -> tuple[pa.LargeBinaryArray, npt.NDArray[np.int32]]:
    """Bytes of every piece as one Arrow array.

    pieces: V spellings, "" where an id has none. literal: id -> bytes that replace the spelled ones.
    Returns large_binary [V] and int32 [V] byte lengths.
    """
    if spelling.kind == "byte_level":
        return _encode_byte_level(list(pieces), dict(literal))
    encoded = [piece.encode("utf-8") for piece in pieces]
    if spelling.kind == "metaspace":
        blank = METASPACE.encode("utf-8")
        encoded = [piece.replace(blank, b" ") for piece in encoded]
    if spelling.byte_pieces:
        for token_id, piece in enumerate(encoded):
            if piece.startswith(b"<0x"):
                encoded[token_id] = piece_bytes(piece.decode("utf-8"), spelling)
    for token_id, content in literal.items():
        encoded[token_id] = content
    lengths = np.fromiter(map(len, encoded), dtype=np.int32, count=len(encoded))
    return pa.array(encoded, type=pa.large_binary()), lengths


def _encode_byte_level(pieces: list[str], literal: dict[int, bytes]) -> tuple[pa.LargeBinaryArray, npt.NDArray[np.int32]]:
    """All pieces at once: one character is one byte, so one lookup over the joined text gives every byte."""
    for token_id, content in literal.items():
        pieces[token_id] = _spell(content)
    values = _lookup(pieces)
    foreign = np.flatnonzero(values < 0)
    if len(foreign):  # pieces that no text can produce: they stand for their own UTF-8
        ends = np.cumsum(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)))
        for token_id in np.unique(np.searchsorted(ends, foreign, side="right")):
            pieces[token_id] = _spell(pieces[token_id].encode("utf-8"))
        values = _lookup(pieces)
    lengths = np.fromiter(map(len, pieces), dtype=np.int32, count=len(pieces))
    cuts = np.zeros(len(pieces) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cuts[1:])
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(values.astype(np.uint8))]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(pieces), buffers), lengths


def _spell(content: bytes) -> str:
    return "".join(BYTE_CHARACTERS[byte] for byte in content)


def _lookup(pieces: Sequence[str]) -> npt.NDArray[np.int16]:
    """int16 [characters of all pieces]: the byte of each character, -1 for characters that stand for none."""
    codes = np.frombuffer("".join(pieces).encode("utf-32-le"), dtype="<u4")
    table = np.full(max(map(ord, BYTE_CHARACTERS)) + 2, -1, dtype=np.int16)
    table[[ord(character) for character in BYTE_CHARACTERS]] = np.arange(256)
    values: npt.NDArray[np.int16] = table[np.minimum(codes, len(table) - 1)]
    return values
