"""A frontend process of the tests: `python -m tests.process.program [attach INPUT OUTPUT]`.

It reads streams and says on standard output, a JSON object per line, what it is and what becomes of them. SIGTERM ends
it in good order, as it would end a server.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

from quire import SamplingParams
from quire.errors import EngineDeadError, GenerationError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.mp import AsyncMPClient, ClientAddresses

from .harness import fake_args

NUM_STREAMS = 32
MAX_MODEL_LEN = 8192
MAX_TOKENS = 8000
"""More than it will ever have time for."""


def say(**fields: Any) -> None:
    """A line for the test."""
    print(json.dumps(fields), flush=True)


async def read(llm: AsyncLLM, request_id: str, begun: list[str]) -> None:
    """Read a stream to whatever end it has."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    reason: str | None = None
    try:
        async for output in llm.generate({"prompt_token_ids": [1, 2, 3]}, params, request_id):
            if len(output.outputs[0].token_ids) and request_id not in begun:
                begun.append(request_id)
                if len(begun) == NUM_STREAMS:
                    say(live=len(begun))
            reason = output.outputs[0].finish_reason
    except (GenerationError, EngineDeadError) as e:
        reason = f"{type(e).__name__}: {e}"
    say(end=request_id, reason=reason)


async def main(argv: list[str]) -> None:
    config = fake_args(max_model_len=MAX_MODEL_LEN).create_engine_config("serving")
    addresses = ClientAddresses(1, argv[1], argv[2]) if argv[:1] == ["attach"] else None
    client = AsyncMPClient(config, log_stats=True, client_addresses=addresses)
    llm = AsyncLLM(config, client=client)
    directory = client.resources.directory
    if directory is not None:
        say(core=client.core_pid, directory=str(directory.path))
    stopping: list[asyncio.Future[None]] = []

    def stop() -> None:
        stopping.append(asyncio.ensure_future(asyncio.to_thread(llm.shutdown)))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    begun: list[str] = []
    await asyncio.gather(*(read(llm, f"r{i}", begun) for i in range(NUM_STREAMS)))
    await asyncio.gather(*stopping)
    llm.shutdown()
    say(done=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
