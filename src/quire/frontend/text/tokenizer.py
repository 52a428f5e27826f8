"""Text to token ids and back, on the `tokenizers` library alone.

`Tokenizer` owns a backend and the special tokens of one model. It answers in plain lists and strings, with the names
transformers' tokenizers use, so that `llm.get_tokenizer()` feels familiar. It knows nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ValidationError
from quire.frontend.text.chat_template import ContentFormat, Message, render_chat
from quire.frontend.text.tokenizer_files import TokenizerFiles, is_panic, read_tokenizer_dir

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Written by decoders for bytes that are no character (yet)."""
LONG_TEXT_CHARS = 8192
"""A text this long takes about ten milliseconds to tokenize: more than others should wait for."""
CONTEXT_TOKENS = 4
"""Number of preceding tokens that can change the text of a token: a UTF-8 character has at most four bytes."""

_FIXED_TEXT_DECODERS = (
    ["ByteLevel"],
    ["Metaspace"],
    ["WordPiece"],
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
)
"""Decoders of Llama, Qwen, GPT-2 / T5 / BERT / Gemma / Llama 2 and Mistral."""


def _decoder_step(state: dict[str, Any]) -> str:
    """Returns the kind of one decoder, "" where its settings make it look beyond a token."""
    kind = str(state["type"])
    looks_around = (kind == "Strip" and state["stop"]) or (
        kind == "Replace" and len(state["pattern"].get("String", "")) != 1
    )
    return "" if looks_around else kind


class EncodedTexts(dict[str, Any]):
    """A dict with one key, `input_ids`, which is also an attribute."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]


class Tokenizer:
    """The tokenizer of one model. Thread-safe after construction."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.backend = files.backend
        self.special_tokens_map = files.special_tokens
        self.chat_templates = dict(files.chat_templates)
        self.all_special_tokens = list(dict.fromkeys([*files.special_tokens.values(), *files.extra_special_tokens]))
        self._token_texts: dict[int, str] = {}
        self.plain_texts: dict[int, str] = {}
        """Texts that `token_text` has found of ordinary tokens: not added to the vocabulary, whole characters only."""

    @classmethod
    def from_dir(cls, directory: Path | str, mode: str = "auto") -> Tokenizer:
        """Reads the tokenizer of a checkpoint directory. Raises ModelLoadError or ConfigError."""
        return cls(read_tokenizer_dir(Path(directory), mode))

    def __len__(self) -> int:
        """Returns the size of the vocabulary with added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={len(self)}, special_tokens={self.special_tokens_map})"

    # -- text and ids -------------------------------------------------------------------------------------------------

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> EncodedTexts:
        """Returns the ids of a text, or of each of several, in the form of transformers' tokenizers."""
        if isinstance(text, str):
            return EncodedTexts(input_ids=self.encode(text, add_special_tokens))
        return EncodedTexts(input_ids=[self.encode(each, add_special_tokens) for each in text])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`. Special tokens written out in the text become their ids, as everywhere in the
        field."""
        try:
            if len(text) > LONG_TEXT_CHARS:  # only the call for batches lets other threads run
                (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except BaseException as e:
            raise _encode_error(e) from None

    def encode_texts(
        self,
        text: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_len: int | None = None,
        side: str = "right",
    ) -> tuple[list[int], int | None]:
        """Returns (the ids of a text or a pair of texts, where the second begins if the tokenizer distinguishes the
        two).

        A text longer than `max_len` is cut at `side`, the longer text first, and keeps its special tokens.
        """
        texts = [text] if second is None else [text, second]
        try:
            encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        except BaseException as e:
            raise _encode_error(e) from None
        if max_len is not None:
            num_special = self.backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            room = _share_room([len(e.ids) for e in encodings], max(0, max_len - num_special))
            for encoding, num_tokens in zip(encodings, room, strict=True):
                encoding.truncate(num_tokens, direction=side)
        whole = self.backend.post_process(
            encodings[0], encodings[1] if second is not None else None, add_special_tokens
        )
        types = whole.type_ids
        return list(whole.ids), types.index(1) if 1 in types else None

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Returns the text of `token_ids`; ids outside the vocabulary have none."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as e:
            if is_panic(e):
                raise ValidationError(f"the model's tokenizer cannot decode these tokens: {e}") from None
            raise

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str | None]:
        """Returns the vocabulary's spelling of each id (with its space and byte marks); None outside the vocabulary."""
        return [self.backend.id_to_token(i) for i in token_ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """Returns the id of each vocabulary entry; None if there is no such entry."""
        return [self.backend.token_to_id(token) for token in tokens]

    def token_text(self, token_id: int) -> str:
        """Returns the text that `token_id` adds in the middle of a line: its leading space is kept, special tokens are
        shown.

        Ends in the replacement character when the token ends inside a UTF-8 character.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            anchor = self._anchor
            text = self.decode([*anchor, token_id])[len(self.decode(anchor)) :]
            self._token_texts[token_id] = text
            if text and REPLACEMENT not in text and token_id not in self.added_token_ids:
                self.plain_texts[token_id] = text
        return text

    @cached_property
    def has_fixed_texts(self) -> bool:
        """True if `token_text` is a token's text after any other token, bytes of unfinished characters excepted.

        This holds for the decoders in use: they treat tokens one by one, and only the first of a text specially.
        """
        if self.backend.decoder is None or not self._anchor:
            return False
        state = json.loads(self.backend.decoder.__getstate__())
        steps = [_decoder_step(step) for step in state.get("decoders", [state])]
        return steps in _FIXED_TEXT_DECODERS

    @cached_property
    def _anchor(self) -> list[int]:
        """One ordinary token, so that what is decoded after it is not taken for the start of a text."""
        for token_id in range(len(self)):
            text = self.decode([token_id]) if token_id not in self.added_token_ids else ""
            if text.isascii() and text.isalnum():
                return [token_id]
        return []

    # -- vocabulary ---------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without added tokens; `len(tokenizer)` counts them."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Returns all entries, added tokens among them."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def added_token_ids(self) -> dict[int, str]:
        """Added tokens, special or not, by id."""
        return {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def skipped_ids(self) -> frozenset[int]:
        """Ids that `decode(..., skip_special_tokens=True)` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return [i for i in self.convert_tokens_to_ids(self.all_special_tokens) if i is not None]

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    # -- chat ---------------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The default template, None if the model has none."""
        return self.chat_templates.get("default")

    def use_chat_template(self, value: str) -> None:
        """Replaces the templates by `value`: the path of a file, or the text of a template (--chat-template)."""
        path = Path(value).expanduser()
        looks_like_text = "{" in value or "\n" in value
        if not looks_like_text and not path.is_file():
            raise ConfigError(f"--chat-template {value}: there is no such file, and it does not look like a template")
        self.chat_templates = {"default": value if looks_like_text else path.read_text(encoding="utf-8")}

    def select_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """Returns the template to use: `chat_template` (a name or a text), else the tool one, else the default."""
        named = self.chat_templates
        if chat_template is not None:
            return named.get(chat_template, chat_template)
        if tools is not None and "tool_use" in named:
            return named["tool_use"]
        if "default" in named:
            return named["default"]
        remedy = f"name one of {', '.join(sorted(named))}" if named else "pass one, or prompts instead of messages"
        raise ValidationError(f"the model has no default chat template; {remedy}", param="chat_template")

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        content_format: ContentFormat = "auto",
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Returns the prompt of a conversation: ids, or text with `tokenize=False`. Raises ValidationError."""
        text = render_chat(
            self.select_chat_template(chat_template, tools),
            conversation,
            tools=tools,
            documents=variables.pop("documents", None),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=content_format,
            variables={**self.special_tokens_map, **variables},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _encode_error(error: BaseException) -> BaseException:
    """Returns what to raise for an error of the backend."""
    if isinstance(error, TypeError):  # a str that has no UTF-8 form
        return ValidationError("the prompt is not valid text: it holds a lone surrogate", param="prompt")
    if is_panic(error):
        return ValidationError(f"the model's tokenizer cannot read this prompt: {error}", param="prompt")
    return error


def _share_room(lens: list[int], room: int) -> list[int]:
    """Returns the numbers of tokens kept of one or two texts: the longer is cut first, then both alike."""
    if sum(lens) <= room:
        return lens
    if len(lens) == 1:
        return [room]
    shorter = min(lens)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [shorter, longer] if lens[0] <= lens[1] else [longer, shorter]
