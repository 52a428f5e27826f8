"""Eight streams side by side while the engine core is killed three times, and the same without: python
examples/kill_the_core.py [MODEL]

The texts are equal. In float32 that holds whatever the model; the streams are greedy, seeded, and neither.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import textwrap

from quire import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

NUM_KILLS = 3
LENGTH = 120
STREAMS: list[tuple[str, dict[str, object]]] = [
    ("What is prefix caching?", {"temperature": 0}),
    ("What is a KV block?", {"temperature": 0, "repetition_penalty": 1.2}),
    ("What does the scheduler do?", {"seed": 1}),
    ("What is preemption?", {"seed": 2, "top_p": 0.9}),
    ("What is chunked prefill?", {"seed": 3, "top_k": 20, "presence_penalty": 0.5}),
    ("What is a token?", {"min_p": 0.05}),
    ("What is sampling?", {}),
    ("What does the frontend do?", {"frequency_penalty": 0.3}),
]


class View:
    """The texts so far: redrawn in place on a terminal, otherwise only events are printed."""

    def __init__(self) -> None:
        self.texts = [""] * len(STREAMS)
        self.num_tokens = 0
        self._is_live = sys.stdout.isatty()
        self._news = ""
        self._num_lines = 0

    def add(self, number: int, text: str, num_tokens: int) -> None:
        self.texts[number] += text
        self.num_tokens += num_tokens
        if self._is_live and number == 0:
            self._draw()

    def say(self, news: str) -> None:
        self._news = news
        if self._is_live:
            self._draw()
        else:
            print(news)

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        width, height = size.columns // 4, max(3, (size.lines - 3) // 2)
        lines = [f"{self.num_tokens} tokens. {self._news}"[: size.columns]]
        for row in (range(4), range(4, 8)):
            panels = [self._panel(number, width - 2, height) for number in row]
            lines += ["  ".join(cells) for cells in zip(*panels, strict=True)]
        print(
            f"\x1b[{self._num_lines}F" * bool(self._num_lines) + "".join(f"\x1b[2K{line}\n" for line in lines), end=""
        )
        self._num_lines = len(lines)

    def _panel(self, number: int, width: int, height: int) -> list[str]:
        title = STREAMS[number][0][:width].ljust(width)
        body = textwrap.wrap(self.texts[number], width)[1 - height :]
        return [title, *(line.ljust(width) for line in body), *[" " * width] * (height - 1 - len(body))]


async def read(llm: AsyncLLM, number: int, view: View) -> None:
    prompt, settings = STREAMS[number]
    params = SamplingParams(
        max_tokens=LENGTH,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        **settings,  # type: ignore[arg-type]
    )
    async for output in llm.generate(prompt, params, f"stream {number}"):
        view.add(number, output.outputs[0].text, len(output.outputs[0].token_ids))


async def kill(llm: AsyncLLM, view: View) -> None:
    """Kills the core at a quarter, at half and at three quarters of the way."""
    for number in range(1, NUM_KILLS + 1):
        while view.num_tokens < number * len(STREAMS) * LENGTH // (NUM_KILLS + 1):
            await asyncio.sleep(0.001)
        pid = llm.engine_core.core_pid
        os.kill(pid, signal.SIGKILL)
        view.say(f"Core process {pid} is killed.")
        while llm.engine_core.core_pid in (None, pid):
            await asyncio.sleep(0.001)
        view.say(f"Core process {llm.engine_core.core_pid} takes its place.")


async def run(num_kills: int) -> list[str]:
    """Returns the texts of all streams."""
    args = AsyncEngineArgs(*(sys.argv[1:] or ["demo"]), dtype="float32", max_model_len=1024)
    view = View()
    async with AsyncLLM.from_engine_args(args) as llm:
        killer = asyncio.create_task(kill(llm, view)) if num_kills else None
        await asyncio.gather(*(read(llm, number, view) for number in range(len(STREAMS))))
        if killer is not None:
            await killer
    return view.texts


async def main() -> None:
    logging.getLogger("quire").setLevel(logging.CRITICAL)  # a log would write into the picture
    print("With three kills:")
    disturbed = await run(NUM_KILLS)
    print("Undisturbed:")
    undisturbed = await run(0)
    for (prompt, _), text, other in zip(STREAMS, disturbed, undisturbed, strict=True):
        print(f"{'equal' if text == other else 'DIFFERENT'}: {prompt} {textwrap.shorten(text, 60)!r}")
    num_equal = sum(text == other for text, other in zip(disturbed, undisturbed, strict=True))
    print(f"{num_equal} of {len(STREAMS)} texts are equal to those of the undisturbed run.")
    sys.exit(num_equal != len(STREAMS))


asyncio.run(main())
