"""The body of /v1/completions, and prompts in bodies: one or several, as text or token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.embeds import Embeds
from quire.frontend.http.bodies import Count, Text, TokenId, TokenIds
from quire.frontend.openai.protocol.sampling import GenerationBody, bound_of

Prompt = str | list[int] | Embeds
Prompts = Text | Annotated[list[Text | TokenId | TokenIds], Meta(max_length=1 << 24)]
"""Text, token ids, or a list of either."""


def as_prompts(value: Any, name: str, max_num_prompts: int) -> list[Prompt]:
    """Returns each prompt of the field `name`, whose type is `Prompts`. Raises ValidationError."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise ValidationError(f"{name} is missing or empty; give text, token ids, or a list of either", param=name)
    kind = type(value[0])
    if any(type(item) is not kind for item in value):
        raise ValidationError(f"{name} mixes texts and token ids; give one kind", param=name)
    if kind is int:
        return [value]
    if len(value) > max_num_prompts:
        raise ValidationError(
            f"{name} holds {len(value)} prompts; a request may have {max_num_prompts} (--max-prompts-per-request)",
            param=name,
        )
    return list(value)


DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody, kw_only=True):
    """Body of /v1/completions: one or several texts to be continued."""

    prompt: Prompts | None = None
    """Text, token ids, or a list of either."""
    echo: bool | None = False
    """true: the answer begins with the prompt."""
    logprobs: Annotated[int, bound_of("logprobs")] | None = None
    """Number of most likely tokens per position."""
    max_tokens: Count | None = DEFAULT_MAX_TOKENS
    """0 is allowed together with echo."""
    suffix: Text | None = None
    add_special_tokens: bool = True
    best_of: Annotated[int, bound_of("n")] | None = None
    prompt_embeds: Text | Annotated[list[Text], Meta(max_length=1024)] | None = None
    """Prompts as embeddings, before those of `prompt`: base64 of a safetensors or .npy file, or a list of them."""

    EXAMPLE = {"prompt": "A quire is", "max_tokens": 20}  # noqa: RUF012
    NEUTRAL = {**GenerationBody.NEUTRAL, "suffix": ("",), "thinking_token_budget": (-1,)}  # noqa: RUF012

    def prompts(self, max_num_prompts: int, decode_embeds: Callable[[str], Embeds]) -> list[Prompt]:
        """Returns each prompt as embeddings, text or token ids. Raises ValidationError."""
        payloads = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []
        if not payloads:
            return as_prompts(self.prompt, "prompt", max_num_prompts)
        if self.echo:
            raise ValidationError("echo repeats a text, and prompt_embeds have none; leave it out", param="echo")
        others = as_prompts(self.prompt, "prompt", max_num_prompts) if self.prompt else []
        if len(payloads) + len(others) > max_num_prompts:
            raise ValidationError(
                f"prompt_embeds and prompt hold {len(payloads) + len(others)} prompts; a request may have "
                f"{max_num_prompts} (--max-prompts-per-request)",
                param="prompt_embeds",
            )
        return [*map(decode_embeds, payloads), *others]
