"""Requests on their way in, and ended before their time: admission, deadlines, slow readers, long texts."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.errors import (
    DeadlineExceededError,
    OverloadedError,
    PromptTooLongError,
    QuireError,
    SlowClientError,
    ValidationError,
)
from quire.frontend.input_processor import InputProcessor
from quire.frontend.text.tokenizer import LONG_TEXT_CHARS
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import FinishReason
from tests.seeds import seeds

from .async_fake_client import settle
from .async_setting import Setting, check, check_virtually, last

LONG = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)


# -- admission --------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_before_anything_is_done(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(s: Setting) -> None:
        tasks = [s.reader(name, LONG) for name in ("a", "b")]
        await settle()
        monkeypatch.setattr(InputProcessor, "process_inputs", None)
        for prompt in ("text", [50]):
            with pytest.raises(OverloadedError, match=r"2 requests wait .* --max-num-queued-reqs 2"):
                await last(s.llm, prompt, LONG, "c")
        with pytest.raises(OverloadedError):
            s.llm.check_admission()
        monkeypatch.undo()
        await s.client.step()  # first tokens: no request waits now
        s.llm.check_admission()
        assert (s.llm.admission.num_reqs, s.llm.admission.num_tokens) == (0, 0)
        tasks.append(s.reader("c", LONG))
        await settle()
        await s.client.step(50)
        await asyncio.gather(*tasks)
        assert s.llm.admission.rejections == {"max_num_queued_reqs": 3}

    check(model_dir, test, max_num_queued_reqs=2)


def test_queued_tokens_are_estimated_and_corrected(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        tokenizer = await s.llm.get_tokenizer()
        text = "the quick fox"
        task = s.reader("a", SamplingParams(n=2, max_tokens=2, temperature=1.0), text)
        await settle()
        assert s.llm.admission.num_tokens == 2 * len(tokenizer.encode(text))
        with pytest.raises(OverloadedError, match="--max-num-queued-tokens 40"):
            await last(s.llm, [50] * 40, LONG, "b")
        await s.client.step(2)
        await task

    check(model_dir, test, max_num_queued_tokens=40)


def test_a_reservation_made_beforehand_is_used_up(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        room = s.llm.admission.reserve(1, 5)
        with pytest.raises(OverloadedError):
            await last(s.llm, [50], LONG, "other")
        task = s.reader("mine", SamplingParams(max_tokens=1), reservation=room)
        await settle()
        assert s.llm.admission.num_tokens == 2
        await s.client.step()
        await task
        room = s.llm.admission.reserve(1, 5)
        with pytest.raises(ValidationError):
            await last(s.llm, [], LONG, "empty", reservation=room)
        room = s.llm.admission.reserve(1, 5)
        s.llm._output_handler.stop()
        with pytest.raises(QuireError, match="shut down"):
            await last(s.llm, [50], LONG, "late", reservation=room)

    check(model_dir, test, max_num_queued_reqs=1)


# -- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_deadline_is_an_error_and_ends_the_work(model_dir: Path, kind: RequestOutputKind) -> None:
    async def test(s: Setting) -> None:
        params = SamplingParams(n=2, max_tokens=50, temperature=1.0, output_kind=kind)
        task = s.reader("x", params, timeout_s=5.0)
        other = s.reader("other", SamplingParams(max_tokens=2))
        await settle()
        await s.client.step()
        await asyncio.sleep(4.9)
        assert not s.aborted
        await asyncio.sleep(0.2)
        with pytest.raises(DeadlineExceededError, match=r"deadline_exceeded.*5 s"):
            await task
        assert sorted(s.aborted) == sorted(i for i in s.added if "x-" in i)
        assert all(not o.finished and o.outputs[0].finish_reason is None for o in s.read["x"])
        await s.client.step()
        await other
        assert s.recorder.finished == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH]

    check_virtually(model_dir, test)


def test_the_operators_deadline_and_the_requests_own(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        start = asyncio.get_running_loop().time()
        ends: dict[str, float] = {}

        async def time(name: str, **details: Any) -> None:
            with pytest.raises(DeadlineExceededError):
                await last(s.llm, [50], LONG, name, **details)
            ends[name] = round(asyncio.get_running_loop().time() - start, 3)

        await asyncio.gather(time("default"), time("short", timeout_s=1), time("long", timeout_s=90.5))
        assert ends == {"default": 30, "short": 1, "long": 90.5}
        for bad in (0, -1, float("inf"), "5"):
            with pytest.raises(ValidationError, match="timeout_s"):
                await last(s.llm, [50], LONG, "bad", timeout_s=bad)

    check_virtually(model_dir, test, request_timeout_s=30.0)


def test_a_request_that_expires_in_the_tokenizer_is_never_added(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        thread: Any = s.llm.text_thread

        async def slow(new: Any) -> Any:
            await asyncio.sleep(10)
            return new

        thread.tokenize_long = slow
        with pytest.raises(DeadlineExceededError):
            await last(s.llm, "text", LONG, "x", timeout_s=5)
        assert not s.added

    check_virtually(model_dir, test)


def test_hundreds_of_random_deadlines(model_dir: Path) -> None:
    """Each request ends at its deadline or by itself, whichever comes first; the core never runs an expired one."""

    async def test(s: Setting) -> None:
        rng = random.Random(3)
        loop = asyncio.get_running_loop()
        ran_late: list[str] = []
        due: dict[str, float] = {}
        outcomes: dict[str, str] = {}

        async def one(name: str) -> None:
            await asyncio.sleep(rng.random() * 20)
            timeout_s, max_tokens = rng.uniform(0.5, 40), rng.randint(1, 40)
            due[name] = loop.time() + timeout_s
            try:
                output = await last(s.llm, [50], SamplingParams(max_tokens=max_tokens), name, timeout_s=timeout_s)
            except DeadlineExceededError:
                outcomes[name] = "deadline"
                assert abs(loop.time() - due[name]) < 0.01
            else:
                outcomes[name] = "done"
                assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", max_tokens)
                assert loop.time() <= due[name] + 0.01

        async def run_core() -> None:
            while True:
                await asyncio.sleep(1)
                ran_late.extend(i for i in s.client.core.live if due[i.split("-")[0]] < loop.time())
                await s.client.step()

        core = asyncio.create_task(run_core())
        await asyncio.gather(*(one(str(i)) for i in range(150)))
        core.cancel()
        assert not ran_late
        assert set(outcomes.values()) == {"deadline", "done"}

    check_virtually(model_dir, test)


# -- slow readers -----------------------------------------------------------------------------------------------------


def test_a_reader_that_stalls_is_cut_and_the_others_go_on(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        stream = s.llm.generate([50, 51], LONG, "stalled")
        first = asyncio.ensure_future(anext(stream))
        good = s.reader("good", LONG)
        await settle()
        await s.client.step()
        await first
        for _ in range(40):
            await s.client.step()
            await asyncio.sleep(2)
        assert [i.split("-")[0] for i in s.aborted] == ["stalled"]
        merged = await anext(stream)
        assert len(merged.outputs[0].token_ids) > 25
        with pytest.raises(SlowClientError, match=r"slow_client.*60 s"):
            await anext(stream)
        await s.client.step(9)
        await good
        assert s.recorder.finished == [FinishReason.ABORT, FinishReason.LENGTH]

    check_virtually(model_dir, test)


def test_readers_may_take_their_time_where_the_operator_says_so(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        stream = s.llm.generate([50, 51], LONG, "slow")
        first = asyncio.ensure_future(anext(stream))
        await settle()
        await s.client.step()
        await first
        await s.client.step(49)
        await asyncio.sleep(86400)
        assert (await anext(stream)).finished
        await stream.aclose()

    check_virtually(model_dir, test, slow_client_timeout_s=0.0)


# -- long texts -------------------------------------------------------------------------------------------------------


def test_long_texts_are_tokenized_elsewhere(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    check_text = InputProcessor._check_text

    def watched(self: InputProcessor, text: str, kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return check_text(self, text, kwargs)

    monkeypatch.setattr(InputProcessor, "_check_text", watched)

    async def test(s: Setting) -> None:
        cut = {"truncate_prompt_tokens": 8}
        text = "the quick fox " * (LONG_TEXT_CHARS // 10)
        long = {"prompt": text, "cache_salt": "s"}
        tasks = [s.reader("long", SamplingParams(max_tokens=1), long, tokenization_kwargs=cut)]
        tasks.append(s.reader("short", SamplingParams(max_tokens=1), "the fox"))
        while len(s.added) < 2:
            await asyncio.sleep(0.001)
        await s.client.step()
        await asyncio.gather(*tasks)
        assert sorted(name.split("_")[0] for name in threads) == ["MainThread", "quire-tokenizer"]
        (request,) = (r for r in s.client.core.added if r.cache_salt == "s")
        assert request.prompt_token_ids == (await s.llm.get_tokenizer()).encode(text)[-8:]
        assert s.read["long"][0].prompt == text
        with pytest.raises(PromptTooLongError, match="characters, too many"):
            await last(s.llm, "x" * 20_000, LONG, "too long")

    check(model_dir, test)


# -- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.fresh
@pytest.mark.parametrize("seed", seeds(2))
def test_nothing_is_left_of_any_request_however_it_ends(model_dir: Path, seed: int) -> None:
    """Readers that leave, are cancelled, aborted, refused, overdue or slow, at random moments of virtual time."""

    async def test(s: Setting) -> None:
        rng = random.Random(seed)
        outcomes: set[str] = set()

        async def client(name: str) -> None:
            await asyncio.sleep(rng.random() * 60)
            params = SamplingParams(
                n=rng.choice((1, 1, 4)), max_tokens=rng.randint(1, 30), temperature=1.0,
                output_kind=rng.choice(list(RequestOutputKind)),
            )  # fmt: skip
            prompt: Any = rng.choice(([50] * rng.randint(1, 20), "the fox", [], "x" * 3000))
            leave_after = rng.choice((99, 99, 1, 3))
            timeout_s = rng.choice((None, rng.uniform(0.1, 30)))
            num_seen = 0
            try:
                async for _ in s.llm.generate(prompt, params, name, timeout_s=timeout_s):
                    num_seen += 1
                    if num_seen >= leave_after:
                        break
                    if rng.random() < 0.1:
                        await asyncio.sleep(100)
                outcomes.add("left" if num_seen >= leave_after else "done")
            except QuireError as e:
                outcomes.add(type(e).__name__)

        async def run_core() -> None:
            while True:
                await s.client.step()
                await asyncio.sleep(rng.random())

        async def disturb() -> None:
            for _ in range(100):
                await asyncio.sleep(rng.random())
                if rng.random() < 0.5:
                    rng.choice(tasks).cancel()
                else:
                    await s.llm.abort(str(rng.randrange(20)))

        tasks = [asyncio.create_task(client(str(i % 20))) for i in range(150)]
        core = asyncio.create_task(run_core())
        await disturb()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results), results
        await settle()
        core.cancel()
        seen = {"left", "done", "OverloadedError", "DeadlineExceededError", "SlowClientError", "ValidationError"}
        assert seen <= outcomes

    check_virtually(model_dir, test, max_num_queued_reqs=8, max_num_queued_tokens=100, slow_client_timeout_s=2.0)
