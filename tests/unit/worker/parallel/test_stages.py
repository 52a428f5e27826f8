"""Stages of a pipeline: which layers each has, what it holds, and how hidden states get from one to the next."""

from __future__ import annotations

import threading

import pytest
import torch

from quire.errors import ConfigError, ServerError
from quire.wire.shared_memory import set_abort_word
from quire.wire.topology import Topology
from quire.worker.kernels.barrier import BarrierError
from quire.worker.kernels.library import NativeLibrary
from quire.worker.layers.weights import Elsewhere
from quire.worker.parallel.plan import Stage
from quire.worker.parallel.stages import StageExchange
from tests.checkpoints import MakeCheckpoint

from .test_bits import check_bits
from .together import close_links, make_links, run_together


def test_layers_are_divided_evenly_or_as_asked_for() -> None:
    assert [list(Stage(i, 3).layers(8)) for i in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [list(Stage(i, 2, (1, 3)).layers(4)) for i in range(2)] == [[0], [1, 2, 3]]
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2: .* does not divide 4 layers"):
        Stage(0, 2, (1, 1)).layers(4)
    with pytest.raises(ConfigError, match="3 layers are too few for 4 stages"):
        Stage(0, 4).layers(3)


def test_inputs_of_layers_are_passed_on(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,5")
    check_bits(tiny_checkpoint("gemma4_text"), (), library, stages=((2, 1),), dtype="bfloat16")
    monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", "4,2")
    with pytest.raises(ConfigError, match="layer 4 reads the keys and values of layer 2, which is in an earlier stage"):
        run_together(tiny_checkpoint("gemma4_text"), 1, library, monkeypatch, 2)


def test_a_partition_that_is_none_is_refused(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("1", "1,x", "0,3"):
        monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", text)
        with pytest.raises(ConfigError, match="is not a list of 2 numbers of layers"):
            run_together(tiny_checkpoint("llama"), 1, library, monkeypatch, 2)


def test_random_weights_are_those_of_one_worker(tiny_checkpoint: MakeCheckpoint, library: NativeLibrary) -> None:
    path = tiny_checkpoint("llama", tie_word_embeddings=True)
    check_bits(path, (), library, stages=((3, 1),), load_format="dummy", dtype="bfloat16")


def test_a_stage_holds_its_modules_only(
    tiny_checkpoint: MakeCheckpoint, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, workers = run_together(tiny_checkpoint("llama"), 1, library, monkeypatch, 3, dtype="float32")
    absent = [
        [path for path, module in worker.get_model().named_modules() if isinstance(module, Elsewhere)]
        for worker in workers
    ]
    assert absent == [
        ["model.layers.1", "model.layers.2", "model.norm", "lm_head"],
        ["model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm", "lm_head"],
        ["model.embed_tokens", "model.layers.0", "model.layers.1"],
    ]
    assert [list(worker.get_kv_cache_spec()) for worker in workers] == [
        [f"model.layers.{i}.self_attn"] for i in range(3)
    ]
    sizes = [worker._share_of(900) for worker in workers]
    assert sizes == [300] * 3, "each has memory for its own layers"


def test_rows_come_as_they_were_sent_until_a_worker_fails() -> None:
    first, second = make_links(Topology(pp=2))
    assert first is not None
    assert second is not None
    sender, receiver = StageExchange(first, 16), StageExchange(second, 16)
    assert sender.receive(3) == ()
    rows = torch.randn(3, 8).bfloat16()
    sender.send((rows, rows[:, :4]))
    received = receiver.receive(3)
    assert [t.tolist() for t in received] == [rows.tolist(), rows[:, :4].tolist()]
    sender.send((rows + 1, rows[:, 4:]))
    again = receiver.receive(3)
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in received], "plans read the same places"
    sender.send((rows, rows[:, :4]))
    with pytest.raises(ServerError, match="stages are not at the same step: 48 bytes came instead of 32"):
        receiver.receive(2)
    abort = threading.Timer(0.01, set_abort_word, [first.shared_file])
    abort.start()
    with pytest.raises(BarrierError, match="another worker of the step has failed"):
        receiver.receive(3)
    abort.join()
    close_links(first)
    close_links(second)


def test_the_end_of_the_stage_before_is_noticed() -> None:
    first, second = make_links(Topology(pp=2))
    close_links(first)
    assert second is not None
    with pytest.raises(BarrierError, match="the stage before this one has ended"):
        StageExchange(second, 16).receive(1)
    close_links(second)
