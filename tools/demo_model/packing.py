"""Documents into batches: several documents share a row, and none sees another.

Owns the packing rule (first row with room, over a pool of documents), positions and masks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from tools.demo_model.documents import Document
from tools.demo_model.model import Packed
from tools.demo_model.tokenizer import encode_document

Encoded = tuple[list[int], list[bool]]


CUT_DOCUMENTS = 0.25  # the share whose context is cut into unusual tokens


def batches(
    tokenizer: Tokenizer, source: Iterator[Document], rows: int, length: int, rng: random.Random
) -> Iterator[Packed]:
    """Endless batches of ``rows`` x ``length`` tokens. Documents that do not fit in a row are cut at its end."""
    carried: list[Encoded] = []
    while True:
        packed: list[list[Encoded]] = [[] for _ in range(rows)]
        room = [length] * rows
        failures = 0
        pool, carried = carried, []
        while failures < rows:
            ids, learned = pool.pop() if pool else encode(tokenizer, next(source), rng)
            ids, learned = ids[:length], learned[:length]
            row = next((at for at, left in enumerate(room) if left >= len(ids)), None)
            if row is None:
                carried.append((ids, learned))
                failures += 1
                continue
            packed[row].append((ids, learned))
            room[row] -= len(ids)
        yield make_batch(packed, length)


def encode(tokenizer: Tokenizer, document: Document, rng: random.Random) -> Encoded:
    """Tokens of a document, in one of four with words of its context cut in two."""
    return encode_document(tokenizer, document, rng if rng.random() < CUT_DOCUMENTS else None)


def make_batch(packed: list[list[Encoded]], length: int) -> Packed:
    """Tensors of one batch; see ``Packed``."""
    rows = len(packed)
    ids = torch.zeros(rows, length, dtype=torch.long)
    positions = torch.zeros(rows, length, dtype=torch.long)
    owner = torch.full((rows, length), -1)  # which document a token belongs to; the unused end of a row is its own
    chosen: list[int] = []
    targets: list[int] = []
    for row, documents in enumerate(packed):
        at = 0
        for number, (tokens, learned) in enumerate(documents):
            end = at + len(tokens)
            ids[row, at:end] = torch.tensor(tokens)
            positions[row, at:end] = torch.arange(len(tokens))
            owner[row, at:end] = number
            for place in range(1, len(tokens)):
                if learned[place]:
                    chosen.append(row * length + at + place - 1)
                    targets.append(tokens[place])
            at = end
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = (owner[:, None, :, None] == owner[:, None, None, :]) & causal  # [rows, 1, length, length]
    mask = torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    return Packed(ids, positions, mask, torch.tensor(chosen), torch.tensor(targets))
