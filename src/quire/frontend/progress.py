"""The progress bar of `LLM.generate`: finished prompts, and tokens per second read and written."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm import tqdm

from quire.outputs import PoolingRequestOutput, RequestOutput


class GenerationProgress:
    """A tqdm bar over `total` prompts; silent if `use_tqdm` is False. A callable is used in tqdm's place.

    A context manager: its end closes the bar.
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._start = time.perf_counter()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._bar = None
        if use_tqdm:
            make_bar = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make_bar(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed(), unit="prompt"
            )

    def update(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """A prompt is finished."""
        self._num_prompt_tokens += len(output.prompt_token_ids or ())
        if isinstance(output, RequestOutput):
            self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed(), refresh=False)
            self._bar.update(1)

    def _speed(self) -> str:
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        read, written = self._num_prompt_tokens / elapsed, self._num_output_tokens / elapsed
        return f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"

    def __enter__(self) -> GenerationProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
