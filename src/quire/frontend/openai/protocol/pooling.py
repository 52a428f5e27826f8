"""The bodies of the routes for pooling models: embeddings, classes, scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.field_bounds import INT64_MAX
from quire.frontend.http.bodies import Int64, Name, Object, PositiveCount, RequestBody, Text
from quire.frontend.new_request import MAX_CACHE_SALT_CHARS
from quire.frontend.openai.protocol.chat import Messages
from quire.frontend.openai.protocol.completion import Prompts
from quire.pooling_params import PoolingParams

EncodingFormat = Literal["float", "base64"]


class PoolingBody(RequestBody, kw_only=True):
    """Common fields of all bodies for pooling models."""

    model: Name | None = None
    """One of /v1/models; may be left out."""
    user: Name | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    """Length in tokens to which longer texts are cut; -1: as many as the model takes. Default: they are refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which longer texts are cut; default: right."""
    use_activation: bool | None = None
    """true: embeddings are normalised, scores become probabilities. Default: as the model's files say."""
    priority: Int64 = 0
    """Smaller is served first, where the server schedules by priority."""
    request_id: Name | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Only requests with the same salt share cached prefixes."""

    @property
    def adds_special_tokens(self) -> bool:
        """True: the tokenizer adds the special tokens at both ends of a text."""
        return True

    def tokenization(self) -> dict[str, Any]:
        """Returns the `tokenization_kwargs` of the request."""
        options: dict[str, Any] = {"add_special_tokens": self.adds_special_tokens}
        for name in ("truncate_prompt_tokens", "truncation_side"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        return options

    def params(self, task: str) -> PoolingParams:
        """Returns the parameters for the engine."""
        return PoolingParams(task=task, use_activation=self.use_activation)


class InputBody(PoolingBody, kw_only=True):
    """Fields of bodies with texts or a conversation: one of `input` and `messages`."""

    input: Prompts | None = None
    """Text, token ids, or a list of either."""
    messages: Messages | None = None
    """A conversation instead, which becomes one prompt through the model's chat template."""
    add_special_tokens: bool | None = None
    """Default: true for texts, false for a conversation, whose template writes them."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: Text | None = None
    """Refused unless the server trusts it (--trust-request-chat-template)."""
    chat_template_kwargs: Object | None = None
    """Further variables of the template."""
    media_io_kwargs: Object | None = None
    mm_processor_kwargs: Object | None = None

    EXAMPLE = {"input": ["A quire is a gathering of pages.", "A choir sings."]}  # noqa: RUF012
    NEUTRAL = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}  # noqa: RUF012

    @property
    def adds_special_tokens(self) -> bool:
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def check_form(self) -> None:
        """Raises ValidationError unless exactly one of `input` and `messages` is set."""
        if self.input is None and self.messages is None:
            raise ValidationError("input is missing; give it (texts or token ids), or messages", param="input")
        if self.input is not None and self.messages is not None:
            raise ValidationError("give either input or messages, not both", param="messages")


class EmbeddingBody(InputBody, kw_only=True):
    """Body of /v1/embeddings."""

    encoding_format: EncodingFormat = "float"
    """base64: encodes little-endian float32 numbers."""
    dimensions: PositiveCount | None = None
    """Cut embeddings to so many numbers, where the model was trained for it."""
    normalize: bool | None = None
    """The older name of use_activation."""
    embed_dtype: Name | None = None
    """float32 is the only value."""
    endianness: Name | None = None
    """Byte order of base64; little is the only value."""

    NEUTRAL = {  # noqa: RUF012
        **InputBody.NEUTRAL,
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    def params(self, task: str) -> PoolingParams:
        activates = self.normalize if self.use_activation is None else self.use_activation
        return PoolingParams(task=task, use_activation=activates, dimensions=self.dimensions)


class PoolBody(EmbeddingBody, kw_only=True):
    """Body of /pooling: texts for any task of the model."""

    task: Literal["embed", "token_embed", "classify", "token_classify", "score"] | None = None
    """Task; default: the model's first."""


class ClassifyBody(InputBody, kw_only=True):
    """Body of /classify."""


class TextPart(msgspec.Struct):
    """Part of a text, in the form of messages."""

    type: Literal["text"]
    text: Text


class TextItem(msgspec.Struct):
    """A text as an object: Cohere's clients write `text`, others a list of parts as `content`."""

    text: Text | None = None
    content: Annotated[list[TextPart], Meta(max_length=1 << 16)] | None = None


Items = Annotated[list[Text | TextItem], Meta(max_length=1 << 20)]


def texts_of(items: Sequence[str | TextItem], name: str) -> list[str]:
    """Returns the text of each item. Raises ValidationError for an object with no text, or two."""
    return [item if isinstance(item, str) else _text_of(item, name) for item in items]


def _text_of(item: TextItem, name: str) -> str:
    if (item.text is None) == (item.content is None):
        raise ValidationError(f"{name}: an object must have text, or content with parts of text", param=name)
    return item.text if item.text is not None else "\n".join(part.text for part in item.content or ())


class PairBody(PoolingBody, kw_only=True):
    """Common fields of bodies with pairs of texts."""

    add_special_tokens: bool = True

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens


class ScoreBody(PairBody, kw_only=True):
    """Body of /score: one text and several, or as many of each."""

    text_1: Text | TextItem | Items | None = None
    """A text, an object with one, or a list of either."""
    text_2: Text | TextItem | Items | None = None
    data_1: Text | TextItem | Items | None = None
    """Another name of text_1."""
    data_2: Text | TextItem | Items | None = None
    """Another name of text_2."""

    EXAMPLE = {"text_1": "What is a quire?", "text_2": ["A gathering of pages.", "A song."]}  # noqa: RUF012

    def texts(self) -> tuple[list[str], list[str]]:
        """Returns both sides. Raises ValidationError where one is missing."""
        first = self.data_1 if self.text_1 is None else self.text_1
        second = self.data_2 if self.text_2 is None else self.text_2
        for name, given in (("text_1", first), ("text_2", second)):
            if given is None:
                raise ValidationError(f"{name} is missing; it is required", param=name)
        assert first is not None
        assert second is not None
        sides = [side if isinstance(side, list) else [side] for side in (first, second)]
        return texts_of(sides[0], "text_1"), texts_of(sides[1], "text_2")


class RerankBody(PairBody, kw_only=True):
    """Body of /rerank: a query, and documents to be ordered."""

    query: Text | TextItem
    """A text, or an object with one."""
    documents: Items
    """Texts, or objects with a text."""
    top_n: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    """Number of best documents to return; 0 or null: all."""
    return_documents: bool | None = True

    EXAMPLE = {"query": "What is a quire?", "documents": ["A gathering of pages.", "A song."]}  # noqa: RUF012

    def question(self) -> str:
        """Returns the query's text."""
        return texts_of([self.query], "query")[0]

    def texts(self) -> list[str]:
        """Returns the documents' texts."""
        return texts_of(self.documents, "documents")


class CohereInput(msgspec.Struct):
    """An input as a list of parts."""

    content: Annotated[list[TextPart], Meta(max_length=1 << 16)]


class CohereEmbedBody(RequestBody, kw_only=True):
    """Body of /v2/embed, Cohere's API: one of `texts` and `inputs`."""

    model: Name | None = None
    """One of /v1/models; may be left out."""
    texts: Annotated[list[Text], Meta(max_length=1 << 20)] | None = None
    inputs: Annotated[list[CohereInput], Meta(max_length=1 << 20)] | None = None
    """Objects with content: parts of text, which become one text."""
    images: Annotated[list[Text], Meta(max_length=1 << 10)] | None = None
    input_type: Name | None = None
    """Purpose of the texts: search_document, search_query, classification, clustering. It selects the prefix of each
    text where the model's config_sentence_transformers.json has `prompts`, whose names are accepted, too."""
    embedding_types: (
        Annotated[
            list[Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]], Meta(min_length=1, max_length=16)
        ]
        | None
    ) = None
    """float (default); base64 of little-endian float32; ubinary: one bit per number, set if it is above 0, the first in
    a byte's highest bit; binary: the same bytes minus 128. int8 and uint8 are refused."""
    output_dimension: PositiveCount | None = None
    """Cut embeddings to so many numbers, where the model was trained for it."""
    max_tokens: PositiveCount | None = None
    """Length in tokens to which longer texts are cut; default: as many as the model takes."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """End at which a text that is too long is cut; NONE: it is refused."""
    priority: Int64 = 0
    """Smaller is served first, where the server schedules by priority."""

    EXAMPLE = {"texts": ["A quire is a gathering of pages."]}  # noqa: RUF012
    NEUTRAL = {"images": ([],)}  # noqa: RUF012

    def given_texts(self) -> list[str]:
        """Returns the texts. Raises ValidationError unless exactly one of the two is set, and not empty."""
        if (self.texts is None) == (self.inputs is None):
            raise ValidationError("give either texts or inputs", param="texts")
        texts = self.texts or ["\n".join(part.text for part in item.content) for item in self.inputs or ()]
        if not texts:
            name = "texts" if self.inputs is None else "inputs"
            raise ValidationError(f"{name} is empty; give at least one", param=name)
        return texts

    def kinds(self) -> list[str]:
        """Returns the forms of the embeddings. Raises ValidationError for unsupported ones."""
        for kind in self.embedding_types or ():
            if kind in ("int8", "uint8"):
                raise ValidationError(
                    f"embedding_types holds {kind}, which needs the range of each number over many texts, and no model "
                    "tells it; ask for float, base64, binary or ubinary",
                    param="embedding_types",
                    value=kind,
                )
        return [*(self.embedding_types or ["float"])]

    def as_embedding(self, max_model_len: int) -> EmbeddingBody:
        """Returns the other fields as an `EmbeddingBody`. Raises ValidationError."""
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise ValidationError('max_tokens cuts texts, and truncate "NONE" forbids it', param="max_tokens")
        keep = -1 if self.max_tokens is None or self.max_tokens >= max_model_len else self.max_tokens
        return EmbeddingBody(
            truncate_prompt_tokens=None if self.truncate == "NONE" else keep,
            truncation_side="left" if self.truncate == "START" else "right",
            dimensions=self.output_dimension,
            priority=self.priority,
        )
