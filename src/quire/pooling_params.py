"""Parameters of a request to a pooling model (embeddings, classes, scores), with vLLM's names."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import ValidationError
from quire.field_bounds import INT64_MAX, FieldBound, NamedFields
from quire.sampling_params import RequestOutputKind

POOLING_TASKS = ("embed", "token_embed", "classify", "token_classify", "score")
POOLING_FIELDS = (
    FieldBound("use_activation", "bool", optional=True),
    FieldBound("dimensions", "int", 1, INT64_MAX, optional=True),
    FieldBound("segment_start", "int", 0, INT64_MAX, optional=True),
    FieldBound("step_tag_id", "int", 0, 2**31 - 1, optional=True),
    FieldBound("skip_reading_prefix_cache", "bool", optional=True),
)
"""Bounds of the numbers and switches."""


class PoolingParams(msgspec.Struct, metaclass=NamedFields, omit_defaults=True, kw_only=True):
    """Parameters of one pooling request. `task` is chosen by the method called (embed, classify, score, encode)."""

    use_activation: bool | None = None
    """Normalise an embedding, or turn scores into probabilities. None: as the model's files say."""
    dimensions: int | None = None
    """Cut the embedding to its first so many numbers; only for a model that was trained for it."""
    step_tag_id: int | None = None
    """Token id at the end of each step of an answer: a task per token returns the results of these tokens only. None:
    the server's --pooler-config or the model's files decide."""
    returned_token_ids: list[int] | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    segment_start: int | None = None
    """Set by the engine: the first token of the second text of a pair, where the model marks it."""

    def clone(self) -> PoolingParams:
        """Returns an independent copy."""
        return msgspec.structs.replace(self)

    def validate_fields(self) -> None:
        """Raises ValidationError for a value that no model accepts, or that asks for an unsupported feature."""
        for bound in POOLING_FIELDS:
            bound.validate(getattr(self, bound.name))
        if self.task is not None and self.task not in POOLING_TASKS:
            raise ValidationError(
                f"task {self.task!r} is not one of {', '.join(POOLING_TASKS)}", param="task", value=self.task
            )
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise ValidationError(
                "output_kind of a pooling request is FINAL_ONLY: it has one output", param="output_kind"
            )
        if self.step_tag_id is not None and self.task and not self.task.startswith("token_"):
            raise ValidationError(
                f"step_tag_id is for tasks that have a result per token, and this one is {self.task!r}",
                param="step_tag_id",
            )
        if self.returned_token_ids is not None:
            raise ValidationError(
                "returned_token_ids is chosen for all requests at the start: --pooler-config.returned_token_ids",
                param="returned_token_ids",
            )
        if self.extra_kwargs is not None:
            raise ValidationError("extra_kwargs is read by no model; leave it out", param="extra_kwargs")
