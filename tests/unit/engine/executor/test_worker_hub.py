"""Workers on several machines: calls, steps, errors, deaths, refusals. The machines are parts of this one, which reach
one another by loopback; the workers have no model (tests/workers_apart.py)."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.config.parallel import ParallelConfig
from quire.config.server import decode_config
from quire.engine.executor import worker_hub, worker_node
from quire.engine.executor.multiproc import MultiprocExecutor
from quire.engine.executor.worker_node import WorkersMachine, WorkersNode
from quire.errors import ConfigError, ModelLoadError, NodesMissingError, ServerError
from quire.lora_request import LoRARequest
from quire.wire.execution import ModelRunnerOutput
from quire.wire.handshake import PROTOCOL_VERSION
from quire.wire.heartbeat import WorkerEnd
from quire.wire.kv_cache import KVCacheConfig
from quire.wire.lora import AdapterInfo, AdapterLoad
from quire.wire.nodes import make_fleet_key, read_fleet_key
from quire.wire.worker_link import TO_NODE, Abort, SecureEnd, WorkersHello, WorkersRefusal, WorkersWelcome
from tests.ports import free_ports

from .test_multiproc import is_gone, step


def write_key(path: Path) -> str:
    path.write_text(make_fleet_key())
    path.chmod(0o600)
    return str(path)


class Machines:
    """The machines of an engine, the first of which has the executor."""

    def __init__(self, directory: Path, **sizes: Any) -> None:
        self.fields = {
            "nnodes": 2,
            "master_port": free_ports(2 * sizes.get("data_parallel_size", 1)),
            "fleet_key": write_key(directory / "key"),
            "worker_cls": "tests.workers_apart:ApartWorker",
            "tensor_parallel_size": 2,
            **sizes,
        }
        self.nodes = list[WorkersNode | WorkersMachine]()
        self._threads = list[threading.Thread]()
        self.errors = list[BaseException]()

    def config(self, node: int, **fields: Any) -> EngineConfig:
        fields = self.fields | {"node_rank": node, "headless": node > 0} | fields
        return EngineConfig(parallel_config=ParallelConfig(**fields))

    def begin(self, number: int = 1, **fields: Any) -> WorkersNode:
        """Starts a machine with workers."""
        config = self.config(number, **fields)
        parallel = config.parallel_config
        assert parallel.fleet_key is not None
        node = WorkersNode(config, read_fleet_key(parallel.fleet_key), number, parallel.nnodes)
        self._begin(node)
        return node

    def begin_all(self) -> WorkersMachine:
        """Starts the second machine with workers of all engines."""
        machine = WorkersMachine(self.config(1), read_fleet_key(self.fields["fleet_key"]))
        self._begin(machine)
        return machine

    def _begin(self, node: WorkersNode | WorkersMachine) -> None:
        self.nodes.append(node)

        def run() -> None:
            try:
                node.run()
            except BaseException as e:
                self.errors.append(e)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def executor(self, engine: int = 0) -> MultiprocExecutor:
        return MultiprocExecutor(self.config(0, engine_index=engine))

    def end(self) -> None:
        for node in self.nodes:
            node.ask_end()
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    made = list[Machines]()

    def make(**sizes: Any) -> Machines:
        made.append(Machines(tmp_path, **sizes))
        return made[-1]

    yield make
    for each in made:
        each.end()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_of_another_machine_are_called_as_those_of_this_one(
    machines: Callable[..., Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_node, "SUCCESSOR_S", 0.2)
    both = machines(tensor_parallel_size=1, pipeline_parallel_size=2)
    node = both.begin()
    executor = both.executor()
    pids = executor.collective_rpc("get_pid")
    assert node.pids == pids[1:]
    assert executor.collective_rpc("get_numbers") == [[0, 1, 1], [1, 1, 1]], "each knows the workers of its machine"
    for _ in range(200):  # more than a ring has room for
        assert executor.collective_rpc("get_pid") == pids
    executor.initialize_from_config([KVCacheConfig(7, [], []), KVCacheConfig(8, [], [])])
    assert executor.collective_rpc("__getattribute__", args=("num_blocks",)) == [7, 8]
    assert executor.execute_model(step()) == ModelRunnerOutput(["r"], [[1]]), "the last stage answers"
    load = AdapterLoad(LoRARequest("a", 1, "/nowhere"), 0)
    assert executor.load_adapter(load).result(120) == AdapterInfo(1, 0, "same", 100 + 101, 4), "answered beside steps"
    executor.drop_adapter((1, 0))
    assert executor.collective_rpc("get_loaded") == [[], []]
    with pytest.raises(ModelLoadError, match=r"^/x does not fit$"):
        executor.collective_rpc("check_weights", args=("/x",))
    executor.check_health()
    executor.shutdown()
    both.join()
    assert not both.errors, "the server has ended, and so have its machines"
    assert all(map(is_gone, pids))


def test_hidden_states_pass_from_machine_to_machine(machines: Callable[..., Machines]) -> None:
    """Also between two that are not the executor's; a stage may have several workers."""
    three = machines(nnodes=3, pipeline_parallel_size=3, tensor_parallel_size=2)
    three.begin(2)
    three.begin(1)
    executor = three.executor()
    try:
        large = 300_000
        assert executor.collective_rpc("pass_on", args=(large,))[2:] == [large + 1] * 2 + [large + 2] * 2
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    "fault", ["kill 1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fail 0", "fail 1"))]
)
def test_a_fault_anywhere_ends_the_step_everywhere(fault: str, machines: Callable[..., Machines]) -> None:
    both = machines()
    node = both.begin()
    executor, failed = both.executor(), threading.Event()
    executor.register_failure_callback(failed.set)
    start = time.monotonic()
    if fault.startswith("kill"):
        with pytest.raises(
            ServerError, match=r"worker 1 on machine 1 was killed by SIGKILL|another worker of the step"
        ):
            executor.execute_model(step(fault))
        assert failed.wait(60)
        assert executor.worker_end is WorkerEnd.KILLED
    else:
        with pytest.raises(ModelLoadError, match=f"rank {fault[-1]} has a fault"):
            executor.execute_model(step(fault))
    assert time.monotonic() - start < 50, "no worker waits for its time limit"
    former = node.pids
    executor.shutdown()
    executor = both.executor()
    assert executor.execute_model(step()) == ModelRunnerOutput(["r"], [[0]]), "the next life has the same machine"
    assert node.pids != former
    executor.shutdown()


def test_each_engine_has_workers_on_every_machine(
    machines: Callable[..., Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of a worker is that of its own engine; the machine ends with the server."""
    monkeypatch.setattr(worker_node, "SUCCESSOR_S", 0.2)
    both = machines(data_parallel_size=2)
    machine = both.begin_all()
    executors = [both.executor(engine) for engine in range(2)]
    first, second = (list(node.pids) for node in machine.nodes)
    assert [executor.collective_rpc("get_pid")[1:] for executor in executors] == [first, second]
    with pytest.raises(ServerError, match=r"worker 1 on machine 1 was killed by SIGKILL|another worker of the step"):
        executors[0].execute_model(step("kill 1"))
    assert executors[1].execute_model(step()) == ModelRunnerOutput(["r"], [[0]])
    assert machine.nodes[1].pids == second
    for executor in executors:
        executor.shutdown()
    both.join()
    assert not both.errors


def test_the_workers_of_another_engine_are_refused(machines: Callable[..., Machines]) -> None:
    both = machines(data_parallel_size=2)
    table = worker_hub.MachineTable(both.config(0, engine_index=1), [1, 1])
    refusal = table.greet(b"a", make_hello(both))
    assert isinstance(refusal, WorkersRefusal)
    assert refusal.message == "other settings than the server's: engine (0, here 1)"


class Other:
    """Stands for the node of another engine, which serves for two looks, and whose server ends then."""

    is_final = True

    def __init__(self) -> None:
        self._left = [True, True]

    @property
    def is_serving(self) -> bool:
        return bool(self._left) and self._left.pop()


def test_a_machine_waits_for_an_engine_while_it_serves_another(
    machines: Callable[..., Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, ticks = machines(data_parallel_size=2), iter(range(0, 1000, 10))
    now = [next(ticks)]
    monkeypatch.setattr(worker_node, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(WorkersNode, "wait", lambda *_: now.__setitem__(0, next(ticks)))
    node = WorkersNode(both.config(1), secrets.token_bytes(32), 1, 2)
    node.others = [Other()]  # type: ignore[list-item]
    node.run()
    assert now == [30], "the server has ended 15 s after the other has served, which was at 10"


def test_the_error_of_one_engine_ends_the_machine(machines: Callable[..., Machines]) -> None:
    class Failing(WorkersNode):
        def run(self) -> None:
            raise ConfigError("refused")

    class Waiting(WorkersNode):
        def run(self) -> None:
            wait_for(lambda: self.is_asked)

    both = machines(data_parallel_size=2)
    machine = WorkersMachine(both.config(1), secrets.token_bytes(32))
    machine.nodes[0].__class__, machine.nodes[1].__class__ = Failing, Waiting
    with pytest.raises(ConfigError, match="refused"):
        machine.run()


@pytest.mark.slow  # a worker's death has the same way back
def test_a_machine_that_leaves_is_missed_and_comes_back(machines: Callable[..., Machines]) -> None:
    both = machines()
    both.begin()
    executor, failed = both.executor(), threading.Event()
    executor.register_failure_callback(failed.set)
    both.end()
    assert failed.wait(60)
    with pytest.raises(ServerError, match=r"worker 1 is gone: machine 1 \(.*\) was ended"):
        executor.check_health()
    executor.shutdown()
    waiting = threading.Timer(0.2, both.begin)
    waiting.start()
    executor = both.executor()
    waiting.join()
    assert executor.execute_model(step()) == ModelRunnerOutput(["r"], [[0]])
    executor.shutdown()


def test_the_end_of_a_connection_ends_both_sides(machines: Callable[..., Machines]) -> None:
    both = machines(tensor_parallel_size=1, pipeline_parallel_size=2, engine_link_timeout_s=1.0)
    node = both.begin()
    executor, failed = both.executor(), threading.Event()
    executor.register_failure_callback(failed.set)
    hub = executor._hub
    assert hub is not None
    former = node.pids
    hub._tell(1, Abort())
    hub.end()  # as if the core were gone
    wait_for(lambda: node.pids != former)
    assert all(map(is_gone, former))
    for worker in executor._workers_here.workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert failed.wait(60)
    executor._hub = None
    executor.shutdown()
    for remote in hub.workers:
        remote.end()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nnodes": 4, "tensor_parallel_size": 4}, "it was started with --nnodes 4, the server with 2"),
        ({"tensor_parallel_size": 4}, r"other settings than the server's: --tensor-parallel-size \(4, here 2\)"),
    ],
)
def test_a_machine_that_does_not_fit_is_refused_by_name(
    fields: dict[str, Any], message: str, machines: Callable[..., Machines], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = machines()
    node = both.begin(1, **fields)
    hub = worker_hub.WorkerHub(both.config(0), read_fleet_key(both.fields["fleet_key"]), [1, 1], lambda _: None)
    hub.start()
    wait_for(lambda: both.errors)
    assert isinstance(both.errors[0], ConfigError)
    with pytest.raises(ConfigError, match=f"refuses this machine: {message}"):
        raise both.errors[0]
    with pytest.raises(
        NodesMissingError, match=f"no workers of machine 1 of 2 came to .* within 0 s; machine 1 .*{message}"
    ):
        hub.wait(0)
    assert not node.pids
    hub.end()
    for worker in hub.workers:
        worker.end()


def make_hello(machines: Machines, **fields: Any) -> WorkersHello:
    hello = WorkersHello(PROTOCOL_VERSION, 1, 2, worker_hub.describe_workers(machines.config(1)), "host", b"7")
    return msgspec.structs.replace(hello, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"program": b"8"}, "machine 1 is here already: host; give another --node-rank"),
        ({"node": 2}, "--node-rank 2 is none of 1 to 1"),
        ({"protocol_version": 0}, "its protocol version is 0, here .*; run the same version of Quire"),
    ],
)
def test_a_number_is_given_once(fields: dict[str, Any], message: str, machines: Callable[..., Machines]) -> None:
    both = machines()
    table = worker_hub.MachineTable(both.config(0), [1, 1])
    assert isinstance(table.greet(b"a", make_hello(both)), WorkersWelcome)
    refusal = table.greet(b"b", make_hello(both, **fields))
    assert isinstance(refusal, WorkersRefusal)
    assert re.match(message, refusal.message)
    assert table.find(b"a") == 1, "the first one serves on"


def test_a_machine_that_connects_anew_has_lost_its_workers(machines: Callable[..., Machines]) -> None:
    """Its program must not end: the next life of the engine lets it in."""
    both = machines()
    table, hello = worker_hub.MachineTable(both.config(0), [1, 1]), make_hello(both)
    assert isinstance(table.greet(b"a", hello), WorkersWelcome)
    assert (table.greet(b"a", hello), table.find_former(b"a", hello)) == (None, None), "it has said so twice"
    assert table.find_former(b"b", hello) == 1
    assert table.find_former(b"b", make_hello(both, program=b"8")) is None, "another program"
    table.nodes[1].is_lost = True
    assert (table.greet(b"b", hello), table.find(b"b"), table.find_former(b"b", hello)) == (None, None, None)


def test_another_key_is_no_way_in(
    machines: Callable[..., Machines], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = machines()
    both.begin(1, fleet_key=write_key(tmp_path / "other"))
    hub = worker_hub.WorkerHub(both.config(0), read_fleet_key(both.fields["fleet_key"]), [1, 1], lambda _: None)
    hub.start()
    wait_for(lambda: "is it a server with the same --fleet-key?" in caplog.text)
    with pytest.raises(NodesMissingError, match="no workers of machine 1 of 2 came"):
        hub.wait(0)
    hub.end()
    for worker in hub.workers:
        worker.end()


def test_machines_that_compute_other_bits_are_named() -> None:
    executor = object.__new__(MultiprocExecutor)
    executor._check_numerics(["avx512"] * 3)
    with pytest.raises(
        ConfigError, match=r"worker 0 has avx512, worker 2, on another machine, avx2; use machines with"
    ):
        executor._check_numerics(["avx512", "avx512", "avx2"])


def test_an_address_that_is_in_use_is_named(machines: Callable[..., Machines]) -> None:
    both = machines()
    with (
        socket.create_server(("127.0.0.1", both.fields["master_port"])),
        pytest.raises(ConfigError, match="cannot be listened on: Address already in use"),
    ):
        worker_hub.WorkerHub(both.config(0), secrets.token_bytes(32), [1, 1], lambda _: None)


def test_a_free_port_is_kept_from_when_it_was_found(machines: Callable[..., Machines]) -> None:
    """Machines that Ray starts are given the port; no other program gets it in between."""
    key, own = secrets.token_bytes(32), machines().config(0)
    hub = worker_hub.WorkerHub(own, key, [1, 1], lambda _: None, host="127.0.0.1")
    port = hub.config.parallel_config.master_port
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    hub.start()
    node = SecureEnd(f"tcp://127.0.0.1:{port}", key, 5.0, bind=False, identity=b"node")
    hello = WorkersHello(PROTOCOL_VERSION, 1, 2, worker_hub.describe_workers(own), "host", b"7")
    node.socket.send(msgspec.msgpack.encode(hello))
    hub.wait()
    welcome: Any = TO_NODE.decode(node.socket.recv_multipart()[0])
    assert decode_config(welcome.engine_config).parallel_config.master_port == port
    hub.end()
    node.close()
    for worker in hub.workers:
        worker.end()
