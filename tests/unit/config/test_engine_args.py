"""EngineArgs to EngineConfig: defaults by usage, resolution, errors before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import DEFAULT_BUDGETS, FLAGS, AsyncEngineArgs, EngineArgs
from quire.config.model import ASSETS_DIR, resolve_model_dir
from quire.errors import ConfigError, ModelLoadError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
    "eos_token_id": [2, 3],
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 9}))
    return tmp_path


def make(checkpoint: Path, usage: str = "offline", **flags: Any) -> Any:
    return EngineArgs(str(checkpoint), **flags).create_engine_config(usage)


def test_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len") as caught:
        EngineArgs(max_model_length=1)
    assert isinstance(caught.value, TypeError), "Python's class for a keyword that does not exist"


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_arguments_of_vllms_are_taken_as_serve_takes_them(kind: type[EngineArgs], caplog: Any) -> None:
    args = kind("m", enforce_eager=True, tensor_parallel_size=1, enable_lora=False, swap_space=4, max_num_seqs=8)
    assert args.non_default == {"model": "m", "max_num_seqs": 8}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("swap_space has no effect")
    assert kind(structured_outputs_config={"backend": "guidance"}).grammar_backend == "guidance"
    with pytest.raises(ConfigError, match=r"^prefill_context_parallel_size=2 is not supported"):
        kind("m", prefill_context_parallel_size=2)


def test_a_flag_that_is_given_wins_over_one_of_vllms() -> None:
    both = EngineArgs(grammar_backend="xgrammar", structured_outputs_config={"backend": "guidance"})
    assert both.grammar_backend == "xgrammar"
    asdict = EngineArgs(grammar_backend="auto", structured_outputs_config={"backend": "guidance"})
    assert asdict.grammar_backend == "guidance", "a default is not given: programs pass those of all flags"


def test_no_context_beyond_the_models_own(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert make(checkpoint, max_model_len=512).model_config.model_len == 512
    with pytest.raises(
        ConfigError,
        match=r"--max-model-len 513 is more than the 512 tokens .*config\.json.* QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1",
    ):
        make(checkpoint, max_model_len=513)
    assert not caplog.records
    monkeypatch.setenv("QUIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert make(checkpoint, max_model_len=1_000_000).model_config.model_len == 1_000_000
    assert "outputs beyond them may be wrong" in caplog.text


def test_dynamic_scaling_stretches_the_context(checkpoint: Path) -> None:
    overrides = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert make(checkpoint, max_model_len=2048, hf_overrides=overrides).model_config.model_len == 2048
    with pytest.raises(ConfigError, match="more than the 2048 tokens"):
        make(checkpoint, max_model_len=2049, hf_overrides=overrides)


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
@pytest.mark.parametrize("factor", ["1e400", "1e308", "NaN"])
def test_a_factor_without_end_is_refused_in_one_line(kind: str, factor: str, checkpoint: Path) -> None:
    scaling = f'{{"rope_type": "{kind}", "factor": {factor}}}'
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, "rope_scaling": "X"}).replace('"X"', scaling))
    if (kind, factor) == ("dynamic", "1e308"):  # stretches nothing until a longer context is asked for
        assert make(checkpoint).model_config.model_len == 512
        return
    with pytest.raises(
        ModelLoadError, match=r"config\.json (has rotary parameter 'factor' = |gives a context of )"
    ) as error:
        make(checkpoint)
    assert "\n" not in str(error.value)


def test_out_of_range_argument_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs 0"):
        EngineArgs(max_num_seqs=0)


def test_attributes_and_repr() -> None:
    args = EngineArgs("m", max_num_seqs=8, block_size=16)
    assert (args.model, args.max_num_seqs, args.block_size, args.dtype) == ("m", 8, 16, "auto")
    assert args.non_default == {"model": "m", "max_num_seqs": 8}
    assert "max_num_seqs=8" in repr(args)
    assert not hasattr(args, "nonsense")


@pytest.mark.parametrize("usage", sorted(DEFAULT_BUDGETS))
def test_budgets_by_usage(checkpoint: Path, usage: str) -> None:
    scheduler = make(checkpoint, usage).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == DEFAULT_BUDGETS[usage]
    assert scheduler.max_num_scheduled_tokens == scheduler.max_num_batched_tokens


def test_more_seqs_than_the_default_budget_raise_the_budget(checkpoint: Path) -> None:
    scheduler = make(checkpoint, max_num_seqs=10_000).scheduler_config
    assert scheduler.max_num_batched_tokens == 10_000


def test_without_chunked_prefill_the_budget_holds_a_whole_context(checkpoint: Path) -> None:
    config = make(checkpoint, enable_chunked_prefill=False, hf_overrides={"max_position_embeddings": 9000})
    assert config.scheduler_config.max_num_batched_tokens == 9000
    with pytest.raises(ConfigError, match="chunked prefill is off"):
        make(checkpoint, enable_chunked_prefill=False, max_num_batched_tokens=256)


def test_budget_below_seqs_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="every running request needs one token"):
        make(checkpoint, max_num_batched_tokens=4, max_num_seqs=8)


def test_the_model_section_is_read_from_the_checkpoint(checkpoint: Path) -> None:
    model = make(checkpoint).model_config
    assert model.model_dir == checkpoint.resolve() == model.tokenizer_dir
    assert model.hf_config.architecture == "LlamaForCausalLM"
    assert model.model_len == 512
    assert model.generation_defaults == {"temperature": 0.5, "top_k": 9}
    assert model.name == str(checkpoint)
    assert make(checkpoint, max_model_len=100, served_model_name="x").model_config.model_len == 100
    assert make(checkpoint, max_model_len=-1).model_config.model_len == 512
    assert make(checkpoint, served_model_name="x").model_config.name == "x"


def test_generation_config_sources(checkpoint: Path, tmp_path: Path) -> None:
    assert make(checkpoint, generation_config="vllm").model_config.generation_defaults == {}
    over = make(checkpoint, override_generation_config={"top_k": 1}).model_config
    assert over.generation_defaults == {"temperature": 0.5, "top_k": 1}
    with pytest.raises(ConfigError, match=r"generation_config\.json does not exist"):
        make(checkpoint, generation_config=str(tmp_path / "nowhere"))
    (checkpoint / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not valid JSON"):
        make(checkpoint)


def test_hf_overrides_replace_fields(checkpoint: Path) -> None:
    assert make(checkpoint, hf_overrides={"vocab_size": 7}).model_config.hf_config.vocab_size == 7


def test_config_is_frozen(checkpoint: Path) -> None:
    config = make(checkpoint)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache_config.block_size = 3


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_cache_of_8_bits_is_refused_in_words(checkpoint: Path, dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"--kv-cache-dtype {dtype}: .* not implemented; bfloat16 .* --quantization"):
        make(checkpoint, kv_cache_dtype=dtype)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_broken_config_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        make(tmp_path)


def test_where_a_model_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model_dir("demo") == ASSETS_DIR / "demo"
    (tmp_path / "local").mkdir()
    assert resolve_model_dir("local") == (tmp_path / "local").resolve()
    (tmp_path / "file.bin").touch()
    for name, message in {
        "file.bin": "is a file",
        "./missing": "is not a directory",
        "a/b/c": "is not a directory",
        str(tmp_path / "missing"): "is not a directory.*; check the path, or fetch a model with quire pull",
    }.items():
        with pytest.raises(ModelLoadError, match=message):
            resolve_model_dir(name)


def test_unreachable_hub_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"give the path of a downloaded checkpoint.*quire pull some/model"):
        resolve_model_dir("some/model")


def test_a_name_is_downloaded_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(model: str, **kwargs: Any) -> str:
        asked.update(model=model, **kwargs)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_dir("some/model", "abc", "/cache") == tmp_path
    assert (asked["model"], asked["revision"], asked["cache_dir"]) == ("some/model", "abc", "/cache")
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked["allow_patterns"])
    files = ["model-00001-of-00002.safetensors", "tokenizer.model", "tekken.json", "hy.tiktoken", "chat_template.jinja"]
    second = ["consolidated.safetensors", "original/model.safetensors", "metal/model.bin", "onnx/config.json"]
    others = ["pytorch_model.bin", "modeling_x.py", "weights.pt"]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects([*files, *second, *others], **patterns)) == files


def test_flag_names_are_unique_across_sections() -> None:
    owners = {(spec.owner, spec.field_name) for spec in FLAGS.values()}
    assert len(owners) == len(FLAGS)


def test_the_profiler_config_is_checked() -> None:
    assert EngineArgs("demo").create_engine_config().observability_config.profiler.torch_profiler_dir == "."
    config = {"torch_profiler_dir": "/traces", "max_iterations": 3}
    made = EngineArgs("demo", profiler_config=config).create_engine_config().observability_config.profiler
    assert (made.torch_profiler_dir, made.max_iterations, made.torch_profiler_with_stack) == ("/traces", 3, True)
    for wrong, words in (
        ({"torch_profiler_directory": "/x"}, "unknown key 'torch_profiler_directory'; it may have profiler, torch_"),
        ({"max_iterations": "3"}, "max_iterations is '3'; it must be a value such as 0"),
        ({"torch_profiler_use_gzip": 1}, "it must be a value such as True"),
        ({"delay_iterations": -1}, "must not be negative"),
        ({"profiler": "cuda"}, "profiler is 'cuda'; it must be 'torch'"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineArgs("demo", profiler_config=wrong).create_engine_config()
