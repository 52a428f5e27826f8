"""`quire info` on hand-written checkpoints, and its idea of a layer's KV cache against the real models."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.info import kv_cache_specs
from quire.cli.machine import read_speed
from quire.cli.main import main
from quire.config.engine_args import EngineArgs
from quire.config.hf_config import HFConfig
from quire.errors import ModelLoadError
from quire.wire.kv_cache import AnyKVCacheSpec
from quire.worker.attention.layer import Attention
from quire.worker.kernels.library import native_library
from quire.worker.models.registry import get_model_class
from tests.adapters import write_adapter
from tests.checkpoints import MakeCheckpoint

from .conftest import LLAMA

Capture = pytest.CaptureFixture[str]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file of zeros with the given (dtype, shape) of each tensor."""
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * {"F32": 4, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(position))


@pytest.fixture
def checkpoint(model_dir: Path) -> Path:
    weights = {"model.embed_tokens.weight": ("BF16", [512, 64]), "model.norm.weight": ("F32", [64])}
    write_safetensors(model_dir / "model.safetensors", weights)
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "</s>"}]}
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"})
    )
    return model_dir


def info(capsys: Capture, *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["info", "--json", *argv]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_report_counts_weights_and_cache(checkpoint: Path, capsys: Capture) -> None:
    report = info(capsys, str(checkpoint), "--kv-cache-memory-bytes", "1M", "--max-num-seqs", "8")
    assert report["model"]["supported"] is True
    assert report["weights"] == {
        "files": 1,
        "tensors": 2,
        "parameters": 512 * 64 + 64,
        "stored_bytes": {"BF16": 512 * 64 * 2, "F32": 64 * 4},
        "dtype": "bfloat16",
        "quantization": None,
        "quantized_parameters": 0,
        "memory_bytes": (512 * 64 + 64) * 2,
    }
    kv = {**report["kv_cache"], **report["capacity"]}
    assert kv["bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, head size, bytes
    assert kv["blocks"] == 2**20 // (kv["bytes_per_token"] * 16)
    assert kv["max_model_len"] == 256
    assert kv["max_concurrency"] == pytest.approx((kv["blocks"] - 1) / 16, abs=0.01)
    assert report["sampling_defaults"] == {"temperature": 0.6, "top_p": 0.9}
    assert report["tokenizer"] == {
        "file": "tokenizer.json",
        "kind": "BPE",
        "vocabulary": 2,
        "added_tokens": 1,
        "bos_token": None,
        "eos_token": "</s>",
        "chat_template": True,
    }
    assert report["problems"] == []


def test_memory_rule_is_the_workers(checkpoint: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.info.available_cpu_memory", lambda: 10_000_000)
    weights = (512 * 64 + 64) * 2
    report = info(capsys, str(checkpoint))
    assert report["capacity"]["blocks"] == int(0.4 * (10_000_000 - weights)) // (256 * 16)
    monkeypatch.setattr("quire.cli.info.available_cpu_memory", lambda: 10**12)
    report = info(capsys, str(checkpoint), "--max-num-seqs", "2")
    assert report["capacity"]["blocks"] == 2 * 256 // 16 + 1


def test_reading_the_weights_limits_the_speed(
    model_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.info.CACHED_BYTES", 1)
    monkeypatch.setattr("quire.cli.info.read_speed", lambda: 1e6)
    sizes = {
        "model.embed_tokens.weight": 512,
        "model.layers.0.mlp.experts.3.up_proj.weight": 256,
        "lm_head.weight": 512,
    }
    write_safetensors(model_dir / "model.safetensors", {name: ("BF16", [n, 64]) for name, n in sizes.items()})
    (model_dir / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": False}))
    one = info(capsys, str(model_dir))["speed"]
    assert one["read_per_token_bytes"] == (512 + 256) * 128
    assert one["tokens_per_s_at_most"] == pytest.approx(1e6 / one["read_per_token_bytes"], abs=0.1)
    experts = {**LLAMA, "tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 2}
    (model_dir / "config.json").write_text(json.dumps(experts))
    assert info(capsys, str(model_dir))["speed"]["read_per_token_bytes"] == (512 + 256 // 4) * 128
    monkeypatch.undo()
    assert info(capsys, str(model_dir))["speed"] == {}


def test_the_speed_of_memory_is_measured() -> None:
    assert (read_speed(1 << 20) or 0) > 0 or native_library() is None


def test_context_fits_or_is_a_problem(checkpoint: Path, capsys: Capture) -> None:
    few = ("--num-gpu-blocks-override", "5")
    assert info(capsys, str(checkpoint), *few, "--max-model-len", "auto")["capacity"]["max_model_len"] == 64
    report = info(capsys, str(checkpoint), *few, code=2)
    assert "longest that fits is 64 tokens" in report["problems"][0]
    assert "capacity" not in report


def test_what_stands_in_the_way_is_listed(model_dir: Path, capsys: Capture) -> None:
    config = {**LLAMA, "architectures": ["MambaForCausalLM"], "quantization_config": {"quant_method": "exl2"}}
    (model_dir / "config.json").write_text(json.dumps(config))
    report = info(capsys, str(model_dir), code=2)
    problems = " ".join(report["problems"])
    assert report["model"]["supported"] is False
    assert "MambaForCausalLM has layers that keep recurrent states" in problems
    assert "quantization_config" in problems
    assert "neither model.safetensors" in problems
    assert report["tokenizer"]["chat_template"] is False


def test_dummy_weights_need_no_file(model_dir: Path, capsys: Capture) -> None:
    report = info(capsys, str(model_dir), "--load-format", "dummy")
    assert report["weights"]["parameters"] is None
    assert report["capacity"]["blocks"] > 1


def test_the_report_can_be_read_as_text(checkpoint: Path, capsys: Capture) -> None:
    assert main(["info", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "  stored bytes            BF16 64.0 KiB, F32 256 B\n" in out
    assert "  supported               yes\n" in out
    (checkpoint / "model.safetensors").unlink()
    assert main(["info", str(checkpoint)]) == 2
    assert "problem: " in capsys.readouterr().out


def test_info_loads_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from quire.cli.main import main; "
        f"code = main(['info', {str(checkpoint)!r}]); "
        "print('LOADED', code, [m for m in ('torch', 'numpy', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.splitlines()[-1] == "LOADED 0 []", done.stderr


def test_a_stretched_context_is_the_models_context(checkpoint: Path, capsys: Capture) -> None:
    assert info(capsys, str(checkpoint))["shape"]["context_length"] == 256
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    report = info(
        capsys, str(checkpoint), "--hf-overrides", json.dumps({"rope_scaling": rope}), "--max-model-len", "64"
    )
    assert report["shape"]["context_length"] == 1024  # what the model offers; what was asked for is under capacity
    assert report["capacity"]["max_model_len"] == 64


def test_layers_of_an_unknown_kind_are_a_problem(model_dir: Path, capsys: Capture) -> None:
    config = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]}
    (model_dir / "config.json").write_text(json.dumps(config))
    report = info(capsys, str(model_dir), code=2)
    assert any("'linear_attention', which is not implemented" in problem for problem in report["problems"])


# -- what layers keep -----------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "query_pre_attn_scalar": 8,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": True,
}
TYPES = ["sliding_attention", "full_attention"] * 3
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "window": {"sliding_window": 16},
    "window on": {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
    "window off": {"sliding_window": 16, "use_sliding_window": False},
    "window null": {"sliding_window": None, "use_sliding_window": True},
    "layer types": {"sliding_window": 16, "use_sliding_window": True, "layer_types": TYPES},
    "pattern": {"sliding_window": 16, "sliding_window_pattern": 3},
}
MODEL_TYPES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_layers_keep_what_the_model_says(architecture: str, variant: dict[str, Any], tmp_path: Path) -> None:
    raw = {**SIZES, **variant, "architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    if architecture == "OPTForCausalLM":
        del raw["num_key_value_heads"]  # OPT has as many as query heads, and no such key
    (tmp_path / "config.json").write_text(json.dumps(raw))
    hf = HFConfig.from_dir(tmp_path)
    with torch.device("meta"):
        model = get_model_class(hf)(hf)
    real: list[AnyKVCacheSpec] = [
        layer.kv_cache_spec(16, torch.float16) for layer in model.modules() if isinstance(layer, Attention)
    ]
    assert list(kv_cache_specs(hf, 16, "float16").values()) == real
    assert len(real) == SIZES["num_hidden_layers"]


def test_engine_args_and_info_agree_on_the_name(checkpoint: Path) -> None:
    assert EngineArgs(str(checkpoint)).create_engine_config().model_config.sampling_defaults == {
        "temperature": 0.6,
        "top_p": 0.9,
    }


def test_a_gpu_is_not_guessed_at(checkpoint: Path, capsys: Capture) -> None:
    report = info(capsys, str(checkpoint), "--device", "cuda")
    assert report["capacity"] == {}
    assert report["kv_cache"]["bytes_per_token"] > 0


def test_an_adapter_is_described(tmp_path: Path, capsys: Capture) -> None:
    directory = write_adapter(tmp_path / "sql", base_model_name_or_path="owner/base", alora_invocation_tokens=[5, 6])
    report = info(capsys, str(directory))
    assert report["problems"] == []
    facts = report["adapter"]
    assert (facts["of_model"], facts["rank"], facts["matrices"]) == ("owner/base", 4, 9)
    assert (facts["modules"], facts["begins_at"]) == ("down_proj, q_proj, v_proj", "5, 6")
    assert facts["parameters"] == 3 * 4 * (48 + 48 + 48 + 24 + 80 + 48)
    assert facts["stored_bytes"] == 4 * facts["parameters"]
    assert main(["info", str(directory)]) == 0
    assert "rank                    4" in capsys.readouterr().out
    assert main(["info", str(directory), "--max-lora-rank", "2"]) == 2
    assert "problem: " in (out := capsys.readouterr().out)
    assert "--max-lora-rank is 2" in out


def test_an_adapter_is_no_model_to_load(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is a LoRA adapter, not a model.*\(owner/base\)"):
        EngineArgs(str(write_adapter(tmp_path, base_model_name_or_path="owner/base"))).create_engine_config()


def test_what_to_do_about_a_model_that_cannot_be_fetched(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["info", "no-such-llama"]) == 2
    err = capsys.readouterr().err
    assert "HF_HUB_OFFLINE is set, and the hub's cache does not hold it" in err
    assert "a hub id with its owner, as in OWNER/no-such-llama" in err
    assert main(["info", "nobody/no-such-llama"]) == 2
    assert "quire pull nobody/no-such-llama" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "llama4_text"])
def test_latent_and_chunked_layers_keep_what_the_model_says(family: str, tiny_checkpoint: MakeCheckpoint) -> None:
    hf = HFConfig.from_dir(tiny_checkpoint(family))
    with torch.device("meta"):
        model = get_model_class(hf)(hf)
    real = [layer.kv_cache_spec(16, torch.float16) for layer in model.modules() if isinstance(layer, Attention)]
    assert list(kv_cache_specs(hf, 16, "float16").values()) == real
    assert {type(spec).__name__ for spec in real} & {"LatentSpec", "ChunkedSpec"}
