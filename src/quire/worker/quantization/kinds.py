"""What a quantized checkpoint's matrices are, kept beside what was packed of them: a later start has the packed bytes,
and must know what they mean without reading the checkpoint's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.worker.kernels.packs import Packs
from quire.worker.quantization.weight import Kind

MAX_KINDS = 2
_RECORD = torch.Size((1 + MAX_KINDS * len(Kind._fields),))
NUM_BYTES = _RECORD.numel() * 8
"""Of a record: how many kinds there are, then the fields of each, int64."""


def remember_kinds(packs: Packs, kinds: Sequence[Kind]) -> None:
    """Have the layer whose turn it is take a record of the kinds of its matrices."""
    assert len(kinds) <= MAX_KINDS

    def fill(memory: Tensor) -> None:
        numbers = [len(kinds), *(int(field) for kind in kinds for field in kind)]
        memory.view(torch.int64)[: len(numbers)] = torch.tensor(numbers)

    packs.take(NUM_BYTES, fill)


def recall_kinds(packs: Packs) -> list[Kind]:
    """The kinds that were remembered for the layer whose turn it is. Raises as `Packs.take` does."""
    count, *fields = packs.take(NUM_BYTES, lambda _: None).view(torch.int64).tolist()
    size = len(Kind._fields)
    records = [fields[i * size : (i + 1) * size] for i in range(count)]
    return [Kind(bits, group_size, bool(zeros), bool(inputs)) for bits, group_size, zeros, inputs in records]
