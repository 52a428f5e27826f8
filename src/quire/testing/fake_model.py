"""A language model that fits on a page, and what it must answer.

Every KV slot holds a digest of the whole prefix it belongs to, and the next token is a function of the slots that
attention reads. A token is therefore right only if every slot it depends on, directly or through other slots, held the
right prefix at the right time. `FakeExecutor` reads the slots through the block tables it is given; `expected_output`
computes the same function over a plain list. Where the two differ, scheduling, blocks or prefix caching are wrong.

The sampled token depends on nothing else: temperature, penalties and all other sampling parameters are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from quire.lora_request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.wire.engine_core import FinishReason

SLOT_BYTES = 4
KV_IDENTITY = "kv_identity"
"""Key of `SamplingParams.extra_args` whose value enters every slot of the request, as a LoRA adapter's name does.

The worker never sees a cache salt: a test puts the salt here, and a prefix hit across salts changes the tokens."""

_UINT32 = 0xFFFFFFFF


def kv_identity(params: SamplingParams | None, lora_request: LoRARequest | None, adapter: str = "") -> int:
    """Everything besides its tokens that the KV of a request depends on. `adapter`: digest of the adapter's files."""
    extra = (params.extra_args or {}).get(KV_IDENTITY) if params is not None else None
    lora = (lora_request.lora_name, lora_request.lora_path, adapter) if lora_request is not None else None
    return 0 if extra is None and lora is None else crc32(repr((extra, lora)).encode())


class _FullContext:
    """Returns all slots before the current one, folded into one number."""

    def __init__(self, slots: bytes) -> None:
        self.digest = crc32(slots)

    def append(self, slot: bytes) -> None:
        self.digest = crc32(slot, self.digest)


class _WindowContext:
    """Returns the last `num_slots` slots before the current one."""

    def __init__(self, slots: bytes, num_slots: int) -> None:
        self._size = num_slots * SLOT_BYTES
        self._slots = slots[max(0, len(slots) - self._size) :]

    @property
    def digest(self) -> int:
        return crc32(self._slots)

    def append(self, slot: bytes) -> None:
        slots = self._slots + slot
        self._slots = slots[max(0, len(slots) - self._size) :]


class FakeSequence:
    """One request inside the model. `compute` takes its tokens one after the other, from any position on.

    `slots` holds, per KV cache group, the bytes of the slots that attention can see before that position.
    """

    def __init__(self, model: FakeModel, identity: int, slots: Sequence[bytes], base: tuple[int, int] = (0, 0)) -> None:
        """`base`: the identity of its first tokens, before its adapter begins, and how many they are."""
        weights = crc32(model.weights.encode())
        self._identity, self._base_identity, self._base_len = identity ^ weights, base[0] ^ weights, base[1]
        self._contexts = [
            _FullContext(group_slots) if window is None else _WindowContext(group_slots, window - 1)
            for window, group_slots in zip(model.windows, slots, strict=True)
        ]
        self._computed: list[list[bytes]] = [[] for _ in self._contexts]

    def compute(self, token: int, position: int) -> int:
        """Returns the digest of the prefix that ends in `token` at `position`, and writes it into the slot of every
        group."""
        identity = self._identity if position >= self._base_len else self._base_identity
        digest = identity + token * 0x85EBCA6B + position * 0xC2B2AE35
        for context in self._contexts:
            digest = ((digest ^ context.digest) * 0x9E3779B1 + 1) & _UINT32
        digest ^= digest >> 15
        for group, context in enumerate(self._contexts):
            slot = (digest ^ group * 0x27D4EB2F & _UINT32).to_bytes(SLOT_BYTES, "little")  # no two groups keep the same
            context.append(slot)
            self._computed[group].append(slot)
        return digest

    def slots(self, group: int) -> bytes:
        """Returns the bytes that the computed tokens have written into the group's KV cache."""
        return b"".join(self._computed[group])


@dataclass(frozen=True)
class FakeModel:
    """The model. `windows` holds a sliding window per KV cache group, None for full attention. Models with other
    `weights` give other tokens, and cannot read each other's KV."""

    windows: tuple[int | None, ...] = (None,)
    vocab_size: int = 256
    weights: str = ""

    def next_token(self, digest: int) -> int:
        """Returns the token that follows the prefix with this digest."""
        return (digest >> 8) % self.vocab_size

    def top_tokens(self, digest: int, num_tokens: int) -> list[int]:
        """Returns the `num_tokens` most likely tokens after the prefix, the sampled one first."""
        first = self.next_token(digest)
        return [(first + i) % self.vocab_size for i in range(min(num_tokens, self.vocab_size))]


@dataclass(frozen=True)
class ExpectedOutput:
    """The one correct answer to a request."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None = None


def expected_output(
    model: FakeModel,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    lora_request: LoRARequest | None = None,
    output_token_ids: Sequence[int] = (),
    adapter: str = "",
    lora_start: int = 0,
) -> ExpectedOutput:
    """Returns the output that a request must produce, whatever else the engine does. Uses no blocks, steps or batches.

    `output_token_ids` are its first outputs where another model gave them, before its weights were replaced. `adapter`
    is the digest of its adapter's files, and `lora_start` where it begins.
    """
    identity, base = kv_identity(params, lora_request, adapter), kv_identity(params, None)
    sequence = FakeSequence(model, identity, [b""] * len(model.windows), (base, lora_start))
    digest = 0
    for position, token in enumerate([*prompt_token_ids, *output_token_ids]):
        digest = sequence.compute(token, position)
    outputs = list(output_token_ids)
    while True:
        token = model.next_token(digest)
        outputs.append(token)
        finish = _finish_after(outputs, params, len(prompt_token_ids), max_model_len)
        if finish is not None:
            return finish
        digest = sequence.compute(token, len(prompt_token_ids) + len(outputs) - 1)


def _finish_after(
    outputs: list[int], params: SamplingParams, num_prompt_tokens: int, max_model_len: int
) -> ExpectedOutput | None:
    """Returns the finish reason if its newest output token ends the request. Stop tokens win over lengths."""
    token = outputs[-1]
    if len(outputs) >= params.min_tokens:
        if token == params.eos_token_id and not params.ignore_eos:
            return ExpectedOutput(outputs, FinishReason.STOP)
        if token in (params.stop_token_ids or ()):
            return ExpectedOutput(outputs, FinishReason.STOP, token)
    limit = max_model_len - num_prompt_tokens
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    if len(outputs) >= limit:
        return ExpectedOutput(outputs, FinishReason.LENGTH)
    return ExpectedOutput(outputs, FinishReason.REPETITION) if _repeats(outputs, params) else None


def _repeats(outputs: list[int], params: SamplingParams) -> bool:
    """Returns whether the output ends in one pattern `min_count` times in a row."""
    rule = params.repetition_detection
    if rule is None or not rule.enabled or len(outputs) < params.min_tokens:
        return False
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        tail = outputs[-size * rule.min_count :]
        if len(tail) == size * rule.min_count and tail == tail[:size] * rule.min_count:
            return True
    return False
