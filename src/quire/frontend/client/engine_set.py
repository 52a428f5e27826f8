"""Several engines of one client: which requests are where, and where they go when an engine dies, drains or is removed.

`EngineSet` holds an `EngineLink` per engine and has the same face as one: calls and messages go in; messages per
engine, deliveries and answers come out. It owns no socket and reads no clock.

::

    add_request ──Router.place──▶ link i ──on_death(i), drain(i), remove(i), on_gone(i)──▶ released ──place──▶ link j

Invariants, whatever happens to the engines: what was delivered of a request is at every moment a prefix of its one
correct output, and its end is delivered exactly once. A request is in the journal of exactly one link. The suspects of
a crash are tried alone on the engine that crashed, when it is back: they never reach another engine untried, unless
theirs is gone for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Literal

from quire.frontend.client.control_calls import Answer
from quire.frontend.client.link import EngineLink, LinkState, Message
from quire.frontend.client.set_calls import SetCalls
from quire.frontend.routing.policy import LeastWait
from quire.frontend.routing.router import Router
from quire.frontend.supervision.journal import JournalEntry
from quire.frontend.supervision.quarantine import CoreDeath
from quire.logger import init_logger
from quire.wire.engine_core import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from quire.wire.stats import SchedulerStats
from quire.wire.utility import UTILITIES

logger = init_logger(__name__)

Reroute = Literal["auto", "wait", "never"]
"""Fate of the requests of an engine that dies: they move at once where that is quicker than to wait for it;
they wait for it, and move if it is gone for good; they never move."""
MoveReason = Literal["killed", "crash", "hang", "lost", "draft", "start", "gone", "drain", "waiting"]
"""Cause of the death of the engine that requests were moved from, or: it is gone for good; it is drained; it was down
when another became ready."""
MOVE_REASONS: tuple[MoveReason, ...] = ("killed", "crash", "hang", "lost", "draft", "start", "gone", "drain", "waiting")


class _Member:
    """One engine."""

    def __init__(self, index: int, link: EngineLink, now: float) -> None:
        self.index = index
        self.link = link
        self.is_draining = False
        """True: it gets no requests."""
        self.is_away = False
        """True: it is on a machine that is out of reach."""
        self.was_up = False
        self.down_since: float | None = now
        """Time of its death, or of its first start; None while it is up."""
        self.restart_s = 0.0
        """Seconds its last start took; 0: unknown."""
        self.stats: SchedulerStats | None = None

    @property
    def numerics(self) -> str:
        """The `numerics_id` of its last core."""
        ready = self.link.ready_response
        return "" if ready is None else ready.numerics_id


class EngineSet:
    """The engines of one client. Single-threaded. Take `messages`, `deliveries` and `answers` after each call.

    `counts` has the sums of the links' counts, and "moved_requests", "moved_tokens" (computed again for requests that
    had output), "foreign_moves" (to an engine that computes other bits), "moves.ENGINE.REASON".

    A request that has output moves to an engine of the same `numerics_id` only, unless `reroutes_any` is set.
    """

    def __init__(
        self,
        links: Sequence[EngineLink] = (),
        *,
        router: Router | None = None,
        reroute: Reroute = "auto",
        clock: Callable[[], float] = lambda: 0.0,
        first_engine: int = 0,
        remote_engines: Container[int] = (),
        reroutes_any: bool = False,
    ) -> None:
        """Engine `first_engine + i` has `links[i]`. `clock` is only used to learn how long an engine takes to start.
        `remote_engines` are out of reach until `regain`."""
        self.messages: list[tuple[int, Message]] = []
        self.deliveries: list[EngineCoreOutputs] = []
        self.answers: list[Answer] = []
        self.router = Router(LeastWait()) if router is None else router
        self._members: dict[int, _Member] = {}
        self._reroute: Reroute = reroute
        self._clock = clock
        self._calls = SetCalls()
        self._counts: Counter[str] = Counter()
        """Counts of the set itself, and those of links that were removed."""
        self._is_closing = False
        self._reroutes_any = reroutes_any
        self.least_model_len = 0
        """Context length that clients were promised: an engine on another machine with less is left out."""
        for index, link in enumerate(links, start=first_engine):
            self._members[index] = member = _Member(index, link, clock())
            member.is_away = index in remote_engines

    # -- the face of a link -------------------------------------------------------------------------------------------

    @property
    def links(self) -> dict[int, EngineLink]:
        """The link of each engine."""
        return {index: member.link for index, member in self._members.items()}

    @property
    def link(self) -> EngineLink:
        """The link of the only engine, or of the first one."""
        return next(iter(self._members.values())).link

    @property
    def state(self) -> LinkState:
        """UP if any engine is, GONE if all are."""
        states = {member.link.state for member in list(self._members.values())}
        for state in (LinkState.UP, LinkState.RESTORING, LinkState.DOWN):
            if state in states:
                return state
        return LinkState.GONE

    @property
    def gone_reason(self) -> str:
        """Why no core of an engine will come any more; empty: they will."""
        return next(filter(None, (member.link.gone_reason for member in list(self._members.values()))), "")

    @property
    def counts(self) -> Counter[str]:
        """Counts of all engines."""
        counts = self._counts.copy()
        for reason, count in self.router.decisions.copy().items():
            counts[f"routed.{reason}"] = count
        counts["expected_cached_tokens"] = self.router.num_expected_cached_tokens
        for member in list(self._members.values()):
            counts.update(member.link.counts)
        return counts

    @property
    def num_live_requests(self) -> int:
        """Requests that have not ended."""
        return sum(member.link.num_live_requests for member in list(self._members.values()))

    @property
    def is_closing(self) -> bool:
        """The caller ends the engines."""
        return self._is_closing

    @is_closing.setter
    def is_closing(self, value: bool) -> None:
        self._is_closing = value
        for member in self._members.values():
            member.link.is_closing = value

    def engine_of(self, request_id: str) -> int | None:
        """Returns the engine a live request is at."""
        return next((i for i, member in list(self._members.items()) if member.link.has_request(request_id)), None)

    # -- the caller ---------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Places a request. Raises ValueError for an id in use."""
        if len(self._members) == 1:
            member = next(iter(self._members.values()))
            member.link.add_request(request)
            self._settle(member)
            return
        if self.router.has_request(request.request_id) and self.engine_of(request.request_id) is not None:
            raise ValueError(f"request id {request.request_id} is in use; ids of live requests are unique")
        member = self._members[self.router.place(request, self._candidates())]
        member.link.add_request(request)
        self._settle(member)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Forgets requests: none of their outputs is delivered any more. Unknown ids are ignored."""
        for member in self._members.values():
            ids = [i for i in request_ids if member.link.has_request(i)]
            if ids:
                member.link.abort_requests(ids)
                for request_id in ids:
                    self.router.remove(request_id)
                self._settle(member)

    def call_utility(self, method: str, args: tuple[Any, ...], engine: int | None = None) -> int:
        """Calls a control verb of all engines; one that changes nothing, of those that are up. Returns the id that the
        joint answer will have. `engine`: calls only that one."""
        call = self._calls.begin(method, args)
        if engine is not None:
            member = self._members[engine]
            self._calls.note_sent(call, engine, member.link.call_utility(method, args))
            self._settle(member)
            return call.call_id
        members = [member for member in self._members.values() if not member.is_away] or list(self._members.values())
        spec = UTILITIES.get(method)
        if not call.is_remembered and spec is not None and spec.is_repeatable:
            members = [member for member in members if member.link.state is LinkState.UP] or members
        for member in members:
            self._calls.note_sent(call, member.index, member.link.call_utility(method, args))
        for member in members:
            self._settle(member)
        return call.call_id

    # -- the engines --------------------------------------------------------------------------------------------------

    def on_ready(self, index: int, ready: EngineCoreReadyResponse) -> None:
        """Handles the connection of an engine."""
        member = self._members.get(index)
        if member is None or member.is_away:
            self._counts["stale"] += 1
            return
        if ready.max_model_len < self.least_model_len:
            logger.error(
                "engine %d is left out: it has a context of %d tokens, and clients were promised %d; give "
                "--max-model-len on every machine",
                index,
                ready.max_model_len,
                self.least_model_len,
            )
            return
        member.link.on_ready(ready)
        if member.link.ready_response is ready:
            self.router.open_engine(index, ready)
        self._settle(member)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Takes in a message of an engine."""
        member = self._members.get(outputs.engine_index)
        if member is None:
            self._counts["stale"] += 1
            return
        if len(self._members) == 1:
            member.link.on_outputs(outputs)
            self._settle(member)
            return
        # The link strips and renames: what matters here is read before, by which request after.
        marked = [o for o in outputs.outputs if o.prefill_stats is not None or o.finish_reason is not None]
        member.link.on_outputs(outputs)
        if any(delivered is outputs for delivered in member.link.deliveries):  # else it is stale, or repeated
            for output in marked:
                if output.finish_reason is None:
                    self.router.note_token(output.request_id)
                else:
                    self.router.remove(output.request_id)
            if outputs.scheduler_stats is not None:
                member.stats = outputs.scheduler_stats
                self.router.note_step(outputs)
        self._settle(member)

    def on_corrupt_message(self) -> None:
        """Handles a message that could not be decoded: each engine is asked for the number of its last one."""
        for position, member in enumerate(self._members.values()):
            if position == 0:
                member.link.on_corrupt_message()
            else:
                member.link.probe()
            self._settle(member)

    def on_death(self, index: int, death: CoreDeath) -> None:
        """Handles the death of an engine; another incarnation may come. Its requests move, but for the suspects."""
        member = self._members.get(index)
        if member is None:
            return
        member.link.on_death(death)
        self.follow_death(index, death)

    def follow_death(self, index: int, death: CoreDeath) -> None:
        """Moves the requests of an engine whose link has taken in its death, but for the suspects."""
        member = self._members[index]
        if member.down_since is None:
            member.down_since = self._clock()
        self.router.close_engine(index)
        self._settle(member)
        if self._reroute == "auto" and len(self._members) > 1 and member.link.state is not LinkState.GONE:
            self._move_from(member, death.cause)

    def lose(self, index: int, why: str) -> None:
        """Handles that the machine of an engine is out of reach, or that its engine is: its core may live on. All its
        requests go on at others, if there are any; without one they wait."""
        member = self._members.get(index)
        if member is None or member.is_away:
            return
        member.is_away, member.is_draining, member.restart_s = True, False, 0.0
        self.answers += self._calls.forget_engine(index)
        member.link.cut(CoreDeath("lost", why))
        self._note_lost(member)

    def _note_lost(self, member: _Member) -> None:
        if member.down_since is None:
            member.down_since = self._clock()
        self.router.close_engine(member.index)
        self._settle(member)
        if self._reroute == "auto" and self._targets(member):
            self._empty(member, "lost")

    def regain(self, index: int) -> None:
        """Handles that the machine of an engine is in reach: its core, if it lives, begins again; it is brought into
        the state of the others before it gets requests."""
        member = self._members.get(index)
        if member is None or not member.is_away:
            return
        others = [m for m in self._members.values() if m is not member and m.link.ready_response is not None]
        others.sort(key=lambda other: other.is_away)
        if others:
            member.link.inherit_calls(others[0].link)
        member.is_away = False
        for call in self._calls.get_remembered():
            self._calls.note_sent(call, index, member.link.call_utility(call.method, call.args))
        self._settle(member)
        self.messages.append((index, Message(EngineCoreRequestType.GREET, None)))

    def on_gone(self, index: int, reason: str) -> None:
        """Handles that no incarnation of an engine will come any more. Its requests move, or fail with the reason."""
        member = self._members.get(index)
        if member is None or member.link.state is LinkState.GONE:
            return
        others = [other for other in self._members.values() if other is not member and not _is_gone(other)]
        if others and self._reroute != "never" and not self._is_closing:
            self._empty(member, "gone")
            if member.link.num_live_requests:
                reason += "; no other engine computes the same numbers (--reroute-any-numerics moves streams anyway)"
        member.link.on_gone(reason)
        self._settle(member)
        if others:
            self.answers += self._calls.forget_engine(index)

    def close_all(self, reason: str) -> None:
        """Ends everything: no engine will come any more."""
        self._is_closing = True
        for index in list(self._members):
            self.on_gone(index, reason)

    # -- size ---------------------------------------------------------------------------------------------------------

    def add_engine(self, index: int, link: EngineLink) -> None:
        """Adds an engine that is being started. It is brought into the state of the others before it gets requests."""
        member = _Member(index, link, self._clock())
        other = next((m for m in self._members.values() if not _is_gone(m)), None)
        if other is not None:
            link.inherit_calls(other.link)
        link.is_closing = self._is_closing
        self._members[index] = member
        self._place_anew()
        for call in self._calls.get_remembered():
            self._calls.note_sent(call, index, link.call_utility(call.method, call.args))

    def _place_anew(self) -> None:
        """Makes the router know what is where: with one engine it is not asked."""
        for index, member in self._members.items():
            for request_id in self.router.placed_at(index):
                self.router.remove(request_id)
            suspects, others = member.link.get_entries()
            for entry in (*suspects, *others):
                self.router.put(entry.request, index, len(entry.output_token_ids))
                if entry.has_output:
                    self.router.note_token(entry.request_id)

    def remove_engine(self, index: int) -> None:
        """Removes an engine: its requests go on at others. Raises ValueError for the last one."""
        member = self._members[index]
        if len(self._members) == 1:
            raise ValueError(f"engine {index} is the last one")
        member.is_draining = True
        self._empty(member, "drain")
        self._settle(member)
        self.answers += self._calls.forget_engine(index)
        self._counts.update(member.link.counts)
        self.router.close_engine(index)
        del self._members[index]

    def drain(self, index: int, *, moves: bool) -> None:
        """Sends an engine no further requests. `moves`: those it has go on at others; else they end there."""
        member = self._members[index]
        member.is_draining = True
        if moves:
            self._move_from(member, "drain")

    def undrain(self, index: int) -> None:
        """Sends an engine requests again."""
        if (member := self._members.get(index)) is not None:
            member.is_draining = False
            self._gather(member)

    def can_empty(self, index: int) -> bool:
        """Returns whether all that an engine has may go on at others."""
        member = self._members[index]
        entries = [entry for part in member.link.get_entries() for entry in part if entry.has_output]
        return not entries or bool(self._candidates(apart_from=member, like=member))

    def is_draining(self, index: int) -> bool:
        """Returns True for an engine that gets no requests."""
        return self._members[index].is_draining

    # -- moves --------------------------------------------------------------------------------------------------------

    def _candidates(self, apart_from: _Member | None = None, like: _Member | None = None) -> list[int]:
        """Returns the engines that a request may go to: the best of those that work on requests, those that will, and
        those that might. `like`: those that compute what this one does; there may be none."""
        members = [
            m for m in self._members.values() if m is not apart_from and (like is None or self._is_like(m, like))
        ]
        if fit := [m.index for m in members if m.link.is_open and not m.is_draining]:
            return fit
        ranks: list[Callable[[_Member], bool]] = [
            lambda m: m.link.state is LinkState.UP and not m.is_draining,
            lambda m: not _is_gone(m) and not m.is_draining and not m.is_away,
            lambda m: not _is_gone(m),
        ]
        for is_fit in ranks:
            if fit := [member.index for member in members if is_fit(member)]:
                return fit
        return [member.index for member in members]

    def _is_like(self, member: _Member, other: _Member) -> bool:
        """Returns whether an engine may go on with streams that another has begun."""
        return self._reroutes_any or member.numerics == other.numerics

    def _targets(self, source: _Member, *, with_output: bool = False) -> list[int]:
        """Returns the engines that could work now on what `source` gives up. `with_output`: on streams, too."""
        return [
            member.index
            for member in self._members.values()
            if member is not source
            and member.link.is_open
            and not member.is_draining
            and (not with_output or self._is_like(member, source))
        ]

    def _move_from(self, source: _Member, reason: MoveReason) -> None:
        """Moves the requests of an engine, but for its suspects, to engines that work on them now. Without such engines
        they stay, and move when there is one."""
        _, entries = source.link.get_entries()
        if not self._targets(source, with_output=True):
            entries = [entry for entry in entries if not entry.has_output and self._targets(source)]
        if not entries:
            return
        if reason not in ("drain", "gone"):
            entries = [entry for entry in entries if self._is_worth_moving(source, entry)]
        self._move(source, entries, reason)

    def _is_worth_moving(self, source: _Member, entry: JournalEntry) -> bool:
        """Returns whether another engine gives the next token sooner than the engine that has to be started again."""
        if not source.restart_s:
            return True
        num_tokens = len(entry.request.prompt_token_ids or ()) + len(entry.output_token_ids)
        targets = self._targets(source, with_output=entry.has_output)
        wait = min(self.router.predict_wait(index, num_tokens) for index in targets)
        own = self.router.predict_wait(source.index, num_tokens)  # it computes everything again, too
        return wait < source.restart_s + own

    def _move(self, source: _Member, entries: list[JournalEntry], reason: MoveReason) -> None:
        like = self._candidates(apart_from=source, like=source)
        entries = [entry for entry in entries if like or not entry.has_output]
        if not entries:
            return
        source.link.release(entries)
        num_tokens = 0
        candidates = self._candidates(apart_from=source)
        for entry in entries:
            self.router.remove(entry.request_id)
            choice = like if entry.has_output else candidates
            target = self._members[self.router.place(entry.request, choice, len(entry.output_token_ids))]
            if entry.has_output:
                num_tokens += len(entry.request.prompt_token_ids or ()) + len(entry.output_token_ids)
                self._counts["foreign_moves"] += target.numerics != source.numerics
            target.link.adopt([entry])
            self._settle(target)
        self._counts["moved_requests"] += len(entries)
        self._counts["moved_tokens"] += num_tokens
        self._counts[f"moves.{source.index}.{reason}"] += len(entries)
        self._settle(source)
        logger.info("%d requests move from engine %d (%s)", len(entries), source.index, reason)

    def _empty(self, source: _Member, reason: MoveReason) -> None:
        """Moves everything from an engine that goes for good. Its suspects are tried elsewhere: on an engine that gives
        its other requests up for that, if there is a third one."""
        suspects, entries = source.link.get_entries()
        self._move(source, entries, reason)
        has_output = any(entry.has_output for entry in suspects)
        candidates = self._candidates(apart_from=source, like=source if has_output else None)
        if not suspects or not candidates:
            return
        target = self._members[min(candidates, key=self.router.num_requests)]
        if any(index != target.index for index in self._targets(source)):
            self._move_from(target, "drain")
        source.link.release(suspects)
        for entry in suspects:
            self.router.remove(entry.request_id)
            self.router.put(entry.request, target.index, len(entry.output_token_ids))
        self._counts["moved_requests"] += len(suspects)
        self._counts[f"moves.{source.index}.{reason}"] += len(suspects)
        target.link.adopt(suspects, are_suspects=True)
        self._settle(target)

    def _gather(self, ready: _Member) -> None:
        """Moves requests that wait for engines which are down to engines that are up, now that one more is."""
        if self._reroute != "auto" or not ready.link.is_open or ready.is_draining:
            return
        for member in list(self._members.values()):
            if member is not ready and member.link.state in (LinkState.DOWN, LinkState.RESTORING):
                self._move_from(member, "waiting")

    # -- after each event ---------------------------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """True if no engine will come any more."""
        return all(_is_gone(member) for member in self._members.values())

    def settle(self) -> None:
        """Takes over what the links have produced: others than the set may call them, too."""
        for member in list(self._members.values()):
            self._settle(member)

    def _settle(self, member: _Member) -> None:
        """Takes over what a link has produced, and notes how its state has changed."""
        link = member.link
        if link.messages:
            self.messages += [(member.index, message) for message in link.messages]
            link.messages.clear()
        if link.answers:
            answers, link.answers = link.answers, []
            self.answers += self._calls.take_answers(member.index, answers)
        if link.deliveries:
            self.deliveries += link.deliveries
            link.deliveries.clear()
        if len(self._members) > 1 and link.num_live_requests != self.router.num_requests(member.index):
            self._forget_ended(member)
        is_up = link.state is LinkState.UP
        if is_up != member.was_up:
            member.was_up = is_up
            self._note_up(member) if is_up else self._note_down(member)

    def _forget_ended(self, member: _Member) -> None:
        """Forgets requests that ended without an output of their engine: refused, found guilty, or failed with it."""
        for request_id in self.router.placed_at(member.index):
            if not member.link.has_request(request_id):
                self.router.remove(request_id)

    def _note_up(self, member: _Member) -> None:
        if member.down_since is not None:
            member.restart_s = max(0.0, self._clock() - member.down_since)
            member.down_since = None
        if len(self._members) > 1:
            self._gather(member)

    def _note_down(self, member: _Member) -> None:
        """Reports an engine without requests: its last statistics are those of a core that is gone."""
        stats = member.stats
        if stats is not None and len(self._members) > 1:
            member.stats = None
            empty = SchedulerStats(num_free_blocks=stats.num_blocks)
            self.deliveries.append(EngineCoreOutputs(engine_index=member.index, scheduler_stats=empty))


def _is_gone(member: _Member) -> bool:
    return member.link.state is LinkState.GONE


def one_engine(link: EngineLink) -> EngineSet:
    """Returns the set of a client with one engine."""
    return EngineSet([link])


def merge_ready(responses: Iterable[EngineCoreReadyResponse]) -> EngineCoreReadyResponse:
    """Returns the joint response of several engines: the shortest context, the sum of the blocks, the oldest state."""
    first, *others = sorted(responses, key=lambda ready: ready.engine_index)
    if not others:
        return first
    all_of = (first, *others)
    return EngineCoreReadyResponse(
        max_model_len=min(ready.max_model_len for ready in all_of),
        num_gpu_blocks=sum(ready.num_gpu_blocks for ready in all_of),
        block_size=first.block_size,
        kv_cache_size_tokens=sum(ready.kv_cache_size_tokens for ready in all_of),
        kv_cache_max_concurrency=sum(ready.kv_cache_max_concurrency for ready in all_of),
        supported_tasks=first.supported_tasks,
        dp_stats_address=first.dp_stats_address,
        kv_events=first.kv_events,
        engine_index=first.engine_index,
        incarnation=first.incarnation,
        peak_memory_bytes=sum(ready.peak_memory_bytes for ready in all_of),
        stamps=first.stamps,
    )
