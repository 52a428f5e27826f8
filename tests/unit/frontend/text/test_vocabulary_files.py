"""Vocabularies that are not a tokenizer.json, beside the libraries that made them: sentencepiece and tiktoken."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import struct
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.byte_pair_files import TIKTOKEN_FAMILIES
from quire.config.tokenizer_json import find_vocabulary, read_tokenizer_json
from quire.engine.structured_output.guidance import load_vocabulary
from quire.errors import ModelLoadError, QuireError, UnsupportedModelError
from quire.frontend.text.tokenizer import Tokenizer
from tests.seeds import examples

from ..toy_tokenizers import CORPUS

LINES = [
    *CORPUS,
    "The quick brown fox jumps over the lazy dog, 1234 times and 56.7 more; it's what they'll do.",
    "def f(x):\n    return [x for x in range(10)]  # <b>bold</b>",
    "Ünïcödé straße ñandú, Привет мир, 日本語のテキスト 한국어 中文字符 مرحبا",
    "ﬁne ½ ① e\u0301 𝔘𝔫𝔦   wide\u3000space\u00a0and\ttabs\n\nend",
    "👩‍👩‍👧 🇩🇪 \u200b\u0000<0x0A>\r\n▁under▁",
]
ODD = "".join(LINES)
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram without bytes": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
    "bpe without bytes": {"model_type": "bpe", "add_dummy_prefix": False},
    "bpe as it is": {
        "model_type": "bpe",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
    },
    "symbols": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<b>", "</b>", "▁▁", "▁▁▁", "ab"]},
    "symbols of a unigram": {"model_type": "unigram", "byte_fallback": True, "user_defined_symbols": ["<b>", "the"]},
}


def train(kind: str) -> bytes:
    written = io.BytesIO()
    words = " ".join(LINES * 4)
    lines = [words[i : i + 200].replace("\n", " ").replace("\0", "") for i in range(0, len(words), 200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=480,
        hard_vocab_limit=False,
        character_coverage=0.98,
        required_chars="<>0x1A4",
        control_symbols=["[INST]", "[/INST]"],
        minloglevel=2,
        **KINDS[kind],
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def models() -> dict[str, bytes]:
    return {kind: train(kind) for kind in KINDS}


def write(directory: Path, files: dict[str, bytes], **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def texts(num: int, seed: int = 1) -> Iterator[str]:
    """Lines, pieces of them, and their characters in any order."""
    draw = random.Random(seed)
    yield from LINES
    yield from ("", " ", "  ", " a", "a ", "  a  b  ", "\n", "ab", "abab <b>x</b>", "▁", "<0x41>", "x<0x0A>y")
    for _ in range(num):
        if draw.random() < 0.5:
            start = draw.randrange(len(ODD))
            yield ODD[start : start + draw.randrange(1, 60)]
        else:
            yield "".join(draw.choices(ODD + "    aeiou", k=draw.randrange(1, 30)))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_ids_and_texts_equal_sentencepiece(tmp_path: Path, models: dict[str, bytes], kind: str) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=models[kind])
    ours = Tokenizer.from_dir(write(tmp_path, {"tokenizer.model": models[kind]}))
    assert len(ours) == theirs.vocab_size()
    for text in texts(400):
        ids = theirs.encode(text)
        found = ours.encode(text, add_special_tokens=False)
        assert found == ids, (text, ours.convert_ids_to_tokens(found), theirs.encode(text, out_type=str))
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.has_fixed_texts


@pytest.mark.parametrize(
    ("config", "text", "tokens"),
    [
        ({}, "ab [INST] ab</s>", ["<s>", "▁ab", "▁", "[INST]", "▁", "▁ab", "</s>"]),
        ({"legacy": False}, "ab [INST] ab</s>", ["<s>", "▁ab", "▁", "[INST]", "▁ab", "</s>"]),
        ({"legacy": False}, "<s>ab", ["<s>", "<s>", "ab"]),
        ({"add_prefix_space": False}, " ab", ["<s>", "▁ab"]),
        ({"add_bos_token": False, "add_eos_token": True}, "ab", ["▁ab", "</s>"]),
        ({"extra_special_tokens": ["<new>"]}, "ab<new>", ["<s>", "▁ab", "<new>"]),
    ],
)
def test_special_tokens_and_spaces(tmp_path: Path, config: dict[str, Any], text: str, tokens: list[str]) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("[INST]", 0.0, 3)]
    pieces += [(text, -float(i), 1) for i, text in enumerate(("ab", "▁ab", "▁", "a", "b"))]
    data = model_file(pieces, trainer={3: 2}, normalizer={4: 0})
    ours = Tokenizer.from_dir(write(tmp_path, {"tokenizer.model": data}, **config))
    assert ours.convert_ids_to_tokens(ours.encode(text)) == tokens
    assert ours.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert set(ours.skipped_ids) >= {0, 1, 2, 3}


def varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def fields(values: dict[int, int]) -> bytes:
    return b"".join(varint(number << 3) + varint(value) for number, value in values.items())


def nested(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def model_file(pieces: list[tuple[str, float, int]], trainer: dict[int, int], normalizer: dict[int, int]) -> bytes:
    """A tokenizer.model, written by hand."""
    parts = [
        nested(1, nested(1, text.encode()) + b"\x15" + struct.pack("<f", score) + fields({3: kind}))
        for text, score, kind in pieces
    ]
    return b"".join(parts) + nested(2, fields(trainer)) + nested(3, fields(normalizer))


# -- ranks of bytes ----------------------------------------------------------------------------------------------------


def byte_ranks() -> list[bytes]:
    """A vocabulary by rank, trained on the corpus."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(LINES * 4, tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    by_char = {char: byte for byte, char in zip(sorted_bytes(), alphabet, strict=True)}
    ordered = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    return [bytes(by_char[char] for char in token) for token in ordered]


def sorted_bytes() -> list[int]:
    """The bytes in the order of the characters that stand for them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*shown, *(byte for byte in range(256) if byte not in shown)]


RANKS = byte_ranks()
TIKTOKEN = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(RANKS))
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FILES = {"ChatGLM4Tokenizer": "tokenizer.model", "HYTokenizer": "hy.tiktoken", "QWenTokenizer": "qwen.tiktoken",
         "TikTokenTokenizer": "tiktoken.model"}  # fmt: skip


def tekken_file(**changes: Any) -> bytes:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(RANKS)]
    config = {"pattern": TEKKEN_PATTERN, "default_vocab_size": len(RANKS) + 20, "default_num_special_tokens": 30}
    return json.dumps({"config": {**config, **changes.pop("config", {})}, "vocab": vocab, **changes}).encode()


@pytest.mark.parametrize("name", sorted(FILES))
def test_ids_and_texts_equal_tiktoken(tmp_path: Path, name: str) -> None:
    family = TIKTOKEN_FAMILIES[name]
    theirs = tiktoken.Encoding(
        name, pat_str=family.pattern, mergeable_ranks={token: i for i, token in enumerate(RANKS)}, special_tokens={}
    )
    ours = Tokenizer.from_dir(write(tmp_path, {FILES[name]: TIKTOKEN}, tokenizer_class=name))
    for text in texts(400):
        form = unicodedata.normalize("NFC", text) if family.is_composed else text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode_ordinary(form), text
        assert ours.decode(theirs.encode_ordinary(form)) == form
    assert ours.has_fixed_texts


def test_a_tekken_file(tmp_path: Path) -> None:
    """Special tokens come first; of the vocabulary what is left of its size."""
    theirs = tiktoken.Encoding(
        "t", pat_str=TEKKEN_PATTERN, mergeable_ranks={t: i for i, t in enumerate(RANKS[:-10])}, special_tokens={}
    )
    ours = Tokenizer.from_dir(write(tmp_path, {"tekken.json": tekken_file()}))
    assert len(ours) == len(RANKS) + 20
    for text in texts(400):
        ids = [i + 30 for i in theirs.encode_ordinary(text)]
        assert ours.encode(text) == [1, *ids]
        assert ours.decode([1, *ids], skip_special_tokens=True) == text
    assert ours.convert_ids_to_tokens(ours.encode("<s>[INST]x[/INST]</s>")[1:]) == [
        "<s>",
        "[INST]",
        "x",
        "[/INST]",
        "</s>",
    ]
    assert ours.convert_ids_to_tokens([0, 11, 20]) == ["<unk>", "<pad>", "<SPECIAL_20>"]
    assert ours.special_tokens_map["pad_token"] == "<pad>"
    special = [{"rank": 1, "token_str": "<s>", "is_control": True}, {"rank": 25, "token_str": "[THINK]"}]
    listed = Tokenizer.from_dir(write(tmp_path / "listed", {"tekken.json": tekken_file(special_tokens=special)}))
    assert listed.convert_ids_to_tokens([1, 2, 25]) == ["<s>", "<SPECIAL_2>", "[THINK]"]


def test_special_tokens_of_tiktoken_families(tmp_path: Path) -> None:
    first = len(RANKS)
    added = {str(first + 2): {"content": "[BOS]", "special": True}, str(first + 5): {"content": "<|im_end|>"}}
    kimi = Tokenizer.from_dir(
        write(tmp_path / "k", {"tiktoken.model": TIKTOKEN}, tokenizer_class="TikTokenTokenizer",
              added_tokens_decoder=added, bos_token="[BOS]")
    )  # fmt: skip
    assert kimi.encode("[BOS]a<|im_end|>")[::2] == [first + 2, first + 5]
    assert (kimi.bos_token_id, len(kimi)) == (first + 2, first + 256)
    assert kimi.encode(f"<|reserved_token_{first + 3}|>") == [first + 3]
    qwen = Tokenizer.from_dir(write(tmp_path / "q", {"qwen.tiktoken": TIKTOKEN}, tokenizer_class="QWenTokenizer"))
    assert qwen.encode("<|endoftext|><|im_start|><|im_end|><|extra_204|>") == [first, first + 1, first + 2, first + 207]
    assert qwen.eos_token_id == first
    added = {str(first): {"content": "[gMASK]"}, str(first + 1): {"content": "<sop>"}}
    glm = Tokenizer.from_dir(
        write(
            tmp_path / "g",
            {"tokenizer.model": TIKTOKEN},
            tokenizer_class="ChatGLM4Tokenizer",
            added_tokens_decoder=added,
        )
    )
    assert glm.encode("a")[:2] == [first, first + 1]


@pytest.mark.parametrize("files", [{"tokenizer.model": "bpe"}, {"tekken.json": b""}, {"tiktoken.model": TIKTOKEN}])
def test_the_grammar_compiler_reads_the_same_vocabulary(
    tmp_path: Path, models: dict[str, bytes], files: dict[str, Any]
) -> None:
    data = {
        n: tekken_file() if n == "tekken.json" else models[d] if isinstance(d, str) else d for n, d in files.items()
    }
    ours = Tokenizer.from_dir(write(tmp_path, data, tokenizer_class="TikTokenTokenizer"))
    grammar = load_vocabulary(tmp_path / "tokenizer.json", len(ours), [2]).tokenizer
    ids = ours.encode("the fox", add_special_tokens=False)
    assert grammar.decode_str(ids).strip() == "the fox"


def test_which_file_is_read(tmp_path: Path) -> None:
    assert find_vocabulary(tmp_path) is None
    for name in ("tokenizer.model.v3", "tokenizer.model.v7", "tokenizer.model", "qwen.tiktoken", "tekken.json"):
        write(tmp_path, {name: b"x", "tokenizer.model.txt": b"x"})
        assert find_vocabulary(tmp_path) == tmp_path / name


# -- broken files ------------------------------------------------------------------------------------------------------


def test_a_vocabulary_without_known_rules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer_class 'New'; known are ChatGLM4.*--tokenizer"):
        Tokenizer.from_dir(
            write(tmp_path / "a", {"new.tiktoken": b"", "tiktoken.model": TIKTOKEN}, tokenizer_class="New")
        )
    pieces = [("<unk>", 0.0, 2), ("a", -1.0, 1)]
    for trainer, normalizer, kinds in (({3: 3}, {}, ""), ({24: 1}, {}, ""), ({}, {5: 0}, ""), ({}, {}, "unused")):
        more = [("b", 0.0, 5)] if kinds else []
        directory = write(tmp_path / "b", {"tokenizer.model": model_file([*pieces, *more], trainer, normalizer)})
        with pytest.raises(UnsupportedModelError, match=r"must be .*; --tokenizer-mode hf converts it"):
            Tokenizer.from_dir(directory)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.model", b"", "it has no pieces"),
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x7f", "longer than what is left"),
        ("tokenizer.model", b"\x0a" + b"\xff" * 40, "a number breaks off"),
        ("tokenizer.model", b"\x0b", "wire type 3"),
        ("tokenizer.model", nested(1, nested(1, b"\xff")), "utf-8"),
        ("tokenizer.model", model_file([("a", 0.0, 1)], {}, {}), "no unknown piece"),
        ("tokenizer.model", model_file([("<unk>", 0.0, 2), ("a", float("nan"), 1)], {}, {}), "score nan"),
        ("tokenizer.model", model_file([("<unk>", 0.0, 2), ("a", 0.0, 1), ("a", 0.0, 1)], {}, {}), "are the same"),
        ("tokenizer.model", model_file([("<unk>", 0.0, 2), ("a" * 2000, 0.0, 1)], {3: 2}, {}), "the longest of 2000"),
        ("tekken.json", b"[]", "object"),
        ("tekken.json", b'{"config": {"pattern": "", "default_vocab_size": -1}}', "default_num_special"),
        ("tekken.json", tekken_file(config={"default_num_special_tokens": 10**9}), "1000000000 special tokens"),
        ("tekken.json", tekken_file(special_tokens=[{"rank": 99, "token_str": "x"}]), "rank 99"),
        ("tekken.json", tekken_file(special_tokens=[{"rank": i, "token_str": "x"} for i in (1, 2)]), "are the same"),
        ("tekken.json", tekken_file(config={"default_vocab_size": 100}), "no token for the byte"),
        ("qwen.tiktoken", b"IQ== 0\nIg== 2\n", "line 2 does not have the rank 1"),
        ("qwen.tiktoken", b"!! 0\n", "Only base64|Non-base64|base64"),
        ("qwen.tiktoken", b"IQ== 0\nIQ== 1\n", "two tokens are the same"),
        ("tekken.json", tekken_file(config={"pattern": "(("}), "cannot be read as a tokenizer"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    directory = write(tmp_path, {name: data}, tokenizer_class="QWenTokenizer")
    with pytest.raises(ModelLoadError, match=message) as refused:
        Tokenizer.from_dir(directory)
    assert str(directory / name) in str(refused.value)
    assert "\n" not in str(refused.value)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_damaged_files_load_or_are_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), *((chr(97 + i), -float(i), 1) for i in range(9)), ("ab", 0.0, 1)]
    whole = bytearray(model_file(pieces, {3: data.draw(st.integers(1, 2))}, {}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    directory = write(tmp_path_factory.mktemp("d"), {"tokenizer.model": bytes(whole[: data.draw(st.integers(0, 300))])})
    with contextlib.suppress(QuireError):  # anything else is a fault
        Tokenizer.from_dir(directory).encode("abc")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, {})
    with (tmp_path / "tekken.json").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ModelLoadError, match="no such file has more than"):
        read_tokenizer_json(tmp_path)


# -- the vocabularies that people have ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_241114.model.v7", "tekken_240911.json"]
)
def test_mistrals_own_files(tmp_path: Path, name: str) -> None:
    """Compares thousands of texts on the files that mistral-common ships, where it is installed."""
    common = pytest.importorskip("mistral_common")
    path = Path(common.__file__).parent / "data" / name
    encode: Any
    if name.startswith("tekken"):
        tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken").Tekkenizer.from_file(path)
        encode, decode = (lambda text: tekken.encode(text, False, False)), tekken.decode
    else:
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
        encode, decode = theirs.encode, theirs.decode
    ours = Tokenizer.from_dir(
        write(tmp_path, {"tekken.json" if "tekken" in name else "tokenizer.model": path.read_bytes()})
    )
    for text in texts(5000):
        ids = encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == decode(ids)
