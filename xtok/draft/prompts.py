"""Prompts for evaluation: a file of texts or chats to token ids.

A line of a `.jsonl` file is an object with `messages` (rendered with the target's chat template up to the last assistant turn; with
`tools` and `chat_template_kwargs` where the row has them), `prompt` or `text`; a line of any other file is one plain prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from xtok import storage
from xtok.errors import ConfigError

__all__ = ["chat_prompt_ids", "read_prompts"]

_NO_LINES = (".json", ".parquet", ".gz", ".zst")


def read_prompts(url: str, tokenizer: Any, *, limit: int | None = None, max_tokens: int | None = None) -> list[list[int]]:
    """Token ids of each prompt, in file order; blank lines are passed over.

    Args:
        url: the file.
        tokenizer: the target's transformers tokenizer.
        limit: first prompts only, at least 1.
        max_tokens: keep the last tokens of longer prompts, at least 1.

    Raises:
        ConfigError: a line without a prompt (named by its number in the file), a file without any line, or one that has no lines.
        StorageError: the file cannot be read.
    """
    for name, value in (("limit", limit), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}: leave it out to have no limit")
    if url.lower().endswith(_NO_LINES):
        raise ConfigError(f"{url}: prompts are read from JSON Lines (.jsonl) or plain text, one a line")
    read = _from_object if url.lower().endswith(".jsonl") else _ids
    prompts: list[list[int]] = []
    # Lines end with a line feed alone: other separators (U+2028 and its like) may stand inside a JSON string.
    for number, line in enumerate(storage.read_bytes(url).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        try:
            ids = read(tokenizer, line.decode().rstrip("\r"))
        except ValueError as error:  # a ConfigError from below, or not UTF-8, or not JSON
            raise ConfigError(f"{url}:{number}: {error}") from error
        prompts.append(ids if max_tokens is None else ids[-max_tokens:])
    if not prompts:
        raise ConfigError(f"{url} holds no prompt")
    return prompts


def chat_prompt_ids(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, tools: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of a conversation up to where the model should answer: everything before the last assistant turn.

    Raises:
        ConfigError: messages that are no conversation, no message before the answer, or a template that refuses it.
    """
    if not isinstance(messages, list | tuple) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
    ):
        raise ConfigError(f"messages must be a list of objects with a role, got {_short(messages)}")
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    if last == 0:
        raise ConfigError("a conversation needs a message before the assistant's")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages[:last]],
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            **(template_kwargs or {}),
        )
    except Exception as error:  # a template is code of the model's author: it may fail in any way
        raise ConfigError(f"the target's chat template cannot render it: {type(error).__name__}: {error}") from error
    return _ids(tokenizer, text, special=False)


def _from_object(tokenizer: Any, line: str) -> list[int]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ConfigError(f"a line must be an object with messages, prompt or text, got {_short(row)}")
    if "messages" in row:
        extra = row.get("chat_template_kwargs") or {}
        if not isinstance(extra, dict):
            raise ConfigError(f"chat_template_kwargs must be an object, got {_short(extra)}")
        return chat_prompt_ids(row["messages"], tokenizer, tools=row.get("tools") or None, template_kwargs=extra)
    text = row.get("prompt", row.get("text"))
    if text is None:
        raise ConfigError(f"the line has none of messages, prompt, text: {sorted(row)}")
    if not isinstance(text, str):
        raise ConfigError(f"a prompt must be a string, got {_short(text)}")
    return _ids(tokenizer, text)


def _ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    text.encode()  # a lone surrogate, which JSON can spell, is no text: a ValueError
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    if not ids:
        raise ConfigError(f"the prompt {text!r} has no tokens")
    return ids


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
