"""The configuration of KV transfer, and the table of connectors.

A store is asked for by --kv-store, or as vLLM's connectors are: by --kv-transfer-config. `settle` makes one connector
and its keys of either.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire import envs
from quire.config.flags import bounds_by_name, check_keys, flag, parse_human_int, parse_json_object
from quire.errors import ConfigError, nearest
from quire.field_bounds import FieldBound

FLAG = "--kv-transfer-config"
STORE, PEERS = "StoreConnector", "PeerConnector"
BOTH = "StoreConnector and PeerConnector"
"""A store and peers in one engine; the name is not one to be given."""
PARTS = ("store", "peers")
"""Names of the two in messages, in the order of `KVTransferConfig.parts`."""
PART = "part"
"""Key of messages that have the name of one of them."""
FOREIGN = "ForeignConnector"
"""Connectors that are written for vLLM's interface; the name is not one to be given."""
FOREIGN_TIMEOUT_S = 30.0
"""Seconds that a load of theirs may take: they report no progress."""
POLICIES = ("recompute", "fail")
MIN_STORE_BYTES = 256 << 20
DEFAULT_STORE_BYTES = 50 << 30


class ConnectorSpec(NamedTuple):
    """A row of `CONNECTORS`. Each half is named as "package.module:Class"."""

    scheduler: str
    """A `engine/kv_cache/connector.py: KVConnectorScheduler`; called with the EngineConfig and the KVCacheConfig."""
    worker: str
    """A `worker/kv_transfer/worker.py: KVConnectorWorker`; called with the EngineConfig and the worker's rank."""


CONNECTORS: dict[str, ConnectorSpec] = {
    STORE: ConnectorSpec(
        "quire.engine.kv_cache.store_scheduler:StoreScheduler", "quire.worker.kv_transfer.store_worker:StoreWorker"
    ),
    PEERS: ConnectorSpec(
        "quire.engine.kv_cache.peer_scheduler:PeerScheduler", "quire.worker.kv_transfer.peer_worker:PeerWorker"
    ),
    BOTH: ConnectorSpec(
        "quire.engine.kv_cache.store_and_peers:StoreAndPeersScheduler",
        "quire.worker.kv_transfer.store_and_peers:StoreAndPeersWorker",
    ),
    FOREIGN: ConnectorSpec(
        "quire.engine.kv_cache.foreign:ForeignScheduler", "quire.worker.kv_transfer.compat:CompatWorker"
    ),
}
"""Connectors by the name in `KVTransferConfig.kv_connector`."""

_USE_STORE = "use --kv-store DIR: a directory on a disk, in memory (/dev/shm) or shared by hosts"
_USE_PEERS = "use PeerConnector (NixlConnector): an engine that decodes takes blocks from one that prefills"
SHIPPED = dict.fromkeys(("MultiConnector", "DecodeBenchConnector"), "quire.kv_store.shipped")
"""Connectors that come with Quire and are called as foreign ones are, and their modules."""
ELSEWHERE: dict[str, str] = {
    "SimpleCPUOffloadConnector": "main memory is where the KV cache is: raise --kv-cache-memory-bytes",
    **dict.fromkeys(("LMCacheConnectorV1", "LMCacheMPConnector", "FlexKVConnectorV1"), _USE_STORE),
    **dict.fromkeys(("HF3FSKVConnector", "MooncakeStoreConnector", "HiSparseConnector"), _USE_STORE),
    **dict.fromkeys(("NixlPushConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"), _USE_PEERS),
    "ExampleHiddenStatesConnector": "it serves vLLM's own tests; leave it out",
}
"""vLLM's connectors that Quire does not have, and what to use."""

_BOUNDS = bounds_by_name(
    FieldBound("kv_connector", "str"),
    FieldBound("engine_id", "str"),
    FieldBound("kv_buffer_device", "str"),
    FieldBound("kv_role", "str"),
    FieldBound("kv_port", "int", 0, 65535),
    FieldBound("kv_connector_extra_config", "object"),
    FieldBound("kv_connector_module_path", "str"),
    FieldBound("enable_permute_local_kv", "bool"),
    FieldBound("kv_load_failure_policy", "str"),
)
ROLES = ("kv_producer", "kv_consumer", "kv_both")
_RECORD_BOUNDS = bounds_by_name(
    FieldBound("path", "str"),
    FieldBound("tiers", "list[str]", max_len=16, max_item_len=256),
    FieldBound("codec", "int", 0, 1),
    FieldBound("publish_store", "bool"),
    FieldBound("audit_share", "float", 0.0, 1.0),
    FieldBound("min_load_tokens", "int", 1, 1 << 30),
    FieldBound("kv_recompute_threshold", "int", 1, 1 << 30),
    FieldBound("load_bias", "float", 0.0, 1e9),
    FieldBound("io_threads", "int", 1, 64),
)
"""The keys of kv_connector_extra_config that `STORE` and `PEERS` both have, and those of one of them."""
_STORE_BOUNDS = _RECORD_BOUNDS | bounds_by_name(
    FieldBound("max_bytes", "int", MIN_STORE_BYTES, 1 << 60),
    FieldBound("skip_salted", "bool"),
    FieldBound("max_write_bytes_per_s", "int", 1, 1 << 40),
    FieldBound("max_pinned_share", "float", 0.0, 0.9),
)
_PEER_NAMES = (PEERS, "NixlConnector", "NixlPullConnector")
_PEER_BOUNDS = _RECORD_BOUNDS | bounds_by_name(
    FieldBound("listen", "str"),
    FieldBound("peers", "list[str]", max_len=1024, max_item_len=256),
    FieldBound("kv_lease_duration", "float", 0.1, 3600.0),
)


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """Where blocks of the KV cache are stored outside the engine."""

    kv_store: str | None = flag(
        None,
        "Keep KV blocks in this directory, as private as the prompts: restarts and other servers of the model find "
        "them (docs/kv_store.md).",
        metavar="DIR",
    )
    kv_store_size: int = flag(
        DEFAULT_STORE_BYTES,
        "Most bytes that --kv-store may take (50G); what was used longest ago goes first.",
        parse=parse_human_int,
        minimum=MIN_STORE_BYTES,
    )
    kv_store_skip_salted: bool = flag(False, "Keep blocks of requests with a cache_salt out of --kv-store.")
    kv_store_compress: bool = flag(
        False,
        "Compress stored KV blocks, without loss, to about 70%: for a store that is slower than 500 MB/s "
        "(needs quire[zstd]).",
    )
    kv_store_remote: str | None = flag(
        None,
        "Read KV blocks from the server of another machine's store, too, and store those of this one there if it takes "
        "any: `quire kv-store serve` (docs/kv_store.md).",
        metavar="ADDRESS",
    )
    transfer: dict[str, Any] | None = flag(
        None,
        "JSON object: a store (docs/kv_store.md) or peers (docs/disaggregation.md), as vLLM configures its connectors.",
        name="kv_transfer_config",
        parse=parse_json_object,
        metavar="JSON",
    )
    kv_connector: str | None = None
    """A name of `CONNECTORS`; None: nothing is stored, nothing loaded."""
    kv_role: str = "kv_both"
    """kv_producer: blocks are saved only; kv_consumer: loaded only."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """The connector's own keys."""
    parts: tuple[KVTransferConfig, ...] = ()
    """Configurations of the store and of the peers, for `BOTH`."""
    min_load_tokens: int = 32
    """Fewer tokens are computed, not loaded."""
    load_bias: float = 1.0
    """A load may be predicted to take so many times as long as computing."""
    max_pinned_share: float = 0.05
    """Largest share of the blocks that may wait to be saved."""
    audit_share: float = 0.0
    """Share of the loads that are computed instead, and compared."""
    load_timeout_s: float = 2.0
    """A load without progress for so many seconds is given up."""

    def __post_init__(self) -> None:
        name = self.kv_connector
        if name is not None and name not in CONNECTORS:
            hint = nearest(name, CONNECTORS, f"there are {', '.join(CONNECTORS) or 'none'}")
            raise ConfigError(f"kv_connector {name!r} is not known; {hint}")

    @property
    def connector(self) -> ConnectorSpec | None:
        """The row of the connector; None: there is none."""
        return None if self.kv_connector is None else CONNECTORS[self.kv_connector]

    def settle(self) -> KVTransferConfig:
        """Returns the configuration with the connector that the flags ask for. Raises ConfigError."""
        settled = self._settle_local()
        if self.kv_store_remote is not None:
            settled = settled.with_tiers([self.kv_store_remote])
        settled._check_compression()
        if settled.kv_connector is None:
            self._check_short_flags(settled)
        return settled

    def _check_compression(self) -> None:
        """Raises ConfigError if blocks are to be compressed and cannot be."""
        if not any(part.kv_store_compress for part in (self, *self.parts)):
            return
        if self.kv_connector in (None, FOREIGN):
            raise ConfigError("--kv-store-compress: there is no store whose blocks it could compress; add --kv-store")
        if importlib.util.find_spec("zstandard") is None:
            raise ConfigError(
                "--kv-store-compress (codec 1) needs zstandard, which is not installed; pip install 'quire[zstd]'"
            )

    def _settle_local(self) -> KVTransferConfig:
        if self.transfer:
            given = self._settle_json(self.transfer)
            if self.kv_store is None:
                self._check_short_flags(given)
                return given
            if given.kv_connector != PEERS:
                raise ConfigError(
                    f"--kv-store and {FLAG} both name a store; leave one out (beside --kv-store there may be "
                    f"{', '.join(_PEER_NAMES)})"
                )
            return self._join(self._settle_store(), given)
        return self if self.kv_store is None else self._settle_store()

    def _check_short_flags(self, given: KVTransferConfig) -> None:
        """Raises ConfigError for a flag of --kv-store that would not count for a connector, or for none."""
        if given.kv_connector == PEERS:
            return
        for name, key, is_given in (
            ("--kv-store-size", "max_bytes", self.kv_store_size != DEFAULT_STORE_BYTES),
            ("--kv-store-skip-salted", "skip_salted", self.kv_store_skip_salted),
        ):
            if is_given and given.kv_connector is None:
                raise ConfigError(f"{name}: there is no store that it could count for; add --kv-store DIR")
            if is_given:
                raise ConfigError(
                    f"{name} counts for --kv-store DIR only, and {FLAG} names another connector; name the directory "
                    f"by --kv-store, or give {STORE}'s {key} in kv_connector_extra_config"
                )

    def with_tiers(self, tiers: list[str]) -> KVTransferConfig:
        """Returns a settled configuration that reads from block servers, too. Raises ConfigError."""
        for address in tiers:
            _check_tier(address)
        if self.kv_role == "kv_producer":
            raise ConfigError(f"{FLAG}: kv_role kv_producer loads nothing, and the block server {tiers[0]} is read")
        if self.kv_connector is None or self.kv_connector == STORE:
            store = self.kv_connector_extra_config
            path = {"path": store["path"]} if "path" in store else {}  # weights are hashed once
            skips_salted = store.get("skip_salted", self.kv_store_skip_salted)
            publishes = {"publish_store": True} if store.get("publish_store") else {}
            given = {"peers": [], "tiers": tiers, **path, **publishes}
            keys = _peer_keys(given, None, 0, saves=self.kv_role == "kv_both", skips_salted=skips_salted)
            tuned = {"min_load_tokens": self.min_load_tokens, "load_bias": self.load_bias}
            engine = dataclasses.replace(self._with_connector(PEERS, keys | tuned), kv_role="kv_consumer")
            return engine if self.kv_connector is None else self._join(self, engine)
        if self.kv_connector == BOTH:
            return dataclasses.replace(self, parts=(self.parts[0], self.parts[1].with_tiers(tiers)))
        if self.kv_connector != PEERS:
            raise ConfigError(f"--kv-store-remote: kv_connector {self.kv_connector} has its own sources; leave one out")
        extra = self.kv_connector_extra_config
        return dataclasses.replace(self, kv_connector_extra_config={**extra, "tiers": [*extra["tiers"], *tiers]})

    def _settle_store(self) -> KVTransferConfig:
        if not self.kv_store:
            raise ConfigError("--kv-store is empty; name a directory")
        if self.kv_store.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"--kv-store {self.kv_store} is no directory; --kv-store-remote reads from a server at an address"
            )
        return self._with_store(
            {"path": self.kv_store, "max_bytes": self.kv_store_size, "skip_salted": self.kv_store_skip_salted}
        )

    def _join(self, store: KVTransferConfig, peers: KVTransferConfig) -> KVTransferConfig:
        """Returns the configuration of a store and peers in one engine: loads are chosen by what the peers give."""
        return dataclasses.replace(
            self,
            kv_connector=BOTH,
            kv_role=peers.kv_role,
            parts=(store, peers),
            min_load_tokens=peers.min_load_tokens,
            load_bias=peers.load_bias,
            max_pinned_share=store.max_pinned_share,
            audit_share=store.audit_share or peers.audit_share,
        )

    def _settle_json(self, values: Mapping[str, Any]) -> KVTransferConfig:
        given = {key: value for key, value in values.items() if value is not None}
        check_keys(given, _BOUNDS, FLAG)
        name, role = given.get("kv_connector"), given.get("kv_role")
        given_extra = given.get("kv_connector_extra_config", {})
        if not isinstance(given_extra, Mapping):
            raise ConfigError(f"{FLAG}: kv_connector_extra_config must be an object, got {str(given_extra)[:80]!r}")
        if name is None:
            raise ConfigError(
                f"{FLAG} names no kv_connector; {STORE} keeps blocks in a directory, {PEERS} takes them from others"
            )
        if role not in ROLES:
            raise ConfigError(f"{FLAG}: kv_role {role!r} is not one of {', '.join(ROLES)}")
        if given.get("enable_permute_local_kv"):
            raise ConfigError(f"{FLAG}: enable_permute_local_kv: blocks have one layout; leave it out")
        policy = given.get("kv_load_failure_policy", "recompute")
        native = _find_native_parts(given) if name == "MultiConnector" else None
        if native is not None:
            store, peers = (self._settle_json({"kv_role": role, **part}) for part in native)
            return self._join(store, peers)
        if name in SHIPPED:
            given.setdefault("kv_connector_module_path", SHIPPED[name])
        if "kv_connector_module_path" in given:
            return self._with_foreign(given, policy)
        if policy != "recompute":
            raise ConfigError(
                f"{FLAG}: kv_load_failure_policy {policy!r}: tokens that cannot be loaded are always computed; leave "
                "it out, or give recompute"
            )
        if name in _PEER_NAMES:
            keys = _peer_keys(
                given_extra,
                given.get("engine_id"),
                given.get("kv_port", 0),
                saves=role != "kv_consumer",
                skips_salted=self.kv_store_skip_salted,
            )
            return dataclasses.replace(self._with_connector(PEERS, keys), kv_role=role)
        extra = _store_keys(name, given_extra)
        tiers = extra.pop("tiers", [])
        check_keys({"tiers": tiers}, _STORE_BOUNDS, f"{FLAG}: kv_connector_extra_config")
        store = dataclasses.replace(self._with_store(extra), kv_role=role)
        return store.with_tiers(tiers) if tiers else store

    def _with_foreign(self, given: Mapping[str, Any], policy: str) -> KVTransferConfig:
        """Returns the configuration of a connector that is written for vLLM's interface, of a module of the user's."""
        module = given["kv_connector_module_path"]
        if not module:
            raise ConfigError(f"{FLAG}: kv_connector_module_path is empty; name the module of your connector")
        if policy not in POLICIES:
            raise ConfigError(f"{FLAG}: kv_load_failure_policy {policy!r} is not one of {', '.join(POLICIES)}")
        keys = {
            "module": module,
            "kv_connector": given["kv_connector"],
            "kv_role": given["kv_role"],
            "engine_id": given.get("engine_id") or str(uuid.uuid4()),
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": given.get("kv_connector_extra_config", {}),
        }
        return dataclasses.replace(
            self,
            kv_connector=FOREIGN,
            kv_role=given["kv_role"],
            kv_connector_extra_config=keys,
            min_load_tokens=1,
            load_bias=1e9,
            load_timeout_s=FOREIGN_TIMEOUT_S,
        )

    def _with_store(self, extra: Mapping[str, Any]) -> KVTransferConfig:
        keys = {"max_bytes": DEFAULT_STORE_BYTES, **extra}
        check_keys(keys, _STORE_BOUNDS, f"{FLAG}: kv_connector_extra_config")
        if not keys.get("path"):
            raise ConfigError(f"{FLAG}: {STORE} needs a directory, kv_connector_extra_config's path")
        return self._with_connector(STORE, keys)

    def _with_connector(self, name: str, keys: dict[str, Any]) -> KVTransferConfig:
        """Returns the configuration with a connector; keys that all connectors have are taken out of its own."""
        defaults = {
            key: getattr(self, key) for key in ("min_load_tokens", "load_bias", "max_pinned_share", "audit_share")
        }
        if "kv_recompute_threshold" in keys:
            keys["min_load_tokens"] = keys.pop("kv_recompute_threshold")
        tuned = {key: keys.pop(key, value) for key, value in defaults.items()}
        tuned["kv_store_compress"] = keys.pop("codec", int(self.kv_store_compress)) == 1
        return dataclasses.replace(self, kv_connector=name, kv_connector_extra_config=keys, **tuned)


def _store_keys(name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the store's keys for the extra configuration of a connector of vLLM's. Raises ConfigError for one that is
    not there, or that stores blocks elsewhere."""
    if name == STORE:
        return dict(extra)
    if name in ("ExampleConnector", "SharedStorageConnector"):
        path = extra.get("shared_storage_path")
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{FLAG}: {name} needs a directory, kv_connector_extra_config's shared_storage_path")
        return {"path": path}
    if name == "OffloadingConnector":
        return _offloading_keys(extra)
    if name in ELSEWHERE:
        raise ConfigError(f"{FLAG}: kv_connector {name} is not there: {ELSEWHERE[name]}")
    hint = nearest(
        name,
        [STORE, *_PEER_NAMES, "OffloadingConnector", *SHIPPED, *ELSEWHERE],
        f"{STORE} keeps blocks in a directory",
    )
    raise ConfigError(f"{FLAG}: kv_connector {name!r} is not known; {hint}")


def _find_native_parts(given: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Returns the configurations of a store and of peers that a MultiConnector is to be; None: it is of connectors
    written for vLLM's interface. Raises ConfigError for others of Quire's own."""
    connectors = given.get("kv_connector_extra_config", {}).get("connectors")
    if "kv_connector_module_path" in given or not isinstance(connectors, list):
        return None
    own = [
        part
        for part in connectors
        if isinstance(part, Mapping)
        and isinstance(part.get("kv_connector"), str)
        and part["kv_connector"] not in SHIPPED
        and "kv_connector_module_path" not in part
    ]
    if not own:
        return None
    peers = [part for part in own if part["kv_connector"] in _PEER_NAMES]
    stores = [part for part in own if part["kv_connector"] not in _PEER_NAMES]
    if len(connectors) != 2 or len(peers) != 1 or len(stores) != 1:
        raise ConfigError(
            f"{FLAG}: MultiConnector: its connectors can be one store and one of {', '.join(_PEER_NAMES)}, or any "
            "number of connectors that name a kv_connector_module_path"
        )
    return [stores[0], peers[0]]


def _check_tier(address: str) -> None:
    """Raises ConfigError unless this is the address of a block server."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_tcp = address.startswith("tcp://") and bool(host) and port.isdecimal() and 0 < int(port) <= 0xFFFF
    if not is_tcp and not address.startswith("ipc:///"):
        raise ConfigError(
            f"--kv-store-remote (tiers): {address!r} is no address of a block server; give tcp://HOST:PORT or "
            "ipc:///PATH"
        )


def _peer_keys(
    extra: Mapping[str, Any], engine_id: str | None, port: int, *, saves: bool, skips_salted: bool
) -> dict[str, Any]:
    """Returns all keys of `PEERS`. `saves`: a block server that takes blocks is given them. Raises ConfigError."""
    where = f"{FLAG}: kv_connector_extra_config"
    check_keys(extra, _PEER_BOUNDS, where)
    for address in extra.get("tiers", ()):
        _check_tier(address)
    listen = extra.get("listen", f"tcp://127.0.0.1:{port}")
    host = listen.removeprefix("tcp://").rpartition(":")[0]
    if host in ("*", "0.0.0.0", "[::]", "::"):
        raise ConfigError(
            f"{where}: listen {listen} names no host: other engines are sent this address; name one of this machine's"
        )
    root = envs.CACHE_ROOT.get() or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "quire")
    return {
        "path": os.path.join(root, "kv-peers"),
        "peers": ["127.0.0.0/8", "::1/128"],
        "tiers": [],
        "kv_lease_duration": 30.0,
        "io_threads": 2,
        **extra,
        "saves": saves,
        "skip_salted": skips_salted,
        "listen": listen,
        "engine_id": engine_id or str(uuid.uuid4()),
    }


def _offloading_keys(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the store's keys for an OffloadingConnector with one tier of files. Its memory is left out: the engine's
    cache is in the same memory."""
    tiers = extra.get("secondary_tiers")
    tier = tiers[0] if isinstance(tiers, list) and len(tiers) == 1 and isinstance(tiers[0], Mapping) else {}
    if tier.get("type") != "fs" or not isinstance(tier.get("root_dir"), str):
        raise ConfigError(
            f"{FLAG}: OffloadingConnector can have one secondary tier of type fs with a root_dir, which {STORE} takes "
            "over; main memory is where the KV cache is, so for cpu_bytes_to_use raise --kv-cache-memory-bytes"
        )
    return {"path": tier["root_dir"]}
