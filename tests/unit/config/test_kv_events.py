"""--kv-events-config: its keys, their bounds, and where a rank publishes."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.config.kv_events import KVEventsConfig
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"enable_events": True}, "unknown key 'enable_events'"),
        ({"endpont": "tcp://*:1"}, "did you mean endpoint"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events"),
        ({"publisher": "kafka"}, "publisher 'kafka' is not one of zmq, null"),
        ({"event_format": "json"}, "event_format 'json' is not one of map, array"),
        ({"endpoint": "127.0.0.1:5557"}, "no address such as"),
        ({"replay_endpoint": "tcp://127.0.0.1"}, "has no port"),
        ({"endpoint": "tcp://*:99999"}, "has no port up to 65535"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "is also endpoint; give it another port"),
        ({"buffer_steps": -1}, r"buffer_steps must be in \[0, 10000000\], got -1"),
        ({"max_queue_size": 0}, "max_queue_size"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KVEventsConfig.from_json(values)


def test_nothing_is_published_unless_it_is_asked_for() -> None:
    assert not KVEventsConfig.from_json({}).is_enabled
    assert not KVEventsConfig.from_json({"enable_kv_cache_events": True, "publisher": "null"}).is_enabled
    assert KVEventsConfig.from_json({"enable_kv_cache_events": True, "publisher": None}).is_enabled


def test_a_rank_has_a_port_of_its_own() -> None:
    config = KVEventsConfig.from_json({"endpoint": "tcp://*:5557", "replay_endpoint": "ipc:///tmp/replay"})
    assert config.endpoint_of(0) == "tcp://*:5557"
    assert config.endpoint_of(3) == "tcp://*:5560"
    assert config.replay_endpoint_of(3) == "ipc:///tmp/replay_dp3"


@pytest.mark.parametrize(
    ("endpoint", "is_bound"),
    [
        (None, True),
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_a_host_is_connected_to_and_the_rest_bound(endpoint: str | None, is_bound: bool) -> None:
    assert KVEventsConfig.from_json({"endpoint": endpoint}).is_bound is is_bound


def test_by_default_only_this_host_can_subscribe() -> None:
    assert KVEventsConfig().endpoint_of(0) == "tcp://127.0.0.1:5557"


def test_events_without_a_cache_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for enable_prefix_caching, is_said in ((True, False), (False, True)):
        args = EngineArgs(
            "demo", enable_prefix_caching=enable_prefix_caching, kv_events_config={"enable_kv_cache_events": True}
        )
        args.create_engine_config()
        assert ("--kv-events-config publishes nothing" in caplog.text) is is_said
