"""The books of 24 requests, some left by their readers, all hit by a kill: python examples/ledger.py [MODEL]"""

import asyncio
import logging
import os
import signal
import sys

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.frontend.metrics.publish.snapshot import MetricsSnapshot
from quire.testing.metrics_audit import MetricsAudit

NUM_REQUESTS = 24


async def read(llm: AsyncLLM, number: int) -> None:
    """Reads an answer; every third reader leaves after its first piece."""
    stream = llm.generate("What is a KV block?", SamplingParams(max_tokens=24), f"request {number}")
    async for _ in stream:
        if number % 3 == 0:
            break
    await stream.aclose()


async def main() -> None:
    logging.getLogger("quire").setLevel(logging.CRITICAL)  # the kill is meant
    async with AsyncLLM.from_engine_args(AsyncEngineArgs(*sys.argv[1:])) as llm:
        readers = [asyncio.create_task(read(llm, number)) for number in range(NUM_REQUESTS)]
        await readers[0]
        os.kill(llm.engine_core.core_pid, signal.SIGKILL)  # the other readers notice nothing
        await asyncio.gather(*readers)
        snapshot = llm.pipeline.stats.metrics.snapshot()  # what /metrics of a server shows

    def total(name: str, *labels: str) -> int:
        return round(snapshot.value(name, *labels))

    received, accepted = total("quire_requests_received"), total("quire_requests_accepted")
    finished, live = total("quire_requests_finished"), total("quire_requests_live")
    print(f"{received} requests received = {accepted} accepted + {total('quire_requests_rejected')} rejected")
    print(
        f"{accepted} accepted = {finished} finished ({total('quire_requests_finished', 'abort')} aborted) + {live} live"
    )
    prompt, computed = total("vllm:prompt_tokens"), total("vllm:prompt_tokens_by_source", "local_compute")
    print(f"{prompt} prompt tokens = {computed} computed + {total('vllm:prompt_tokens_cached')} cached")
    generated, delivered = total("vllm:generation_tokens"), total("quire_delivered_tokens")
    print(f"{generated} tokens generated = {delivered} delivered + {total('quire_discarded_tokens')} discarded")
    print("every law holds:", all_laws_hold(snapshot))


def all_laws_hold(snapshot: MetricsSnapshot) -> bool:
    """Checks these four and all other laws of docs/metrics.md."""
    MetricsAudit().check(snapshot)  # raises AssertionError, with all that is wrong
    return True


asyncio.run(main())
