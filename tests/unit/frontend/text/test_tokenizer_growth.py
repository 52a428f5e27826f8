"""The growth of a text in a tokenizer: chains of replacements, found without running any."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelLoadError
from quire.frontend.text.tokenizer_growth import MAX_STEPS, validate_growth

PRECOMPILED = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"abc\0" + b"x" * 18 + b"\0").decode()


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def check(tmp_path: Path, **parts: Any) -> None:
    text = json.dumps({"version": "1.0", "model": {"vocab": {"a": 1}}, **parts})
    validate_growth(tmp_path / "tokenizer.json", text)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": None},
        # Llama 2
        {
            "normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
            "decoder": sequence(replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, name="decoders"),
        },
        # Llama 3, Qwen
        {
            "pre_tokenizer": sequence({"type": "Split"}, {"type": "ByteLevel"}, name="pretokenizers"),
            "decoder": {"type": "ByteLevel"},
        },
        # ALBERT
        {
            "normalizer": sequence(
                replace("``", '"'),
                replace("''", '"'),
                {"type": "NFKD"},
                {"type": "StripAccents"},
                {"type": "Lowercase"},
                {"type": "Precompiled", "precompiled_charsmap": PRECOMPILED},
                replace(" {2,}", " ", "Regex"),
            )
        },
        # replacements that cannot match what others have written
        {"normalizer": sequence(*(replace(chr(97 + i), "0000") for i in range(20)))},
        {"normalizer": sequence(*[replace(r"\s+", " ", "Regex")] * 20)},
    ],
)
def test_known_models_are_let_pass(tmp_path: Path, parts: dict[str, Any]) -> None:
    check(tmp_path, **parts)


@pytest.mark.parametrize(
    "steps",
    [
        [replace("a", "aa")] * 7,
        [replace("a", "bbbbb"), replace("b", "ccccc"), replace("c", "ddddd")],
        [replace("a", "x" * 65)],
        [replace("(?=a)", "a", "Regex")] * 7,
        [replace("a*", "aa", "Regex")] * 5,
        [replace(r"\xE2\x96\x81", "▁▁▁", "Regex")] * 5,
        [replace("(", "aa", "Regex")] * 5,
        [{"pattern": {"String": "a"}, "content": "aa"}] * 7,
        [sequence(*[replace("a", "aa")] * 3), sequence(*[replace("a", "aa")] * 4)],
        [{"type": "ByteLevel"}] * 4,
        [{"type": "Prepend", "prepend": "x" * 65}],
        [{"type": "BPEDecoder", "suffix": ""}] * 7,
        [{"type": "Precompiled", "precompiled_charsmap": PRECOMPILED}] * 2,
        [{"type": "of a later version"}] * 4,
    ],
)
def test_steps_that_multiply_a_text_are_refused(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    for part, name in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")):
        with pytest.raises(ModelLoadError, match=r"makes up to \d+ characters of one, and 64 are allowed"):
            check(tmp_path, **{part: sequence(*steps, name=name)})


def test_normalizer_and_pre_tokenizer_are_one_chain(tmp_path: Path) -> None:
    half = [replace("a", "aaaaaaaaa")]
    check(tmp_path, normalizer=sequence(*half))
    with pytest.raises(ModelLoadError, match="makes up to 81 characters"):
        check(tmp_path, normalizer=sequence(*half), pre_tokenizer=sequence(*half, name="pretokenizers"))


def test_a_template_may_not_add_many_tokens(tmp_path: Path) -> None:
    text, bos = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
    special = {"<s>": {"id": "<s>", "ids": [1, 2], "tokens": ["<s>", "<s>"]}}
    check(tmp_path, post_processor={"single": [bos, text], "pair": [bos, text, bos], "special_tokens": special})
    with pytest.raises(ModelLoadError, match="makes up to 65 characters"):
        check(tmp_path, post_processor={"single": [text] * 65, "pair": [], "special_tokens": special})
    with pytest.raises(ModelLoadError, match="adds 6000 special tokens"):
        check(tmp_path, post_processor={"single": [bos] * 3000, "pair": [], "special_tokens": special})


@pytest.mark.parametrize(
    "value", ["[]", "{", '{"normalizer": 5}', '{"normalizer": {"content": 1, "pattern": {}}}', "[" * 100_000]
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot be read as a tokenizer: .*; download it again") as refused:
        validate_growth(tmp_path / "tokenizer.json", value)
    assert "\n" not in str(refused.value)


def test_too_many_steps(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{MAX_STEPS} are allowed"):
        check(tmp_path, normalizer=sequence(*[replace("a", "b")] * (MAX_STEPS + 1)))
