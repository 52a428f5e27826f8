"""Several workers beside one, as threads of one process: what models that pool, drafters, sessions, embeddings,
grammars and aborts give is what they give with one worker."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, LLMEngine, SamplingParams, StructuredOutputsParams
from quire.errors import ConfigError, ModelLoadError, ServerError
from quire.outputs import RequestOutput
from quire.testing.failpoints import injected
from quire.testing.oracle_drafter import OracleDrafter
from quire.worker.spec_decode.drafter import DraftRow, Proposal
from quire.worker.spec_decode.hidden_head import HiddenHead
from tests.checkpoints import MakeCheckpoint
from tests.worker_threads import THREADS, contexts_of_their_own

from .test_heads import make_head, make_target
from .test_pooling import pooled, prompts_of
from .test_sessions import answers
from .test_speculation import counters

pytestmark = pytest.mark.slow  # one run of thirty, on a crowded machine, has ended by a crash that was not explained
LAYOUTS: dict[str, dict[str, int]] = {
    "shared layers": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
BOTH_KINDS = pytest.mark.parametrize("layout", ["shared layers", "stages"])
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 99,
    "weight_cache": False,
}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(5, 75)), list(range(40, 43)), list(range(60, 137))]


@contextmanager
def engine(path: object, layout: str = "", **flags: Any) -> Iterator[LLM]:
    """Yields an engine of one worker, or of several in a layout."""
    if layout:
        flags = {**flags, **LAYOUTS[layout], "distributed_executor_backend": THREADS}
    with contexts_of_their_own(), LLM(str(path), **{**FLAGS, **flags}) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def texts(llm: LLM, params: SamplingParams = PARAMS) -> list[list[int]]:
    return tokens(llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False))


ALONE: dict[str, Any] = {}
"""Results with one worker, by the name of the function and the path of the model."""


def compare(path: Path, layout: str, run: Callable[[LLM], Any], **flags: Any) -> Any:
    """Returns what `run` gives with one worker, which must be what it gives with several."""
    key = f"{run.__name__} {path}"
    if key not in ALONE:
        with engine(path, **flags) as llm:
            ALONE[key] = run(llm)
    with engine(path, layout, **flags) as llm:
        assert run(llm) == ALONE[key]
    return ALONE[key]


# -- models that pool -------------------------------------------------------------------------------------------------


def pooled_bits(llm: LLM, task: str) -> list[list[int]]:
    """Chunks, then what the prefix cache holds."""
    prompts = prompts_of((1, 40, 130))
    return [x.view(np.int32).flatten().tolist() for _ in range(2) for x in pooled(llm, prompts, task)]


def test_what_is_pooled_has_the_same_bits(tiny_checkpoint: MakeCheckpoint) -> None:
    embeds, flags = tiny_checkpoint("qwen3"), {"runner": "pooling"}
    classes = tiny_checkpoint("llama", head="classify", num_labels=3)
    found = []
    for layout in ("", "both"):
        with engine(embeds, layout, **flags) as llm:
            found.append([pooled_bits(llm, task) for task in ("embed", "token_embed")])
        with engine(classes, layout) as llm:
            found[-1].append(pooled_bits(llm, "classify"))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_reranker_uses_the_logits_that_all_workers_make(is_tied: bool, tiny_checkpoint: MakeCheckpoint) -> None:
    path, found = tiny_checkpoint("qwen3", tie_word_embeddings=is_tied), []
    overrides = {"architectures": ["Qwen3ForSequenceClassification"],
                 "classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True}  # fmt: skip
    for layout in ("", "both"):
        with engine(path, layout, hf_overrides=overrides) as llm:
            outputs = llm.score("a query", ["one document", "another"], use_tqdm=False)
            found.append([output.outputs.score for output in outputs])
    assert found[0] == found[1]


def test_encoders_are_refused_by_name(tiny_checkpoint: MakeCheckpoint) -> None:
    with (
        pytest.raises(ConfigError, match=r"an encoder \(BertModel\): texts that are seen whole cannot be divided yet"),
        engine(tiny_checkpoint("bert"), "stages", max_num_batched_tokens=256),
    ):
        pass


@pytest.fixture(scope="module")
def constructed_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


# -- drafts -----------------------------------------------------------------------------------------------------------


def drafted(llm: LLM) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """Returns tokens, drawn and greedy, and the numbers of drafts."""
    both = [texts(llm), texts(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))]
    return both, {name: value for name, value in counters(llm).items() if name.startswith("spec_decode")}


@BOTH_KINDS
def test_a_draft_model_drafts_as_for_one_worker(layout: str, tiny_checkpoint: MakeCheckpoint) -> None:
    """The same tokens, of the same drafts, of which the same are right."""
    path = tiny_checkpoint("llama")
    drafts = {"model": str(path), "num_speculative_tokens": 3, "adaptive": False, "quantization": "int8"}
    both, numbers = compare(path, layout, drafted, speculative_config=drafts, disable_log_stats=False)
    assert numbers["spec_decode_num_accepted_tokens"] > 10
    with engine(path) as llm:
        assert texts(llm) == both[0]


@pytest.mark.parametrize("eagle3", [False, True])
@pytest.mark.parametrize("is_random", [False, True])
def test_heads_draft_as_for_one_worker(
    eagle3: bool,
    is_random: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    tiny_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens, of the same drafts, right ones or those of a random head behind random layers."""
    path: Path = request.getfixturevalue("constructed_target")
    flags: dict[str, Any] = {"disable_log_stats": False, "dtype": "float32"}
    if is_random:
        path, flags = tiny_checkpoint("llama", num_hidden_layers=5), {"disable_log_stats": False}
    head = make_head(tmp_path / ("EAGLE3-head" if eagle3 else "EAGLE-head"), path, eagle3=eagle3, is_random=is_random)
    flags["speculative_config"] = {"model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    drafts, propose, found = list[list[int]](), HiddenHead.propose, list[Any]()

    def log(head: HiddenHead, rows: Sequence[DraftRow]) -> list[Proposal]:
        proposals = propose(head, rows)
        drafts.extend(list(proposal.token_ids) for proposal in proposals)
        return proposals

    monkeypatch.setattr(HiddenHead, "propose", log)
    for layout in ("", *LAYOUTS):
        drafts.clear()
        with engine(path, layout, **flags) as llm:
            found.append((drafted(llm), drafts.copy()))
    assert all(each == found[0] for each in found)
    (_, numbers), logged = found[0]
    assert len(logged) > 20
    assert is_random or numbers["spec_decode_num_accepted_tokens"] > 10


def test_a_head_reads_new_weights_of_its_target(tmp_path: Path, constructed_target: Path) -> None:
    """Its own embedding and logits head are those of the new weights, too."""
    head = make_head(tmp_path / "EAGLE-head", constructed_target, eagle3=False, is_random=False)
    other = Path(shutil.copytree(constructed_target, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
    save_file(tensors, other / "model.safetensors")
    flags: dict[str, Any] = {"disable_log_stats": False, "dtype": "float32"}
    flags["speculative_config"] = {"model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    with engine(other, "shared layers", **flags) as llm:
        expected = texts(llm)
    with engine(constructed_target, "shared layers", **flags) as llm:
        texts(llm)
        llm.collective_rpc("load_weights", args=(str(other),))
        llm.reset_prefix_cache()
        before = counters(llm)["spec_decode_num_accepted_tokens"]
        assert texts(llm) == expected
        assert counters(llm)["spec_decode_num_accepted_tokens"] - before > 10


@BOTH_KINDS
def test_classes_of_yours_draft_as_for_one_worker(layout: str, tiny_checkpoint: MakeCheckpoint) -> None:
    path = tiny_checkpoint("llama")
    with engine(path) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
    name = f"{OracleDrafter.__module__}:{OracleDrafter.__qualname__}"
    config = {"method": "custom_class", "model": name, "num_speculative_tokens": 3, "adaptive": False}
    OracleDrafter.learn(outputs)
    try:
        with engine(path, layout, speculative_config=config, disable_log_stats=False) as llm:
            assert texts(llm) == tokens(outputs)
            assert counters(llm)["spec_decode_num_accepted_tokens"] > 10
    finally:
        OracleDrafter.answers.clear()


# -- requests ---------------------------------------------------------------------------------------------------------


def sessions(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """Returns the answers of sessions by the prompts that they answer."""
    answered, _ = answers(llm.llm_engine, num_sessions=3)
    return {prompt: tokens for prompt, (tokens, _) in answered.items()}


@BOTH_KINDS
def test_sessions(layout: str, tiny_checkpoint: MakeCheckpoint) -> None:
    compare(tiny_checkpoint("llama"), layout, sessions, max_model_len=640)


@BOTH_KINDS
def test_embeddings_as_prompts(layout: str, tiny_checkpoint: MakeCheckpoint) -> None:
    """The rows of the table give the answers of their tokens, also beside prompts of tokens."""
    path = tiny_checkpoint("llama")
    rows = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    expected = compare(path, layout, texts)
    with engine(path, layout, enable_prompt_embeds=True) as llm:
        mixed: list[Any] = [{"prompt_embeds": rows[PROMPTS[0]]}, {"prompt_token_ids": PROMPTS[1]}]
        mixed.append({"prompt_embeds": rows[PROMPTS[2]]})
        assert tokens(llm.generate(mixed, PARAMS, use_tqdm=False)) == expected


GRAMMAR = "(ab|cd){2,9} [0-9]{1,4}"


def constrained(llm: LLM) -> list[tuple[str, list[int]]]:
    """Returns texts with a grammar, and one without beside them."""
    grammar = StructuredOutputsParams(regex=GRAMMAR)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=30, structured_outputs=grammar)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    outputs = llm.generate(prompts, [params, PARAMS, params], use_tqdm=False)
    return [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]


@BOTH_KINDS
def test_grammars(layout: str, tiny_checkpoint: MakeCheckpoint) -> None:
    first, _, third = compare(tiny_checkpoint("llama"), layout, constrained)
    for text, _ in (first, third):
        assert re.match("(ab|cd){2,9}", text)
        assert not re.search("[0-9]$", text) or re.fullmatch(GRAMMAR, text)


def run(llm: LLMEngine, outputs: dict[str, list[int]]) -> None:
    """Makes a step, and notes the tokens of each request."""
    for output in llm.step():
        assert isinstance(output, RequestOutput)
        outputs[output.request_id] = list(output.outputs[0].token_ids)


@pytest.mark.parametrize(("layout", "num_steps"), [("shared layers", 2), ("stages", 1), ("stages", 2), ("stages", 5)])
def test_a_request_that_is_aborted_while_steps_of_it_are_on_their_way(
    num_steps: int, layout: str, tiny_checkpoint: MakeCheckpoint
) -> None:
    """The others get their tokens, and the same request its own when it comes again."""
    path = tiny_checkpoint("llama")
    expected = compare(path, layout, texts)
    with engine(path, layout) as llm:
        outputs: dict[str, list[int]] = {}
        for i, prompt in enumerate(PROMPTS):
            llm.llm_engine.add_request(f"{i}", {"prompt_token_ids": prompt}, PARAMS)
        for _ in range(num_steps):
            run(llm.llm_engine, outputs)
        llm.llm_engine.abort_request(["0"])
        before = outputs.get("0")
        while llm.llm_engine.has_unfinished_requests():
            run(llm.llm_engine, outputs)
        assert outputs.get("0") == before, "nothing comes after an abort"
        assert [outputs["1"], outputs["2"]] == expected[1:]
        assert texts(llm) == expected


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_load_ends_the_start(tiny_checkpoint: MakeCheckpoint) -> None:
    loads = count()

    def fail_second(*_: str) -> None:
        if next(loads):
            raise ModelLoadError("the second worker cannot read its part")

    with (
        injected("worker.load", fail_second),
        pytest.raises(ModelLoadError, match="the second worker cannot read its part"),
        engine(tiny_checkpoint("llama"), "shared layers"),
    ):
        pass


@pytest.mark.parametrize(("layout", "place"), [("shared layers", "worker.barrier"), ("stages", "worker.stage")])
def test_a_worker_that_fails_in_a_step_lets_no_other_wait(
    layout: str, place: str, tiny_checkpoint: MakeCheckpoint
) -> None:
    """The step ends with an error in all of them; what ends the engine and starts it again is in tests/process."""
    with engine(tiny_checkpoint("llama"), layout) as llm:
        expected = texts(llm)

        def fail(_: str, key: str) -> None:
            if key in ("", "1"):  # a stage has no number: the first one gets nothing
                raise ServerError("a fault between two workers")

        with injected(place, fail), pytest.raises(ServerError, match=r"a fault between|another worker of the step"):
            llm.generate([{"prompt_token_ids": list(range(5, 100))}], PARAMS, use_tqdm=False)
    with engine(tiny_checkpoint("llama"), layout) as llm:
        assert texts(llm) == expected
