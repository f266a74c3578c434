"""Rows to rendered chats, one at a time or a whole part: one function for the online collator and the offline pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.tables import RejectReason
from xtok.chat.conversation import Conversation
from xtok.chat.native import render_native
from xtok.chat.rendered import RenderedChat, RenderedPart
from xtok.chat.side import ChatSide
from xtok.chat.structure import render_ordinary
from xtok.chat.structure_cache import StructureCache
from xtok.errors import RowRefused

__all__ = ["ChatRenderer"]


class ChatRenderer:
    """Renders conversations for one side. Holds what was learnt of its template; results do not depend on the order of rows.

    probe_always: place every row by its own probe, with nothing remembered (the reference).
    """

    def __init__(self, side: ChatSide, *, probe_always: bool = False) -> None:
        self.side = side
        mark = None if side.allow_special_tokens_in_content else side.special_mark
        self.structures = StructureCache(mark, side.renderer.proof_every)
        if probe_always:
            self.structures.difference = "every row is probed on request"

    def render_row(self, conversation: Conversation) -> RenderedChat:
        """Text and places of one conversation. RowRefused with this side's name."""
        if conversation.final["role"] != "assistant":
            role = conversation.final["role"]
            self.side.refuse(
                RejectReason.NO_FINAL_ASSISTANT,
                f"the last message is of role {role!r}; only a final assistant turn is supervised",
            )
        if self.side.options.native_thinking_alignment:
            return render_native(self.side, conversation)
        return render_ordinary(self.side, conversation, self.structures)

    def render_part(self, conversations: Sequence[Conversation | None]) -> RenderedPart:
        """All rows of a part; None (a row refused before) gives neither a chat nor a refusal.

        Where a continuing proof (minijinja against Jinja, a remembered structure against the probe) fails on the way, the part is
        rendered again without the shortcut, so that no row of it rests on what was disproved.
        """
        before = self.differences
        part = self._render_all(conversations)
        while self.differences != before:
            before = self.differences
            part = self._render_all(conversations)
        return part

    def prove(self, conversations: Sequence[Conversation]) -> bool:
        """Sample proof of the fast engine on the user's own rows; False when it was put out of use."""
        return self.side.renderer.prove(self.side.arguments_of(conversation) for conversation in conversations)

    def _render_all(self, conversations: Sequence[Conversation | None]) -> RenderedPart:
        chats: list[RenderedChat | None] = []
        refusals: list[RowRefused | None] = []
        for conversation in conversations:
            chat, refusal = None, None
            if conversation is not None:
                try:
                    chat = self.render_row(conversation)
                except RowRefused as error:
                    refusal = error.with_traceback(None)
            chats.append(chat)
            refusals.append(refusal)
        return RenderedPart(self.side.name, chats, refusals)

    @property
    def differences(self) -> tuple[str | None, str | None]:
        """Why minijinja, and remembered structures, are out of use; None for each that is in use."""
        return self.side.renderer.difference, self.structures.difference
