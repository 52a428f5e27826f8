"""Streaming-input sessions of `AsyncLLM`: over the real core on a thread, and over one that is run by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import DeadlineExceededError, ValidationError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.base import make_async_client
from quire.frontend.session import StreamingInput
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.wire.engine_core import FinishReason

from .async_fake_client import settle
from .async_setting import Setting, check, check_virtually, last

FAKE = "quire.testing.fake_executor:FakeExecutor"
MAX_MODEL_LEN = 128


def params(max_tokens: int = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **fields})


async def inputs_of(*prompts: Any) -> AsyncGenerator[StreamingInput, None]:
    for prompt in prompts:
        yield prompt if isinstance(prompt, StreamingInput) else StreamingInput(prompt)


def make_llm(**flags: Any) -> AsyncLLM:
    args = EngineArgs("demo", distributed_executor_backend=FAKE, max_model_len=MAX_MODEL_LEN, **flags)
    config = args.create_engine_config("serving")
    return AsyncLLM(config, client=make_async_client(config, log_stats=True, multiprocess=False))


def ends_of(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return [output for output in outputs if output.outputs[0].finish_reason is not None]


def test_inputs_are_answered_one_after_the_other() -> None:
    """Handed in at once; each answer is that of one request with all that came before as its prompt."""

    async def run() -> list[RequestOutput]:
        async with make_llm() as llm:
            prompts = inputs_of([1, 2, 3], [9], StreamingInput([8, 7], params(2)))
            return [output async for output in llm.generate(prompts, params(4), "s")]

    ends = ends_of(asyncio.run(run()))
    assert [output.finished for output in ends] == [False, False, True]
    context: list[int] = []
    for end, added, max_tokens in zip(ends, ([1, 2, 3], [9], [8, 7]), (4, 4, 2), strict=True):
        context += added
        assert end.prompt_token_ids == context
        right = expected_output(FakeModel(), context, params(max_tokens), MAX_MODEL_LEN)
        assert list(end.outputs[0].token_ids) == right.token_ids
        context += right.token_ids[:-1]


def test_a_conversation_waits_for_each_answer() -> None:
    """The next input is written when the last answer has been read."""

    async def run() -> list[list[int]]:
        answers: list[list[int]] = []
        answered = asyncio.Event()

        async def ask() -> AsyncGenerator[StreamingInput, None]:
            for number in range(4):
                yield StreamingInput([number + 1] if number == 0 else [answers[-1][0]])
                await answered.wait()
                answered.clear()

        async with make_llm() as llm:
            delta = params(3, output_kind=RequestOutputKind.DELTA)
            async for output in llm.generate(ask(), delta, "s"):
                if not answers or output.finished or len(answers[-1]) == 3:
                    answers.append([])
                answers[-1] += output.outputs[0].token_ids
                if output.outputs[0].finish_reason is not None:
                    answered.set()
        return [answer for answer in answers if answer]

    answers = asyncio.run(asyncio.wait_for(run(), 30))
    assert [len(answer) for answer in answers] == [3] * 4
    right = expected_output(FakeModel(), [1], params(3), MAX_MODEL_LEN).token_ids
    assert answers[0] == right
    assert answers[1] == expected_output(FakeModel(), [1, *right[:-1], right[0]], params(3), MAX_MODEL_LEN).token_ids


def is_closed(inputs: AsyncGenerator[Any, None]) -> bool:
    return inputs.ag_frame is None  # type: ignore[attr-defined]


async def endless() -> AsyncGenerator[StreamingInput, None]:
    yield StreamingInput([50])
    await asyncio.get_running_loop().create_future()


def test_leaving_a_session_closes_its_inputs(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        inputs = endless()
        task = s.reader("x", params(9), inputs)
        await settle()
        await s.client.step()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert is_closed(inputs)
        assert len(s.aborted) == 1

    check(model_dir, test)


@pytest.mark.parametrize("when", ["first", "later"])
def test_an_error_in_the_inputs_is_the_readers(model_dir: Path, when: str) -> None:
    async def broken() -> AsyncGenerator[StreamingInput, None]:
        if when == "later":
            yield StreamingInput([50])
        raise OSError("the microphone is gone")

    async def test(s: Setting) -> None:
        task = s.reader("x", params(9), broken())
        await settle()
        with pytest.raises(OSError, match="microphone"):
            await task
        await settle()
        assert len(s.aborted) == len(s.added) == (when == "later")
        assert s.recorder.finished == [FinishReason.ERROR] * (when == "later")

    check(model_dir, test)


@pytest.mark.parametrize(
    ("inputs", "fields", "words"),
    [
        ((), {}, "needs an input to begin with"),
        (([],), {}, "empty"),
        (([50], [50] * 63), {}, "session has at least"),
        (([50],), {"n": 2, "temperature": 1.0}, "n=2"),
        (([50],), {"stop": ["x"]}, "stop"),
        (([50],), {"output_kind": RequestOutputKind.FINAL_ONLY}, "output_kind"),
    ],
)
def test_what_a_session_cannot_be(model_dir: Path, inputs: tuple[Any, ...], fields: dict[str, Any], words: str) -> None:
    async def test(s: Setting) -> None:
        with pytest.raises(ValidationError, match=words):
            await last(s.llm, inputs_of(*inputs), params(**fields), "x")
        await settle()

    check(model_dir, test)


def test_an_input_has_a_type(model_dir: Path) -> None:
    async def raw() -> AsyncGenerator[Any, None]:
        yield [50]

    async def test(s: Setting) -> None:
        with pytest.raises(ValidationError, match="StreamingInput objects, got list"):
            await last(s.llm, raw(), params(), "x")

    check(model_dir, test)


def test_the_time_of_a_session_counts_from_the_wait_for_its_first_input(model_dir: Path) -> None:
    async def late(wait_s: float) -> AsyncGenerator[StreamingInput, None]:
        await asyncio.sleep(wait_s)
        yield StreamingInput([50])
        await asyncio.sleep(100)

    async def test(s: Setting) -> None:
        start = asyncio.get_running_loop().time()
        for wait_s in (20.0, 4.0):
            inputs = late(wait_s)
            with pytest.raises(DeadlineExceededError, match="within 5 s"):
                await last(s.llm, inputs, params(50), "x", timeout_s=5)
            await settle()
            assert is_closed(inputs)
        assert asyncio.get_running_loop().time() - start == pytest.approx(10)
        assert len(s.added) == len(s.aborted) == 1

    check_virtually(model_dir, test)
