"""A GGUF file, llama.cpp's format, as a checkpoint directory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from quire.cli.gguf_metadata import Metadata, make_config, make_tokenizer, make_tokenizer_config
from quire.cli.gguf_tensors import ROPE_FACTORS, Array, tensors_of, write_safetensors
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError

PAIRED = frozenset({"llama"})
"""Architectures whose queries and keys stand in rotary pairs."""


def convert(source: Path, target: Path) -> list[str]:
    """Write `target`, which must not exist yet or be empty. Returns what the user should know.

    Raises ConfigError, ModelLoadError, or UnsupportedModelError naming what cannot be converted.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty directory; name another")
    reader = _open(source)
    try:
        metadata: Metadata = {name: field.contents() for name, field in reader.fields.items()}
        by_name = {tensor.name: tensor for tensor in reader.tensors}
        factors: Array | None = by_name[ROPE_FACTORS].data if ROPE_FACTORS in by_name else None
        config = make_config(metadata, set(by_name), factors)
        is_bfloat16 = by_name["token_embd.weight"].tensor_type.name != "F32"
        config["torch_dtype"] = "bfloat16" if is_bfloat16 else "float32"
        target.mkdir(parents=True, exist_ok=True)
        has_pairs = metadata["general.architecture"] in PAIRED
        _write_weights(tensors_of(reader, config, has_pairs), target, is_bfloat16=is_bfloat16)
        _write(target / "config.json", config)
        return _write_tokenizer(metadata, target)
    except UnsupportedModelError as e:
        raise UnsupportedModelError(f"{source}: {e}") from None
    except ModelLoadError as e:
        raise ModelLoadError(f"{source}: {e}") from None
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as e:  # whatever a damaged file may say
        raise ModelLoadError(f"{source} is damaged: {type(e).__name__}: {e}") from None


def _open(source: Path) -> Any:
    try:
        import gguf  # an extra
    except ImportError:
        raise ConfigError("reading GGUF files needs the gguf package: pip install 'quire[gguf]'") from None
    if not source.is_file():
        raise ModelLoadError(f"{source} is not a file")
    try:
        return gguf.GGUFReader(source)
    except Exception as e:  # its own checks raise ValueError, damaged lengths anything
        raise ModelLoadError(f"{source} is not a GGUF file that can be read: {type(e).__name__}: {e}") from None


def _write_weights(tensors: Any, target: Path, *, is_bfloat16: bool) -> None:
    """A file per layer, so that no more than one is in memory."""

    def layer_of(item: tuple[str, Array]) -> str:
        parts = item[0].split(".")
        return parts[2] if parts[1] == "layers" else "outer"

    weight_map: dict[str, str] = {}
    for number, (_, group) in enumerate(itertools.groupby(tensors, layer_of)):
        name, held = f"model-{number:05d}.safetensors", dict(group)
        write_safetensors(target / name, held, is_bfloat16=is_bfloat16)
        weight_map |= dict.fromkeys(held, name)
    _write(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(metadata: Metadata, target: Path) -> list[str]:
    _write(target / "tokenizer_config.json", make_tokenizer_config(metadata))
    try:
        _write(target / "tokenizer.json", make_tokenizer(metadata))
    except UnsupportedModelError as e:
        return [f"without a tokenizer: the file has {e}", "put the model's tokenizer.json there, or give --tokenizer"]
    return []


def _write(path: Path, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=None if path.stem == "tokenizer" else 2)
    path.write_text(text, encoding="utf-8")
