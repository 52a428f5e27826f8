"""Byte-pair vocabularies without merges as a tokenizer.json: Mistral's `tekken.json`, and tiktoken's format.

Both list byte strings by rank. A file of tiktoken's holds nothing else: how text is split into words, and which special
tokens there are, is a rule of the family, known by `tokenizer_class` of tokenizer_config.json (`TIKTOKEN_FAMILIES`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from quire.config.tokenizer_parts import MAX_TOKENS, added_token, find_merges, post_processor
from quire.errors import UnsupportedModelError

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d{1,7}\r?\n")
MAX_SPECIAL_TOKENS = 1 << 14
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|" + _TAIL
_ONE_DIGIT, _THREE_DIGITS = _WORDS % "", _WORDS % "{1,3}"
_UPPER, _LOWER = (rf"[\p{{L{c}}}{t}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for c, t in (("u", r"\p{Lt}"), ("l", "")))
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|" + _TAIL
)


@dataclass(frozen=True)
class TiktokenFamily:
    """Rules of a family of models whose vocabulary is in tiktoken's format."""

    pattern: str
    """Regular expression of a word."""
    tokens: tuple[str, ...] = ()
    """Special tokens, whose ids follow the vocabulary's. tokenizer_config.json may have more."""
    reserved: str = ""
    """Special tokens of the ids that are left of 256, with their id for "{}"; "": none."""
    first: tuple[str, ...] = ()
    """Special tokens before every text."""
    is_composed: bool = False
    """True: text is brought into Unicode's form NFC first."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Named special tokens."""


TIKTOKEN_FAMILIES: Mapping[str, TiktokenFamily] = MappingProxyType(
    {
        "ChatGLM4Tokenizer": TiktokenFamily(_THREE_DIGITS, first=("[gMASK]", "<sop>")),
        "HYTokenizer": TiktokenFamily(
            _ONE_DIGIT,
            (
                "<|endoftext|>",
                "<|startoftext|>",
                "<|bos|>",
                "<|eos|>",
                "<|pad|>",
                *(f"<|extra_{i}|>" for i in range(205)),
            ),
            is_composed=True,
            names={"bos_token": "<|startoftext|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"},
        ),
        "QWenTokenizer": TiktokenFamily(
            _ONE_DIGIT,
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
            is_composed=True,
            names={"eos_token": "<|endoftext|>"},
        ),
        "TikTokenTokenizer": TiktokenFamily(_KIMI, reserved="<|reserved_token_{}|>"),
    }
)
"""Families by `tokenizer_class`: GLM-4, Hunyuan, Qwen 1, Kimi."""

_TEKKEN_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of files that do not list theirs."""


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: str


class _TekkenSpecial(msgspec.Struct):
    rank: int
    token_str: str


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenSpecial] | None = None


def convert_tekken(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (tokenizer.json, named special tokens) of a tekken.json. Raises ValueError."""
    file = msgspec.json.decode(data, type=_Tekken)
    num_special, size = file.config.default_num_special_tokens, file.config.default_vocab_size
    if not 0 < num_special <= MAX_SPECIAL_TOKENS or not num_special < size <= MAX_TOKENS:
        raise ValueError(f"{num_special} special tokens in a vocabulary of {size}")
    special = [f"<SPECIAL_{i}>" for i in range(num_special)]
    listed = file.special_tokens or [_TekkenSpecial(i, token) for i, token in enumerate(_TEKKEN_TOKENS)]
    for entry in listed:
        if not 0 <= entry.rank < num_special:
            raise ValueError(f"special token {entry.token_str!r} has the rank {entry.rank}, there are {num_special}")
        special[entry.rank] = entry.token_str
    ranked = sorted(file.vocab, key=lambda entry: entry.rank)[: size - num_special]
    if [entry.rank for entry in ranked] != list(range(len(ranked))):
        raise ValueError("the ranks of its tokens have gaps")
    tokens = [base64.b64decode(entry.token_bytes, validate=True) for entry in ranked]
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    names = {name: token for name, token in names.items() if token in special}
    ids = {token: i for i, token in enumerate(special)}
    if len(ids) < num_special:
        raise ValueError("two special tokens are the same")
    first = [names["bos_token"]] if "bos_token" in names else []
    content = _tokenizer(tokens, num_special, ids, file.config.pattern, first)
    return content, names


def is_tiktoken(data: bytes) -> bool:
    """Returns whether a file begins with a line of tiktoken's format: base64, a space, a rank."""
    return _TIKTOKEN_LINE.match(data[:4096]) is not None


def convert_tiktoken(path: Path, data: bytes, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (tokenizer.json, named special tokens) of a file in tiktoken's format.

    Raises ValueError for a broken file, UnsupportedModelError for a family whose rules are not known.
    """
    name = config.get("tokenizer_class")
    family = TIKTOKEN_FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"{path} lists tokens and not how text is split into words, and that is not known for tokenizer_class "
            f"{name!r}; known are {', '.join(TIKTOKEN_FAMILIES)}. Give a directory with a tokenizer.json by --tokenizer"
        )
    tokens: list[bytes] = []
    for line in data.splitlines():
        text, _, rank = line.partition(b" ")
        if line and (not rank.isdigit() or int(rank) != len(tokens) or len(tokens) == MAX_TOKENS):
            raise ValueError(f"line {len(tokens) + 1} does not have the rank {len(tokens)}")
        if line:
            tokens.append(base64.b64decode(text, validate=True))
    ids = {token: len(tokens) + i for i, token in enumerate(family.tokens)}
    ids.update(_configured(config, len(tokens)))
    if family.reserved:
        taken = set(ids.values())
        spare = (i for i in range(len(tokens), len(tokens) + 256) if i not in taken)
        ids.update({family.reserved.format(i): i for i in spare})
    first = family.first if all(token in ids for token in family.first) else ()
    names = {name: token for name, token in family.names.items() if token in ids}
    return _tokenizer(tokens, 0, ids, family.pattern, first, is_composed=family.is_composed), names


def _configured(config: dict[str, Any], least_id: int) -> dict[str, int]:
    """Returns the ids of `added_tokens_decoder` in tokenizer_config.json that are beyond the vocabulary."""
    listed = {
        int(token_id): str(token["content"]) for token_id, token in config.get("added_tokens_decoder", {}).items()
    }
    if len(listed) > MAX_SPECIAL_TOKENS:
        raise ValueError(f"tokenizer_config.json adds {len(listed)} tokens; {MAX_SPECIAL_TOKENS} are allowed")
    return {token: i for i, token in listed.items() if i >= least_id}


def _tokenizer(
    tokens: list[bytes],
    offset: int,
    special_ids: dict[str, int],
    pattern: str,
    first: Sequence[str],
    *,
    is_composed: bool = False,
) -> dict[str, Any]:
    """Returns tokenizer.json: the tokens' ids are their ranks + `offset`. A word that is a token is never split."""
    written = [_spell(token) for token in tokens]
    if len(set(written)) < len(written):
        raise ValueError("two tokens are the same")
    merges = find_merges(written)
    vocab = {text: i + offset for i, text in enumerate(written) if text not in special_ids}
    missing = [byte for byte in range(256) if _SPELLING[byte] not in vocab]
    if missing:
        raise ValueError(f"it has no token for the byte {missing[0]}")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, token) for token, i in sorted(special_ids.items(), key=lambda entry: entry[1])],
        "normalizer": {"type": "NFC"} if is_composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": post_processor(special_ids, first),
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab | special_ids,
            "merges": [(left, right) for left, right in merges if left in vocab and right in vocab],
        },
    }


def _spellings() -> dict[int, str]:
    """Returns the character that stands for each byte in byte-level vocabularies: itself where it is printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_SPELLING = _spellings()


def _spell(token: bytes) -> str:
    return token.decode("latin-1").translate(_SPELLING)
