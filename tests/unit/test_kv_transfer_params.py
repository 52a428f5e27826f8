"""`kv_transfer_params`: what is read of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ValidationError
from quire.kv_transfer_params import MAX_PARAMS_BYTES, TransferParams, parse_transfer_params
from quire.sampling_params import SamplingParams

NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3], []],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


def test_the_dict_of_vllms_connector_is_read() -> None:
    params = parse_transfer_params(NIXL)
    assert params == TransferParams(
        do_remote_prefill=True, remote_block_ids=[[1, 2, 3], []], remote_engine_id="e", remote_request_id="r",
        remote_host="10.0.0.1", remote_port=5600,
    )  # fmt: skip
    assert params.port == 5600


@pytest.mark.parametrize(
    ("port", "number"), [(1, 1), ("5600", 5600), ("56 00", None), ("9" * 400, None), (None, None), ("-1", None)]
)
def test_ports(port: Any, number: int | None) -> None:
    assert parse_transfer_params({"remote_port": port}).port == number


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "must be an object, got str"),
        ({"do_remote_decode": "yes"}, "Expected `bool`, got `str` - at `\\$.do_remote_decode`"),
        ({"remote_host": 3}, "Expected `str | null`, got `int` - at `\\$.remote_host`"),
        ({"remote_num_tokens": 1.5}, "remote_num_tokens"),
        ({"a": {"b": {"c": {"d": {}}}}}, "nested 5 deep or more; at most 4 is allowed"),
        ({"a": [[[[[[[[]]]]]]]]}, "nested 5 deep or more"),
        ({"a": "x" * MAX_PARAMS_BYTES}, f"bytes; at most {MAX_PARAMS_BYTES} are allowed"),
        ({"remote_host": "h" * 600}, "remote_host has 600 characters; at most 512"),
        ({"remote_ranks": [["h", 1]]}, "remote_ranks"),
        ({"remote_ranks": [["h" * 600, 1, "i"]]}, "remote_ranks has a name of 600 characters; at most 512"),
        ({"seed": 1 << 70}, "kv_transfer_params has an integer of more than 64 bits"),
        ({"remote_num_tokens": -1 << 70}, "kv_transfer_params has an integer of more than 64 bits"),
    ],
)
def test_what_is_refused_names_the_field(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as error:
        SamplingParams(extra_args={"kv_transfer_params": value})
    assert error.value.param == "kv_transfer_params"
    assert "kv_transfer_params" in str(error.value)
