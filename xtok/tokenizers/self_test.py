"""The test every tokenizer takes at load: are the table's bytes the bytes of the text, and after which edit?

The answer gives the route. "byte": the table is right on ordinary text, so documents are aligned from ids alone, each one
verified; documents that the tokenizer rewrites still go by offsets. "offset": the table is not even right on ASCII prose
(WordPiece, lower-casing), so every document goes by offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from xtok.tokenizers.backends import EncodeBackend
from xtok.tokenizers.byte_table import TokenByteTable

__all__ = ["PROBES", "PrefixSpace", "SelfTest", "edited_bytes", "run_self_test"]

PrefixSpace = Literal["never", "always", "unless_blank"]
PREFIX_SPACES: tuple[PrefixSpace, ...] = ("never", "always", "unless_blank")

PROBES: Mapping[str, Sequence[str]] = {
    "ASCII prose": (
        "The quick brown fox jumps over 13 lazy dogs.",
        "Hello, World! It's 9:41, isn't it?",
        "a",
        "Xerxes' ZIP-code: 02139 (MA), 50% off; $7.25 & up.",
        "whitespaceless",
    ),
    "a leading blank": (" leading blank", " a"),
    "other blanks": (
        "  two leading",
        "trailing blank ",
        "two  inner  blanks",
        " ",
        "   ",
        "ends in blanks   ",
        "a\u00a0b\u3000c\u2009d",
    ),
    "tabs and line ends": (
        "\tleading tab",
        "tab\tbetween",
        "a\nb",
        "a\r\nb\r\n",
        "\n\nleading lines",
        "ends\n",
        "\n",
        "a \n b",
    ),
    "Latin letters with marks": ("Crème brûlée à la façade, naïve Übergröße, Łódź, smørrebrød",),
    "other scripts": (
        "Все люди рождаются свободными",
        "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι",
        "人人生而自由,在尊严和权利上一律平等。",
        "すべての人間は、生まれながらにして自由",
        "모든 인간은 태어날 때부터 자유로우며",
        "सभी मनुष्यों को गौरव और अधिकारों",
        "يولد جميع الناس أحرارا متساوين",
        "כל בני האדם נולדו בני חורין",
        "มนุษย์ทั้งหลายเกิดมามีอิสระ",
        "ყველა ადამიანი იბადება თავისუფალი",
        "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே",
        "𐌰𐌱𐌲 𒀀𒀁 𠮷野家",
    ),
    "emoji": ("👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 tone, ❤️ heart", "🤷🏾‍♂️"),
    "combining marks": ("cafe\u0301 o\u0308 n\u0303", "q\u0323\u0307 a\u0315\u0300\u05ae\u0300b", "\u0301leading mark"),
    "compatibility characters": ("ﬁne Ⅷ ① ㎏ ｆｕｌｌ　ｗｉｄｔｈ", "x² ½ … ™ ａ"),
    "code": (
        "def f(x):\n    return {'a': x[0] ** 2}  # ok\n",
        "if (a && !b) { ++i; }\t// <T>\n\n\n",
        '<div class="x">&amp;</div>\\n\\t',
    ),
    "control and odd characters": (
        "a\x00b",
        "\x00",
        "\x01\x1b[0m\x7f",
        "\u200b zero \u200d width \ufeff",
        "\u2028 \u2029 \x85",
        "\ufffd \ufffe",
    ),
    "the blank's own sign": ("a▁b", "▁▁"),
}
REQUIRED = "ASCII prose"
DECISIVE = (REQUIRED, "a leading blank")


@dataclass(frozen=True, slots=True)
class SelfTest:
    """route and why; prefix_space: the edit that makes the table's bytes the text's; changed: probe groups it rewrites."""

    route: Literal["byte", "offset"]
    reason: str
    prefix_space: PrefixSpace
    changed: tuple[str, ...]


def edited_bytes(text: str, prefix_space: PrefixSpace) -> bytes:
    """The bytes a tokenizer with this dummy prefix cuts: the text's, with the declared blank before them."""
    needs_blank = prefix_space == "always" or (prefix_space == "unless_blank" and not text.startswith(" "))
    return (b" " if needs_blank and text else b"") + text.encode("utf-8")


def run_self_test(backend: EncodeBackend, table: TokenByteTable, *, spelling: str) -> SelfTest:
    """Encode the probes with the reference and compare the table's bytes with the text's under each possible edit."""
    labels = [(group, text) for group, texts in PROBES.items() for text in texts]
    tokens = backend.encode_flat([text for _, text in labels])
    produced = [_bytes_of(table, tokens.row(row)) for row in range(len(labels))]

    def failures(edit: PrefixSpace) -> list[int]:
        return [row for row, (_, text) in enumerate(labels) if produced[row] != edited_bytes(text, edit)]

    by_edit = {edit: failures(edit) for edit in PREFIX_SPACES}
    best = min(PREFIX_SPACES, key=lambda edit: (sum(labels[row][0] in DECISIVE for row in by_edit[edit]), len(by_edit[edit])))
    failed = by_edit[best]
    changed = tuple(dict.fromkeys(labels[row][0] for row in failed))
    wrong = next((row for row in failed if labels[row][0] == REQUIRED), None)
    if wrong is not None:
        seen = produced[wrong].decode("utf-8", "replace")
        reason = f"{spelling} pieces do not give the text's bytes ({labels[wrong][1]!r} came back as {seen!r})"
        return SelfTest("offset", f"{reason}: every document goes by character offsets", "never", changed)
    reason = f"{spelling} pieces give the text's bytes on {len(labels) - len(failed)} of {len(labels)} probes"
    if changed:
        reason += f"; it rewrites {', '.join(changed)}: such documents go by character offsets"
    return SelfTest("byte", reason, best, changed)


def _bytes_of(table: TokenByteTable, ids: npt.NDArray[np.int32]) -> bytes:
    return table.take(ids)[0].tobytes()
