"""The sameness matrix: every way to sample, edit, form, score and end an output, with every drafter.

A request is a row of `CHOICES`; its end is set so that it comes at a chosen output index: inside a run of drafts, at
its last token, or one after it. Requests hold every pair of choices (logprobs=-1 is in test_speculation). In the
default suite each drafter, each company and each model has an engine, which gets every other request; all of them
together with -m slow, and random requests in the fresh tier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from quire import LLM, ReasoningTokens, SamplingParams, StructuredOutputsParams
from quire.outputs import RequestOutput
from quire.sampling_params import RepetitionDetectionParams
from quire.testing.oracle_drafter import OracleDrafter
from quire.wire.execution import GrammarOutput
from quire.worker import step_sampler
from quire.worker.kernels.library import native_library
from quire.worker.sample import verify
from tests.rows import Row, pairwise_rows
from tests.seeds import FRESH, seed_of

from .conftest import Checkpoint
from .test_heads import make_head
from .test_heads import target as still_target  # noqa: F401  a fixture
from .test_oracle import num_preemptions
from .test_speculation import NGRAM, ORACLE, counters, engine, seen

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library was not built")

CLOSE, MODEL_LEN, FREE_LEN = 400, 192, 22
ALL = slice(None)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["book", "paper"]}},
    "required": ["name", "kind"],
}
CHOICES: dict[str, Sequence[Any]] = {
    "sampling": ("greedy", "cold", "filtered", "wild"),
    "edits": ("plain", "penalties", "bad words", "bias", "allowed", "min tokens", "thinking budget"),
    "form": ("none", "json", "regex", "reasoned"),
    "logprobs": ("none", "0", "5", "ids"),
    "end": ("length", "eos", "stop token", "stop string", "repetition", "context"),
    "n": (1, 3),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "cold": {"temperature": 0.4},
    "filtered": {"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.02}, "wild": {"temperature": 1.3},
}  # fmt: skip
EDITS: dict[str, dict[str, Any]] = {
    "plain": {}, "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.3},
    "bad words": {"bad_words": [" the", "e", " two three"]}, "bias": {"logit_bias": {300: 4.0, 301: -100.0}},
    "allowed": {"allowed_token_ids": [*range(3, 130), *range(250, 320)]}, "min tokens": {"min_tokens": 4},
    "thinking budget": {"thinking_token_budget": 6},
}  # fmt: skip
LOGPROBS: dict[str, dict[str, Any]] = {
    "none": {}, "0": {"logprobs": 0}, "5": {"logprobs": 5},
    "ids": {"logprob_token_ids": [5, 300]},
}  # fmt: skip


@cache
def rows() -> list[Row]:
    """Requests that hold every pair of choices; many random ones in the fresh tier."""
    rng = random.Random(seed_of(5))
    drawn = [{name: rng.choice(values) for name, values in CHOICES.items()} for _ in range(500 if FRESH else 3000)]
    chosen = drawn if FRESH else [drawn[i] for i in pairwise_rows(drawn)]
    return [{**row, "index": rng.randrange(5, 14), "prompt": rng.randrange(len(TEXTS))} for row in chosen]


def make_fields(row: Row, seed: int, close: int) -> dict[str, Any]:
    """Parameters of a row's request, without its end."""
    fields: dict[str, Any] = {"seed": seed, "max_tokens": FREE_LEN, "ignore_eos": True}
    fields["n"] = row["n"] if row["sampling"] != "greedy" else 1
    fields |= SAMPLING[str(row["sampling"])] | EDITS[str(row["edits"])] | LOGPROBS[str(row["logprobs"])]
    thinks = row["edits"] == "thinking budget" or row["form"] == "reasoned"
    if thinks:
        fields |= {"thinking_token_budget": 6, "reasoning_tokens": ReasoningTokens(close)}
    if row["edits"] == "allowed" and thinks:
        fields["allowed_token_ids"] = [*fields["allowed_token_ids"], close]
    if row["form"] != "none":
        fields["structured_outputs"] = {
            "json": StructuredOutputsParams(json=SCHEMA),
            "regex": StructuredOutputsParams(regex="(ab|cd){3} the scheduler [0-9]{2,9}"),
            "reasoned": StructuredOutputsParams(json=SCHEMA, reasoning=ReasoningTokens(close)),
        }[str(row["form"])]
    return fields


def make_end(row: Row, fields: dict[str, Any], tokens: list[int], tokenizer: Any) -> dict[str, Any]:
    """Returns parameters that end the output `tokens` at the row's index, or where it first can."""
    index = min(int(str(row["index"])), len(tokens) - 1)
    new = next((i for i in range(index, len(tokens)) if tokens[i] not in tokens[:i]), index)
    match row["end"]:
        case "context":
            return {"max_tokens": None}
        case "repetition":
            return {"repetition_detection": RepetitionDetectionParams(3, 1, 2 + index // 3)}
        case "stop token":
            return {"stop_token_ids": [tokens[new]]}
        case "eos" if row["form"] == "none":
            bias = {**fields.get("logit_bias", {}), tokenizer.eos_token_id: 100.0}
            return {"ignore_eos": False, "min_tokens": index, "logit_bias": bias}
        case "stop string" if piece := tokenizer.decode(tokens[: new + 1])[len(tokenizer.decode(tokens[:new])) :]:
            return {"stop": [piece]}
    return {"max_tokens": index + 1}


class Load(NamedTuple):
    """The requests of the matrix for one model, and their outputs without speculation."""

    model: str
    flags: dict[str, Any]
    prompts: list[Any]
    params: list[SamplingParams]
    outputs: list[RequestOutput]

    def generate(self, llm: LLM, some: slice = ALL) -> list[RequestOutput]:
        return llm.generate(self.prompts[some], self.params[some], use_tqdm=False)


def matrix_engine(model: str, **flags: Any) -> Any:
    shared = {"max_model_len": MODEL_LEN, "num_gpu_blocks_override": 500, "max_num_seqs": 64, "weight_cache": False}
    return engine(model, **{**shared, **flags})


def make_load(model: str, **flags: Any) -> Load:
    """Finds out where outputs would go, sets their ends, and generates them without speculation."""
    with matrix_engine(model, **flags) as llm:
        tokenizer = llm.get_tokenizer()
        close = min(CLOSE, len(tokenizer) - 4)
        ids = [tokenizer.encode(text)[:60] for text in TEXTS]
        fields = [make_fields(row, i, close) for i, row in enumerate(rows())]
        prompts = [list(ids[int(str(row["prompt"]))]) for row in rows()]
        free = llm.generate(
            [{"prompt_token_ids": p} for p in prompts], [SamplingParams(**f) for f in fields], use_tqdm=False
        )
        params = []
        for row, mine, prompt, output in zip(rows(), fields, prompts, free, strict=True):
            params.append(SamplingParams(**mine | make_end(row, mine, list(output.outputs[0].token_ids), tokenizer)))
            if row["end"] == "context":
                prompt[:] = (prompt * MODEL_LEN)[: MODEL_LEN - 1 - int(str(row["index"]))]
        load = Load(model, flags, [{"prompt_token_ids": p} for p in prompts], params, [])
        assert llm.reset_prefix_cache()
        load.outputs.extend(load.generate(llm))
    return load


# -- engines ----------------------------------------------------------------------------------------------------------

METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "ngram": ({**NGRAM, "prompt_lookup_max": 2}, 1),
    "suffix": ({"method": "suffix"}, 1),
    "draft model": ({"model": "demo-draft"}, 1),
    "right": ({"model": ORACLE}, 1.0),
    "half right": ({"model": ORACLE}, 0.5),
    "wrong": ({"model": ORACLE}, 0.0),
    "random": ({"model": ORACLE.replace("Oracle", "Random")}, 1),
    "eagle": ({"model": "EAGLE-head"}, 1),
    "eagle3": ({"model": "EAGLE3-head"}, 1),
}
COMPANIES: dict[str, dict[str, Any]] = {
    "64": {},
    "alone": {"max_num_seqs": 1},
    "16": {"max_num_seqs": 16},
    "chunks of 7": {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    "preempted": {"max_num_seqs": 16, "num_gpu_blocks_override": 16},
    "cached": {},
    "no jumps": {"grammar_jump_forward": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "demo": {},
    "demo f32": {"dtype": "float32"},
    "demo int8": {"quantization": "int8"},
    "windows": {"dtype": "float32"},
    "still": {"dtype": "float32"},
}
"""windows: Gemma 2, layers of which see 32 tokens. still: the target of the heads of `test_heads`."""
TEXTS = (
    "What is a block table?",
    "one two three one two three one two three one two",
    "The scheduler decides at every step which requests run. The scheduler decides at every",
    '{"name": "a", "kind": "book"}, {"name": "',
)
DEFAULT = (
    *(("ngram", "64", "demo", 4), ("suffix", "chunks of 7", "demo", 8), ("draft model", "preempted", "demo", 3)),
    *(("right", "cached", "demo int8", 4), ("half right", "no jumps", "demo", 8), ("wrong", "16", "demo", 3)),
    *(("right", "alone", "windows", 8), ("random", "preempted", "windows", 4)),
    *(("eagle", "16", "still", 3), ("eagle3", "chunks of 7", "still", 4)),
)


def all_engines() -> Iterator[Any]:
    heads = "eagle", "eagle3"
    for method in METHODS:
        for company in COMPANIES:
            for model in MODELS:
                if (model == "still") == (method in heads) and (method != "draft model" or model != "windows"):
                    for k in (1, 3, 8):
                        yield pytest.param(method, company, model, k, ALL, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def loads(checkpoint: Checkpoint, still_target: Path) -> Callable[[str], Load]:  # noqa: F811
    """`loads(model)`: what is made once."""

    @cache
    def load(model: str) -> Load:
        path = {"windows": checkpoint("gemma2"), "still": still_target}.get(model, "demo")
        return make_load(str(path), **MODELS[model])

    return load


@pytest.mark.parametrize(
    ("method", "company", "model", "num_drafts", "some"),
    [*((*row, slice(i % 2, None, 2)) for i, row in enumerate(DEFAULT)), *all_engines()],
)
def test_the_output_is_that_without_speculation(
    method: str,
    company: str,
    model: str,
    num_drafts: int,
    some: slice,
    loads: Callable[[str], Load],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = loads(model)
    keys, accuracy = METHODS[method]
    if method.startswith("eagle"):
        head = make_head(tmp_path / keys["model"], Path(load.model), eagle3=method == "eagle3", is_random=False)
        keys = {"model": str(head)}
    monkeypatch.setattr(OracleDrafter, "accuracy", accuracy)
    monkeypatch.setattr(OracleDrafter, "answers", {})
    OracleDrafter.learn(load.outputs)
    speculation = {**keys, "num_speculative_tokens": num_drafts, "adaptive": False}
    flags = {**load.flags, **COMPANIES[company]}
    if model == "windows" and company == "preempted":
        flags["num_gpu_blocks_override"] = 25  # one request of the longest length in two groups
    with matrix_engine(load.model, speculative_config=speculation, **flags) as llm:
        outputs = load.generate(llm, some)
        counted = counters(llm)
        if company == "cached":
            again = load.generate(llm, some)
            assert sum(o.num_cached_tokens or 0 for o in again) > (1000 if some == ALL else 200)
            assert seen(again) == seen(load.outputs[some])
    for row, ours, theirs in zip(rows()[some], outputs, load.outputs[some], strict=True):
        assert seen([ours]) == seen([theirs]), row
    assert (num_preemptions(outputs) > 0) == (company == "preempted")
    assert "the drafter failed" not in caplog.text
    accepted, drafted = counted.get("spec_decode_num_accepted_tokens", 0), counted["spec_decode_num_draft_tokens"]
    assert drafted > (100 if some == ALL else 50)
    if method == "right":
        assert accepted > 0.6 * drafted


# -- the matrix sees ---------------------------------------------------------------------------------------------------


def index_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The random number of each position is that of the next."""
    original = step_sampler.verify
    patch.setattr(step_sampler, "verify", lambda logits, data, lens, *rest: original(logits, data, lens + 1, *rest))


def mask_rows_shifted(patch: pytest.MonkeyPatch) -> None:
    """Each position of a run has the mask of the one before."""
    original = step_sampler._apply_grammar

    def shifted(logits: Any, masks: Any, req_ids: list[str], drafts: Any) -> None:
        if drafts:
            masks = GrammarOutput(masks.structured_output_request_ids, np.roll(masks.grammar_bitmask, 1, axis=0))
        original(logits, masks, req_ids, drafts)

    patch.setattr(step_sampler, "_apply_grammar", shifted)


def looks_back_to_the_last_certain_token(patch: pytest.MonkeyPatch) -> None:
    """Penalties, bad words and budgets do not see drafts."""
    patch.setattr(verify, "_go_on", lambda *args: None)


def token_after_a_mismatch_is_kept(patch: pytest.MonkeyPatch) -> None:
    """One token more than match is kept."""
    original = verify.accept
    patch.setattr(verify, "accept", lambda ids, runs: np.minimum(original(ids, runs) + 1, runs.lens))


@pytest.mark.parametrize(
    "bug", [index_off_by_one, mask_rows_shifted, looks_back_to_the_last_certain_token, token_after_a_mismatch_is_kept]
)
def test_a_planted_bug_is_seen(
    bug: Callable[[pytest.MonkeyPatch], None], loads: Callable[[str], Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = loads("demo")
    monkeypatch.setattr(OracleDrafter, "accuracy", 0.8)
    monkeypatch.setattr(OracleDrafter, "answers", {})
    OracleDrafter.learn(load.outputs)
    bug(monkeypatch)
    few = slice(0, 24)
    speculation = {"model": ORACLE, "num_speculative_tokens": 4, "adaptive": False}
    with matrix_engine(load.model, speculative_config=speculation) as llm:
        outputs = llm.generate(load.prompts[few], load.params[few], use_tqdm=False)
    assert seen(outputs) != seen(load.outputs[few])
