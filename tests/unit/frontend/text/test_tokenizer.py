"""Our tokenizer against transformers' on the same directories."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from quire.errors import ConfigError, ModelLoadError, ValidationError
from quire.frontend.text.tokenizer import Tokenizer

from ..toy_tokenizers import CORPUS, KINDS, add_token, write_tokenizer

STRIP_BOTH = decoders.Strip(" ", 1, 1)
TEXTS = [
    *dict.fromkeys(CORPUS),
    "",
    " ",
    "  two  spaces  ",
    "tabs\tand\nnewlines\r\n\n",
    "emoji 👩‍👩‍👧‍👦 and flags 🇩🇪, e\u0301 combining",
    "日本語のテキスト、한국어 텍스트",
    "text with <|end|> and </s> and [SEP] inside",
    "\u0000control\u200b",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_transformers(tokenizer_dirs: dict[str, Path], kind: str, add_special_tokens: bool) -> None:
    ours, theirs = Tokenizer.from_dir(tokenizer_dirs[kind]), AutoTokenizer.from_pretrained(tokenizer_dirs[kind])
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens=add_special_tokens) == expected, text
        for skip in (True, False):
            assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)


@given(text=st.text(max_size=40), kind=st.sampled_from(KINDS))
def test_any_text_has_the_ids_transformers_gives_it(tokenizers_by_kind: Any, text: str, kind: str) -> None:
    theirs = tokenizers_by_kind[kind].backend  # what transformers wraps for these directories (tested above)
    assert tokenizers_by_kind[kind].encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_equal_transformers(tokenizer_dirs: dict[str, Path], kind: str) -> None:
    ours, theirs = Tokenizer.from_dir(tokenizer_dirs[kind]), AutoTokenizer.from_pretrained(tokenizer_dirs[kind])
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (theirs.bos_token, theirs.eos_token, theirs.pad_token)
    for text in ("a b", ["a", "b c"]):
        assert ours(text).input_ids == ours(text)["input_ids"] == theirs(text).input_ids
    assert len(ours) == len(theirs)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.get_vocab() == theirs.get_vocab()
    ids = list(range(min(len(ours), 100)))
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids(theirs.convert_ids_to_tokens(ids)) == ids


def same_as_transformers(directory: Path, text: str = "a <new> b <|end|> <tool> c") -> Tokenizer:
    """Ours, after checking that it agrees with transformers' of the same directory."""
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.encode(text) == theirs.encode(text)
    ids = theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    return ours


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"900": {"content": "<new>", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"900": {"content": "<new>", "special": False, "lstrip": True}}},
        {"additional_special_tokens": ["<new>", "<tool>"]},
        {"extra_special_tokens": ["<new>"]},
        {"extra_special_tokens": {"image_token": "<new>"}},
        {"pad_token": "<new>", "image_token": "<tool>"},
        {"pad_token": {"__type": "AddedToken", "content": "<new>", "lstrip": True, "rstrip": True}},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": None},
    ],
)
def test_tokenizer_config_variants_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    same_as_transformers(write_tokenizer("byte_level", tmp_path, **config))


def test_legacy_files_equal_transformers(tmp_path: Path) -> None:
    """special_tokens_map.json and added_tokens.json, of repositories without added_tokens_decoder."""
    directory = write_tokenizer("byte_level", tmp_path)
    legacy = {"pad_token": {"content": "<new>", "lstrip": False, "normalized": False}, "eos_token": "<|end|>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(legacy))
    ours = same_as_transformers(directory)
    assert ours.pad_token_id is not None
    (directory / "added_tokens.json").write_text(json.dumps({"<new>": len(ours) - 1, "<tool>": len(ours)}))
    same_as_transformers(directory)


def test_tokens_added_in_tokenizer_json_equal_transformers(tmp_path: Path) -> None:
    directory = write_tokenizer("metaspace", tmp_path)
    add_token(directory / "tokenizer.json", "<tool>", special=False, normalized=False)
    ours = same_as_transformers(directory, "a <tool> b</s>")
    tool = ours.encode("<tool>", add_special_tokens=False)[-1]
    assert tool in ours.added_token_ids
    assert tool not in ours.skipped_ids


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    directory = write_tokenizer("byte_level", tmp_path)
    plain = Tokenizer.from_dir(directory).encode(CORPUS[0])
    tokenizer = Tokenizer.from_dir(directory).backend
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert Tokenizer.from_dir(directory).encode(CORPUS[0]) == plain


def test_hf_mode_gives_the_same_tokenizer(tokenizer_dirs: dict[str, Path]) -> None:
    for kind in KINDS:
        ours, fallback = Tokenizer.from_dir(tokenizer_dirs[kind]), Tokenizer.from_dir(tokenizer_dirs[kind], "hf")
        for text in TEXTS:
            assert fallback.encode(text) == ours.encode(text)
        assert fallback.special_tokens_map == ours.special_tokens_map
        assert fallback.chat_templates == ours.chat_templates


def test_a_directory_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    directory = write_tokenizer("byte_level", tmp_path / "with")
    bare = tmp_path / "without"
    bare.mkdir()
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (bare / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (bare / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    (bare / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    ours = Tokenizer.from_dir(bare)
    expected = AutoTokenizer.from_pretrained(bare)
    assert ours.encode(CORPUS[0]) == expected.encode(CORPUS[0])


def test_without_transformers_the_error_names_both_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_transformers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_transformers)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json.*quire\[hf\].*--tokenizer"):
        Tokenizer.from_dir(tmp_path)
    with pytest.raises(ConfigError, match="--tokenizer-mode hf"):
        Tokenizer.from_dir(write_tokenizer("byte_level", tmp_path / "x"), "hf")


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"transformers cannot load.*it holds no tokenizer; point --tokenizer"):
        Tokenizer.from_dir(tmp_path)
    directory = write_tokenizer("byte_level", tmp_path / "broken")
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_dir(directory)
    (directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json holds a list"):
        Tokenizer.from_dir(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_dir(directory)


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_a_pattern_that_takes_too_many_steps_costs_one_request(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = tmp_path / "steep"
    shutil.copytree(tokenizer_dirs["byte_level"], directory)
    value = json.loads((directory / "tokenizer.json").read_text())
    steep = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}
    value["normalizer"], value["decoder"] = steep, {"type": "Sequence", "decoders": [{"type": "Fuse"}, steep]}
    value["model"]["vocab"]["x" * 60] = end = len(value["model"]["vocab"]) + len(value["added_tokens"])
    (directory / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = Tokenizer.from_dir(directory)
    for call in (tokenizer.encode, tokenizer.encode_texts):
        with pytest.raises(ValidationError, match=r"tokenizer cannot read this prompt: .*retry-limit"):
            call("x" * 60)
    with pytest.raises(ValidationError, match=r"tokenizer cannot decode these tokens: .*retry-limit"):
        tokenizer.decode([end])
    assert tokenizer.encode("the fox")


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "unigram", "wordpiece"])
def test_token_texts_join_to_the_text(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the quick dog and the fox", add_special_tokens=False)
    assert "".join(tokenizer.token_text(i) for i in ids).strip() == "the quick dog and the fox"
    assert tokenizer.token_text(10**6) == ""  # an id of the model's padding


@pytest.mark.parametrize(
    ("decoder", "fixed"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
        (decoders.Sequence([decoders.Replace("▁▁", " "), decoders.ByteFallback(), decoders.Fuse()]), False),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), STRIP_BOTH]), False),
        (decoders.BPEDecoder(), False),
        (decoders.CTC(), False),
        (None, False),
    ],
)
def test_which_decoders_give_a_token_one_text(tmp_path: Path, decoder: Any, fixed: bool) -> None:
    tokenizer = Tokenizer.from_dir(write_tokenizer("byte_level", tmp_path))
    tokenizer.backend.decoder = decoder
    assert tokenizer.has_fixed_texts == fixed


def test_repr_names_size_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert repr(tokenizer).startswith(f"Tokenizer(vocab_size={len(tokenizer)}, special_tokens={{'bos_token'")


# -- chat templates: which one ----------------------------------------------------------------------------------------


def test_template_sources_in_order_of_precedence(tmp_path: Path) -> None:
    directory = write_tokenizer("byte_level", tmp_path / "a", chat_template="from config")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "from another file"}))
    assert Tokenizer.from_dir(directory).chat_template == "from config"
    bare = write_tokenizer("byte_level", tmp_path / "bare", chat_template=None)
    shutil.copy(directory / "chat_template.json", bare)
    assert Tokenizer.from_dir(bare).chat_template == "from another file"
    (directory / "chat_template.jinja").write_text("from file")
    assert Tokenizer.from_dir(directory).chat_template == "from file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.chat_templates == {"default": "from file", "tool_use": "tools"}
    assert AutoTokenizer.from_pretrained(directory).chat_template == tokenizer.chat_templates


def test_list_of_named_templates(tmp_path: Path) -> None:
    listed = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
        {"name": "rag", "template": "R"},
    ]
    tokenizer = Tokenizer.from_dir(write_tokenizer("byte_level", tmp_path, chat_template=listed))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for name, tools in ((None, None), (None, [{}]), ("rag", None), ("{{ 'text' }}", None)):
        assert tokenizer.select_chat_template(name, tools) == theirs.get_chat_template(name, tools)
    tokenizer.chat_templates.pop("default")
    with pytest.raises(ValidationError, match="name one of rag, tool_use"):
        tokenizer.select_chat_template()


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_tokenizer("byte_level", tmp_path, chat_template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(ValidationError, match="no default chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_use_chat_template_takes_text_or_a_file(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_dir(tokenizer_dirs["byte_level"])
    tokenizer.use_chat_template("{{ messages[0].content }}!")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}?")
    tokenizer.use_chat_template(str(tmp_path / "t.jinja"))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids == tokenizer.encode("hi?", add_special_tokens=False)
    with pytest.raises(ConfigError, match="no such file"):
        tokenizer.use_chat_template("missing.jinja")


def test_apply_chat_template_equals_transformers(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(tokenizer_dirs["byte_level"], directory)
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "Prefix caching?"}, {"role": "assistant", "content": "It keeps blocks."}]
    for generation in (True, False):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation) == text
        expected = theirs.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
        assert ours.apply_chat_template(messages, add_generation_prompt=generation) == expected
