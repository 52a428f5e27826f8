"""The base of connectors written for vLLM's interface, and what they are given.

    from quire.kv_store.connector import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

    quire serve demo --kv-transfer-config '{"kv_connector": "MyConnector", "kv_connector_module_path": "my_module",
      "kv_role": "kv_both"}'

An engine makes an object of the class for its scheduler and one for each worker, which meet only in the metadata of
`build_connector_meta` and in what the workers' halves report. Where workers are processes of their own, both go there
as `kv_store/objects.py` writes them. `engine/kv_cache/foreign.py` calls the methods of the scheduler's
half, `worker/kv_transfer/compat.py` those of the worker's; docs/recipes/add_a_connector.md has an example, and what
differs from vLLM.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from quire.config.engine import EngineConfig
from quire.errors import ConfigError
from quire.logger import init_logger
from quire.resolve import resolve
from quire.wire.execution import BlockIds, NewRequestData
from quire.wire.kv_cache import KVCacheConfig

logger = init_logger(__name__)

HANDSHAKE = "handshake"
"""Key of a worker's message with its `get_handshake_metadata`."""
MESSAGES = {
    "kv_connector_worker_meta": "build_connector_worker_meta",
    "kv_connector_stats": "get_kv_connector_stats",
    "kv_cache_events": "get_kv_connector_kv_cache_events",
}
"""Fields of `ForeignOutput` with the connector's own objects, and the worker half's methods that give them."""


class KVConnectorRole(Enum):
    """The half that an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024  authors add fields
    """Base of what the scheduler's half sends to the worker's half with a step."""


class ForeignTransferConfig(NamedTuple):
    """`vllm_config.kv_transfer_config`."""

    kv_connector: str
    kv_role: str
    engine_id: str
    kv_connector_extra_config: Mapping[str, Any]
    kv_load_failure_policy: str

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """Returns a key of `kv_connector_extra_config`."""
        return self.kv_connector_extra_config.get(key, default)

    @property
    def is_kv_producer(self) -> bool:
        """True if blocks are to be saved."""
        return self.kv_role != "kv_consumer"

    @property
    def is_kv_consumer(self) -> bool:
        """True if blocks are to be loaded."""
        return self.kv_role != "kv_producer"


class ForeignConfig:
    """`vllm_config`: the engine's configuration with the connector's own. `cache_config.block_size` is settled, and
    `parallel_config.rank` is the worker's: stage * tensor_parallel_size + place in it; 0 in the scheduler."""

    def __init__(
        self, config: EngineConfig, kv_transfer_config: ForeignTransferConfig, block_size: int, rank: int = 0
    ) -> None:
        self.kv_transfer_config = kv_transfer_config
        self.cache_config = dataclasses.replace(config.cache_config, block_size=block_size)
        self.model_config = config.model_config
        self.parallel_config: Any = copy.copy(config.parallel_config)
        object.__setattr__(self.parallel_config, "rank", rank)  # vLLM has it there
        self.scheduler_config, self.device_config = config.scheduler_config, config.device_config

    def replace(self, kv_transfer_config: ForeignTransferConfig) -> ForeignConfig:
        """Returns the same with another connector's configuration."""
        other = copy.copy(self)
        other.kv_transfer_config = kv_transfer_config
        return other


class ForeignBlocks(NamedTuple):
    """Blocks of a request."""

    block_ids: BlockIds

    def get_block_ids(self) -> BlockIds:
        """Returns ids per KV cache group; 0 stands for a block that a window has passed."""
        return self.block_ids


@dataclass
class CachedRequests:
    """The requests of a step that the connector has seen, as parallel lists."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    """Requests that run after a load or a preemption: `new_block_ids` has all their blocks, not only new ones."""
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Step:
    """`scheduler_output`. A request whose blocks are loaded synchronously is new in the step of its load, where it
    computes nothing, and resumed when it runs."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str]


@dataclass
class ForeignOutput:
    """`KVConnectorOutput`: what a step has brought on the workers."""

    finished_sending: set[str] | None = None
    """Requests that all workers have named, or as many as `get_finished_count` says. So it is with the next two."""
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    """Requests of `finished_recving` whose load has failed on some worker."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks that some worker could not load."""
    kv_connector_worker_meta: Any = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None


class TransferResults(NamedTuple):
    """Answer of `get_transfer_results`: ids of requests."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    """Requests of `finished_recving` whose load has failed: none of it is used."""


class LoadContext(NamedTuple):
    """`forward_context` of `start_load_kv`."""

    kv_caches: Mapping[str, Any]
    """The tensors of `register_kv_caches`."""
    attn_metadata: None = None


class KVConnectorBase_V1(ABC):  # noqa: N801  the name that connectors import
    """Base of connectors. Methods that are not overridden do nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata: Any = None

    @property
    def role(self) -> KVConnectorRole:
        """The half that this object is."""
        return self._role

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Returns "NHD" if it reads tokens in blocks: such blocks are those of the torch attention backend. None: the
        bytes of a block are opaque to it."""
        return None

    # -- the scheduler's half ----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Notes that a request was added."""
        return

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens beyond the first `num_computed_tokens` can be loaded, and whether asynchronously.
        None: ask again in a later step. Has no side effects. Only whole blocks are loaded, at most all but the last
        token."""

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes a request's blocks: before the load of `num_external_tokens`, and with 0 when it begins to run."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Returns what the worker's half gets with this step. Forgets what was collected for it."""

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes in what a step has brought on the worker."""
        return

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Notes that a request has ended. True: its blocks stay until `get_finished` names it as sent."""
        return False, None

    def has_pending_push_work(self) -> bool:
        """Returns whether steps are to be made though no request runs."""
        return False

    def get_finished_count(self) -> int | None:
        """Returns how many workers name a request whose blocks were sent or received; None: all. Asked for once."""
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Takes what `get_handshake_metadata` of the workers has returned, by the place of each in its stage."""
        return

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes the same by stage and place. Raises ValueError for several stages unless it is overridden."""
        if any(stage for stage, _ in metadata):
            raise ValueError(
                f"{type(self).__name__} has no set_xfer_handshake_metadata_pp_aware, which several stages "
                "(--pipeline-parallel-size) need"
            )
        self.set_xfer_handshake_metadata({rank: value for (_, rank), value in metadata.items()})

    def reset_cache(self) -> bool | None:
        """Drops what is stored. Returns False if that failed."""
        return None

    # -- the worker's half -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Takes the tensors of the KV cache by layer: [2, num_blocks, ...], keys and values of each block (a latent
        cache: [1, num_blocks, ...]). One of several workers has the layers of its stage, and its heads of them. Called
        again after a sleep."""
        return

    def get_handshake_metadata(self) -> Any:
        """Returns what other engines need to reach this worker, for the scheduler's half; None if nothing. Asked for
        once, after the cache was registered."""
        return None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Finishes reading blocks of preempted requests, which will be overwritten."""
        return

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Sets the metadata of this step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forgets the metadata of this step."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Returns whether a step is being made."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None, "no step is being made"
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins the loads of this step."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits until the synchronous loads of a layer are done."""

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Begins to save a layer. Called after the forward pass, layer by layer; `attn_metadata` is None."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Waits until the blocks of this step may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns the ids of requests whose blocks were sent, and of those whose asynchronous load has ended."""
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns `TransferResults`: the same, and which loads have failed as a whole."""
        return TransferResults(*self.get_finished(finished_req_ids))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns blocks whose load has failed, of the loads that end with this step or a later one."""
        return set()

    def build_connector_worker_meta(self) -> Any:
        """Returns a message for the scheduler's half; None: there is none. Messages of several workers are joined by
        their method `aggregate(other)`; without one, `update_connector_output` is called for each."""
        return None

    def get_kv_connector_stats(self) -> Any:
        """Returns numbers for the scheduler's half, joined as those messages are; None: there are none."""
        return None

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Returns events for the scheduler's half, joined as those messages are; None: there are none."""
        return None

    def shutdown(self) -> None:
        """Releases its resources."""
        return


def make_connector(
    config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, rank: int = 0
) -> KVConnectorBase_V1:
    """Returns a half of the configured connector; `rank` is its worker. Raises ConfigError if its module or class is
    not there, or if it is not one for this model."""
    foreign = config.kv_transfer_config.kv_connector_extra_config
    groups = kv_cache_config.kv_cache_groups
    wanted = ForeignTransferConfig(**{name: foreign[name] for name in ForeignTransferConfig._fields})
    block_size = groups[0].kv_cache_spec.block_size if groups else 1
    name = f"{foreign['module']}:{wanted.kv_connector}"
    try:
        factory = resolve(name)
        connector: KVConnectorBase_V1 = factory(ForeignConfig(config, wanted, block_size, rank), role, kv_cache_config)
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(
            f"kv_connector {name} cannot be made: {type(e).__name__}: {e}; its constructor takes (vllm_config, role, "
            "kv_cache_config)"
        ) from e
    if len(groups) > 1 and not hasattr(connector, "request_finished_all_groups"):
        raise ConfigError(
            f"kv_connector {name}: the model has {len(groups)} groups of KV cache layers, and a connector without "
            "request_finished_all_groups (SupportsHMA) knows one; use --kv-store, or add the method"
        )
    return connector


def ask(connector: object, default: Any, method: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a method of a connector; `default` if it raises an error, which is logged."""
    try:
        return method(*args)
    except Exception:
        logger.exception("%s.%s failed", type(connector).__name__, method.__name__)
        return default


def crosses_processes(config: EngineConfig) -> bool:
    """Returns whether the workers' halves are elsewhere, so that objects go to them as bytes."""
    return config.parallel_config.executor_backend != "uni"


def join_messages(messages: Iterable[Any]) -> list[Any]:
    """Returns the messages of several workers as one, joined by their `aggregate`; those without one stay apart."""
    joined: list[Any] = []
    for message in messages:
        if joined and hasattr(joined[-1], "aggregate"):
            joined[-1] = joined[-1].aggregate(message)
        else:
            joined.append(message)
    return joined
