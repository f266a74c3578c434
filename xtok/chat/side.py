"""One model's side of a chat: its template, what that template needs, and the rules it is read under.

`ChatSide` turns a canonical conversation into the messages this template wants (developer role, form of tool arguments) and into
rendered text. Nothing here knows tokens; where the final turn stands is decided in `structure` and `native`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, NoReturn

import numpy as np

from schemas.tables import RejectReason
from xtok.chat.conversation import Conversation, engines_differ, strings_of
from xtok.chat.fast_render import ProvenRenderer, RenderArguments
from xtok.chat.messages import ARGUMENTS_TEXT
from xtok.chat.templates import ReferenceRenderer, TemplateFailure, template_variables
from xtok.errors import ConfigError, RowRefused
from xtok.tokenizers import TokenizerAdapter

__all__ = ["ChatOptions", "ChatSide", "RegionName", "TemplateTraits"]

RegionName = Literal["reasoning", "close", "answer", "eot"]
REGION_NAMES: tuple[RegionName, ...] = ("reasoning", "close", "answer", "eot")
_FIXED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt")
# Marks of thinking and tools, which messages may hold whether or not a tokenizer lists them as special.
PLAIN_MARKS = frozenset(f"<{slash}{name}>" for name in ("think", "tool_call", "tool_response") for slash in ("", "/"))
# Switches by which templates keep the reasoning they are given; only those a template reads are passed.
_NATIVE_SWITCHES: Mapping[str, Any] = {
    "enable_thinking": True,
    "truncate_history_thinking": False,
    "preserve_thinking": True,
    "keep_thinking": True,
    "clear_thinking": False,
    "strip_thinking": False,
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What is supervised and aligned, the same for every side.

    include_thinking_in_loss: reasoning text and its closing mark too. native_thinking_alignment: ChatML regions, aligned one by one.
    kd_alignment_regions: the regions that take part in KD; None = all. ConfigError on combinations that mean nothing.
    """

    include_thinking_in_loss: bool = False
    native_thinking_alignment: bool = False
    kd_alignment_regions: tuple[RegionName, ...] | None = None

    def __post_init__(self) -> None:
        if self.native_thinking_alignment and not self.include_thinking_in_loss:
            raise ConfigError("native_thinking_alignment needs include_thinking_in_loss=True")
        if self.kd_alignment_regions is None:
            return
        if not self.native_thinking_alignment:
            raise ConfigError("kd_alignment_regions needs native_thinking_alignment=True")
        unknown = [name for name in self.kd_alignment_regions if name not in REGION_NAMES]
        if unknown or not self.kd_alignment_regions:
            raise ConfigError(f"kd_alignment_regions must name some of {REGION_NAMES}, got {list(self.kd_alignment_regions)}")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template was seen to want, by rendering tiny conversations.

    arguments_as_text: it joins tool arguments as a string (DeepSeek). developer_as_system: it passes over the developer role.
    content_as_parts: it shows content only as a list of parts (Idefics, LLaVA).
    """

    arguments_as_text: bool
    developer_as_system: bool
    content_as_parts: bool

    @classmethod
    def of(cls, reference: ReferenceRenderer, kwargs: Mapping[str, Any]) -> TemplateTraits:
        """Probe a template; it is never guessed from its source."""

        def shows(messages: list[dict[str, Any]], mark: str) -> bool:
            try:
                return mark in reference.render(messages, None, kwargs)
            except TemplateFailure:
                return False

        def with_call(arguments: Any) -> list[dict[str, Any]]:
            call = {"type": "function", "function": {"name": "probe_name", "arguments": arguments}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            answer = {"role": "assistant", "content": "a"}
            return [{"role": "user", "content": "q"}, turn, {"role": "tool", "content": "r"}, answer]

        def with_role(role: str) -> list[dict[str, Any]]:
            roles = ((role, "probe_text"), ("user", "q"), ("assistant", "a"))
            return [{"role": name, "content": content} for name, content in roles]

        def plain(as_parts: bool) -> list[dict[str, Any]]:
            turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "probe_text"}]
            return [{**turn, "content": _as_parts(turn["content"])} for turn in turns] if as_parts else turns

        arguments = {"probe_key": "probe_value"}
        return cls(
            not shows(with_call(arguments), "probe_value") and shows(with_call(json.dumps(arguments)), "probe_value"),
            not shows(with_role("developer"), "probe_text") and shows(with_role("system"), "probe_text"),
            not shows(plain(False), "probe_text") and shows(plain(True), "probe_text"),
        )


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


class ChatSide:
    """A tokenizer with a chat template, ready to render.

    name: "student" or "teacher=<i>", as in refusals. template: text of a template over the tokenizer's own. render_date: the day
    the template's clock shows. engine, proof_every: see `ProvenRenderer`. ConfigError without a template or with reserved kwargs.
    """

    def __init__(
        self,
        adapter: TokenizerAdapter,
        *,
        name: str,
        render_date: date,
        options: ChatOptions | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        allow_special_tokens_in_content: bool = False,
        accept_dropped_reasoning: bool = False,
        context_length: int | None = None,
        engine: Literal["auto", "jinja"] = "auto",
        proof_every: int = 200,
    ) -> None:
        source = template or adapter.chat_template
        if not source:
            raise ConfigError(f"{name}: {adapter.name} has no chat template; set chat_template to a file with one")
        self.adapter = adapter
        self.name = name
        self.options = options or ChatOptions()
        self.template_kwargs = dict(template_kwargs or {})
        taken = sorted(set(self.template_kwargs) & set(_FIXED_KWARGS))
        if taken:
            raise ConfigError(f"{name}: chat_template_kwargs may not set {taken}; they come from the row")
        self._by_reference = engines_differ([], None, self.template_kwargs)
        self.allow_special_tokens_in_content = allow_special_tokens_in_content
        self.accept_dropped_reasoning = accept_dropped_reasoning
        self.context_length = context_length
        try:
            self.renderer = ProvenRenderer(
                source, render_date=render_date, special_tokens=adapter.special_tokens, engine=engine, proof_every=proof_every
            )
        except Exception as error:
            raise ConfigError(f"{name}: the chat template of {adapter.name} does not compile: {error}") from error
        known = template_variables(source)
        self.native_switches = {key: value for key, value in _NATIVE_SWITCHES.items() if key in known}
        self.traits = TemplateTraits.of(self.renderer.reference, self.template_kwargs)
        control = {token_id: text.decode() for token_id, text in adapter.table.special_content.items() if text}
        control = {token_id: text for token_id, text in control.items() if text not in PLAIN_MARKS}
        self.special_mark = _any_of(control.values())
        self.is_control = np.zeros(adapter.table.vocab_size, dtype=bool)  # UNK stands for ordinary text
        self.is_control[[token_id for token_id in control if token_id != adapter.unk_token_id]] = True

    def shape(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Canonical messages as this template wants them; the same list where nothing has to change."""
        rename = self.traits.developer_as_system
        changes = ("tool_calls" in message or (rename and message["role"] == "developer") for message in messages)
        if not self.traits.content_as_parts and not any(changes):
            return messages
        return [self._shape_message(message) for message in messages]

    def kwargs_for(self, conversation: Conversation) -> dict[str, Any]:
        """Template arguments of one row: the side's, the row's over them, in native alignment the thinking switches over both."""
        forced = self.native_switches if self.options.native_thinking_alignment else {}
        return {**self.template_kwargs, **conversation.template_kwargs, **forced}

    def arguments_of(self, conversation: Conversation) -> RenderArguments:
        """What the renderer is given for a row, for the sample proof."""
        return self.shape(conversation.messages), conversation.tools, self.kwargs_for(conversation)

    def render(self, messages: list[dict[str, Any]], conversation: Conversation) -> str:
        """Text of shaped `messages` with the row's tools and arguments. RowRefused (template_error)."""
        by_reference = conversation.by_reference or self._by_reference
        try:
            return self.renderer.render(messages, conversation.tools, self.kwargs_for(conversation), by_reference=by_reference)
        except TemplateFailure as error:
            self.refuse(RejectReason.TEMPLATE_ERROR, f"the {self.name} template refuses it: {error}")

    def refuse(self, reason: str, message: str, *, stage: str = "render") -> NoReturn:
        """Raise RowRefused for this side."""
        raise RowRefused(reason, message, stage=stage, side=self.name)

    def check_marks(self, conversation: Conversation) -> None:
        """RowRefused where a message, a tool or a row argument holds the text of one of this tokenizer's special tokens."""
        if self.allow_special_tokens_in_content or self.special_mark is None or not self.special_mark.search(conversation.text):
            return
        for where, text in strings_of(conversation):
            found = self.special_mark.search(text)
            if found:
                self.refuse(
                    RejectReason.EMBEDDED_SPECIAL_TOKEN,
                    f"{where} holds {found[0]!r}, a special token of this side, which would turn into a control token; "
                    "remove it or set allow_special_tokens_in_content",
                )

    def _shape_message(self, message: dict[str, Any]) -> dict[str, Any]:
        shaped = dict(message)
        if self.traits.developer_as_system and shaped["role"] == "developer":
            shaped["role"] = "system"
        if self.traits.content_as_parts:
            shaped["content"] = _as_parts(shaped["content"])
        if "tool_calls" in shaped:
            shaped["tool_calls"] = [self._shape_call(call) for call in shaped["tool_calls"]]
        return shaped

    def _shape_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        text = function.pop(ARGUMENTS_TEXT, None)
        if self.traits.arguments_as_text:
            function["arguments"] = text or json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": function}


def _any_of(contents: Iterable[str]) -> re.Pattern[str] | None:
    texts = sorted(contents, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, texts))) if texts else None
