"""Parts of workers: together they are the whole, without overlap but for shared keys and values."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.errors import ConfigError
from quire.wire.topology import Group, GroupKind
from quire.worker.parallel.plan import share_experts, share_heads, share_outputs


def groups(size: int) -> list[Group]:
    return [Group(GroupKind.TENSOR, tuple(range(size)), i) for i in range(size)]


@pytest.mark.parametrize("num_outputs", [5, 16, 61, 96, 1000, 4096, 151936])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_outputs_are_divided_evenly_and_in_blocks(num_outputs: int, size: int) -> None:
    shares = [share_outputs(group, num_outputs) for group in groups(size)]
    assert [shares[0][0], shares[-1][1]] == [0, num_outputs]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
    widths = [end - start for start, end in shares]
    assert min(widths) > 0
    assert max(widths) - min(widths) <= 64
    assert num_outputs < 16 * size or all(start % 16 == 0 for start, _ in shares)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 3), (6, 2), (8, 1), (15, 5), (32, 8), (12, 4)])
def test_heads_read_the_keys_of_their_group(num_heads: int, num_kv_heads: int) -> None:
    per_kv = num_heads // num_kv_heads
    for size in range(1, num_heads + 1):
        shares = [share_heads(group, num_heads, num_kv_heads) for group in groups(size)]
        assert [head for share in shares for head in share.heads] == list(range(num_heads))
        for share in shares:
            own_per_kv = share.num_heads // share.num_kv_heads
            assert share.num_heads == own_per_kv * share.num_kv_heads
            read = [share.kv_heads[i // own_per_kv] for i in range(share.num_heads)]
            assert read == [head // per_kv for head in share.heads]
    with pytest.raises(ConfigError, match=f"the model has {num_heads} attention heads"):
        share_heads(groups(num_heads + 1)[0], num_heads, num_kv_heads)


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("num_experts", [4, 7, 64])
def test_whole_experts_are_divided_evenly(num_experts: int, placement: str) -> None:
    for size in range(1, 5):
        shares = [share_experts(group, num_experts, placement) for group in groups(size)]
        counts = [len(own) for own, _, _ in shares]
        assert counts == [num_experts // size + (rank < num_experts % size) for rank in range(size)]
        assert sorted(expert for own, _, _ in shares for expert in own) == list(range(num_experts))
        for own, first, places in shares:
            assert [expert if places is None else places[expert] for expert in own] == list(
                range(first, first + len(own))
            )


def test_rows_and_columns_of_a_share() -> None:
    share = share_heads(groups(2)[1], 6, 3)
    assert (share.heads, share.kv_heads) == (range(2, 6), range(1, 3))
    assert share.rows(12).tolist() == list(range(4, 12))
    assert share.kv_rows(9).tolist() == list(range(3, 9))
    assert share.rows(0).tolist() == []
    x = torch.arange(24).view(2, 12)
    assert torch.equal(share.columns(x), x[:, 4:])
    assert torch.equal(share.kv_columns(x), x[:, 4:])
