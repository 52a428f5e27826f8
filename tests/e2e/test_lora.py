"""Adapters through the whole engine: with speculation, scores of prompts, embeddings, and beside the base model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ClientError
from quire.outputs import RequestOutput
from tests.adapters import factors, tensors, write_adapter

from .conftest import Checkpoint
from .lora_oracle import OUTPUT_LEN, Adapter, answers, save_adapter
from .oracle import make_prompts
from .test_oracle import FEW_BLOCKS, engine, num_preemptions

PROMPTS = make_prompts(seed=5)[1::4]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

LORA = {
    "enable_lora": True,
    "lora_memory_bytes": 1 << 20,
}  # the KV cache of a tiny model leaves adapters next to nothing


@pytest.fixture
def adapters(tmp_path: Path) -> list[LoRARequest]:
    made = []
    for i, rank in enumerate((4, 16), start=1):
        path = write_adapter(tmp_path / str(i), tensors(rank, seed=i), r=rank)
        made.append(LoRARequest(f"adapter {i}", i, str(path)))
    return made


def generate(llm: LLM, adapters: list[LoRARequest | None], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """Answers to all prompts with each adapter."""
    prompts = [{"prompt_token_ids": p} for _ in adapters for p in PROMPTS]
    return llm.generate(prompts, params, lora_request=[a for a in adapters for _ in PROMPTS], use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_together_chunked_preempted_and_speculated(
    dtype: str, checkpoint: Checkpoint, adapters: list[LoRARequest]
) -> None:
    path, every = checkpoint("llama"), [None, *adapters]
    with engine(path, dtype=dtype, **LORA, max_num_seqs=1, enable_prefix_caching=False) as llm:
        alone = tokens(generate(llm, every))
    n = len(PROMPTS)
    assert alone[:n] != alone[n : 2 * n] != alone[2 * n :]
    with engine(path, dtype=dtype) as llm:
        assert tokens(generate(llm, [None])) == alone[:n]
    with engine(path, dtype=dtype, **LORA, max_num_seqs=16) as llm:
        assert tokens(generate(llm, every)) == alone
        again = generate(llm, every[::-1])
        assert tokens(again) == alone[2 * n :] + alone[n : 2 * n] + alone[:n]
        assert sum(output.num_cached_tokens or 0 for output in again) > 100
    with engine(path, dtype=dtype, **LORA, max_num_seqs=16, max_num_batched_tokens=64, **FEW_BLOCKS) as llm:
        for adapter in adapters:  # all requests run at once, however long a load takes
            llm.llm_engine.add_lora(adapter)
        outputs = generate(llm, every)
        assert tokens(outputs) == alone
        assert num_preemptions(outputs) > 0
    for speculation in (
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        {"model": str(path), "num_speculative_tokens": 2},
    ):
        with engine(path, dtype=dtype, **LORA, max_num_seqs=16, speculative_config=speculation) as llm:
            assert tokens(generate(llm, every)) == alone


INVOCATION = [9, 4]


def invoked(seed: int) -> list[list[int]]:
    """Prompts with the invocation nowhere, first, inside, twice, and last."""
    text = random.Random(seed).choices(range(10, 200), k=50)
    return [text, INVOCATION + text, text[:37] + INVOCATION + text[37:], text[:20] + INVOCATION * 2, text + INVOCATION]


STARTS = (None, 0, 37, 22, 50)


def test_adapters_that_begin_at_an_invocation(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """They get peft's tokens, and share the blocks before the invocation with the base model, both ways."""
    path = checkpoint("llama")
    options = {"lora_alpha": 16, "alora_invocation_tokens": INVOCATION}
    adapter = Adapter(["q_proj", "v_proj", "down_proj", "lm_head"], 8, options)
    lora = LoRARequest("late", 1, str(save_adapter(path, adapter, tmp_path, seed=1)))
    base, wanted = answers(path, [None, tmp_path], make_prompts=invoked)
    prompts = [answer.prompt for answer in wanted]
    right = [answer.tokens for answer in wanted]
    assert right[0] == base[0].tokens
    assert all(one.tokens != other.tokens for one, other in zip(base[1:], wanted[1:], strict=True))
    params, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (OUTPUT_LEN, 60))

    def run(llm: LLM, adapters: Sequence[LoRARequest | None], params: SamplingParams = params) -> list[RequestOutput]:
        inputs = [{"prompt_token_ids": prompt} for _ in adapters for prompt in prompts]
        return llm.generate(inputs, params, lora_request=[a for a in adapters for _ in prompts], use_tqdm=False)

    with engine(path, dtype="float32", **LORA) as llm:
        both = tokens(run(llm, [lora, None]))
        assert both == right + [answer.tokens for answer in base]
        unhurried = tokens(run(llm, [lora, None], long))
        for order in ([None, lora], [lora, None]):
            for i, start in enumerate(STARTS):  # one prompt at a time: the others share its text
                llm.reset_prefix_cache()
                prompt = {"prompt_token_ids": prompts[i]}
                pair = [llm.generate(prompt, params, lora_request=one, use_tqdm=False)[0] for one in order]
                assert tokens(pair) == [(wanted if one else base)[i].tokens for one in order]
                num_shared = len(prompts[i]) - 1 if start is None else start
                assert pair[1].num_cached_tokens == num_shared // 16 * 16, f"{order}, invocation at {start}"
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    limits = {**FEW_BLOCKS, "num_gpu_blocks_override": 20, "max_model_len": 128, "max_num_batched_tokens": 64}
    with engine(path, dtype="float32", **LORA, max_num_seqs=16, **limits) as llm:
        outputs = run(llm, [lora, None], long)
        assert tokens(outputs) == unhurried
        assert num_preemptions(outputs) > 0
        scores = [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
            for output, prompt in zip(run(llm, [lora, None], scored), prompts * 2, strict=True)
            if output.prompt_logprobs is not None
        ]
    for late, plain, start in zip(scores[: len(prompts)], scores[len(prompts) :], STARTS, strict=True):
        assert np.allclose(late[:start], plain[:start], atol=1e-5)
        assert start in (None, 50) or not np.allclose(late[start : start + 2], plain[start : start + 2], atol=1e-3)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with engine(path, dtype="float32", **LORA, speculative_config=drafts) as llm:
        assert tokens(run(llm, [lora, None])) == both


def test_adapters_that_begin_late_have_the_same_bits_in_any_company(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, prompts = checkpoint("qwen2"), invoked(1)
    content = {
        name: value
        for layer in range(2)
        for name, value in factors(f"model.layers.{layer}.mlp.down_proj", (80, 48), 12, 3, 0.5).items()
    }
    directory = write_adapter(tmp_path, content, r=12, alora_invocation_tokens=INVOCATION)
    late, whole = LoRARequest("late", 1, str(directory)), LoRARequest("whole", 2, str(tmp_path / "whole"))
    write_adapter(tmp_path / "whole", content, r=12)
    every, inputs = [None, late, whole], [{"prompt_token_ids": prompt} for prompt in prompts]
    with engine(path, dtype="bfloat16", **LORA, max_num_seqs=1, enable_prefix_caching=False) as llm:
        alone = [tokens(llm.generate(inputs, GREEDY, lora_request=lora, use_tqdm=False)) for lora in every]
    base, begun, all_of_it = alone
    assert (begun[0], begun[1]) == (base[0], all_of_it[1]), "the invocation is nowhere, and at the start"
    assert len({str(answers[3]) for answers in alone}) == 3, "inside, the answer is another one than both"
    mixed = [lora for lora in every for _ in prompts]
    with engine(path, dtype="bfloat16", **LORA, max_num_seqs=16, max_num_batched_tokens=48) as llm:
        together = tokens(llm.generate(inputs * 3, GREEDY, lora_request=mixed, use_tqdm=False))
        assert together == base + begun + all_of_it
        again = tokens(llm.generate(inputs[::-1] * 3, GREEDY, lora_request=mixed[::-1], use_tqdm=False))
        assert again == all_of_it[::-1] + begun[::-1] + base[::-1]


def test_scores_of_prompts_are_the_adapter_s(checkpoint: Checkpoint, adapters: list[LoRARequest]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

    def scores(outputs: list[RequestOutput]) -> list[list[float]]:
        return [
            [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
            for output in outputs
            if output.prompt_logprobs is not None
        ]

    with engine(checkpoint("llama"), **LORA, max_num_seqs=1) as llm:
        alone = scores(generate(llm, [None, *adapters], params))
    with engine(checkpoint("llama"), **LORA, max_num_seqs=16, max_num_batched_tokens=128) as llm:
        together = scores(generate(llm, [None, *adapters], params))
    assert len(alone) == len(together) == 3 * len(PROMPTS)
    for x, y in zip(alone, together, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)
    assert not np.allclose(alone[3], alone[len(PROMPTS) + 3], atol=1e-2)


def test_embeddings_with_adapters(checkpoint: Checkpoint, adapters: list[LoRARequest]) -> None:
    with engine(checkpoint("llama"), **LORA, runner="pooling", max_num_seqs=8) as llm:
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        base = [np.array(o.outputs.embedding) for o in llm.embed(prompts, use_tqdm=False)]
        first = [np.array(o.outputs.embedding) for o in llm.embed(prompts, lora_request=adapters[0], use_tqdm=False)]
        mixed = llm.embed(prompts * 2, lora_request=[adapters[0], None] * len(PROMPTS), use_tqdm=False)
        for i, output in enumerate(mixed):
            expected = (first if i % 2 == 0 else base)[i % len(PROMPTS)]
            np.testing.assert_allclose(np.array(output.outputs.embedding), expected, atol=1e-5)
        assert all(np.abs(x - y).max() > 1e-3 for x, y in zip(base, first, strict=True))


def test_an_adapter_that_cannot_be_loaded_fails_its_request_alone(
    checkpoint: Checkpoint, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    bad = LoRARequest("bad", 9, str(write_adapter(tmp_path / "bad", tensors(4), use_dora=True)))
    with engine(checkpoint("llama"), **LORA) as llm:
        before = tokens(generate(llm, [adapters[0]]))
        with pytest.raises(ClientError, match="DoRA"):
            generate(llm, [bad])
        assert tokens(generate(llm, [adapters[0]])) == before


@pytest.mark.parametrize("num_adapters", [9, 40])
def test_many_adapters_that_leave_sites_alone(num_adapters: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A site that no adapter changes, such as the logits head, has a place for each of them, too."""
    adapters = [
        LoRARequest(f"adapter {i}", i, str(write_adapter(tmp_path / str(i), tensors(4, seed=i), r=4)))
        for i in range(1, num_adapters + 1)
    ]
    prompts = [{"prompt_token_ids": PROMPTS[0]}] * num_adapters
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with engine(checkpoint("llama"), dtype="bfloat16", **LORA | {"lora_memory_bytes": 64 << 20}) as llm:
        together = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        alone = [llm.generate(prompts[0], params, lora_request=a, use_tqdm=False)[0] for a in adapters]
    assert tokens(together) == tokens(alone)
    assert len({tuple(ids) for ids in tokens(alone)}) > num_adapters // 2
