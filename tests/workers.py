"""Shares the files of tests among processes forked from one that has collected them (`--workers 4`).

All tests are imported and collected once, however many workers there are. A file is run by one worker, so that its
fixtures are made once; a worker that has no file left takes the next one, long files first. Tests that start servers
wait more than they compute: two workers begin with them, and the others take files that start none. So two processors
are busy to the end, and never are there servers of three tests at once.

The process that has collected gives out files and prints reports. A worker that dies fails the test that it ran, and
another one goes on with the rest of its file.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest._io import TerminalWriter

from tests import times

SERVERS = "tests/process"
"""Folder whose tests start processes that compute."""
NUM_SERVER_WORKERS = 2
"""Number of workers whose tests may start servers."""


SHOWN_S = 0.005
"""`--durations` shows no shorter ones."""
_DIRECTORY = "worker-"


def shared_directory(factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the run, which its workers share."""
    directory = factory.getbasetemp()
    return directory.parent if directory.name.startswith(_DIRECTORY) else directory


def starts_servers(file: str) -> bool:
    """Returns whether the tests of a file start processes that compute."""
    return PurePosixPath(file).is_relative_to(SERVERS)


def next_file(files: list[str], worker: int) -> str | None:
    """Returns the first of `files` that worker number `worker` may take; None if there is none."""
    return next((file for file in files if worker < NUM_SERVER_WORKERS or not starts_servers(file)), None)


ONE_FILE = ("tests/architecture",)
"""Folders whose files go to one worker, because they share what takes long to make."""


def unit_of(item: pytest.Item) -> str:
    """Returns the file of a test from the root of the project, or its folder if that is in ONE_FILE."""
    file = times.file_of(item)
    return next((folder for folder in ONE_FILE if file.startswith(f"{folder}/")), file)


def by_files(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Returns file -> its tests: first files that start servers; of each kind first those that took the longest when
    times were stored."""
    stored, files = times.stored_seconds(), dict[str, list[pytest.Item]]()
    for item in items:
        files.setdefault(unit_of(item), []).append(item)
    seconds = {
        file: sum(stored.get(one, 1.0) for one in {times.file_of(item) for item in tests})
        for file, tests in files.items()
    }
    return {file: files[file] for file in sorted(files, key=lambda f: (not starts_servers(f), -seconds[f], f))}


def coverage_controller(config: pytest.Config) -> Any:
    """Returns what counts branches; None: nothing does."""
    plugin = config.pluginmanager.get_plugin("_cov")
    return plugin.cov_controller if plugin is not None else None


class Workers:
    """The plugin of the process that has collected. Each worker is a process id and a pipe."""

    def __init__(self, config: pytest.Config, num_workers: int) -> None:
        self._config, self._num_workers = config, num_workers
        self._files: dict[str, list[pytest.Item]] = {}
        """Files that no worker has taken."""
        self._pids: dict[Connection, int] = {}
        self._numbers: dict[Connection, int] = {}
        self._at: dict[Connection, list[pytest.Item]] = {}
        """The tests of the worker's file that it has not reported."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs all tests; where nothing is to be run, leaves the answer to pytest."""
        if session.testsfailed or self._config.option.collectonly or not session.items:
            return None
        self._files = by_files(session.items)
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # of which each worker has a part
        assert threading.active_count() == 1, "a process with threads cannot be forked"
        controller = coverage_controller(self._config)
        if controller is not None:
            controller.pause()  # until a test of a part with a floor begins
            controller.cov._warn_unimported_source = controller.cov._warn_preimported_source = False
        gc.collect()
        gc.freeze()  # what is imported is never garbage, and walking it in each collection takes long
        with self._ending_workers():
            for number in range(self._num_workers):
                self._start(session, number, [])
            while self._pids:  # the first worker takes files to the last one
                for pipe in wait(list(self._pids), timeout=60):
                    assert isinstance(pipe, Connection)
                    self._receive(session, pipe)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        return True

    @contextlib.contextmanager
    def _ending_workers(self) -> Iterator[None]:
        """Ends the workers that are left where the run ends early."""
        try:
            yield
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)

    def _start(self, session: pytest.Session, number: int, items: list[pytest.Item]) -> None:
        """Forks a worker, which begins with these tests."""
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for other in (ours, *self._pids):
                other.close()
            _work(session, number, theirs, by_files(session.items), items)
        theirs.close()
        self._pids[ours], self._numbers[ours], self._at[ours] = pid, number, list(items)

    def _receive(self, session: pytest.Session, pipe: Connection) -> None:
        message = None
        with contextlib.suppress(EOFError, ConnectionResetError):
            message = pipe.recv()
        if message is None:
            self._bury(session, pipe)
            return
        kind, value = message
        if kind == "file":
            file = next_file(list(self._files), self._numbers[pipe])
            self._at[pipe] = self._files.pop(file) if file is not None else []
            pipe.send(file)
        elif kind == "item":
            self._at[pipe].pop(0)
            for data in value:
                self._report(self._config.hook.pytest_report_from_serializable(config=self._config, data=data))
        else:
            self._config.pluginmanager.get_plugin("times").add(value)

    def _report(self, report: pytest.TestReport) -> None:
        self._config.hook.pytest_runtest_logreport(report=report)

    def _bury(self, session: pytest.Session, pipe: Connection) -> None:
        """Notes the end of a worker. Where it had tests left, fails the first and starts a worker with the rest."""
        _, status = os.waitpid(self._pids.pop(pipe), 0)
        number, left = self._numbers.pop(pipe), self._at.pop(pipe)
        code = os.waitstatus_to_exitcode(status)
        pipe.close()
        if left:
            item, *rest = left
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            message = f"worker {number} {how} while it ran this test"
            self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call"))
            self._start(session, number, rest)
        elif code:
            raise session.Failed(f"worker {number} exited with code {code} after its last test")


# -- in a worker -------------------------------------------------------------------------------------------------------


class _Reports:
    """Collects the reports of a test, but those of a set-up or an end in which nothing came to pass."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.data: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed and not report.sections and report.duration < SHOWN_S:
            return
        self.data.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def take(self) -> list[Any]:
        data, self.data = self.data, []
        return data


def _work(
    session: pytest.Session,
    number: int,
    pipe: Connection,
    files: dict[str, list[pytest.Item]],
    items: list[pytest.Item],
) -> NoReturn:
    """Runs tests until there are none, and ends the process."""
    code = 1
    try:
        reports = _prepare(session.config, number)
        while items or (file := _ask(pipe)) is not None:
            tests = items or files[file]
            items = []
            if not gc.get_freeze_count():  # a test has thawed the heap
                gc.freeze()
            # The session in the place of the test after a file's last: its fixtures stay, and no others do.
            for item, following in zip(tests, (*tests[1:], session), strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                pipe.send(("item", reports.take()))
        session._setupstate.teardown_exact(None)
        controller = coverage_controller(session.config)
        if controller is not None:
            controller.pause()
            controller.cov.save()
        pipe.send(("times", session.config.pluginmanager.get_plugin("times").seconds))
        code = 0
    except BaseException as e:  # a process that was forked must not go on as its parent
        if not isinstance(e, KeyboardInterrupt):
            traceback.print_exc()
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ask(pipe: Connection) -> str | None:
    """Returns the next file; None if there is none."""
    pipe.send(("file", None))
    file: str | None = pipe.recv()
    return file


def _prepare(config: pytest.Config, number: int) -> _Reports:
    """Takes what would be shared with the other workers apart: the terminal, what was captured, the directory."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(SimpleNamespace(_tw=TerminalWriter(sys.stderr)), "terminalreporter")
    capture = plugins.get_plugin("capturemanager")._global_capturing
    if capture is not None and capture.out is not None:  # not with -s
        for stream in (capture.out, capture.err):
            with TemporaryFile() as own:
                os.dup2(own.fileno(), stream.tmpfile.fileno(), inheritable=False)
        with open(os.devnull, "w") as nowhere:  # gets what a test prints around its capture
            for fd in (capture.out.targetfd_save, sys.__stdout__.fileno()):
                os.dup2(nowhere.fileno(), fd)
    directories = config._tmp_path_factory  # type: ignore[attr-defined]
    directories._basetemp = directories.getbasetemp() / f"{_DIRECTORY}{number}-{os.getpid()}"
    directories._basetemp.mkdir(mode=0o700)
    reports = _Reports(config)
    plugins.register(reports)
    return reports
