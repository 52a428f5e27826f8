"""Pooling of the hidden states of a text. `pooling_files.py` reads it from a model's files."""

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
    """Pooling of a model. `ModelConfig.pooling` is None for one that generates."""

    head: Head
    is_encoder: bool
    pooling_type: PoolingType
    activates: bool = True
    """Default of a request's `use_activation`: True normalises embeddings and turns scores into probabilities."""
    activation: Activation = "none"
    """Function that turns a classifier's scores into probabilities."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    label_token_ids: tuple[int, ...] = ()
    """Tokens whose logits are the scores, of a decoder that was trained to write them. With one label the score is
    the difference of the two."""
    classifier_layers: int = 1
    """2: the classifier has a hidden layer, as those of reward models."""
    step_tag_id: int | None = None
    """Token after each step of an answer: scores per token are those of such tokens only. None: of all tokens."""
    dense: tuple[DenseConfig, ...] = ()
    embedding_dim: int = 0
    matryoshka_dims: tuple[int, ...] | None = None
    """Lengths to which an embedding may be cut: () for any, None for its own only."""
    default_dim: int | None = None
    """Length of an embedding where a request has none."""
    max_len: int | None = None
    """Tokens of the longest text, where that is less than the number of positions."""
    lowers_case: bool = False
    """True: texts are lower-cased before they are tokenized."""
    prompts: tuple[tuple[str, str], ...] = ()
    """(name, prefix of a text of that kind), of an embedding model that was trained with prefixes."""
    has_segments: bool = False
    """True if the second text of a pair is marked as such."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Returns the tasks that requests may ask for, the default first."""
        if self.head == "embed":
            return ("embed", "token_embed")
        if self.head == "token_classify":
            return ("token_classify",)
        return ("classify", "score") if len(self.labels) == 1 else ("classify",)

    def needs_all_tokens(self, task: str) -> bool:
        """Returns whether a task needs all hidden states; then no token may come from the prefix cache."""
        return self.pooling_type != "last" or task.startswith("token_")
