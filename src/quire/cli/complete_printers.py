"""How `quire complete` shows what comes: as text in order, or as JSON when a prompt is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from quire.cli.generation import RequestTiming
from quire.cli.terminal import Style
from quire.outputs import CompletionOutput, RequestOutput


class Printer(Protocol):
    """Where updates go."""

    def add(self, output: RequestOutput) -> None:
        """Take an update of kind DELTA."""

    def interrupt(self) -> None:
        """Nothing more will come."""


class TextPrinter:
    """Streams the first unfinished sequence; what comes of later ones is held until it is their turn."""

    def __init__(self, prompts: list[str], n: int, echo: bool) -> None:
        self._style = Style(sys.stdout)
        self._n = n
        self._prompts = prompts
        self._echo = echo
        self._held: list[list[str]] = [[] for _ in range(len(prompts) * n)]
        self._done = [False] * len(self._held)
        self._turn = 0
        self._begin()

    def add(self, output: RequestOutput) -> None:
        for o in output.outputs:
            slot = int(output.request_id) * self._n + o.index
            self._held[slot].append(o.text)
            self._done[slot] = self._done[slot] or o.finished()
        self._advance()

    def interrupt(self) -> None:
        print(flush=True)

    def _advance(self) -> None:
        while self._turn < len(self._held):
            print(self._style.printable("".join(self._held[self._turn])), end="", flush=True)
            self._held[self._turn].clear()
            if not self._done[self._turn]:
                return
            print(flush=True)
            self._turn += 1
            self._begin()

    def _begin(self) -> None:
        if self._turn >= len(self._held):
            return
        prompt = self._prompts[self._turn // self._n]
        if len(self._held) > 1:
            title = " ".join(prompt.split())
            number = f" [{self._turn % self._n + 1}/{self._n}]" if self._n > 1 else ""
            blank = "\n" if self._turn else ""
            print(blank + self._style.paint(f"==> {title[:70]}{'...' if title[70:] else ''}{number} <==", "bold"))
        if self._echo:
            print(self._style.paint(prompt, "dim"), end="", flush=True)


class JsonPrinter:
    """One JSON line per finished prompt, in the order they finish. Counts come from the `timings` of the prompts."""

    def __init__(self, prompts: Sequence[str], timings: Sequence[RequestTiming]) -> None:
        self._prompts = prompts
        self._timings = timings
        self._parts: dict[tuple[str, int], list[CompletionOutput]] = {}
        self._indices: dict[str, set[int]] = {}

    def add(self, output: RequestOutput) -> None:
        for o in output.outputs:
            self._parts.setdefault((output.request_id, o.index), []).append(o)
            self._indices.setdefault(output.request_id, set()).add(o.index)
        if output.finished:
            choices = [self._choice(output.request_id, i) for i in sorted(self._indices.pop(output.request_id))]
            print(json.dumps(self._row(int(output.request_id), choices), ensure_ascii=False), flush=True)

    def interrupt(self) -> None:
        pass

    def _choice(self, request_id: str, index: int) -> dict[str, Any]:
        parts = self._parts.pop((request_id, index))
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(p.text for p in parts),
            "token_ids": [t for p in parts for t in p.token_ids],
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }
        logprobs = [position for p in parts for position in p.logprobs or ()]
        if logprobs:
            choice["logprobs"] = [
                {str(t): {"logprob": x.logprob, "rank": x.rank, "token": x.decoded_token} for t, x in position.items()}
                for position in logprobs
            ]
        return choice

    def _row(self, number: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        timing = self._timings[number]
        return {
            "prompt_index": number,
            "prompt": self._prompts[number],
            "outputs": choices,
            "usage": {
                "prompt_tokens": timing.num_prompt_tokens,
                "cached_tokens": timing.num_cached_tokens,
                "completion_tokens": timing.num_output_tokens,
            },
        }
