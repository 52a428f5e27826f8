"""transformers' attention, answered by Quire.

Models of transformers call attention through a table of functions. "quire" is registered there twice: NAME runs a
layer's paged attention, RECORDING notes what a layer asks for (`discovery.py`). NAME has no mask function, so that
masks are None while a model runs; RECORDING has one, which describes the mask instead of making it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from quire.errors import UnsupportedModelError
from quire.worker.attention.backend import AttentionSpec, get_forward_context
from quire.worker.attention.layer import Attention

NAME = "quire"
RECORDING = "quire_recording"
HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "scaling", "sliding_window", "softcap", "s_aux"})
"""Keywords of an attention call that are understood. Others must be None, False or 0."""
_FAR = 1 << 21
"""Number of queries by which a mask is recognized: windows and chunks are smaller."""
_CHILD = "quire_attention"
"""Name of the child that holds the Attention of a layer of transformers, one for each call of a step."""


class PagedAttention(Attention):
    """The attention of one layer of transformers.

    All layers have one form of cache: the largest head and the most heads. Smaller heads are padded with zeros, which
    changes no product, and fewer heads are repeated.
    """

    def __init__(self, site: Site, num_kv_heads: int, head_size: int) -> None:
        view, sizes = site.view, (site.num_heads, num_kv_heads, head_size)
        spec = AttentionSpec(*sizes, site.scale, view.window, site.soft_cap, chunk=view.chunk)
        super().__init__(spec, f"{site.module}.{site.call}" if site.call else site.module)
        self.value_size = site.value_size
        self.repeats = num_kv_heads // site.num_kv_heads

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """query: [1, num_heads, n, key_size]; key, value: [1, num_kv_heads, n, their size]; returns [1, n, num_heads,
        value_size]."""
        size, context = self.spec.head_size, get_forward_context()
        attended = context.backend.forward(
            _heads(query, size),
            _heads(key, size, self.repeats),
            _heads(value, size, self.repeats),
            context.kv_caches[self.layer_name],
            context.metadata[context.layer_groups[self.layer_name]],
            self.spec,
            sinks,
        )
        return attended[..., : self.value_size].unsqueeze(0)


class PagedAttentions(nn.ModuleList):
    """The attention of each call that a layer makes in a step, in their order: most make one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def next(self) -> PagedAttention:
        """Returns the attention of the present call."""
        layer = self[self.num_calls % len(self)]
        self.num_calls += 1
        assert isinstance(layer, PagedAttention)
        return layer


def restart_calls(model: nn.Module) -> None:
    """Begins to count the calls of a step anew, after one that was interrupted."""
    for module in model.modules():
        if isinstance(module, PagedAttentions):
            module.num_calls = 0


def _heads(x: Tensor, size: int, repeats: int = 1) -> Tensor:
    """Returns [n, heads * repeats, size] of [1, heads, n, at most size]."""
    x = x[0].transpose(0, 1) if repeats == 1 else x[0].repeat_interleave(repeats, dim=0).transpose(0, 1)
    return x if x.shape[2] == size else functional.pad(x, (0, size - x.shape[2]))


@dataclass(frozen=True)
class View:
    """The keys that a query sees: all up to its own, or fewer."""

    window: int | None = None
    """Number of the last keys, its own included."""
    chunk: int | None = None
    """Size of the chunks of which it sees its own."""

    def first_key(self, position: int) -> int:
        """Returns the position of the first key that the query at `position` sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass
class Site:
    """One call of a layer's attention, as its model made it."""

    module: str
    """Path of the layer."""
    call: int
    """Number of the call among the layer's calls in one step."""
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    view: View
    soft_cap: float | None
    has_sinks: bool
    inputs: tuple[Tensor, Tensor, Tensor] = field(compare=False, repr=False)
    """Its queries, keys and values."""


@dataclass
class Recording:
    """The calls of one forward pass, and the masks that were made for it."""

    names: dict[int, str]
    """Path of every module by its id."""
    sites: list[Site] = field(default_factory=list)
    masks: list[tuple[Tensor, View]] = field(default_factory=list)
    """Masks with the view of each. They are kept, so that the identity of one says which it is."""
    logits: Any = None
    """Answer of the pass, once it is over."""

    def view_of(self, mask: Tensor) -> View:
        """Returns what a mask made in this pass lets through. Raises UnsupportedModelError for any other mask."""
        for known, view in self.masks:
            if known is mask:
                return view
        raise UnsupportedModelError("it changes its attention mask")


_recording: ContextVar[Recording] = ContextVar("recording")


@contextmanager
def recording(names: dict[int, str]) -> Iterator[Recording]:
    """Records the attention calls of this thread inside the block, and yields the record."""
    record = Recording(names)
    token = _recording.set(record)
    try:
        yield record
    finally:
        _recording.reset(token)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attends by the layer's child. Raises UnsupportedModelError for a mask: discovery has seen none."""
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} gave a mask to its attention")
    layers: PagedAttentions = getattr(module, _CHILD)
    return layers.next().attend(query, key, value, kwargs.get("s_aux")), None


def attach(model: nn.Module, sites: Sequence[Site]) -> None:
    """Gives the layers of `model` their Attention. Raises UnsupportedModelError if no form of cache fits them all."""
    num_kv_heads = max(site.num_kv_heads for site in sites)
    head_size = max(max(site.key_size, site.value_size) for site in sites)
    for site in sites:
        if num_kv_heads % site.num_kv_heads or site.num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"layer {site.module}: it has {site.num_heads} heads and {site.num_kv_heads} of keys and values, and "
                f"another layer has {num_kv_heads}"
            )
        module = model.get_submodule(site.module)
        if site.call == 0:
            module.add_module(_CHILD, PagedAttentions())
        layers: PagedAttentions = getattr(module, _CHILD)
        layers.append(PagedAttention(site, num_kv_heads, head_size))


def record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Notes what the layer asks for, and returns each head's own value. Raises UnsupportedModelError."""
    found = _recording.get()
    name = found.names.get(id(module), type(module).__name__)
    try:
        site = _make_site(found, name, module, (query, key, value), attention_mask, kwargs)
    except UnsupportedModelError as e:
        raise UnsupportedModelError(f"layer {name}: {e}") from None
    found.sites.append(site)
    heads = torch.arange(site.num_heads, device=value.device) * site.num_kv_heads // site.num_heads
    return value[:, heads].transpose(1, 2).contiguous(), None


def _make_site(
    found: Recording,
    name: str,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Site:
    query, key, value = tensors
    for keyword, given in kwargs.items():
        is_off = given is None or (isinstance(given, bool | int) and not given)
        if keyword not in HARMLESS and not is_off:
            raise UnsupportedModelError(f"it calls attention with {keyword}, which is not understood")
    if any(tensor.dim() != 4 for tensor in tensors) or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise UnsupportedModelError(f"it attends to other tokens than the step's: queries, keys, values are {shapes}")
    is_causal = kwargs.get("is_causal")
    if mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModelError("its attention is not causal")
    scale = kwargs.get("scaling")
    if isinstance(scale, Tensor) and (scale.is_meta or scale.numel() != 1):
        raise UnsupportedModelError("its scale is a tensor")
    return Site(
        name,
        sum(site.module == name for site in found.sites),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_size=query.shape[3],
        value_size=value.shape[3],
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        view=View() if mask is None else found.view_of(mask),
        soft_cap=None if kwargs.get("softcap") is None else float(kwargs["softcap"]),
        has_sinks=kwargs.get("s_aux") is not None,
        inputs=(query.clone(), key.clone(), value.clone()),
    )


def describe_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any = "cpu", **_: Any
) -> Tensor:
    """Recognizes a mask by its function and returns a tensor that stands for it. Raises UnsupportedModelError."""
    stand_in = torch.zeros((1, 1, q_length, kv_length), dtype=torch.bool, device=device)
    _recording.get().masks.append((stand_in, recognize(mask_function)))
    return stand_in


def recognize(mask_function: Callable[..., Any]) -> View:
    """Returns what a mask function lets through. Raises UnsupportedModelError if it is none of the three views."""
    sees_first = _visible(mask_function, torch.arange(_FAR), torch.zeros(_FAR, dtype=torch.int64))
    size = int(sees_first.int().argmin())  # the first query that does not see position 0
    if not sees_first[0]:
        raise UnsupportedModelError("its attention mask hides a token from itself")
    if bool(sees_first.all()):
        view, positions = View(), [0, 1, 7, 100, 1000]
    else:
        is_window = bool(_visible(mask_function, torch.tensor([size]), torch.tensor([size - 1])).all())
        view = View(window=size) if is_window else View(chunk=size)
        positions = [0, 1, size - 1, size, size + 1, 3 * size - 1, 3 * size, 3 * size + 5]
    for position in positions:
        keys = torch.arange(max(0, position - 2 * size - 1000), position + 20)
        expected = (keys <= position) & (keys >= view.first_key(position))
        if not torch.equal(_visible(mask_function, torch.full_like(keys, position), keys), expected):
            raise UnsupportedModelError("its attention mask is neither causal, nor a sliding window, nor chunks")
    return view


def _visible(mask_function: Callable[..., Any], queries: Tensor, keys: Tensor) -> Tensor:
    """Returns [n] bool: whether each query sees the key beside it."""
    zero = torch.tensor(0)
    try:
        seen = mask_function(zero, zero, queries, keys)
    except (RuntimeError, IndexError, TypeError) as e:
        raise UnsupportedModelError("its attention mask depends on more than positions") from e
    return torch.as_tensor(seen).expand(keys.shape)


AttentionInterface.register(NAME, attend)
AttentionInterface.register(RECORDING, record)
AttentionMaskInterface.register(RECORDING, describe_mask)
