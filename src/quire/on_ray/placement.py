"""Places of engines in a Ray cluster: which node each is on, what it takes there, and the environment of its actor.
Pure: it imports no Ray.

An engine takes one placement group: a bundle for each worker, and one for the actor, which is the last. All are on one
node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from quire.errors import ConfigError
from quire.wire.process import search_path

Strategy = Literal["strict", "fill"]
"""strict: every node has --data-parallel-size-local engines. fill: a node has as many as fit."""
STRATEGIES: tuple[Strategy, ...] = ("strict", "fill")
NODE_SHARE = 0.001
"""Share of a node's own resource that binds a bundle to it."""


class RayNode(NamedTuple):
    """A node of the cluster, and what is free there."""

    ip: str
    cpus: float
    gpus: float = 0.0


class Wish(NamedTuple):
    """The engines that are to be placed."""

    num_engines: int
    num_workers: int
    """Workers of an engine."""
    num_local: int | None = None
    """Engines of a node (--data-parallel-size-local); None: as many as fit, but one at least."""
    cpus_per_worker: int | None = None
    """Processors of a worker (OMP_NUM_THREADS); None: an equal share of the node's."""
    needs_gpus: bool = False


class Placement(NamedTuple):
    """Place of an engine."""

    ip: str
    bundles: list[dict[str, float]]
    threads: int
    """Threads of each of its workers; 0: the workers compute on a GPU."""
    num_on_node: int
    """Engines on its node, which share its memory."""


def place_engines(nodes: Sequence[RayNode], head_ip: str, wish: Wish, strategy: Strategy) -> list[Placement]:
    """Returns a place for each engine; nodes are filled one after the other, the head's own first.

    Raises ConfigError where the cluster has not enough of what they need.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"QUIRE_RAY_DP_PACK_STRATEGY={strategy} is not supported: an engine's workers are on one machine; use "
            f"{' or '.join(STRATEGIES)}"
        )
    ordered = sorted(nodes, key=lambda node: (node.ip != head_ip, node.ip))
    counts: list[int] = []
    left = wish.num_engines
    for node in ordered:
        room = _count_room(node, wish)
        wanted = wish.num_local if wish.num_local else room
        if strategy == "fill":
            counts.append(min(room, left))
        else:
            counts.append(min(wanted, left) if room >= min(wanted, left) else 0)
        left -= counts[-1]
    if left:
        raise ConfigError(_explain(ordered, wish, left))
    return [
        placement for node, count in zip(ordered, counts, strict=True) for placement in _place_on(node, count, wish)
    ]


def _count_room(node: RayNode, wish: Wish) -> int:
    """Returns how many engines fit a node."""
    if wish.needs_gpus:
        return int(min(node.gpus // wish.num_workers, node.cpus))
    return int(node.cpus // (wish.num_workers * (wish.cpus_per_worker or 1)))


def _place_on(node: RayNode, count: int, wish: Wish) -> list[Placement]:
    if not count:
        return []
    on_node = {f"node:{node.ip}": NODE_SHARE}
    if wish.needs_gpus:
        bundles = [{"GPU": 1.0, **on_node}] * wish.num_workers + [{"CPU": 1.0, **on_node}]
        return [Placement(node.ip, bundles, 0, count)] * count
    threads = wish.cpus_per_worker or int(node.cpus // (count * wish.num_workers))
    bundles = [{"CPU": float(threads), **on_node}] * wish.num_workers + [dict(on_node)]
    return [Placement(node.ip, bundles, threads, count)] * count


def _explain(nodes: Sequence[RayNode], wish: Wish, left: int) -> str:
    each = f"{wish.num_workers} GPUs and 1 CPU" if wish.needs_gpus else _describe_cpus(wish)
    there = "; ".join(f"{node.ip}: {node.cpus:g} CPUs, {node.gpus:g} GPUs" for node in nodes) or "no node"
    local = f", {wish.num_local} on a node" if wish.num_local else ""
    return (
        f"{left} of {wish.num_engines} engines find no room in the Ray cluster: each takes {each}{local}, and there is "
        f"{there}; add nodes, or give a smaller --data-parallel-size"
    )


def _describe_cpus(wish: Wish) -> str:
    return f"{wish.num_workers * (wish.cpus_per_worker or 1)} CPUs"


def place_cores(nodes: Sequence[RayNode], head_ip: str, num_engines: int, threads: int) -> list[Placement]:
    """Returns a place for the core of each engine whose workers are placed by themselves: one node after the other, the
    head's own first. `threads` of each worker; 0: as many as find room. Raises ConfigError for a cluster without nodes.
    """
    ordered = sorted(nodes, key=lambda node: (node.ip != head_ip, node.ip))
    if not ordered:
        raise ConfigError("the Ray cluster has no node for the engines; add nodes")
    ips = [ordered[engine % len(ordered)].ip for engine in range(num_engines)]
    return [Placement(ip, [{f"node:{ip}": NODE_SHARE}], threads, 1) for ip in ips]


class StagePlan(NamedTuple):
    """Bundles for the stages of one engine, and how Ray places them."""

    bundles: list[dict[str, float]]
    threads: int
    """Threads of each worker."""
    strategy: str
    """Strategy of the placement group."""

    def count_others(self, node_cpus: float, num_own: int, num_engines: int) -> int:
        """Returns how many stages of other engines may be on a node that has `num_own` of one engine's."""
        room = int(node_cpus // self.bundles[0]["CPU"])
        return max(0, min(room - num_own, (num_engines - 1) * len(self.bundles)))


def plan_stages(
    nodes: Sequence[RayNode],
    num_stages: int,
    num_workers: int,
    cpus_per_worker: int | None,
    strategy: str | None,
    num_engines: int = 1,
) -> StagePlan:
    """Returns the bundles of an engine of `num_stages` with `num_workers` each, all of which are on one node, as stages
    that follow one another need not be. All of `num_engines` find room with such bundles. `strategy`: strict and fill:
    all stages on one node; span: on several; None: on one if there is room. Raises ConfigError where the cluster has
    not enough of what they need."""
    strategies: dict[str, tuple[str, Callable[[int], int]]] = {
        "strict": ("STRICT_PACK", lambda cpus: sum(int(node.cpus // cpus) // num_stages for node in nodes)),
        "span": ("PACK", lambda cpus: sum(int(node.cpus // cpus) for node in nodes) // num_stages),
    }
    named = {None: ["strict", "span"], "fill": ["strict"]}.get(strategy, [str(strategy)])
    if any(name not in strategies for name in named):
        raise ConfigError(f"QUIRE_RAY_DP_PACK_STRATEGY={strategy} is not supported; use strict, fill or span")
    for name in named:
        kind, count = strategies[name]
        for threads in [cpus_per_worker] if cpus_per_worker else range(_most_cpus(nodes) // num_workers, 0, -1):
            if count(threads * num_workers) >= num_engines:
                return StagePlan([{"CPU": float(threads * num_workers)}] * num_stages, threads, kind)
    there = "; ".join(f"{node.ip}: {node.cpus:g} CPUs" for node in nodes) or "no node"
    each = num_workers * (cpus_per_worker or 1)
    engines = f"{num_engines} engines of " if num_engines > 1 else ""
    raise ConfigError(
        f"{engines}{num_stages} stages of {each} CPUs each find no room in the Ray cluster"
        f"{' on one node' if named == ['strict'] else ''}, and there is {there}; add nodes, or give a smaller "
        "--pipeline-parallel-size, --tensor-parallel-size or --data-parallel-size"
    )


def _most_cpus(nodes: Sequence[RayNode]) -> int:
    return max((int(node.cpus) for node in nodes), default=0)


PREFIXES = ("QUIRE_", "VLLM_", "NCCL_", "UCX_", "HF_", "HUGGING_FACE_")
NAMES = frozenset({"PYTHONHASHSEED"})
_OWN = ("API_KEY", "HOST_IP", "PORT")
NEVER = frozenset(f"{prefix}{name}" for prefix in ("QUIRE_", "VLLM_") for name in _OWN) | {"LOCAL_RANK"}


def actor_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Returns the variables of an actor. `threads` of its workers; 0: what the machine has."""
    passed = {
        name: value
        for name, value in environ.items()
        if (name.startswith(PREFIXES) or name in NAMES) and name not in NEVER and not name.endswith("_VISIBLE_DEVICES")
    }
    passed["PYTHONPATH"] = search_path()
    if threads:
        passed["OMP_NUM_THREADS"] = str(threads)
    return passed
