"""Named places where a test may make a process fail.

The code calls `failpoint("engine.step.before_execute")` at such a place, which does nothing unless QUIRE_FAILPOINTS
names it. `quire.testing.failpoints` has the possible faults and the grammar. `FAILPOINTS` lists all names: a misspelt
one in the variable is refused, and a test checks that each name is called somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire import envs
from quire.resolve import resolve

FAILPOINTS: dict[str, str] = {
    "core.start": "the process has begun, nothing is loaded",
    "core.ready": "the core is up, its ready frame is not sent",
    "core.input.decode": "input thread: a message has arrived, before it is decoded",
    "core.input.queued": "input thread: a request is decoded and queued for the loop",
    "core.loop.input": "the loop takes a message from its queue",
    "core.step.schedule": "before the scheduler makes a step",
    "core.step.execute": "before the executor gets a step; the key is the ids of its requests",
    "core.step.update": "the model has run, its output is not taken in yet",
    "core.step.draft": "the step is over, its drafts are not made yet",
    "core.output.queued": "outputs are queued for the output thread",
    "core.output.send": "output thread: before a message is sent",
    "core.shutdown": "the core has begun to drain",
    "kv.read": "transfer thread: a record of the KV store is not read yet",
    "kv.write": "transfer thread: a record of the KV store is not written yet",
    "kv.seal": "an extent of the KV store has no table yet",
    "kv.evict": "an extent of the KV store is to be deleted, and is still there",
    "kv.peer.message": "the server of KV blocks has got a message and done nothing; the key is its type",
    "kv.peer.send": "the server of KV blocks has not sent a block yet",
    "kv.peer.put": "transfer thread: a record is not sent to a server of KV blocks yet",
    "kv.peer.answer": "transfer thread: a server of KV blocks has answered; the key is the answer's type",
    "kv.peer.receive": "transfer thread: a block of another engine has arrived, and is not checked yet",
    "lora.read": "loader's thread: an adapter's files are not opened yet; the key is its name",
    "lora.pack": "loader's thread: factors are read, not packed; the key is the adapter's name",
    "lora.install": "worker: an adapter is loaded, before a step begins; the key is its name",
    "lora.remove": "worker: an adapter's slots are not emptied yet; the key is its name",
    "kernels.trial": "the process that tries out an instruction set has begun",
    "worker.step": "a worker has read a call of a step; the key is the verb",
    "worker.load": "a worker is about to build its model and read its weights",
    "worker.barrier": "a worker is about to wait for the others of its stage; the key is its rank",
    "worker.experts": "an engine is about to wait for the others that share its experts; the key is its index",
    "worker.standby": "a worker is about to read the experts of the next group of engines",
    "group.switch": "an engine is about to leave its group for the next one; the key is its index",
    "worker.stage": "a worker is about to wait for the hidden states of the stage before it",
    "client.add.journaled": "frontend: a request is in the journal, not yet sent",
    "client.output.received": "frontend: outputs have arrived, the journal has not seen them",
    "frontend.stats.record": "frontend: before a statistics logger is told of anything",
    "client.resume": "frontend: a restarted core is ready, live requests are not yet sent again",
}
"""Every failpoint and its place."""

Hit = Callable[[str, str], None]
"""Function that runs at a failpoint, given (name, key)."""

_hit: Hit | None = None


def failpoint(name: str, key: str | Iterable[str] = "") -> None:
    """Marks a place to fail. `key` (or several, joined only when needed) lets a test choose among hits: it matches a
    part of it."""
    if _hit is not None:
        _hit(name, key if isinstance(key, str) else " ".join(key))


def arm_failpoints() -> None:
    """Reads QUIRE_FAILPOINTS. Must be called once where a process begins. Raises ConfigError if it cannot be parsed."""
    text = envs.FAILPOINTS.get()
    install(resolve("quire.testing.failpoints:arm")(text) if text else None)


def install(hit: Hit | None) -> None:
    """Runs `hit` at every failpoint of this process; None: nothing. See `quire.testing.failpoints.injected`."""
    global _hit
    _hit = hit


def installed() -> Hit | None:
    """Returns the function that runs at failpoints now."""
    return _hit
