from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from quire.frontend.interrupt import InterruptGuard


@pytest.fixture(autouse=True)
def _default_handler() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def guarded(*actions: Callable[[], object]) -> None:
    with InterruptGuard():
        for action in actions:
            action()


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        guarded(interrupt, interrupt, lambda: reached.append("end of block"))
    assert reached == ["end of block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_error_in_the_block_wins() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(interrupt, lambda: 1 / 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_inner_guard_leaves_it_to_the_outer_one() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        guarded(lambda: guarded(interrupt), lambda: reached.append("after the inner block"))
    assert reached


def test_the_applications_own_handler_stays() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    with InterruptGuard():
        interrupt()
    assert seen == [1]


def test_other_threads_are_left_alone() -> None:
    handlers = []

    def body() -> None:
        with InterruptGuard():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
