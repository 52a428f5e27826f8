"""Orders of rows: where a checkpoint stores the rows of a matrix in another order than the model computes with.

An order is a tensor of row numbers: row i of the model's tensor is row order[i] of the checkpoint's. Rows of a
projection are elements of its output, so that a moved row costs nothing later. Queries and keys are multiplied with
each other only: if both move alike, the scores are the same sums. Orders are applied while tensors are read, to
matrices, biases and norms, and to the rows of quantized matrices (loader/load.py).

Layers share one tensor per order: these functions remember their results.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_CPU = torch.device("cpu")  # models are built on the meta device; row numbers must be real


@functools.cache
def half_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Returns the order that makes heads rotate by halves whose checkpoint rotates neighbouring pairs.

    Elements 2i and 2i + 1 of the first `rotary_dim` of each head become i and i + rotary_dim / 2. [num_heads *
    head_dim].
    """
    head = torch.arange(head_dim, device=_CPU)
    head[:rotary_dim] = head[:rotary_dim].view(-1, 2).T.reshape(-1)
    return (torch.arange(num_heads, device=_CPU)[:, None] * head_dim + head).flatten()


@functools.cache
def grouped_order(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Returns the order of queries, keys, values for a checkpoint whose rows are [kv head][its queries, key, value]
    [head_dim], as GPT-NeoX's and Falcon's are. [(num_heads + 2 * num_kv_heads) * head_dim]."""
    group_size = num_heads // num_kv_heads
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim, device=_CPU)
    groups = rows.view(num_kv_heads, group_size + 2, head_dim)
    parts = groups[:, :group_size], groups[:, group_size], groups[:, group_size + 1]
    return torch.cat([part.flatten() for part in parts])


@functools.cache
def quartered_order(num_heads: int, head_dim: int) -> Tensor:
    """Returns the order of queries, keys, values for a checkpoint whose rows are those of each quarter of the heads:
    queries, values, keys, as CodeGen's are. [3 * num_heads * head_dim]."""
    rows = torch.arange(3 * num_heads * head_dim, device=_CPU).view(4, 3, num_heads // 4 * head_dim)
    return torch.cat([rows[:, part].flatten() for part in (0, 2, 1)])


@functools.cache
def alternating_order(num_heads: int, head_dim: int) -> Tensor:
    """Returns the order of all queries, then all gates, for a checkpoint whose rows are [head][query, gate][head_dim].
    [2 * num_heads * head_dim]."""
    rows = torch.arange(2 * num_heads * head_dim, device=_CPU).view(num_heads, 2, head_dim)
    return rows.transpose(0, 1).flatten()


@functools.cache
def attention_orders(
    num_heads: int, num_kv_heads: int, head_dim: int, *, paired_dim: int, fused: str | None, has_gates: bool
) -> Mapping[str, Tensor]:
    """Returns the orders of the projections of queries, keys and values, by the name of each; an empty name is the
    single matrix of a checkpoint that has them fused.

    The first `paired_dim` elements of a head rotate as neighbouring pairs in the checkpoint. `fused` is as in
    `DecoderSpec.fused_qkv`; with `has_gates` each query is followed by a gate.
    """
    if not paired_dim and fused not in ("groups", "quarters") and not has_gates:
        return {}
    queries, keys = half_order(num_heads, head_dim, paired_dim), half_order(num_kv_heads, head_dim, paired_dim)
    if has_gates:
        gates = torch.arange(len(queries), device=_CPU)
        queries = alternating_order(num_heads, head_dim)[_one_above_the_other([queries, gates])]
    if fused is None:
        return {"q_proj": queries, "k_proj": keys}
    whole = _one_above_the_other([queries, keys, torch.arange(len(keys), device=_CPU)])
    if fused == "quarters":
        return {"": quartered_order(num_heads, head_dim)[whole]}
    return {"": grouped_order(num_heads, num_kv_heads, head_dim)[whole] if fused == "groups" else whole}


def take_rows(tensor: Tensor, order: Tensor) -> Tensor:
    """Returns the rows of a checkpoint's tensor in the model's order. Weights of norms of heads, [num_heads, head_dim],
    count as one row for each element."""
    if tensor.numel() == len(order):
        return tensor.reshape(-1)[order].view(tensor.shape)
    return tensor[order]


@functools.cache
def latent_query_order(num_heads: int, plain: int, rotary: int, is_paired: bool) -> Tensor:
    """Returns the order that puts the rotary elements of each head before the others, which a checkpoint has first;
    `is_paired`: there they rotate as neighbouring pairs. [num_heads * (plain + rotary)]."""
    rotating = half_order(1, rotary, rotary) if is_paired else torch.arange(rotary, device=_CPU)
    head = torch.cat([plain + rotating, torch.arange(plain, device=_CPU)])
    return (torch.arange(num_heads, device=_CPU)[:, None] * (plain + rotary) + head).flatten()


@functools.cache
def latent_key_order(rank: int, rotary: int) -> Tensor:
    """Returns the order of a latent and a key whose elements rotate as neighbouring pairs in the checkpoint. [rank +
    rotary]."""
    return torch.cat([torch.arange(rank, device=_CPU), rank + half_order(1, rotary, rotary)])


def _one_above_the_other(orders: Sequence[Tensor]) -> Tensor:
    """Returns the order of several matrices that are stacked into one."""
    stacked, start = [], 0
    for order in orders:
        stacked.append(order + start)
        start += len(order)
    return torch.cat(stacked)
