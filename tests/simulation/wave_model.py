"""A model checker of waves: explores every order in which messages, steps, deaths and restarts of a small group happen.

What is explored is the code that runs (`WaveState`, `CoordinatorState`, `agree`), between FIFO channels. A world is
one tuple; `successors` yields each world that may follow. Breadth-first, so the path to a violation is a shortest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from quire.coordinator import CoordinatorState, Order
from quire.engine.waves import Pause, Verdict, Vote, WaveEffect, WaveState, WaveTurn, agree

T = TypeVar("T")
Channel = tuple[Any, ...]
JOINING, MEMBER, PAUSED = range(3)
"""Standing of an engine in its `DPGroup`: it joins at the next agreement; all wait for its vote; it is paused."""


class Scope(NamedTuple):
    """Events that may happen in a run."""

    num_engines: int = 2
    num_requests: int = 2
    num_pauses: int = 0
    may_cancel: bool = False
    """A resume may come before the pause is complete."""
    num_coordinator_deaths: int = 0
    num_engine_deaths: int = 0
    num_spare: int = 0
    """Engines that are added at some time."""
    num_removals: int = 0
    is_cold: bool = False
    """The engines have just been started, and have never agreed."""
    knows_waves: bool = True
    """The client reports its first request to the coordinator; another client leaves that to the engine."""


class Engine(NamedTuple):
    """One engine: its `WaveState`, what its scheduler has, and where its loop is."""

    waves: WaveState = WaveState()
    work: tuple[int, ...] = ()
    """Steps that each request needs."""
    held: tuple[int, ...] = ()
    """The same of requests that wait for a resume."""
    vote: Vote | None = None
    """Set while it waits for the agreement."""
    verdict: tuple[Verdict, int] | None = None
    """An agreement that it has not seen yet, and the wave after it."""
    standing: int = JOINING
    is_up: bool = True

    @property
    def has_work(self) -> bool:
        return bool(self.work) and not self.waves.is_paused


class World(NamedTuple):
    """Everything, between two events."""

    engines: tuple[Engine, ...]
    coordinator: CoordinatorState | None = CoordinatorState()
    subscribed: frozenset[int] = frozenset()
    subscribing: frozenset[int] = frozenset()
    to_engine: tuple[Channel, ...] = ()
    """Messages of the client."""
    orders: tuple[Channel, ...] = ()
    """Messages of the coordinator to each engine."""
    notices: tuple[Channel, ...] = ()
    """Messages of each engine to the coordinator."""
    firsts: Channel = ()
    """Messages of the client to the coordinator."""
    published: Channel = ()
    view: tuple[int, bool] = (0, False)
    """The client's knowledge: the wave, and whether it runs."""
    is_paused: bool = False
    """The client's last word was a pause."""
    num_sent: int = 0
    homeless: tuple[int, ...] = ()
    """Requests of engines that died while no other was up."""
    group_wave: int = 0
    quiet: int = 0
    """Steps since there was nothing to do."""
    num_pauses: int = 0
    num_coordinator_deaths: int = 0
    num_deaths: int = 0
    num_removals: int = 0
    num_added: int = 0


class ViolationError(AssertionError):
    """A law is broken."""


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def make_world(scope: Scope) -> World:
    total = scope.num_engines + scope.num_spare
    standing = JOINING if scope.is_cold else MEMBER
    engines = tuple(Engine(is_up=i < scope.num_engines, standing=standing) for i in range(total))
    alive = frozenset(range(scope.num_engines))
    nothing: tuple[Channel, ...] = ((),) * total
    coordinator = CoordinatorState(num_expected=scope.num_engines, num_subscribed=scope.num_engines)
    return World(engines, coordinator, alive, frozenset(), nothing, nothing, nothing)


Step = tuple[str, World]


def progress(world: World) -> Iterator[Step]:
    """Yields what happens sooner or later, whatever the environment does."""
    for i, engine in enumerate(world.engines):
        if not engine.is_up:
            if engine.verdict is not None:
                raise ViolationError(f"W6: the agreement counted engine {i}, which is down")
            continue
        if world.to_engine[i]:
            yield f"engine {i} takes {world.to_engine[i][0]}", _take_input(world, i)
        if world.orders[i]:
            yield f"engine {i} takes {world.orders[i][0]}", _take_order(world, i)
        if engine.verdict is not None:
            yield f"engine {i} sees {engine.verdict[0].name}", _see_verdict(world, i)
        elif engine.vote is None and engine.waves.is_running:
            yield f"engine {i} steps", _step(world, i)
    if (joint := _agree(world)) is not None:
        yield "the engines agree", joint
    yield from _coordinate(world)
    if world.published:
        wave, is_running = world.published[0]
        yield "the client learns", world._replace(published=world.published[1:], view=(wave, is_running))


def environment(world: World, scope: Scope) -> Iterator[Step]:
    """Yields what may happen, or never."""
    alive = [i for i, engine in enumerate(world.engines) if engine.is_up]
    if world.num_sent < scope.num_requests:
        for i in alive:
            yield f"a request is sent to engine {i}", _send(world, i, scope)
    if not world.is_paused and world.num_pauses < scope.num_pauses:
        paused = world._replace(is_paused=True, num_pauses=world.num_pauses + 1)
        yield "pause", _tell_all(paused, "pause")
    if world.is_paused and (scope.may_cancel or all(world.engines[i].waves.is_paused for i in alive)):
        yield "resume", _tell_all(world._replace(is_paused=False), "resume")
    if world.coordinator is not None and world.num_coordinator_deaths < scope.num_coordinator_deaths:
        dead = world._replace(
            coordinator=None,
            subscribed=frozenset(),
            subscribing=frozenset(),
            num_coordinator_deaths=world.num_coordinator_deaths + 1,
        )
        yield "the coordinator dies", dead
        nothing: tuple[Channel, ...] = ((),) * len(world.engines)
        if dead.firsts or dead.published or dead.orders != nothing or dead.notices != nothing:
            lost = dead._replace(firsts=(), published=(), orders=nothing, notices=nothing)
            yield "the coordinator dies with all its messages", lost
    for i in alive:
        if world.num_deaths < scope.num_engine_deaths:
            dead = world._replace(num_deaths=world.num_deaths + 1)
            yield f"engine {i} dies", _die(dead, i)
            if world.notices[i]:
                late = _die(dead, i)
                yield f"engine {i} dies; its notices arrive", late._replace(notices=world.notices)
        if world.num_removals < scope.num_removals and len(alive) > 1:
            yield f"engine {i} is removed", _die(world._replace(num_removals=world.num_removals + 1), i)
    if world.num_added < scope.num_spare:
        yield "an engine is added", _start(world._replace(num_added=world.num_added + 1), scope)


def restarts(world: World, scope: Scope) -> Iterator[Step]:
    """Yields the restarts of what has died: they come sooner or later, too."""
    if world.coordinator is None:
        alive = frozenset(i for i, engine in enumerate(world.engines) if engine.is_up)
        yield "the coordinator is restarted", world._replace(coordinator=CoordinatorState(), subscribing=alive)
    num_down = sum(not engine.is_up for engine in world.engines)
    if num_down > world.num_removals + scope.num_spare - world.num_added:
        yield "an engine is restarted", _start(world, scope)


# -- the engines ----------------------------------------------------------------------------------------------------


def _settle(world: World, i: int, engine: Engine, turn: WaveTurn) -> World:
    """Takes over an engine's next state and carries out its effects."""
    before, waves = engine.waves, turn.state
    if waves.wave < before.wave:
        raise ViolationError(f"W3: the wave of engine {i} falls from {before.wave} to {waves.wave}")
    if waves.is_paused and waves.is_running:
        raise ViolationError(f"W4: engine {i} is paused and runs")
    notices = world.notices[i]
    for effect in turn.effects:
        if effect is WaveEffect.START_OTHERS:
            notices += (("start", waves.wave),)
        elif effect is WaveEffect.REPORT_END:
            notices += (("end", waves.wave - 1),)
    engine = engine._replace(waves=waves._replace(step=0))
    return world._replace(engines=_put(world.engines, i, engine), notices=_put(world.notices, i, notices))


def _take_input(world: World, i: int) -> World:
    (kind, *args), *rest = world.to_engine[i]
    world = world._replace(to_engine=_put(world.to_engine, i, tuple(rest)), quiet=0)
    engine = world.engines[i]
    waves = engine.waves
    if kind == "add":
        wave, num_steps = args
        if waves.pause is not Pause.NONE:
            engine = engine._replace(held=tuple(sorted((*engine.held, num_steps))))
            return world._replace(engines=_put(world.engines, i, engine))
        engine = engine._replace(work=tuple(sorted((*engine.work, num_steps))))
        return _settle(world, i, engine, waves.on_request(wave))
    if kind == "pause":
        return _settle(world, i, engine, waves.on_pause())
    engine = engine._replace(work=tuple(sorted((*engine.work, *engine.held))), held=())
    if engine.standing == PAUSED:
        engine = engine._replace(standing=JOINING)
    return _settle(world, i, engine, waves.on_resume(bool(engine.work)))


def _take_order(world: World, i: int) -> World:
    order, *rest = world.orders[i]
    world = world._replace(orders=_put(world.orders, i, tuple(rest)), quiet=0)
    engine = world.engines[i]
    if order.kind == "ready":
        return _settle(world, i, engine, engine.waves.on_coordinator())
    return _settle(world, i, engine, engine.waves.on_start(order.wave))


def _step(world: World, i: int) -> World:
    """Runs a turn of a running engine's loop, up to the agreement. One that has not joined yet runs no model."""
    engine = world.engines[i]
    if engine.waves.is_paused:
        raise ViolationError(f"W4: engine {i} steps while it is paused")
    if engine.standing != MEMBER:
        vote = engine.waves.vote(engine.has_work)
        return world._replace(engines=_put(world.engines, i, engine._replace(vote=vote)))
    turn = engine.waves.on_step(executed=engine.has_work)
    if not engine.has_work and WaveEffect.DUMMY not in turn.effects:
        raise ViolationError(f"W2: engine {i} leaves out a step that the others wait for")
    is_quiet = not any(e.work or e.waves.pause is Pause.ASKED or e.standing != MEMBER for e in world.engines if e.is_up)
    has_mail = any(world.to_engine) or any(world.orders)
    quiet = world.quiet + 1 if is_quiet and not has_mail else 0
    if quiet > 2 * len(world.engines):
        raise ViolationError("W5: the engines step on without requests")
    engine = engine._replace(work=tuple(n - 1 for n in engine.work if n > 1))
    engine = engine._replace(vote=turn.state.vote(engine.has_work))
    return _settle(world._replace(quiet=quiet), i, engine, turn)


def _agree(world: World) -> World | None:
    """Returns the world after an agreement, if all members wait for it; those that join are admitted by it."""
    engines = world.engines
    live = [i for i, engine in enumerate(engines) if engine.is_up and engine.standing != PAUSED]
    any_paused = any(engine.standing == PAUSED for engine in engines)
    if not any(engines[i].vote for i in live) or any(engines[i].verdict for i in live):
        return None
    if any(engines[i].vote is None for i in live if engines[i].standing == MEMBER):
        return None
    votes = [engines[i].vote or Vote(False, False) for i in live]
    for i in live:
        if engines[i].vote is not None and engines[i].waves.wave != world.group_wave:
            raise ViolationError(f"W2: engine {i} of wave {engines[i].waves.wave} is in wave {world.group_wave}")
    verdict = agree(votes, any_paused)
    if verdict is None:
        return None
    if verdict is Verdict.GO and any_paused:
        raise ViolationError("W4: engines go on while others are paused")
    if verdict is not Verdict.GO and any(vote.has_work for vote in votes):
        raise ViolationError("W1: a wave ends with requests")
    if verdict is Verdict.GO and not any(vote.has_work or vote.is_pausing for vote in votes):
        raise ViolationError("W5: a wave goes on without requests")
    wave = world.group_wave + (verdict is not Verdict.GO and not any_paused)
    for i in live:
        engines = _put(engines, i, engines[i]._replace(verdict=(verdict, wave), standing=MEMBER))
    return world._replace(engines=engines, group_wave=wave)


def _see_verdict(world: World, i: int) -> World:
    engine = world.engines[i]
    assert engine.verdict is not None  # the caller has looked
    verdict, wave = engine.verdict
    turn = engine.waves.on_verdict(verdict, wave, engine.has_work)
    standing = MEMBER if verdict is not Verdict.PAUSE else PAUSED if turn.state.is_paused else JOINING
    return _settle(world, i, engine._replace(vote=None, verdict=None, standing=standing), turn)


def _die(world: World, i: int) -> World:
    """Ends an engine. Its requests move to another one."""
    engine = world.engines[i]
    orphans = [*engine.work, *engine.held, *(message[2] for message in world.to_engine[i] if message[0] == "add")]
    world = world._replace(
        engines=_put(world.engines, i, Engine(is_up=False)),
        to_engine=_put(world.to_engine, i, ()),
        orders=_put(world.orders, i, ()),
        notices=_put(world.notices, i, ()),
        subscribed=world.subscribed - {i},
        subscribing=world.subscribing - {i},
    )
    target = next((j for j, other in enumerate(world.engines) if other.is_up), None)
    if target is None:
        return world._replace(homeless=(*world.homeless, *orphans))
    for num_steps in orphans:
        world = _tell(world, target, ("add", world.view[0], num_steps))
    return world


def make_joiner(wave: int) -> Engine:
    """Returns an engine that has just been started; `wave` is what it reads of the group then."""
    return Engine(WaveState(wave))


def _start(world: World, scope: Scope) -> World:
    """Starts an engine. It joins at the next agreement, or at once if it is alone."""
    i = next(i for i, engine in enumerate(world.engines) if not engine.is_up)
    engine = make_joiner(world.group_wave)
    subscribing = world.subscribing if world.coordinator is None else world.subscribing | {i}
    world = world._replace(engines=_put(world.engines, i, engine), subscribing=subscribing)
    if world.is_paused:
        world = _tell(world, i, ("pause",))
    for num_steps in world.homeless:
        world = _tell(world, i, ("add", world.view[0], num_steps))
    return world._replace(homeless=())


# -- the client and the coordinator ---------------------------------------------------------------------------------


def _tell(world: World, i: int, message: tuple[Any, ...]) -> World:
    return world._replace(to_engine=_put(world.to_engine, i, (*world.to_engine[i], message)))


def _tell_all(world: World, kind: str) -> World:
    for i, engine in enumerate(world.engines):
        if engine.is_up:
            world = _tell(world, i, (kind,))
    return world


def _send(world: World, i: int, scope: Scope) -> World:
    wave, is_running = world.view
    world = _tell(world, i, ("add", wave, 1 + world.num_sent % 2))
    if scope.knows_waves and not is_running:
        world = world._replace(firsts=(*world.firsts, wave))
    return world._replace(num_sent=world.num_sent + 1)


def _coordinate(world: World) -> Iterator[Step]:
    state = world.coordinator
    if state is None:
        return
    for i in sorted(world.subscribing):
        taken = world._replace(subscribing=world.subscribing - {i}, subscribed=world.subscribed | {i})
        yield f"the subscription of engine {i} arrives", _order(taken, *state.on_subscription())
    if world.firsts:
        taken = world._replace(firsts=world.firsts[1:])
        yield "the coordinator learns of a first request", _order(taken, *state.on_first_request(world.firsts[0]))
    for i, notices in enumerate(world.notices):
        if notices:
            (kind, wave), *left = notices
            turn = state.on_start_wave(wave) if kind == "start" else state.on_wave_complete(wave)
            taken = world._replace(notices=_put(world.notices, i, tuple(left)))
            yield f"the coordinator takes {kind} {wave} of engine {i}", _order(taken, *turn)


def _order(world: World, state: CoordinatorState, orders: tuple[Order, ...]) -> World:
    if world.coordinator is not None and state.wave < world.coordinator.wave:
        raise ViolationError("W3: the wave of the coordinator falls")
    if state.wave > max(world.group_wave, *(engine.waves.wave for engine in world.engines)) + 1:
        raise ViolationError("W3: the coordinator is ahead of all engines")
    channels, published = world.orders, world.published
    for order in orders:
        if order.kind == "publish":
            published = (*published, (state.wave, state.is_running))
            continue
        for i in world.subscribed:
            channels = _put(channels, i, (*channels[i], order))
    return world._replace(coordinator=state, orders=channels, published=published)


# -- the exploration ------------------------------------------------------------------------------------------------


def check_quiescent(world: World) -> None:
    """Raises ViolationError for a world where nothing goes on by itself, and something should."""
    for i, engine in enumerate(world.engines):
        if not engine.is_up:
            continue
        waves = engine.waves
        if waves.is_running or engine.vote is not None:
            raise ViolationError(f"W1: engine {i} waits for ever for the others")
        if waves.pause is Pause.ASKED or waves.is_paused != world.is_paused:
            raise ViolationError(f"W1: engine {i} is in pause state {waves.pause.name}")
        if (engine.work or engine.held) and not waves.is_paused:
            raise ViolationError(f"W1: engine {i} has requests and does not run")
        if waves.wave != world.group_wave:
            raise ViolationError(f"W2: engine {i} is idle in wave {waves.wave} of {world.group_wave}")


class Report(NamedTuple):
    num_states: int
    violation: str | None = None
    path: tuple[str, ...] = ()
    is_whole: bool = True
    """False if the limit was reached first."""


def explore(scope: Scope, max_states: int = 1 << 62, on_state: Callable[[World], None] | None = None) -> Report:
    """Explores all worlds, breadth-first, up to the first violation. Worlds are told apart by their 64-bit hashes."""
    first = make_world(scope)
    parents: dict[int, tuple[int, str]] = {hash(first): (0, "")}
    frontier = [first]
    while frontier:
        following: list[World] = []
        for world in frontier:
            key = hash(world)
            try:
                steps = [*progress(world), *restarts(world, scope)]
                if not steps:
                    check_quiescent(world)
                steps += environment(world, scope)
            except ViolationError as violation:
                return Report(len(parents), str(violation), _path(parents, key))
            for label, after in steps:
                after_key = hash(after)
                if after_key not in parents:
                    parents[after_key] = key, label
                    following.append(after)
        if len(parents) >= max_states:
            return Report(len(parents), is_whole=False)
        frontier = following
    return Report(len(parents))


def _path(parents: dict[int, tuple[int, str]], key: int) -> tuple[str, ...]:
    labels: list[str] = []
    while key in parents and parents[key][1]:
        key, label = parents[key]
        labels.append(label)
    return tuple(reversed(labels))
