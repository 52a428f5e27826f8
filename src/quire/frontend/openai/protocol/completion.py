"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.openai.protocol.fields import Count, Text, TokenId, TokenIds
from quire.frontend.openai.protocol.sampling import GenerationBody, bound_of

Prompt = str | list[int]
DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody, kw_only=True):
    """A text, or several, to be continued."""

    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(max_length=1 << 24)] | None = None
    """Text, token ids, or a list of either."""
    echo: bool | None = False
    """Give the prompt back before the answer."""
    logprobs: Annotated[int, bound_of("logprobs")] | None = None
    """So many most likely tokens per position."""
    max_tokens: Count | None = DEFAULT_MAX_TOKENS
    """0 is allowed together with echo."""
    suffix: Text | None = None
    add_special_tokens: bool = True
    best_of: Annotated[int, bound_of("n")] | None = None
    prompt_embeds: Text | Annotated[list[Text], Meta(max_length=1024)] | None = None

    NEUTRAL = {**GenerationBody.NEUTRAL, "suffix": ("",), "prompt_embeds": ([],)}  # noqa: RUF012

    def prompts(self, max_num_prompts: int) -> list[Prompt]:
        """Each prompt as text or token ids. Raises ValidationError."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ValidationError(
                "prompt is missing or empty; give text, token ids, or a list of either", param="prompt"
            )
        kind = type(prompt[0])
        if any(type(item) is not kind for item in prompt):
            raise ValidationError("prompt mixes texts and token ids; give one kind", param="prompt")
        if kind is int:
            return [prompt]
        if len(prompt) > max_num_prompts:
            raise ValidationError(
                f"prompt holds {len(prompt)} prompts; a request may have {max_num_prompts} (--max-prompts-per-request)",
                param="prompt",
            )
        return list(prompt)
