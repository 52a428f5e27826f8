"""LoRA adapters in the frontend: the check of a request's adapter, and the names that a server's clients give.

`AdapterDoor` checks an adapter's directory before the engine core gets a request with it. `AdapterTable` gives the
adapters of a server their ids; there is one, in the server's only process or in the parent of several.
`AdapterRegistry` finds the adapter that a client names, in the table or below a --lora-dir: names are looked up, never
joined to a path.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from quire.config.adapter import CONFIG_FILE, AdapterIndex
from quire.config.checkpoint import MAX_TEMPLATE_BYTES, read_object, read_text
from quire.config.engine import EngineConfig
from quire.config.lora import OWN_TEMPLATE, AdapterSpec, LoRAConfig, parse_lora_module, resolve_adapter_dir
from quire.errors import AdapterError, ClientError, ConfigError, NotFoundError, QuireError, ValidationError
from quire.logger import init_logger
from quire.lora_request import MAX_NAME_LEN, LoRARequest

logger = init_logger(__name__)

MIN_SCAN_INTERVAL_S = 1.0
"""Time between two scans of the directories: a client may name what is not there at any rate."""
MAX_SCANNED = 100_000
"""Number of directories that a scan looks into."""
CALL_FAILED = "Call to add_lora method failed: "
"""Beginning of the core's messages, which means nothing to a client of the server."""
MAX_CHECKED = 4096
"""Number of adapters whose check is remembered."""


class AdapterDoor:
    """Checks adapters, and refuses all of them where they are not enabled. Thread-safe."""

    def __init__(
        self,
        config: LoRAConfig,
        check_files: Callable[[Path], object] = lambda directory: None,
        download_dir: str | None = None,
    ) -> None:
        """`check_files` raises ClientError for a directory whose adapter the model cannot have."""
        self.config = config
        self._check_files = check_files
        self._download_dir = download_dir
        self._checked: dict[tuple[str, int, str], LoRARequest] = {}
        """Requests with their directories, by name, id and path as they were given."""

    def require_enabled(self, wish: str) -> None:
        """Raises ValidationError where adapters are not enabled."""
        if not self.config.enable_lora:
            raise ValidationError(
                f"{wish}, and this engine was started without adapters; start it with --enable-lora (enable_lora=True)",
                param="lora_request",
            )

    def knows(self, request: LoRARequest) -> bool:
        """Returns whether `check` would return at once."""
        return not self.config.enable_lora or _key(request) in self._checked

    def check(self, request: LoRARequest) -> LoRARequest:
        """Returns a request with the directory of its adapter. Its files are checked at its first use.

        Raises ValidationError, NotFoundError for a directory that is missing, and what the check of the files raises.
        """
        if not isinstance(request, LoRARequest):
            raise ValidationError(
                f"lora_request must be a LoRARequest, got {type(request).__name__}", param="lora_request"
            )
        self.require_enabled(f"LoRA adapter {request.lora_name!r} was asked for")
        known = self._checked.get(_key(request))
        return self.check_again(request) if known is None else known

    def check_again(self, request: LoRARequest) -> LoRARequest:
        """Returns the same after reading the files, whether or not they were checked before."""
        directory = self.find(request.lora_name, request.lora_path)
        self._check_files(Path(directory))
        checked = msgspec.structs.replace(request, lora_path=directory)
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked[_key(request)] = self._checked[_key(checked)] = checked
        return checked

    def find(self, name: str, path: str) -> str:
        """Returns the directory of an adapter, which is downloaded if `path` is a hub id. Raises ValidationError,
        NotFoundError, and AdapterError for a download that fails."""
        if not path:
            raise ValidationError(f"adapter {name!r} has no path; give the directory of its files", param="lora_path")
        try:
            return str(resolve_adapter_dir(path, self._download_dir))
        except ConfigError as e:
            raise AdapterError(str(e).replace("downloaded checkpoint", "downloaded adapter")) from None


def make_door(config: EngineConfig) -> AdapterDoor:
    """Returns the door of an engine."""
    limits = config.lora_config
    return AdapterDoor(limits, lambda directory: AdapterIndex.read(directory, limits), config.load_config.download_dir)


def _key(request: LoRARequest) -> tuple[str, int, str]:
    return request.lora_name, request.lora_int_id, request.lora_path


class ServedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that clients may name. The processes of a server send it to one another."""

    request: LoRARequest
    chat_template: str | None = None
    """Text of its own template; None: the model's."""

    @property
    def name(self) -> str:
        """The name that clients give."""
        return self.request.lora_name


class AdapterTable:
    """Adapters by name, and their ids, which count from 1. A name and its directory keep their id. Belongs to one event
    loop."""

    def __init__(
        self,
        door: AdapterDoor,
        call_core: Callable[..., Awaitable[Any]],
        model_names: Sequence[str],
        on_change: Callable[[str, ServedAdapter | None], Awaitable[None]] | None = None,
    ) -> None:
        """`call_core` makes control calls; `on_change` is awaited after a name got another adapter, or none."""
        self.adapters: dict[str, ServedAdapter] = {}
        self._door = door
        self._call_core = call_core
        self._model_names = frozenset(model_names)
        self._on_change = on_change
        self._ids: dict[tuple[str, str], int] = {}
        self._turns: dict[str, _Turn] = {}

    async def load(self, spec: AdapterSpec) -> ServedAdapter:
        """Loads an adapter and serves it. Raises ClientError."""
        self._door.require_enabled(f"LoRA adapter {spec.name!r} was to be loaded")
        async with self._turn(spec.name):
            before = self.adapters.get(spec.name)
            if before is not None and not spec.load_inplace:
                raise ClientError(
                    f"adapter {spec.name!r} is loaded already; set load_inplace: true to load it again",
                    param="lora_name",
                )
            adapter = await self._read(spec)
            request = msgspec.structs.replace(adapter.request, load_inplace=spec.load_inplace)
            try:
                await self._call_core("add_lora", request)
            except ClientError as e:
                e.args = (str(e).removeprefix(CALL_FAILED),)
                raise
            await self._put(spec.name, adapter)
            if before is not None and before.request.lora_int_id != request.lora_int_id:
                await self._call_core("remove_lora", before.request.lora_int_id)
        return adapter

    async def adopt(self, name: str, path: str) -> ServedAdapter:
        """Serves an adapter of a --lora-dir, which is loaded when a request needs it. Raises ClientError."""
        async with self._turn(name):
            adapter = self.adapters.get(name)
            if adapter is None:
                adapter = await self._read(AdapterSpec(name, path))
                await self._put(name, adapter)
        return adapter

    async def unload(self, name: str) -> None:
        """Serves an adapter no more. Requests under way end with it. Raises NotFoundError."""
        async with self._turn(name):
            adapter = self.adapters.get(name)
            if adapter is None:
                raise NotFoundError(f"there is no adapter {name[:200]!r}", param="lora_name")
            await self._put(name, None)
            await self._call_core("remove_lora", adapter.request.lora_int_id)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """Lets changes of one name follow each other, so that their order here and in the core is the same."""
        turn = self._turns.setdefault(name, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[name]

    async def _read(self, spec: AdapterSpec) -> ServedAdapter:
        """Returns an adapter with its id, after a check of its files."""
        if spec.name in self._model_names:
            raise ClientError(f"{spec.name!r} is a name of the model; name the adapter otherwise", param="lora_name")
        path = await asyncio.to_thread(self._door.find, spec.name, spec.path)
        request = LoRARequest(
            spec.name,
            self._ids.setdefault((spec.name, path), len(self._ids) + 1),
            path,
            spec.base_model_name,
            is_3d_lora_weight=spec.is_3d_lora_weight,
        )
        await asyncio.to_thread(self._door.check_again, request)
        return ServedAdapter(request, await asyncio.to_thread(read_template, Path(path), spec.chat_template))

    async def _put(self, name: str, adapter: ServedAdapter | None) -> None:
        if adapter is None:
            del self.adapters[name]
        else:
            self.adapters[name] = adapter
        if self._on_change is not None:
            await self._on_change(name, adapter)


class _Turn:
    """A lock, and the number of those that hold it or wait for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_users = 0


def read_template(directory: Path, wish: str | None) -> str | None:
    """Returns the text of the template that `wish` (`AdapterSpec.chat_template`) names. Raises ValidationError."""
    if wish is None:
        return None
    if wish != OWN_TEMPLATE:
        path = Path(wish).expanduser()
        directory, name = path.parent, path.name
    else:
        name = "chat_template.jinja"
    try:
        text = read_text(directory, name, MAX_TEMPLATE_BYTES)
        if text is None and wish == OWN_TEMPLATE:
            text = (read_object(directory, "tokenizer_config.json") or {}).get("chat_template")
    except ConfigError as e:
        raise ValidationError(f"chat_template: {e}", param="chat_template") from None
    if not isinstance(text, str):
        raise ValidationError(
            f"chat_template is {wish!r}, and there is none; put a chat_template.jinja beside the adapter, or name a "
            "file",
            param="chat_template",
        )
    return text


class RemoteTable:
    """The table of a server's parent, with a copy of its adapters that the parent keeps up to date."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        """`call` passes an operation to the parent, and returns the answer of `answer_peer`."""
        self.adapters: dict[str, ServedAdapter] = {}
        self._call = call

    async def load(self, spec: AdapterSpec) -> ServedAdapter:
        return await self._ask("load", msgspec.to_builtins(spec))

    async def adopt(self, name: str, path: str) -> ServedAdapter:
        return await self._ask("adopt", name, path)

    async def unload(self, name: str) -> None:
        await self._call("unload", name)

    async def refresh(self) -> None:
        """Gets all adapters from the parent."""
        found = await self._call("list")
        self.adapters = {adapter.name: adapter for adapter in msgspec.convert(found, list[ServedAdapter])}

    def note(self, name: str, adapter: Any) -> None:
        """Takes in that a name has another adapter, or none."""
        if adapter is None:
            self.adapters.pop(name, None)
        else:
            self.adapters[name] = msgspec.convert(adapter, ServedAdapter)

    async def _ask(self, *args: Any) -> ServedAdapter:
        return msgspec.convert(await self._call(*args), ServedAdapter)


AdapterNames = AdapterTable | RemoteTable


async def answer_peer(table: AdapterTable, operation: str, *args: Any) -> Any:
    """Returns the answer of the parent to a call of `RemoteTable`. Raises ClientError."""
    match operation, args:
        case "load", (spec,):
            return await table.load(msgspec.convert(spec, AdapterSpec))
        case "adopt", (str() as name, str() as path):
            return await table.adopt(name, path)
        case "unload", (str() as name,):
            return await table.unload(name)
        case "list", ():
            return list(table.adapters.values())
        case _:
            raise ClientError(f"there is no call {operation!r} of adapters")


class AdapterDirs:
    """The adapters below directories, by relative path. Belongs to one event loop."""

    def __init__(self, directories: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.directories = tuple(directories)
        self.paths: Mapping[str, str] = scan(self.directories)
        """Directories by name, as of the last scan."""
        self._clock = clock
        self._scanned_at = clock()
        self._scan: asyncio.Task[Mapping[str, str]] | None = None

    async def find(self, name: str) -> str | None:
        """Returns the directory of an adapter; None if there is none. Scans again, if the last scan is old enough."""
        if name in self.paths or not self.directories:
            return self.paths.get(name)
        if self._scan is None and self._clock() - self._scanned_at >= MIN_SCAN_INTERVAL_S:
            self._scan = asyncio.create_task(asyncio.to_thread(scan, self.directories))
        if self._scan is not None:
            self.paths = await asyncio.shield(self._scan)
            self._scan, self._scanned_at = None, self._clock()
        return self.paths.get(name)

    def holds(self, path: str) -> bool:
        """Returns whether a path, links resolved, lies in one of the directories."""
        target = Path(os.path.realpath(Path(path).expanduser()))
        return any(target != Path(root) and target.is_relative_to(root) for root in self.directories)


def scan(directories: Sequence[str]) -> dict[str, str]:
    """Returns the directories that hold an adapter's configuration, by their paths below `directories`. The first of
    several with one name counts. Links are followed to a directory, and not on from there."""
    found: dict[str, str] = {}
    num_left = MAX_SCANNED
    for root in directories:
        for place, names, files in os.walk(root):
            num_left -= len(names)
            relative = os.path.relpath(place, root)
            if place != root and CONFIG_FILE in files and len(relative) <= MAX_NAME_LEN:
                found.setdefault(relative, place)
                names.clear()  # an adapter's directory holds no others
            for name in names:
                linked = os.path.join(place, name)
                if os.path.islink(linked) and os.path.isfile(os.path.join(linked, CONFIG_FILE)):
                    found.setdefault(os.path.relpath(linked, root), linked)
            if num_left < 0:
                logger.warning("--lora-dir: only the first %d directories were looked into", MAX_SCANNED)
                return found
    return found


class AdapterRegistry:
    """The adapters that clients of one server process may name."""

    def __init__(self, names: AdapterNames, config: LoRAConfig) -> None:
        self.names = names
        self.dirs = AdapterDirs(config.lora_dir if config.enable_lora else ())

    async def find(self, name: str) -> ServedAdapter | None:
        """Returns the adapter of a name; None if there is none. Raises ClientError for one that cannot be used."""
        adapter = self.names.adapters.get(name)
        if adapter is None:
            path = await self.dirs.find(name)
            if path is None:
                return None
            try:
                adapter = await self.names.adopt(name, path)
            except ClientError as e:
                e.args = (str(e).replace(path, name),)  # no path leaves the server
                raise
        return adapter

    def list(self) -> list[tuple[str, str | None]]:
        """Returns the name of each adapter, and of the model that it adapts where that is given."""
        served = [(adapter.name, adapter.request.base_model_name) for adapter in self.names.adapters.values()]
        return served + [(name, None) for name in sorted(self.dirs.paths) if name not in self.names.adapters]


async def load_modules(names: AdapterNames, modules: Sequence[str]) -> None:
    """Loads the adapters of --lora-modules. Raises ConfigError, or the error of the first that cannot be served."""
    for spec in map(parse_lora_module, modules):
        try:
            await names.load(spec)
        except QuireError as e:
            e.args = (f"--lora-modules {spec.name}: {e}",)
            raise
        logger.info("serving adapter %s", spec.name)
