"""Flags of parallelism: combinations that mean nothing, what is not built yet, and what follows from the rest."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cli.serve import command_line
from quire.config import parallel
from quire.config.parallel import ParallelConfig
from quire.engine.executor.worker_process import bind_cpus
from quire.errors import ConfigError

SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-ep": "enable_expert_parallel",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dpr": "data_parallel_start_rank",
    "-dpn": "data_parallel_rank",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-n": "nnodes",
    "-r": "node_rank",
}
MACHINES: dict[str, Any] = {"nnodes": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "fleet_key": "k"}
EXPERTS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
PORTS: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_multi_port_external_lb": True}
AFAR = {"data_parallel_size_local": 1, "fleet_key": "key"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "--data-parallel-size-local 3 is more than"),
    ({"data_parallel_hybrid_lb": True, "data_parallel_external_lb": True}, "exclude one another"),
    ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True, "data_parallel_rank": 0}, "--data-parallel-start-rank"),
    ({"data_parallel_rank": 0}, "needs several engines"),
    ({"data_parallel_size": 2, "data_parallel_external_lb": True}, "needs --data-parallel-rank"),
    ({"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_size_local": 2}, "has one engine"),
    (PORTS | {"data_parallel_rank": 0}, "give --data-parallel-start-rank"),
    (PORTS | {"data_parallel_size_local": 0}, "and there are none"),
    (PORTS | {"headless": True}, "and there are none"),
    (PORTS | {"enable_expert_parallel": True}, "here each has its own; leave one out"),
    (PORTS | {"dp_coordinator": "always"}, "here each has its own; leave one out"),
    (PORTS | {"data_parallel_size": 1}, "needs several engines"),
    ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True, "headless": True}, "leave one out"),
    ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, "needs --data-parallel-size-local"),
    ({"data_parallel_size": 2, "data_parallel_start_rank": 1}, "needs --data-parallel-size-local"),
    ({"headless": True, "data_parallel_size_local": 0}, "asks for none"),
    ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 3}, "engine 3 is the first"),
    ({"data_parallel_size": 2, "data_parallel_rank": 2}, "engine 2 is the first of 1"),
    ({"nnodes": 2, "distributed_executor_backend": "ray"}, "Ray places workers itself"),
    ({"nnodes": 2, "tensor_parallel_size": 3}, "does not divide the 3 workers"),
    ({"node_rank": 1}, "numbered from 0 on"),
    ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "uni has one worker, and 2 are asked for"),
    ({"enable_elastic_ep": True, "pipeline_parallel_size": 2}, "no --pipeline-parallel-size"),
    ({"data_parallel_size": 3, "elastic_ep_max_dp_size": 2}, "is less than --data-parallel-size 3"),
    (
        {"data_parallel_size": 2, "data_parallel_size_local": 1},
        "reached over TCP, with a key .* quire fleet key > FILE",
    ),
    ({"headless": True, "data_parallel_backend": "ray"}, "ray places the engines itself"),
    ({"headless": True}, "give --fleet-key FILE on each"),
    ({"headless": True, "fleet_key": "k", "engine_host": "::1"}, "--engine-host ::1 is for engines of this machine"),
    ({"data_parallel_rpc_port": 65534}, "65534 is the first of three ports"),
    (MACHINES | {"fleet_key": None}, "--nnodes 2: machines reach one another over TCP, with a key"),
    (MACHINES | {"headless": True}, "give --headless on all but machine 0"),
    (MACHINES | {"node_rank": 1}, "give --headless on all but machine 0"),
    (MACHINES | {"node_rank": 2, "headless": True}, "--node-rank 2: the machines of --nnodes 2 are numbered from 0 on"),
    (
        MACHINES | {"pipeline_parallel_size": 3},
        "does not divide --pipeline-parallel-size 3: a machine has whole stages",
    ),
    (MACHINES | {"master_port": 65535}, "65535 is the first of two ports for each of 1 engines"),
    (MACHINES | {"data_parallel_size": 3, "master_port": 65531}, "65531 is the first of two ports for each of 3"),
    (EXPERTS | {"data_parallel_rank": 1}, "those of one server, and a load balancer of yours"),
    (EXPERTS | AFAR | {"data_parallel_size_local": 0}, "exchange hidden states through one on the server's machine"),
    (EXPERTS | AFAR | {"enable_elastic_ep": True}, "on several machines keep their number"),
    (EXPERTS | AFAR | {"data_parallel_rpc_port": 65530}, "65530 is the first of seven ports"),
    (EXPERTS | {"distributed_executor_backend": "mp"}, "have their worker in their own process; leave it out"),
    (EXPERTS | {"distributed_executor_backend": "ray"}, "have their worker in their own process; leave it out"),
    (EXPERTS | {"data_parallel_size": 65}, "2 to 64 engines share experts, not 65"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_combinations_that_mean_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ParallelConfig(**fields)
    assert "not supported yet" not in str(caught.value)


def test_what_is_not_built_is_refused_by_name() -> None:
    ParallelConfig(data_parallel_size=1, data_parallel_size_local=1, enable_expert_parallel=True)
    for is_wanted, what, remedy in parallel.NOT_BUILT:
        assert not is_wanted(ParallelConfig())
        assert what.format(c=ParallelConfig())
        assert remedy
    several = MACHINES | {"data_parallel_size": 2}
    for fields in ({"data_parallel_size_local": 1}, {"data_parallel_rank": 1}, {"data_parallel_backend": "ray"}):
        with pytest.raises(ConfigError, match=r"--nnodes 2 with engines of other servers or machines .* on machine 0"):
            ParallelConfig(**several | fields)
    with pytest.raises(ConfigError, match=r"--nnodes 2 with --dp-coordinator always is not supported yet"):
        ParallelConfig(**several | {"dp_coordinator": "always"})
    with pytest.raises(ConfigError, match=r"backend ray with a server for each machine or engine is not supported yet"):
        ParallelConfig(data_parallel_size=2, data_parallel_rank=1, distributed_executor_backend="ray")


def test_each_machine_has_an_equal_share_of_the_workers() -> None:
    first, second = ParallelConfig(**MACHINES), ParallelConfig(**MACHINES | {"node_rank": 1, "headless": True})
    assert (first.local_ranks, first.has_only_workers) == (range(2), False)
    assert (second.local_ranks, second.has_only_workers) == (range(2, 4), True)
    assert ParallelConfig(tensor_parallel_size=3).local_ranks == range(3)
    assert bind_cpus(second, num_workers=0) == []


def test_each_engine_with_workers_on_several_machines_has_ports_of_its_own() -> None:
    fields = MACHINES | {"data_parallel_size": 2, "master_port": 65532}
    assert [ParallelConfig(**fields, engine_index=i).workers_port for i in range(2)] == [65532, 65534]
    assert ParallelConfig(data_parallel_size=2, engine_index=1, master_port=7).workers_port == 7, "chosen for it"
    node = ParallelConfig(**fields, node_rank=1, headless=True)
    assert (node.machine_engines, node.num_remote_engines) == (range(2), 0)


def test_engines_of_one_worker_share_experts_and_step_together() -> None:
    assert ParallelConfig(**EXPERTS).shares_experts
    assert ParallelConfig(**EXPERTS).has_waves
    for fields in ({"data_parallel_size": 1}, {"tensor_parallel_size": 2}, {"enable_expert_parallel": False}):
        config = ParallelConfig(**EXPERTS | fields)
        assert not config.shares_experts
        assert not config.has_waves
    assert not ParallelConfig(**EXPERTS).spans_machines
    for fields in (AFAR, AFAR | {"headless": True, "data_parallel_start_rank": 1}, {"data_parallel_backend": "ray"}):
        assert ParallelConfig(**EXPERTS | fields).spans_machines


def test_short_names() -> None:
    for short, name in SHORT.items():
        words = (
            [short] if isinstance(getattr(ParallelConfig(), name), bool) else [short, "mp" if "dpb" in short else "1"]
        )
        assert set(command_line().parse(["m", *words]).given) == {"model_name", name}


def test_modes_and_numbers_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "NOT_BUILT", [])
    inside = ParallelConfig(data_parallel_size=4)
    assert (inside.is_external, inside.is_hybrid, inside.num_local_engines, inside.first_engine) == (False, False, 4, 0)
    rank = ParallelConfig(data_parallel_size=4, data_parallel_rank=2)
    assert (rank.is_external, rank.num_local_engines, rank.first_engine) == (True, 1, 2)
    node = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2)
    assert (node.is_hybrid, node.num_local_engines, node.first_engine) == (True, 2, 2)
    ports = ParallelConfig(**PORTS)
    assert (ports.is_external, ports.is_hybrid, ports.num_local_engines, ports.first_engine) == (True, False, 2, 0)
    port = ParallelConfig(**PORTS, port_index=1)
    assert (port.num_local_engines, port.first_engine, port.machine_engines) == (1, 1, range(2))
    whole = ParallelConfig(data_parallel_size=4, data_parallel_size_local=4, data_parallel_hybrid_lb=True)
    assert (whole.is_hybrid, whole.is_external) == (False, False), "all engines are here: an ordinary server"
    single = ParallelConfig(data_parallel_size=4, data_parallel_size_local=1, data_parallel_hybrid_lb=True)
    assert (single.is_hybrid, single.is_external) == (False, True), "one engine is here: there is nothing to choose"
    part: dict[str, Any] = {"data_parallel_size": 4, "data_parallel_size_local": 2, "fleet_key": "key"}
    agent = ParallelConfig(**part, data_parallel_start_rank=2, headless=True)
    assert (agent.is_hybrid, agent.is_external, agent.first_engine) == (False, False, 2)
    head = ParallelConfig(**part)
    assert (head.num_engines, head.remote_engines) == (4, range(2, 4))
    alone = ParallelConfig(**part | {"data_parallel_size_local": 0})
    assert (alone.num_local_engines, alone.remote_engines) == (0, range(4))
    assert not any(c.remote_engines for c in (agent, inside, rank, node, whole, single))


def test_the_executor_follows_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "NOT_BUILT", [])
    assert ParallelConfig().executor_backend == "uni"
    both = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (both.world_size, both.executor_backend) == (6, "mp")
    on_ray = ParallelConfig(data_parallel_backend="ray", data_parallel_size=2)
    assert (on_ray.executor_backend, on_ray.has_own_workers) == ("uni", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_RAY_DP_PACK_STRATEGY", "span")
        assert (on_ray.executor_backend, on_ray.has_own_workers) == ("ray", False)
        assert ParallelConfig(data_parallel_size=2).executor_backend == "uni"
    assert (on_ray.executor_backend, on_ray.num_local_engines, on_ray.remote_engines) == ("uni", 0, range(2))
    assert ParallelConfig(distributed_executor_backend="a.b:C", tensor_parallel_size=2).executor_class == "a.b:C"
