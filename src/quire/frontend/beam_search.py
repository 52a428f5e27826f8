"""Beam search over a function that gives the most likely next tokens. It knows no engine.

Each step the `beam_width` best continuations of all beams are looked at: those that end the text are complete, and the
best `beam_width` that do not are the next beams. A score is the sum of the log-probabilities of the generated tokens
over their number to the power of `length_penalty` (as in Wu et al. 2016 without the constant, and in transformers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.outputs import BeamSearchSequence, Logprob
from quire.sampling_params import BeamSearchParams

NextTokens = Callable[[list[list[int]]], list[dict[int, Logprob]]]
"""Token sequences to the log-probabilities of the most likely next tokens of each.

`beam_width` plus the number of end-of-sequence tokens are enough: so many, and the best continuations are among them.
"""


@dataclass(slots=True)
class BeamState:
    """The search for one prompt."""

    prompt_len: int
    live: list[BeamSearchSequence]
    complete: list[tuple[float, BeamSearchSequence]] = field(default_factory=list)
    """(score, sequence)"""

    @classmethod
    def start(cls, prompt_ids: Sequence[int]) -> BeamState:
        """Begins with one beam: the prompt."""
        return cls(len(prompt_ids), [BeamSearchSequence(tokens=list(prompt_ids), logprobs=[])])

    def advance(
        self, next_tokens: Sequence[Mapping[int, Logprob]], params: BeamSearchParams, eos_ids: frozenset[int]
    ) -> None:
        """Takes one step: `next_tokens` are the candidates of each live beam, in order."""
        width = params.beam_width
        candidates = [
            (beam.cum_logprob + entry.logprob, token_id, beam, position)
            for beam, position in zip(self.live, next_tokens, strict=True)
            for token_id, entry in position.items()
        ]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: ties keep the order of beams and tokens
        self.live = []
        for rank, (cum_logprob, token_id, beam, position) in enumerate(candidates):
            if token_id in eos_ids:
                if rank < width:
                    self._complete(beam, token_id, cum_logprob, position, params)
            elif len(self.live) < width:
                self.live.append(_extended(beam, [token_id], cum_logprob, position))
        if not self._can_improve(params):
            self.live = []

    def _complete(
        self,
        beam: BeamSearchSequence,
        eos_id: int,
        cum_logprob: float,
        position: Mapping[int, Logprob],
        params: BeamSearchParams,
    ) -> None:
        shown = [eos_id] if params.include_stop_str_in_output else []
        sequence = _extended(beam, shown, cum_logprob, position)
        sequence.finish_reason, sequence.stop_reason = "stop", eos_id
        length = len(beam.tokens) - self.prompt_len + 1
        self.complete.append((score(cum_logprob, length, params.length_penalty), sequence))

    def _can_improve(self, params: BeamSearchParams) -> bool:
        """Returns True if a live beam can still be among the best: a sum of log-probabilities can only fall."""
        if not self.live or len(self.complete) < params.beam_width:
            return True
        worst = sorted((s for s, _ in self.complete), reverse=True)[params.beam_width - 1]
        length = params.max_tokens if params.length_penalty > 0 else len(self.live[0].tokens) - self.prompt_len
        return score(self.live[0].cum_logprob, length, params.length_penalty) > worst

    def best(self, params: BeamSearchParams) -> list[BeamSearchSequence]:
        """Returns the best sequences, complete or not, best first."""
        ranked = list(self.complete)
        for beam in self.live:
            beam.finish_reason = "length"
            length = len(beam.tokens) - self.prompt_len
            ranked.append((score(beam.cum_logprob, length, params.length_penalty), beam))
        ranked.sort(key=lambda item: -item[0])
        return [sequence for _, sequence in ranked[: params.beam_width]]


def score(cum_logprob: float, length: int, length_penalty: float) -> float:
    """Returns the rank of a beam. `length` counts generated tokens, the end-of-sequence token among them."""
    return cum_logprob / math.pow(length, length_penalty)


def _extended(
    beam: BeamSearchSequence, token_ids: list[int], cum_logprob: float, position: Mapping[int, Logprob]
) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=beam.tokens + token_ids, logprobs=[*beam.logprobs, dict(position)], cum_logprob=cum_logprob
    )


def search(
    next_tokens: NextTokens,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    eos_ids: frozenset[int],
    max_model_len: int,
) -> list[list[BeamSearchSequence]]:
    """Returns the best beams of each prompt. The live beams of all prompts share a call of `next_tokens`.

    A beam ends at one of `eos_ids`, after `params.max_tokens` tokens, or where the context is full.
    """
    states = [BeamState.start(prompt) for prompt in prompts]
    for _ in range(params.max_tokens):
        active = [state for state in states if state.live and len(state.live[0].tokens) < max_model_len]
        if not active:
            break
        answers = iter(next_tokens([beam.tokens for state in active for beam in state.live]))
        for state in active:
            state.advance([next(answers) for _ in state.live], params, eos_ids)
    return [state.best(params) for state in states]
