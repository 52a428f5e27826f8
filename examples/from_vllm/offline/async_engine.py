"""A request that is aborted while another goes on, by the older name of the asyncio engine."""

import asyncio

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.utils import FlexibleArgumentParser, random_uuid


async def read(engine: AsyncLLMEngine, prompt: str, request_id: str, limit: int | None = None) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    final = None
    async for output in engine.generate(prompt, params, request_id):
        final = output
        if limit is not None and len(output.outputs[0].token_ids) >= limit:
            await engine.abort(request_id)
    assert final is not None
    return f"{len(final.outputs[0].token_ids)} tokens, {final.outputs[0].finish_reason}"


async def main(args) -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    await engine.check_health()
    whole, cut = await asyncio.gather(
        read(engine, "Prefix caching is", random_uuid()), read(engine, "A KV block", random_uuid(), limit=5)
    )
    print("whole:", whole)
    print("aborted:", cut)
    print("context:", engine.model_config.max_model_len)
    print("tokens:", (await engine.get_tokenizer()).encode("Prefix caching"))
    engine.shutdown()


if __name__ == "__main__":
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="Qwen/Qwen3-0.6B", disable_log_stats=True)
    asyncio.run(main(parser.parse_args()))
