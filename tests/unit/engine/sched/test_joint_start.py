"""Requests whose loads follow one another start in one step, where nothing runs (`engine/kv_cache/loader.py`)."""

from __future__ import annotations

import pytest

from quire.engine.kv_cache.loader import JOINT_S, QUICK_S
from quire.engine.request import RequestStatus
from quire.testing.fake_tier import FakeTier
from tests.unit.engine.sched.test_exchange import SIZE, Engine
from tests.unit.engine.sched.test_exchange import tier as tier  # a fixture

NAMES = ("a", "b", "c")
PROMPTS = {name: [factor * i % 50 for i in range(30)] for factor, name in zip((7, 9, 11), NAMES, strict=True)}
LOAD_S = 0.02


@pytest.fixture
def filled(tier: FakeTier) -> FakeTier:
    """A store that has the blocks of three prompts."""
    engine = Engine(tier, num_blocks=80)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=1)
    engine.finish()
    engine.core.shutdown()
    return tier


def begin(tier: FakeTier, *names: str, seconds: float = LOAD_S, max_tokens: int = 3) -> Engine:
    """Returns an engine that has just ordered the loads of requests, of which each is predicted to take so long."""
    engine = Engine(tier, num_blocks=80)
    cost = engine.exchange.loader.cost
    cost.note_load("disk", int(28 * cost.bytes_per_token * 1e6), (seconds - 0.001) * 1e6, 0.0)
    cost.note_load = lambda *args: None  # type: ignore[method-assign]
    for name in names:
        engine.add(name, PROMPTS[name], max_tokens)
    engine.step()
    assert all(engine.status(name) is RequestStatus.WAITING_FOR_REMOTE_KVS for name in names)
    return engine


def end_load(engine: Engine, name: str) -> None:
    """Ends the load of one request, and makes a step."""
    transfers = list(engine.worker.active.values())
    for load in engine.exchange.loader.sent.values():
        (transfer,) = (one for one in transfers if one.id == load.order.load_id)
        transfer.manner = "good" if load.request.request_id == name else "hung"
    engine.move()
    engine.step()


def running(engine: Engine) -> list[str]:
    return [request.request_id for request in engine.scheduler.running]


def test_they_start_in_one_step(filled: FakeTier) -> None:
    engine = begin(filled, *NAMES)
    for name in ("b", "a"):
        end_load(engine, name)
        assert running(engine) == []
        assert engine.status(name) is RequestStatus.WAITING
        assert engine.core.is_blocked(), "the loop sleeps"
    end_load(engine, "c")
    assert running(engine) == ["a", "b", "c"]
    engine.finish()
    assert engine.transfers.num_loads == {"ok": 3}
    assert engine.held() == {}


def test_the_wait_has_the_bound_that_was_predicted_at_its_beginning(filled: FakeTier) -> None:
    engine = begin(filled, "a", "b")
    end_load(engine, "a")
    assert engine.exchange.link.alarm_at == engine.exchange.loader.starts.deadline
    engine.add("c", PROMPTS["c"])  # begins to load, and is not waited for
    engine.step()
    assert engine.status("c") is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.clock.now += LOAD_S - 0.001
    assert not engine.exchange.has_news
    engine.step()
    assert running(engine) == []
    engine.clock.now += 0.002
    assert engine.exchange.has_news
    engine.step()
    assert running(engine) == ["a"]
    assert not engine.exchange.has_news
    engine.worker.free()
    engine.finish()


@pytest.mark.parametrize(("most", "until"), [(JOINT_S, 2.5), (0.045, 2.25)])
def test_each_end_sets_the_bound_anew(
    filled: FakeTier, monkeypatch: pytest.MonkeyPatch, most: float, until: float
) -> None:
    monkeypatch.setattr("quire.engine.kv_cache.loader.JOINT_S", most)
    engine = begin(filled, *NAMES)
    starts, began = engine.exchange.loader.starts, engine.clock()
    end_load(engine, "a")
    assert starts.deadline == pytest.approx(began + 2 * LOAD_S)
    engine.clock.now += 1.5 * LOAD_S
    end_load(engine, "b")
    assert starts.deadline == pytest.approx(began + until * LOAD_S)
    engine.clock.now = starts.deadline - 0.001
    engine.step()
    assert running(engine) == []
    engine.clock.now = starts.deadline
    engine.step()
    assert running(engine) == ["a", "b"]
    engine.worker.free()
    engine.finish()


def test_one_that_began_later_is_not_waited_for(filled: FakeTier) -> None:
    engine = begin(filled, "a", "b")
    end_load(engine, "a")
    assert engine.exchange.link.alarm_at == engine.exchange.loader.starts.deadline
    engine.add("c", PROMPTS["c"])
    engine.step()
    end_load(engine, "b")
    assert running(engine) == ["a", "b"]
    end_load(engine, "c")
    assert running(engine) == ["a", "b", "c"], "none waits beside steps"
    engine.finish()


def test_progress_makes_the_bound_shorter(filled: FakeTier) -> None:
    engine = begin(filled, "a", "b")
    (b,) = (load for load in engine.exchange.loader.active.values() if load.request.request_id == "b")
    engine.exchange.loader.note_progress(b.order.load_id, 5, engine.clock())
    end_load(engine, "a")
    seconds = 0.001 + (LOAD_S - 0.001) * (28 - 5 * SIZE) / 28
    assert engine.exchange.loader.starts.deadline == pytest.approx(engine.clock() + seconds)
    engine.worker.free()
    engine.finish()


def test_where_a_request_starts_or_runs_none_waits(filled: FakeTier) -> None:
    engine = begin(filled, *NAMES)
    end_load(engine, "a")
    engine.add("short", [1, 2, 3], max_tokens=2)
    engine.step()
    assert running(engine) == ["short"]
    engine.step()
    assert running(engine)[-1:] == ["a"]
    end_load(engine, "b")
    assert "b" in running(engine)
    engine.worker.free()
    engine.finish()


def test_after_the_last_has_ended_they_wait_again(filled: FakeTier) -> None:
    engine = begin(filled, "a")
    engine.finish()
    for name in ("b", "c"):
        engine.add(name, PROMPTS[name])
    engine.step()
    end_load(engine, "b")
    assert running(engine) == []
    engine.worker.free()
    engine.finish()


@pytest.mark.parametrize(("aborted", "started"), [("a", []), ("b", ["a"])])
def test_an_abort_of_one_lets_go(filled: FakeTier, aborted: str, started: list[str]) -> None:
    engine = begin(filled, "a", "b")
    end_load(engine, "a")
    engine.core.abort_requests([aborted])
    del engine.requests[aborted]
    engine.step()
    assert running(engine) == started
    engine.worker.free()
    engine.finish()
    assert engine.exchange.loader.starts.deadline == float("inf")


@pytest.mark.parametrize(("seconds", "most"), [(QUICK_S + 0.001, JOINT_S), (QUICK_S - 0.001, 1.9 * QUICK_S)])
def test_slow_loads_and_many_are_not_waited_for(
    filled: FakeTier, monkeypatch: pytest.MonkeyPatch, seconds: float, most: float
) -> None:
    monkeypatch.setattr("quire.engine.kv_cache.loader.JOINT_S", most)
    engine = begin(filled, *NAMES, seconds=seconds)
    end_load(engine, "a")
    assert running(engine) == ["a"]
    engine.worker.free()
    engine.finish()


def test_what_came_in_part_is_computed_at_once(filled: FakeTier) -> None:
    tokens = tuple(PROMPTS["a"][12:16])
    place = next(place for place, record in filled.records.items() if record.key.token_ids == tokens)
    del filled.records[place]
    engine = begin(filled, "a", "b")
    end_load(engine, "a")
    assert running(engine) == ["a"]
    engine.worker.free()
    engine.finish()


def test_a_reset_lets_go(filled: FakeTier) -> None:
    engine = begin(filled, "a", "b")
    end_load(engine, "a")
    engine.worker.free()
    engine.exchange.link.wait = lambda seconds: engine.move()  # type: ignore[method-assign]
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    assert engine.exchange.loader.starts.deadline == float("inf")
