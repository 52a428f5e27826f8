"""The machines of a fleet: which may join, which are lost, and what both sides send."""

from __future__ import annotations

import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.engine import describe_engine
from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, EngineDeadError
from quire.frontend.client import launcher
from quire.frontend.supervision.coordinator_launch import CoordinatorPlan
from quire.frontend.supervision.node import NodeAgent, NodeState
from quire.frontend.supervision.nodes import NodeTable, RemoteEngine, Served
from quire.frontend.supervision.quarantine import CoreDeath
from quire.wire.handshake import PROTOCOL_VERSION, CoordinatorAddresses
from quire.wire.nodes import (
    CoreEnd,
    CoreOrder,
    CoreReport,
    HeadReport,
    NodeHello,
    NodeRefusal,
    NodeReport,
    NodeUnknown,
    NodeWelcome,
    derive_keys,
    make_fleet_key,
    network_addresses,
    read_fleet_key,
)
from quire.wire.sockets import SocketDirectory
from tests.ports import free_ports

FACTS = {"--dtype": "auto", "--block-size": "16"}
A, B = b"node-a", b"node-b"
SILENCE_S = 5.0


class Head:
    """A table for the engines 1, 2 and 3 of four, and what happened to them."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.served = dict.fromkeys((1, 2, 3), Served(False, -1, 0))
        self.table = NodeTable((1, 2, 3), 4, FACTS, SILENCE_S, self, self.served.__getitem__)

    def note_joined(self, engine: int) -> None:
        self.events.append(("joined", engine))

    def note_lost(self, engine: int, why: str) -> None:
        self.events.append(("lost", engine, why))

    def note_death(self, engine: int, incarnation: int, death: CoreDeath) -> None:
        self.events.append(("death", engine, incarnation, death))

    def note_ending(self, engine: int) -> None:
        self.events.append(("ending", engine))

    def tell(self, identity: bytes, message: Any, now: float = 0.0, connection: int = 7) -> list[Any]:
        """Returns the answers."""
        self.table.on_message(identity, connection, msgspec.msgpack.encode(message), now)
        messages, self.table.messages = self.table.messages, []
        assert all(to == identity for to, _ in messages)
        return [message for _, message in messages]

    def take_events(self) -> list[tuple[Any, ...]]:
        events, self.events = self.events, []
        return events


def hello(first: int = 1, count: int = 1, **fields: Any) -> NodeHello:
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "first_engine": first,
        "num_engines": count,
        "data_parallel_size": 4,
        "facts": FACTS,
        "host": "far",
        "pid": 12,
    }
    return NodeHello(**values | fields)


def core(engine: int = 1, incarnation: int = 0, **fields: Any) -> CoreReport:
    return CoreReport(engine, incarnation, 99, fields.pop("restarts", {}), **fields)


@pytest.fixture
def head() -> Head:
    return Head()


def test_a_node_joins(head: Head) -> None:
    head.table.max_model_len = 128
    head.served[2] = Served(True, 4, 50)
    welcome, report = head.tell(A, hello(1, 2))
    assert welcome == NodeWelcome([0, 5], 128), "numbers above those of the cores that were there"
    assert report == HeadReport([CoreOrder(1, False), CoreOrder(2, True, 4, 0, 50)], 128)
    assert head.take_events() == [("joined", 1), ("joined", 2)]
    assert head.tell(A, hello(1, 2))[0] == NodeWelcome([0, 5], 128)
    assert head.take_events() == [], "it has only not heard the answer"
    assert [engine.host for engine in head.table.engines.values()] == ["far", "far", None]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"protocol_version": 99}, "the node speaks protocol version 99, the server speaks"),
        ({"data_parallel_size": 3}, "--data-parallel-size is 3 there and 4 at the server"),
        ({"first": 0}, "the engines from 0 on, 1 in number .* other machines than the server's may have 1, 2, 3"),
        ({"first": 3, "count": 2}, "the engines from 3 on, 2 in number"),
        ({"count": 0}, "the engines from 1 on, 0 in number"),
        ({"facts": FACTS | {"--dtype": "float32"}}, "--dtype is 'float32' there and 'auto' at the server"),
        ({"facts": FACTS | {"--new": "1"}}, "--new is '1' there and '' at the server"),
        ({"first": 2}, r"engine 2 is one of the node far \(process 12\), which is there"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_by_name(head: Head, fields: dict[str, Any], why: str) -> None:
    head.tell(B, hello(2))
    head.take_events()
    (answer,) = head.tell(A, hello(**fields))
    assert isinstance(answer, NodeRefusal)
    assert re.search(why, answer.message)
    assert head.take_events() == []


def test_the_hello_of_a_version_with_other_fields_is_understood(head: Head) -> None:
    (answer,) = head.tell(A, {"type": "hello", "protocol_version": 1000, "engines": "all"})
    assert "protocol version 1000" in answer.message
    assert head.tell(A, {"type": "hello"}) == []
    assert head.tell(A, [1, 2]) == []


def test_a_silent_node_is_lost_and_asked_who_it_is_when_it_is_back(head: Head) -> None:
    head.tell(A, hello(), now=1.0)
    head.table.tick(6.0)
    head.tell(A, NodeReport([core()]), now=6.0)
    head.table.tick(11.0)
    head.take_events()
    head.table.tick(11.1)
    ((event, engine, why),) = head.take_events()
    assert (event, engine) == ("lost", 1)
    assert "the node far (process 12) has been silent for 5.1 s" in why
    assert head.tell(A, NodeReport([core()]), now=12.0) == [NodeUnknown()]
    welcome, _ = head.tell(A, hello(), now=12.0)
    assert welcome == NodeWelcome([1])
    assert head.take_events() == [("joined", 1)]


def test_a_closed_connection_is_the_end_of_its_node_only(head: Head) -> None:
    head.tell(A, hello(1), connection=7)
    head.tell(B, hello(2), connection=8)
    head.take_events()
    head.table.on_disconnected(7)
    assert [event[:2] for event in head.take_events()] == [("lost", 1)]
    head.tell(A, hello(1), connection=9)
    head.table.on_disconnected(7)
    assert head.take_events() == [("joined", 1)], "it has another connection now"


def test_nobody_is_left_when_the_listener_fails(head: Head) -> None:
    head.tell(A, hello(1, 2))
    head.take_events()
    head.table.lose_all("cannot be watched any more")
    assert [event[:2] for event in head.take_events()] == [("lost", 1), ("lost", 2)]


def test_a_death_is_reported_once(head: Head) -> None:
    head.tell(A, hello())
    head.take_events()
    end = CoreEnd(0, "crash", "was killed by SIGSEGV", ["r1"])
    for _ in range(2):
        head.tell(A, NodeReport([core(1, 1, last_death=end, restarts={"crash": 1})]))
    assert head.take_events() == [("death", 1, 0, CoreDeath("crash", "was killed by SIGSEGV", ("r1",)))]
    strange = CoreEnd(1, "boredom", "left", None)
    head.tell(A, NodeReport([core(1, 2, last_death=strange), core(3)]))
    assert head.take_events() == [("death", 1, 1, CoreDeath("lost", "left", None))]
    assert head.table.engines[3].incarnation == -1, "not an engine of this node"


def test_restarts_are_counted_on_over_processes(head: Head) -> None:
    engine = head.table.engines[1]
    head.tell(A, hello())
    head.tell(A, NodeReport([core(1, 2, restarts={"crash": 2})]))
    head.table.on_disconnected(7)
    head.tell(A, hello())
    head.tell(A, NodeReport([core(1, 3, restarts={"crash": 3})]))
    assert engine.restarts == {"crash": 3}
    head.table.on_disconnected(7)
    head.tell(B, hello())
    head.tell(B, NodeReport([core(1, 4, restarts={})]))
    assert engine.restarts == {"crash": 3}


def test_an_engine_without_a_core_is_lost_alone(head: Head) -> None:
    head.tell(A, hello(1, 2))
    head.take_events()
    for _ in range(2):
        head.tell(A, NodeReport([core(1, gone_reason="the budget is used up"), core(2)]))
    ((_, engine, why),) = head.take_events()
    assert (engine, why) == (1, "was given up by its machine: the budget is used up")


def test_a_node_that_ends_is_relieved_first(head: Head) -> None:
    head.tell(A, hello())
    head.take_events()
    (report,) = head.tell(A, NodeReport([core()], is_ending=True))
    assert report.knows_end
    assert head.tell(A, NodeReport([core()], is_ending=True)) == []
    assert head.take_events() == [("ending", 1)]
    head.tell(A, NodeReport([core()], is_ending=True, has_ended=True))
    assert [event[:2] for event in head.take_events()] == [("lost", 1)]
    assert head.tell(A, NodeReport([], has_ended=True)) == [], "it is gone, and wants no answer"


def test_orders_reach_the_node() -> None:
    state = NodeState(range(1, 3))
    engine = RemoteEngine(1)
    assert state.take(NodeWelcome([0, 0])) == []
    assert state.is_admitted
    assert state.take(HeadReport([CoreOrder(1, True, 3, 2)])) == [], "what was asked for before it came is done"
    engine.ask_restart()
    assert state.take(HeadReport([CoreOrder(1, True, 3, 3)])) == [1]
    assert state.take(HeadReport([CoreOrder(1, True, 3, 3)])) == []
    assert (state.is_needed, state.order_of(1).connected, state.order_of(2).connected) == (True, 3, -1)
    state.take(NodeUnknown())
    assert not state.is_admitted
    state.take(NodeWelcome([7, 7]))
    assert state.welcome == NodeWelcome([0, 0]), "its cores have their numbers"
    state.take(NodeRefusal("no"))
    assert state.refusal == "no"


def test_a_node_says_what_has_happened() -> None:
    class Supervisor:
        incarnation, core_pid, restarts = 3, None, {"hang": 1}

    state = NodeState(range(1, 2))
    state.note_death(1, 2, CoreDeath("hang", "made no progress", ("r",), was_asked=True))
    state.gone[1] = EngineDeadError("over")
    report = state.make_report({1: Supervisor()})  # type: ignore[dict-item]
    end = CoreEnd(2, "hang", "made no progress", ["r"], True)
    assert report == NodeReport([CoreReport(1, 3, None, {"hang": 1}, end, "over")])


# -- the key ---------------------------------------------------------------------------------------------------------


def test_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        read_fleet_key(str(path))
    text = make_fleet_key()
    path.write_text(text + "\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"has mode 0640: other users may use it; chmod 600 {path}"):
        read_fleet_key(str(path))
    path.chmod(0o400)
    key = read_fleet_key(str(path))
    head, node = derive_keys(key, 5.0)
    assert (head.peer_public, node.peer_public) == (node.public, head.public)
    assert head.secret != node.secret
    assert derive_keys(key, 5.0) == (head, node)
    assert derive_keys(bytes(32), 5.0) != (head, node)
    path.chmod(0o600)
    for wrong in ("", "quire-fleet-key-1:12", text[:-1] + "x", text.replace("-1:", "-2:")):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="holds no key of a fleet"):
            read_fleet_key(str(path))
    with pytest.raises(ConfigError, match=r"holds no key|mode"):
        read_fleet_key(str(tmp_path))


def test_addresses() -> None:
    assert network_addresses("h", 10) == ["tcp://h:10", "tcp://h:11", "tcp://h:12"]
    assert network_addresses("::1", 10)[0] == "tcp://[::1]:10"


def test_engines_of_both_sides_that_share_experts_meet_at_the_same_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = list[CoordinatorPlan]()

    class Supervisor:
        def __init__(self, plan: CoordinatorPlan, *_: Any) -> None:
            plans.append(plan)
            self.addresses: Future[CoordinatorAddresses] = Future()
            self.addresses.set_result(plan.addresses)

        def start(self) -> None: ...

    monkeypatch.setattr(launcher, "CoordinatorSupervisor", Supervisor)
    port = free_ports()
    key = tmp_path / "key"
    key.write_text(make_fleet_key())
    key.chmod(0o600)
    fields = {"data_parallel_size": 3, "data_parallel_rpc_port": port, "fleet_key": str(key)}
    fields["enable_expert_parallel"] = True
    head = EngineArgs("demo", data_parallel_size_local=1, **fields).create_engine_config("serving")
    fields |= {"headless": True, "data_parallel_start_rank": 1, "data_parallel_size_local": 2}
    context: zmq.Context[Any] = zmq.Context()
    directory = SocketDirectory()
    made = launcher.EngineLauncher(head, context, directory, log_stats=True)
    made.start_coordinator(lambda error: None).close()
    node = NodeAgent(EngineArgs("demo", **fields).create_engine_config("serving"))
    (plan,), ours, theirs = plans, made.sharing, node._group
    assert plan.group is not None
    assert ours is not None
    assert ours.network is not None
    assert theirs is not None
    assert (plan.num_engines, plan.group.size) == (1, 3), "it waits for no engine of another machine"
    assert theirs.hub == ours.network.hub == plan.group.hub
    assert theirs.exchange == ours.network.exchange
    assert node._coordinator == (plan.group.back, plan.group.intake)
    assert theirs.fleet_key == ours.network.fleet_key
    assert theirs.machine != ours.network.machine
    assert describe_engine(head) == describe_engine(node._config)
    made.close()
    node.ask_end()
    node.run()
    for opened in (made.input_socket, made.output_socket, made._nodes):
        assert opened is not None
        opened.close(linger=0)
    context.term()
    directory.remove()
