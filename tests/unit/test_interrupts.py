"""Ctrl-C is held back, then raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from quire.interrupts import InterruptShield


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def shielded(*acts: Callable[[], None], may_break: bool = False) -> list[str]:
    """Do everything inside a shield; returns the names of what was done, even when it raises."""
    done: list[str] = []
    progress.append(done)
    with InterruptShield() as shield:
        shield.may_break = may_break
        for act in acts:
            act()
            done.append(act.__name__)
    return done


progress: list[list[str]] = []
"""The work that each call of `shielded` got done."""


def fail() -> None:
    raise ValueError("the cause")


def test_an_interrupt_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt):
        shielded(press_ctrl_c, press_ctrl_c)
    assert progress[-1] == ["press_ctrl_c", "press_ctrl_c"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_is_raised() -> None:
    assert shielded() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_wins_over_an_interrupt() -> None:
    with pytest.raises(ValueError, match="the cause"):
        shielded(press_ctrl_c, fail)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_breaks_where_it_may() -> None:
    with pytest.raises(KeyboardInterrupt):
        shielded(press_ctrl_c, press_ctrl_c, may_break=True)
    assert progress[-1] == ["press_ctrl_c"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_inner_shield_leaves_it_to_the_outer_one() -> None:
    def inner() -> None:
        shielded(press_ctrl_c)

    with pytest.raises(KeyboardInterrupt):
        shielded(inner)
    assert progress[-2:] == [["inner"], ["press_ctrl_c"]]


def test_the_handler_of_an_application_is_left_alone() -> None:
    pressed = []
    signal.signal(signal.SIGINT, lambda signum, frame: pressed.append(signum))
    with InterruptShield():
        press_ctrl_c()
        assert pressed == [signal.SIGINT]


def test_other_threads_need_no_shield() -> None:
    handlers = []

    def run() -> None:
        with InterruptShield():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
