"""The matrices of a model that LoRA adapters may change, by the model's names, and values that PEFT gives by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from quire.errors import nearest

Kind = Literal["linear", "embedding", "experts"]


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix of the model that an adapter may change: `part` of `site`, whose parts are computed as one."""

    site: str
    part: int
    in_features: int
    out_features: int
    kind: Kind = "linear"
    experts: AllExperts | None = None
    """With the kind "experts": the matrices of all."""
    own_part: float = 1.0
    """Part of its outputs that this worker computes; 0: other workers have the matrix."""


@dataclass(frozen=True)
class AllExperts:
    """The matrices of all experts of a layer."""

    count: int
    hidden: int
    size: int
    gate_up_site: str
    """The site of the first matrices, [2 * size, hidden]."""
    down_site: str
    """The site of the second matrices, [hidden, size]."""
    are_flipped: bool = False
    """PEFT takes the inputs of the matrices for outputs, because the model's code has them transposed."""
    gates_alternate: bool = False
    """Rows of gates and of what they gate take turns in the first matrices."""
    own_part: float = 1.0
    """Part of the matrices that this worker has; 0: other workers have the layer."""

    def find(self, shape: tuple[int, int]) -> AdapterTarget | None:
        """Returns the matrix with these inputs and outputs in PEFT's view."""
        gate_up = AdapterTarget(self.gate_up_site, 0, self.hidden, 2 * self.size, "experts", self, self.own_part)
        down = AdapterTarget(self.down_site, 0, self.size, self.hidden, "experts", self, self.own_part)
        for flipped in (self.are_flipped, not self.are_flipped):
            for target in (gate_up, down):
                sizes = target.in_features, target.out_features
                if shape == (sizes[::-1] if flipped else sizes):
                    return target
        return None


@dataclass(frozen=True)
class HeadTarget:
    """The classifier of a model that pools, which an adapter may replace."""

    name: str
    in_features: int
    num_labels: int
    has_bias: bool


@dataclass(frozen=True)
class AdapterTargets:
    """The matrices of a model, by the model's names of their tensors (`model.layers.0.mlp.up_proj.weight`)."""

    targets: Mapping[str, AdapterTarget]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Why other modules of the model cannot be changed, by the model's name."""
    rename: Callable[[str], str | None] = str
    """Returns the model's name of a checkpoint's tensor; None: the model does not need it."""
    head: HeadTarget | None = None

    def find(self, module: str) -> AdapterTarget | str:
        """Returns the matrix of a module, by the checkpoint's name, or why there is none."""
        name = self.rename(f"{module}.weight")
        if name is None:
            return "which the model leaves out"
        for candidate in (name, f"model.{name}"):  # adapters of a bare decoder
            if candidate in self.targets:
                return self.targets[candidate]
            for place, why in self.unsupported.items():
                if candidate.startswith(f"{place}."):
                    return why
        known = {name.rpartition(".")[0].rpartition(".")[2] for name in self.targets}
        return f"which the model does not have: {nearest(module.rpartition('.')[2], known, 'is it of another model?')}"


# -- values by name ------------------------------------------------------------------------------------------------

T = TypeVar("T")

MAX_PATTERNS, MAX_PATTERN_LEN = 4096, 256
MAX_PATTERN_STEPS = 10**8
"""Bound of the work of matching: about a second."""
_PIECE = re.compile(r"\(\?:|[\w-]|\\[.dw]|\[\^?[\w-]+\]|[.()|^$*+?]")


class NamePatterns(Generic[T]):
    """Values by the names of modules: rank_pattern and alpha_pattern.

    A key matches a name, or its end after a ".", as PEFT's do; the first one counts. Keys are names (whose "." is a
    dot), or regular expressions of `_PIECE`s whose repetitions are of one character: they come from a repository, and
    a search with nested ones would not end. Raises ValueError.
    """

    def __init__(self, values: Mapping[str, T]) -> None:
        if len(values) > MAX_PATTERNS:
            raise ValueError(f"{len(values)} keys; at most {MAX_PATTERNS} are read")
        self._names: dict[str, tuple[int, T]] = {}
        self._patterns: list[tuple[int, re.Pattern[str], T]] = []
        self._costs: list[tuple[int, int]] = []
        """Alternatives and repetitions of each pattern."""
        for i, (key, value) in enumerate(values.items()):
            if re.fullmatch(r"[\w.-]{1,256}", key):
                self._names[key] = i, value
                continue
            self._costs.append(_cost(key))
            try:
                self._patterns.append((i, re.compile(rf"(?:.*\.)?(?:{key})"), value))
            except (re.error, OverflowError) as e:
                raise ValueError(f"key {key!r} is no regular expression: {e}") from None

    def find(self, name: str, default: T) -> T:
        """Returns the value of the first key that matches a module's name."""
        parts = name.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts))]
        order, value = min((self._names[end] for end in ends if end in self._names), default=(MAX_PATTERNS, default))
        for i, pattern, other in self._patterns:
            if i < order and pattern.fullmatch(name):
                return other
        return value

    def check_cost(self, names: Collection[str]) -> None:
        """Raises ValueError if matching all of these names could take too long."""
        longest = max(map(len, names))
        steps = sum(n * longest ** (k + 1) // math.factorial(k + 1) for n, k in self._costs) * len(names)
        if steps > MAX_PATTERN_STEPS:
            raise ValueError(
                f"its patterns are too many or too wide for {len(names)} modules; name the modules instead"
            )


def _cost(key: str) -> tuple[int, int]:
    """Returns the number of alternatives of a regular expression, multiplied over its groups, and of its repetitions.
    Raises ValueError for one that is not in the language of `NamePatterns`."""
    position, last, bars, alternatives, repetitions = 0, "(", [1], 1, 0
    while position < len(key) <= MAX_PATTERN_LEN and (found := _PIECE.match(key, position)):
        piece, position = found.group(), found.end()
        if piece in "*+?":
            if last in "()|^$*+?":
                raise ValueError(f"key {key!r} repeats something else than one character")
            repetitions, alternatives = repetitions + (piece != "?"), alternatives * (1 + (piece == "?"))
        elif piece[0] == "(":
            bars.append(1)
        elif piece == "|":
            bars[-1] += 1
        elif piece == ")" and len(bars) > 1:
            alternatives *= bars.pop()
        last = piece[0]
    if position < len(key):
        raise ValueError(
            f"key {key[:80]!r} is longer than {MAX_PATTERN_LEN} or has more than names, . [] () | ^ $ \\ * + ?"
        )
    return alternatives * math.prod(bars), repetitions
