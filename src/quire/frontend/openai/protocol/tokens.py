"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from quire.errors import ValidationError
from quire.frontend.http.bodies import Name, Object, RequestBody, Text, TokenIds
from quire.frontend.openai.protocol.chat import Messages
from quire.frontend.openai.protocol.tools import Tools


class TokenizeBody(RequestBody, kw_only=True):
    """A text, or a conversation: one of `prompt` and `messages`."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    """Offered in the conversation."""
    add_special_tokens: bool | None = None
    """Default: true for a text, false for a conversation, whose template writes them."""
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: Object | None = None
    media_io_kwargs: Object | None = None
    mm_processor_kwargs: Object | None = None

    EXAMPLE = {"prompt": "A quire is a gathering of pages."}  # noqa: RUF012
    NEUTRAL = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}  # noqa: RUF012

    def check_form(self) -> None:
        """Raises ValidationError unless there is one of the two."""
        if (self.prompt is None) == (self.messages is None):
            raise ValidationError("give either prompt or messages", param="prompt")


class DetokenizeBody(RequestBody, kw_only=True):
    """Token ids whose text is wanted."""

    model: Name | None = None
    tokens: TokenIds

    EXAMPLE = {"tokens": [100, 101, 102]}  # noqa: RUF012
