"""What a pooling model does with the hidden states of a text. `pooling_files.py` tells it from a model's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PoolingType = Literal["cls", "last", "mean"]
Head = Literal["embed", "classify", "token_classify"]
Activation = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """A projection after pooling: a Dense module of sentence-transformers."""

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str | None


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """How a model pools. `ModelConfig.pooling` is None for one that generates."""

    head: Head
    is_encoder: bool
    pooling_type: PoolingType
    activates: bool = True
    """Whether embeddings are normalised, or scores turned into probabilities, where a request does not say."""
    activation: Activation = "none"
    """How a classifier's scores become probabilities."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    label_token_ids: tuple[int, ...] = ()
    """Tokens whose logits are the scores, of a decoder that was trained to say them. With one label it is by how much
    the second is ahead of the first."""
    classifier_layers: int = 1
    """2: the classifier has a hidden layer, as those of reward models."""
    step_tag_id: int | None = None
    """The token after each step of an answer: scores per token are those of such tokens only. None: of all."""
    dense: tuple[DenseConfig, ...] = ()
    embedding_dim: int = 0
    matryoshka_dims: tuple[int, ...] | None = None
    """Lengths an embedding may be cut to: () for any, None for no other than its own."""
    default_dim: int | None = None
    """What it is cut to where a request does not say."""
    max_len: int | None = None
    """The longest text in tokens, where that is less than the positions there are."""
    lowers_case: bool = False
    """Texts are written in small letters before they are tokenized."""
    prompts: tuple[tuple[str, str], ...] = ()
    """(name, what is written before a text of that kind), of an embedding model that was trained with such prefixes."""
    has_segments: bool = False
    """Whether the second text of a pair is marked as such."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """What requests may ask for, the usual one first."""
        if self.head == "embed":
            return ("embed", "token_embed")
        if self.head == "token_classify":
            return ("token_classify",)
        return ("classify", "score") if len(self.labels) == 1 else ("classify",)

    def needs_all_tokens(self, task: str) -> bool:
        """Whether the last token's hidden state is not enough: then none may come from the prefix cache."""
        return self.pooling_type != "last" or task.startswith("token_")
