"""Places of engines in clusters of any shape, and what their actors get of the environment. No Ray is needed."""

from __future__ import annotations

import sys

import pytest

from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError
from quire.on_ray.placement import (
    Placement,
    RayNode,
    StagePlan,
    Wish,
    actor_environment,
    place_cores,
    place_engines,
    plan_stages,
)
from quire.resolve import resolve

SMALL, LARGE = RayNode("10.0.0.2", 4), RayNode("10.0.0.1", 8)
HEAD = "10.0.0.2"


def test_the_heads_node_is_filled_first() -> None:
    places = place_engines([LARGE, SMALL], HEAD, Wish(4, 1, 2), "strict")
    assert [(place.ip, place.threads, place.num_on_node) for place in places] == [
        ("10.0.0.2", 2, 2),
        ("10.0.0.2", 2, 2),
        ("10.0.0.1", 4, 2),
        ("10.0.0.1", 4, 2),
    ]
    assert places[0].bundles == [{"CPU": 2.0, "node:10.0.0.2": 0.001}, {"node:10.0.0.2": 0.001}]


def test_workers_have_a_bundle_each() -> None:
    (place,) = place_engines([LARGE], HEAD, Wish(1, 2, cpus_per_worker=3), "strict")
    node = {"node:10.0.0.1": 0.001}
    assert place == Placement("10.0.0.1", [{"CPU": 3.0, **node}, {"CPU": 3.0, **node}, node], 3, 1)


def test_gpus() -> None:
    nodes = [RayNode("a", 8, 4), RayNode("b", 8, 1)]
    places = place_engines(nodes, "a", Wish(2, 2, needs_gpus=True), "fill")
    assert places[0].bundles == [{"GPU": 1.0, "node:a": 0.001}] * 2 + [{"CPU": 1.0, "node:a": 0.001}]
    assert [place.ip for place in places] == ["a", "a"]
    with pytest.raises(ConfigError, match=r"1 of 3 engines find no room .* each takes 2 GPUs and 1 CPU"):
        place_engines(nodes, "a", Wish(3, 2, needs_gpus=True), "fill")


def test_strict_leaves_a_node_with_too_little_out_and_fill_does_not() -> None:
    wish = Wish(3, 1, 2, cpus_per_worker=3)
    assert [place.ip for place in place_engines([SMALL, LARGE], HEAD, wish, "fill")] == [HEAD, LARGE.ip, LARGE.ip]
    with pytest.raises(ConfigError, match=r"1 of 3 engines find no room .* each takes 3 CPUs, 2 on a node, .*10\.0\.0"):
        place_engines([SMALL, LARGE], HEAD, wish, "strict")
    places = place_engines([SMALL, LARGE], HEAD, wish._replace(num_local=None), "strict")
    assert [place.ip for place in places] == [HEAD, LARGE.ip, LARGE.ip]


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ConfigError, match="QUIRE_RAY_DP_PACK_STRATEGY=span is not supported: an engine's workers are"):
        place_engines([LARGE], HEAD, Wish(1, 1), "span")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no node"):
        place_engines([], HEAD, Wish(1, 1), "strict")


def test_stages_of_an_engine_are_on_one_node_if_there_is_room() -> None:
    nodes = [SMALL, LARGE]
    assert plan_stages(nodes, 2, 2, None, None) == StagePlan([{"CPU": 4.0}] * 2, 2, "STRICT_PACK")
    assert plan_stages(nodes, 3, 2, 2, None) == StagePlan([{"CPU": 4.0}] * 3, 2, "PACK"), "no node has 12"
    assert plan_stages(nodes, 2, 1, None, "span") == StagePlan([{"CPU": 4.0}] * 2, 4, "PACK")
    with pytest.raises(ConfigError, match=r"3 stages of 4 CPUs each find no room in the Ray cluster on one node, and"):
        plan_stages(nodes, 3, 2, 2, "fill")
    with pytest.raises(
        ConfigError, match=r"2 stages of 8 CPUs each find no room in the Ray cluster, and there is 10\.0"
    ):
        plan_stages(nodes, 2, 1, 8, None)
    with pytest.raises(ConfigError, match="and there is no node; add nodes"):
        plan_stages([], 1, 1, None, None)
    with pytest.raises(ConfigError, match="QUIRE_RAY_DP_PACK_STRATEGY=wide is not supported; use strict, fill or span"):
        plan_stages(nodes, 1, 1, None, "wide")


def test_bundles_are_such_that_all_engines_find_room() -> None:
    nodes = [SMALL, LARGE]
    assert plan_stages(nodes, 2, 1, None, None, 2) == StagePlan([{"CPU": 2.0}] * 2, 2, "STRICT_PACK")
    assert plan_stages(nodes, 2, 1, None, "span", 2) == StagePlan([{"CPU": 2.0}] * 2, 2, "PACK")
    assert plan_stages(nodes, 3, 1, 3, "span", 1).strategy == "PACK"
    with pytest.raises(ConfigError, match=r"2 engines of 3 stages of 3 CPUs each find no room .* smaller .*--data-par"):
        plan_stages(nodes, 3, 1, 3, "span", 2)
    plan = StagePlan([{"CPU": 2.0}] * 2, 2, "PACK")
    assert [plan.count_others(cpus, 1, 2) for cpus in (1, 2, 4, 64)] == [0, 0, 1, 2], "each engine has two stages"
    assert plan.count_others(64, 1, 1) == 0


def test_cores_whose_workers_are_placed_by_themselves_are_spread() -> None:
    places = place_cores([LARGE, SMALL], HEAD, 3, 2)
    assert [(place.ip, place.threads) for place in places] == [(HEAD, 2), (LARGE.ip, 2), (HEAD, 2)]
    assert places[1].bundles == [{"node:10.0.0.1": 0.001}]
    with pytest.raises(ConfigError, match="no node for the engines; add nodes"):
        place_cores([], HEAD, 1, 0)


def test_the_executor_without_ray_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "quire.on_ray.executor", raising=False)
    with pytest.raises(
        ConfigError, match=r"executor-backend ray: Ray cannot be imported .* pip install 'quire\[ray\]'"
    ):
        resolve(ParallelConfig(distributed_executor_backend="ray").executor_class)


def test_the_environment_of_an_actor() -> None:
    environ = {
        "QUIRE_CACHE_ROOT": "/c",
        "QUIRE_API_KEY": "secret",
        "VLLM_API_KEY": "secret",
        "VLLM_RAY_DP_PACK_STRATEGY": "span",
        "HF_HOME": "/h",
        "NCCL_DEBUG": "1",
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "1",
        "QUIRE_VISIBLE_DEVICES": "1",
        "LOCAL_RANK": "3",
        "PATH": "/bin",
        "OMP_NUM_THREADS": "9",
    }
    passed = actor_environment(environ, 2)
    assert passed.pop("PYTHONPATH")
    assert passed == {
        "QUIRE_CACHE_ROOT": "/c",
        "VLLM_RAY_DP_PACK_STRATEGY": "span",
        "HF_HOME": "/h",
        "NCCL_DEBUG": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "2",
    }
    assert "OMP_NUM_THREADS" not in actor_environment(environ, 0)
