"""Groups, tensors and numbers of blocks."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.engine import CacheConfig
from quire.engine.kv_cache.sizing import (
    blocks_needed,
    make_kv_cache_configs,
    make_kv_cache_groups,
    max_concurrency,
    max_fitting_len,
    request_blocks_needed,
)
from quire.errors import ConfigError
from quire.wire.kv_cache import (
    AnyKVCacheSpec,
    ChunkedSpec,
    ExtraKVCacheLayer,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LatentSpec,
    SlidingWindowSpec,
)

GIB = 2**30
FULL = FullAttentionSpec(16, 8, 128, "bfloat16")  # 64 KiB per block and layer
SLIDING = SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=512)
PAGE = 65536


def _specs(pattern: str) -> dict[str, AnyKVCacheSpec]:
    """'ssf' -> two sliding layers and a full one."""
    return {f"layers.{i}": FULL if kind == "f" else SLIDING for i, kind in enumerate(pattern)}


def _names(*indices: int) -> list[str]:
    return [f"layers.{i}" for i in indices]


def _configs(
    pattern: str,
    available: int,
    model_len: int,
    auto_fit: bool = False,
    override: int | None = None,
    max_step_tokens: int | None = None,
) -> tuple[KVCacheConfig, int]:
    cache_config = CacheConfig(num_gpu_blocks_override=override)
    specs = [_specs(pattern)]
    configs, fitted = make_kv_cache_configs(cache_config, specs, [available], model_len, auto_fit, max_step_tokens)
    assert len(configs) == 1
    return configs[0], fitted


def test_one_kind_makes_one_group() -> None:
    assert make_kv_cache_groups(_specs("ffff")) == [KVCacheGroupSpec(_names(0, 1, 2, 3), FULL)]
    assert make_kv_cache_groups(_specs("ss")) == [KVCacheGroupSpec(_names(0, 1), SLIDING)]
    assert make_kv_cache_groups({}) == []


def test_five_to_one_makes_equal_groups() -> None:
    """Gemma 3: after five sliding layers a full one."""
    groups = make_kv_cache_groups(_specs("sssssf" * 2))
    assert [(group.layer_names, group.kv_cache_spec) for group in groups] == [
        (_names(0, 1), SLIDING),
        (_names(2, 3), SLIDING),
        (_names(4, 6), SLIDING),
        (_names(7, 8), SLIDING),
        (_names(9, 10), SLIDING),
        (_names(5, 11), FULL),
    ]


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("sf" * 13, [13, 13]),  # Gemma 2 2B
        ("s" * 5 + "f" * 4, [5, 4]),  # nearly equal: one group each, one place empty
        ("s" * 6 + "f" * 4, [3, 3, 4]),
        ("s" * 22 + "f" * 4, [3, 4, 4, 3, 4, 4, 4]),  # Gemma 3 1B: 26 layers in 28 places
        ("f" * 3 + "s", [1, 1, 1, 1]),
    ],
)
def test_layers_are_grouped_by_kind(pattern: str, sizes: list[int]) -> None:
    groups = make_kv_cache_groups(_specs(pattern))
    assert [len(group.layer_names) for group in groups] == sizes
    assert sorted(name for group in groups for name in group.layer_names) == sorted(_specs(pattern))


def test_windows_of_different_sizes_are_different_kinds() -> None:
    other = SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=1024)
    groups = make_kv_cache_groups({"a": SLIDING, "b": other, "c": SLIDING, "d": other})
    assert [(group.layer_names, group.kv_cache_spec) for group in groups] == [
        (["a", "c"], SLIDING),
        (["b", "d"], other),
    ]


def test_block_sizes_must_be_equal() -> None:
    with pytest.raises(ConfigError, match=r"block sizes \[16, 32\]"):
        make_kv_cache_groups({"a": FULL, "b": FullAttentionSpec(32, 8, 128, "bfloat16")})


@pytest.mark.parametrize(
    ("spec", "num_tokens", "max_step_tokens", "expected"),
    [
        (FULL, 0, None, 0),
        (FULL, 1, None, 1),
        (FULL, 16, 8, 1),
        (FULL, 17, 8, 2),
        (SLIDING, 10_000, None, 625),
        (SLIDING, 10_000, 2048, 161),  # ceil((511 + 2048) / 16) + 1
        (SLIDING, 10_000, 1, 33),
        (SLIDING, 500, 1, 32),
        (ChunkedSpec(16, 8, 128, "bfloat16", 100), 10_000, 50, 11),  # ceil((99 + 50) / 16) + 1
        (LatentSpec(16, 1, 576), 500, 1, 32),
    ],
)
def test_the_blocks_of_a_request_are_counted(
    spec: AnyKVCacheSpec, num_tokens: int, max_step_tokens: int | None, expected: int
) -> None:
    assert blocks_needed(spec, num_tokens, max_step_tokens) == expected


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 500), st.integers(1, 8))
def test_a_windows_bound_is_enough_wherever_a_step_starts(window: int, step: int, start: int, block_size: int) -> None:
    first_token, last_token = max(0, start - window + 1), start + step - 1
    touched = last_token // block_size - first_token // block_size + 1
    spec = SlidingWindowSpec(block_size, 1, 8, sliding_window=window)
    assert touched <= blocks_needed(spec, start + step, step)


def test_number_of_blocks_and_tensors() -> None:
    config, fitted = _configs("ffff", 1000 * 4 * PAGE + 5, model_len=15_984)
    assert fitted == 15_984  # 999 blocks of 16: the null block is not for use
    assert config.num_blocks == 1000
    assert [(tensor.size, tensor.shared_by) for tensor in config.kv_cache_tensors] == [
        (1000 * PAGE, [name]) for name in _names(0, 1, 2, 3)
    ]
    assert max_concurrency(config, 1600) == 9.99


def test_tensors_are_shared_between_groups() -> None:
    config, _ = _configs("ssf" * 2, 100 * 2 * PAGE, model_len=16)
    assert config.num_blocks == 100  # a block costs two layers, whichever of the three groups holds it
    assert [(tensor.size, tensor.shared_by) for tensor in config.kv_cache_tensors] == [
        (100 * PAGE, _names(0, 3, 2)),
        (100 * PAGE, _names(1, 4, 5)),
    ]


def test_padding_is_paid_for() -> None:
    """5 sliding and 4 full layers in two groups of 5 places: a block costs 5 layers."""
    config, _ = _configs("s" * 5 + "f" * 4, 100 * 5 * PAGE, model_len=16)
    assert config.num_blocks == 100
    assert [tensor.shared_by for tensor in config.kv_cache_tensors] == [
        *(_names(i, i + 5) for i in range(4)),
        _names(4),
    ]


def test_layers_of_different_sizes() -> None:
    """They are in different groups, and a block is as large as the largest of them."""
    small = FullAttentionSpec(16, 4, 128, "bfloat16")
    for large in (FULL, SLIDING):
        specs: dict[str, AnyKVCacheSpec] = {"a": large, "b": small}
        (config,), _ = make_kv_cache_configs(CacheConfig(), [specs], [30 * PAGE], 16, False)
        assert [group.layer_names for group in config.kv_cache_groups] == [["a"], ["b"]]
        assert (config.num_blocks, [tensor.size for tensor in config.kv_cache_tensors]) == (30, [30 * PAGE])


def test_too_little_memory_says_what_would_do() -> None:
    """131072 tokens of a 32-layer model: 8193 blocks of 2 MiB, the null block being one."""
    with pytest.raises(ConfigError) as error:
        _configs("f" * 32, 4 * GIB, model_len=131_072)
    message = str(error.value)
    assert message == (
        "One request of 131072 tokens (--max-model-len) needs 16.00 GiB of KV cache and 4.00 GiB are available; the "
        "longest that fits is 32752 tokens: lower --max-model-len to it or set it to auto, or raise "
        "--kv-cache-memory-bytes, or --gpu-memory-utilization on an accelerator"
    )
    assert _configs("f" * 32, 4 * GIB, model_len=32_752)[1] == 32_752
    with pytest.raises(ConfigError):
        _configs("f" * 32, 4 * GIB, model_len=32_753)


def test_auto_fit_takes_the_longest_that_fits() -> None:
    config, fitted = _configs("f" * 32, 4 * GIB, model_len=131_072, auto_fit=True)
    assert (config.num_blocks, fitted) == (2048, 32_752)
    assert _configs("f" * 32, 4 * GIB, model_len=1000, auto_fit=True)[1] == 1000


def test_auto_fit_with_windows() -> None:
    """A window stops growing: past 2559 tokens only the full group needs more."""
    config, fitted = _configs("sf", 1000 * PAGE, model_len=100_000, auto_fit=True, max_step_tokens=2048)
    assert (config.num_blocks, fitted) == (1000, (999 - 161) * 16)
    assert _configs("sf", 1000 * PAGE, model_len=100_000, auto_fit=True)[1] == 499 * 16


@pytest.mark.parametrize("auto_fit", [True, False])
@pytest.mark.parametrize("available", [-GIB, 0, 64 * PAGE])
def test_no_room_for_a_single_token(available: int, auto_fit: bool) -> None:
    """A byte less than two blocks of a 32-layer model: only the null block would fit."""
    with pytest.raises(ConfigError, match="longest that fits is 0 tokens: raise --kv-cache-memory-bytes"):
        _configs("f" * 32, available - 1, model_len=100, auto_fit=auto_fit)


def test_override_replaces_memory() -> None:
    config, fitted = _configs("ff", 10**12, model_len=100, override=8)
    assert (config.num_blocks, fitted) == (8, 100)
    assert [tensor.size for tensor in config.kv_cache_tensors] == [8 * PAGE] * 2
    assert _configs("ff", 0, model_len=112, override=8)[1] == 112
    with pytest.raises(ConfigError) as error:
        _configs("ff", 10**12, model_len=113, override=8)
    assert str(error.value) == (
        "One request of 113 tokens (--max-model-len) needs 9 KV cache blocks, null block included, and "
        "--num-gpu-blocks-override gives 8; the longest that fits is 112 tokens: lower --max-model-len to it or set it "
        "to auto, or raise --num-gpu-blocks-override to 9"
    )
    assert _configs("ff", 0, model_len=113, auto_fit=True, override=8)[1] == 112


def test_model_without_attention_needs_no_cache() -> None:
    (config,), fitted = make_kv_cache_configs(CacheConfig(), [{}], [0], 4096, False)
    assert (config, fitted) == (KVCacheConfig(1, [], []), 4096)
    assert max_concurrency(config, 4096) == math.inf


def test_layers_of_a_drafter_make_blocks_larger_and_change_no_group() -> None:
    """They use the blocks of the full group: of the first, if there is none."""
    small = FullAttentionSpec(16, 8, 64, "bfloat16")
    for pattern, group in (("ssf", 2), ("ff", 0), ("ss", 0)):
        plain, _ = _configs(pattern, 400 * PAGE, model_len=1024)
        row_bytes = sum(tensor.size for tensor in plain.kv_cache_tensors) // plain.num_blocks
        (config,), _ = make_kv_cache_configs(
            CacheConfig(), [_specs(pattern)], [400 * PAGE], 1024, False, None, [{"draft.0": small}]
        )
        assert config.num_blocks == 400 * PAGE // (row_bytes + small.page_size_bytes)
        assert config.kv_cache_groups == plain.kv_cache_groups
        assert config.extra_layers == [ExtraKVCacheLayer("draft.0", small, group)]
        assert config.kv_cache_tensors[-1] == KVCacheTensor(config.num_blocks * small.page_size_bytes, ["draft.0"])


def test_tensor_parallel_workers_take_the_smallest() -> None:
    specs = [_specs("ff"), _specs("ff")]
    configs, _ = make_kv_cache_configs(CacheConfig(), specs, [100 * PAGE, 60 * PAGE], 100, False)
    assert [config.num_blocks for config in configs] == [30, 30]
    assert configs[0] == configs[1]


def test_pipeline_workers_share_groups_and_hold_their_own_layers() -> None:
    everything = _specs("ssf" * 2)
    halves = [{name: everything[name] for name in _names(*part)} for part in ((0, 1, 2), (3, 4, 5))]
    first, second = make_kv_cache_configs(CacheConfig(), halves, [100 * PAGE] * 2, 16, False)[0]
    assert [group.layer_names for group in first.kv_cache_groups] == [_names(0, 1), [], _names(2)]
    assert [group.layer_names for group in second.kv_cache_groups] == [[], _names(3, 4), _names(5)]
    assert [tensor.shared_by for tensor in first.kv_cache_tensors] == [_names(0, 2), _names(1)]
    assert first.num_blocks == second.num_blocks == 50


def test_workers_may_have_different_numbers_of_heads() -> None:
    """Three key/value heads on two workers: each has pages of its own size, and the larger part decides."""
    one, two = ({n: msgspec.structs.replace(s, num_kv_heads=k) for n, s in _specs("ssf" * 2).items()} for k in (1, 2))
    page = next(iter(one.values())).page_size_bytes
    small, large = make_kv_cache_configs(CacheConfig(), [one, two], [100 * page] * 2, 16, False)[0]
    assert small.num_blocks == large.num_blocks == 100 * page // (2 * 2 * page)
    assert [g.layer_names for g in small.kv_cache_groups] == [g.layer_names for g in large.kv_cache_groups]
    assert [g.kv_cache_spec.num_kv_heads for g in small.kv_cache_groups] == [1, 1, 1]
    assert [2 * tensor.size for tensor in small.kv_cache_tensors] == [tensor.size for tensor in large.kv_cache_tensors]


def test_workers_must_not_disagree_on_a_layer() -> None:
    with pytest.raises(ConfigError, match=r"disagree on the KV cache of layer layers\.0"):
        make_kv_cache_configs(CacheConfig(), [_specs("f"), _specs("s")], [GIB, GIB], 16, False)


def test_small_memory_is_told_in_mib() -> None:
    with pytest.raises(ConfigError, match=r"needs 0\.19 MiB of KV cache and 0\.12 MiB are available"):
        _configs("f", 2 * PAGE, model_len=17)


@given(
    st.text("sf", min_size=1, max_size=12), st.integers(0, 200), st.integers(1, 5000), st.none() | st.integers(1, 99)
)
def test_fitted_length_is_the_longest(pattern: str, num_blocks: int, model_len: int, step: int | None) -> None:
    groups = make_kv_cache_groups(_specs(pattern))
    fitted = max_fitting_len(groups, num_blocks, model_len, step)
    assert fitted == 0 or request_blocks_needed(groups, fitted, step) <= num_blocks - 1
    assert fitted == model_len or request_blocks_needed(groups, fitted + 1, step) > num_blocks - 1


@given(st.text("sf", min_size=1, max_size=40))
def test_groups_waste_little(pattern: str) -> None:
    """There are as many groups as the rarest kind's number of layers requires, and one each where the numbers are
    close."""
    sizes = [len(group.layer_names) for group in make_kv_cache_groups(_specs(pattern))]
    counts = [count for count in (pattern.count("s"), pattern.count("f")) if count]
    if max(counts) > 1.25 * min(counts):
        assert max(sizes) == min(counts)
        assert len(sizes) == sum(math.ceil(count / min(counts)) for count in counts)
    else:
        assert sorted(sizes) == sorted(counts)


def test_small_layers_share_a_place_with_a_large_one_of_another_group() -> None:
    """Gemma 4 31B in small: 10 sliding layers to 2 full ones, whose pages are half as large."""
    half = FullAttentionSpec(16, 4, 128, "bfloat16")
    specs = {f"layers.{i}": half if i % 6 == 5 else SLIDING for i in range(12)}
    (config,), _ = make_kv_cache_configs(CacheConfig(), [specs], [100 * PAGE], 16, auto_fit=False)
    assert [len(group.layer_names) for group in config.kv_cache_groups] == [1] * 10 + [2]
    (tensor,) = config.kv_cache_tensors
    assert tensor.size == config.num_blocks * PAGE == 100 * PAGE
    assert tensor.shared_by == [*(n for n, s in specs.items() if s is SLIDING), "layers.5", "layers.11"]
    assert tensor.offsets == [0] * 11 + [PAGE // 2]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 32, 512])), min_size=1, max_size=30))
def test_layers_of_a_group_never_overlap(layers: list[tuple[int, int | None]]) -> None:
    specs: dict[str, AnyKVCacheSpec] = {
        f"layers.{i}": FullAttentionSpec(16, heads, 8)
        if window is None
        else SlidingWindowSpec(16, heads, 8, "bfloat16", window)
        for i, (heads, window) in enumerate(layers)
    }
    (config,), _ = make_kv_cache_configs(CacheConfig(), [specs], [1 << 24], 16, auto_fit=False)
    group_of = {name: i for i, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    assert group_of.keys() == specs.keys()
    assert sorted(name for tensor in config.kv_cache_tensors for name in tensor.shared_by) == sorted(specs)
    for tensor in config.kv_cache_tensors:
        ends: dict[int, int] = {}
        for name, offset in zip(tensor.shared_by, tensor.offsets or [0] * len(tensor.shared_by), strict=True):
            assert offset >= ends.get(group_of[name], 0)
            ends[group_of[name]] = offset + specs[name].page_size_bytes
        assert max(ends.values()) == tensor.size // config.num_blocks


def test_latent_layers_share_no_memory_with_others() -> None:
    with pytest.raises(ConfigError, match="latent and other"):
        make_kv_cache_groups({"a": FULL, "b": LatentSpec(16, 1, 576)})
