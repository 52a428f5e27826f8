"""Builds a model and fills it from safetensors files.

The model is first built without memory (torch's meta device) and every tensor it needs is compared with the headers of
the files, so that a wrong checkpoint is refused in well under a second. Then one module after another gets memory, its
tensors are read through a memory map, and its kernels are made. Kernels that pack their weights free that memory, so
that no more than one module is in memory twice.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from quire.config.checkpoint import CheckpointIndex, TensorInfo
from quire.config.engine import LoadConfig
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.pooling import PoolingConfig
from quire.config.quantization import WEIGHT_BITS, quantization_method, read_stored_scheme, scheme_of
from quire.config.speculators import HEAD, aux_layers, check_head
from quire.errors import ModelLoadError, QuireError, UnsupportedModelError
from quire.logger import init_logger
from quire.resolve import resolve
from quire.worker.attention.layer import Attention
from quire.worker.kernels.base import Kernels
from quire.worker.kernels.packs import FRESH_PACKS, Packs
from quire.worker.kernels.reference import TORCH_KERNELS
from quire.worker.layers.linear import Scale
from quire.worker.layers.norm import UnitNorm
from quire.worker.layers.rotary import RotaryEmbedding, SinusoidalPositions
from quire.worker.layers.row_order import take_rows
from quire.worker.layers.weights import (
    Cut,
    Elsewhere,
    NamedWeights,
    Prepared,
    QuantizableWeights,
    absent_tensors,
    allocate,
    checkpoint_tensors,
    is_allocated,
    own_cuts,
    own_row_orders,
    own_tensors,
    packed_parameters,
    weight_bytes,
)
from quire.worker.loader.packed import MismatchError, WeightCache
from quire.worker.loader.shards import Sharding
from quire.worker.loader.stored import (
    MappedFile,
    Stored,
    StoredMatrix,
    gather_matrices,
    plan_quantization,
    recall_kinds,
    remember_kinds,
)
from quire.worker.models.decoder import Decoder
from quire.worker.models.eagle import EagleHead, head_name
from quire.worker.models.registry import HEADS, get_model_class
from quire.worker.platform import release_free_memory
from quire.worker.pooler import PooledDecoder
from quire.worker.quantization.formats import ScatteredGroupsError, StoredFormat, make_format

logger = init_logger(__name__)

_NOISE_LEN = 1_000_003
"""A prime, so that rows of a matrix never line up with the repetition of the noise."""
_SCALE = 0.02


class Noise:
    """Numbers small enough never to overflow: the same for the same seed and the same order of tensors.

    One block of noise is repeated, as drawing billions of numbers would take longer than reading them.
    """

    def __init__(self, seed: int) -> None:
        noise = np.random.Generator(np.random.Philox(seed)).standard_normal(_NOISE_LEN, dtype=np.float32)
        self._noise = torch.from_numpy(noise * np.float32(_SCALE)).repeat(2)
        self._start = 0
        self.cuts: Mapping[str, Cut] = {}
        """Cuts of the module that is being filled: a part of a tensor gets the noise that it has in the whole."""

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fills each tensor. Vectors with norm in their name become ones, so that activations keep their size. Passes
        over tensors without memory, which another worker has."""
        for name, tensor in tensors:
            if tensor.is_meta:
                self.skip([(name, tensor)])
            elif _is_norm(name, tensor):
                tensor.fill_(1.0)
            else:
                self._fill(name, tensor)

    def _fill(self, name: str, tensor: Tensor) -> None:
        self._noise = self._noise.to(tensor)  # converted once: what follows only copies
        own = tensor if tensor.is_contiguous() else tensor.mT  # matrices that are stored transposed
        cut = self.cuts.get(name.rpartition(".")[0])
        whole = own if cut is None else own.new_empty((cut.num_rows, *own.shape[1:]))
        for part in torch.split(whole.view(-1), _NOISE_LEN):
            part.copy_(self._noise[self._start : self._start + part.numel()])
            self._start = (self._start + part.numel()) % _NOISE_LEN
        if cut is not None:
            own.copy_(whole[cut.rows])

    def skip(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Passes over the noise of tensors that another worker has."""
        self._start += sum(tensor.numel() for name, tensor in tensors if not _is_norm(name, tensor))
        self._start %= _NOISE_LEN


def _is_norm(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 1 and "norm" in name and name.endswith("weight")


HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")
"""Tensors of older exports that are not needed: they follow from config.json."""
_FLOATING = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Placement:
    """Device, type and kernels of a model's weights."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels = TORCH_KERNELS
    sharding: Sharding | None = None
    """The part of a model that this worker has; None: all."""


def load_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    placement: Placement,
    cache: WeightCache | None = None,
    model_class: Callable[[HFConfig], nn.Module] | None = None,
) -> nn.Module:
    """Returns the model of `model_config` with its weights loaded, without gradients. Packed weights are taken from
    `cache`, or written there. `model_class` makes it; None: the class in the table of models.

    Raises UnsupportedModelError or ModelLoadError, naming file and tensor.
    """
    start = time.monotonic()
    hf = dataclasses.replace(model_config.hf_config, max_model_len=model_config.model_len)
    model = _build(hf, model_config.pooling, model_class)
    if placement.sharding is not None:
        placement.sharding.cut(model)
    method = quantization_method(model_config.quantization, hf.get("quantization_config"), hf.path)
    if method is not None and method in WEIGHT_BITS:
        plan_quantization(model, scheme_of(method))
    if load_config.load_format == "dummy":
        stored = None
        source = "random weights"
    else:
        stored = find_tensors(model, hf, model_config.model_dir)
        source = str(model_config.model_dir)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding | Scale | SinusoidalPositions | UnitNorm | Attention):
            module.allocate(placement.device, placement.dtype)
    fill_weights(model, stored, model_config.seed, placement, cache, keep=True)
    gib = weight_bytes(model) / 2**30
    name, seconds = str(placement.dtype).removeprefix("torch."), time.monotonic() - start
    logger.info("Loaded %s from %s: %.2f GiB of %s in %.2f s", hf.architecture, source, gib, name, seconds)
    return model


def load_head(
    model_config: ModelConfig,
    load_config: LoadConfig,
    placement: Placement,
    target: nn.Module,
    target_config: ModelConfig,
    cache: WeightCache | None = None,
) -> EagleHead:
    """Returns the head of `model_config`, whose config.json is in the form of config/speculators.py, with its weights
    loaded. It drafts for `target`, whose modules it shares: they must live as long, and `taps` are for the caller to
    set. Raises as `load_model` does, before weights are read if the two do not belong together."""
    hf, target_hf = model_config.hf_config, target_config.hf_config
    check_head(hf, target_hf)
    if not isinstance(getattr(target, "model", None), Decoder):
        raise UnsupportedModelError(
            f"{hf.path} is a head that reads the states of {target_hf.architecture}, which only decoders that Quire's "
            "own code runs return; choose another --spec-method"
        )
    index = None if load_config.load_format == "dummy" else CheckpointIndex.from_dir(model_config.model_dir)
    tensors = {} if index is None else {head_name(name): info for name, info in index.tensors.items()}
    draft_vocab_size = hf.size("draft_vocab_size", hf.vocab_size)
    token_ids = None
    if "d2t" in tensors:
        token_ids = _read_token_ids(tensors["d2t"], draft_vocab_size, target_hf.vocab_size)
    elif draft_vocab_size != hf.vocab_size:
        if index is not None:
            raise ModelLoadError(f"{index.source} has no tensor d2t, which a vocabulary of {draft_vocab_size} needs")
        token_ids = torch.arange(draft_vocab_size)
    make: Callable[..., EagleHead] = resolve(HEADS[hf.get(HEAD)])
    taps = aux_layers(hf, target_hf)
    config = dataclasses.replace(model_config, max_model_len=target_config.model_len, pooling=None)
    head = load_model(config, load_config, placement, cache, lambda hf: make(hf, target, taps, tensors.keys()))
    assert isinstance(head, EagleHead)
    head.token_ids = None if token_ids is None else token_ids.to(placement.device)
    return head


def _read_token_ids(info: TensorInfo, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Returns the target's id of each id of a head: d2t holds the differences. Raises ModelLoadError."""
    if info.shape != (draft_vocab_size,) or info.dtype not in ("I64", "I32"):
        raise ModelLoadError(
            f"{info.file}: tensor d2t is {info.dtype}{list(info.shape)}; it must be I64[{draft_vocab_size}], a "
            "difference for each token of the head's vocabulary"
        )
    ids = torch.arange(draft_vocab_size) + MappedFile(info.file).read(info).long()
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ModelLoadError(
            f"{info.file}: tensor d2t does not lead to increasing ids of the target's vocabulary of {vocab_size} tokens"
        )
    return ids


def match_tensors(
    wanted: Mapping[str, Tensor],
    index: CheckpointIndex,
    *,
    tied_head: bool,
    format: StoredFormat | None = None,
    rename: Callable[[str], str | None] = str,
    cuts: Mapping[str, Cut] | None = None,
    elsewhere: Collection[str] = (),
) -> dict[str, Stored]:
    """Returns the stored tensor of each wanted one, with its name in the file as `TensorInfo.name`.

    Every wanted tensor must be stored with its shape, and no other tensor may be stored that could matter. Raises
    ModelLoadError naming file and tensor. Exports of a bare decoder leave out the leading "model.". `format` reads the
    quantized tensors. `rename` gives the model's name of a stored tensor; None: not needed. `cuts` are those of wanted
    tensors that are parts of stored ones, by `own_cuts`' names. `elsewhere` are the tensors of other workers.
    """
    stored: dict[str, Stored] = {
        name: tensor
        for stored_name, tensor in index.tensors.items()
        if not HARMLESS.search(stored_name) and (name := rename(stored_name)) is not None
    }
    if format is not None:
        stored = gather_matrices({n: tensor for n, tensor in stored.items() if isinstance(tensor, TensorInfo)}, format)
    if tied_head:
        stored.pop("lm_head.weight", None)
    if stored and not any(name.startswith("model.") for name in stored):
        known = {*wanted, *elsewhere}
        stored = {name if name in known else f"model.{name}": tensor for name, tensor in stored.items()}
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ModelLoadError(f"{index.source} has no tensor {missing[0]}{_and_more(missing)}, which the model needs")
    unexpected = [name for name in stored if name not in wanted and name not in elsewhere]
    if unexpected:
        raise ModelLoadError(
            f"{stored[unexpected[0]].file} holds tensor {unexpected[0]}{_and_more(unexpected)}, which the model that "
            "config.json describes has no place for: the two do not belong together"
        )
    for name, tensor in wanted.items():
        cut = (cuts or {}).get(name.rpartition(".")[0])
        _check_tensor(name, tensor, stored[name], cut)
    return {name: stored[name] for name in wanted}


def _check_tensor(name: str, wanted: Tensor, stored: Stored, cut: Cut | None) -> None:
    shape = list(wanted.shape)
    if cut is not None:
        shape[1 if _is_transposed(wanted) else 0] = cut.num_rows
    if list(stored.shape) != shape:
        raise ModelLoadError(
            f"{stored.file}: tensor {name} has shape {list(stored.shape)}, but config.json makes it {shape}"
        )
    if isinstance(stored, TensorInfo) and stored.dtype == "F8_E4M3":
        raise ModelLoadError(
            f"{stored.file}: tensor {name} is F8_E4M3 and has no scale: weights are missing in the file"
        )
    if isinstance(stored, TensorInfo) and stored.dtype not in _FLOATING:
        raise UnsupportedModelError(
            f"{stored.file}: tensor {name} is {stored.dtype}; only {', '.join(_FLOATING)} weights can be loaded"
        )


def _build(hf: HFConfig, pooling: PoolingConfig | None, model_class: Callable[..., nn.Module] | None) -> nn.Module:
    """Returns the model on the meta device: shapes only."""
    if not hf.architecture:
        raise ModelLoadError(f"{hf.path} does not name an architecture in 'architectures'")
    make: Callable[..., nn.Module] = model_class or get_model_class(hf)
    try:
        with torch.device("meta"):
            model = make(hf, pooling) if hf.is_encoder else make(hf)
            if pooling is not None and not hf.is_encoder:
                model = PooledDecoder(model, hf, pooling)
    except QuireError:
        raise
    except Exception as e:  # any other fault of a config.json: a word for a number, a list too short
        cause = str(e).partition("\n")[0]
        raise ModelLoadError(f"{hf.path} does not describe a {hf.architecture}: {type(e).__name__}: {cause}") from e
    return model.eval()


def find_tensors(model: nn.Module, hf: HFConfig, directory: Path) -> dict[str, Stored]:
    """Returns the entry of `directory`, whose config.json is `hf`, for each tensor the model needs. Reads headers only.

    Raises as `match_tensors` and `read_stored_scheme` do.
    """
    index, quantization = CheckpointIndex.from_dir(directory), hf.get("quantization_config")
    format = make_format(read_stored_scheme(quantization, hf.path)) if quantization else None
    rename = model.checkpoint_name if isinstance(model, NamedWeights) else str
    wanted = checkpoint_tensors(model)
    cuts = {name: cut for path, module in model.named_modules() for name, cut in own_cuts(path, module).items()}
    away = [(path, module) for path, module in model.named_modules() if isinstance(module, Elsewhere)]
    elsewhere = {name for path, module in away for name, _ in module.missing_tensors(path)}
    return match_tensors(
        wanted,
        index,
        tied_head=hf.tie_word_embeddings,
        format=format,
        rename=rename,
        cuts=cuts,
        elsewhere=elsewhere,
    )


def fill_weights(
    model: nn.Module,
    stored: Mapping[str, Stored] | None,
    seed: int,
    placement: Placement,
    cache: WeightCache | None = None,
    *,
    keep: bool = False,
) -> None:
    """Reads the tensors that `find_tensors` found, or fills in noise (None: load_format "dummy"), and makes the
    kernels.

    Parameters of the right device and type are filled in place; the others get memory. Weights whose packed form is in
    `cache` are not read; with `keep`, newly packed weights are written there.
    """
    if cache is None:
        _fill(model, stored, seed, placement, FRESH_PACKS, are_packed=False)
        return
    try:
        with cache.packs(stored, placement.dtype, placement.kernels, keep=keep) as (packs, are_packed):
            _fill(model, stored, seed, placement, packs, are_packed)
    except MismatchError as e:
        logger.warning("packed weights do not fit and are packed again: %s", e)
        _fill(model, stored, seed, placement, FRESH_PACKS, are_packed=False)


@torch.no_grad()
def _fill(
    model: nn.Module,
    stored: Mapping[str, Stored] | None,
    seed: int,
    placement: Placement,
    packs: Packs,
    are_packed: bool,
) -> None:
    composed = []
    with placement.kernels.packing(packs):
        source = Noise(seed) if stored is None else _Checkpoint(stored)
        for path, module in model.named_modules():
            if isinstance(module, Elsewhere):
                if isinstance(source, Noise):
                    source.skip(module.missing_tensors(path))
                continue
            packs.begin(path)
            if isinstance(source, Noise):
                source.cuts = own_cuts(path, module)
            own = list(module.parameters(recurse=False))
            packed, absent = packed_parameters(module), absent_tensors(path, module)
            tensors = [(name, tensor) for name, tensor in own_tensors(path, module) if name not in absent]
            ready = packed if are_packed else ()
            if isinstance(source, _Checkpoint):
                source.orders = own_row_orders(path, module)
                if isinstance(module, QuantizableWeights) and source.is_quantized:
                    if are_packed:
                        module.store_outlines(recall_kinds(packs))
                    else:
                        ready = packed if source.hand_over(module, tensors, placement) else ()
                        remember_kinds(packs, module.stored_kinds)
            if ready or not is_allocated(module, placement.device, placement.dtype):
                allocate(module, placement.device, placement.dtype, without=ready)
            tensors = own_tensors(path, module)
            if isinstance(source, _Checkpoint):
                tensors = [(name, tensor) for name, tensor in tensors if not tensor.is_meta]
            if isinstance(source, _Checkpoint) and not placement.kernels.keeps_weights:
                tensors = source.lend(module, tensors)
            source.fill(tensors)
            if isinstance(module, Prepared) and own:
                module.prepare(placement.kernels)
            elif isinstance(module, Prepared):
                composed.append(module)  # made of the weights of its children
            if isinstance(source, _Checkpoint):
                source.release()
        for module in composed:
            module.prepare(placement.kernels)
    if not placement.kernels.keeps_weights:
        release_free_memory(placement.device)  # memory of the weights before they were packed


TRIM_PARTS = 32
"""Parts of a checkpoint after each of which holes in the heap, as large as matrices, are given back."""


class _Checkpoint:
    """The stored tensors, read through memory maps."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self.orders: Mapping[str, Tensor] = {}
        """Orders of rows of the module that is being filled: see `own_row_orders`."""
        self.is_quantized = any(isinstance(tensor, StoredMatrix) for tensor in stored.values())
        self._files: dict[Path, MappedFile] = {}
        infos = [t.infos.values() if isinstance(t, StoredMatrix) else (t,) for t in stored.values()]
        self._num_bytes, self._untrimmed = sum(info.nbytes for part in infos for info in part), 0

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies each tensor from its file and converts its type. Raises ModelLoadError for NaN and infinity."""
        for name, tensor in tensors:
            info, order = self._stored[name], self._order(name)
            read = info.dequantize(self._read_all(info)) if isinstance(info, StoredMatrix) else self._read(info)
            if order is not None:
                read = read[:, order] if _is_transposed(tensor) else take_rows(read, order)
            tensor.copy_(read)
            _check_finite(tensor, info)

    def lend(self, module: nn.Module, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Makes the memory map itself a parameter that kernels pack, where the file holds it as it is: a copy of the
        logits head or of a layer's experts would be a tenth of a small model.

        Returns the tensors that are left to be filled.
        """
        left, places = [], {getattr(module, name).data_ptr(): name for name in packed_parameters(module)}
        for name, tensor in tensors:
            own, info = places.get(tensor.data_ptr()), self._stored[name]
            is_whole = own is not None and getattr(module, own).shape == tensor.shape and tensor.is_contiguous()
            if is_whole and isinstance(info, TensorInfo) and self._order(name) is None:
                read = self._read(info)
                if read.dtype == tensor.dtype:
                    _check_finite(read, info)
                    setattr(module, str(own), nn.Parameter(read, requires_grad=False))
                    continue
            left.append((name, tensor))
        return left

    def hand_over(self, module: QuantizableWeights, tensors: list[tuple[str, Tensor]], placement: Placement) -> bool:
        """Gives `module` its matrices as the checkpoint's integers and returns True, if all their parts are stored as
        integers of one kind that the kernels can compute with."""
        weights = [name for name, tensor in tensors if _is_matrix(name, tensor)]
        parts = [info for name in weights if isinstance(info := self._stored[name], StoredMatrix)]
        if len(parts) < len(weights):
            return False
        try:
            read = [part.read(self._read_all(part)).to(placement.device) for part in parts]
        except ScatteredGroupsError:
            return False
        if not all(placement.kernels.can_quantize(part) for part in read):
            return False
        orders = [self._order(name) for name in weights]
        read = [part if order is None else part.take_rows(order) for part, order in zip(read, orders, strict=True)]
        for part, matrix in zip(parts, read, strict=True):
            _check_finite(matrix.scales, part)
        return module.store(read)

    def release(self) -> None:
        """Gives back the memory that reading has taken so far, but for the tensors themselves."""
        self._untrimmed += sum(file.release() for file in self._files.values())
        if self._untrimmed * TRIM_PARTS > self._num_bytes:
            self._untrimmed = 0
            release_free_memory(torch.device("cpu"))

    def _order(self, name: str) -> Tensor | None:
        """Returns the order of rows in which the model has a tensor; None for the checkpoint's."""
        return self.orders.get(name.rpartition(".")[0])

    def _read(self, info: TensorInfo) -> Tensor:
        if info.file not in self._files:
            self._files[info.file] = MappedFile(info.file)
        return self._files[info.file].read(info)

    def _read_all(self, matrix: StoredMatrix) -> dict[str, Tensor]:
        return {suffix: self._read(info) for suffix, info in matrix.infos.items()}


def _is_transposed(tensor: Tensor) -> bool:
    """Returns whether a tensor views a parameter whose rows are its columns."""
    return tensor.dim() == 2 and tensor.stride(0) == 1 and tensor.stride(1) != 1


def _is_matrix(name: str, tensor: Tensor) -> bool:
    """Returns whether a tensor holds weights of products: experts have biases of two dimensions, too."""
    return tensor.dim() > 1 and not name.endswith("bias")


def _check_finite(tensor: Tensor, info: Stored) -> None:
    """Raises ModelLoadError unless all numbers are finite. Costs one pass over `tensor` at the speed of memory."""
    if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        raise ModelLoadError(
            f"{info.file}: tensor {info.name} holds NaN or infinity as {str(tensor.dtype).removeprefix('torch.')}: "
            "the model would answer with noise; download the file again, or choose another --dtype"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
