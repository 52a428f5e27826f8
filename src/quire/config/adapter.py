"""LoRA adapters in PEFT's layout: adapter_config.json, and the header of adapter_model.safetensors.

No tensor is read and no torch imported: an adapter that cannot be served is refused before any work is done for it, by
the process that is asked as well as by the worker that reads the tensors. Files are checked as those of a checkpoint
are (checkpoint.py), and nothing a header says is used as a path.

An adapter adds scale * B A to the matrix of a module. Its tensors are `base_model.model.MODULE.lora_A.weight` [rank,
inputs] and `.lora_B.weight` [outputs, rank]; those of a table are `MODULE.lora_embedding_A` [rank, rows] and
`.lora_embedding_B` [dim, rank]. With `lora_bias` there is `MODULE.lora_B.bias` [outputs], too, scaled like the product.

Experts have either such factors each (`MODULE.N.gate_proj`), or those of all in two tensors (`target_parameters`):
`MODULE.lora_A.weight` [experts * rank, inputs] and `.lora_B.weight` [outputs, rank * experts], whose columns are of the
experts in turn. A factor that is only as large as one expert's is of all experts. PEFT gives the names `MODULE` and
`MODULE.base_layer` to the two matrices of an expert in an order that depends on which are there; their shapes differ.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from quire.config.adapter_targets import AdapterTarget, AdapterTargets, AllExperts, HeadTarget, NamePatterns
from quire.config.checkpoint import TensorInfo, checked_path, find_file, parse_header, parse_object
from quire.config.lora import LoRAConfig
from quire.errors import AdapterError, ModelLoadError, NotFoundError

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
"""Room for the factors of every matrix of 200 experts in 60 layers."""
MAX_RANK = 512
MAX_ALPHA, MAX_INVOCATION = 1 << 20, 1024
MAX_NAME_LEN, MAX_MESSAGE_LEN = 256, 600
FLOATING = ("F32", "F16", "BF16")

NO_EFFECT = frozenset(
    {
        *("lora_dropout", "task_type", "inference_mode", "revision", "peft_version", "auto_mapping"),
        *("megatron_config", "megatron_core", "qalora_group_size", "runtime_config", "fan_in_fan_out"),
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("eva_config", "loftq_config", "corda_config", "lora_ga_config"),
    }
)
"""Fields that change nothing once an adapter is trained: the tensors decide which modules it has. (fan_in_fan_out is
about merging only.)"""
READ = frozenset(
    {
        *("peft_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "alora_invocation_tokens"),
        *("base_model_name_or_path", "bias", "init_lora_weights", "modules_to_save", "use_dora", "lora_bias"),
    }
)
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales every output by the norm of the changed matrix, which is not implemented; "
    "merge it into the checkpoint",
    "modules_to_save": "of an adapter's whole modules only classifiers are served; train without others, "
    "or merge it into the checkpoint",
}
"""Fields that must not be set, and why."""
HEADS = ("score", "classifier")
"""Modules that may be in `modules_to_save`: the classifier of a model that pools."""
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of initialisations that change the base model, too."""


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of adapter_config.json that matter."""

    rank: int
    alpha: float
    uses_rslora: bool
    ranks: NamePatterns[int]
    """Ranks of modules that differ."""
    alphas: NamePatterns[float]
    invocation: tuple[int, ...]
    """Tokens at whose last occurrence in a prompt the adapter begins (aLoRA); empty: it applies to all tokens."""
    base_model: str
    targets: tuple[str, ...]
    """Names in `target_modules`, if it is a list."""
    source: Path

    @staticmethod
    def from_dir(directory: str | Path) -> AdapterConfig:
        """Reads the file in `directory`. Raises AdapterError naming file and field, NotFoundError for no directory."""
        with open_adapter(Path(directory)) as files:
            return AdapterConfig.parse(files.config, files.directory / CONFIG_FILE)

    @staticmethod
    def parse(text: bytes, source: Path) -> AdapterConfig:
        """Reads the text of a file whose path is `source`. Raises AdapterError naming file and field."""
        with _adapter_errors():
            raw = parse_object(source, text)
        fields = _Fields(raw, source)
        fields.check_known()
        targets = raw.get("target_modules")
        return AdapterConfig(
            rank=fields.number("r", raw.get("r"), rank=True),
            alpha=fields.number("lora_alpha", raw.get("lora_alpha")),
            uses_rslora=fields.switch("use_rslora"),
            ranks=fields.patterns("rank_pattern", rank=True),
            alphas=fields.patterns("alpha_pattern"),
            invocation=fields.token_ids("alora_invocation_tokens"),
            base_model=str(raw.get("base_model_name_or_path") or ""),
            targets=tuple(map(str, targets)) if isinstance(targets, list) else (),
            source=source,
        )

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, by PEFT's name."""
        return self.ranks.find(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of a module's B A."""
        alpha, rank = self.alphas.find(module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.uses_rslora else alpha / rank


@dataclass(frozen=True)
class _Fields:
    """The fields of a config, read with checks."""

    raw: Mapping[str, Any]
    source: Path

    def check_known(self) -> None:
        """Raises AdapterError for a field that would change what an adapter computes in a way that is not implemented,
        or not known."""
        raw = self.raw
        if raw.get("peft_type") != "LORA":
            raise self._wrong("peft_type", "Quire serves adapters of type LORA only")
        for name, why in REFUSED.items():
            if raw.get(name) and not (name == "modules_to_save" and _are_heads(raw[name])):
                raise self._wrong(name, why)
        if raw.get("bias") not in (None, "none"):
            raise self._wrong("bias", "biases of the base model cannot be replaced; train with bias='none'")
        init = raw.get("init_lora_weights")
        if isinstance(init, str) and init.startswith(CHANGING_INITS):
            raise self._wrong(
                "init_lora_weights",
                "which changes the base model, too; save the adapter with PEFT's save_pretrained(..., "
                "path_initial_model_for_weight_conversion=...), which converts it",
            )
        if init not in (None, True, False, *PLAIN_INITS):
            raise self._wrong("init_lora_weights", f"known are true, false, {', '.join(PLAIN_INITS)}")
        for name, value in raw.items():
            if value and name not in NO_EFFECT and name not in READ:
                raise self._wrong(name, "a field that Quire does not implement; save the adapter without it")

    def number(self, name: str, value: Any, *, rank: bool = False) -> Any:
        """Returns a rank, or an alpha."""
        if isinstance(value, bool) or not isinstance(value, int if rank else int | float):
            raise self._wrong(name, f"it must be a {'whole number' if rank else 'number'}", value)
        if rank and not 1 <= value <= MAX_RANK:
            raise self._wrong(name, f"ranks are from 1 to {MAX_RANK}", value)
        if not -MAX_ALPHA <= value <= MAX_ALPHA:  # nor NaN
            raise self._wrong(name, f"it must be finite, and at most {MAX_ALPHA}", value)
        return value if rank else float(value)

    def switch(self, name: str) -> bool:
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self._wrong(name, "it must be true or false")
        return bool(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        raw = self.raw.get(name) or []
        ids = [i for i in raw if type(i) is int and 0 <= i < 1 << 31] if isinstance(raw, list) else None
        if ids != raw or len(raw) > MAX_INVOCATION:
            raise self._wrong(name, f"it must be a list of at most {MAX_INVOCATION} token ids")
        return tuple(raw)

    def patterns(self, name: str, *, rank: bool = False) -> NamePatterns[Any]:
        raw = self.raw.get(name) or {}
        if not isinstance(raw, dict):
            raise self._wrong(name, "it must be an object")
        try:
            patterns = NamePatterns(raw)
        except ValueError as e:
            raise AdapterError(f"{self.source}: {name}: {e}") from None
        for key, value in raw.items():
            self.number(f"{name}[{key!r}]", value, rank=rank)
        return patterns

    def _wrong(self, name: str, why: str, value: Any = None) -> AdapterError:
        value = self.raw.get(name) if value is None else value
        shown = "missing" if value is None else repr(value)[:80]
        return AdapterError(f"{self.source}: {name} is {shown}: {why}")


def _are_heads(names: Any) -> bool:
    return isinstance(names, list) and all(name in HEADS for name in names)


# -- files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterFiles:
    """The two files of an adapter, opened: what is read from them is of one state, which `check_unchanged` verifies."""

    directory: Path
    config: bytes
    tensors: BinaryIO
    _states: Mapping[Path, tuple[int, ...]]

    def check_unchanged(self) -> None:
        """Raises AdapterError if the directory or a file is not what it was when it was opened."""
        for path, before in self._states.items():
            if _state(path) != before:
                raise AdapterError(f"{path} was changed while it was read; load the adapter again")


@contextmanager
def open_adapter(directory: Path) -> Iterator[AdapterFiles]:
    """Yields the files of the adapter in `directory`, regular files inside it. Raises AdapterError, and NotFoundError
    for no directory."""
    with _adapter_errors():
        if "\0" in str(directory) or not directory.is_dir():
            shown = str(directory)[:MAX_NAME_LEN]
            if os.path.lexists(directory) if "\0" not in shown else False:
                raise AdapterError(f"{shown} is no directory; lora_path is the directory that PEFT has saved")
            raise NotFoundError(f"there is no directory {shown!r} with a LoRA adapter", param="lora_path")
        states = {directory: _state(directory)}
        for name in (CONFIG_FILE, TENSORS_FILE):
            if not os.path.lexists(directory / name):
                raise _no_file(directory, name)
            states[directory / name] = _state(checked_path(directory, name))
        find_file(directory, CONFIG_FILE, MAX_CONFIG_BYTES)
        with _open_regular(directory / CONFIG_FILE) as file:
            config = file.read(MAX_CONFIG_BYTES + 1)
        with _open_regular(directory / TENSORS_FILE) as file:
            yield AdapterFiles(directory, config, file, states)


def _open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading; a pipe that has taken its place is not waited for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise AdapterError(f"{path} is not a regular file")
    return file


def _state(path: Path) -> tuple[int, ...]:
    """Returns numbers that differ once a file is another one or was written to."""
    found = path.stat()
    own = (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else ()
    return found.st_dev, found.st_ino, *own


def _no_file(directory: Path, name: str) -> AdapterError:
    pickles = [pickle for pickle in PICKLES if (directory / pickle).exists()]
    if name == TENSORS_FILE and pickles:
        return AdapterError(
            f"{directory} has no {name}, only {pickles[0]}, a pickle, which Quire never opens; load it with PEFT and "
            "save it again with save_pretrained, which writes safetensors"
        )
    return AdapterError(f"{directory} has no {name}; lora_path is the directory that PEFT has saved")


@contextmanager
def _adapter_errors() -> Iterator[None]:
    """Raises what a checkpoint's files are refused with as an AdapterError."""
    try:
        yield
    except ModelLoadError as e:
        raise AdapterError(_cut(str(e).replace("the checkpoint", "the adapter"))) from None
    except OSError as e:
        raise AdapterError(f"{e.filename or 'the adapter'} cannot be read: {e.strerror or e}") from None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_LEN else text[:MAX_MESSAGE_LEN] + "…"


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factors:
    """The two factors of one module."""

    module: str
    """PEFT's name."""
    target: AdapterTarget | None
    """None if the model was not known."""
    a: TensorInfo
    b: TensorInfo
    bias: TensorInfo | None
    scale: float
    rank: int
    """Rank of one matrix."""

    @property
    def is_flipped(self) -> bool:
        """True if A is the second factor of experts, because PEFT takes their inputs for outputs."""
        target = self.target
        if target is None or target.experts is None:
            return False
        found = self.a.shape[1], self.b.shape[0]
        both = (target.in_features, target.out_features), (target.out_features, target.in_features)
        return found == both[1] and (found != both[0] or target.experts.are_flipped)

    @property
    def packed_size(self) -> int:
        """An upper estimate of the numbers in its packed weights, of this worker's part of the matrix."""
        experts, part = (None, 1.0) if self.target is None else (self.target.experts, self.target.own_part)
        sizes = (self.a.shape[1], self.b.shape[0]) if not self.is_flipped else (self.b.shape[0], self.a.shape[1])
        count = 0 if not part else 1 if experts is None else experts.count
        return count * (_whole(self.rank) * sizes[0] + _whole(math.ceil(sizes[1] * part)) * (self.rank + 1) + self.rank)


@dataclass(frozen=True)
class AdapterHead:
    """A classifier that replaces the model's."""

    weight: TensorInfo
    """[labels, inputs]"""
    bias: TensorInfo | None


@dataclass(frozen=True)
class AdapterIndex:
    """An adapter whose config and header were checked."""

    config: AdapterConfig
    factors: tuple[Factors, ...]
    """In the order of their data in the file."""
    data_start: int
    """Position of the tensors' data in the file."""
    head: AdapterHead | None = None
    notes: tuple[str, ...] = ()
    """Lines for the log."""

    @staticmethod
    def read(directory: str | Path, limits: LoRAConfig, targets: AdapterTargets | None = None) -> AdapterIndex:
        """Reads the headers of the adapter in `directory`. Without `targets` it is not compared with a model. Raises
        AdapterError naming file and tensor or field, and NotFoundError for no directory."""
        with open_adapter(Path(directory)) as files:
            return AdapterIndex.of(files, limits, targets)

    @staticmethod
    def of(files: AdapterFiles, limits: LoRAConfig, targets: AdapterTargets | None = None) -> AdapterIndex:
        """Does what `read` does, of files that are open."""
        config, path = AdapterConfig.parse(files.config, files.directory / CONFIG_FILE), files.directory / TENSORS_FILE
        with _adapter_errors():
            tensors, data_start = parse_header(path, files.tensors, MAX_HEADER_BYTES)
        return _Matching(config, limits, targets, path).match(tensors, data_start)

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(factors.rank for factors in self.factors)

    def estimated_bytes(self, item_bytes: int = 4) -> int:
        """Returns an upper estimate of the memory of its packed weights, of `item_bytes` a number."""
        head = 0 if self.head is None else self.head.weight.shape[0] * (self.head.weight.shape[1] + 1)
        return item_bytes * (sum(factors.packed_size for factors in self.factors) + head)


def _whole(count: int, panel: int = 16) -> int:
    return -(-count // panel) * panel


_FACTOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?:(?P<table>embedding_)(?P<x>[AB])(?:\.default)?"
    r"|(?P<y>[AB])(?:\.default)?\.weight|B(?:\.default)?\.(?P<z>bias))"
)
_BASE_LAYER = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.base_layer\.(?P<kind>weight|bias)")
_HEAD = re.compile(
    rf"(?:base_model\.model\.)?(?:{'|'.join(HEADS)})(?:\.modules_to_save(?:\.default)?)?\.(?P<kind>weight|bias)"
)
_SAYINGS: Mapping[str, str] = {
    ".lora_magnitude_vector": REFUSED["use_dora"],
    ".weight": REFUSED["modules_to_save"],
}
"""Ends of tensors that are no factors, and why they are refused."""


@dataclass
class _Matching:
    """Matches the tensors of a header with the modules of a model."""

    config: AdapterConfig
    limits: LoRAConfig
    targets: AdapterTargets | None
    path: Path
    _found: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)
    """Factors A and B, by module."""
    _tables: dict[str, bool] = field(default_factory=dict)
    """True for modules whose factors are named as those of a table are."""
    _copies: int = 0
    _head: dict[str, TensorInfo] = field(default_factory=dict)
    """Weight and bias of a classifier."""

    def match(self, tensors: Mapping[str, TensorInfo], data_start: int) -> AdapterIndex:
        for name, info in tensors.items():
            self._sort(name, info)
        if not self._found:
            raise AdapterError(f"{self.path} holds no tensor lora_A or lora_B: it is not a LoRA adapter")
        with self._pattern_errors():
            for patterns in (self.config.ranks, self.config.alphas):
                patterns.check_cost(self._found)
        factors = [self._make(module, pair) for module, pair in self._found.items()]
        self._check_each_once(factors)
        factors.sort(key=lambda made: made.a.offset)
        return AdapterIndex(self.config, tuple(factors), data_start, self._make_head(), tuple(self._notes()))

    def _check_each_once(self, factors: Sequence[Factors]) -> None:
        """Raises AdapterError if two names are of the same matrix."""
        seen: dict[tuple[str, int, str], str] = {}
        for made in factors:
            target = made.target
            key = (made.module, 0, "") if target is None else (target.site, target.part, target.kind)
            other = seen.get(key)
            if target is not None and target.kind == "experts":
                other = seen.get((target.site, 0, ""), other)
            elif target is not None:
                other = seen.get((target.site, 0, "experts"), other)
                seen[target.site, 0, ""] = made.module
            if other is not None:
                raise AdapterError(f"{self.path}: {made.module} and {other} are the same matrix of the model")
            seen[key] = made.module

    def _sort(self, name: str, info: TensorInfo) -> None:
        """Puts a tensor to its module."""
        if len(name) > MAX_NAME_LEN:
            raise AdapterError(f"{self.path}: tensor {name[:80]}… has a name of more than {MAX_NAME_LEN} characters")
        found = _FACTOR.fullmatch(name)
        if found is None:
            if head := _HEAD.fullmatch(name):
                self._head[head["kind"]] = info
            else:
                self._check_copy(name, info)
            return
        if info.dtype not in FLOATING:
            raise AdapterError(f"{self.path}: tensor {name} is {info.dtype}; factors are {', '.join(FLOATING)}")
        module, factor = found["module"], found["x"] or found["y"] or found["z"]
        if len(info.shape) != (1 if factor == "bias" else 2) or 0 in info.shape:
            raise AdapterError(f"{self.path}: tensor {name} has shape {list(info.shape)}; a factor is a matrix")
        pair = self._found.setdefault(module, {})
        if factor in pair or self._tables.setdefault(module, bool(found["table"])) != bool(found["table"]):
            raise AdapterError(f"{self.path}: tensor {name} is stored twice, also as {next(iter(pair.values())).name}")
        pair[factor] = info

    def _check_copy(self, name: str, info: TensorInfo) -> None:
        """Raises AdapterError unless a tensor is a copy of a matrix of the base model, which PEFT saves beside the
        factors of tables and heads."""
        found = _BASE_LAYER.fullmatch(name)
        if found is None:
            why = next(
                (why for end, why in _SAYINGS.items() if name.endswith(end)), "it is no factor of a LoRA adapter"
            )
            raise AdapterError(f"{self.path}: tensor {name}: {why}")
        target = None if self.targets is None else self.targets.find(found["module"])
        if isinstance(target, str):
            raise AdapterError(f"{self.path}: tensor {name} is of module {found['module']}, {target}")
        if target is not None:
            shape: tuple[int, ...] = (target.out_features, target.in_features)
            shape = shape[::-1] if target.kind == "embedding" else shape
            shape = shape if found["kind"] == "weight" else shape[:1]
            if info.shape != shape:
                raise AdapterError(
                    f"{self.path}: tensor {name} has shape {list(info.shape)}, the model's is {list(shape)}: adapters "
                    "with a vocabulary of their own cannot be served; merge it into the checkpoint"
                )
        self._copies += 1

    def _make(self, module: str, pair: Mapping[str, TensorInfo]) -> Factors:
        """Returns the factors of a module, checked."""
        missing = {"A", "B"} - pair.keys()
        if missing:
            present = next(iter(pair.values()))
            raise AdapterError(f"{self.path}: tensor {present.name} has no counterpart lora_{min(missing)}")
        a, b, bias = pair["A"], pair["B"], pair.get("bias")
        target = self._target(module)
        if target is not None and target.experts is not None:
            return self._make_experts(module, target.experts, a, b, bias)
        rank, said = a.shape[0], self.config.rank_of(module)
        if target is not None:
            for info, shape in ((a, (said, target.in_features)), (b, (target.out_features, said))):
                if info.shape != shape:
                    raise AdapterError(
                        f"{self.path}: tensor {info.name} has shape {list(info.shape)}; with rank {said} of "
                        f"{CONFIG_FILE} and the model it must be {list(shape)}"
                    )
        if target is None and module.removesuffix(".base_layer").endswith("experts"):
            rank = said  # the number of experts is not known
        elif not rank == b.shape[1] == said:
            raise AdapterError(
                f"{self.path}: tensors {a.name} {list(a.shape)} and {b.name} {list(b.shape)} do not have the rank "
                f"{said} that {CONFIG_FILE} gives them"
            )
        if bias is not None and bias.shape != b.shape[:1]:
            raise AdapterError(
                f"{self.path}: tensor {bias.name} has shape {list(bias.shape)}; the module has {b.shape[0]} outputs"
            )
        self._check_rank(module, rank)
        return Factors(module, target, a, b, bias, self.config.scale_of(module), rank)

    def _make_experts(
        self, module: str, experts: AllExperts, a: TensorInfo, b: TensorInfo, bias: TensorInfo | None
    ) -> Factors:
        """Returns the factors of one of the two matrices of all experts."""
        target = experts.find((a.shape[1], b.shape[0]))
        if target is None:
            raise AdapterError(
                f"{self.path}: tensors {a.name} {list(a.shape)} and {b.name} {list(b.shape)} fit no matrix of "
                f"{experts.count} experts of {experts.hidden} inputs and size {experts.size}"
            )
        matrix = "gate_up_proj" if target.site == experts.gate_up_site else "down_proj"
        name = f"{module.removesuffix('.base_layer')}.{matrix}"  # as PEFT's patterns see it
        rank = self.config.rank_of(name)
        if a.shape[0] not in (rank, experts.count * rank) or b.shape[1] not in (rank, experts.count * rank):
            raise AdapterError(
                f"{self.path}: tensors {a.name} {list(a.shape)} and {b.name} {list(b.shape)} do not have the rank "
                f"{rank} that {CONFIG_FILE} gives {name}, nor {experts.count} times that"
            )
        if bias is not None:
            raise AdapterError(f"{self.path}: tensor {bias.name}: factors of all experts have no biases")
        self._check_rank(name, rank)
        return Factors(module, target, a, b, None, self.config.scale_of(name), rank)

    def _make_head(self) -> AdapterHead | None:
        """Returns the classifier, checked."""
        if not self._head:
            return None
        weight, bias = self._head.get("weight"), self._head.get("bias")
        if weight is None:
            raise AdapterError(f"{self.path}: the classifier's bias has no weight")
        target = None if self.targets is None else self.targets.head
        if self.targets is not None and target is None:
            raise AdapterError(
                f"{self.path}: tensor {weight.name} is of a classifier; the model has none that an adapter can replace"
            )
        for info, dims in ((weight, 2), (bias, 1)):
            if info is not None and (info.dtype not in FLOATING or len(info.shape) != dims or 0 in info.shape):
                raise AdapterError(f"{self.path}: tensor {info.name} is {info.dtype} {list(info.shape)}")
        if target is not None:
            self._check_labels(target, weight, bias)
        return AdapterHead(weight, bias)

    def _check_labels(self, target: HeadTarget, weight: TensorInfo, bias: TensorInfo | None) -> None:
        labels, limit = weight.shape[0], self.limits.max_lora_cls_labels
        if weight.shape[1] != target.in_features or (bias is not None and bias.shape != (labels,)):
            shapes = [list(info.shape) for info in (weight, bias) if info is not None]
            raise AdapterError(
                f"{self.path}: the classifier {weight.name} has shapes {shapes}; the model's has {target.in_features} "
                "inputs"
            )
        if labels != target.num_labels and (limit is None or labels > limit or target.num_labels == 1):
            raise AdapterError(
                f"{self.path}: the classifier {weight.name} has {labels} labels, the model's {target.num_labels}; "
                "--max-lora-cls-labels allows others, up to its value, of a model with several"
            )

    def _check_rank(self, module: str, rank: int) -> None:
        limit = self.limits.max_lora_rank
        if limit is not None and rank > limit:
            raise AdapterError(f"{self.path}: {module} has rank {rank}; --max-lora-rank is {limit}")

    def _target(self, module: str) -> AdapterTarget | None:
        """Returns the matrix of a module; None if the model is not known."""
        is_table = self._tables[module]
        target = None if self.targets is None else self.targets.find(module)
        if isinstance(target, str):
            raise AdapterError(f"{self.path}: the adapter changes {module}, {target}")
        if target is not None and is_table != (target.kind == "embedding"):
            what = "a table" if target.kind == "embedding" else "a matrix"
            raise AdapterError(f"{self.path}: the factors of {module} are not named as those of {what}, which it is")
        allowed = self.limits.lora_target_modules
        names = (module, target.site) if target is not None else (module,)
        if allowed and not any(f".{name}".endswith(f".{suffix}") for name in names for suffix in allowed):
            raise AdapterError(
                f"{self.path}: the adapter changes {module}; --lora-target-modules allows {', '.join(allowed)}"
            )
        return target

    def _notes(self) -> Iterator[str]:
        listed = self.config.targets
        if listed and not any(f".{module}".endswith(f".{name}") for module in self._found for name in listed):
            yield f"target_modules of {self.config.source} names none of the modules whose tensors are there"
        if self._copies:
            yield f"{self.path} holds copies of the base model's tables, which are not used"

    @contextmanager
    def _pattern_errors(self) -> Iterator[None]:
        try:
            yield
        except ValueError as e:
            raise AdapterError(f"{self.config.source}: {e}") from None
