"""SentencePiece's `tokenizer.model` as a tokenizer.json: BPE and unigram, with byte fallback.

The file is a protocol buffer of which a few fields matter; they are read here, every length bounded by the file. The
result splits text as SentencePiece does. Control tokens ("<s>", "[INST]") are special tokens and found in text, as
everywhere in the field; SentencePiece itself would spell them out.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.tokenizer_parts import MAX_TOKENS, added_token, find_merges, post_processor
from quire.errors import UnsupportedModelError

SPACE = "▁"
MAX_USER_SYMBOLS = 4096
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_UNREACHABLE = -1e6
"""Score of pieces that text must not be split into. Far below that of any split of a few characters."""


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclass
class _Model:
    """The fields of the file that matter, by their numbers in sentencepiece_model.proto."""

    pieces: list[_Piece] = field(default_factory=list)
    trainer: dict[int, int | bytes] = field(default_factory=dict)
    normalizer: dict[int, int | bytes] = field(default_factory=dict)


def convert_sentencepiece(path: Path, data: bytes, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (tokenizer.json, named special tokens) of the bytes of a file.

    Raises ValueError for a broken file, UnsupportedModelError for rules that are not known.
    """
    model = _read_model(data)
    kind = model.trainer.get(3, _UNIGRAM)
    for given, value, needed in (
        ("model_type", kind in (_UNIGRAM, _BPE), "unigram or bpe"),
        ("treat_whitespace_as_suffix", not model.trainer.get(24, 0), "false"),
        ("escape_whitespaces", model.normalizer.get(5, 1) == 1, "true"),
        ("type of a piece", all(piece.kind != _UNUSED for piece in model.pieces), "no UNUSED"),
    ):
        if not value:
            raise UnsupportedModelError(
                f"{path}: {given} must be {needed}; --tokenizer-mode hf converts it with transformers, or give a "
                "directory with a tokenizer.json by --tokenizer"
            )
    has_bytes = bool(model.trainer.get(35, 0))
    ids = {piece.text: i for i, piece in enumerate(model.pieces)}
    if len(ids) < len(model.pieces):
        raise ValueError("two pieces are the same")
    names = _named_tokens(model)
    unknown = next((i for i, piece in enumerate(model.pieces) if piece.kind == _UNKNOWN), None)
    if unknown is None:
        raise ValueError("it has no unknown piece")
    symbols = sorted((p.text for p in model.pieces if p.kind == _USER_DEFINED and p.text), key=len, reverse=True)
    if len(symbols) > MAX_USER_SYMBOLS:
        raise ValueError(f"it has {len(symbols)} user-defined symbols; {MAX_USER_SYMBOLS} are allowed")
    prefix = _prefix(model, config)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(i, piece.text)
            for i, piece in enumerate(model.pieces)
            if piece.kind in (_CONTROL, _UNKNOWN) and piece.text
        ],
        "normalizer": _normalizer(model, prefix),
        "pre_tokenizer": _pre_tokenizer(symbols, prefix),
        "post_processor": _post_processor(names, ids, config),
        "decoder": _decoder(prefix),
        "model": _bpe(model, ids, unknown, has_bytes, has_symbols=bool(symbols))
        if kind == _BPE
        else _unigram(model, unknown, has_bytes),
    }
    return content, names


# -- the file ----------------------------------------------------------------------------------------------------------


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, value) of each field of a message. Raises ValueError where it is none."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field has the wire type {wire}")
        if number == 0 or size > end - at:
            raise ValueError(f"a field of {size} bytes is longer than what is left of it")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns (the number at an index, the index behind it)."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number breaks off")


def _read_model(data: bytes) -> _Model:
    model = _Model()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            model.pieces.append(_read_piece(value))
            if len(model.pieces) > MAX_TOKENS:
                raise ValueError(f"it has more than {MAX_TOKENS} pieces")
        elif number == 2 and isinstance(value, bytes):
            model.trainer.update(_fields(value))
        elif number == 3 and isinstance(value, bytes):
            model.normalizer.update(_fields(value))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _read_piece(data: bytes) -> _Piece:
    text, score, kind = "", 0.0, _NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            (score,) = struct.unpack("<f", value)
            if not math.isfinite(score):
                raise ValueError(f"piece {text!r} has the score {score}")
        elif number == 3 and isinstance(value, int):
            kind = value
    return _Piece(text, score, kind)


# -- the parts of the result -------------------------------------------------------------------------------------------


def _named_tokens(model: _Model) -> dict[str, str]:
    """Returns the special tokens by name: ids 40 to 43 of the trainer, -1 for none."""
    names = {}
    for name, number, default in (("unk_token", 40, 0), ("bos_token", 41, 1), ("eos_token", 42, 2)):
        value = model.trainer.get(number, default)
        if isinstance(value, int) and value < len(model.pieces) and model.pieces[value].kind in (_CONTROL, _UNKNOWN):
            names[name] = model.pieces[value].text
    return names


def _prefix(model: _Model, config: dict[str, Any]) -> str:
    """Returns where a space is put before text: "never", "always" (at its start and after each special token), or
    "first" (at its start alone).

    "always" is SentencePiece's own way, text by text; `legacy: false` in tokenizer_config.json asks for "first".
    """
    if not model.normalizer.get(3, 1) or config.get("add_prefix_space") is False:
        return "never"
    return "first" if config.get("legacy") is False else "always"


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _normalizer(model: _Model, prefix: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    charsmap = model.normalizer.get(2, b"")
    if charsmap and isinstance(charsmap, bytes):
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if model.normalizer.get(4, 1):
        steps += [_replace({"Regex": rf"\A +|[ {SPACE}]+\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if prefix == "always":
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(_replace({"String": " "}, SPACE))
    return {"type": "Sequence", "normalizers": steps}


def _pre_tokenizer(symbols: list[str], prefix: str) -> dict[str, Any] | None:
    """Returns the step that cuts user-defined symbols out, the longest first."""
    steps: list[dict[str, Any]] = []
    if prefix == "first":
        steps.append({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False})
    if symbols:
        pattern = {"Regex": "|".join(map(re.escape, symbols))}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _post_processor(names: dict[str, str], ids: dict[str, int], config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the step that adds special tokens: "<s>" before a text unless add_bos_token is false, "</s>" behind it if
    add_eos_token is true."""
    first = [names["bos_token"]] if "bos_token" in names and config.get("add_bos_token", True) else []
    last = [names["eos_token"]] if "eos_token" in names and config.get("add_eos_token", False) else []
    return post_processor({token: ids[token] for token in (*first, *last)}, first, last)


def _decoder(prefix: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix != "never":
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _bpe(model: _Model, ids: dict[str, int], unknown: int, has_bytes: bool, *, has_symbols: bool) -> dict[str, Any]:
    """Returns the model section. Pairs are merged by the score of the piece they make."""
    joined = [piece for piece in model.pieces if piece.kind in (_NORMAL, _USER_DEFINED)]
    joined.sort(key=lambda piece: -piece.score)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[unknown].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": has_bytes,
        "ignore_merges": has_symbols,
        "vocab": ids,
        "merges": find_merges([piece.text for piece in joined]),
    }


def _unigram(model: _Model, unknown: int, has_bytes: bool) -> dict[str, Any]:
    """Returns the model section. Pieces that are no text get a score at which they are never chosen."""
    reached = (_NORMAL, _USER_DEFINED)
    vocab = [[piece.text, piece.score if piece.kind in reached else _UNREACHABLE] for piece in model.pieces]
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": has_bytes}
