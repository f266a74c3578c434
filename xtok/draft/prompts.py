"""Prompts for evaluation: a file of texts or chats to token ids.

A line of a `.jsonl` file is an object with `messages` (rendered with the target's chat template up to the last assistant turn),
`prompt` or `text`; any other file holds one plain prompt a line.
"""

from __future__ import annotations

import json
from typing import Any

from xtok import storage
from xtok.errors import ConfigError

__all__ = ["chat_prompt_ids", "read_prompts"]


def read_prompts(url: str, tokenizer: Any, *, limit: int | None = None, max_tokens: int | None = None) -> list[list[int]]:
    """Token ids of each prompt, in file order.

    Args:
        url: the file.
        tokenizer: the target's transformers tokenizer.
        limit: first prompts only.
        max_tokens: keep the last tokens of longer prompts.

    Raises:
        ConfigError: a line without a prompt, or a file without any line.
        StorageError: the file cannot be read.
    """
    lines = [line for line in storage.read_bytes(url).decode().splitlines() if line.strip()]
    prompts = []
    for number, line in enumerate(lines[:limit], start=1):
        ids = _encode(json.loads(line), tokenizer, f"{url}:{number}") if url.endswith(".jsonl") else _ids(tokenizer, line)
        prompts.append(ids[-max_tokens:] if max_tokens else ids)
    if not prompts:
        raise ConfigError(f"{url} holds no prompt")
    return prompts


def chat_prompt_ids(messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Ids of a conversation up to where the model should answer: everything before the last assistant turn.

    Raises:
        ConfigError: no message before the answer.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=len(messages))
    if last == 0:
        raise ConfigError("a conversation needs a message before the assistant's")
    return _ids(tokenizer, tokenizer.apply_chat_template(messages[:last], tokenize=False, add_generation_prompt=True), special=False)


def _encode(row: dict[str, Any], tokenizer: Any, place: str) -> list[int]:
    if "messages" in row:
        return chat_prompt_ids(row["messages"], tokenizer)
    text = row.get("prompt", row.get("text"))
    if not text:
        raise ConfigError(f"{place} has none of messages, prompt, text: {sorted(row)}")
    return _ids(tokenizer, text)


def _ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    if not ids:
        raise ConfigError(f"the prompt {text!r} has no tokens")
    return ids
