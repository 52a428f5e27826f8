"""Stages of a pipeline: each computes adjacent layers, and passes hidden states to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import ServerError
from quire.failpoints import failpoint
from quire.wire.execution import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SchedulerOutput
from quire.wire.ring import WorkerLinks
from quire.wire.shared_memory import is_aborted
from quire.worker.attention.backend import Forward, States
from quire.worker.input_batch import StepInputs
from quire.worker.kernels.barrier import BarrierError
from quire.worker.model_runner import ModelRunner
from quire.worker.parallel.plan import Stage
from quire.worker.pooler import Pooler


class StageExchange:
    """Passes the hidden states of each step from one stage to the next, in the order of steps."""

    def __init__(self, links: WorkerLinks, max_rows: int) -> None:
        self._links, self._max_rows = links, max_rows
        self._buffers: list[Tensor] = []
        """Places of what is received, [max_rows, dim] each: plans expect it where it was before."""

    def receive(self, num_rows: int) -> Sequence[Tensor]:
        """Returns what the stage before has sent for a step of `num_rows` tokens: hidden states, and perhaps the inputs
        of layers. The next call overwrites them. Raises BarrierError if it will not come."""
        inlet = self._links.inlet
        if inlet is None:
            return ()
        failpoint("worker.stage")
        frames = inlet.receive(check=self._check)
        if frames is None:
            raise BarrierError("the stage before this one has ended")
        names = bytes(frames[0]).decode().split()
        if not self._buffers:
            for name, frame in zip(names, frames[1:], strict=True):
                dtype: torch.dtype = getattr(torch, name)
                dim = len(frame) // (num_rows * dtype.itemsize)
                self._buffers.append(torch.empty((self._max_rows, dim), dtype=dtype))
        for buffer, frame in zip(self._buffers, frames[1:], strict=True):
            place = buffer[:num_rows].view(torch.uint8).view(-1)
            if len(frame) != len(place):
                raise ServerError(f"stages are not at the same step: {len(frame)} bytes came instead of {len(place)}")
            place.numpy()[:] = frame
        return [buffer[:num_rows] for buffer in self._buffers]

    def _check(self) -> None:
        if is_aborted(self._links.shared_file):
            raise BarrierError("another worker of the step has failed")

    def send(self, states: States) -> None:
        """Sends the results of this stage to the next one. Returns once they may be overwritten."""
        outlet = self._links.outlet
        if outlet is None:
            return
        tensors = [rows.contiguous() for rows in (states if isinstance(states, tuple) else (states,))]
        names = " ".join(str(rows.dtype).removeprefix("torch.") for rows in tensors)
        frames = [rows.view(torch.uint8).view(-1).numpy().data for rows in tensors]
        outlet.send([names.encode(), *frames], self._check)


class StageRunner(ModelRunner):
    """Runs one stage of a model. The last stage samples; the others get the tokens with the next step of a request."""

    def __init__(self, stage: Stage, links: WorkerLinks, *arguments: Any, **options: Any) -> None:
        """`arguments` and `options` are those of ModelRunner."""
        super().__init__(*arguments, **options)
        self._stage, self._exchange = stage, StageExchange(links, self.max_num_tokens)

    def _call(self, run: Forward, input_ids: Tensor, positions: Tensor) -> States:
        states = run(input_ids, positions, *self._exchange.receive(input_ids.shape[0]))
        self._exchange.send(states)
        return states

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_batch(scheduler_output)
        if not self._stage.is_last:
            self.sampler.prompts.wanted.clear()

    def _pool(self, pooler: Pooler, req_ids: list[str], inputs: StepInputs, hidden: Tensor) -> ModelRunnerOutput:
        return super()._pool(pooler, req_ids, inputs, hidden) if self._stage.is_last else EMPTY_MODEL_RUNNER_OUTPUT

    def _compute_logits(self, inputs: StepInputs, hidden: Tensor) -> Tensor | None:
        return super()._compute_logits(inputs, hidden) if self._stage.is_last else None

    def _sample_dummy(self, hidden: Tensor) -> None:
        if self._stage.is_last:
            super()._sample_dummy(hidden)
