"""The group of engines of one host that step together: its members, and their agreement after each step.

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
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from quire.engine.waves import Verdict, Vote, agree
from quire.errors import ConfigError
from quire.wire.shared_memory import GROUP_PAGE_BYTES

MAX_RANKS = 64
LOOK_S = 0.02
"""Interval at which ranks that keep others waiting are checked for their deaths."""
_VERDICTS, _WAVES, _NUM_RANKS = 0, 2, 4
"""Words of the page: the last two verdicts (4 * number + verdict), the waves after them, and the highest rank + 1."""
_FIRST_PLACE, _PLACE_WORDS = 8, 4
_STANDING, _VOTES = 0, 1
"""Words of a rank's place."""
_ABSENT, _JOINING, _PAUSED, _MEMBER = 0, 1, 2, 3
"""Standings; `_MEMBER` + n: member since agreement n."""
_HAS_WORK, _IS_PAUSING, _FLAGS = 1, 2, 4
"""Flags of a vote, which stand below its number. A rank that joins votes without a number."""


class Agreement(NamedTuple):
    """Result of an agreement, and the wave of the group after it."""

    verdict: Verdict
    wave: int


class DPGroup:
    """The group, as one rank takes part in it. Belongs to one thread.

    `join` first. Then, for each agreement: `enter`, and `poll` until it returns the agreement. While this rank
    `is_joining`, it may enter as often as its vote changes, and polls when it is idle, too. `leave` at the end.
    """

    def __init__(self, path: Path, rank: int, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens the page. Raises ConfigError for a rank that cannot be, OSError for a page that cannot be opened."""
        if not (1 < size <= MAX_RANKS and 0 <= rank < size):
            raise ConfigError(f"engine {rank} of {size} cannot be in a group: one has 2 to {MAX_RANKS} engines")
        self._path, self._rank, self._clock = path, rank, clock
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._file, GROUP_PAGE_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._life = -1
        self._number = 0
        """Number of the agreement that this rank has entered last, or was admitted by."""
        self.is_joining = True
        """True until this rank has seen the agreement that admits it, and after a pause."""
        self._next_look = 0.0

    def join(self) -> int:
        """Takes this rank's place. Returns the wave of the group."""
        self._life = os.open(self._life_file(self._rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._life, fcntl.LOCK_EX)
        with self._locked():
            self._words[_NUM_RANKS] = max(self._words[_NUM_RANKS], self._rank + 1)
        return self.rejoin()

    def rejoin(self) -> int:
        """Joins again after a pause. Returns the wave of the group."""
        with self._locked():
            place = self._place(self._rank)
            self._words[place + _VOTES] = self._words[place + _VOTES + 1] = 0
            self._words[place + _STANDING] = _JOINING
            self.is_joining = True
            return self.wave

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
        """Returns the agreement that this rank waits for, once there is one. Decides it if all votes are there."""
        if self.is_joining:
            since = self._words[self._place(self._rank) + _STANDING]
            if since >= _MEMBER:
                self.is_joining, self._number = False, since - _MEMBER
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
            self._words[self._place(self._rank) + _STANDING] = _ABSENT
        self._words.release()
        self._memory.close()
        for file in (self._life, self._file):
            if file >= 0:
                os.close(file)
        self._life = self._file = -1

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
        for rank, standing in self._standings().items():
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
        self._words[_WAVES + number % 2] = wave + (verdict is not Verdict.GO and not any_paused)
        self._words[_VERDICTS + number % 2] = number * _FLAGS | verdict
        for rank in votes:
            if standings[rank] == _JOINING:
                self._words[self._place(rank) + _STANDING] = _MEMBER + number

    def _remove_dead(self) -> None:
        """Removes ranks whose processes have ended. Called with the lock."""
        for rank in self._standings():
            if rank != self._rank and self._is_dead(rank):
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
