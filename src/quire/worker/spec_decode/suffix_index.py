"""Suffix indexes: which tokens followed which strings in texts, and how often.

`NativeSuffixStore` is `csrc/suffix.cpp`, and what is used where there is a native library. `PlainSuffixStore` gives the
same drafts from plain objects, some twenty times slower. `quire_kernels.h` says what they are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from ctypes import c_void_p
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.worker.kernels.library import native_library

TokenArray = npt.NDArray[np.int32]
MAX_DRAFTS = 128


class SuffixDrafts(NamedTuple):
    """Tokens that may follow."""

    token_ids: list[int]
    confidences: list[int]
    score: float
    """Expected number of tokens that are right, by the shares of occurrences."""


class SuffixRules(NamedTuple):
    """Limits of drafts."""

    max_spec_factor: float
    """Most drafts for each token that agrees."""
    min_token_prob: float
    """Least probability of a draft: the product of shares of occurrences up to it."""


class SuffixStore(Protocol):
    """Indexes by number, in bounded memory. An index has texts; the last of them may go on."""

    def open(self) -> int | None:
        """Returns a new, empty index; None if memory is full."""
        ...

    def close(self, index: int) -> None:
        """Forgets an index."""
        ...

    def extend(self, index: int, token_ids: TokenArray) -> int:
        """Appends tokens to the last text. Returns how many; fewer than given if memory is full."""
        ...

    def end(self, index: int) -> bool:
        """Ends the last text: the next token begins another. Returns False if memory is full."""
        ...

    def drop_first(self, index: int) -> None:
        """Forgets the first text of an index, which must have ended."""
        ...

    def propose(self, index: int, context: TokenArray | None, max_drafts: int, rules: SuffixRules) -> SuffixDrafts:
        """Returns what may follow the context; None: the last text."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that is taken."""
        ...

    @property
    def num_nodes(self) -> int:
        """Strings that are stored."""
        ...


def make_suffix_store(depth: int, max_bytes: int) -> SuffixStore:
    """Returns the native store, if there is a native library. Raises MemoryError if there is no room for it."""
    if native_library() is None:
        return PlainSuffixStore(depth, max_bytes)
    return NativeSuffixStore(depth, max_bytes)


class NativeSuffixStore:
    """A store in C++."""

    def __init__(self, depth: int, max_bytes: int) -> None:
        library = native_library()
        assert library is not None
        handle = library.cdll.qk_suffix_create(depth, max_bytes)
        if handle is None:
            raise MemoryError(f"no {max_bytes} bytes for suffixes: lower suffix_decoding_max_bytes")
        self._cdll, self._handle = library.cdll, c_void_p(handle)
        self._token_ids = np.empty(MAX_DRAFTS, np.int32)
        self._confidences = np.empty(MAX_DRAFTS, np.int32)
        self._score = np.empty(1, np.float64)
        self._few = np.empty(MAX_DRAFTS + 1, np.int32)  # the tokens of a step, at an address known beforehand
        self._few_address: int = self._few.ctypes.data
        weakref.finalize(self, self._cdll.qk_suffix_destroy, self._handle)

    def open(self) -> int | None:
        index: int = self._cdll.qk_suffix_open(self._handle)
        return None if index < 0 else index

    def close(self, index: int) -> None:
        self._cdll.qk_suffix_close(self._handle, index)

    def extend(self, index: int, token_ids: TokenArray) -> int:
        n, address = len(token_ids), self._few_address
        if n <= len(self._few):
            self._few[:n] = token_ids
        else:
            token_ids = np.ascontiguousarray(token_ids, np.int32)
            address = token_ids.ctypes.data
        taken: int = self._cdll.qk_suffix_extend(self._handle, index, address, n)
        return taken

    def end(self, index: int) -> bool:
        return bool(self._cdll.qk_suffix_end(self._handle, index))

    def drop_first(self, index: int) -> None:
        self._cdll.qk_suffix_drop_first(self._handle, index)

    def propose(self, index: int, context: TokenArray | None, max_drafts: int, rules: SuffixRules) -> SuffixDrafts:
        context = None if context is None else np.ascontiguousarray(context, np.int32)
        found = self._cdll.qk_suffix_propose(
            self._handle,
            index,
            None if context is None else context.ctypes.data,
            0 if context is None else len(context),
            min(max_drafts, MAX_DRAFTS),
            *rules,
            self._token_ids.ctypes.data,
            self._confidences.ctypes.data,
            self._score.ctypes.data,
        )
        return SuffixDrafts(self._token_ids[:found].tolist(), self._confidences[:found].tolist(), float(self._score[0]))

    @property
    def num_bytes(self) -> int:
        return int(self._cdll.qk_suffix_bytes(self._handle))

    @property
    def num_nodes(self) -> int:
        return int(self._cdll.qk_suffix_nodes(self._handle))


class _Node:
    """A string: how often it occurs, when last, and what follows it."""

    __slots__ = ("children", "count", "last")

    def __init__(self) -> None:
        self.count = self.last = 0
        self.children: dict[int, _Node] = {}


class _Index:
    def __init__(self) -> None:
        self.root = _Node()
        self.texts: deque[list[int]] = deque([[]])
        self.suffixes = [self.root]
        """Suffixes of the last text, by length."""


BYTES_OF_NODE = 200
"""About what an object of a plain store takes."""


class PlainSuffixStore:
    """A store of Python's objects: every string of every text is a node."""

    def __init__(self, depth: int, max_bytes: int) -> None:
        self._depth, self._max_nodes = depth, max_bytes // BYTES_OF_NODE
        self._indexes: dict[int, _Index] = {}
        self._num_opened = self._clock = 0
        self.num_nodes = 0

    @property
    def num_bytes(self) -> int:
        return self.num_nodes * BYTES_OF_NODE

    def open(self) -> int | None:
        if self.num_nodes >= self._max_nodes:
            return None
        self._num_opened += 1
        self._indexes[self._num_opened] = _Index()
        self.num_nodes += 1
        return self._num_opened

    def close(self, index: int) -> None:
        pending = [self._indexes.pop(index).root]
        while pending:
            self.num_nodes -= 1
            pending.extend(pending.pop().children.values())

    def extend(self, index: int, token_ids: TokenArray) -> int:
        x = self._indexes[index]
        for done, token in enumerate(token_ids.tolist()):
            if self.num_nodes + self._depth > self._max_nodes:
                return done
            x.texts[-1].append(token)
            x.suffixes = [x.root, *(self._count(node, token) for node in x.suffixes[: self._depth])]
        return len(token_ids)

    def _count(self, node: _Node, token: int) -> _Node:
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = _Node()
            self.num_nodes += 1
        self._clock += 1
        child.count, child.last = child.count + 1, self._clock
        return child

    def end(self, index: int) -> bool:
        x = self._indexes[index]
        x.texts.append([])
        x.suffixes = [x.root]
        return True

    def drop_first(self, index: int) -> None:
        x = self._indexes[index]
        text = x.texts.popleft()
        for begin in range(len(text)):
            node = x.root
            path = []
            for token in text[begin : begin + self._depth]:
                path.append((node, token))
                node = node.children[token]
                node.count -= 1
            for parent, token in reversed(path):
                if not parent.children[token].count:
                    del parent.children[token]
                    self.num_nodes -= 1

    def propose(self, index: int, context: TokenArray | None, max_drafts: int, rules: SuffixRules) -> SuffixDrafts:
        x = self._indexes[index]
        tokens = (x.texts[-1] if context is None else context.tolist())[1 - self._depth :]
        drafts = SuffixDrafts([], [], 0.0)
        most, probability, score = MAX_DRAFTS, 1.0, 0.0
        while True:
            length, node = self._longest_suffix(x.root, tokens)
            if not drafts.token_ids:
                most = int(min(max_drafts, MAX_DRAFTS, rules.max_spec_factor * length))
            if not length or len(drafts.token_ids) >= most:
                return drafts._replace(score=score)
            total = sum(child.count for child in node.children.values())
            token, best = max(node.children.items(), key=lambda item: (item[1].count, item[1].last))
            probability *= best.count / total
            if probability < rules.min_token_prob:
                return drafts._replace(score=score)
            score += probability
            drafts.token_ids.append(token)
            drafts.confidences.append(_bucket(best.count, total, length))
            tokens = [*tokens, token][1 - self._depth :]

    def _longest_suffix(self, root: _Node, tokens: Sequence[int]) -> tuple[int, _Node]:
        for begin in range(len(tokens)):
            node = _walk(root, tokens[begin:])
            if node is not None and node.children:
                return len(tokens) - begin, node
        return 0, root


def _walk(node: _Node | None, tokens: Iterable[int]) -> _Node | None:
    for token in tokens:
        if node is None:
            return None
        node = node.children.get(token)
    return node


def _bucket(count: int, total: int, length: int) -> int:
    """Returns the confidence in a token that followed a string of `length` tokens `count` times of `total`."""
    share = count / (total + 1.0)
    return 4 * sum(length >= bound for bound in (2, 4, 8)) + sum(share >= bound for bound in (0.4, 0.6, 0.8))
