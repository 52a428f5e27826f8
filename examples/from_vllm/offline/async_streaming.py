"""Tokens as they come, from an engine of an asyncio program."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        pieces += [completion.text for completion in output.outputs]
        if output.finished:
            break
    print(f"{request_id}: {len(pieces)} pieces: {''.join(pieces)!r}")


async def main(model: str) -> None:
    engine_args = AsyncEngineArgs(model=model, enforce_eager=True, max_model_len=1024)
    engine = AsyncLLM.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
    try:
        prompts = ["What is prefix caching?", "A KV block is", "The scheduler"]
        await asyncio.gather(*(stream(engine, prompt, f"stream-{i}") for i, prompt in enumerate(prompts)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    asyncio.run(main(parser.parse_args().model))
