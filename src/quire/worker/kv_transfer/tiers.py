"""Asks block servers (`quire kv-store serve`) which blocks of a request they have, and orders them to drop records.

A request waits for the answer, so it is bounded: a server has ASK_S, whatever it does. One that fails is not asked
again before a question of its own thread, which no request waits for, was answered; that is tried after rests that
become longer (`kv_store/rests.py`). An order to drop records is given to a server that rests, too: it has DROP_S.
For KV cache events a thread follows what a server holds.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from quire.kv_store.peer.client import PeerClient, PeerError, retry_stale
from quire.kv_store.rests import Rests
from quire.logger import init_logger
from quire.wire.kv_peers import DROP_S, DROPPED, NO_CURSOR, RecordName, pack_bits

logger = init_logger(__name__)

ASK_S = 0.25
"""Time in which a block server must say what it has."""

WATCH_S = 1.0
"""Time between two questions for changes."""
END_S = 1.0
"""Longest wait for the thread of a watcher to end."""
FORGET_S = 30.0
"""Time without an answer after which a server is taken to hold nothing."""
Answers = dict[str, bytes]
"""Bits (`pack_bits`) of what a server has, by its address."""


Watched = Callable[[Sequence[RecordName], Sequence[RecordName], bool], None]
"""Takes blocks that a server holds from now on, and that it does not hold any more; True: also none of those before."""


Answer = TypeVar("Answer")


class _Question(Generic[Answer]):
    """A question to all servers. The answers are reported once: when all have answered, or its time is over."""

    def __init__(
        self,
        fingerprint: bytes,
        num_servers: int,
        report: Callable[[dict[str, Answer]], None],
        keys: Sequence[RecordName] = (),
    ) -> None:
        self.fingerprint, self.keys = fingerprint, keys
        self.began = time.monotonic()
        self.is_answered = threading.Event()
        self._answers: dict[str, Answer] = {}
        self._num_left, self._report = num_servers, report
        self._lock = threading.Lock()

    def answer(self, address: str, answer: Answer | None) -> None:
        """Notes the answer of a server; None: it has none."""
        with self._lock:
            self._num_left -= 1
            if answer is not None:
                self._answers[address] = answer
            if self._num_left:
                return
        self.end()

    def end(self) -> bool:
        """Reports the answers that are there, once. Returns whether this was the time."""
        with self._lock:
            if self.is_answered.is_set():
                return False
            self.is_answered.set()
            answers = dict(self._answers)
        self._report(answers)
        return True


class _Server:
    """One block server, and the thread that asks it."""

    def __init__(self, address: str, client: PeerClient) -> None:
        self.address, self._client = address, client
        self._rests = Rests()
        self._is_dead = False
        """True from a fault until a question that no request waits for was answered."""
        self._answered_ts = 0.0
        self._fingerprint = b""
        """The last one that was asked about."""
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._questions: queue.SimpleQueue[_Question[bytes] | None] = queue.SimpleQueue()
        """None makes the thread look at what has changed."""
        self._thread = threading.Thread(target=self._run, name="kv-tier-ask", daemon=True)
        self._thread.start()

    def ask(self, question: _Question[bytes]) -> None:
        """Passes a question on. A dead server has no blocks."""
        if self._is_dead:
            question.answer(self.address, None)
        else:
            self._questions.put(question)

    def note_late(self, question: _Question[bytes]) -> None:
        """Notes that a question has ended. Without any answer since it began the server is dead."""
        if not self._is_dead and self._answered_ts < question.began:
            self._note_fault(f"it has not answered for {ASK_S:.2f} s")

    def stop(self, deadline: float) -> bool:
        """Ends the thread. Returns False if it hangs."""
        self._is_stopped.set()
        self._questions.put(None)
        self._thread.join(max(0.1, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def drop(self, order: _Question[str]) -> None:
        """Orders the server to drop records, and notes the outcome, on a thread of the order's own."""
        try:
            outcome = retry_stale(partial(self._drop_once, order))
        except PeerError as e:
            outcome = str(e)
        except Exception:
            logger.exception("records are not dropped at %s", self.address)
            outcome = "an error of this engine"
        order.answer(self.address, outcome)

    def _drop_once(self, order: _Question[str]) -> str:
        """Returns DROPPED, or why nothing is dropped. Raises PeerError."""
        is_stopped, left = self._is_stopped.is_set, order.began + DROP_S - time.monotonic()
        with self._client.connect(self.address, order.fingerprint, is_cancelled=is_stopped, timeout_s=left) as peer:
            if not peer.takes_records:
                return "it is served without --allow-writes"
            outcome = peer.drop(order.began + DROP_S - time.monotonic())
        return outcome if outcome == DROPPED else f"its disk fails ({outcome})"

    def _note_fault(self, why: object) -> None:
        with self._lock:
            is_first, self._is_dead = not self._is_dead, True
            seconds = self._rests.note_fault(self.address, time.monotonic())
        if is_first:
            self._questions.put(None)  # the thread sleeps until the next question
            logger.warning("the block server %s is not asked for %.0f s: %s", self.address, seconds, why)

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            with self._lock:
                left = self._rests.seconds_left(self.address, time.monotonic()) if self._is_dead else None
            try:
                question = self._questions.get(timeout=left)
            except queue.Empty:
                self._revive()
                continue
            if question is not None:
                self._answer(question)

    def _answer(self, question: _Question[bytes]) -> None:
        bits = None
        if not self._is_dead and not question.is_answered.is_set():
            self._fingerprint = question.fingerprint
            try:
                bits = pack_bits(retry_stale(partial(self._have, question.keys, question.began + ASK_S)))
            except Exception as e:  # a request waits for the answer
                self._note_fault(e)
            else:
                with self._lock:
                    self._answered_ts = time.monotonic()
                    self._rests.note_good(self.address)
        question.answer(self.address, bits)

    def _have(self, keys: Sequence[RecordName], deadline: float) -> list[bool]:
        """Raises PeerError."""
        left = deadline - time.monotonic()
        with self._client.connect(self.address, self._fingerprint, timeout_s=left) as peer:
            return peer.have(keys, deadline - time.monotonic())

    def _revive(self) -> None:
        """Tries whether the server can be asked again. A new connection may take long, an answer may not."""
        try:
            with self._client.connect(self.address, self._fingerprint, is_cancelled=self._is_stopped.is_set):
                pass
            retry_stale(partial(self._have, [], time.monotonic() + ASK_S))
        except Exception as e:
            logger.debug("the block server %s: %s", self.address, e)
            with self._lock:
                self._rests.note_fault(self.address, time.monotonic())
        else:
            self._is_dead = False
            logger.info("the block server %s answers again", self.address)


class TierAsker:
    """Asks all block servers of an engine."""

    def __init__(self, client: PeerClient, addresses: Sequence[str]) -> None:
        self._servers = [_Server(address, client) for address in addresses]
        self._open: queue.SimpleQueue[_Question[bytes] | None] = queue.SimpleQueue()
        """Questions in the order of their ends."""
        self._collector: threading.Thread | None = None
        if addresses:
            self._collector = threading.Thread(target=self._collect, name="kv-tier-collect", daemon=True)
            self._collector.start()

    def ask(self, keys: Sequence[RecordName], fingerprint: bytes | None, report: Callable[[Answers], None]) -> None:
        """Asks which blocks each server has. `report` takes the answers, on any thread, at most ASK_S later."""
        if fingerprint is None or not self._servers:
            report({})
            return
        question = _Question(fingerprint, len(self._servers), report, keys)
        self._open.put(question)
        for server in self._servers:
            server.ask(question)

    def drop(
        self, fingerprint: bytes | None, prepare: Callable[[float], None], report: Callable[[dict[str, str]], None]
    ) -> None:
        """Orders each server to drop all records of a namespace. `report` takes DROPPED, or why nothing is dropped, by
        address, at most DROP_S later. `prepare` is called before, on the thread of each, with the time that it has."""
        if fingerprint is None:
            report({server.address: "the namespace is not known yet" for server in self._servers})
            return
        order = _Question(fingerprint, len(self._servers), report)

        def run(server: _Server) -> None:
            prepare(order.began + DROP_S)
            server.drop(order)

        for server in self._servers:
            threading.Thread(target=run, args=(server,), name="kv-tier-drop", daemon=True).start()

    def stop(self, deadline: float) -> bool:
        """Ends all threads. Returns False if one hangs."""
        self._open.put(None)
        has_ended = [server.stop(deadline) for server in self._servers]
        if self._collector is not None:
            self._collector.join(max(0.1, deadline - time.monotonic()))
        return all(has_ended)

    def _collect(self) -> None:
        """Ends questions whose time is over."""
        while (question := self._open.get()) is not None:
            question.is_answered.wait(max(0.0, question.began + ASK_S - time.monotonic()))
            if question.end():
                for server in self._servers:
                    server.note_late(question)


class ServerWatcher:
    """Follows which blocks of one namespace a server holds, by a question each WATCH_S. A server that is away is taken
    to hold what it held, for FORGET_S."""

    def __init__(self, client: PeerClient, address: str, fingerprint: bytes, report: Watched) -> None:
        self._client, self._address, self._fingerprint, self._report = client, address, fingerprint, report
        self._cursor = NO_CURSOR
        self._rests = Rests()
        self._answered_ts = time.monotonic()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-tier-watch", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Ends the thread. Returns False if it hangs."""
        self._is_stopped.set()
        self._thread.join(END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        seconds = 0.0
        while not self._is_stopped.wait(seconds):
            try:
                seconds = 0.0 if retry_stale(self._ask) else WATCH_S
            except Exception as e:
                seconds = self._note_fault(e)

    def _ask(self) -> bool:
        """Asks for changes and reports them. Returns whether there are more already. Raises PeerError."""
        with self._client.connect(self._address, self._fingerprint, is_cancelled=self._is_stopped.is_set) as peer:
            changes = peer.watch(self._cursor)
        self._rests.note_good(self._address)
        self._answered_ts = time.monotonic()
        is_new = changes.is_new and self._cursor != NO_CURSOR
        self._cursor = changes.cursor
        if changes.added or changes.removed or is_new:
            self._report(changes.added, changes.removed, is_new)
        return changes.has_more

    def _note_fault(self, why: object) -> float:
        """Returns the seconds until the next question."""
        now = time.monotonic()
        if not self._rests.seconds_left(self._address, self._answered_ts):
            logger.info("what %s holds is not followed: %s", self._address, why)
        if self._cursor != NO_CURSOR and now - self._answered_ts >= FORGET_S:
            self._cursor = NO_CURSOR
            self._report([], [], True)
        return self._rests.note_fault(self._address, now)
