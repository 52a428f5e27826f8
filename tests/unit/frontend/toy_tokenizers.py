"""Small trained tokenizers of the four kinds in use, each written as a checkpoint directory would hold it."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

KINDS = ("byte_level", "metaspace", "wordpiece", "unigram")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Prefix caching keeps the key and value blocks of prompts that were seen before.",
    "def add(left, right):\n    return left + right  # spaces  in  code\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "数据块 的 前缀 缓存 可以 重复 使用 hello world",
    "1234567890 + 42 = 1234567932; {'json': [true, false, null]}",
] * 20
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(kind: str, directory: Path, **config: object) -> Path:
    """Train a tokenizer of `kind` and write tokenizer.json and tokenizer_config.json (updated by `config`)."""
    backend, special = _TRAINERS[kind]()
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **special, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def _byte_level() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Returns a tokenizer like Llama 3's and Qwen's: bytes as letters, a BOS added by the post-processor."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return backend, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def _metaspace() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Returns a tokenizer like Llama 2's and Mistral's: spaces as letters, unknown characters as byte tokens."""
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    data = json.loads(trained.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in byte_tokens]
    data["model"]["byte_fallback"] = True
    backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _wordpiece() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Returns a tokenizer like BERT's: continuation pieces start with ##."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return backend, {**names, "eos_token": "[SEP]"}


def _unigram() -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Returns a tokenizer like T5's and those of Gemma's ancestors: pieces with scores, NFKC first."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


_TRAINERS = {"byte_level": _byte_level, "metaspace": _metaspace, "wordpiece": _wordpiece, "unigram": _unigram}


def add_token(path: Path, content: str, **flags: bool) -> None:
    """Add a token to a written tokenizer.json, as `special` or not."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_tokens([AddedToken(content, **flags)])
    backend.save(str(path))
