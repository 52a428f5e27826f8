"""State that the endpoints of a server share: the engine, the names of its model, whether it takes requests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

from quire.config.model import ModelConfig
from quire.config.server import ServerConfig
from quire.errors import NotFoundError, ValidationError
from quire.frontend.adapters import AdapterRegistry, ServedAdapter
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.auth import Gatekeeper, Tenants
from quire.frontend.http.engine_view import RequestWatch, SnapshotSource
from quire.frontend.http.membership import Membership
from quire.frontend.metrics.publish.stat_loggers import RecentRequests
from quire.frontend.metrics.server_metrics import ServerMetrics
from quire.version import __version__
from quire.wire.peers import SharedCount

Part = TypeVar("Part")
MAX_SHOWN_ADAPTERS = 20
"""Number of adapters that the refusal of an unknown name lists."""


class Lifecycle:
    """Stage of a server between its start and its end, and the number of requests under way."""

    def __init__(self, shared: SharedCount | None = None) -> None:
        """`shared` is the count of all processes of the server."""
        self.is_draining = False
        """True once the server shuts down: /health/ready answers 503."""
        self.refuses_requests = False
        """True once new work is refused. Running requests go on."""
        self.is_stopping = False
        """True once running requests are being ended."""
        self.num_in_flight = 0
        """Number of requests that are not answered to the end. Probes do not count."""
        self._shared = shared
        self._idle = asyncio.Event()
        self._idle.set()

    def begin_request(self) -> None:
        """Counts a request that begins."""
        self.num_in_flight += 1
        self._idle.clear()
        if self._shared is not None:
            self._shared.put(self.num_in_flight)

    def end_request(self) -> None:
        """Counts a request that is answered, or whose client has disconnected."""
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self._idle.set()
        if self._shared is not None:
            self._shared.put(self.num_in_flight)

    @property
    def server_load(self) -> int:
        """Number of requests under way in all processes of the server."""
        return self.num_in_flight + (0 if self._shared is None else self._shared.others())

    async def wait_idle(self) -> None:
        """Waits until no request is under way."""
        await self._idle.wait()


class ServerState:
    """The state of one server process around a running engine: `app.state.server`."""

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServerConfig,
        *,
        key_digests: Sequence[bytes] = (),
        stall_s: float = 60.0,
        recent: RecentRequests | None = None,
        member: Membership | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.member = member = Membership() if member is None else member
        self.metrics = metrics if metrics is not None else ServerMetrics(engine.pipeline.stats)
        """Metrics of this process or of the whole server."""
        self.snapshots = SnapshotSource(engine)
        self.watch = RequestWatch(engine, RecentRequests() if recent is None else recent, member.peers)
        self.stall_s = stall_s
        """Longest time a stream waits for its reader (--slow-client-timeout-s); 0: unlimited."""
        self.gatekeeper = Gatekeeper(key_digests, protect_metrics=config.protect_metrics, admin_host=config.admin_host)
        self.tenants = Tenants(config.max_requests_per_key, config.max_tokens_per_key, member.rooms_of_keys)
        self.lifecycle = Lifecycle(member.in_flight)
        self.model_names = engine.model_config.names
        self.max_model_len = engine.pipeline.input_processor.max_model_len
        """Maximum number of tokens of prompt and output together."""
        self.fingerprint = _fingerprint(config, engine.model_config)
        self.supported_tasks = tuple(engine.engine_core.ready_response.supported_tasks)
        quiet = config.disable_access_log_for_endpoints or ""
        self.quiet_paths = frozenset(path.strip() for path in quiet.split(",") if path.strip())
        """Paths whose requests are not logged."""
        self._parts: dict[type, Any] = {}

    def add_part(self, part: object) -> None:
        """Adds an object that the routes share. There is one of each class."""
        self._parts[type(part)] = part

    def part(self, kind: type[Part]) -> Part:
        """Returns the object of class `kind` that the routes share."""
        found: Part = self._parts[kind]
        return found

    @property
    def model_name(self) -> str:
        """Name of the model in answers to requests that give none."""
        return self.model_names[0]

    async def find_model(self, name: str | None) -> tuple[str, ServedAdapter | None]:
        """Returns the model's name for the answer, and the adapter where it is one's. Raises NotFoundError for a name
        that is not served, and ClientError for an adapter that cannot be used."""
        if name is None or name == "":
            return self.model_name, None
        if name in self.model_names:
            return name, None
        registry = self.part(AdapterRegistry)
        adapter = await registry.find(name)
        if adapter is None:
            known = [*self.model_names, *(known for known, _ in registry.list()[:MAX_SHOWN_ADAPTERS])]
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; there is {', '.join(known)} "
                "(--served-model-name gives it other names)",
                param="model",
            )
        return name, adapter

    def check_num_outputs(self, num_outputs: int) -> None:
        """Raises ValidationError for more outputs than one request may have."""
        limit = self.config.max_prompts_per_request
        if num_outputs > limit:
            raise ValidationError(
                f"the request asks for {num_outputs} outputs (prompts times n); it may have {limit} "
                "(--max-prompts-per-request)",
                param="n",
                value=num_outputs,
            )


def hash_model(model: ModelConfig) -> str:
    """Returns a hash that changes with everything that may change an answer: version, model, type."""
    identity = repr((__version__, model.name, model.revision, model.dtype, model.hf_overrides, model.seed))
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _fingerprint(config: ServerConfig, model: ModelConfig) -> str | None:
    match config.fingerprint_mode:
        case "full":
            return f"quire-{__version__}-{hash_model(model)}"
        case "hash":
            return hash_model(model)
        case "custom":
            return config.fingerprint_value
        case _:
            return None
