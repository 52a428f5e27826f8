"""llama.cpp through the C interface of llama-cpp-python: bfloat16 weights, float16 KV cache.

That package's own `Llama` and server run one sequence at a time, so the loop of continuous batching is written here, in
the manner of llama.cpp's server: each call decodes a token of every running slot and fills up with prompt chunks. A
shared prefix is computed once and copied by hand. A single request may have a file, as slots of that server have: what
it holds of the prompt is read, and it is written afterwards.
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from driver import Request, Result, Run, Setting, main, timed
from llama_cpp import llama_cpp as api

SLOTS = 32
CELLS_PER_SLOT = 800
BATCH_TOKENS = 2048


@dataclass
class _Slot:
    """A running request: how much of it is in the cache, its last token, and how many it has."""

    request: Request
    num_past: int
    token: int | None = None
    num_output: int = 0


class _Llama:
    """A model, a context of `SLOTS` sequences and one more for a shared prefix."""

    def __init__(self, setting: Setting) -> None:
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(setting.model.encode(), model_params)
        params = api.llama_context_default_params()
        params.n_ctx = CELLS_PER_SLOT * SLOTS
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH_TOKENS, 512, SLOTS + 1
        params.n_threads = params.n_threads_batch = setting.threads
        params.kv_unified = True
        self._context = api.llama_init_from_model(self._model, params)
        self._memory = api.llama_get_memory(self._context)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, requests: list[Request], prefix: int, slot_file: str = "") -> Result:
        """Runs all of `requests`, `SLOTS` at a time."""
        api.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        num_read = self._read_slot(slot_file, requests[0][0]) if Path(slot_file).is_file() else 0
        if prefix:
            self._compute_prefix(requests[0][0][:prefix])
        waiting, free = requests[::-1], list(range(SLOTS))[::-1]
        running: dict[int, _Slot] = {}
        stamps: list[float] = []
        while waiting or running:
            while waiting and free:
                number = free.pop()
                if prefix:
                    api.llama_memory_seq_cp(self._memory, SLOTS, number, 0, prefix)
                running[number] = _Slot(waiting.pop(), prefix or num_read)
            ended = self._step(running)
            stamps.append(time.perf_counter())
            for number in ended:
                if slot_file and not num_read:
                    self._write_slot(slot_file, running[number].request[0])
                del running[number]
                free.append(number)
                api.llama_memory_seq_rm(self._memory, number, -1, -1)
        return timed(start, stamps, requests[0][1]) if len(requests) == 1 else Result(stamps[-1] - start)

    def _step(self, running: dict[int, _Slot]) -> list[int]:
        """Calls the model once. Returns the slots that finished."""
        self._batch.n_tokens = 0
        rows: dict[int, int] = {}
        for number, slot in running.items():
            if slot.token is not None:
                rows[number] = self._put(slot.token, slot.num_past, number, True)
                slot.num_past += 1
        for number, slot in running.items():
            room = BATCH_TOKENS - self._batch.n_tokens
            if slot.token is None and room:
                prompt = slot.request[0]
                end = min(len(prompt), slot.num_past + room)
                for position in range(slot.num_past, end):
                    row = self._put(prompt[position], position, number, position == len(prompt) - 1)
                slot.num_past = end
                if end == len(prompt):
                    rows[number] = row
        self._decode()
        for number, row in rows.items():
            running[number].token = self._argmax(row)
            running[number].num_output += 1
        return [n for n in rows if running[n].num_output == running[n].request[1]]

    def _read_slot(self, path: str, prompt: list[int]) -> int:
        """Reads the first slot. Returns how many tokens of the prompt it has, all but the last at most."""
        tokens, count = (ctypes.c_int32 * (CELLS_PER_SLOT * SLOTS))(), ctypes.c_size_t(0)
        if not api.llama_state_seq_load_file(
            self._context, path.encode(), 0, tokens, len(tokens), ctypes.pointer(count)
        ):
            raise RuntimeError(f"llama_state_seq_load_file: {path}")
        pairs = enumerate(zip(prompt[:-1], tokens[: count.value], strict=False))
        num_same = next((i for i, (own, other) in pairs if own != other), min(len(prompt) - 1, count.value))
        api.llama_memory_seq_rm(self._memory, 0, num_same, -1)
        return num_same

    def _write_slot(self, path: str, prompt: list[int]) -> None:
        tokens = (ctypes.c_int32 * len(prompt))(*prompt)
        if not api.llama_state_seq_save_file(self._context, path.encode(), 0, tokens, len(prompt)):
            raise RuntimeError(f"llama_state_seq_save_file: {path}")

    def _compute_prefix(self, ids: list[int]) -> None:
        self._batch.n_tokens = 0
        for position, token in enumerate(ids):
            self._put(token, position, SLOTS, False)
        self._decode()

    def _put(self, token: int, position: int, sequence: int, wants_logits: bool) -> int:
        batch: Any = self._batch
        i: int = batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants_logits
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.n_tokens = i + 1
        return i

    def _decode(self) -> None:
        code = api.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode: {code}")

    def _argmax(self, row: int) -> int:
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, row), (self._vocab_size,))
        return int(logits.argmax())


def load(setting: Setting) -> tuple[str, Run]:
    """Loads the model."""
    return f"llama-cpp-python {llama_cpp.__version__}", _Llama(setting).run


if __name__ == "__main__":
    sys.exit(main(load))
