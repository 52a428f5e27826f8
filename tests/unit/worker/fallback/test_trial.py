"""A class is certified if it answers as transformers does, and refused by name for whatever it does otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tools.certify_fallback import classes, tiny_config, try_class
from torch import nn

from quire.config.model_impl import certified_models
from quire.errors import UnsupportedModelError
from quire.worker.attention.native_backend import NativeAttentionBackend, StepPlanner
from quire.worker.fallback import interface, trial
from quire.worker.fallback.interface import View, recognize

SOME = (
    "AfmoeForCausalLM",  # a gate on attention's answer, shared experts
    "Cohere2ForCausalLM",  # windows, and logits scaled after the head
    "DiffLlamaForCausalLM",  # two calls of attention in a layer
    "DeepseekV3ForCausalLM",  # values narrower than keys
    "Gemma2ForCausalLM",  # soft caps of scores and logits, scaled embedding that is the head
    "Gemma3nForCausalLM",  # four streams, and layers that read others' keys
    "GptOssForCausalLM",  # sinks, experts that stay torch's
    "MiMoV2FlashForCausalLM",  # layers with fewer heads of keys and values
    "ModernBertDecoderForCausalLM",  # a head that is called decoder
    "OPTForCausalLM",  # learned positions, a base inside the base
    "PersimmonForCausalLM",  # one matrix for queries, keys and values
    "Qwen2MoeForCausalLM",  # gated experts on our kernel
)
VERSION, ROWS = certified_models()


@pytest.mark.parametrize("name", SOME)
def test_a_certified_class_answers_as_transformers(name: str) -> None:
    difference, refused = try_class(name)
    assert refused == ""
    assert difference <= trial.TOLERANCE
    assert ROWS[name].refused == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(classes()) - set(SOME)))
def test_the_table_is_what_the_trial_finds(name: str) -> None:
    assert bool(try_class(name)[1]) == bool(ROWS[name].refused)


def test_every_class_has_a_row() -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != VERSION:
        pytest.skip(f"the table is that of transformers {VERSION}")
    assert set(ROWS) == set(classes())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DogeForCausalLM", "layers.0.self_attn: it changes its attention mask"),
        ("InklingForCausalLM", "layers.0.self_attn: it calls attention with position_bias"),
        ("CodeGenForCausalLM", "0 of its 4 layers call transformers' attention interface"),
        ("BartForCausalLM", "its attention mask is neither causal"),
        ("MambaForCausalLM", "its layers keep recurrent states"),
        ("Llama4ForCausalLM", "its logits differ from transformers'"),  # positions of its scale come from its cache
    ],
)
def test_what_quire_cannot_run_is_refused_by_name(name: str, reason: str) -> None:
    assert reason in try_class(name)[1]


def certify(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    trial.certify(getattr(transformers, name), tiny_config(name))


def test_steps_are_planned_where_all_runs_on_kernels(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planners: list[StepPlanner] = []

    def plan(backend: Any, model: Any) -> StepPlanner:
        planners.append(StepPlanner(model, backend))
        return planners[-1]

    monkeypatch.setattr(NativeAttentionBackend, "plan_steps", plan)
    certify("LlamaForCausalLM")
    certify("CohereForCausalLM")  # rotates pairs
    assert [planner.is_planned for planner in planners] == [True, False]


@pytest.mark.parametrize("view", [View(), View(window=17), View(chunk=16)], ids=str)
def test_a_wrong_window_is_found(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface.Recording, "view_of", lambda self, mask: view)
    with pytest.raises(UnsupportedModelError, match="its logits differ"):
        certify("MistralForCausalLM")


@pytest.mark.parametrize("key", ["scaling", "softcap", pytest.param("s_aux", marks=pytest.mark.slow)])
def test_a_lost_argument_of_attention_is_found(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, record = interface.attend, interface.record

    def without(call: Any) -> Any:
        return lambda *args, **kwargs: call(*args, **{name: v for name, v in kwargs.items() if name != key})

    for name, call in ((interface.NAME, attend), (interface.RECORDING, record)):
        monkeypatch.setitem(interface.AttentionInterface._global_mapping, name, without(call))
    with pytest.raises(UnsupportedModelError, match="its logits differ"):
        certify("GptOssForCausalLM" if key == "s_aux" else "Gemma2ForCausalLM")


def test_a_layer_that_keeps_silent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    forward = llama.LlamaAttention.forward

    def skip_one(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, None) if self.layer_idx == 2 else forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(llama.LlamaAttention, "forward", skip_one)
    with pytest.raises(UnsupportedModelError, match="3 of its 4 layers"):
        certify("LlamaForCausalLM")


def window(size: int) -> Any:
    return lambda batch, head, query, key: (key <= query) & (key > query - size)


def chunks(size: int) -> Any:
    return lambda batch, head, query, key: (key <= query) & (key // size == query // size)


@pytest.mark.parametrize("size", [1, 2, 16, 4096, 1_000_001])
def test_masks_are_recognized(size: int) -> None:
    assert recognize(lambda batch, head, query, key: key <= query) == View()
    assert recognize(window(size)) == (View(window=size) if size > 1 else View(chunk=1))
    if size > 1:
        assert recognize(chunks(size)) == View(chunk=size)


@pytest.mark.parametrize(
    "mask",
    [
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & ((key > query - 8) | (key < 4)),
        lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2),
        lambda batch, head, query, key: (key <= query) & (key > query - 8) & (key != 3),
        lambda batch, head, query, key: key < query,
        lambda batch, head, query, key: torch.zeros(3, dtype=torch.bool)[query] & (key <= query),
    ],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="mask"):
        recognize(mask)


def test_differences_are_measured_beside_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference of 1e-3 of the largest logit is refused."""
    honest = trial.run_interleaved

    def nearly(*args: Any) -> Any:
        return [logits + 1e-3 * max(1.0, float(logits.abs().max())) for logits in honest(*args)]

    monkeypatch.setattr(trial, "run_interleaved", nearly)
    with pytest.raises(UnsupportedModelError, match="its logits differ"):
        certify("LlamaForCausalLM")
    monkeypatch.setattr(trial, "run_interleaved", lambda *args: [logits * math.nan for logits in honest(*args)])
    with pytest.raises(UnsupportedModelError, match="its logits differ"):
        certify("LlamaForCausalLM")
