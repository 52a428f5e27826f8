"""The body of /v1/chat/completions/batch: several conversations, and everything else once."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.openai.protocol.chat import MAX_MESSAGES, ChatBody, Messages


class BatchChatBody(ChatBody, kw_only=True):
    """Conversations to be answered, each as /v1/chat/completions would; no streams and no tools."""

    messages: Annotated[list[Messages], Meta(max_length=MAX_MESSAGES)]  # type: ignore[assignment]  # read, never passed on
    """One list of messages for each conversation."""

    EXAMPLE = {  # noqa: RUF012 - a ClassVar of the base class
        "messages": [[{"role": "user", "content": "What is a quire?"}], [{"role": "user", "content": "And a choir?"}]],
        "max_tokens": 40,
    }
    NEUTRAL = {  # noqa: RUF012
        **ChatBody.NEUTRAL,
        "stream": (False,),
        "stream_options": (),
        "tools": ([],),
        "tool_choice": ("none",),
    }

    def conversations(self, max_num: int) -> list[ChatBody]:
        """Each conversation as a request of its own. Raises ValidationError for none, or too many."""
        if not 0 < len(self.messages) <= max_num:
            raise ValidationError(
                f"messages holds {len(self.messages)} conversations; a batch has 1 to {max_num} "
                "(--max-prompts-per-request)",
                param="messages",
            )
        shared = {name: getattr(self, name) for name in ChatBody.__struct_fields__ if name != "messages"}
        return [ChatBody(messages=messages, **shared) for messages in self.messages]
