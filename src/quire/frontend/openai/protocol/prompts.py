"""Prompts in a body: one or several, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import Text, TokenId, TokenIds

Prompt = str | list[int]
Prompts = Text | Annotated[list[Text | TokenId | TokenIds], Meta(max_length=1 << 24)]
"""Text, token ids, or a list of either."""


def as_prompts(value: Any, name: str, max_num_prompts: int) -> list[Prompt]:
    """Each prompt of the field `name`, which is of the type `Prompts`. Raises ValidationError."""
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
