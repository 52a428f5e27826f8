"""Record of the outputs that readers received, and its comparison with the correct ones.

A `History` receives every output that a reader receives, whatever happens to the engine meanwhile. It knows at each
moment what may come next: a stream only grows, ends exactly once, and is silent afterwards. At the end it is compared
with another history, of an undisturbed run, or with an oracle::

seen = History() async for output in engine.generate(...): seen.record(output) assert not seen.problems() and not
seen.differences(undisturbed)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import RequestOutputKind

StreamKey = tuple[str, int]
"""Request id and index of the output."""


@dataclass
class Stream:
    """One output of one request, as far as its reader has received it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error_message: str | None = None

    def __str__(self) -> str:
        return f"{len(self.token_ids)} tokens {_excerpt(self.token_ids)}, end {self.finish_reason!r}"


class History:
    """The streams of any number of requests, by id and index. Outputs are read according to `output_kind`."""

    def __init__(self, output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> None:
        self._is_delta = output_kind is RequestOutputKind.DELTA
        self._problems: list[str] = []
        self._num_ends: dict[str, int] = {}
        """Terminal events, by request."""
        self.streams: dict[StreamKey, Stream] = {}
        self.errors: dict[str, Exception] = {}
        """Errors that readers received instead of an end."""
        self.prompt_logprobs: dict[str, list[dict[int, Logprob] | None]] = {}
        self.num_tokens = 0
        """Number of tokens of all streams together: the progress of the run."""

    def begin(self, request_id: str) -> None:
        """Records that a request was sent: it must end from now on."""
        if request_id in self._num_ends:
            self._problems.append(f"{request_id}: begun twice")
        self._num_ends[request_id] = 0

    def record(self, output: RequestOutput) -> None:
        """Records an output that a reader received."""
        request_id = output.request_id
        if self._num_ends.setdefault(request_id, 0):
            self._problems.append(f"{request_id}: an output came after its end")
        if output.finished:
            self._num_ends[request_id] += 1
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[request_id] = output.prompt_logprobs
        for completion in output.outputs:
            self._record_stream((request_id, completion.index), completion)

    def record_error(self, request_id: str, error: Exception) -> None:
        """Records an error that a reader received: the end of the request."""
        self._num_ends[request_id] = self._num_ends.get(request_id, 0) + 1
        self.errors[request_id] = error

    def _record_stream(self, key: StreamKey, completion: CompletionOutput) -> None:
        before = self.streams.get(key, Stream())
        now = Stream(
            list(completion.token_ids),
            completion.text,
            list(completion.logprobs or ()),
            completion.finish_reason or before.finish_reason,
            completion.stop_reason if completion.stop_reason is not None else before.stop_reason,
            completion.error_message,
        )
        if self._is_delta:
            now.token_ids = before.token_ids + now.token_ids
            now.text = before.text + now.text
            now.logprobs = before.logprobs + now.logprobs
        if now.token_ids[: len(before.token_ids)] != before.token_ids:
            self._problems.append(f"{key}: tokens changed from {before} to {now}")
        if not now.text.startswith(before.text):
            self._problems.append(f"{key}: text changed from {before.text!r} to {now.text!r}")
        if before.finish_reason is not None and (now.token_ids, now.text) != (before.token_ids, before.text):
            self._problems.append(f"{key}: it had ended, and grew")
        self.num_tokens += len(now.token_ids) - len(before.token_ids)
        self.streams[key] = now

    def problems(self) -> list[str]:
        """Lists violations of the rules, and requests without an end or with more than one."""
        ends = [f"{i}: {num_ends} ends" for i, num_ends in self._num_ends.items() if num_ends != 1]
        errors = [f"{key}: {s.error_message}" for key, s in self.streams.items() if s.finish_reason == "error"]
        errors += [f"{request_id}: {error}" for request_id, error in self.errors.items()]
        return [*self._problems, *ends, *errors]

    def differences(self, expected: History, *, logprob_tolerance: float = 0.0) -> list[str]:
        """Lists finished streams that differ from `expected`, which must hold the same streams, no more and no less."""
        found = [f"{key}: missing" for key in expected.streams.keys() - self.streams.keys()]
        for request_id in self.prompt_logprobs.keys() | expected.prompt_logprobs.keys():
            rows, wanted = (h.prompt_logprobs.get(request_id, []) for h in (self, expected))
            found += [f"{request_id}: prompt {d}" for d in _row_differences(rows, wanted, logprob_tolerance)]
        for key, stream in self.streams.items():
            if key not in expected.streams:
                found.append(f"{key}: nobody expected it")
            else:
                found += [f"{key}: {d}" for d in stream_differences(stream, expected.streams[key], logprob_tolerance)]
        return found

    def token_differences(self, expected: Mapping[StreamKey, Sequence[int]]) -> list[str]:
        """Lists streams, live or aborted, whose tokens are no prefix of the expected ones, and finished ones whose
        tokens are not all of them."""
        found = []
        for key, stream in self.streams.items():
            whole = list(expected[key])
            wanted = whole[: len(stream.token_ids)] if stream.finish_reason in (None, "abort") else whole
            if stream.token_ids != wanted:
                found.append(f"{key}: {stream}, not {len(wanted)} tokens {_excerpt(wanted)}")
        return found


def stream_differences(seen: Stream, expected: Stream, logprob_tolerance: float = 0.0) -> Iterable[str]:
    """Describes the differences of one stream."""
    if seen.token_ids != expected.token_ids:
        yield f"{seen}, not {expected}; they part at token {_parting(seen.token_ids, expected.token_ids)}"
    if seen.text != expected.text:
        yield f"text {seen.text!r}, not {expected.text!r}"
    if (seen.finish_reason, seen.stop_reason) != (expected.finish_reason, expected.stop_reason):
        yield f"ended by {seen.finish_reason, seen.stop_reason}, not {expected.finish_reason, expected.stop_reason}"
    yield from _row_differences(seen.logprobs, expected.logprobs, logprob_tolerance)


Row = Mapping[int, Logprob]


def _row_differences(rows: Sequence[Row | None], wanted: Sequence[Row | None], tolerance: float) -> Iterable[str]:
    """Describes the first difference; the first row of a prompt is None."""
    if len(rows) != len(wanted):
        yield f"log-probabilities of {len(rows)} tokens, not {len(wanted)}"
        return
    for position, (row, wanted_row) in enumerate(zip(rows, wanted, strict=True)):
        if not _is_close(row or {}, wanted_row or {}, tolerance):
            yield f"log-probabilities at token {position}: {row}, not {wanted_row}"
            return


def _is_close(row: Row, wanted: Row, tolerance: float) -> bool:
    """Returns whether both are equal (tolerance 0). With a tolerance, tokens of nearly equal probability may change
    places."""
    if tolerance == 0.0:
        return row == wanted
    return len(row) == len(wanted) and all(
        math.isclose(a.logprob, b.logprob, abs_tol=tolerance)
        for a, b in zip(
            sorted(row.values(), key=lambda entry: entry.logprob),
            sorted(wanted.values(), key=lambda entry: entry.logprob),
            strict=True,
        )
    )


def _parting(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _excerpt(token_ids: Sequence[int]) -> str:
    return str(list(token_ids)) if len(token_ids) <= 12 else f"[{', '.join(map(str, token_ids[:10]))}, …]"
