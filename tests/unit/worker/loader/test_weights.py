"""Weights that are given back, taken again and replaced: bit for bit, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.config.engine_args import EngineArgs
from quire.errors import ModelLoadError
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.library import Context, NativeLibrary
from quire.worker.kernels.native import NativeKernels
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.weights import checkpoint_tensors
from quire.worker.loader import ModelWeights, Placement, load_model
from quire.worker.loader import weights as weights_module

Make = Callable[..., Path]
CPU = torch.device("cpu")
FAMILIES = ["llama", "gemma2", "mixtral", "opt"]
"""Packed matrices; tied embeddings; experts; biases and learned positions."""


class Loaded:
    """A model and its weights."""

    def __init__(
        self, path: Path, dtype: torch.dtype = torch.float32, kernels: Kernels = TORCH_KERNELS, **flags: Any
    ) -> None:
        config = EngineArgs(str(path), **flags).create_engine_config()
        placement = Placement(CPU, dtype, kernels)
        self.model: nn.Module = load_model(config.model_config, config.load_config, placement)
        self.weights = ModelWeights(self.model, config.model_config, config.load_config, placement)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in checkpoint_tensors(self.model).items()}

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        found = checkpoint_tensors(self.model)
        return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)

    @property
    def is_released(self) -> bool:
        return all(parameter.is_meta for parameter in self.model.parameters())


def edited(path: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with another config.json; "absent" takes a key out."""
    shutil.copytree(path, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_dropped_weights_come_back_from_the_checkpoint(tiny_checkpoint: Make, family: str) -> None:
    loaded = Loaded(tiny_checkpoint(family))
    before = loaded.tensors()
    loaded.weights.drop()
    assert loaded.is_released
    loaded.weights.drop()
    loaded.weights.restore()
    assert loaded.holds(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_checkpoint_takes_their_place(tiny_checkpoint: Make, family: str) -> None:
    loaded, other = Loaded(tiny_checkpoint(family)), Loaded(tiny_checkpoint(family, seed=1))
    places = [parameter.data_ptr() for parameter in loaded.model.parameters()]
    loaded.weights.check(tiny_checkpoint(family, seed=1))
    assert not loaded.holds(other.tensors())
    loaded.weights.replace(tiny_checkpoint(family, seed=1))
    assert loaded.holds(other.tensors())
    assert [parameter.data_ptr() for parameter in loaded.model.parameters()] == places, "in place"
    loaded.weights.drop()
    loaded.weights.restore()
    assert loaded.holds(other.tensors()), "they come back from where they came last"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_dropped_restored_and_replaced(
    tiny_checkpoint: Make, family: str, library: NativeLibrary
) -> None:
    """Kernels that keep weights in a form of their own: seen through the logits of some hidden states."""
    kernels = NativeKernels(Context(library, 1, library.instruction_sets()[0]))

    def logits(loaded: Loaded) -> Tensor:
        layers = [m for m in loaded.model.modules() if type(m).__name__.endswith(("MLP", "MoE", "Linear"))]
        inputs = [next(p for p in layer.parameters() if p.dim() > 1).shape[-1] for layer in layers]
        return torch.cat([layer(torch.ones(2, n)).flatten() for layer, n in zip(layers, inputs, strict=True)])

    loaded, other = (Loaded(tiny_checkpoint(family, seed=seed), kernels=kernels) for seed in (0, 1))
    before, others = logits(loaded), logits(other)
    loaded.weights.drop()
    assert loaded.is_released
    with pytest.raises(RuntimeError, match="given back"):
        logits(loaded)
    loaded.weights.restore()
    assert torch.equal(logits(loaded), before)
    loaded.weights.replace(tiny_checkpoint(family, seed=1))
    assert torch.equal(logits(loaded), others)
    assert not torch.equal(before, others)


def test_weights_that_are_there_are_not_read_again(tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(tiny_checkpoint("llama"))
    monkeypatch.setattr(weights_module, "fill_weights", lambda *args: pytest.fail("read again"))
    loaded.weights.offload()  # on a CPU they are in main memory
    loaded.weights.restore()
    assert not loaded.is_released


def test_offloaded_weights_come_back_from_main_memory(tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that plays an accelerator; tests/e2e has one for CUDA."""
    monkeypatch.setattr(ModelWeights, "_live_in_main_memory", False)
    loaded = Loaded(tiny_checkpoint("llama"))
    before = loaded.tensors()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(weights_module, "fill_weights", lambda *args: pytest.fail("read again"))
        for _ in range(2):
            loaded.weights.offload()
            loaded.weights.offload()
            assert loaded.is_released
            loaded.weights.restore()
            assert loaded.holds(before)
    loaded.weights.offload()
    loaded.weights.drop()  # deeper
    loaded.weights.restore()
    assert loaded.holds(before)
    loaded.weights.offload()
    loaded.weights.replace(tiny_checkpoint("llama", seed=1))
    assert loaded.holds(Loaded(tiny_checkpoint("llama", seed=1)).tensors())


def test_dropped_weights_may_be_replaced_at_once(tiny_checkpoint: Make) -> None:
    loaded, other = Loaded(tiny_checkpoint("llama")), Loaded(tiny_checkpoint("llama", seed=1))
    loaded.weights.drop()
    loaded.weights.replace(tiny_checkpoint("llama", seed=1))
    assert loaded.holds(other.tensors())


def test_types_are_converted(tiny_checkpoint: Make) -> None:
    loaded = Loaded(tiny_checkpoint("llama"), torch.bfloat16)
    other = Loaded(tiny_checkpoint("llama", seed=1), torch.bfloat16)
    loaded.weights.replace(tiny_checkpoint("llama", seed=1))
    assert loaded.holds(other.tensors())


def test_noise_comes_back_as_it_was_and_can_be_replaced(tiny_checkpoint: Make) -> None:
    loaded = Loaded(tiny_checkpoint("llama"), load_format="dummy", seed=3)
    before = loaded.tensors()
    loaded.weights.drop()
    loaded.weights.restore()
    assert loaded.holds(before)
    loaded.weights.replace(tiny_checkpoint("llama"))
    assert loaded.holds(Loaded(tiny_checkpoint("llama")).tensors())


def test_a_file_overwritten_by_its_trainer_is_read_anew(tiny_checkpoint: Make, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "llama"))
    loaded = Loaded(path)
    shutil.copy(tiny_checkpoint("llama", seed=1) / "model.safetensors", path / "model.safetensors")
    loaded.weights.replace()
    assert loaded.holds(Loaded(path).tensors())


# -- refusals --------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_config_is_judged_by_its_tensors(tiny_checkpoint: Make, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint("llama", seed=1) / "model.safetensors", tmp_path / "model.safetensors")
    Loaded(tiny_checkpoint("llama")).weights.check(tmp_path)


def test_notes_and_spellings_in_the_config_may_differ(tiny_checkpoint: Make, tmp_path: Path) -> None:
    rope = json.loads((tiny_checkpoint("llama") / "config.json").read_text())["rope_parameters"]
    other = edited(
        tiny_checkpoint("llama"),
        tmp_path / "other",
        transformers_version="9.9",
        use_cache=False,
        attention_dropout=0.1,
        eos_token_id=77,
        rope_parameters="absent",
        rope_theta=rope["rope_theta"],
    )
    Loaded(tiny_checkpoint("llama")).weights.check(other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 0.5}, "rms_norm_eps = 0.5, the model that is loaded"),
        ({"rope_parameters": "absent", "rope_theta": 7.0}, "rope of full_attention"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1"),
    ],
)
def test_another_model_is_refused(tiny_checkpoint: Make, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    other = edited(tiny_checkpoint("llama"), tmp_path / "other", **changes)
    with pytest.raises(ModelLoadError) as caught:
        Loaded(tiny_checkpoint("llama")).weights.check(other)
    assert words in str(caught.value)
    assert "start an engine for it" in str(caught.value)


def test_hf_overrides_are_laid_over_both(tiny_checkpoint: Make, tmp_path: Path) -> None:
    other = edited(tiny_checkpoint("llama"), tmp_path / "other", rms_norm_eps=0.5)
    Loaded(tiny_checkpoint("llama"), hf_overrides={"rms_norm_eps": 0.25}).weights.check(other)


def test_a_refusal_leaves_the_weights_alone(tiny_checkpoint: Make, tmp_path: Path) -> None:
    loaded = Loaded(tiny_checkpoint("llama"))
    before = loaded.tensors()
    tensors = load_file(tiny_checkpoint("llama", seed=1) / "model.safetensors")
    name = max(tensors)
    save_file(tensors | {name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    for directory, words in ((tmp_path, f"tensor {name} has shape"), (tmp_path / "none", "is not a directory")):
        with pytest.raises(ModelLoadError, match=words):
            loaded.weights.check(directory)
        with pytest.raises(ModelLoadError, match=words):
            loaded.weights.replace(directory)
    assert loaded.holds(before)
    loaded.weights.drop()
    loaded.weights.restore()
    assert loaded.holds(before)


def test_an_update_that_failed_in_another_worker_is_taken_back(tiny_checkpoint: Make) -> None:
    """This worker has the new weights; a later update is not affected."""
    loaded = Loaded(tiny_checkpoint("llama"))
    before = loaded.tensors()
    loaded.weights.replace(tiny_checkpoint("llama", seed=1))
    assert loaded.weights.undo()
    assert not loaded.weights.undo()
    loaded.weights.restore()
    assert loaded.holds(before), "as when it wakes up"
    loaded.weights.replace(tiny_checkpoint("llama", seed=1))
    after = loaded.tensors()
    with pytest.raises(ModelLoadError):
        loaded.weights.replace(tiny_checkpoint("llama") / "none")
    assert not loaded.weights.undo(), "it has failed here"
    loaded.weights.replace()
    assert loaded.holds(after)


def test_reading_that_breaks_off_is_not_taken_for_weights(
    tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(tiny_checkpoint("llama"))
    before = loaded.tensors()
    real = weights_module.fill_weights

    def fill_one(model: nn.Module, stored: Any, seed: int, placement: Placement, cache: object) -> None:
        name = next(iter(stored))
        checkpoint_tensors(model)[name].zero_()
        raise OSError("the disk is gone")

    monkeypatch.setattr(weights_module, "fill_weights", fill_one)
    with pytest.raises(OSError, match="the disk is gone"):
        loaded.weights.replace(tiny_checkpoint("llama", seed=1))
    assert not loaded.holds(before)
    monkeypatch.setattr(weights_module, "fill_weights", real)
    loaded.weights.restore()
    assert loaded.holds(before)
