"""`AsyncLLM` on a core that is run by hand: outputs of each reader, and messages to the core."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import EngineDeadError, GenerationError, ValidationError
from quire.frontend.text.detokenizer import IncrementalDetokenizer
from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.wire.engine_core import EngineCoreOutput, EngineCoreOutputs, FinishReason
from tests.adapters import write_adapter

from .async_fake_client import settle
from .async_setting import Setting, check, last

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def test_each_output_kind_delivers_its_part(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        kinds = {"all": RequestOutputKind.CUMULATIVE, "new": DELTA, "end": FINAL}
        tasks = [s.reader(name, SamplingParams(max_tokens=3, output_kind=kind)) for name, kind in kinds.items()]
        await settle()
        await s.client.step(3)
        await asyncio.gather(*tasks)
        assert s.tokens("all") == [[52], [52, 53], [52, 53, 54]]
        assert s.tokens("new") == [[52], [53], [54]]
        assert s.tokens("end") == [[52, 53, 54]]
        assert {o.request_id for outputs in s.read.values() for o in outputs} == set(kinds)
        assert s.recorder.finished == [FinishReason.LENGTH] * 3

    check(model_dir, test)


def test_a_slow_reader_gets_one_merged_output(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        stream = s.llm.generate([50, 51], SamplingParams(max_tokens=4, output_kind=DELTA), "slow")
        first = asyncio.ensure_future(anext(stream))
        await settle()
        await s.client.step(4)
        assert list((await first).outputs[0].token_ids) == [52]
        rest = await anext(stream)
        assert list(rest.outputs[0].token_ids) == [53, 54, 55]
        assert rest.finished
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    check(model_dir, test)


def test_n_outputs_are_one_request(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        task = s.reader("n", SamplingParams(n=4, max_tokens=2, temperature=1.0, output_kind=FINAL))
        await settle()
        assert len(s.added) == 4
        await s.client.step(2)
        await task
        (only,) = s.read["n"]
        assert [(c.index, list(c.token_ids)) for c in only.outputs] == [(i, [52, 53]) for i in range(4)]

    check(model_dir, test)


def test_leaving_the_loop_aborts(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        async def read() -> None:
            async for _ in s.llm.generate([50], SamplingParams(n=3, max_tokens=9, temperature=1.0), "break"):
                break

        task = asyncio.create_task(read())
        await settle()
        await s.client.step()
        await task
        await settle()
        assert sorted(s.aborted) == sorted(s.added)
        assert s.recorder.finished == [FinishReason.ABORT] * 3

    check(model_dir, test)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("num_steps", [0, 1])
def test_cancelling_the_reader_aborts_at_once(model_dir: Path, n: int, num_steps: int) -> None:
    async def test(s: Setting) -> None:
        task = s.reader("x", SamplingParams(n=n, max_tokens=9, temperature=1.0))
        await settle()
        await s.client.step(num_steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(s.aborted) == n
        assert not s.client.core.live

    check(model_dir, test)


def test_a_dropped_iterator_aborts(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        stream = s.llm.generate([50], SamplingParams(max_tokens=9), "leak")
        first = asyncio.ensure_future(anext(stream))
        await settle()
        await s.client.step()
        await first
        del stream, first
        gc.collect()
        await settle()
        assert len(s.aborted) == 1

    check(model_dir, test)


def test_a_stream_nobody_reads_was_never_added(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        s.llm.generate([50], SamplingParams(), "never")
        await settle()
        assert not s.client.calls

    check(model_dir, test)


def test_abort_by_either_id(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        tasks = [s.reader(name, SamplingParams(max_tokens=9)) for name in ("a", "b", "c")]
        await settle()
        await s.client.step()
        internal = next(i for i in s.added if i.startswith("b-"))
        await s.llm.abort("a")
        await s.llm.abort(internal, internal=True)
        await s.llm.abort(["c", "unknown"])
        await s.llm.abort("a")
        await asyncio.gather(*tasks)
        assert [s.read[name][-1].outputs[0].finish_reason for name in "abc"] == ["abort"] * 3
        assert len(s.aborted) == 3

    check(model_dir, test)


def test_ids_are_labels(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        tasks = [
            asyncio.create_task(last(s.llm, [40 + i], SamplingParams(max_tokens=2), "same" * 1000)) for i in range(5)
        ]
        await settle()
        await s.client.step(2)
        outputs = await asyncio.gather(*tasks)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [[41 + i, 42 + i] for i in range(5)]

    check(model_dir, test)


def test_what_refuses_a_request(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        with pytest.raises(ValidationError, match="empty"):
            await last(s.llm, [], SamplingParams(), "a")
        with pytest.raises(TypeError, match="must be a str"):
            await s.llm.add_request(7, [50])  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match=r"'embed'.*generate only"):
            await anext(s.llm.encode([50], PoolingParams(), "p"))
        assert not s.client.calls

    check(model_dir, test)


def test_a_core_that_refuses_leaves_nothing_behind(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        add = s.client.add_request_async

        async def refuse(request: Any) -> None:
            if request.request_id.startswith("2_"):
                raise ValidationError("no")
            await add(request)

        s.client.add_request_async = refuse  # type: ignore[method-assign]
        with pytest.raises(ValidationError, match="no"):
            await last(s.llm, [50], SamplingParams(n=4, temperature=1.0), "a")

    check(model_dir, test)


def test_a_request_aborted_while_it_is_sent(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        add = s.client.add_request_async

        async def slow(request: Any) -> None:
            await add(request)
            await asyncio.sleep(0)

        s.client.add_request_async = slow  # type: ignore[method-assign]
        task = s.reader("x", SamplingParams(n=4, max_tokens=2, temperature=1.0))
        await settle(3)
        await s.llm.abort("x")
        await task
        assert s.read["x"][-1].finished
        assert len(s.added) < 4

    check(model_dir, test)


def test_a_stop_string_is_an_abort_to_the_core(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        stop = (await s.llm.get_tokenizer()).decode([53])
        task = s.reader("x", SamplingParams(max_tokens=9, stop=[stop]))
        await settle()
        await s.client.step(2)
        await task
        assert s.read["x"][-1].outputs[0].stop_reason == stop
        assert len(s.aborted) == 1

    check(model_dir, test)


class BrokenDetokenizer(IncrementalDetokenizer):
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        raise RuntimeError("no text")


def test_an_error_in_one_request_is_its_own(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Setting) -> None:
        tasks = [s.reader(name, SamplingParams(max_tokens=3)) for name in ("bad", "good")]
        await settle()
        await s.client.step()
        (bad,) = (st for i, st in s.llm.pipeline.output_processor.request_states.items() if i.startswith("bad"))
        bad.detokenizer = BrokenDetokenizer(bad.detokenizer.token_ids)
        await s.client.step(2)
        with pytest.raises(GenerationError, match="cannot be processed"):
            await tasks[0]
        await tasks[1]
        assert s.tokens("good")[-1] == [52, 53, 54]
        assert s.tokens("bad") == [[52]]
        assert [i.split("-")[0] for i in s.aborted] == ["bad"]
        assert sorted(s.recorder.finished) == [FinishReason.LENGTH, FinishReason.ERROR]

    check(model_dir, test)


def test_a_failed_request_raises_and_takes_its_siblings(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        task = s.reader("x", SamplingParams(n=2, max_tokens=9, temperature=1.0))
        await settle()
        request_id = s.added[0]
        del s.client.core.live[request_id]
        failure = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error_message="poison")
        s.client.send(EngineCoreOutputs(outputs=[failure]))
        with pytest.raises(GenerationError, match="poison"):
            await task
        assert len(s.aborted) == 1

    check(model_dir, test)


def test_a_broken_batch_is_not_the_end(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        task = s.reader("x", SamplingParams(max_tokens=2))
        await settle()
        s.client.send(EngineCoreOutputs(outputs=[None]))  # type: ignore[list-item]
        await s.client.step(2)
        await task
        assert s.tokens("x") == [[52], [52, 53]]

    check(model_dir, test)


def test_a_dead_engine_says_so_to_everyone(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        tasks = [s.reader(name, SamplingParams(max_tokens=9)) for name in ("a", "b")]
        await settle()
        await s.client.step()
        await s.llm.check_health()
        assert (s.llm.is_running, s.llm.is_ready, s.llm.errored, s.llm.is_stopped) == (True, True, False, False)
        s.client.ready = False
        assert not s.llm.is_ready
        await s.llm.check_health()
        s.client.die("out of luck")
        for task in tasks:
            with pytest.raises(EngineDeadError, match="out of luck"):
                await task
        assert (s.llm.is_running, s.llm.is_ready, s.llm.errored, s.llm.is_stopped) == (False, False, True, True)
        for call in (s.llm.check_health(), last(s.llm, [50], SamplingParams(), "late")):
            with pytest.raises(EngineDeadError, match="out of luck"):
                await call
        s.client.core.live.clear()

    check(model_dir, test)


def test_shutdown_ends_every_stream(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        task = s.reader("x", SamplingParams(max_tokens=9))
        await settle()
        s.llm.shutdown()
        s.llm.shutdown()
        await task
        assert s.read["x"][-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="shut down"):
            await last(s.llm, [50], SamplingParams(), "late")
        s.client.core.live.clear()

    check(model_dir, test)


def test_shutdown_from_another_thread(model_dir: Path) -> None:
    async def test(s: Setting) -> None:
        task = s.reader("x", SamplingParams(max_tokens=9))
        await settle()
        await asyncio.to_thread(s.llm.shutdown)
        await task
        assert s.read["x"][-1].outputs[0].finish_reason == "abort"
        s.client.core.live.clear()

    check(model_dir, test)


def test_an_engine_belongs_to_one_loop(model_dir: Path) -> None:
    setting = Setting(model_dir)

    async def first() -> None:
        task = setting.reader("x", SamplingParams(max_tokens=1))
        await settle()
        await setting.client.step()
        await task

    asyncio.run(first())
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(last(setting.llm, [50], SamplingParams(), "y"))
    setting.llm.shutdown()


def test_large_batches_leave_room_for_others(model_dir: Path) -> None:
    """Between two parts of a batch the loop does something else (promise P15)."""

    async def test(s: Setting) -> None:
        params = SamplingParams(max_tokens=1, output_kind=FINAL)
        tasks = [s.reader(str(i), params) for i in range(300)]
        await settle()
        s.client.send(s.client.core.get_output())
        left: list[int] = []
        while s.llm.get_num_unfinished_requests():
            await asyncio.sleep(0)
            left.append(s.llm.get_num_unfinished_requests())
        await asyncio.gather(*tasks)
        assert {300 - 128, 300 - 256, 0} <= set(left)

    check(model_dir, test)


def test_control_calls_reach_the_core(model_dir: Path, tmp_path: Path) -> None:
    async def test(s: Setting) -> None:
        llm, results = s.llm, s.client.core.utility_results
        results.update(
            is_scheduler_paused=True, is_sleeping=False, wake_up=True, update_weights="2", collective_rpc=["pong"]
        )
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.pause_generation(wait_for_inflight_requests=True)
        await llm.resume_generation()
        assert await llm.is_paused() is True
        await llm.sleep(2, "keep")
        assert await llm.wake_up(["weights"]) is True
        assert await llm.is_sleeping() is False
        assert await llm.reset_prefix_cache(True) is True
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()
        assert await llm.update_weights("/w") == "2"
        assert await llm.collective_rpc("ping", 1.0) == ["pong"]
        results.update(get_weight_version="2", add_lora=True, remove_lora=True, list_loras=[1], pin_lora=False)
        assert await llm.get_weight_version() == "2"
        await llm.release_kv_cache_memory("keep")
        lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "a")))
        assert (await llm.add_lora(lora), await llm.remove_lora(1), await llm.pin_lora(1)) == (True, True, False)
        assert await llm.list_loras() == {1}
        await llm.start_profile("/p")
        await llm.stop_profile()
        assert s.client.calls == [
            ("pause_scheduler", ("keep", False)),
            ("pause_scheduler", ("wait", True)),
            ("resume_scheduler", ()),
            ("is_scheduler_paused", ()),
            ("sleep", (2, "keep")),
            ("wake_up", (["weights"],)),
            ("is_sleeping", ()),
            ("reset_prefix_cache", (True, False)),
            ("update_weights", ("/w", None)),
            ("collective_rpc", ("ping", 1.0, (), {})),
            ("get_weight_version", ()),
            ("release_kv_cache_memory", ("keep",)),
            ("add_lora", (lora,)),
            ("remove_lora", (1,)),
            ("pin_lora", (1,)),
            ("list_loras", ()),
            ("profile", (True, "/p", None, None)),
            ("profile", (False,)),
        ]
        assert await llm.get_supported_tasks() == ("generate",)
        assert llm.tokenizer is await llm.get_tokenizer()
        assert llm.get_default_sampling_params().temperature == 0.5
        await llm.do_log_stats()
        assert s.recorder.num_logged == 1

    check(model_dir, test, enable_lora=True)
