"""`LLM` on the demo model and the real engine: what a user's script does in its first hour."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import PromptTooLongError
from quire.outputs import RequestOutput

CORE_IN_ITS_OWN_PROCESS = True
QUESTION = "What is prefix caching?"
GREEDY = SamplingParams(max_tokens=48, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(disable_log_stats=False, kv_cache_memory_bytes=64 << 20) as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def test_the_demo_model_answers(llm: LLM) -> None:
    (output,) = llm.generate(QUESTION, GREEDY, use_tqdm=False)
    assert output.finished
    assert output.outputs[0].finish_reason == "stop"
    assert "prefix caching" in output.outputs[0].text.lower()
    (answer,) = llm.chat([{"role": "user", "content": QUESTION}], GREEDY, use_tqdm=False)
    assert "prefix" in answer.outputs[0].text.lower()


def test_statistics_of_a_real_request(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": list(range(40, 80))}
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)  # whole blocks of 16, the last token computed
    for output in (first, second):
        assert output.metrics is not None
        stats = output.metrics
        assert 0 < stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts
        assert (stats.num_generation_tokens, stats.first_token_latency > 0) == (4, True)


def test_mixed_prompts_and_params_equal_the_same_alone(llm: LLM) -> None:
    prompts = [QUESTION, {"prompt": QUESTION, "cache_salt": "x"}, llm.get_tokenizer().encode("Copy: a b c")]
    params = [
        SamplingParams(max_tokens=20, temperature=0, stop=["the"], logprobs=2),
        SamplingParams(max_tokens=12, n=3, seed=5, temperature=1.5),
        SamplingParams(max_tokens=9, seed=6, top_k=50, prompt_logprobs=1, min_tokens=9),
    ]
    together = llm.generate(prompts, params, priority=[2, 0, 1], use_tqdm=False)
    alone = [llm.generate(p, q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    assert texts(together) == texts(alone)
    assert [len(output.outputs) for output in together] == [1, 3, 1]
    assert together[0].outputs[0].logprobs is not None
    joined = "".join(
        position[i].decoded_token or ""
        for position, i in zip(together[0].outputs[0].logprobs, together[0].outputs[0].token_ids, strict=True)
    )
    assert joined.startswith(together[0].outputs[0].text)
    assert together[2].prompt_logprobs is not None
    assert len(together[2].prompt_logprobs) == len(prompts[2])


def test_the_same_seeds_from_the_same_engine_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get theirs from the engine's, in order: a rerun of a script repeats itself."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    hot = SamplingParams(max_tokens=16, temperature=2.0, ignore_eos=True)
    runs = []
    for _ in range(2):
        # float32: in bfloat16 a token may still depend on which requests shared its step
        with LLM(seed=3, kv_cache_memory_bytes=16 << 20, dtype="float32") as fresh:
            runs.append(texts(fresh.generate([QUESTION] * 4, hot, use_tqdm=False)))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_beam_search_finds_at_least_the_greedy_answer(llm: LLM) -> None:
    greedy = llm.generate(QUESTION, SamplingParams(max_tokens=40, temperature=0, logprobs=0), use_tqdm=False)[
        0
    ].outputs[0]
    assert greedy.cumulative_logprob is not None
    (beams,) = llm.beam_search([QUESTION], BeamSearchParams(beam_width=3, max_tokens=40))
    best = beams.sequences[0]
    length = len(best.tokens) - 5 + (best.finish_reason == "stop")
    assert best.cum_logprob / length >= greedy.cumulative_logprob / len(greedy.token_ids) - 1e-4


def test_a_profile_is_written_under_the_name_given(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(str(tmp_path / "mine"))
    llm.generate(QUESTION, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    llm.stop_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["mine-rank0.trace.json.gz"]


def test_a_bad_prompt_in_a_list_runs_nothing(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="prompt 1"):
        llm.generate([QUESTION, [5] * 100_000], GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_ctrl_c_leaves_the_engine_usable(llm: LLM, delay_s: float) -> None:
    expected = texts(llm.generate(QUESTION, GREEDY, use_tqdm=False))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = threading.Event()

    def press() -> None:
        started.wait()
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_until_interrupted(llm, endless, started)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm.generate(QUESTION, GREEDY, use_tqdm=False)) == expected


def run_until_interrupted(llm: LLM, params: SamplingParams, started: threading.Event) -> None:
    started.set()
    llm.generate([QUESTION] * 8, params, use_tqdm=False)
