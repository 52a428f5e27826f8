"""Speculation in one worker: asks the drafter after each step, and survives whatever it does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from quire.config.engine import EngineConfig
from quire.config.speculative import Drafting
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.execution import DraftTokenIds, ModelRunnerOutput
from quire.worker.loader import Placement
from quire.worker.model_runner import ModelRunner
from quire.worker.spec_decode.drafter import (
    DRAFTER_METHODS,
    Drafter,
    DrafterContext,
    DraftRow,
    Lengths,
    ModelDrafter,
    Proposal,
    TargetStep,
)
from quire.worker.spec_decode.lengths import AdaptiveLengths
from quire.worker.spec_decode.registry import find_drafter
from quire.worker.step_sampler import PendingStep

logger = init_logger(__name__)


IDLE_SECONDS = 0.002
"""A longer time between two steps is no cost of a step: the engine waited for requests."""
WARM_UP_ROWS = (1, 4, 16)


class FixedLengths(Lengths):
    """Keeps all drafts that the drafter proposes."""

    def limit(self, rows: Sequence[DraftRow]) -> Sequence[DraftRow]:
        return rows

    def cut(self, rows: Sequence[DraftRow], proposals: Sequence[Proposal]) -> list[int]:
        return [len(proposal.token_ids) for proposal in proposals]

    def observe_drafts(self, confidences: Sequence[int], num_accepted: int) -> None:
        pass

    def observe_step(self, num_rows: int, seconds: float) -> None:
        pass

    def observe_drafting(self, num_rows: int, seconds: float, is_steady: bool = True) -> None:
        pass


class Speculation:
    """Owns the drafter. An error of it is logged, and there are no more drafts then.

    The engine may drop any draft, or the first ones of a proposal because they have become certain meanwhile. What is
    left of it is verified in the next step of the request.
    """

    def __init__(self, context: DrafterContext, drafter: Drafter, reads_hidden: bool = False) -> None:
        self.is_enabled = True
        self.model: ModelDrafter | None = None
        """The drafter, if it has weights and layers in the KV cache."""
        self._context = context
        self._drafter = drafter
        self._reads_hidden = reads_hidden
        self._vocab_size = context.config.model_config.hf_config.vocab_size
        self._proposed: dict[str, tuple[int, list[int]]] = {}
        """Number of tokens a request had when drafts were proposed, and their confidences, by request id."""
        self._drafts: dict[str, list[int]] = {}
        """Drafts that the last step verified."""
        self._step_start = 0.0
        self._step_rows = 0
        """Rows of logits of the last step, if these were all its tokens."""
        self._drafts_end = 0.0
        """When the last drafts were ready."""

    def warm_up(self) -> None:
        """Measures dummy steps, so that the first drafts have a price."""
        runner = self._context.runner
        for num_rows in WARM_UP_ROWS:
            if num_rows <= runner.max_num_tokens:
                start = time.perf_counter()
                runner.execute_dummy_batch(num_rows)
                self._context.lengths.observe_step(num_rows, time.perf_counter() - start)

    def begin_step(self, gone_req_ids: Iterable[str]) -> None:
        """Forgets requests that have ended or were preempted. A step follows."""
        if self.is_enabled:
            with self._surviving():
                for req_id in gone_req_ids:
                    self._proposed.pop(req_id, None)
                    self._drafter.forget(req_id)
        now = time.perf_counter()
        gap = now - self._drafts_end  # since the last drafts: the engine's work for this step
        self._step_start = now - gap if gap < IDLE_SECONDS else now

    def end_step(self, step: PendingStep, output: ModelRunnerOutput) -> None:
        """Keeps what `propose` needs of a step."""
        is_pure = step.logits is not None and len(step.logits) == len(step.hidden)
        self._step_rows = len(step.hidden) if is_pure else 0
        self._context.step = TargetStep(step.inputs, step.req_ids, step.hidden, output.sampled_token_ids, step.tapped)
        self._drafts = dict(step.drafts)

    def propose(self) -> DraftTokenIds:
        """Returns drafts for the requests that sampled in the last step. It is called once after each step."""
        start = time.perf_counter()
        drafts = DraftTokenIds([], [])
        step = self._context.step
        if self.is_enabled and step is not None:
            with self._surviving():
                self._learn(step, start - self._step_start)
                self._draft(step, drafts)
        self._drafts = {}
        drafts.is_enabled = self.is_enabled
        self._drafts_end = time.perf_counter()
        drafts.seconds = self._drafts_end - start
        return drafts

    def reset(self) -> None:
        """Makes the drafter forget the texts of all requests."""
        with self._surviving():
            self._drafter.reset()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Switches speculation off after an error in the block."""
        try:
            yield
        except Exception:
            self.is_enabled = False
            logger.exception("the drafter failed: there are no more drafts; no token changes, decoding is slower")

    # -- what became of drafts ----------------------------------------------------------------------------------------

    def _learn(self, step: TargetStep, step_seconds: float) -> None:
        """Reports the last step to the drafter and to `lengths`."""
        lengths, batch = self._context.lengths, self._context.runner.batch
        if self._step_rows:
            lengths.observe_step(self._step_rows, step_seconds)
        for req_id, token_ids in zip(step.req_ids, step.sampled_token_ids, strict=True):
            if not token_ids:
                continue
            num_drafts, num_accepted = len(self._drafts.get(req_id, ())), len(token_ids) - 1
            num_tokens, confidences = self._proposed.pop(req_id, (0, []))
            if num_drafts and confidences:
                first = int(batch.num_tokens[batch.rows[req_id]]) - len(token_ids) - num_tokens
                lengths.observe_drafts(confidences[first : first + num_drafts], num_accepted)
            self._drafter.observe(req_id, token_ids, num_accepted)

    # -- the next drafts ----------------------------------------------------------------------------------------------

    def _draft(self, step: TargetStep, drafts: DraftTokenIds) -> None:
        lengths = self._context.lengths
        rows = lengths.limit(self._make_rows(step))
        if not rows and not self._reads_hidden:
            return
        start = time.perf_counter()
        proposals = self._drafter.propose(rows)
        is_steady = all(row.req_id in self._drafts for row in rows)
        lengths.observe_drafting(len(rows), time.perf_counter() - start, is_steady)
        for row, proposal, count in zip(rows, proposals, lengths.cut(rows, proposals), strict=True):
            token_ids = self._valid_prefix(proposal.token_ids, min(count, row.max_drafts))
            if token_ids:
                drafts.req_ids.append(row.req_id)
                drafts.draft_token_ids.append(token_ids)
                self._proposed[row.req_id] = len(row.token_ids), proposal.confidences[: len(token_ids)]
                if proposal.from_prediction:
                    drafts.predicted_req_ids.append(row.req_id)

    def _make_rows(self, step: TargetStep) -> list[DraftRow]:
        """Returns the requests that sampled in the last step and have room for a draft."""
        batch = self._context.runner.batch
        rows: list[DraftRow] = []
        for req_id, new_token_ids in zip(step.req_ids, step.sampled_token_ids, strict=True):
            if new_token_ids:
                row = batch.rows[req_id]
                n, num_prompt_tokens = int(batch.num_tokens[row]), int(batch.num_prompt_tokens[row])
                room = self._room(row, n, n - num_prompt_tokens)
                if room > 0:
                    hints = batch.draft_hints.get(req_id, (None, None))
                    rows.append(DraftRow(req_id, row, batch.token_ids[row, :n], num_prompt_tokens, n - 1, room, *hints))
        return rows

    def _room(self, row: int, num_tokens: int, num_outputs: int) -> int:
        """Returns the most drafts that the request of a row can use: one token comes without a draft."""
        drafting, batch = self._context.drafting, self._context.runner.batch
        max_model_len = batch.token_ids.shape[1]
        if drafting.max_model_len is not None:
            max_model_len = min(max_model_len, drafting.max_model_len)
        room = min(drafting.num_speculative_tokens, max_model_len - num_tokens - 1)
        params = batch.sampling.params[row]
        if params is not None:
            if params.max_tokens is not None:
                room = min(room, params.max_tokens - num_outputs - 1)
            wish = params.extra_args.get("num_speculative_tokens") if params.extra_args else None
            if isinstance(wish, int):
                room = min(room, wish)
        return room

    def _valid_prefix(self, token_ids: Iterable[int], count: int) -> list[int]:
        """Returns the first `count` drafts, or those before the first one that is no token of the target."""
        valid: list[int] = []
        for token_id in islice(token_ids, count):
            if not 0 <= token_id < self._vocab_size:
                break
            valid.append(int(token_id))
        return valid


def follow_warm_up(runner: ModelRunner) -> None:
    """Runs the steps of `Speculation.warm_up`, in a worker beside the one that drafts."""
    for num_rows in WARM_UP_ROWS:
        if num_rows <= runner.max_num_tokens:
            runner.execute_dummy_batch(num_rows)


def make_speculation(
    config: EngineConfig, placement: Placement, runner: ModelRunner, drafting: Drafting
) -> Speculation:
    """Returns the speculation of a loaded target, with its drafter. Raises ConfigError or ModelLoadError."""
    spec = find_drafter(drafting.method, drafting.drafter_cls)
    sharding, placement = placement.sharding, dataclasses.replace(placement, sharding=None)  # what drafts is whole
    lengths = AdaptiveLengths(by_depth=spec.has_kv) if drafting.adaptive else FixedLengths()
    context = DrafterContext(config, drafting, placement, runner, lengths, sharding)
    drafter = resolve(spec.factory)(context)
    missing = [name for name in DRAFTER_METHODS if not callable(getattr(drafter, name, None))]
    if missing:
        raise ConfigError(
            f"--speculative-config: {spec.factory} has no method {', '.join(missing)}; derive the class from "
            "quire.worker.spec_decode.drafter.Drafter"
        )
    speculation = Speculation(context, drafter, spec.reads_hidden)
    speculation.model = drafter if spec.has_kv else None
    runner.on_step = speculation.end_step
    return speculation
