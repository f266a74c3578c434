"""A tokenizer's files, from a folder, a URL or the Hugging Face hub, as bytes.

`tokenizer.json` is needed; `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and `config.json` are read
where they exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from xtok import storage
from xtok.errors import TokenizerError

__all__ = ["TokenizerFiles", "read_tokenizer_files"]

SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tiktoken.model")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WAY_OUT = "save it with PreTrainedTokenizerFast.save_pretrained, which writes tokenizer.json"

Reader = Callable[[str], bytes | None]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer_json: bytes of tokenizer.json. config: tokenizer_config.json over special_tokens_map.json.
    chat_template: text or None. declared_vocab_size: `vocab_size` of config.json or tokenizer_config.json, or None."""

    tokenizer_json: bytes
    config: dict[str, Any]
    chat_template: str | None
    declared_vocab_size: int | None


def read_tokenizer_files(tokenizer: str, *, revision: str | None = None) -> TokenizerFiles:
    """Read the files of a tokenizer named by a folder, an fsspec URL or a hub id (with `revision`).

    TokenizerError: no such folder or repository, no tokenizer.json, files that do not parse. StorageError: unreadable files.
    """
    read = _reader(tokenizer, revision)
    config = _json(tokenizer, "tokenizer_config.json", read)
    tokenizer_json = read("tokenizer.json")
    if tokenizer_json is None:
        raise _no_fast_tokenizer(tokenizer, config, [name for name in SLOW_FILES if read(name) is not None])
    config = {**_json(tokenizer, "special_tokens_map.json", read), **config}
    template = read("chat_template.jinja")
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        config=config,
        chat_template=_default_template(config.get("chat_template")) if template is None else template.decode("utf-8"),
        declared_vocab_size=_vocab_size(_json(tokenizer, "config.json", read)) or _vocab_size(config),
    )


def _reader(tokenizer: str, revision: str | None) -> Reader:
    """Reads one named file, None where there is none."""
    path = storage.local_path(tokenizer)
    if path is None or path.is_dir():

        def from_storage(name: str) -> bytes | None:
            url = storage.join(tokenizer, name)
            return storage.read_bytes(url) if storage.exists(url) else None

        return from_storage
    if path.exists():
        raise TokenizerError(f"{tokenizer} is a file; give the folder that holds tokenizer.json")
    if not HUB_ID.fullmatch(tokenizer):
        raise TokenizerError(f"no tokenizer folder {tokenizer!r} (looked at {path.absolute()})")
    return _hub_reader(tokenizer, revision, looked_at=str(path.absolute()))


def _hub_reader(repository: str, revision: str | None, *, looked_at: str) -> Reader:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def from_hub(name: str) -> bytes | None:
        try:
            return storage.read_bytes(hf_hub_download(repository, name, revision=revision))
        except LocalEntryNotFoundError as error:  # not cached, and the hub cannot be reached
            if name != "tokenizer.json":
                return None
            raise _unreachable(repository, looked_at, error) from error
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreachable(repository, looked_at, error) from error

    return from_hub


def _unreachable(repository: str, looked_at: str, error: Exception) -> TokenizerError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return TokenizerError(f"{repository!r} is neither a folder (looked at {looked_at}) nor a hub tokenizer one can get: {reason}")


def _no_fast_tokenizer(tokenizer: str, config: dict[str, Any], slow_files: list[str]) -> TokenizerError:
    named = config.get("tokenizer_class")
    if slow_files:
        what = f"the slow tokenizer {named}" if named else "a slow tokenizer"
        return TokenizerError(f"{tokenizer} holds {what} ({', '.join(slow_files)}) and no tokenizer.json; {WAY_OUT}")
    return TokenizerError(f"{tokenizer} holds no tokenizer.json; {WAY_OUT}")


def _json(tokenizer: str, name: str, read: Reader) -> dict[str, Any]:
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


def _default_template(value: Any) -> str | None:
    if isinstance(value, list):  # several named templates: the default is what apply_chat_template takes
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _vocab_size(config: dict[str, Any]) -> int | None:
    for holder in (config, config.get("text_config") or {}):
        size = holder.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None
