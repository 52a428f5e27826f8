"""The page on which API processes show each other their load, and routers that route by it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from quire.frontend.metrics.collect.saturation import CostModel
from quire.frontend.routing.load_board import LoadBoard, RequestCounts
from quire.frontend.routing.policy import MIN_STEPS, LeastWait
from quire.frontend.routing.router import Router
from quire.testing.fake_engine import READY
from quire.wire.engine_core import EngineCoreOutputs
from quire.wire.stats import SchedulerStats

from .test_router import PROMPT, request


def make_boards(path: Path, num_processes: int = 2, first_engine: int = 0, num_engines: int = 2) -> list[LoadBoard]:
    own = LoadBoard.create(path / "loads", num_processes, first_engine, num_engines)
    others = [LoadBoard.attach(path / "loads", i + 1, first_engine, num_engines) for i in range(num_processes)]
    return [own, *others]


def make_router(board: LoadBoard, num_engines: int) -> Router:
    router = Router(LeastWait(), board)
    for engine in range(num_engines):
        router.open_engine(engine, replace(READY, engine_index=engine))
    return router


def test_each_process_sees_the_sum_of_the_others(tmp_path: Path) -> None:
    _, one, two = boards = make_boards(tmp_path, first_engine=4)
    one.put_counts(5, RequestCounts(1, 2, 300))
    two.put_counts(5, RequestCounts(10, 20, 3))
    assert [board.get_others()[5] for board in boards] == [(11, 22, 303), (10, 20, 3), (1, 2, 300)]
    assert one.get_others()[4] == (0, 0, 0)
    boards[0].clear(2)
    assert one.get_others()[5] == (0, 0, 0)
    one.put_counts(6, RequestCounts(1, 1, 1))  # an engine that the page has no room for
    assert one.get_others().keys() == one.get_facts().keys() == {4, 5}


def test_costs_are_read_once_per_fit(tmp_path: Path) -> None:
    parent, one, _ = make_boards(tmp_path)
    model = CostModel(tuple(0.001 * (i + 1) for i in range(len(CostModel().coefficients))))
    assert one.get_facts() == {0: (0.0, None), 1: (0.0, None)}
    parent.put_facts(1, 0.25, model)
    usage, read = one.get_facts()[1]
    assert usage == 0.25
    assert read is not None
    assert read.coefficients == pytest.approx(model.coefficients)
    parent.put_facts(1, 0.5, None)
    assert one.get_facts()[1] == (0.5, None)
    assert parent.get_facts() == {}, "it has them from the engines"


def test_a_page_of_another_size_is_refused(tmp_path: Path) -> None:
    make_boards(tmp_path, num_processes=1, num_engines=2)
    with pytest.raises(ValueError, match="no row 1"):
        LoadBoard.attach(tmp_path / "loads", 1, 0, 3)


def test_processes_spread_their_requests_together(tmp_path: Path) -> None:
    """Each request goes to an engine with the fewest, through whichever process it comes."""
    draw, num_engines = random.Random(3), 4
    routers = [make_router(board, num_engines) for board in make_boards(tmp_path, 3, num_engines=num_engines)[1:]]
    counts = [0] * num_engines
    live: list[tuple[Router, str, int]] = []
    for i in range(300):
        if live and draw.random() < 0.4:
            router, name, engine = live.pop(draw.randrange(len(live)))
            router.remove(name)
            counts[engine] -= 1
        else:
            router, least = draw.choice(routers), min(counts)
            prompt = [draw.randrange(1000) for _ in range(20)]
            engine = router.place(request(str(i), prompt), range(num_engines))
            assert counts[engine] == least
            counts[engine] += 1
            router.note_token(str(i))
            live.append((router, str(i), engine))
    assert len(live) > 20


def test_only_the_starting_process_has_statistics_and_all_route_by_them(tmp_path: Path) -> None:
    parent_board, board, _ = make_boards(tmp_path)
    parent, router = make_router(parent_board, 2), make_router(board, 2)
    ready = replace(READY, engine_index=0)
    parent.open_engine(0, ready)
    before = router.predict_wait(0, len(PROMPT))
    for step in range(MIN_STEPS + 2):  # of 3 s each
        stats = SchedulerStats(num_running_reqs=1, num_decoded_reqs=1, num_scheduled_tokens=9, kv_cache_usage=0.125)
        parent.note_step(EngineCoreOutputs(engine_index=0, timestamp=100.0 + 3.0 * step, scheduler_stats=stats))
    assert before < 1
    assert router.predict_wait(0, len(PROMPT)) == pytest.approx(parent.predict_wait(0, len(PROMPT)))
    assert router.predict_wait(0, len(PROMPT)) > 2
    assert router._loads[0].kv_usage == 0.125
    parent.open_engine(0, ready)
    router.predict_wait(0, len(PROMPT))
    assert router._loads[0].kv_usage == 0, "its cache was lost with it"
