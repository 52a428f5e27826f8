"""A model checker of waves: explores every order in which messages, steps, deaths and restarts of a small group happen.

What is explored is the code that runs (`WaveState`, `CoordinatorState`, `agree`), between FIFO channels. A world is
one tuple; `successors` yields each world that may follow. Breadth-first, so the path to a violation is a shortest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from quire.coordinator import CoordinatorState, Order
from quire.engine.waves import Pause, WaveEffect, WaveState, WaveTurn
from quire.wire.group import Verdict, Vote, agree

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
    next_size: int = 0
    """The engines share experts, and go over to a group of this size; 0: there is one group, whose engines do not."""

    def size(self, generation: int) -> int:
        return self.next_size if generation else self.num_engines


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
    is_frozen: bool = False
    """Its scheduler is paused."""
    generation: int = 0
    """Group that it is in: the first, or the next one."""
    is_prepared: bool = False
    is_ordered: bool = False
    """True once it was ordered to go over to the next group."""
    is_lost: bool = False
    """The epoch of its group has ended, and it has not seen that yet."""

    @property
    def has_work(self) -> bool:
        return bool(self.work) and not self.waves.is_paused

    def make_vote(self) -> Vote:
        return self.waves.vote(self.has_work and not (self.is_ordered and not self.generation))


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
    next_wave: int = 0
    """Wave of the next group."""
    has_prepared: bool = False
    has_committed: bool = False
    scope: Scope = Scope()
    quiet: int = 0
    """Steps since there was nothing to do."""
    num_pauses: int = 0
    num_coordinator_deaths: int = 0
    num_deaths: int = 0
    num_removals: int = 0
    num_added: int = 0

    def wave_of(self, generation: int) -> int:
        return self.next_wave if generation else self.group_wave

    def with_wave(self, generation: int, wave: int) -> World:
        return self._replace(next_wave=wave) if generation else self._replace(group_wave=wave)


class ViolationError(AssertionError):
    """A law is broken."""


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def make_world(scope: Scope) -> World:
    total = max(scope.num_engines + scope.num_spare, scope.next_size)
    standing = JOINING if scope.is_cold else MEMBER
    engines = tuple(Engine(is_up=i < scope.num_engines, standing=standing) for i in range(total))
    alive = frozenset(range(scope.num_engines))
    nothing: tuple[Channel, ...] = ((),) * total
    coordinator = CoordinatorState(num_expected=scope.num_engines, num_subscribed=scope.num_engines)
    return World(engines, coordinator, alive, frozenset(), nothing, nothing, nothing, scope=scope)


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
    for generation in range(2 if world.has_prepared else 1):
        if (joint := _agree(world, generation)) is not None:
            yield f"the engines of group {generation} agree", joint
    yield from _coordinate(world)
    if world.published:
        wave, is_running = world.published[0]
        yield "the client learns", world._replace(published=world.published[1:], view=(wave, is_running))


def environment(world: World, scope: Scope) -> Iterator[Step]:
    """Yields what may happen, or never."""
    alive = [i for i, engine in enumerate(world.engines) if engine.is_up]
    if world.num_sent < scope.num_requests:
        for i in alive:
            if not world.has_prepared or (i < scope.next_size and (i < scope.num_engines or world.has_committed)):
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
    if scope.next_size and not world.has_prepared:
        yield "the next group is prepared", _prepare(world, scope)
    if world.has_prepared and not world.has_committed and _may_commit(world, scope):
        yield "the engines are ordered to go over", _commit(world, scope)
    if world.num_added < scope.num_spare:
        yield "an engine is added", _start(world._replace(num_added=world.num_added + 1), scope)


def restarts(world: World, scope: Scope) -> Iterator[Step]:
    """Yields the restarts of what has died: they come sooner or later, too."""
    if world.coordinator is None:
        alive = frozenset(i for i, engine in enumerate(world.engines) if engine.is_up)
        yield "the coordinator is restarted", world._replace(coordinator=CoordinatorState(), subscribing=alive)
    if scope.next_size:
        first, last = (0, scope.next_size) if world.has_committed else (0, scope.num_engines)
        last = max(last, scope.next_size) if world.has_prepared and not world.has_committed else last
        if any(not engine.is_up for engine in world.engines[first:last]):
            yield "an engine is restarted", _start(world, scope)
        return
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
    if kind == "switch":
        return _follow(world._replace(engines=_put(world.engines, i, engine._replace(is_ordered=True))), i)
    if kind == "add":
        wave, num_steps = args
        if engine.is_frozen:
            engine = engine._replace(held=tuple(sorted((*engine.held, num_steps))))
            return world._replace(engines=_put(world.engines, i, engine))
        engine = engine._replace(work=tuple(sorted((*engine.work, num_steps))))
        return _settle(world, i, engine, waves.on_request(wave))
    if kind == "pause":
        return _settle(world, i, engine._replace(is_frozen=True), waves.on_pause())
    engine = engine._replace(work=tuple(sorted((*engine.work, *engine.held))), held=(), is_frozen=False)
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
        if engine.is_ordered and not engine.generation:
            return _switch(world, i)
        vote = engine.make_vote()
        return world._replace(engines=_put(world.engines, i, engine._replace(vote=vote)))
    turn = engine.waves.on_step(executed=engine.has_work)
    if not engine.has_work and WaveEffect.DUMMY not in turn.effects:
        raise ViolationError(f"W2: engine {i} leaves out a step that the others wait for")
    is_quiet = not any(
        e.is_ordered or e.work or e.waves.pause is Pause.ASKED or e.standing != MEMBER for e in world.engines if e.is_up
    )
    has_mail = any(world.to_engine) or any(world.orders)
    quiet = world.quiet + 1 if is_quiet and not has_mail else 0
    if quiet > 2 * len(world.engines):
        raise ViolationError("W5: the engines step on without requests")
    engine = engine._replace(work=tuple(n - 1 for n in engine.work if n > 1))
    engine = engine._replace(vote=engine._replace(waves=turn.state).make_vote())
    return _settle(world._replace(quiet=quiet), i, engine, turn)


def _agree(world: World, generation: int) -> World | None:
    """Returns the world after an agreement, if all members wait for it; those that join are admitted by it. Engines
    that share experts agree with all only, and all join together."""
    engines = world.engines
    there = [i for i, engine in enumerate(engines) if engine.is_up and engine.generation == generation]
    live = [i for i in there if engines[i].standing != PAUSED]
    any_paused = len(live) < len(there)
    is_incomplete = len(there) < world.scope.size(generation) or len({engines[i].standing for i in live}) > 1
    if world.scope.next_size and is_incomplete:
        return None
    if not any(engines[i].vote for i in live) or any(engines[i].verdict for i in live):
        return None
    if any(engines[i].vote is None for i in live if engines[i].standing == MEMBER):
        return None
    votes = [engines[i].vote or Vote(False, False) for i in live]
    for i in live:
        is_new = generation and engines[i].standing == JOINING  # it has read the wave before the others have come
        if engines[i].vote is not None and engines[i].waves.wave != world.wave_of(generation) and not is_new:
            raise ViolationError(f"W2: engine {i} of wave {engines[i].waves.wave} is in {world.wave_of(generation)}")
    verdict = agree(votes, any_paused)
    if verdict is None:
        return None
    if verdict is Verdict.GO and any_paused:
        raise ViolationError("W4: engines go on while others are paused")
    if verdict is not Verdict.GO and any(vote.has_work for vote in votes):
        raise ViolationError("W1: a wave ends with requests")
    if verdict is Verdict.GO and not any(vote.has_work or vote.is_pausing for vote in votes):
        raise ViolationError("W5: a wave goes on without requests")
    if len({engines[i].generation for i in live}) > 1:
        raise ViolationError("W6: engines of two groups agree")
    wave = world.wave_of(generation) + (verdict is not Verdict.GO and not any_paused)
    for i in live:
        engines = _put(engines, i, engines[i]._replace(verdict=(verdict, wave), standing=MEMBER))
    return world._replace(engines=engines).with_wave(generation, wave)


def _see_verdict(world: World, i: int) -> World:
    engine = world.engines[i]
    assert engine.verdict is not None  # the caller has looked
    verdict, wave = engine.verdict
    turn = engine.waves.on_verdict(verdict, wave, engine.has_work)
    standing = MEMBER if verdict is not Verdict.PAUSE else PAUSED if turn.state.is_paused else JOINING
    if engine.is_lost and standing == MEMBER:
        standing = JOINING
    engine = engine._replace(vote=None, verdict=None, standing=standing, is_lost=False)
    return _follow(_settle(world, i, engine, turn), i)


def _die(world: World, i: int) -> World:
    """Ends an engine. Its requests move to another one."""
    engine = world.engines[i]
    if world.scope.next_size:
        world = _lose(world, engine.generation, i)
    orphans = [*engine.work, *engine.held, *(message[2] for message in world.to_engine[i] if message[0] == "add")]
    world = world._replace(
        engines=_put(world.engines, i, Engine(is_up=False)),
        to_engine=_put(world.to_engine, i, ()),
        orders=_put(world.orders, i, ()),
        notices=_put(world.notices, i, ()),
        subscribed=world.subscribed - {i},
        subscribing=world.subscribing - {i},
    )
    target = next((j for j, other in enumerate(world.engines) if other.is_up and _takes_requests(world, j)), None)
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
    generation = int(world.has_committed or (world.has_prepared and i >= scope.num_engines))
    engine = make_joiner(world.wave_of(generation))._replace(generation=generation)
    if scope.next_size:
        world = _lose(world, generation, i)
    subscribing = world.subscribing if world.coordinator is None else world.subscribing | {i}
    world = world._replace(engines=_put(world.engines, i, engine), subscribing=subscribing)
    if world.is_paused:
        world = _tell(world, i, ("pause",))
    for num_steps in world.homeless:
        world = _tell(world, i, ("add", world.view[0], num_steps))
    return world._replace(homeless=())


# -- another number of engines ----------------------------------------------------------------------------------------


def _takes_requests(world: World, i: int) -> bool:
    scope = world.scope
    return not scope.next_size or (i < min(scope.num_engines, scope.next_size) if world.has_prepared else True)


def _prepare(world: World, scope: Scope) -> World:
    """Starts the engines that are added; the others have their next experts."""
    present = world.engines[: scope.num_engines]
    engines = tuple(engine._replace(is_prepared=engine.is_up) for engine in present)
    world = world._replace(engines=(*engines, *world.engines[scope.num_engines :]), has_prepared=True)
    for i in range(scope.num_engines, scope.next_size):
        assert not world.engines[i].is_up
        if all(engine.is_up for engine in world.engines[:i]):
            world = _start(world, scope)
    return world


def _may_commit(world: World, scope: Scope) -> bool:
    """Returns whether all are there, and none has died since it was prepared."""
    present, added = world.engines[: scope.num_engines], world.engines[scope.num_engines :]
    return all(engine.is_prepared for engine in present) and all(engine.is_up for engine in added)


def _commit(world: World, scope: Scope) -> World:
    world = world._replace(has_committed=True)
    for i in range(scope.num_engines):
        world = _tell(world, i, ("switch",))
    return world


def _lose(world: World, generation: int, i: int) -> World:
    """Ends the epoch of a group, because engine `i` leaves it, dies or joins: the others join again, when they see
    that."""
    engines = world.engines
    for j, engine in enumerate(engines):
        if j == i or not engine.is_up or engine.generation != generation or engine.standing != MEMBER:
            continue
        if engine.verdict is not None:
            engine = engine._replace(is_lost=True)
        else:
            engine = engine._replace(standing=JOINING, vote=None)
        engines = _put(engines, j, engine)
    return world._replace(engines=engines)


def _follow(world: World, i: int) -> World:
    """Does what the order to go over asks for now."""
    engine = world.engines[i]
    if not engine.is_ordered or engine.generation:
        return world
    if engine.verdict is None and may_switch(engine):
        return _switch(world, i)
    return _settle(world, i, engine, engine.waves.on_pause())


def may_switch(engine: Engine) -> bool:
    """Returns whether no step of its group needs this engine."""
    return engine.waves.is_paused or engine.standing == JOINING


def _switch(world: World, i: int) -> World:
    """Makes an engine leave its group for the next one, or end."""
    if i >= world.scope.next_size:
        return _die(world, i)
    world, engine = _lose(world, 0, i), world.engines[i]
    wave = begin_next(world, engine)
    world, waves = world._replace(next_wave=wave), engine.waves._replace(wave=wave, has_notified=False)
    engine = Engine(waves, engine.work, engine.held, is_frozen=engine.is_frozen, generation=1, is_ordered=True)
    world = _settle(world, i, engine, waves.on_resume(bool(engine.work)))
    return keep_pause(world, i)


def begin_next(world: World, engine: Engine) -> int:
    """Returns the wave of the next group once an engine has come."""
    return max(world.next_wave, engine.waves.wave)


def keep_pause(world: World, i: int) -> World:
    """Pauses an engine again which was to pause, or has paused, when it went over."""
    engine = world.engines[i]
    return _settle(world, i, engine, engine.waves.on_pause()) if engine.is_frozen else world


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
    if state.wave > max(world.group_wave, world.next_wave, *(engine.waves.wave for engine in world.engines)) + 1:
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
        if engine.generation and not world.has_committed:
            continue  # it waits for the order
        if world.has_committed and not engine.generation:
            raise ViolationError(f"W6: engine {i} never goes over")
        if waves.is_running or engine.vote is not None:
            raise ViolationError(f"W1: engine {i} waits for ever for the others")
        if waves.pause is Pause.ASKED or waves.is_paused != world.is_paused:
            raise ViolationError(f"W1: engine {i} is in pause state {waves.pause.name}")
        if (engine.work or engine.held) and not waves.is_paused:
            raise ViolationError(f"W1: engine {i} has requests and does not run")
        if waves.wave != world.wave_of(engine.generation) and not (engine.generation and engine.standing == JOINING):
            raise ViolationError(f"W2: engine {i} is idle in wave {waves.wave} of {world.wave_of(engine.generation)}")


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
