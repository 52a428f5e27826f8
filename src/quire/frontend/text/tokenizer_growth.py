"""A bound on the text that a tokenizer makes of one character, found without running it.

A `tokenizer.json` is a program of steps. Most keep a text's length; a few replace text by other text, and thirty steps
that double a text make a gigabyte of a word. `validate_growth` refuses such files before any of their steps runs. The
bound counts chains: a replacement multiplies what an earlier one has written only if its pattern can match that.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.errors import ModelLoadError

MAX_GROWTH = 64
"""Characters made of one. Unicode normalization makes up to 18, byte-level steps up to 4, the replacements of known
models 1 to 8."""
MAX_STEPS = 256
MAX_SPECIAL_TOKENS = 4096
"""Special tokens that one step may add to a text."""
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_KEEP_LENGTH = frozenset(
    {
        "BertNormalizer", "BertPreTokenizer", "BertProcessing", "ByteFallback", "CharDelimiterSplit",
        "Digits", "FixedLength", "Fuse", "Lowercase", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Punctuation",
        "RobertaProcessing", "Split", "Strip", "StripAccents", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
        "WordPiece",
    }
)  # fmt: skip
"""Steps that do not multiply a text however often they are repeated."""
_PLAIN_REGEX = re.compile(r"(?:[^\\]|\\[sSdDwWnrt.+*?|^$()\[\]{}-])*")
"""Regular expressions that Python reads as the tokenizers library does."""


class _Files(msgspec.Struct):
    """The parts of a tokenizer.json that work on text."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


class _Rule(NamedTuple):
    """A step that may make a text longer."""

    growth: float
    """Characters made of one that it matches."""
    reads: frozenset[str] | None = None
    """Characters its pattern consists of; None: any."""
    writes: frozenset[str] | None = None
    """Characters it writes; None: any."""


def validate_growth(path: Path, text: str) -> None:
    """Raises ModelLoadError for the text of a tokenizer.json whose steps multiply a text. Other faults are left to the
    library."""
    try:
        files = msgspec.json.decode(text, type=_Files)
        growths = (
            _growth([*_rules(files.normalizer), *_rules(files.pre_tokenizer)]),
            _growth([*_rules(files.post_processor)]),
            _growth([*_rules(files.decoder)]),
        )
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError, AttributeError, LookupError) as e:
        raise ModelLoadError(
            f"{path} cannot be read as a tokenizer: {e}; download it again, or point --tokenizer at another"
        ) from None
    if max(growths) > MAX_GROWTH:
        raise ModelLoadError(
            f"{path} makes up to {max(growths):.0f} characters of one, and {MAX_GROWTH} are allowed: its replacements "
            "multiply a text; use the tokenizer of another copy of the model (--tokenizer)"
        )


def _growth(rules: list[_Rule]) -> float:
    """Returns the growth of the chain of rules that multiplies most."""
    if len(rules) > MAX_STEPS:
        raise ValueError(f"it has {len(rules)} steps that change a text; {MAX_STEPS} are allowed")
    reached: list[float] = []
    for index, rule in enumerate(rules):
        fed_by = [reached[i] for i in range(index) if _meet(rules[i].writes, rule.reads)]
        reached.append(rule.growth * max(fed_by, default=1.0))
    return max(reached, default=1.0)


def _meet(writes: frozenset[str] | None, reads: frozenset[str] | None) -> bool:
    return writes is None or reads is None or bool(writes & reads)


def _rules(step: Any) -> Iterator[_Rule]:
    """Yields the rules of a step and of those inside it. Steps are known by their fields: their `type` may be left
    out."""
    if step is None:
        return
    for name in _LISTS:
        for inner in step.get(name) or ():
            yield from _rules(inner)
    if "content" in step and "pattern" in step:
        yield _replacement(step)
    elif "prepend" in step:
        yield _Rule(1.0 + len(step["prepend"]), None, frozenset(step["prepend"]))
    elif "precompiled_charsmap" in step:
        yield _Rule(_longest_mapping(step["precompiled_charsmap"] or ""))
    elif "single" in step:
        yield _Rule(max(_count_copies(step, "single"), _count_copies(step, "pair")))
    elif step.get("type") in ("BPEDecoder", "CTC"):  # they replace these by a space
        for name in ("suffix", "pad_token", "word_delimiter_token"):
            if name in step:
                yield _Rule(1.0 if step[name] else 2.0, None, frozenset(" "))
    elif step.get("type") not in _KEEP_LENGTH and not any(name in step for name in _LISTS):
        yield _Rule(4.0)  # ByteLevel, or unknown: at most the bytes of a character


def _replacement(step: Mapping[str, Any]) -> _Rule:
    pattern, content = step["pattern"], step["content"]
    text = pattern.get("String")
    width = _min_width(pattern["Regex"]) if text is None else len(text)
    growth = max(1.0, len(content) / width) if width else 1.0 + len(content)
    return _Rule(growth, None if text is None else frozenset(text), frozenset(content))


def _min_width(regex: str) -> int:
    """Returns the least number of characters a regular expression matches; 0 where that is not known."""
    if not _PLAIN_REGEX.fullmatch(regex):
        return 0
    try:
        return int(re._parser.parse(regex).getwidth()[0])  # type: ignore[attr-defined]  # there is no public way
    except (re.error, RecursionError, OverflowError):
        return 0


def _longest_mapping(charsmap: str) -> float:
    """Returns the length of the longest text that a table of `Precompiled` writes: a trie, then texts that end in
    NUL."""
    table = base64.b64decode(charsmap)
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return float(max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=1) or 1)


def _count_copies(step: Mapping[str, Any], name: str) -> float:
    """Returns how often a template writes the text it is given. Raises ValueError for too many special tokens."""
    special = step.get("special_tokens") or {}
    copies: dict[str, int] = {}
    num_special = 0
    for piece in step.get(name) or ():
        if "Sequence" in piece:
            copies[piece["Sequence"]["id"]] = copies.get(piece["Sequence"]["id"], 0) + 1
        else:
            num_special += len(special.get(piece["SpecialToken"]["id"], {}).get("ids", ()))
    if num_special > MAX_SPECIAL_TOKENS:
        raise ValueError(f"its template adds {num_special} special tokens; {MAX_SPECIAL_TOKENS} are allowed")
    return float(max(copies.values(), default=1))
