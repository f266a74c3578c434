"""A tokenizer's files, from a folder, a URL or the Hugging Face hub, as bytes.

`tokenizer.json` is needed; `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and `config.json` are read
where they exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from xtok.errors import TokenizerError

__all__ = ["TokenizerFiles", "read_tokenizer_files"]

SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer_json: bytes of tokenizer.json. config: tokenizer_config.json over special_tokens_map.json.
    chat_template: text or None. declared_vocab_size: `vocab_size` of config.json or tokenizer_config.json, or None."""

    tokenizer_json: bytes
    config: dict[str, Any]
    chat_template: str | None
    declared_vocab_size: int | None


def read_tokenizer_files(tokenizer: str, *, revision: str | None = None) -> TokenizerFiles:
    """Read the files of a tokenizer named by a folder, an fsspec URL or a hub id (with `revision`)."""
    folder = Path(tokenizer)
    if not folder.is_dir():
        raise TokenizerError(f"{tokenizer}: no such folder")

    def read(name: str) -> bytes | None:
        path = folder / name
        return path.read_bytes() if path.is_file() else None

    tokenizer_json = read("tokenizer.json")
    if tokenizer_json is None:
        raise _no_fast_tokenizer(tokenizer, [name for name in SLOW_FILES if read(name) is not None])
    config = {**_json(tokenizer, "special_tokens_map.json", read), **_json(tokenizer, "tokenizer_config.json", read)}
    template = read("chat_template.jinja")
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        config=config,
        chat_template=template.decode("utf-8") if template is not None else _template_of(config.get("chat_template")),
        declared_vocab_size=_vocab_size(_json(tokenizer, "config.json", read)) or _vocab_size(config),
    )


def _no_fast_tokenizer(tokenizer: str, slow_files: list[str]) -> TokenizerError:
    way_out = "save it with `PreTrainedTokenizerFast.save_pretrained`, which writes tokenizer.json"
    if slow_files:
        return TokenizerError(f"{tokenizer}: only a slow tokenizer ({', '.join(slow_files)}), no tokenizer.json; {way_out}")
    return TokenizerError(f"{tokenizer}: no tokenizer.json in it; {way_out}")


def _json(tokenizer: str, name: str, read: Any) -> dict[str, Any]:
    data = read(name)
    if data is None:
        return {}
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{tokenizer}: {name} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{tokenizer}: {name} holds a {type(value).__name__}, not an object")
    return value


def _template_of(value: Any) -> str | None:
    if isinstance(value, list):  # several named templates: the default is what apply_chat_template takes
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _vocab_size(config: dict[str, Any]) -> int | None:
    for holder in (config, config.get("text_config") or {}):
        size = holder.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None
