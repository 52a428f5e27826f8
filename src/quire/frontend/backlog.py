"""Outputs of a request that its reader has not taken yet, as one output."""

from __future__ import annotations

from array import array

import msgspec

from quire.outputs import CompletionOutput, RequestOutput, SampleLogprobs

JOIN_TEXTS_AT = 64


class Backlog:
    """Says at the end what the outputs it was given said one after the other; the n outputs of a prompt by index.

    Deltas are joined; of cumulative outputs the latest counts. However many there are, one more costs the same, and a
    token takes a few bytes: readers that stand still slow nobody down (promise P10).
    """

    def __init__(self, first: RequestOutput, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._latest = first
        self._prompt_logprobs = first.prompt_logprobs
        self._deltas: dict[int, _Delta] = {}
        self._completions: dict[int, CompletionOutput] = {}
        self.add(first)

    def add(self, output: RequestOutput) -> None:
        """One more."""
        self._latest = output
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        for completion in output.outputs:
            self._completions[completion.index] = completion
            if self._is_delta:
                self._deltas.setdefault(completion.index, _Delta()).add(completion)

    def join(self) -> RequestOutput:
        """All of them."""
        completions = [self._completions[index] for index in sorted(self._completions)]
        if self._is_delta:
            completions = [self._deltas[completion.index].join(completion) for completion in completions]
        return msgspec.structs.replace(self._latest, outputs=completions, prompt_logprobs=self._prompt_logprobs)


class _Delta:
    """What grows of one of the n outputs."""

    __slots__ = ("_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids = array("i")
        self._logprobs: SampleLogprobs = []

    def add(self, completion: CompletionOutput) -> None:
        self._texts.append(completion.text)
        if len(self._texts) > JOIN_TEXTS_AT:
            self._texts = ["".join(self._texts)]
        self._token_ids.extend(completion.token_ids)
        self._logprobs += completion.logprobs or ()

    def join(self, latest: CompletionOutput) -> CompletionOutput:
        return msgspec.structs.replace(
            latest,
            text="".join(self._texts),
            token_ids=self._token_ids.tolist(),
            logprobs=None if latest.logprobs is None else self._logprobs,
        )
