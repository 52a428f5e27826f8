"""Cuts a model that is built, but has no weights yet, to one worker's part.

A stage of a pipeline has adjacent layers; the first has the embedding, too, and the last the norm and the head. Among
the workers of a stage every matrix is cut by its outputs, so that each output stays one sum over all inputs. Layers
then return whole results: `Gather`. Attention is cut by heads. What is small (norms, routers) or cannot be cut is
computed by every worker alike, as is the classifier of a model that pools. Engines that share experts have all but
those: `ExpertsPool`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import nn

from quire.errors import ConfigError, UnsupportedModelError
from quire.worker.kernels.base import ExpertsShare
from quire.worker.layers.linear import Embedding, Linear
from quire.worker.layers.moe import Experts
from quire.worker.layers.weights import Elsewhere
from quire.worker.models.attention import SelfAttention
from quire.worker.models.decoder import Decoder, DecoderForCausalLM
from quire.worker.models.latent import LatentAttention
from quire.worker.parallel.collectives import Collectives, Gather, Meeting, Written
from quire.worker.parallel.plan import Stage, share_experts, share_heads, share_outputs
from quire.worker.parallel.pool import ExpertsPool, LayerTokens
from quire.worker.pooler import CLASSIFIER, PooledDecoder

IN_ONE_TENSOR = (
    "--enable-expert-parallel: the experts of this model are stored in one tensor, which is not divided yet: each "
    "worker computes all; leave it out"
)


class Sharding:
    """One worker's part of models."""

    def __init__(
        self,
        collectives: Collectives | None,
        stage: Stage | None = None,
        expert_placement: str | None = None,
        pool: ExpertsPool | None = None,
    ) -> None:
        """None: there are no others in the stage, or there is one stage only, or no worker has whole experts, or no
        engine shares them."""
        self.collectives, self.stage, self._expert_placement, self.pool = collectives, stage, expert_placement, pool
        self._uses = Counter[str]()

    @property
    def name(self) -> str:
        """Name of the part: the same name means the same part."""
        stage, names = self.stage, list[str]()
        if stage is not None:
            names.append(f"pp {stage.index} of {stage.partition or stage.count}")
        if self.collectives is not None:
            group = self.collectives.group
            names.append(f"{group.kind} {group.index} of {group.size}")
            names += [] if self._expert_placement is None else [f"experts {self._expert_placement}"]
        if self.pool is not None:
            names.append(f"ep {self.pool.group.index} of {self.pool.group.size}, experts {self._expert_placement}")
        return ", ".join(names)

    def cut(self, model: nn.Module) -> None:
        """Leaves `model`, which is on the meta device, this worker's part. Raises UnsupportedModelError or
        ConfigError."""
        if not isinstance(model, DecoderForCausalLM | PooledDecoder) or not isinstance(model.model, Decoder):
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be divided among workers; only decoders can be; leave "
                "--tensor-parallel-size, --pipeline-parallel-size and --enable-expert-parallel out"
            )
        if self.stage is not None:
            cut_to_stage(model, self.stage)
        if self.collectives is not None:
            self._cut_to_share(model)
            if not self.collectives.can_plan:
                model.is_plannable = False
        if self.pool is not None:
            self._pool_experts(model, self.pool)

    def _pool_experts(self, model: DecoderForCausalLM | PooledDecoder, pool: ExpertsPool) -> None:
        mixtures = [m for m in model.modules() if isinstance(m, Experts) and m.spec.num_experts > 1]
        if not mixtures:
            raise UnsupportedModelError(
                f"--enable-expert-parallel: {type(model).__name__} has no experts that --data-parallel-size "
                f"{pool.group.size} engines could share; leave it out: they are independent then"
            )
        for experts in mixtures:
            self._pool_layer(experts, pool)

    def _pool_layer(self, experts: Experts, pool: ExpertsPool) -> None:
        spec, width, group = experts.spec, experts.hidden_size, pool.group
        if spec.layout in ("stacked", "transposed"):
            raise UnsupportedModelError(IN_ONE_TENSOR)
        assert not spec.scales_inputs, "only experts in one tensor have weights that scale their inputs"
        if spec.num_experts < group.size:
            raise ConfigError(
                f"--enable-expert-parallel: {spec.num_experts} experts are too few for --data-parallel-size "
                f"{group.size} engines; use {spec.num_experts} engines or fewer, or leave it out"
            )
        assert self._expert_placement is not None
        own, first, order = share_experts(group, spec.num_experts, self._expert_placement)
        places = None if order is None else torch.tensor(order, dtype=torch.int32, device="cpu")
        inner, outputs = range(spec.expert_size), range(width)
        owners = torch.empty(spec.num_experts, dtype=torch.int64, device="cpu")
        for index in range(group.size):
            theirs = share_experts(dataclasses.replace(group, index=index), spec.num_experts, self._expert_placement)[0]
            owners[list(theirs)] = index

        def make_share(dtype: torch.dtype) -> ExpertsShare:
            tokens = LayerTokens(pool, spec.router.num_experts_per_token, width, dtype, owners)
            unused = torch.empty(0)
            return ExpertsShare(
                spec.num_experts, own, first, places, inner, outputs, unused, lambda _: pool.ready(), None, tokens
            )

        with torch.device("meta"):
            experts.cut(own, inner, outputs, make_share)
        experts.is_pooled = True

    def _cut_to_share(self, model: DecoderForCausalLM | PooledDecoder) -> None:
        with torch.device("meta"):
            for path, module in model.named_modules():
                if isinstance(module, SelfAttention):
                    self._cut_attention(path, module)
                elif isinstance(module, Experts):
                    self._cut_experts(path, module)
            for path, module in model.named_modules():
                if isinstance(module, Linear) and not module.cuts and self._is_cut(model, path):
                    self._cut_linear(path, module)
            self._cut_vocabulary(model)

    def _is_cut(self, model: nn.Module, path: str) -> bool:
        """Returns whether a matrix is cut: not those whose results are changed in place, nor classifiers."""
        parent, _, name = path.rpartition(".")
        if path.partition(".")[0] == CLASSIFIER:
            return False
        owner = model.get_submodule(parent)
        if isinstance(owner, LatentAttention):
            return name == "o_proj"
        return parent != "model.layer_inputs"

    def _gather(self, path: str, width: int, *, copies: bool = False, guards: bool = False) -> Gather:
        """Returns the gather of a layer's result. Layers that differ by their number only share buffers: two for
        each name, in turn."""
        role = " ".join([*(part for part in path.split(".") if not part.isdigit()), str(width)])
        number = self._uses[role] % 2
        self._uses[role] += 1
        assert self.collectives is not None
        start, end = share_outputs(self.collectives.group, width)
        return Gather(self.collectives, f"{role} {number}", width, start, end, copies=copies, guards=guards)

    def _cut_linear(self, path: str, linear: Linear) -> None:
        linear.cut_outputs(self._gather(path, linear.out_features, guards=path == "lm_head"))

    def _cut_attention(self, path: str, attention: SelfAttention) -> None:
        spec, whole = attention.attn.spec, None
        assert self.collectives is not None
        share = share_heads(self.collectives.group, spec.num_heads, spec.num_kv_heads)
        if attention.norms_all_heads:
            whole = self._gather(f"{path}.qkv_proj", sum(attention.sizes), copies=True)
        attended = self._gather(f"{path}.attn", spec.num_heads * spec.value_size)
        attended.start, attended.end = share.heads.start * spec.value_size, share.heads.stop * spec.value_size
        attention.cut(share, attended, whole)

    def _cut_experts(self, path: str, experts: Experts) -> None:
        assert self.collectives is not None
        spec, width, group = experts.spec, experts.hidden_size, self.collectives.group
        num_choices = spec.router.num_experts_per_token
        if spec.layout in ("stacked", "transposed"):
            if self._expert_placement is not None:
                raise UnsupportedModelError(IN_ONE_TENSOR)
            return
        role = " ".join(part for part in path.split(".") if not part.isdigit())
        if self._expert_placement is not None and not self.collectives.can_plan:
            raise UnsupportedModelError(
                "--enable-expert-parallel: whole experts are not exchanged between machines (--nnodes) yet; leave it "
                "out: each worker has columns of all experts then; or use --pipeline-parallel-size for the machines"
            )
        if self._expert_placement is not None and spec.num_experts >= group.size:
            own, first, order = share_experts(group, spec.num_experts, self._expert_placement)
            places = None if order is None else torch.tensor(order, dtype=torch.int32, device="cpu")
            inner, outputs, gather = range(spec.expert_size), range(width), None
            meet = Meeting(self.collectives, f"{role} answers", num_choices, width, torch.float32)
        elif spec.expert_size >= group.size:
            own, first, places = range(spec.num_experts), 0, None
            inner, gather = range(*share_outputs(group, spec.expert_size)), self._gather(path, width)
            outputs = range(gather.start, gather.end)
            stride = -(-spec.expert_size // 64) * 64
            meet = Meeting(self.collectives, f"{role} between", num_choices, stride)
        else:
            return

        inner_columns = slice(inner.start, inner.stop)

        def make_share(dtype: torch.dtype) -> ExpertsShare:
            complete = None if gather is None else gather.compute
            meeting = meet.buffer(dtype)

            def ready(num_rows: int) -> None:
                meet.collectives.ready(() if gather is None else [Written(meeting[:num_rows, inner_columns])])

            return ExpertsShare(spec.num_experts, own, first, places, inner, outputs, meeting, ready, complete)

        experts.cut(own, inner, outputs, make_share)

    def _cut_vocabulary(self, model: DecoderForCausalLM | PooledDecoder) -> None:
        table: nn.Module = model.model.embed_tokens
        if not isinstance(table, Embedding):
            return  # of another stage
        num_ids, dim = table.weight.shape
        logits = self._gather("logits", num_ids, guards=True)
        vectors = self._gather("vectors", dim)
        table.cut(torch.arange(logits.start, logits.end, device="cpu"), vectors, logits)


class Ends(Sharding):
    """Embedding and logits head, whole and without layers. A head that drafts shares them with its target, of which
    this worker has a part only."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def name(self) -> str:
        return "ends"

    def cut(self, model: nn.Module) -> None:
        super().cut(model)
        decoder = model.model
        assert isinstance(decoder, Decoder), "others cannot be cut"
        for i, layer in enumerate(decoder.layers):
            decoder.layers[i] = Elsewhere(layer)
        decoder.own_layers = range(0)


def cut_to_stage(model: DecoderForCausalLM | PooledDecoder, stage: Stage) -> None:
    """Leaves `model` the modules of one stage. Raises ConfigError if its layers cannot be divided so."""
    decoder = model.model
    own = stage.layers(len(decoder.layers))
    for i, layer in enumerate(decoder.layers):
        if i not in own:
            decoder.layers[i] = Elsewhere(layer)
        elif isinstance(layer.self_attn, SelfAttention):
            _check_source(layer.self_attn, i, own)
    decoder.own_layers = own
    names = [] if stage.is_last else ["model.norm", "lm_head"]
    if not stage.is_first:
        names += ["model.embed_positions", "model.embed_norm", "model.layer_inputs"]
        makes_logits = decoder.embed_tokens.head is not None
        names += [] if stage.is_last and makes_logits else ["model.embed_tokens"]
    for path in names:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        if getattr(owner, name, None) is not None:
            setattr(owner, name, Elsewhere(getattr(owner, name)))


def _check_source(attention: SelfAttention, number: int, own: range) -> None:
    """Raises ConfigError for a layer that reads keys and values of a layer in an earlier stage."""
    if attention.layer.kv_from is None:
        return
    source = int(attention.layer.kv_from.split(".")[2])
    if source not in own:
        raise ConfigError(
            f"--pipeline-parallel-size: layer {number} reads the keys and values of layer {source}, which is in an "
            "earlier stage; set QUIRE_PP_LAYER_PARTITION so that they are in one, or use --tensor-parallel-size"
        )
