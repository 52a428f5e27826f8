"""Several answers at once, each as it is written: python examples/streams.py [MODEL]"""

import asyncio
import sys

from quire import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = ["What is a KV block?", "What is prefix caching?", "What does num_preemptions mean?"]
PARAMS = SamplingParams(temperature=0, max_tokens=48, output_kind=RequestOutputKind.DELTA)


async def ask(llm: AsyncLLM, number: int) -> str:
    answer, num_pieces = "", 0
    async for output in llm.generate(QUESTIONS[number], PARAMS, f"question {number}"):
        answer += output.outputs[0].text
        num_pieces += 1
    return f"{QUESTIONS[number]!r} -> {answer!r} in {num_pieces} pieces"


async def main() -> None:
    async with AsyncLLM.from_engine_args(AsyncEngineArgs(*sys.argv[1:])) as llm:
        for line in await asyncio.gather(*(ask(llm, number) for number in range(len(QUESTIONS)))):
            print(line)

        stream = llm.generate(QUESTIONS[0], PARAMS, "in a hurry", timeout_s=30)
        async for output in stream:
            print("first piece:", repr(output.outputs[0].text))
            break  # the rest is not wanted, and not computed
        await stream.aclose()


asyncio.run(main())
