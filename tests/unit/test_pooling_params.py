"""PoolingParams: what no model takes is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ValidationError
from quire.pooling_params import POOLING_TASKS, PoolingParams
from quire.sampling_params import RequestOutputKind


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"use_activation": 1}, "use_activation"),
        ({"segment_start": -1}, "segment_start"),
        ({"task": "dance"}, "task"),
        ({"output_kind": RequestOutputKind.DELTA}, "output_kind"),
        ({"step_tag_id": -1}, "step_tag_id"),
        ({"step_tag_id": 3, "task": "embed"}, "step_tag_id"),
        ({"returned_token_ids": [1]}, "returned_token_ids"),
        ({"extra_kwargs": {}}, "extra_kwargs"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PoolingParams(**fields).validate_fields()
    assert caught.value.param == param


def test_what_is_taken() -> None:
    PoolingParams().validate_fields()
    PoolingParams(task="token_classify", step_tag_id=3).validate_fields()
    for task in POOLING_TASKS:
        PoolingParams(task=task, dimensions=7, use_activation=False, skip_reading_prefix_cache=True).validate_fields()
