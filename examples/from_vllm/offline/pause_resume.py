"""An engine that is paused in the middle of an answer, and goes on."""

import asyncio
import time

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

PAUSE_S = 0.5


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True))
    times: list[float] = []

    async def generate() -> None:
        params = SamplingParams(max_tokens=600, ignore_eos=True, temperature=0)
        async for output in engine.generate("Prefix caching is", params, request_id="a"):
            times.append(time.monotonic())
            if len(output.outputs[0].token_ids) >= 10:
                paused.set()
        print(f"{len(output.outputs[0].token_ids)} tokens")

    async def pause() -> None:
        await paused.wait()
        await engine.pause_generation(mode="keep", clear_cache=False)
        print("paused:", await engine.is_paused())
        await asyncio.sleep(PAUSE_S)
        await engine.resume_generation()
        print("paused:", await engine.is_paused())

    paused = asyncio.Event()
    await asyncio.gather(generate(), pause())
    gap = max(later - earlier for earlier, later in zip(times, times[1:]))
    print("a gap of the pause's length:", gap > PAUSE_S * 0.8)
    engine.shutdown()


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    asyncio.run(main(parser.parse_args().model))
