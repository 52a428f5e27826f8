"""The task behind `AsyncLLM`: takes what the core sends, and gives every request's outputs to its reader."""

from __future__ import annotations

import asyncio

from quire.errors import EngineDeadError
from quire.frontend.client.base import AsyncEngineCoreClient
from quire.frontend.request_pipeline import RequestPipeline
from quire.logger import init_logger
from quire.wire.engine_core import EngineCoreOutputs

logger = init_logger(__name__)

OUTPUTS_PER_TURN = 16
"""Processed in one go; then their readers have a turn, and whatever has come from outside: a millisecond or less
between two looks at the sockets. With 32 or 128, or one turn for both, a scrape beside 256 streams waited longer, and
nothing else was better; with 8 it waited as long (docs/performance.md)."""


class OutputHandler:
    """One task, started with the first request. An error in one batch of outputs costs the others nothing.

    When the core is gone for good it ends, and every reader is told.
    """

    def __init__(self, engine_core: AsyncEngineCoreClient, pipeline: RequestPipeline) -> None:
        self._engine_core = engine_core
        self._pipeline = pipeline
        self._task: asyncio.Task[None] | None = None
        self.dead_error: EngineDeadError | None = None
        """Why no outputs will come any more; None while they do."""

    def start(self) -> None:
        """Run on the running loop, if it does not run already."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="quire-output-handler")

    def note_shutdown(self) -> None:
        """No requests are taken any more. From any thread."""
        self.dead_error = self.dead_error or EngineDeadError("the engine was shut down")

    def stop(self) -> None:
        """No outputs are taken any more, either. Belongs to the loop's thread."""
        self.note_shutdown()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                outputs = await self._engine_core.get_output_async()
                try:
                    await self._process(outputs)
                except EngineDeadError:
                    raise
                except Exception:
                    logger.exception("%d outputs of the engine core were not processed", len(outputs.outputs))
        except EngineDeadError as e:
            self._die(e)
        except Exception as e:
            logger.exception("the link to the engine core failed")
            self._die(EngineDeadError(f"the link to the engine core failed: {type(e).__name__}: {e}"))

    async def _process(self, outputs: EngineCoreOutputs) -> None:
        pipeline, batch = self._pipeline, outputs.outputs
        step = pipeline.open_step(outputs)
        for start in range(0, max(len(batch), 1), OUTPUTS_PER_TURN):
            if start:
                await asyncio.sleep(0)  # their readers
                await asyncio.sleep(0)  # and what came meanwhile, which else would wait for the next outputs' readers
            end = start + OUTPUTS_PER_TURN
            stats = step.open_batch()
            processed = pipeline.output_processor.process_outputs(batch[start:end], outputs.timestamp, stats)
            step.close_batch(stats, is_last=end >= len(batch))
            if processed.reqs_to_abort:
                await self._engine_core.abort_requests_async(processed.reqs_to_abort)
        pipeline.note_processed(outputs)

    def _die(self, error: EngineDeadError) -> None:
        self.dead_error = error
        self._pipeline.fail(list(self._pipeline.output_processor.request_states), error)
