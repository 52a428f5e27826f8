"""A thousand readers of one engine with the same request id: some leave, are cancelled, or change their mind.

Each reader sees a beginning of the one right answer to its own prompt, and all of it if it stays.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.text.detokenizer import IncrementalDetokenizer
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.testing.fake_model import FakeModel, expected_output
from quire.testing.history import History, StreamKey

SAME_ID = "mine"


@dataclass
class Reader:
    """One request and what became of it."""

    prompt: list[int]
    params: SamplingParams
    leave_after: int | None
    """Outputs it reads before it goes; None: it stays to the end."""
    history: History = field(init=False)
    outcome: str = "cancelled"

    def __post_init__(self) -> None:
        self.history = History(self.params.output_kind)

    async def read(self, llm: AsyncLLM) -> None:
        self.history.begin(SAME_ID)
        num_read = 0
        async for output in llm.generate(self.prompt, self.params, SAME_ID):
            self.history.record(output)
            num_read += 1
            if self.leave_after is not None and num_read >= self.leave_after:
                self.outcome = "left"
                return
        self.outcome = "done"

    def expected(self, model: FakeModel, max_model_len: int) -> dict[StreamKey, list[int]]:
        """The n outputs are equal: the fake model looks at tokens only."""
        tokens = expected_output(model, self.prompt, self.params, max_model_len).token_ids
        return {(SAME_ID, index): tokens for index in range(self.params.n)}

    def check(self, llm: AsyncLLM, model: FakeModel, max_model_len: int) -> None:
        differences = self.history.token_differences(self.expected(model, max_model_len))
        assert not differences, differences
        if self.outcome != "done":
            return
        assert not self.history.problems(), self.history.problems()
        assert len(self.history.streams) == self.params.n
        for stream in self.history.streams.values():
            assert stream.finish_reason == "length"
            at_once = IncrementalDetokenizer.from_params(llm.tokenizer, self.params, self.prompt)
            at_once.update(stream.token_ids)
            assert stream.text == at_once.get_next_output_text(finished=True, delta=False)


def draw_reader(rng: random.Random) -> Reader:
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 4)),
        temperature=1.0,
        max_tokens=rng.randint(1, 24),
        ignore_eos=True,
        output_kind=rng.choice(list(RequestOutputKind)),
        detokenize=rng.random() < 0.5,
    )
    prompt = [rng.randrange(60, 250) for _ in range(rng.randint(1, 40))]
    leave_after = None
    if params.output_kind is not RequestOutputKind.FINAL_ONLY and rng.random() < 0.15:
        leave_after = rng.randint(1, 3)
    return Reader(prompt, params, leave_after)


async def run_crowd(llm: AsyncLLM, seed: int, size: int, *, model: FakeModel, max_model_len: int) -> Counter[str]:
    """Let them all in at random moments, cancel some at random moments; how it went for them. Raises AssertionError."""
    rng = random.Random(seed)
    readers = [draw_reader(rng) for _ in range(size)]
    tasks = []
    for reader in readers:
        tasks.append(asyncio.create_task(reader.read(llm)))
        for _ in range(rng.choice((0, 0, 1, 5))):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            rng.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
    for reader in readers:
        reader.check(llm, model, max_model_len)
    assert llm.get_num_unfinished_requests() == 0
    assert (llm.admission.num_reqs, llm.admission.num_tokens) == (0, 0)
    assert await llm.reset_prefix_cache(), "no block is in use"
    return Counter(reader.outcome for reader in readers)
