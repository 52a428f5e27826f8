"""The group of engines of one host that step together: its members, and their agreement after each step.
`net_group.py` has that of engines on several machines.

The group is a shared page. Each rank has a place in it, with a word for its standing and one for each of its last two
votes. Agreements are numbered, and a vote carries the number of its agreement. When all members have voted, one of them
writes the verdict. Words are 8 bytes, aligned, and written at once; verdicts are written under a lock (flock(2)), which
the system releases if its holder dies.

::

    absent ──join──▶ joining ──agreement──▶ member ──leave, death──▶ absent
                        ▲                      │
                        └──rejoin── paused ◀───┘ Verdict.PAUSE

An engine that joins takes part from the next agreement on, whether it waits for that or is idle; where there is no
member, those that wait decide. Engines that are paused do not vote: until they are back nothing is decided but that
further ones pause. A rank holds a lock file as long as it lives, by which the others notice its death: it is missed for
`LOOK_S` at most, and one that is started again disturbs none of them.

A group that shares experts is different, because none of its ranks can step without the others. It decides with all
ranks only. The time from the agreement that admits them, together, until one leaves, dies or joins is an epoch, with
barriers of its own, which fail when it has ended. The others then join again, and wait for the one that is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError
from quire.wire.group import Verdict, Vote, agree
from quire.wire.shared_memory import GROUP_PAGE_BYTES, begin_epoch, end_epoch, has_epoch_ended

MAX_RANKS = 64
LOOK_S = 0.02
"""Interval at which ranks that keep others waiting are checked for their deaths."""
_VERDICTS, _WAVES, _NUM_RANKS, _EPOCH = 0, 2, 4, 5
"""Words of the page: the last two verdicts (4 * number + verdict), the waves after them, the highest rank + 1, and the
number of the last epoch."""
_FIRST_PLACE, _PLACE_WORDS = 8, 8
_STANDING, _VOTES, _LIFE, _FINGERPRINT, _WEIGHTS = 0, 1, 3, 4, 5
"""Words of a rank's place. The last three: how often it was started, what decides the bits of its steps and never
changes, and its weights, which do."""
_ABSENT, _JOINING, _PAUSED, _MEMBER = 0, 1, 2, 3
"""Standings; `_MEMBER` + n: member since agreement n."""
_HAS_WORK, _IS_PAUSING, _FLAGS = 1, 2, 4
"""Flags of a vote, which stand below its number. A rank that joins votes without a number."""


class _Epochs(NamedTuple):
    """The epochs of a group that shares experts, in the file of all."""

    file: int
    generation: int

    def begin(self, epoch: int) -> None:
        begin_epoch(self.file, epoch, self.generation)

    def end(self, epoch: int) -> None:
        end_epoch(self.file, epoch, self.generation)

    def has_ended(self, epoch: int) -> bool:
        return has_epoch_ended(self.file, epoch, self.generation)


class Agreement(NamedTuple):
    """Result of an agreement, and the wave of the group after it."""

    verdict: Verdict
    wave: int


class DPGroup:
    """The group, as one rank takes part in it. Belongs to one thread.

    `join` first. Then, for each agreement: `enter`, and `poll` until it returns the agreement. While this rank
    `is_joining`, it may enter as often as its vote changes, and polls when it is idle, too. `leave` at the end. If
    experts are shared, `rejoin` as soon as `is_lost`.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        size: int,
        clock: Callable[[], float] = time.monotonic,
        experts_file: int | None = None,
        generation: int = 0,
    ) -> None:
        """Opens the page. `experts_file`: that of a group of `size` ranks which share experts; None: they do not, and
        `size` is a limit. `generation` is the number of such a group.

        Raises ConfigError for a rank that cannot be, OSError for a page that cannot be opened."""
        if not ((1 if experts_file is not None else 2) <= size <= MAX_RANKS and 0 <= rank < size):
            raise ConfigError(f"engine {rank} of {size} cannot be in a group: one has 2 to {MAX_RANKS} engines")
        self._path, self._rank, self._clock, self._size = path, rank, clock, size
        self._experts = None if experts_file is None else _Epochs(experts_file, generation)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._file, GROUP_PAGE_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._life = -1
        self._number = 0
        """Number of the agreement that this rank has entered last, or was admitted by."""
        self.is_joining = True
        """True until this rank has seen the agreement that admits it, and after a pause."""
        self._next_look = 0.0
        self.epoch = 0
        """Number of the epoch that this rank was admitted to last."""
        self._watches: dict[int, _LifeWatch] = {}

    def join(self, fingerprint: int = 0, wave: int = 0, weights: int = 0) -> int:
        """Takes this rank's place. Returns the wave of the group. `fingerprint`, 64 bits, is the same in ranks that can
        share experts: ConfigError if that of another rank differs. A group that takes the place of another begins with
        the greatest `wave` of its ranks. `weights`: see there."""
        self._life = os.open(self._life_file(self._rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._life, fcntl.LOCK_EX)
        with self._locked():
            self._words[_NUM_RANKS] = max(self._words[_NUM_RANKS], self._rank + 1)
            if not self._last_number():
                self._words[_WAVES] = max(self._words[_WAVES], wave)
            place = self._place(self._rank)
            self._words[place + _LIFE] += 1
            self._words[place + _FINGERPRINT], self._words[place + _WEIGHTS] = fingerprint, weights
            self._remove_dead()
            for rank in self._standings():
                if rank != self._rank and self._words[self._place(rank) + _FINGERPRINT] != fingerprint:
                    raise ConfigError(
                        f"engine {self._rank} cannot share experts with engine {rank}: the weights, or what else "
                        "decides the bits of a step, have changed since that was started; restart the server"
                    )
        return self.rejoin()

    def rejoin(self) -> int:
        """Joins again after a pause, or where the epoch has ended. Returns the wave of the group."""
        with self._locked():
            self._end_epoch()
            place = self._place(self._rank)
            self._words[place + _VOTES] = self._words[place + _VOTES + 1] = 0
            self._words[place + _STANDING] = _JOINING
            self.is_joining = True
            return self.wave

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def has_left(self) -> bool:
        """True once this rank has left."""
        return self._file < 0

    @property
    def fingerprint(self) -> int:
        """The fingerprint that this rank has joined with."""
        return int(self._words[self._place(self._rank) + _FINGERPRINT])

    @property
    def weights(self) -> int:
        """Digest of this rank's weights, 64 bits: ranks that share experts go on only while they have the same."""
        return int(self._words[self._place(self._rank) + _WEIGHTS])

    @weights.setter
    def weights(self, digest: int) -> None:
        self._words[self._place(self._rank) + _WEIGHTS] = digest

    @property
    def size(self) -> int:
        """Number of ranks, or the limit of it."""
        return self._size

    @property
    def shares_experts(self) -> bool:
        """True if no rank can step without the others."""
        return self._experts is not None

    @property
    def network(self) -> None:
        """The machines of this rank's epoch: there is one only."""
        return None

    @property
    def is_lost(self) -> bool:
        """True if this rank takes part in an epoch that has ended: no step of it can succeed any more."""
        is_member = self._file >= 0 and not self.is_joining
        return self._experts is not None and is_member and self._experts.has_ended(self.epoch)

    def _end_epoch(self) -> None:
        if self._experts is not None and self._words[_EPOCH]:
            self._experts.end(self._words[_EPOCH])

    def watch(self, on_death: Callable[[], None]) -> None:
        """Ends this rank's epoch as soon as the process of another rank of it ends, and then calls `on_death` on
        another thread."""
        for rank in range(self._size):
            life = int(self._words[self._place(rank) + _LIFE])
            known = self._watches.get(rank)
            if rank != self._rank and (known is None or known.life != life):
                self._watches[rank] = watch = _LifeWatch(self._life_file(rank), life, self._note_death, on_death)
                watch.start()

    def _note_death(self, rank_file: Path, life: int) -> None:
        """Ends the epoch, unless the rank was started again: then it has ended it. Called on another thread."""
        rank = int(rank_file.name.rpartition("-")[2])
        with contextlib.suppress(ValueError):  # this rank has left
            if self._experts is not None and self._words[self._place(rank) + _LIFE] == life:
                self._experts.end(self.epoch)

    @property
    def wave(self) -> int:
        """Wave of the group after the last agreement."""
        return int(self._words[_WAVES + self._last_number() % 2])

    def enter(self, vote: Vote) -> None:
        """Votes in the next agreement. A rank that is joining votes in whichever comes next."""
        self._next_look = self._clock() + LOOK_S
        flags = vote.has_work * _HAS_WORK | vote.is_pausing * _IS_PAUSING
        place = self._place(self._rank)
        if self.is_joining:
            self._words[place + _VOTES] = _FLAGS | flags
            return
        self._number += 1
        self._words[place + _VOTES + self._number % 2] = self._number * _FLAGS | flags

    def poll(self) -> Agreement | None:
        """Returns the agreement that this rank waits for, once there is one. Decides it if all votes are there. A rank
        that has left waits for none."""
        if self.has_left:
            return None
        if self.is_joining:
            since = self._words[self._place(self._rank) + _STANDING]
            if since >= _MEMBER:
                self.is_joining, self._number, self.epoch = False, since - _MEMBER, int(self._words[_EPOCH])
        if not self.is_joining and (agreement := self._read_verdict(self._number)) is not None:
            return self._take(agreement)
        if self.is_joining and not self._words[self._place(self._rank) + _VOTES]:
            return None  # idle
        if self._clock() < self._next_look and not self._is_decidable():
            return None
        self._next_look = self._clock() + LOOK_S
        with self._locked():
            self._remove_dead()
            self._decide()
        return None

    def _take(self, agreement: Agreement) -> Agreement:
        if agreement.verdict is Verdict.PAUSE:
            self._words[self._place(self._rank) + _STANDING] = _PAUSED
        return agreement

    def leave(self) -> None:
        """Gives the place up. Idempotent."""
        if self._file < 0:
            return
        with self._locked():
            self._end_epoch()
            self._words[self._place(self._rank) + _STANDING] = _ABSENT
        self._words.release()
        self._memory.close()
        for file in (self._life, self._file):
            if file >= 0:
                os.close(file)
        self._life = self._file = -1
        self.is_joining = False

    # -- the page -----------------------------------------------------------------------------------------------------

    def _place(self, rank: int) -> int:
        return _FIRST_PLACE + rank * _PLACE_WORDS

    def _life_file(self, rank: int) -> Path:
        return self._path.with_name(f"{self._path.name}-{rank}")

    def _last_number(self) -> int:
        return max(int(self._words[_VERDICTS]), int(self._words[_VERDICTS + 1])) // _FLAGS

    def _read_verdict(self, number: int) -> Agreement | None:
        word = self._words[_VERDICTS + number % 2]
        if word // _FLAGS != number or not number:
            return None
        return Agreement(Verdict(word % _FLAGS), int(self._words[_WAVES + number % 2]))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _standings(self) -> dict[int, int]:
        standings = {rank: int(self._words[self._place(rank) + _STANDING]) for rank in range(self._words[_NUM_RANKS])}
        return {rank: standing for rank, standing in standings.items() if standing != _ABSENT}

    def _get_votes(self, number: int) -> dict[int, Vote | None]:
        """Returns the votes in an agreement, None for ranks that join and are idle. Returns nothing if one of a member
        is missing, or if there is none at all."""
        votes: dict[int, Vote | None] = {}
        standings = self._standings()
        if self._experts is not None:
            are_members = {standing >= _MEMBER for standing in standings.values() if standing != _PAUSED}
            weights = {self._words[self._place(rank) + _WEIGHTS] for rank in standings}
            if len(standings) < self._size or len(are_members) > 1 or len(weights) > 1:
                return {}
        for rank, standing in standings.items():
            place = self._place(rank)
            if standing >= _MEMBER:
                word = self._words[place + _VOTES + number % 2]
                if word // _FLAGS != number:
                    return {}
            elif standing == _JOINING:
                word = self._words[place + _VOTES]
            else:
                continue
            votes[rank] = Vote(bool(word & _HAS_WORK), bool(word & _IS_PAUSING)) if word else None
        return votes if any(votes.values()) else {}

    def _is_decidable(self) -> bool:
        """Returns whether all votes seem to be there, and this rank is the first of those that wait."""
        votes = self._get_votes(self._last_number() + 1)
        return bool(votes) and next(rank for rank, vote in votes.items() if vote is not None) == self._rank

    def _decide(self) -> None:
        """Writes the next verdict, if it can be decided, and admits the ranks that join. Called with the lock.

        The verdict is one word, so that it is there or not: if this process dies before all are admitted, those left
        out join at the next agreement.
        """
        last = self._last_number()
        number, wave = last + 1, int(self._words[_WAVES + last % 2])
        votes = self._get_votes(number)
        if not votes:
            return
        standings = self._standings()
        any_paused = _PAUSED in standings.values()
        verdict = agree((vote or Vote(False, False) for vote in votes.values()), any_paused)
        if verdict is None:
            return
        if self._experts is not None and _JOINING in standings.values():
            self._words[_EPOCH] += 1
            self._experts.begin(self._words[_EPOCH])
        self._words[_WAVES + number % 2] = wave + (verdict is not Verdict.GO and not any_paused)
        self._words[_VERDICTS + number % 2] = number * _FLAGS | verdict
        for rank in votes:
            if standings[rank] == _JOINING:
                self._words[self._place(rank) + _STANDING] = _MEMBER + number

    def _remove_dead(self) -> None:
        """Removes ranks whose processes have ended. Called with the lock."""
        for rank in self._standings():
            if rank != self._rank and self._is_dead(rank):
                self._end_epoch()
                self._words[self._place(rank) + _STANDING] = _ABSENT

    def _is_dead(self, rank: int) -> bool:
        try:
            file = os.open(self._life_file(rank), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(file)
        return True


class _LifeWatch(threading.Thread):
    """Waits for the end of a rank's process, which releases its lock file."""

    def __init__(self, path: Path, life: int, note: Callable[[Path, int], None], on_death: Callable[[], None]) -> None:
        super().__init__(name="LifeWatch", daemon=True)
        self._path, self.life, self._note, self._on_death = path, life, note, on_death

    def run(self) -> None:
        """Runs the thread."""
        file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            self._note(self._path, self.life)
        finally:
            os.close(file)
        self._on_death()
