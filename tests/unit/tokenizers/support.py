"""Texts and tokenizer variants that the tokenizer tests share, and the slow way to a token's bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
BUNDLED = REPOSITORY / "infra" / "bundled"
BUNDLED_NAMES = ("chatml_bpe", "spm_bpe", "unigram_nfkc", "wordpiece_lower")

HARD_TEXTS = (
    "",
    " ",
    "  leading and trailing  ",
    "\t\ttabs\r\nand\r\n\r\nlines\n",
    "NUL \x00 inside\x00",
    "👩‍👩‍👧‍👦🇩🇪 emoji ❤️",
    "cafe\u0301 q\u0323\u0307",
    "mixed 漢字かな交じり文 и кириллица",
    "if (x) {\n\treturn y ** 2;\n}\n",
    "<think>\nhmm\n</think>\n\nsure <tool_call>{}</tool_call>",
    "a" * 5000,
    "\u2028 and \u0085",
)


@cache
def bundled_texts() -> tuple[str, ...]:
    """The bundled UDHR documents, the hard ones above, and with XTOK_SHARED the larger set."""
    sources = [BUNDLED / "udhr.jsonl"]
    if shared := os.environ.get("XTOK_SHARED"):
        sources.append(Path(shared) / "data" / "texts.jsonl")
    lines = (line for path in sources for line in path.read_text(encoding="utf-8").split("\n") if line)
    return (*HARD_TEXTS, *(json.loads(line)["text"] for line in lines))


def bundled(name: str) -> str:
    """Folder of a bundled tokenizer."""
    return str(BUNDLED / "tokenizers" / name)


def variant(folder: Path, base: str, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """A copy of a bundled tokenizer whose tokenizer.json and tokenizer_config.json went through `edit`. Returns the folder."""
    source = Path(bundled(base))
    document = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    edit(document, config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = source / "chat_template.jinja"
    if template.exists():
        (folder / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    return str(folder)


@cache
def told_byte_of_character() -> dict[str, int]:
    """Character -> byte, by the rule as it is usually told: bytes that print stand for themselves, the others are numbered from
    256 in order."""
    prints = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + place): byte for place, byte in enumerate(others)}


def slow_byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece, one character after the other."""
    return bytes(told_byte_of_character()[character] for character in piece)
