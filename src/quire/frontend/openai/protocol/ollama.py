"""The bodies of Ollama's API, and their conversion to the requests of OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import Finite, Int64, Name, Object, PositiveCount, RequestBody, Text, Word
from quire.frontend.openai.protocol.chat import MAX_MESSAGES, ChatBody, Tools
from quire.frontend.openai.protocol.completion import CompletionBody
from quire.frontend.openai.protocol.pooling import EmbeddingBody
from quire.frontend.openai.protocol.sampling import bound_of

DEFAULT_TAG = ":latest"
"""The tag that Ollama's clients add to a name without one."""
KeepAlive = Name | Finite
"""Time that the model stays loaded: accepted without effect, because the served model always is."""
_KEEP_ALIVE = {"keep_alive": "the served model stays loaded"}


class Options(msgspec.Struct):
    """Sampling. Options that tune Ollama's own runner are ignored, as unknown fields are."""

    num_predict: Int64 | None = None
    """Maximum number of output tokens; -1 and -2: as many as fit."""
    temperature: Annotated[float, bound_of("temperature")] | None = None
    top_k: Annotated[int, bound_of("top_k")] | None = None
    top_p: Annotated[float, bound_of("top_p")] | None = None
    min_p: Annotated[float, bound_of("min_p")] | None = None
    seed: Int64 | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=1024)] | None = None
    repeat_penalty: Annotated[float, bound_of("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, bound_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bound_of("frequency_penalty")] | None = None

    def as_fields(self) -> dict[str, Any]:
        """Returns the options as fields of OpenAI's requests."""
        fields = msgspec.structs.asdict(self)
        limit, seed = fields.pop("num_predict"), fields["seed"]
        fields["repetition_penalty"] = fields.pop("repeat_penalty")
        fields["seed"] = None if seed is None or seed < 0 else seed
        return fields | {"max_tokens": limit if limit is not None and limit > 0 else None}


class CalledFunction(msgspec.Struct):
    """A function that the model called, and its arguments."""

    name: Name
    arguments: Object = msgspec.field(default_factory=dict)


class OllamaCall(msgspec.Struct):
    """A call in a message of the assistant."""

    function: CalledFunction


class OllamaMessage(msgspec.Struct):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    """The reasoning that came before the text."""
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=1024)] | None = None
    tool_name: Name | None = None
    """With the role tool: the function whose result this is."""
    images: Annotated[list[Text], Meta(max_length=1024)] | None = None


class OllamaBody(RequestBody, kw_only=True):
    """Common fields of the routes that generate."""

    model: Name
    stream: bool | None = True
    """false: the answer is one object instead of a line for each piece of text."""
    format: Literal["", "json"] | Object | None = None
    """json, or the JSON schema that the answer must match."""
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    """Switch of the model's reasoning, or its effort: variables of the chat template."""
    keep_alive: KeepAlive | None = None

    WITHOUT_EFFECT = _KEEP_ALIVE

    @property
    def own_names(self) -> Mapping[str, str]:
        fields = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
        own = {name: f"options.{name}" for name in fields}
        return own | {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}

    def common_fields(self) -> dict[str, Any]:
        """Returns the fields of OpenAI's requests that follow from the common ones."""
        form: dict[str, Any] | None = None
        if self.format == "json":
            form = {"type": "json_object"}
        elif isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"schema": self.format}}
        options = self.options.as_fields() if self.options is not None else {}
        return {"model": self.model, "stream": self.stream is not False, "response_format": form, **options}

    def thinking_fields(self) -> dict[str, Any]:
        """Returns the fields of a chat request that switch reasoning."""
        if self.think is None:
            return {}
        thinks = self.think is not False
        return {
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "include_reasoning": thinks,
        }


class OllamaChatBody(OllamaBody, kw_only=True):
    """Body of /api/chat: a conversation to be answered."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] = msgspec.field(default_factory=list)
    """Messages in order; none: the answer says only that the model is loaded. If the last one is the assistant's, the
    answer continues it."""
    tools: Tools | None = None
    """Functions the model may call."""

    EXAMPLE = {  # noqa: RUF012
        "model": "demo",
        "messages": [{"role": "user", "content": "What is a quire?"}],
        "stream": False,
        "options": {"num_predict": 40},
    }

    def as_chat(self) -> ChatBody:
        """Returns the request as a chat request. Raises ValidationError for images."""
        messages = _messages_of(self.messages)
        goes_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        return ChatBody(
            messages=messages,
            tools=self.tools or None,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **self.common_fields(),
            **self.thinking_fields(),
        )


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """Body of /api/generate: a prompt to be answered, or with `raw` a text to be continued."""

    prompt: Text = ""
    """Empty: the answer says only that the model is loaded."""
    system: Text | None = None
    """Text before the prompt."""
    raw: bool | None = False
    """true: no chat template."""
    suffix: Text | None = None
    template: Text | None = None
    context: Annotated[list[Int64], Meta(max_length=1 << 24)] | None = None
    images: Annotated[list[Text], Meta(max_length=1024)] | None = None

    EXAMPLE = {"model": "demo", "prompt": "What is a quire?", "stream": False}  # noqa: RUF012
    NEUTRAL = {"suffix": ("",), "template": ("",), "context": ([],), "images": ([],)}  # noqa: RUF012

    def as_chat(self) -> ChatBody:
        """Returns the request as a chat request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return ChatBody(
            messages=[*system, {"role": "user", "content": self.prompt}],
            **self.common_fields(),
            **self.thinking_fields(),
        )

    def as_completion(self) -> CompletionBody:
        """Returns the request as a text to be continued."""
        return CompletionBody(prompt=self.prompt, **{"max_tokens": None, **self.common_fields()})


class OllamaEmbedBody(RequestBody, kw_only=True):
    """Body of /api/embed: texts to be embedded."""

    model: Name
    input: Text | Annotated[list[Text], Meta(max_length=1 << 16)]
    """Text, or a list of texts."""
    truncate: bool | None = True
    """false: texts that are longer than the context are refused instead of cut."""
    dimensions: PositiveCount | None = None
    options: Object | None = None
    keep_alive: KeepAlive | None = None

    EXAMPLE = {"model": "demo", "input": ["A quire is a gathering of pages.", "A choir sings."]}  # noqa: RUF012
    WITHOUT_EFFECT = _KEEP_ALIVE

    @property
    def texts(self) -> list[str]:
        """The texts, as a list."""
        return [self.input] if isinstance(self.input, str) else self.input

    def as_embedding(self) -> EmbeddingBody:
        """Returns the request as one of OpenAI's."""
        cut = None if self.truncate is False else -1
        return EmbeddingBody(input=[*self.texts], dimensions=self.dimensions, truncate_prompt_tokens=cut)


class OllamaEmbeddingsBody(RequestBody, kw_only=True):
    """Body of /api/embeddings, the older route: one text to be embedded."""

    model: Name
    prompt: Text = ""
    options: Object | None = None
    keep_alive: KeepAlive | None = None

    EXAMPLE = {"model": "demo", "prompt": "A quire is a gathering of pages."}  # noqa: RUF012
    WITHOUT_EFFECT = _KEEP_ALIVE


class ShowBody(RequestBody, kw_only=True):
    """Body of /api/show: the model that is described."""

    model: Name | None = None
    name: Name | None = None
    """The older name of `model`."""
    verbose: bool | None = False

    EXAMPLE = {"model": "demo"}  # noqa: RUF012


def _messages_of(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns the messages in OpenAI's form. A result belongs to the oldest call of its name without one."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        if message.images:
            raise ValidationError(
                f"messages[{index}].images holds images; this server takes text only", param="messages"
            )
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "assistant" and message.thinking:
            one["reasoning"] = message.thinking
        if message.role == "assistant" and message.tool_calls:
            ids = [f"call_{index}_{place}" for place in range(len(message.tool_calls))]
            one["tool_calls"] = [
                {"id": id, "type": "function", "function": msgspec.to_builtins(call.function)}
                for id, call in zip(ids, message.tool_calls, strict=True)
            ]
            open_calls = [(call.function.name, id) for id, call in zip(ids, message.tool_calls, strict=True)]
        if message.role == "tool":
            place = next((i for i, (name, _) in enumerate(open_calls) if name == message.tool_name), 0)
            one["tool_call_id"] = open_calls.pop(place)[1] if open_calls else f"call_{index}"
        found.append(one)
    return found
