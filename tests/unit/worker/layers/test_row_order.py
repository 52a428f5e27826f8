"""Orders of rows against plain slices, on odd shapes."""

from __future__ import annotations

import pytest
import torch

from quire.worker.layers.row_order import alternating_order, attention_orders, grouped_order, half_order


def turned_in_pairs(head: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates elements 2i and 2i + 1 of the first 2 * len(angles)."""
    out, r = head.clone(), 2 * len(angles)
    out[0:r:2] = head[0:r:2] * angles.cos() - head[1:r:2] * angles.sin()
    out[1:r:2] = head[1:r:2] * angles.cos() + head[0:r:2] * angles.sin()
    return out


def turned_in_halves(head: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates elements i and i + len(angles)."""
    out, n = head.clone(), len(angles)
    first, second = head[:n], head[n : 2 * n]
    out[:n] = first * angles.cos() - second * angles.sin()
    out[n : 2 * n] = second * angles.cos() + first * angles.sin()
    return out


@pytest.mark.parametrize(("heads", "dim", "rotary"), [(3, 24, 24), (5, 80, 20), (1, 10, 6), (7, 8, 0)])
def test_halves_of_moved_rows_are_pairs_of_the_checkpoints(heads: int, dim: int, rotary: int) -> None:
    order = half_order(heads, dim, rotary)
    x, angles = torch.randn(heads * dim, dtype=torch.float64), torch.randn(rotary // 2, dtype=torch.float64)
    ours = torch.cat([turned_in_halves(head, angles) for head in x[order].split(dim)])
    theirs = torch.cat([turned_in_pairs(head, angles) for head in x.split(dim)])
    torch.testing.assert_close(ours, theirs[order])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 24), (6, 2, 5), (7, 1, 8)])
def test_groups_are_taken_apart(heads: int, kv_heads: int, dim: int) -> None:
    size = heads // kv_heads
    rows = torch.arange((heads + 2 * kv_heads) * dim)
    groups = [list(group.split(dim)) for group in rows.split((size + 2) * dim)]
    queries = [head for group in groups for head in group[:size]]
    keys, values = [group[-2] for group in groups], [group[-1] for group in groups]
    assert torch.equal(grouped_order(heads, kv_heads, dim), torch.cat(queries + keys + values))


def test_gates_follow_all_queries() -> None:
    rows = list(torch.arange(2 * 3 * 5).split(5))
    assert torch.equal(alternating_order(3, 5), torch.cat(rows[0::2] + rows[1::2]))


def test_orders_compose() -> None:
    """Groups of queries, key and value whose heads rotate in pairs; and gates beside such queries."""
    orders = attention_orders(6, 2, 8, paired_dim=4, fused="groups", has_gates=False)
    queries, keys, values = grouped_order(6, 2, 8).split([48, 16, 16])
    expected = torch.cat((queries[half_order(6, 8, 4)], keys[half_order(2, 8, 4)], values))
    assert torch.equal(orders[""], expected)

    orders = attention_orders(3, 1, 8, paired_dim=8, fused=None, has_gates=True)
    queries, gates = alternating_order(3, 8).chunk(2)
    assert torch.equal(orders["q_proj"], torch.cat((queries[half_order(3, 8, 8)], gates)))
    assert torch.equal(orders["k_proj"], half_order(1, 8, 8))


def test_nothing_moves_where_the_checkpoint_has_the_models_order() -> None:
    assert attention_orders(4, 2, 16, paired_dim=0, fused=None, has_gates=False) == {}
    assert attention_orders(4, 2, 16, paired_dim=0, fused="parts", has_gates=False) == {}
