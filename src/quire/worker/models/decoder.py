"""The decoder that most open models share.

A family's file (llama.py, gemma.py, ...) reads its config.json into a `DecoderSpec`, which has a switch for everything
in which families differ (spec.py). The tree of modules has the checkpoint's names, or those of config/tensor_names.py.

All tokens of a step are one flat batch, without batch dimension or padding. The attention layer decides which tokens
see which.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.config.tensor_names import names_of, renamed
from quire.worker.attention.backend import States, get_forward_context
from quire.worker.kernels.specs import LinearSpec
from quire.worker.layers.linear import Embedding, Linear, Scale
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.layers.weights import Elsewhere
from quire.worker.models.blocks import BLOCKS, LayerInputs, split_inputs
from quire.worker.models.spec import DecoderSpec, make_norm, make_positions


class Decoder(nn.Module):
    """Embedding, layers, last norm: what checkpoints call `model`."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec, tied_head: LinearSpec | None) -> None:
        super().__init__()
        factor = spec.embedding_multiplier
        self.embed_tokens = Embedding(hf.vocab_size, hf.hidden_size, tied_head)
        self.embed_scale = None if factor == 1.0 else Scale(factor, rounds=spec.rounds_multiplier)
        self.embed_positions = make_positions(spec, hf)
        self.embed_norm = make_norm(spec, hf.hidden_size) if spec.embedding_norm else None
        self.ropes = nn.ModuleDict(
            {
                name: RotaryEmbedding(
                    *(rope, spec.rope_dims.get(name, hf.head_dim), hf.max_position_embeddings, hf.context_len),
                    in_float32=spec.rope_in_float32,
                    rounds_tables=spec.rope_rounds_tables,
                    backwards=spec.rope_backwards,
                )
                for name, rope in spec.ropes.items()
            }
        )
        self.layer_inputs: nn.Module | None = None
        if spec.layer_input_size is not None:
            self.layer_inputs = LayerInputs(hf, spec, spec.layer_input_size)
        block = BLOCKS[spec.block]
        self.layers = nn.ModuleList(block(hf, spec, layer, f"model.layers.{i}") for i, layer in enumerate(spec.layers))
        self.own_layers = range(len(spec.layers))
        """Numbers of the layers that this worker computes; the others are `Elsewhere`."""
        self.norm: nn.Module = make_norm(spec, hf.hidden_size)
        self.taps: tuple[int, ...] = ()
        """Layers whose inputs are returned, too, in increasing order: heads that draft read them."""
        self.keep_tap: Callable[[Tensor], Tensor] | None = None
        """Copies such inputs, where later layers write in their place; None: they stay."""

    def forward(self, input_ids: Tensor, positions: Tensor, *received: Tensor) -> States:
        """input_ids, positions: [num_tokens] to [num_tokens, hidden]; with taps, that and the residual stream before
        each of those layers.

        A stage of a pipeline gets in `received` the results of the stage before: the residual stream, the inputs of all
        layers where there are some, and what was tapped. All but the last return them.
        """
        x, *tapped = received or (self._embed(input_ids, positions),)
        rotations = {name: rope(positions) for name, rope in self.ropes.items()}
        rows: Tensor | None = None  # [num_tokens, num_layers * size]
        if isinstance(self.layer_inputs, LayerInputs):
            rows = self.layer_inputs(input_ids, x)
        elif self.layer_inputs is not None:
            rows, *tapped = tapped
        inputs = [()] * len(self.layers) if rows is None else split_inputs(rows, len(self.layers))
        for i in self.own_layers:
            if i in self.taps:
                tapped.append(x if self.keep_tap is None else self.keep_tap(x))
            x = self.layers[i](x, rotations, *inputs[i])
        if isinstance(self.norm, Elsewhere):
            rest = tapped if rows is None else [rows, *tapped]
            return (x, *rest) if rest else x
        normed: Tensor = self.norm(x)
        return (normed, *tapped) if self.taps else normed

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)  # [num_tokens, hidden]
        embeds = get_forward_context().embeds
        if embeds is not None:
            x[embeds[0]] = embeds[1].to(x.dtype)
        if self.embed_scale is not None:
            x = self.embed_scale(x)
        if self.embed_positions is not None:
            x = self.embed_positions(positions, x)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return x


class DecoderForCausalLM(nn.Module):
    """A decoder and its logits head. Families derive from it and describe themselves in their constructor."""

    is_plannable: bool
    """False if a layer computes other tokens than those of the step, too."""

    def __init__(self, hf: HFConfig, spec: DecoderSpec) -> None:
        super().__init__()
        self.is_plannable = True
        head = LinearSpec(float32_output=True, divisor=spec.logits_divisor, soft_cap=spec.logits_soft_cap)
        self.names = names_of(hf)
        self.model = Decoder(hf, spec, head if hf.tie_word_embeddings else None)
        self.lm_head = (
            None if hf.tie_word_embeddings else Linear(hf.hidden_size, hf.vocab_size, spec.head_bias, spec=head)
        )

    @property
    def takes_prompt_embeds(self) -> bool:
        """True if no layer but the first reads token ids."""
        return self.model.layer_inputs is None

    def checkpoint_name(self, name: str) -> str | None:
        return renamed(name, self.names)

    def forward(self, input_ids: Tensor, positions: Tensor, *received: Tensor) -> States:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, hidden], and those of
        `model.taps`; `received`: see `Decoder`."""
        states: States = self.model(input_ids, positions, *received)
        return states

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. hidden: [n, hidden], any rows of `forward`'s result; returns float32 [n, vocab]."""
        logits: Tensor = self.model.embed_tokens.project(hidden) if self.lm_head is None else self.lm_head(hidden)
        return logits
