"""The bodies of the routes of pooling models: embeddings, classes, scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.field_bounds import INT64_MAX
from quire.frontend.openai.protocol.fields import Int64, Name, PositiveCount, RequestBody, Text
from quire.frontend.openai.protocol.prompts import Prompts
from quire.frontend.prompts import MAX_CACHE_SALT_CHARS
from quire.pooling_params import PoolingParams

Texts = Text | Annotated[list[Text], Meta(max_length=1 << 20)]
EncodingFormat = Literal["float", "base64"]


class PoolingBody(RequestBody, kw_only=True):
    """What all of them read."""

    model: Name | None = None
    """One of /v1/models; may be left out."""
    user: Name | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    """Cut longer texts to so many tokens; -1: to as many as the model takes. Otherwise they are refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Where they are cut; default: right."""
    add_special_tokens: bool = True
    use_activation: bool | None = None
    """Normalise embeddings, or turn scores into probabilities; default: as the model's files say."""
    priority: Int64 = 0
    """Smaller is served first, where the server schedules by priority."""
    request_id: Name | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Only requests with the same salt share cached prefixes."""

    def tokenization(self) -> dict[str, Any]:
        """The `tokenization_kwargs` of the request."""
        options: dict[str, Any] = {"add_special_tokens": self.add_special_tokens}
        for name in ("truncate_prompt_tokens", "truncation_side"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        return options

    def params(self, task: str) -> PoolingParams:
        """What the engine is asked for."""
        return PoolingParams(task=task, use_activation=self.use_activation)


class EmbeddingBody(PoolingBody, kw_only=True):
    """Texts to be embedded."""

    input: Prompts
    """Text, token ids, or a list of either."""
    encoding_format: EncodingFormat = "float"
    """base64: of little-endian float32 numbers."""
    dimensions: PositiveCount | None = None
    """Cut embeddings to so many numbers, where the model was trained for it."""
    normalize: bool | None = None
    """The older name of use_activation."""
    embed_dtype: Name | None = None
    endianness: Name | None = None

    NEUTRAL = {"embed_dtype": ("float32",), "endianness": ("native", "little")}  # noqa: RUF012

    def params(self, task: str) -> PoolingParams:
        """See PoolingBody."""
        activates = self.normalize if self.use_activation is None else self.use_activation
        return PoolingParams(task=task, use_activation=activates, dimensions=self.dimensions)


class PoolBody(EmbeddingBody, kw_only=True):
    """Texts to be pooled in any way the model does."""

    task: Literal["embed", "token_embed", "classify", "token_classify", "score"] | None = None
    """Default: what the model does."""


class ClassifyBody(PoolingBody, kw_only=True):
    """Texts to be put into classes."""

    input: Prompts
    """Text, token ids, or a list of either."""


class ScoreBody(PoolingBody, kw_only=True):
    """Pairs of texts: one and several, or as many of each."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    """Another name of text_1."""
    data_2: Texts | None = None
    """Another name of text_2."""

    def texts(self) -> tuple[str | list[str], str | list[str]]:
        """Both sides. Raises ValidationError where one is missing."""
        first = self.data_1 if self.text_1 is None else self.text_1
        second = self.data_2 if self.text_2 is None else self.text_2
        for name, given in (("text_1", first), ("text_2", second)):
            if given is None:
                raise ValidationError(f"{name} is missing; it is required", param=name)
        assert first is not None
        assert second is not None
        return first, second


class TextDocument(msgspec.Struct):
    """A document, as Cohere's clients write it."""

    text: Text


class RerankBody(PoolingBody, kw_only=True):
    """A question, and documents to be put in order."""

    query: Text
    documents: Annotated[list[Text | TextDocument], Meta(max_length=1 << 20)]
    """Texts, or objects with a text."""
    top_n: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    """Only so many of the best; 0 or none: all."""
    return_documents: bool | None = True

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]
