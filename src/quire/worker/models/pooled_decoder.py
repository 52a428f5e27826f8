"""A decoder that pools: without its logits head, and with a classifier where the task needs one.

Rerankers that were trained to answer "yes" or "no" keep the logits head: their classifier is a few of its rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quire.config.hf_config import HFConfig
from quire.config.pooling import PoolingConfig
from quire.worker.kernels.specs import LOGITS, LinearSpec
from quire.worker.layers.linear import Embedding, Linear
from quire.worker.layers.weights import NamedWeights

HIDDEN = LinearSpec(activation="relu")


class RewardHead(nn.ModuleDict):
    """The classifier of a reward model, by its names in the checkpoint: linear, ReLU, linear."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        layers = {
            "0": Linear(hidden_size, hidden_size, True, HIDDEN),
            "2": Linear(hidden_size, num_labels, True, LOGITS),
        }
        super().__init__(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, num_labels]."""
        scores: Tensor = self["2"](self["0"](hidden))
        return scores


class PooledDecoder(nn.Module):
    """The `model` of a decoder (an nn.Module) built to generate, and `score`, a classifier of its hidden states."""

    def __init__(self, decoder: Any, hf: HFConfig, pooling: PoolingConfig) -> None:
        super().__init__()
        self.label_token_ids = list(pooling.label_token_ids)
        self.is_difference = bool(self.label_token_ids) and len(pooling.labels) == 1
        self.model = decoder.model
        self._hidden_states, self._logits = decoder.forward, decoder.compute_logits
        self._rename = decoder.checkpoint_name if isinstance(decoder, NamedWeights) else str
        if self.label_token_ids:
            self.lm_head = decoder.lm_head
        for module in decoder.modules():
            if isinstance(module, Embedding) and not self.label_token_ids:
                module.head = None
        has_bias = pooling.head == "token_classify" and bool(hf.get("token_classification_bias", True))
        has_classifier = pooling.head != "embed" and not self.label_token_ids
        size = len(pooling.labels)
        self.score: Linear | RewardHead | None = None
        if has_classifier and pooling.classifier_layers == 2:
            self.score = RewardHead(hf.hidden_size, size)
        elif has_classifier:
            self.score = Linear(hf.hidden_size, size, has_bias, LOGITS)

    def checkpoint_name(self, name: str) -> str | None:
        is_other = (name.startswith("lm_head.") and not self.label_token_ids) or (
            self.score is None and name.startswith("score.")
        )
        return None if is_other else self._rename(name)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of a flat batch. input_ids, positions: [num_tokens] to [num_tokens, hidden]."""
        hidden: Tensor = self._hidden_states(input_ids, positions)
        return hidden

    def classify(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden]; returns float32 [n, num_labels]."""
        if self.label_token_ids:
            logits: Tensor = self._logits(hidden)[:, self.label_token_ids]  # [n, len(label_token_ids)]
            return logits[:, 1:] - logits[:, :1] if self.is_difference else logits
        assert self.score is not None
        scores: Tensor = self.score(hidden)
        return scores
