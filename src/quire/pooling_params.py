"""What a user asks of a pooling model (embeddings, classification, scores). Names: spec/vllm.md §1."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.sampling_params import RequestOutputKind


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Parameters of one pooling request. `task` is chosen by the method called (embed, classify, score, encode)."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def clone(self) -> PoolingParams:
        """An independent copy."""
        return msgspec.structs.replace(self)
