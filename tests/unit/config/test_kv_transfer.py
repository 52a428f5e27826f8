"""--kv-store and --kv-transfer-config: what they ask for, and what is refused with what to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.config.kv_transfer import (
    BOTH,
    CONNECTORS,
    DEFAULT_STORE_BYTES,
    ELSEWHERE,
    FOREIGN,
    PEERS,
    STORE,
    KVTransferConfig,
)
from quire.config.server import decode_config, encode_config
from quire.errors import ConfigError


def settle(**values: Any) -> KVTransferConfig:
    return KVTransferConfig(transfer={"kv_role": "kv_both", **values}).settle()


def test_nothing_is_stored_unless_asked_for() -> None:
    assert KVTransferConfig().settle().connector is None
    assert KVTransferConfig(transfer={}).settle().connector is None


def test_the_short_flags(tmp_path: Path) -> None:
    args = EngineArgs("demo", kv_store=str(tmp_path), kv_store_size="1G", kv_store_skip_salted=True)
    config = args.create_engine_config().kv_transfer_config
    assert config.kv_connector == STORE
    assert config.kv_role == "kv_both"
    assert config.kv_connector_extra_config == {"path": str(tmp_path), "max_bytes": 1 << 30, "skip_salted": True}


def test_compression_by_the_flag_and_as_a_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flag = {"path": str(tmp_path)}, {"kv_store_compress": True}
    assert not settle(kv_connector=STORE, **extra(**path)).kv_store_compress
    assert settle(kv_connector=STORE, **extra(**path, codec=1)).kv_store_compress
    assert settle(kv_connector=PEERS, **extra(tiers=[REMOTE], codec=1)).kv_store_compress
    for flags in ({"kv_store": str(tmp_path)}, {"kv_store_remote": REMOTE}):
        config = EngineArgs("demo", **flags, **flag).create_engine_config().kv_transfer_config
        assert config.kv_store_compress
        assert "codec" not in config.kv_connector_extra_config
    both = EngineArgs("demo", kv_store=str(tmp_path), kv_store_remote=REMOTE, **flag).create_engine_config()
    assert [part.kv_store_compress for part in both.kv_transfer_config.parts] == [True, True]
    with pytest.raises(ConfigError, match="add --kv-store"):
        EngineArgs("demo", **flag).create_engine_config()
    with pytest.raises(ConfigError, match="codec"):
        settle(kv_connector=STORE, **extra(**path, codec=2))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"quire\[zstd\]"):
        settle(kv_connector=STORE, **extra(**path, codec=1))


@pytest.mark.parametrize("values", [{"kv_connector": STORE}, {"kv_connector": "M", "kv_connector_module_path": "a"}])
def test_the_configuration_crosses_to_the_core(values: dict[str, Any]) -> None:
    args = EngineArgs("demo", kv_transfer_config=values | {"kv_role": "kv_both"} | extra(path="x"))
    config = args.create_engine_config()
    assert decode_config(encode_config(config)).kv_transfer_config == config.kv_transfer_config


def extra(**values: Any) -> dict[str, Any]:
    return {"kv_connector_extra_config": values}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (STORE, {"path": "/data"}),
        ("ExampleConnector", {"shared_storage_path": "/data"}),
        ("SharedStorageConnector", {"shared_storage_path": "/data"}),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "fs", "root_dir": "/data"}]}),
    ],
)
def test_connectors_of_vllm_that_keep_files_become_the_store(name: str, values: dict[str, Any]) -> None:
    config = settle(kv_connector=name, **extra(**values))
    assert config.kv_connector == STORE
    assert config.kv_connector_extra_config == {"path": "/data", "max_bytes": DEFAULT_STORE_BYTES}


def test_keys_of_the_store() -> None:
    config = settle(
        kv_connector=STORE,
        engine_id="a",
        kv_port=14579,
        kv_load_failure_policy="recompute",
        **extra(path="/data", max_bytes=1 << 30, io_threads=3, kv_recompute_threshold=64, load_bias=2.0),
    )
    assert (config.min_load_tokens, config.load_bias, config.max_pinned_share) == (64, 2.0, 0.05)
    assert config.kv_connector_extra_config == {"path": "/data", "max_bytes": 1 << 30, "io_threads": 3}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_connectors_are_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector {name} is not there: .*(use|raise|leave|share|name)"):
        settle(kv_connector=name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "names no kv_connector; StoreConnector keeps blocks in a directory"),
        ({"kv_connector": STORE, "kv_role": None} | extra(path="x"), "kv_role None is not one of kv_producer"),
        ({"kv_connector": STORE, "kv_role": "both"} | extra(path="x"), "kv_role 'both' is not one of"),
        ({"kv_conector": STORE}, "unknown key 'kv_conector'; did you mean kv_connector"),
        ({"kv_connector": "StoreConector"} | extra(path="x"), "is not known; did you mean StoreConnector"),
        ({"kv_connector": STORE}, "needs a directory, kv_connector_extra_config's path"),
        ({"kv_connector": STORE} | extra(path=""), "needs a directory"),
        ({"kv_connector": STORE} | extra(path=3), "path must be a string"),
        ({"kv_connector": STORE} | extra(path="x", max_byte=3), "unknown key 'max_byte'; did you mean max_bytes"),
        ({"kv_connector": STORE} | extra(path="x", max_bytes=3), "max_bytes must be in"),
        ({"kv_connector": STORE, "kv_port": 70000} | extra(path="x"), "kv_port must be in"),
        ({"kv_connector": STORE, "kv_load_failure_policy": "fail"} | extra(path="x"), "are always computed"),
        ({"kv_connector": STORE, "enable_permute_local_kv": True} | extra(path="x"), "blocks have one layout"),
        ({"kv_connector": "Mine", "kv_connector_module_path": ""}, "kv_connector_module_path is empty"),
        (
            {"kv_connector": "Mine", "kv_connector_module_path": "a.b", "kv_load_failure_policy": "retry"},
            "'retry' is not one of recompute, fail",
        ),
        ({"kv_connector": "ExampleConnector"}, "needs a directory, kv_connector_extra_config's shared_storage_path"),
        ({"kv_connector": "OffloadingConnector"} | extra(cpu_bytes_to_use=1), "raise --kv-cache-memory-bytes"),
        ({"kv_connector": "OffloadingConnector"} | extra(secondary_tiers=[3]), "one secondary tier of type fs"),
        *[
            ({"kv_connector": name, "kv_connector_extra_config": ["x"]}, "kv_connector_extra_config must be an object")
            for name in (STORE, PEERS, "MultiConnector", "Mine")
        ],
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(**values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {
                "kv_transfer_config": {"kv_connector": STORE, "kv_role": "kv_both"}
                | {"kv_connector_extra_config": {"path": "x"}}
            },
            "both name a store; leave one out .*PeerConnector",
        ),
        ({"kv_store": ""}, "--kv-store is empty"),
        ({"kv_store_size": 5}, "--kv-store-size 5 is below the minimum of 268435456"),
        ({"enable_prefix_caching": False}, "--kv-store with --no-enable-prefix-caching: .* enable prefix caching"),
        ({"device": "cuda"}, "only blocks in main memory can be stored yet"),
    ],
)
def test_combinations_that_cannot_work_are_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs("demo", **{"kv_store": str(tmp_path), **flags}).create_engine_config()


@pytest.mark.parametrize("connector", [{"kv_connector": STORE}, {"kv_connector": "M", "kv_connector_module_path": "a"}])
def test_flags_of_a_store_are_not_left_out_in_silence(connector: dict[str, Any]) -> None:
    """Refuses a flag that would not count: what is to be kept off would be stored, or a bound be another."""
    transfer = {"kv_role": "kv_both", **connector, **extra(path="x")}
    for name, value in (("kv_store_skip_salted", True), ("kv_store_size", "1G")):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"{flag} counts for --kv-store DIR only"):
            EngineArgs("demo", kv_transfer_config=transfer, **{name: value}).create_engine_config()


@pytest.mark.parametrize("flags", [{"kv_store_size": "1G"}, {"kv_store_skip_salted": True}])
def test_flags_of_a_store_without_one_are_refused(flags: dict[str, Any]) -> None:
    (flag,) = ("--" + name.replace("_", "-") for name in flags)
    with pytest.raises(ConfigError, match=f"{flag}: there is no store .*; add --kv-store DIR"):
        EngineArgs("demo", **flags).create_engine_config()
    remote = {"kv_store_remote": "tcp://127.0.0.1:14579"}
    assert EngineArgs("demo", **flags, **remote).create_engine_config().kv_transfer_config.kv_connector == PEERS


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}


def test_a_store_and_peers_in_one_engine(tmp_path: Path) -> None:
    peers = {**NIXL, "engine_id": "e"} | extra(kv_recompute_threshold=64)
    flags = EngineArgs("demo", kv_store=str(tmp_path), kv_transfer_config=peers).create_engine_config()
    assert decode_config(encode_config(flags)).kv_transfer_config == flags.kv_transfer_config
    joint = flags.kv_transfer_config
    assert (joint.connector, joint.kv_role, joint.min_load_tokens) == (CONNECTORS[BOTH], "kv_consumer", 64)
    assert [part.kv_connector for part in joint.parts] == [STORE, PEERS]
    assert [part.kv_role for part in joint.parts] == ["kv_both", "kv_consumer"]
    assert joint.parts[0].kv_connector_extra_config["path"] == str(tmp_path)
    connectors = [peers, {"kv_connector": STORE} | extra(path=str(tmp_path), max_pinned_share=0.1)]
    multi = settle(kv_connector="MultiConnector", **extra(connectors=connectors))
    assert (multi.kv_connector, multi.max_pinned_share) == (BOTH, 0.1)
    assert multi.parts[1].kv_connector_extra_config == joint.parts[1].kv_connector_extra_config


@pytest.mark.parametrize(
    "connectors", [[NIXL], [NIXL, NIXL], [NIXL, {"kv_connector": "M", "kv_connector_module_path": "a"}]]
)
def test_other_combinations_of_quires_own_connectors_are_refused(connectors: list[Any]) -> None:
    with pytest.raises(ConfigError, match="its connectors can be one store and one of PeerConnector"):
        settle(kv_connector="MultiConnector", **extra(connectors=connectors))


def test_a_connector_of_a_module() -> None:
    settled = settle(kv_connector="Mine", kv_connector_module_path="a.b", kv_role="kv_producer", **extra(path=3))
    assert settled.connector == CONNECTORS[FOREIGN]
    keys = dict(settled.kv_connector_extra_config)
    other = settle(kv_connector="Mine", kv_connector_module_path="a.b")
    assert keys.pop("engine_id") != other.kv_connector_extra_config["engine_id"]
    assert keys == {
        "module": "a.b",
        "kv_connector": "Mine",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": 3},
    }
    assert (settled.min_load_tokens, settled.load_timeout_s) == (1, 30.0)


REMOTE = "tcp://10.0.0.7:14579"


def test_the_server_of_another_machines_store(tmp_path: Path) -> None:
    """Alone, beside a store, beside peers, and both; by the flag, and as a key of the store."""
    alone = EngineArgs("demo", kv_store_remote=REMOTE).create_engine_config().kv_transfer_config
    assert (alone.kv_connector, alone.kv_role) == (PEERS, "kv_consumer")
    assert (alone.kv_connector_extra_config["tiers"], alone.kv_connector_extra_config["peers"]) == ([REMOTE], [])
    keys = alone.kv_connector_extra_config
    assert (keys["saves"], keys["skip_salted"]) == (True, False), "blocks are stored there if it takes them"
    flags = {"kv_store_remote": REMOTE, "kv_store_skip_salted": True}
    assert (
        EngineArgs("demo", **flags).create_engine_config().kv_transfer_config.kv_connector_extra_config["skip_salted"]
    )
    store = {"kv_store": str(tmp_path)}
    config = EngineArgs("demo", **store, kv_store_remote="ipc:///run/kv").create_engine_config()
    assert decode_config(encode_config(config)).kv_transfer_config == config.kv_transfer_config
    both = config.kv_transfer_config
    assert (both.kv_connector, [part.kv_role for part in both.parts]) == (BOTH, ["kv_both", "kv_consumer"])
    assert both.parts[1].kv_connector_extra_config["tiers"] == ["ipc:///run/kv"]
    assert {part.kv_connector_extra_config["path"] for part in both.parts} == {str(tmp_path)}
    own = {"load_bias": 2.0, "max_pinned_share": 0.1, "audit_share": 0.5}
    given = settle(kv_connector=STORE, **extra(path="x", tiers=[REMOTE], **own))
    assert (given.kv_connector, {name: getattr(given, name) for name in own}) == (BOTH, own)
    assert given.parts[0].audit_share == 0.5
    assert given.parts[1].kv_connector_extra_config["saves"]
    published = settle(kv_connector=STORE, **extra(path="x", tiers=[REMOTE], publish_store=True))
    assert all(part.kv_connector_extra_config["publish_store"] for part in published.parts)
    assert "publish_store" not in given.parts[1].kv_connector_extra_config
    only_reads = settle(kv_connector=STORE, kv_role="kv_consumer", **extra(path="x", tiers=[REMOTE]))
    assert not only_reads.parts[1].kv_connector_extra_config["saves"]
    peers = {**NIXL, **extra(tiers=["tcp://a:1"])}
    for flags in ({}, store):
        args = EngineArgs("demo", kv_store_remote=REMOTE, kv_transfer_config=peers, **flags)
        settled = args.create_engine_config().kv_transfer_config
        part = settled.parts[1] if flags else settled
        assert part.kv_connector_extra_config["tiers"] == ["tcp://a:1", REMOTE]
        assert part.kv_connector_extra_config["peers"] == ["127.0.0.0/8", "::1/128"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_store": REMOTE}, "is no directory; --kv-store-remote reads from a server at an address"),
        ({"kv_store_remote": "10.0.0.7:14579"}, "is no address of a block server; give tcp://HOST:PORT or ipc:///PATH"),
        ({"kv_store_remote": "tcp://10.0.0.7"}, "is no address"),
        ({"kv_store_remote": "tcp://10.0.0.7:0"}, "is no address"),
        ({"kv_store_remote": "ipc://kv"}, "is no address"),
        (
            {"kv_transfer_config": NIXL | {"kv_role": "kv_producer"}, "kv_store_remote": REMOTE},
            f"kv_role kv_producer loads nothing, and the block server {REMOTE} is read",
        ),
        (
            {
                "kv_transfer_config": {"kv_connector": "M", "kv_connector_module_path": "a", "kv_role": "kv_both"},
                "kv_store_remote": REMOTE,
            },
            "--kv-store-remote: kv_connector ForeignConnector has its own sources",
        ),
        (
            {"kv_transfer_config": NIXL | {"kv_connector": STORE} | extra(path="x", audit_share=2)},
            "audit_share must be in",
        ),
        ({"kv_transfer_config": NIXL | extra(tiers=["b"])}, "'b' is no address of a block server"),
        ({"kv_transfer_config": NIXL | {"kv_connector": STORE} | extra(path="x", tiers=3)}, "tiers must be a list"),
    ],
)
def test_servers_that_cannot_be_read_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs("demo", **flags).create_engine_config()
