"""Workers, engines and machines: how many there are, where they run, and how they find one another.

`ParallelConfig` checks its fields against one another when it is made. What is not built yet is refused there, by
`NOT_BUILT`: the commit that builds a feature removes its row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from quire import envs
from quire.config.flags import flag
from quire.config.model_impl import TRANSFORMERS
from quire.errors import ConfigError

LEAN_TORCH = "quire.worker.lean_torch:LazyFinder"
"""Imported before torch, it leaves out what our workers do not use, but transformers does."""
EXECUTORS: dict[str, str] = {
    "mp": "quire.engine.executor.multiproc:MultiprocExecutor",
    "ray": "quire.on_ray.executor:RayExecutor",
    "uni": "quire.engine.executor.uniproc:UniProcExecutor",
}
"""Executors by the name of --distributed-executor-backend."""
MAX_ENGINES = 1024
MAX_SHARING = 64
"""Most engines that share experts."""
_MAX_PORT = 65535
_PORT: dict[str, Any] = {"parse": int, "minimum": 1, "maximum": _MAX_PORT}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes and places of the workers of an engine, and of the engines of a server."""

    tensor_parallel_size: int = flag(
        1, "Workers that share each layer of the model.", parse=int, minimum=1, maximum=64, short="-tp"
    )
    pipeline_parallel_size: int = flag(
        1, "Stages that the layers of the model are divided into.", parse=int, minimum=1, maximum=64, short="-pp"
    )
    enable_expert_parallel: bool = flag(
        False,
        "Divide a mixture's experts among the workers, instead of the columns of each; with engines of one worker each "
        "(--data-parallel-size), among the engines.",
        short="-ep",
    )
    expert_placement_strategy: Literal["linear", "round_robin"] = flag(
        "linear",
        "Experts of each worker with --enable-expert-parallel: adjacent ones, or by turns.",
        choices=("linear", "round_robin"),
    )
    data_parallel_size: int = flag(
        1, "Engines of the server, on all its machines.", parse=int, minimum=1, maximum=MAX_ENGINES, short="-dp"
    )
    data_parallel_size_local: int | None = flag(
        None,
        "Engines on this machine; 0 for a server without engines of its own. Default: all.",
        parse=int,
        minimum=0,
        maximum=MAX_ENGINES,
        short="-dpl",
    )
    data_parallel_start_rank: int | None = flag(
        None,
        "First engine of this machine, where it is not the first machine.",
        parse=int,
        minimum=0,
        maximum=MAX_ENGINES,
        short="-dpr",
    )
    data_parallel_rank: int | None = flag(
        None,
        "The one engine of this server, where a load balancer of yours chooses the engine.",
        parse=int,
        minimum=0,
        maximum=MAX_ENGINES,
        short="-dpn",
    )
    data_parallel_address: str | None = flag(
        None, "Address of the first machine. Default: --master-addr.", metavar="HOST", short="-dpa"
    )
    data_parallel_rpc_port: int = flag(
        29550,
        "First of three ports of the first machine at which engines report; of seven if they share experts.",
        short="-dpp",
        **_PORT,
    )
    data_parallel_backend: str = flag(
        "mp", "What starts the engines: this server (mp), or Ray.", choices=("mp", "ray"), short="-dpb"
    )
    data_parallel_hybrid_lb: bool = flag(
        False, "A server per machine, each of which chooses among its own engines.", short="-dph"
    )
    data_parallel_external_lb: bool = flag(
        False, "A server per engine; a load balancer of yours chooses.", short="-dpe"
    )
    data_parallel_multi_port_external_lb: bool = flag(
        False, "A server per engine of this machine, on ports that follow --port.", short="-dpm"
    )
    data_parallel_supervisor_port: int = flag(
        9256, "Port of the joint health of the servers of --data-parallel-multi-port-external-lb.", **_PORT
    )
    routing_policy: str = flag(
        "least_wait",
        "How requests are shared among engines: to the shortest wait, cached prefixes considered; as vLLM does; or "
        "round robin.",
        choices=("least_wait", "vllm_score", "round_robin"),
    )
    reroute: Literal["auto", "wait", "never"] = flag(
        "auto",
        "Requests of an engine that dies: move at once where that is quicker than a restart; wait for it, and move if "
        "there is none; never move.",
        choices=("auto", "wait", "never"),
    )
    dp_coordinator: Literal["auto", "always"] = flag(
        "auto",
        "Whether engines step together: where they share experts (auto), or always, for an executor of yours whose "
        "steps need all engines of the server.",
        choices=("auto", "always"),
    )
    reroute_any_numerics: bool = flag(
        False,
        "Let streams move to engines that may compute other bits (another instruction set, other weights): their "
        "tokens may change.",
    )
    fleet_key: str | None = flag(
        None,
        "File with the key that all machines of a server share (quire fleet key); only its owner may read it.",
        metavar="FILE",
    )
    engine_link_timeout_s: float = flag(
        5.0,
        "Silence after which another machine counts as lost: its requests go on elsewhere, and there they end.",
        parse=float,
        minimum=1.0,
        maximum=3600,
    )
    headless: bool = flag(False, "Run engines or workers only; the server is on another machine.")
    nnodes: int = flag(1, "Machines that one engine's workers are on.", parse=int, minimum=1, maximum=1024, short="-n")
    node_rank: int = flag(0, "Number of this machine among --nnodes.", parse=int, minimum=0, maximum=1023, short="-r")
    master_addr: str = flag("127.0.0.1", "Address of machine 0 of --nnodes.", metavar="HOST")
    master_port: int = flag(
        29501, "First of the ports of machine 0 of --nnodes: two for each engine, one engine after the other.", **_PORT
    )
    distributed_executor_backend: str | None = flag(
        None,
        "Executor: uni (one worker, in the engine's process), mp (workers are processes), ray (Ray places them), or "
        "package.module:Class. Default: uni or mp.",
    )
    enable_elastic_ep: bool = flag(
        False, "Begin with one engine of a mixture, to which others can be added that share its experts."
    )
    elastic_ep_max_dp_size: int | None = flag(
        None,
        "Most engines that share experts, of a server whose number of engines is changed. Default: 64.",
        parse=int,
        minimum=1,
        maximum=MAX_ENGINES,
    )
    cpu_bind: str = flag(
        "auto",
        "Processors of each worker: auto (an equal share for each; a memory node where there are enough), none, or a "
        "list for each, as 0-7|8-15.",
    )
    worker_cls: str = flag("quire.worker.worker:Worker", "Worker class, as package.module:Class.")
    engine_host: str | None = flag(
        None,
        "Speak with the engine core over TCP, encrypted and authenticated, on this address; unset: by private sockets.",
    )

    engine_index: int = 0
    """Index of the engine: no flag, set where its core starts."""
    port_index: int = -1
    """Number of this server among those of --data-parallel-multi-port-external-lb: no flag, set where it starts. -1: it
    is none of them."""
    experts_file: int = -1
    """Descriptor of the file of engines that share experts, -1 for others: no flag, set where the core starts."""
    experts_generation: int = 0
    """Number of the group of engines that share experts: no flag, set where the core starts."""
    is_scale_up_launch: bool = False
    """True for an engine that is started for a group which does not compute yet: no flag, set where the core starts."""

    def __post_init__(self) -> None:
        for is_wrong, why in _MISTAKES:
            if is_wrong(self):
                raise ConfigError(why.format(c=self))
        for is_wanted, what, remedy in NOT_BUILT:
            if is_wanted(self):
                raise ConfigError(f"{what.format(c=self)} is not supported yet: {remedy}")

    @property
    def world_size(self) -> int:
        """Number of workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_ranks(self) -> range:
        """Workers of an engine on this machine, where you start them on each (--nnodes)."""
        size = self.world_size // self.nnodes
        return range(self.node_rank * size, (self.node_rank + 1) * size)

    @property
    def workers_port(self) -> int:
        """First of the two ports of machine 0 at which the workers of this engine on other machines are expected."""
        return self.master_port + (2 * self.engine_index if self.nnodes > 1 else 0)

    @property
    def has_own_workers(self) -> bool:
        """True if the workers of an engine are all on the machine of its core."""
        return self.nnodes == 1 and self.executor_backend != "ray"

    @property
    def has_only_workers(self) -> bool:
        """True if this machine has workers of engines whose cores are on another machine."""
        return self.node_rank > 0

    @property
    def layer_partition(self) -> tuple[int, ...]:
        """Number of layers of each stage, by QUIRE_PP_LAYER_PARTITION; empty: as even as possible. Raises
        ConfigError."""
        text = envs.PP_LAYER_PARTITION.get()
        try:
            counts = tuple(int(part) for part in text.split(",")) if text else ()
        except ValueError:
            counts = (0,)
        if counts and (min(counts) < 1 or len(counts) != self.pipeline_parallel_size):
            raise ConfigError(
                f"{envs.PP_LAYER_PARTITION.name}={text!r} is not a list of {self.pipeline_parallel_size} numbers of "
                "layers, one for each stage, as 10,12"
            )
        return counts

    @property
    def is_external(self) -> bool:
        """True if a load balancer outside chooses the engine."""
        named = self.data_parallel_external_lb or self.data_parallel_multi_port_external_lb
        return named or self.data_parallel_rank is not None or (self._asks_for_hybrid and self._num_local == 1)

    @property
    def is_hybrid(self) -> bool:
        """True if each machine has a server, which chooses among the engines there."""
        is_asked = self._asks_for_hybrid and not self.data_parallel_multi_port_external_lb
        return is_asked and self._num_local not in (1, self.data_parallel_size)

    @property
    def _asks_for_hybrid(self) -> bool:
        return self.data_parallel_hybrid_lb or (self.data_parallel_start_rank is not None and not self.headless)

    @property
    def _num_local(self) -> int | None:
        return self.data_parallel_size_local

    @property
    def num_local_engines(self) -> int:
        """Number of engines that this process starts on this machine."""
        return 1 if self.port_index >= 0 else len(self.machine_engines)

    @property
    def machine_engines(self) -> range:
        """Engines that share this machine: those that this process starts, and those of the servers on other ports."""
        first = self.data_parallel_rank or self.data_parallel_start_rank or 0
        if self.is_on_ray:
            count = 0
        elif self._num_local is not None:
            count = self._num_local
        else:
            is_single = self.is_external and not self.data_parallel_multi_port_external_lb
            count = 1 if is_single else self.data_parallel_size
        return range(first, first + count)

    @property
    def is_on_ray(self) -> bool:
        """True if Ray places the engines."""
        return self.data_parallel_backend == "ray"

    @property
    def num_remote_engines(self) -> int:
        """Number of engines of this server that are on other machines."""
        has_part = self.headless or self.is_external or self.is_hybrid
        return 0 if has_part else self.data_parallel_size - self.num_local_engines

    @property
    def remote_engines(self) -> range:
        """Engines of this server that are on other machines."""
        first = self.first_engine + self.num_local_engines
        return range(first, first + self.num_remote_engines)

    @property
    def num_engines(self) -> int:
        """Number of engines that this server chooses among."""
        return self.num_local_engines + self.num_remote_engines

    @property
    def first_engine(self) -> int:
        """Rank of the first engine that this process starts."""
        return self.machine_engines.start + max(0, self.port_index)

    @property
    def shares_experts(self) -> bool:
        """True if each engine has a part of a mixture's experts. With several workers in an engine those share them."""
        is_group = self.data_parallel_size > 1 or self.enable_elastic_ep
        return self.enable_expert_parallel and is_group and self.world_size == 1

    @property
    def has_waves(self) -> bool:
        """True if the engines step together."""
        return (self.dp_coordinator == "always" and self.data_parallel_size > 1) or self.shares_experts

    @property
    def spans_machines(self) -> bool:
        """True if the engines that share experts are on several machines."""
        return self.shares_experts and (self.headless or self.num_remote_engines > 0)

    @property
    def _num_ports(self) -> int:
        return 7 if self.spans_machines else 3

    @property
    def _ports_in_words(self) -> str:
        return {3: "three", 7: "seven"}[self._num_ports]

    def with_engines(self, num_engines: int, generation: int) -> ParallelConfig:
        """Returns the same for another number of engines that share experts, in a group of this number."""
        return dataclasses.replace(
            self,
            data_parallel_size=num_engines,
            data_parallel_size_local=None,
            enable_elastic_ep=True,
            experts_generation=generation,
        )

    @property
    def most_engines(self) -> int:
        """Most engines that share experts which there may be."""
        return self.elastic_ep_max_dp_size or MAX_SHARING

    @property
    def executor_backend(self) -> str:
        """Name of the executor, or its dotted name."""
        default = "uni" if self.world_size == 1 else "mp"
        if self.is_on_ray and envs.RAY_DP_PACK_STRATEGY.get() == "span":
            default = "ray"  # the workers of an engine are on several nodes
        return self.distributed_executor_backend or default

    @property
    def executor_class(self) -> str:
        """Dotted name of the executor."""
        return EXECUTORS.get(self.executor_backend, self.executor_backend)

    def core_names(self, model_impl: str) -> tuple[str, ...]:
        """Returns the dotted names that an engine core will resolve, so that it can begin to import them early: the
        executor, and the worker if it runs in the core. `model_impl` is the code that runs the model."""
        names = [self.executor_class]
        if self.executor_backend == "uni":
            names += self.worker_names(model_impl)
        return tuple(names)

    def worker_names(self, model_impl: str) -> tuple[str, ...]:
        """Returns the dotted names that the process of a worker will resolve."""
        return (self.worker_cls,) if model_impl == TRANSFORMERS else (LEAN_TORCH, self.worker_cls)


def _num_modes(c: ParallelConfig) -> int:
    return c.data_parallel_hybrid_lb + c.data_parallel_external_lb + c.data_parallel_multi_port_external_lb


_MISTAKES: tuple[tuple[Callable[[ParallelConfig], bool], str], ...] = (
    (
        lambda c: (c.data_parallel_size_local or 0) > c.data_parallel_size,
        "--data-parallel-size-local {c.data_parallel_size_local} is more than --data-parallel-size "
        "{c.data_parallel_size}, which counts the engines of all machines",
    ),
    (
        lambda c: _num_modes(c) > 1,
        "--data-parallel-hybrid-lb, --data-parallel-external-lb and --data-parallel-multi-port-external-lb exclude one "
        "another; give one of them",
    ),
    (
        lambda c: c.data_parallel_hybrid_lb and c.data_parallel_rank is not None,
        "--data-parallel-rank {c.data_parallel_rank} is for --data-parallel-external-lb; with "
        "--data-parallel-hybrid-lb give --data-parallel-start-rank",
    ),
    (
        lambda c: c.is_external and c.data_parallel_size == 1,
        "a load balancer of yours (--data-parallel-external-lb or --data-parallel-rank) needs several engines; give "
        "--data-parallel-size, or leave the other out",
    ),
    (
        lambda c: c.data_parallel_multi_port_external_lb and c.data_parallel_rank is not None,
        "--data-parallel-rank {c.data_parallel_rank} is of one server, --data-parallel-multi-port-external-lb starts "
        "several; give --data-parallel-start-rank, the number of the first, or leave one out",
    ),
    (
        lambda c: c.data_parallel_multi_port_external_lb and (c.headless or c.data_parallel_size_local == 0),
        "--data-parallel-multi-port-external-lb starts a server for each engine of this machine, and there are none "
        "(--headless, or --data-parallel-size-local 0)",
    ),
    (
        lambda c: c.data_parallel_multi_port_external_lb and c.has_waves,
        "--data-parallel-multi-port-external-lb: engines that step together (--enable-expert-parallel, "
        "--dp-coordinator always) are those of one server, and here each has its own; leave one out",
    ),
    (
        lambda c: c.data_parallel_external_lb and c.data_parallel_rank is None,
        "--data-parallel-external-lb needs --data-parallel-rank, the number of this server's engine",
    ),
    (
        lambda c: (
            c.is_external and not c.data_parallel_multi_port_external_lb and (c.data_parallel_size_local or 1) != 1
        ),
        "--data-parallel-size-local {c.data_parallel_size_local}: a server behind your load balancer has one engine; "
        "leave it out, or use --data-parallel-hybrid-lb",
    ),
    (
        lambda c: c.data_parallel_hybrid_lb and c.headless,
        "--headless runs engines without a server, --data-parallel-hybrid-lb a server on each machine; leave one out",
    ),
    (
        lambda c: c._asks_for_hybrid and c.data_parallel_size_local in (None, 0),
        "a server on each machine (--data-parallel-hybrid-lb, or --data-parallel-start-rank without --headless) needs "
        "--data-parallel-size-local, the number of its engines",
    ),
    (
        lambda c: c.headless and c.data_parallel_size_local == 0,
        "--headless runs engines, and --data-parallel-size-local 0 asks for none; leave one out",
    ),
    (
        lambda c: c.first_engine + c.num_local_engines > c.data_parallel_size,
        "engine {c.first_engine} is the first of {c.num_local_engines} on this machine, but --data-parallel-size "
        "{c.data_parallel_size} counts those of all machines, from 0 on",
    ),
    (
        lambda c: c.dp_coordinator == "always" and (c.num_local_engines != c.data_parallel_size),
        "--dp-coordinator always: the engines that step together are those of one server on one machine, and this one "
        "has {c.num_local_engines} of {c.data_parallel_size}",
    ),
    (
        lambda c: c.dp_coordinator == "always" and not 1 < c.data_parallel_size <= 64,
        "--dp-coordinator always: 2 to 64 engines step together, not {c.data_parallel_size}",
    ),
    (
        lambda c: c.shares_experts and (c.is_external or c.is_hybrid),
        "--enable-expert-parallel: engines that share experts are those of one server, and a load balancer of yours "
        "(--data-parallel-rank, --data-parallel-hybrid-lb) has several; leave it out, and each engine has all experts; "
        "or give --headless on all machines but the first",
    ),
    (
        lambda c: c.shares_experts and c.data_parallel_size_local == 0 and not c.is_on_ray,
        "--data-parallel-size-local 0 with --enable-expert-parallel: engines that share experts exchange hidden states "
        "through one on the server's machine, as nodes open no port; give 1 or more",
    ),
    (
        lambda c: c.enable_elastic_ep and c.spans_machines,
        "--enable-elastic-ep: engines that share experts on several machines keep their number; leave it out, or have "
        "all engines on one machine",
    ),
    (
        lambda c: c.shares_experts and c.executor_backend in ("mp", "ray"),
        "--distributed-executor-backend {c.executor_backend}: engines that share experts (--enable-expert-parallel) "
        "have their worker in their own process; leave it out",
    ),
    (
        lambda c: c.shares_experts and c.data_parallel_size > 64,
        "--enable-expert-parallel: 2 to 64 engines share experts, not {c.data_parallel_size}; leave it out: each has "
        "all of them then",
    ),
    (
        lambda c: c.nnodes > 1 and c.executor_backend == "ray",
        "--nnodes {c.nnodes} is for executors that you start on each machine; Ray places workers itself; leave it out",
    ),
    (
        lambda c: c.world_size % c.nnodes != 0,
        "--nnodes {c.nnodes} does not divide the {c.world_size} workers of an engine (--tensor-parallel-size times "
        "--pipeline-parallel-size)",
    ),
    (
        lambda c: c.node_rank >= c.nnodes,
        "--node-rank {c.node_rank}: the machines of --nnodes {c.nnodes} are numbered from 0 on",
    ),
    (
        lambda c: c.nnodes > 1 and c.pipeline_parallel_size % c.nnodes != 0 and c.pipeline_parallel_size > 1,
        "--nnodes {c.nnodes} does not divide --pipeline-parallel-size {c.pipeline_parallel_size}: a machine has whole "
        "stages; give a multiple of {c.nnodes}, or leave it out: the workers of all machines share each layer then",
    ),
    (
        lambda c: c.nnodes > 1 and c.headless != c.has_only_workers,
        "--nnodes {c.nnodes} --node-rank {c.node_rank}: machine 0 has the server, the others have workers only; give "
        "--headless on all but machine 0",
    ),
    (
        lambda c: c.nnodes > 1 and c.fleet_key is None,
        "--nnodes {c.nnodes}: machines reach one another over TCP, with a key that all have: quire fleet key > FILE "
        "makes one; give --fleet-key FILE on each",
    ),
    (
        lambda c: c.nnodes > 1 and c.master_port + 2 * c.data_parallel_size - 1 > _MAX_PORT,
        "--master-port {c.master_port} is the first of two ports for each of {c.data_parallel_size} engines, and the "
        "last of all is 65535",
    ),
    (
        lambda c: c.executor_backend == "uni" and c.world_size > 1,
        "--distributed-executor-backend uni has one worker, and {c.world_size} are asked for; use mp or leave it out",
    ),
    (
        lambda c: c.enable_elastic_ep and (c.pipeline_parallel_size > 1 or c.is_external or c.is_hybrid),
        "--enable-elastic-ep needs one server that chooses among all engines, and no --pipeline-parallel-size",
    ),
    (
        lambda c: c.elastic_ep_max_dp_size is not None and c.elastic_ep_max_dp_size < c.data_parallel_size,
        "--elastic-ep-max-dp-size {c.elastic_ep_max_dp_size} is less than --data-parallel-size {c.data_parallel_size}",
    ),
    (
        lambda c: (c.headless or c.num_remote_engines > 0) and c.engine_host is not None,
        "--engine-host {c.engine_host} is for engines of this machine only; engines on other machines use "
        "--data-parallel-address; leave it out",
    ),
    (
        lambda c: c.data_parallel_rpc_port > _MAX_PORT - c._num_ports + 1,
        "--data-parallel-rpc-port {c.data_parallel_rpc_port} is the first of {c._ports_in_words} ports that "
        "follow one another, and the last of all is 65535",
    ),
    (
        lambda c: c.is_on_ray and (c.headless or c.is_external or c.is_hybrid),
        "--data-parallel-backend ray places the engines itself, for one server that chooses among all: leave out "
        "--headless, --data-parallel-rank, --data-parallel-start-rank and the modes of load balancing",
    ),
    (
        lambda c: (c.headless or c.num_remote_engines > 0) and c.fleet_key is None and not c.is_on_ray,
        "engines on other machines (--data-parallel-size {c.data_parallel_size}, --data-parallel-size-local "
        "{c.num_local_engines}) are reached over TCP, with a key that all machines have: quire fleet key > FILE makes "
        "one; give --fleet-key FILE on each",
    ),
)
"""Combinations that mean nothing: a test and the message, with `c` for the configuration."""

NOT_BUILT: list[tuple[Callable[[ParallelConfig], bool], str, str]] = [
    (
        lambda c: c.executor_backend == "ray" and (c.is_external or c.is_hybrid),
        "--distributed-executor-backend ray with a server for each machine or engine",
        "leave out --data-parallel-rank, --data-parallel-start-rank and the modes of load balancing: one server "
        "chooses among all engines then",
    ),
    (
        lambda c: c.executor_backend == "external_launcher",
        "executor {c.executor_backend}",
        "use mp, the default",
    ),
    (
        lambda c: c.nnodes > 1 and (c.is_external or c.is_hybrid or len(c.machine_engines) != c.data_parallel_size),
        "--nnodes {c.nnodes} with engines of other servers or machines (--data-parallel-backend ray, "
        "--data-parallel-size-local, --data-parallel-rank, the modes of load balancing)",
        "the cores of all engines are on machine 0, and their workers on all machines; leave the other flags out",
    ),
    (
        lambda c: c.nnodes > 1 and c.has_waves,
        "--nnodes {c.nnodes} with --dp-coordinator always",
        "engines with workers on several machines are independent; leave it out",
    ),
]
"""Features that are not built yet: a test, the flag, and what works instead."""
