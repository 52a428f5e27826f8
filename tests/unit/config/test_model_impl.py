"""Which code runs a model, decided from config.json, the registry and the table of certified classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config import model_impl
from quire.config.engine_args import EngineArgs
from quire.config.hf_config import HFConfig
from quire.config.model_impl import ModelImpl, Verdict, choose_model_impl
from quire.config.pooling import PoolingConfig
from quire.errors import ConfigError

CERTIFIED, REFUSED, NATIVE, UNKNOWN = (f"{name}ForCausalLM" for name in ("Certified", "Refused", "Native", "Unknown"))
TABLE = {CERTIFIED: Verdict(), NATIVE: Verdict(), REFUSED: Verdict("its layers keep recurrent states")}


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table made with transformers 5.20, which is installed."""
    monkeypatch.setattr(model_impl, "native_models", lambda: {NATIVE: "somewhere:else"})
    monkeypatch.setattr(model_impl, "certified_models", lambda: ("5.20.0", TABLE))
    monkeypatch.setattr(model_impl, "installed_transformers", lambda: "5.20.0")


def choose(architecture: str, asked: str = "auto", pooling: PoolingConfig | None = None, **keys: Any) -> ModelImpl:
    return choose_model_impl(asked, HFConfig({"architectures": [architecture], **keys}, Path("config.json")), pooling)


@pytest.mark.parametrize(
    ("architecture", "asked", "name", "words"),
    [
        (NATIVE, "auto", "quire", ""),
        (NATIVE, "quire", "quire", ""),
        (NATIVE, "vllm", "quire", ""),
        (NATIVE, "transformers", "transformers", ""),
        (CERTIFIED, "auto", "transformers", ""),
        (CERTIFIED, "transformers", "transformers", ""),
        (CERTIFIED, "quire", "quire", "is not implemented; similar ones are"),
        (CERTIFIED, "vllm", "quire", "docs/recipes/add_a_model.md"),
        (REFUSED, "auto", "transformers", "RefusedForCausalLM has layers that keep recurrent states (by its class)"),
        (REFUSED, "transformers", "transformers", "keep recurrent states"),
        ("RefusedForConditionalGeneration", "auto", "transformers", "keep recurrent states"),
    ],
)
def test_the_choice(architecture: str, asked: str, name: str, words: str) -> None:
    chosen = choose(architecture, asked)
    assert chosen.name == name
    assert words in chosen.refusal
    assert bool(chosen.refusal) == bool(words)
    assert not chosen.needs_trial


def test_recurrent_layers_are_named_with_a_remedy() -> None:
    kinds = ["linear_attention", "full_attention", "conv"]
    for keys in ({"layer_types": kinds}, {"text_config": {"layer_types": kinds}}):
        refusal = choose(UNKNOWN, **keys).refusal
        assert "recurrent states (conv, linear_attention), which Quire does not run yet; use a model" in refusal
    assert not choose(UNKNOWN, layer_types=["full_attention", "sliding_attention"]).refusal


def test_a_class_without_a_row_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(UNKNOWN).needs_trial
    assert not choose(UNKNOWN).refusal
    monkeypatch.setattr(model_impl, "installed_transformers", lambda: "5.21.0")
    assert choose(CERTIFIED).needs_trial
    monkeypatch.setitem(TABLE, REFUSED, Verdict("its attention mask is odd"))
    assert choose(REFUSED).needs_trial  # another version may do it in another way
    assert not choose(REFUSED).refusal


@pytest.mark.parametrize(("found", "words"), [(None, "not installed"), ("4.57.1", "5.10"), ("6.0.0", "below 6")])
def test_without_the_extra_the_remedy_is_named(found: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_impl, "installed_transformers", lambda: found)
    refusal = choose(CERTIFIED).refusal
    assert words in refusal
    assert "pip install 'quire[transformers]'" in refusal
    assert not choose(NATIVE).refusal


def test_what_does_not_work_with_it_is_refused() -> None:
    pools = PoolingConfig(head="embed", is_encoder=False, pooling_type="last")
    means = PoolingConfig(head="embed", is_encoder=False, pooling_type="mean")
    scores = PoolingConfig(head="classify", is_encoder=False, pooling_type="last", labels=("a",))
    assert not choose(CERTIFIED, pooling=pools).refusal
    assert "last token only" in choose(CERTIFIED, pooling=means).refusal
    assert "last token only" in choose(CERTIFIED, pooling=scores).refusal
    assert "quantized" in choose(CERTIFIED, quantization_config={"quant_method": "gptq"}).refusal


def test_the_flag_has_vllms_name() -> None:
    assert EngineArgs("demo", model_impl="vllm").model_impl == "vllm"
    with pytest.raises(ConfigError, match="--model-impl 'terratorch' is not one of auto, quire, transformers, vllm"):
        EngineArgs("demo", model_impl="terratorch")


def test_a_core_imports_torch_whole_for_transformers() -> None:
    parallel = EngineArgs("demo").create_engine_config().parallel_config
    assert any("lean_torch" in name for name in parallel.core_names(model_impl.QUIRE))
    assert not any("lean_torch" in name for name in parallel.core_names(model_impl.TRANSFORMERS))
