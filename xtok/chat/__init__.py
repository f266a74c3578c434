"""Raw messages to what each model is shown: rendered text, ids, and the exact place of the final turn in them.

    renderer = ChatRenderer(ChatSide(adapter, name="student", render_date=date(2025, 1, 2)))
    conversation = conversation_from_row({"messages": [...], "tools": [...]})
    document = render_document(renderer, conversation)                  # one chat, as the online collator works
    student = locate_conversations(renderer, conversations)             # a whole part, as the offline pipeline works
    alignment = align_chats(student, teacher)                           # the two sides' final turns

Never imports torch.
"""

from __future__ import annotations

from xtok.chat.alignment import ChatAlignment, align_chats
from xtok.chat.conversation import Conversation
from xtok.chat.document import RenderedChatDocument, documents_of, locate_conversations, render_document
from xtok.chat.locate import LocatedPart, locate_tokens, texts_of
from xtok.chat.messages import ChatFields, conversation_from_row, normalize_messages
from xtok.chat.render import ChatRenderer
from xtok.chat.rendered import RegionSpan, RenderedChat, RenderedPart
from xtok.chat.select import keep_rows
from xtok.chat.side import ChatOptions, ChatSide

__all__ = [
    "ChatAlignment",
    "ChatFields",
    "ChatOptions",
    "ChatRenderer",
    "ChatSide",
    "Conversation",
    "LocatedPart",
    "RegionSpan",
    "RenderedChat",
    "RenderedChatDocument",
    "RenderedPart",
    "align_chats",
    "conversation_from_row",
    "documents_of",
    "keep_rows",
    "locate_conversations",
    "locate_tokens",
    "normalize_messages",
    "render_document",
    "texts_of",
]
