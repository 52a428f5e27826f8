from __future__ import annotations

import random
import tracemalloc

import pytest

from quire.frontend.output_handler import Backlog
from quire.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput


def output(
    index: int, text: str, ids: list[int], *, logprobs: bool = False, prompt_logprobs: PromptLogprobs | None = None
) -> RequestOutput:
    entries = [{i: Logprob(-1.0)} for i in ids] if logprobs else None
    return RequestOutput("r", "p", [1], prompt_logprobs, [CompletionOutput(index, text, ids, None, entries)], False)


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_deltas_of_several_outputs_against_plain_joining(with_logprobs: bool) -> None:
    rng = random.Random(5)
    texts, ids = {0: "", 1: "", 2: ""}, {0: [], 1: [], 2: []}  # type: dict[int, str], dict[int, list[int]]
    backlog: Backlog | None = None
    for number in range(500):
        index, text, token_ids = rng.choice((0, 0, 2)), "é" * rng.randint(0, 3), [number] * rng.randint(0, 2)
        texts[index] += text
        ids[index] += token_ids
        one = output(index, text, token_ids, logprobs=with_logprobs)
        if backlog is None:
            backlog = Backlog(one, is_delta=True)
        else:
            backlog.add(one)
    assert backlog is not None
    joined = backlog.join()
    assert [c.index for c in joined.outputs] == [0, 2]
    for completion in joined.outputs:
        assert (completion.text, completion.token_ids) == (texts[completion.index], ids[completion.index])
        if with_logprobs:
            assert completion.logprobs is not None
            assert [next(iter(entry)) for entry in completion.logprobs] == ids[completion.index]
        else:
            assert completion.logprobs is None


def test_of_cumulative_outputs_the_latest_counts() -> None:
    backlog = Backlog(output(1, "b", [1]), is_delta=False)
    last = output(0, "aaa", [1, 2, 3])
    last.finished = True
    for one in (output(0, "a", [1]), output(0, "aa", [1, 2]), last):
        backlog.add(one)
    joined = backlog.join()
    assert [(c.index, c.text, c.token_ids) for c in joined.outputs] == [(0, "aaa", [1, 2, 3]), (1, "b", [1])]
    assert joined.finished


def test_prompt_logprobs_are_kept() -> None:
    backlog = Backlog(output(0, "a", [1], prompt_logprobs=[None]), is_delta=True)
    backlog.add(output(0, "b", [2]))
    assert backlog.join().prompt_logprobs == [None]
    backlog.add(output(0, "c", [3], prompt_logprobs=[None, None]))
    assert backlog.join().prompt_logprobs == [None, None]


def test_a_token_takes_a_few_bytes() -> None:
    """Promise P10: unread outputs are held as compactly as can be, and the objects they came in are not."""
    backlog = Backlog(output(0, "text", [100_000]), is_delta=True)
    num_tokens = 20_000
    tracemalloc.start()
    for number in range(num_tokens):
        backlog.add(output(0, "text", [100_000 + number]))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 16 * num_tokens
    assert len(backlog.join().outputs[0].text) == 4 * (num_tokens + 1)
