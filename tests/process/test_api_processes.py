"""`quire serve --api-server-count N`: several processes in front of one core, and what the death of each costs."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.testing.metrics_audit import MetricsAudit, read_exposition

from .api_clients import TIME_LIMIT_S, Client, Stream, client_of, clients_of_each, closing_clients, stopped, wait_until
from .serving import SRC, ServerProcess, environment, serve_command, serving

KEY = "secret"
FLAGS = ("--api-key", KEY, "--enable-admin", "--admin-port", "0", "--sse-keep-alive-interval", "0.2")
"""The headers of a stream that waits come with the first comment line."""


@pytest.fixture(scope="module")
def pair() -> Iterator[ServerProcess]:
    """Two API processes in front of a fake model of 20 ms a step, which a request named "poison" ends. A test leaves it
    as it was, but for pids; the last one ends it."""
    env = {"QUIRE_FAILPOINTS": "core.step.execute=exit(3),key=poison"}
    flags = ("--api-server-count", "2", "--shutdown-timeout", "120", *FLAGS)
    with serving(*flags, executor="Patient", env=env) as running:
        yield running


@pytest.fixture(scope="module")
def limited() -> Iterator[ServerProcess]:
    """A server with limits. The last of its tests ends it."""
    limits = "--max-requests-per-key", "3", "--max-num-reserved-tokens", "3900"
    with serving("--api-server-count", "2", "--api-key", KEY, *limits, executor="Patient") as running:
        yield running


@pytest.fixture(autouse=True)
def no_client_is_left() -> Iterator[None]:
    with closing_clients():
        yield


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_blocks(client: Client) -> bool:
    """Returns True if no request holds a block of the cache."""
    cache = client.ask("GET", "/debug/state")[1]["kv_cache"]
    return bool(cache["free"] == cache["total"] - 1)


def wait_whole(server: ServerProcess, core: int, num: int = 2) -> None:
    """Waits until all processes serve. The core must be the one it was."""
    wait_until(lambda: len(server.api_pids()) == num)
    for pid in server.api_pids():
        client = client_of(server, pid, KEY)
        wait_until(lambda asked=client: asked.ask("GET", "/health/ready")[0] == 200)  # type: ignore[misc]
    assert server.core_pid() == core


def test_every_request_is_answered_as_by_one_process(pair: ServerProcess) -> None:
    check_answers(pair, 2)


def check_answers(server: ServerProcess, num_processes: int) -> None:
    """Reads streams of all processes at once, and looks whether anything is left of them."""
    assert len(server.api_pids()) == num_processes
    clients = list(clients_of_each(server, KEY).values())
    streams = [Stream(Client(server.url, KEY), [40 + number, 50], 5 + number % 40, n=1) for number in range(30)] + [
        Stream(client, [90 + index, 51], 40) for index, client in enumerate(clients)
    ]
    with server.pace.hurried():
        for stream in streams:
            assert stream.read() == stream.expected
    names = {client.ask("GET", "/v1/models")[1]["data"][0]["created"] for client in clients}
    assert len(names) == 1
    for client in clients:  # a process has sent the last of an answer before it counts it as ended
        wait_until(lambda asked=client: asked.ask("GET", "/load")[1] == {"server_load": 0})  # type: ignore[misc]
    assert free_blocks(clients[0])


def test_the_death_of_one_process_costs_its_own_streams_only(pair: ServerProcess) -> None:
    """And the responses that it has stored, which are said to be gone. What it has counted stays in the metrics of
    the server, which every process shows."""
    victim, other = pair.api_pids()
    core, ledger = pair.core_pid(), Ledger(pair)
    for number, pid in enumerate((victim, other)):
        stream = Stream(client_of(pair, pid, KEY), [52 + number], 7)
        assert stream.read() == stream.expected
    total = ledger.count_tokens(victim)
    assert ledger.count_tokens(other) == total
    _, stored = client_of(pair, victim, KEY).ask("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 2})
    path = f"/v1/responses/{stored['id']}"
    theirs = [Stream(client_of(pair, victim, KEY), [60 + i], 1000) for i in range(3)]
    ours = [Stream(client_of(pair, other, KEY), [70 + i], 1000) for i in range(3)]
    for stream in (*theirs, *ours):
        stream.read(2)
    observer = client_of(pair, other, KEY)
    assert observer.ask("GET", "/load")[1] == {"server_load": 6}
    assert observer.ask("GET", path) == (200, stored)
    os.kill(victim, signal.SIGKILL)
    for stream in theirs:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            stream.read()
        assert stream.tokens == stream.expected[: len(stream.tokens)]
    with pair.pace.hurried():
        for stream in ours:
            assert stream.read() == stream.expected
    wait_until(lambda: observer.ask("GET", "/load")[1] == {"server_load": 0})
    wait_until(lambda: free_blocks(observer))
    wait_until(lambda: observer.ask("GET", path)[0] == 404)
    wait_whole(pair, core)
    (again,) = set(pair.api_pids()) - {other}
    assert again != victim
    since = ledger.count_tokens(other)
    assert since >= total + sum(len(stream.tokens) for stream in ours), "what the dead one had counted is lost"
    assert ledger.count_tokens(again) == since
    late = Stream(client_of(pair, again, KEY), [80], 30)
    assert late.read() == late.expected
    assert ledger.count_tokens(other) == since + 30


class Ledger:
    """The metrics of a server, checked at every look."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._audit = server, MetricsAudit(one_clock=False)

    def count_tokens(self, pid: int) -> float:
        """Returns how many tokens the server has generated, as process `pid` shows it."""
        text = client_of(self._server, pid, KEY).ask("GET", "/metrics")[1]
        exposition = read_exposition(text)
        # A process that was started again has the number of the one before it, and has used less time than that.
        exposition.families = [f for f in exposition.families if not f.name.startswith(("process_", "python_"))]
        self._audit.check(exposition)
        (total,) = re.findall(r"(?m)^vllm:generation_tokens_total\{.*\} (\S+)$", text)
        return float(total)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_whose_processes_end_again_and_again_serves_on(pair: ServerProcess, signum: int) -> None:
    """One is killed or asked to end alone; another one follows it, and the others stay."""
    core = pair.core_pid()
    victim, other = pair.api_pids()
    stream = Stream(client_of(pair, other, KEY), [90], 1000)
    os.kill(victim, signum)
    with pair.pace.hurried():
        assert stream.read() == stream.expected
    wait_until(lambda: victim not in pair.api_pids())
    wait_whole(pair, core)
    assert other in pair.api_pids()


def test_streams_of_all_processes_survive_the_death_of_the_core(pair: ServerProcess) -> None:
    core = pair.core_pid()
    streams = [
        Stream(client_of(pair, pid, KEY), [100 + 10 * index + i], 1000)
        for index, pid in enumerate(pair.api_pids())
        for i in range(3)
    ]
    for stream in streams:
        stream.read(3)
    os.kill(core, signal.SIGKILL)
    with pair.pace.hurried():
        for stream in streams:
            assert stream.read() == stream.expected
    assert pair.core_pid() != core
    wait_until(lambda: all(c.ask("GET", "/health/ready")[0] == 200 for c in clients_of_each(pair, KEY).values()))


def test_limits_hold_for_all_processes_together(limited: ServerProcess) -> None:
    first, second = limited.api_pids()
    running = [Stream(client_of(limited, pid, KEY), [50], 1200) for pid in (first, second, first)]
    assert [stream.status for stream in running] == [200] * 3
    for pid in (first, second):
        status, error = client_of(limited, pid, KEY).ask("POST", "/v1/completions", {"prompt": [1], "max_tokens": 1})
        assert status == 429, error
        assert "3 requests of this key are under way" in error["error"]["message"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: client_of(limited, second, KEY).ask("GET", "/load")[1] == {"server_load": 1})
    status, error = client_of(limited, second, KEY).ask(
        "POST", "/v1/completions", {"prompt": [1], "max_tokens": 1400, "n": 2, "temperature": 1}
    )
    assert status == 503, "what the dead one had is free again, what the living one has is not"
    assert "1201 tokens of prompts and outputs" in error["error"]["message"]
    with limited.pace.hurried():
        assert running[1].read() == running[1].expected


LONG = {"prompt": [50], "max_tokens": 2000, "ignore_eos": True, "stream": True}


def test_no_process_outlives_the_server(limited: ServerProcess) -> None:
    """However it ends, and also while one of them is stopped."""
    wait_until(lambda: len(limited.api_pids()) == 2)
    everyone = [limited.core_pid(), *limited.api_pids()]
    for client in clients_of_each(limited, KEY).values():
        begun = client.begin("POST", "/v1/completions", LONG | {"max_tokens": 1900})
        assert begun.status == 200
        begun.readline()
    with stopped(everyone[1:2]):
        limited.process.kill()
        limited.process.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in everyone))


@pytest.mark.slow
def test_no_process_outlives_a_server_that_is_asked_to_end() -> None:
    with serving("--api-server-count", "2", executor="Patient") as server:
        everyone = [server.core_pid(), *server.api_pids()]
        for client in clients_of_each(server).values():
            client.begin("POST", "/v1/completions", LONG).readline()
        server.process.terminate()
        server.process.wait(TIME_LIMIT_S)
        assert not any(is_alive(pid) for pid in everyone)


def test_stored_responses_are_found_by_every_process(pair: ServerProcess) -> None:
    maker, other = clients_of_each(pair, KEY).values()
    stranger = Client(pair.url)
    body = {"input": "Hi", "max_output_tokens": 4}
    for_ever = body | {"background": True, "stream": True, "max_output_tokens": 1500, "ignore_eos": True}
    status, made = maker.ask("POST", "/v1/responses", body)
    assert status == 200, made
    path = f"/v1/responses/{made['id']}"
    assert other.ask("GET", path) == (200, made)
    assert stranger.ask("GET", path)[0] == 401
    status, follower = other.ask("POST", "/v1/responses", body | {"previous_response_id": made["id"]})
    assert status == 200, follower
    assert follower["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    assert other.ask("DELETE", path) == (200, {"id": made["id"], "object": "response", "deleted": True})
    for client in (maker, other):
        status, error = client.ask("GET", path)
        assert (status, error["error"]["param"]) == (404, "response_id")

    begun = maker.begin("POST", "/v1/responses", for_ever)
    assert begun.readline().startswith(b"event: response.created")
    data = begun.readline().decode()
    response_id = data.split('"id":"')[1].split('"')[0]
    following = other.begin("GET", f"/v1/responses/{response_id}?stream=true&starting_after=0")
    assert following.readline().startswith(b"event: response.queued")
    canceller = client_of(pair, pair.api_pids()[1], KEY)
    status, cancelled = canceller.ask("POST", f"/v1/responses/{response_id}/cancel")
    assert (status, cancelled["status"]) == (200, "cancelled")
    lines = following.read().decode().splitlines()
    numbers = [int(line.split('"sequence_number":')[1].split(",")[0].rstrip("}")) for line in lines if "data:" in line]
    assert numbers == list(range(1, len(numbers) + 1)), "each event once, in order, from the first that was asked for"


def test_operators_reach_every_request_from_every_process(pair: ServerProcess) -> None:
    """Seen in the state, aborted by id, counted as load."""
    first, second = pair.api_pids()
    stream = Stream(client_of(pair, first, KEY), [50] * 30, 1000, request_id="watched")
    stream.read(2)
    for pid in (first, second):
        admin = client_of(pair, pid, KEY, is_admin=True)
        (request,) = admin.ask("GET", "/debug/state")[1]["requests"]
        assert request["id"] == "cmpl-watched"
        assert request["first_token_time"] is not None
        assert client_of(pair, pid, KEY).ask("GET", "/load")[1] == {"server_load": 1}
    admin = client_of(pair, second, KEY, is_admin=True)
    before = [ended["number"] for ended in admin.ask("GET", "/debug/state")[1]["ended"]]
    assert before == sorted(before)
    assert admin.ask("POST", "/abort_requests", {"request_ids": ["cmpl-watched"]})[0] == 200
    stream.read()
    assert len(stream.tokens) < 1000
    after: list[dict[str, Any]] = []
    while not after:
        after = admin.ask("GET", f"/debug/state?after={before[-1] if before else 0}")[1]["ended"]
    assert [ended["id"] for ended in after] == ["cmpl-watched"]


def test_a_pause_is_of_the_whole_server_and_survives_the_core_and_the_process(pair: ServerProcess) -> None:
    def is_paused(pid: int) -> bool:
        return bool(client_of(pair, pid, KEY, is_admin=True).ask("GET", "/is_paused")[1]["is_paused"])

    victim, other = pair.api_pids()
    assert client_of(pair, victim, KEY, is_admin=True).ask("POST", "/pause?mode=keep")[0] == 200
    assert is_paused(victim)
    assert is_paused(other)
    os.kill(victim, signal.SIGKILL)
    core = pair.core_pid()
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: len(pair.api_pids()) == 2 and pair._children("quire.engine.proc") not in ([], [core]))
    wait_whole(pair, pair.core_pid())
    assert all(is_paused(pid) for pid in pair.api_pids()), "whoever restored it was not the one who was asked"
    stream = Stream(client_of(pair, other, KEY), [50], 5)
    assert client_of(pair, other, KEY, is_admin=True).ask("POST", "/resume")[0] == 200
    assert stream.read() == stream.expected


def noted(notes: Path) -> set[tuple[int, str]]:
    """Returns the notes of the stat loggers: the process of each, and which statistics it received."""
    return {(int(pid), of) for pid, of in map(str.split, notes.read_text().splitlines())}


def test_a_second_signal_ends_all_streams_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server listens on a Unix socket, and its processes have a stat logger: the parent's receives the scheduler's
    statistics, that of an API process its own requests'."""
    monkeypatch.setenv("NOTED_STATS", str(notes := tmp_path / "notes"))
    path = tmp_path / "quire.sock"
    flags = "--uds", str(path), "--stat-loggers", "tests.process.stat_loggers:NotedStats", "--shutdown-timeout", "600"
    with serving("--api-server-count", "2", *flags, executor="Patient") as server:
        told = {(server.process.pid, "scheduler"), *((pid, "requests") for pid in server.api_pids())}
        clients = clients_of_each(server)
        with server.pace.hurried():
            for client in clients.values():
                stream = Stream(client, [50], 9)
                assert stream.read() == stream.expected
        wait_until(lambda: told <= noted(notes))
        begun = [c.begin("POST", "/v1/completions", LONG) for c in clients.values()]
        for response in begun:
            response.readline()
        late = clients_of_each(server)
        server.process.send_signal(signal.SIGTERM)
        for client in late.values():
            wait_until(lambda asked=client: asked.ask("GET", "/health/ready")[0] == 503)  # type: ignore[misc]
        server.process.send_signal(signal.SIGINT)
        for response in begun:
            *_, error, end = (line for line in response.read().decode().splitlines() if line)
            assert '"code":503' in error
            assert end == "data: [DONE]"
        assert server.process.wait(TIME_LIMIT_S) == 0
    assert told == noted(notes)
    assert not path.exists()


@pytest.mark.parametrize(
    ("order", "signum"),
    [
        ("core first", signal.SIGINT),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("server first", signal.SIGINT),  # of one API process in test_server.py
                ("core first", signal.SIGTERM),
                ("API processes first", signal.SIGTERM),  # in the default suite without time, below
                ("server first", signal.SIGTERM),
                ("API processes first", signal.SIGINT),
            )
        ),
    ],
)
def test_a_signal_to_every_process_starts_no_other(order: str, signum: int) -> None:
    """systemd and a container's stop send it like this. Requests under way have their time all the same."""
    with serving("--api-server-count", "2", "--shutdown-timeout", "120", executor="Patient") as server:
        pids = signal_order(server, order)
        streams = [Stream(client, [50 + i], 1000) for i, client in enumerate(clients_of_each(server).values())]
        for stream in streams:
            stream.read(1)
        for pid in pids:
            os.kill(pid, signum)
        server.pace.hurry()
        for stream in streams:
            assert stream.read() == stream.expected
        assert server.process.wait(TIME_LIMIT_S) == 0
        check_log_of_the_end(server)


@pytest.mark.parametrize(
    "order",
    [
        "API processes first",
        pytest.param("server first", marks=pytest.mark.slow),
        pytest.param("core first", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_every_process_of_a_server_without_time(order: str) -> None:
    """Idle processes end in a moment, those with streams send their clients an error; none is started again."""
    with serving("--api-server-count", "2", executor="Patient") as server:
        pids = signal_order(server, order)
        begun = client_of(server, server.api_pids()[0]).begin("POST", "/v1/completions", LONG)
        begun.readline()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        *_, error, end = (line for line in begun.read().decode().splitlines() if line)
        assert '"code":503' in error
        assert end == "data: [DONE]"
        assert server.process.wait(TIME_LIMIT_S) == 0
        check_log_of_the_end(server)


def signal_order(server: ServerProcess, first: str) -> list[int]:
    """Every process of a server, in some order."""
    parts = {"server": [server.process.pid], "core": [server.core_pid()], "API": server.api_pids()}
    begin = parts.pop(first.split()[0])
    return [*begin, *(pid for pids in parts.values() for pid in pids)]


def check_log_of_the_end(server: ServerProcess) -> None:
    """Nothing was started again, and nothing called an error."""
    log = server.program.read_log()
    assert "starting engine core" not in log, log
    assert "starting API process" not in log, log
    assert " ERROR " not in log, log


def test_a_poison_costs_two_cores_and_fails_alone(pair: ServerProcess) -> None:
    """However many processes have requests beside it."""
    check_poison(pair)


@pytest.mark.slow
def test_three_processes_answer_as_one_and_a_poison_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FAILPOINTS", "core.step.execute=exit(3),key=poison")
    with serving("--api-server-count", "3", *FLAGS, executor="Patient") as server:
        check_answers(server, 3)
        check_poison(server)


def check_poison(server: ServerProcess) -> None:
    clients = list(clients_of_each(server, KEY).values())
    victim = client_of(server, server.api_pids()[1], KEY)
    streams = [Stream(Client(server.url, KEY), [40 + i], 1000) for i in range(9)]
    streams += [Stream(client, [80 + i], 1000) for i, client in enumerate(clients)]
    for stream in streams:
        stream.read(1)
    num_restarts = count(victim, "quire_engine_restarts_total")
    status, error = victim.ask("POST", "/v1/completions", {"prompt": [9], "request_id": "poison"})
    assert status == 500, error
    with server.pace.hurried():
        for stream in streams:
            assert stream.read() == stream.expected
        last = Stream(victim, [99], 5)
        assert last.read() == last.expected
    assert count(victim, "quire_requests_poisoned_total") == 1
    assert count(victim, "quire_engine_restarts_total") == num_restarts + 2


def count(client: Client, name: str) -> float:
    """Returns the sum of a counter's samples."""
    text = client.ask("GET", "/metrics")[1]
    return sum(map(float, re.findall(rf"(?m)^{name}\{{.*\}} (\S+)$", text)))


def test_a_process_that_stands_still_delays_a_restart_by_seconds_only(pair: ServerProcess) -> None:
    """A stopped process does not answer when the core dies; the others go on without it, and it goes on when it can."""
    still, other = pair.api_pids()
    streams = [Stream(client_of(pair, pid, KEY), [50], 1000) for pid in (still, other)]
    for stream in streams:
        stream.read(2)
    with pair.pace.hurried():
        with stopped([still]):
            os.kill(pair.core_pid(), signal.SIGKILL)
            assert streams[1].read() == streams[1].expected
        assert streams[0].read() == streams[0].expected


def test_sigterm_gives_the_streams_of_all_processes_their_time(pair: ServerProcess) -> None:
    """The last test of this server."""
    core, processes = pair.core_pid(), pair.api_pids()
    streams = [Stream(client, [50 + i], 1000) for i, client in enumerate(clients_of_each(pair, KEY).values())]
    for stream in streams:
        stream.read(1)
    late = clients_of_each(pair, KEY)
    pair.process.send_signal(signal.SIGTERM)
    for client in late.values():
        wait_until(lambda asked=client: asked.ask("GET", "/health/ready")[0] == 503)  # type: ignore[misc]
        assert client.ask("POST", "/v1/completions", {"prompt": [1]})[0] == 503
    with pair.pace.hurried():
        for stream in streams:
            assert stream.read() == stream.expected
    assert pair.process.wait(TIME_LIMIT_S) == 0
    assert not any(is_alive(pid) for pid in (core, *processes))


def test_what_keeps_a_process_from_serving_is_said_in_words() -> None:
    command = serve_command("--port", "0", "--api-server-count", "2", "--middleware", "json.loads")
    command += ["--distributed-executor-backend", "tests.process.executors:Quick"]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, cwd=SRC.parent, timeout=TIME_LIMIT_S
    )
    assert ended.returncode == 2
    assert "quire: error: --middleware json.loads is neither a class nor an async function" in ended.stderr
    assert "Traceback" not in ended.stderr
