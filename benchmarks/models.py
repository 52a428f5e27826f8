"""Random-weight checkpoints for benchmarks: real shapes, no download.

    python benchmarks/models.py DIRECTORY [tiny half oneb]

tiny is a Llama of 6.8 million parameters, half has the shape of Qwen2.5-0.5B and oneb that of Llama-3.2-1B; weights are
bfloat16. The tokenizer is a byte-level BPE of Python's own source text, for the servers and formats that insist on one:
benchmark prompts are token ids. Needs transformers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_COMMON = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 768, "vocab_size": 8192, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    },
    "half": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "use_sliding_window": False,
    },
    "oneb": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
        "max_position_embeddings": 32768, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens with the ids 0, 1, 2 of `_COMMON`."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINED_VOCABULARY = 8192
"""Number of tokens that text can become; higher ids have made-up texts, so that each can be detokenized."""


CACHE = Path.home() / ".cache" / "quire-benchmarks"
"""Directory in which the other benchmarks keep these checkpoints."""


def make_checkpoint(name: str, directory: Path) -> Path:
    """Writes checkpoint `name` of `SHAPES` under `directory`, unless it exists; returns its path."""
    path = directory / name
    if not (path / "tokenizer.json").exists() and importlib.util.find_spec("transformers") is None:
        raise SystemExit("checkpoints are made with transformers, which is not installed: run scripts/setup dev")
    if not (path / "model.safetensors").exists():
        _write_model(name, path)
    if not (path / "tokenizer.json").exists():
        _write_tokenizer(SHAPES[name]["vocab_size"], path)
    return path


def make_copying_checkpoint(directory: Path, page_len: int) -> Path:
    """Writes a checkpoint with the shape and the cost of `half` whose next token is the one after the last in its page
    of `page_len` ids, or the page's first: it repeats what a prompt began. Its layers add zeros. Returns its path."""
    path = directory / f"copying-{page_len}"
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SHAPES["half"], **_COMMON, "tie_word_embeddings": False}
    torch.manual_seed(1234)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(config.vocab_size)
    is_last = (ids % page_len == page_len - 1) | (ids == config.vocab_size - 1)
    successors = torch.where(is_last, ids // page_len * page_len, ids + 1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight[successors] = model.model.embed_tokens.weight
    model.save_pretrained(path)
    return path


def find_checkpoint(name: str, directory: Path = CACHE) -> Path:
    """Returns the checkpoint directory `name`, or makes the checkpoint of `SHAPES` with that name."""
    return make_checkpoint(name, directory) if name in SHAPES else Path(name)


def _write_model(name: str, path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, **_COMMON)
    torch.manual_seed(1234)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.update(bos_token_id=0, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(path)


def _write_tokenizer(vocab_size: int, path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_source_texts(), trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"Ġ§{i}": i for i in range(len(vocabulary), vocab_size)})  # no merge makes them
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=32768,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def _source_texts() -> Iterator[str]:
    """Yields the modules of Python's standard library."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield file.read_text(encoding="utf-8", errors="ignore")


def main(argv: list[str]) -> int:
    """Writes the checkpoints named, or all of them."""
    names = argv[1:] or list(SHAPES)
    unknown = [name for name in names if name not in SHAPES]
    if not argv or unknown:
        print(f"usage: models.py DIRECTORY [{' '.join(SHAPES)}]", file=sys.stderr)
        return 2
    for name in names:
        print(make_checkpoint(name, Path(argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
