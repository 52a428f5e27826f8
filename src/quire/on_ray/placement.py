"""Places of engines in a Ray cluster: which node each is on, what it takes there, and the environment of its actor.
Pure: it imports no Ray.

An engine takes one placement group: a bundle for each worker, and one for the actor, which is the last. All are on one
node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


PREFIXES = ("QUIRE_", "NCCL_", "UCX_", "HF_", "HUGGING_FACE_")
NAMES = frozenset({"PYTHONHASHSEED"})
NEVER = frozenset({"QUIRE_API_KEY", "QUIRE_HOST_IP", "QUIRE_PORT", "LOCAL_RANK"})


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
