"""One model's side of a chat run inside a worker: described for the plan, and ready to render and encode under proof."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.config import ModelSide, PreprocessConfig
from schemas.plan import PlannedSide
from schemas.tables import reject_side
from xtok.chat import (
    ChatFields,
    ChatOptions,
    ChatRenderer,
    ChatSide,
    Conversation,
    LocatedPart,
    RenderedPart,
    locate_tokens,
    texts_of,
)
from xtok.chat.places import IdsDiffer
from xtok.shards.sides import Backend, BackendDiffers, LoadedSide, SideJob, describe_side, load_side
from xtok.tokenizers import TokenizerAdapter

__all__ = ["ChatSideJob", "LoadedChatSide", "RendererDiffers", "chat_fields", "describe_chat_side", "same_chat_side"]

_FAST = "minijinja"


class RendererDiffers(BackendDiffers):
    """The fast engine rendered otherwise than Jinja, or a remembered structure was wrong: the part is to be done again."""


def chat_fields(config: PreprocessConfig) -> ChatFields:
    """The fields that chats are read from."""
    return ChatFields(
        messages=config.messages_field,
        conversations=config.conversations_field,
        prompt=config.prompt_field,
        completion=config.completion_field,
        system=config.system_field,
        tools=config.tools_field,
        template_kwargs=config.chat_template_kwargs_field,
    )


@dataclass(frozen=True, slots=True)
class ChatSideJob:
    """What `describe_chat_side` needs. sample: conversations of the user's own data."""

    label: str
    side: ModelSide
    backend: Backend
    sample: tuple[Conversation, ...]
    options: ChatOptions
    render_date: datetime.date
    proof_every: int
    drop_first_chunk: bool

    @classmethod
    def of(
        cls,
        label: str,
        side: ModelSide,
        config: PreprocessConfig,
        render_date: datetime.date,
        sample: Sequence[Conversation],
        *,
        drop_first_chunk: bool,
    ) -> ChatSideJob:
        """The job of one side of a configuration."""
        options = chat_options(config)
        return cls(label, side, config.backend, tuple(sample), options, render_date, config.proof_every, drop_first_chunk)


def chat_options(config: PreprocessConfig) -> ChatOptions:
    """What is supervised and aligned, the same for every side."""
    return ChatOptions(config.include_thinking_in_loss, config.native_thinking_alignment, config.kd_alignment_regions)


def describe_chat_side(job: ChatSideJob) -> PlannedSide:
    """The side as the plan records it; renderer and tokenizer backend chosen by proof on the sample.

    Raises ConfigError for a tokenizer without a usable template; else as `describe_side`.
    """
    side = job.side.model_copy(update={"add_special_tokens": False})  # the template writes its own
    adapter = load_side(side)
    renderer = ChatRenderer(_chat_side(side, adapter, job.label, job.options, job.render_date, job.proof_every, fast=True))
    renderer.prove(job.sample)
    sample = tuple(text for text in texts_of(renderer.render_part(job.sample)) if text)
    planned = describe_side(SideJob(job.label, side, job.backend, sample))
    difference, _ = renderer.differences
    chat = {
        "template_sha256": hashlib.sha256(renderer.side.renderer.reference.source.encode()).hexdigest(),
        "template_kwargs": side.chat_template_kwargs,
        "allow_special_tokens_in_content": side.allow_special_tokens_in_content,
        "accept_dropped_reasoning": side.accept_dropped_reasoning,
        "drop_first_chunk": job.drop_first_chunk,
    }
    return planned.model_copy(update={"chat": chat, "renderer": renderer.side.renderer.name, "renderer_note": difference})


def same_chat_side(student: PlannedSide, teacher: PlannedSide) -> bool:
    """True when the teacher is shown exactly the student's ids for every row the student accepts."""
    sees_the_same = all(student.chat[name] == teacher.chat[name] for name in ("template_sha256", "template_kwargs"))
    accepts_as_much = all(
        teacher.chat[name] or not student.chat[name] for name in ("allow_special_tokens_in_content", "accept_dropped_reasoning")
    )
    return (
        teacher.content_fingerprint == student.content_fingerprint
        and sees_the_same
        and accepts_as_much
        and teacher.context_length >= student.context_length
    )


def _chat_side(
    side: ModelSide,
    adapter: TokenizerAdapter,
    name: str,
    options: ChatOptions,
    render_date: datetime.date,
    proof_every: int,
    *,
    fast: bool,
) -> ChatSide:
    return ChatSide(
        adapter,
        name=name,
        render_date=render_date,
        options=options,
        template_kwargs=side.chat_template_kwargs,
        allow_special_tokens_in_content=side.allow_special_tokens_in_content,
        accept_dropped_reasoning=side.accept_dropped_reasoning,
        context_length=side.context_length,
        engine="auto" if fast else "jinja",
        proof_every=proof_every,
    )


class LoadedChatSide(LoadedSide):
    """One side ready to render, encode and locate.

    What was learnt of the template is forgotten after a part, so that no part's record depends on what its worker did before.
    reference: tokenize with the reference; by_jinja: render with Jinja and probe every row. Each after a difference was found.
    """

    def __init__(
        self,
        config: PreprocessConfig,
        side: ModelSide,
        planned: PlannedSide,
        index: int | None,
        render_date: datetime.date,
        *,
        reference: bool,
        by_jinja: bool,
    ) -> None:
        super().__init__(side, planned, index, config.proof_every, reference=reference)
        fast = planned.renderer == _FAST and not by_jinja
        chat_side = _chat_side(
            side, self.adapter, reject_side(index), chat_options(config), render_date, config.proof_every, fast=fast
        )
        self.renderer = ChatRenderer(chat_side, probe_always=by_jinja)
        self._proofs = self.renderer.differences

    def render(self, conversations: Sequence[Conversation | None]) -> RenderedPart:
        """Rows rendered by this side's template, or refused. Raises RendererDiffers."""
        part = self.renderer.render_part(conversations)
        if self.renderer.differences != self._proofs:
            raise RendererDiffers(self.index, next(note for note in self.renderer.differences if note is not None))
        return part

    def locate(self, part: RenderedPart) -> LocatedPart:
        """The rendered rows in tokens. Raises BackendDiffers."""
        try:
            return locate_tokens(self.renderer.side, part, self.encode(texts_of(part)))
        except IdsDiffer as found:
            raise BackendDiffers(self.index, str(found)) from found
