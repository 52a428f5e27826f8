"""The configuration on its way to the core: it comes back equal, and anything else is refused in words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.config.model import ModelConfig
from quire.config.server import decode_config, encode_config
from quire.errors import ConfigError


def test_a_resolved_configuration_comes_back_equal() -> None:
    config = EngineArgs(
        model="demo", dtype="float32", max_model_len=256, override_generation_config={"temperature": 0.5}
    ).create_engine_config()
    decoded = decode_config(encode_config(config))
    assert decoded == config
    assert hash(repr(decoded)) == hash(repr(config)), "types and all"
    assert decoded.model_config.hf_config is not None


def test_the_default_configuration_comes_back_equal() -> None:
    assert decode_config(encode_config(EngineConfig())) == EngineConfig()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x80\x80", msgspec.msgpack.encode({"model_config": 3})])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        decode_config(data)


def test_a_truncated_configuration_is_refused_at_every_length() -> None:
    data = encode_config(EngineConfig())
    for length in range(len(data)):
        with pytest.raises(ConfigError):
            decode_config(data[:length])


def test_what_cannot_cross_is_named() -> None:
    config = dataclasses.replace(EngineConfig(), model_config=ModelConfig(model=object()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="holds a object"):
        encode_config(config)


def test_paths_stay_paths() -> None:
    config = EngineArgs(model="demo").create_engine_config()
    for part in dataclasses.fields(config):
        before, after = getattr(config, part.name), getattr(decode_config(encode_config(config)), part.name)
        for field in dataclasses.fields(before):
            if isinstance(getattr(before, field.name), Path):
                assert isinstance(getattr(after, field.name), Path)
