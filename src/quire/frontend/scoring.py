"""Scores of pairs of texts: which prompts they need, and what the results say.

A classifier with one class reads both texts of a pair as one prompt. An embedding model reads every text by itself,
once however many pairs it is in, and the score is the cosine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quire.errors import ValidationError
from quire.frontend.input_processor import InputProcessor
from quire.frontend.new_request import ParsedPrompt, PromptType
from quire.frontend.text.tokenizer import Tokenizer
from quire.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from quire.pooling_params import PoolingParams

Texts = str | Sequence[str]
Pair = tuple[str, str]


@dataclass(frozen=True)
class ScoringJob:
    """Prompts to be pooled, and the pairs they belong to. Without `pairs` each prompt is a pair of its own."""

    task: str
    prompts: list[PromptType]
    params: list[PoolingParams]
    pairs: list[tuple[int, int]] | None = None
    """For an embedding model: two prompts each."""

    def results(self, outputs: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """Returns the score of every pair, from the results of the prompts."""
        if self.pairs is None:
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        return [_compare(outputs[first], outputs[second]) for first, second in self.pairs]


class PairScorer:
    """Makes the prompts of pairs, as the model needs them."""

    def __init__(self, processor: InputProcessor, tokenizer: Tokenizer | None, tasks: Sequence[str]) -> None:
        self._processor = processor
        self._tokenizer = tokenizer
        self._tasks = tasks

    def plan(
        self,
        pairs: Sequence[Pair],
        params: PoolingParams | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> ScoringJob:
        """Returns the work for some pairs. Raises ValidationError for a model that gives no scores."""
        params = PoolingParams() if params is None else params
        if "score" in self._tasks:
            prompts = [self._read_together(pair, params, tokenization_kwargs, chat_template) for pair in pairs]
            return ScoringJob("score", [prompt for prompt, _ in prompts], [given for _, given in prompts])
        if "embed" not in self._tasks:
            raise ValidationError(
                f"scores need a model with one class or with embeddings; this one supports {', '.join(self._tasks)}"
                + ("; --runner pooling (LLM(runner='pooling')) loads it for them" if "generate" in self._tasks else ""),
                param="task",
            )
        if chat_template is not None:
            raise ValidationError("chat_template is for models that read both texts at once", param="chat_template")
        index = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        return ScoringJob(
            "embed",
            [*index],
            [params] * len(index),
            [(index[first], index[second]) for first, second in pairs],
        )

    def _read_together(
        self,
        pair: Pair,
        params: PoolingParams,
        tokenization_kwargs: Mapping[str, Any] | None,
        chat_template: str | None,
    ) -> tuple[PromptType, PoolingParams]:
        if chat_template is None:
            return self._processor.tokenize_pair(*pair, params, tokenization_kwargs)
        if self._tokenizer is None:
            raise ValidationError("chat_template needs the tokenizer", param="chat_template")
        messages = [{"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)]
        ids = self._tokenizer.apply_chat_template(messages, chat_template=chat_template)
        return ParsedPrompt(token_ids=cast("list[int]", ids)), params


def pair_texts(first: Texts, second: Texts, names: Pair = ("data_1", "data_2")) -> list[Pair]:
    """Returns the pairs: one text with each of several, or each with its counterpart. Raises ValidationError for other
    numbers."""
    left, right = ([texts] if isinstance(texts, str) else list(texts) for texts in (first, second))
    for name, texts in zip(names, (left, right), strict=True):
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValidationError(f"{name} must be a text or a list of texts, and not empty", param=name)
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ValidationError(
            f"{names[0]} has {len(left)} texts and {names[1]} has {len(right)}; give one and several, or as many",
            param=names[0],
        )
    return list(zip(left, right, strict=True))


def _compare(first: PoolingRequestOutput, second: PoolingRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        f"{first.request_id}_{second.request_id}",
        first.prompt_token_ids + second.prompt_token_ids,
        True,
        first.num_cached_tokens + second.num_cached_tokens,
        ScoringOutput(cosine(first.outputs.data, second.outputs.data)),
    )


def cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """Returns the cosine of the angle between two embeddings; 0 where one is all zeros."""
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0
