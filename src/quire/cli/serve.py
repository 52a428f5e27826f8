"""`quire serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import ipaddress
import logging
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from quire import __version__, envs
from quire.cli.command_line import Arguments, CommandLine, ForeignFlags, Positional
from quire.cli.option_groups import engine_args, engine_options, flag_option, vllm_options
from quire.config.engine import EngineConfig
from quire.config.flags import flags_of
from quire.config.lora import parse_lora_module
from quire.config.server import ServerConfig, read_api_keys
from quire.config.vllm_flags import settle_vllm_flags
from quire.errors import ConfigError
from quire.logger import init_logger, use_format
from quire.resolve import resolve
from quire.timeline import hold_garbage

logger = init_logger(__name__)

TRACE_EVENTS = 50_000
"""Events kept for /debug/trace where there are admin routes, unless --trace-events says otherwise."""
_ANYWHERE = re.compile(r"//(0\.0\.0\.0|\[::\])(?=[:/]|$)")
QUEUE_LIMITS = {"max_num_queued_reqs": 16_384, "max_num_queued_tokens": 1 << 25}
"""Default limits of the queue: far above useful waiting times, and within a server's memory."""
PORT_SERVER = "quire.cli.port_server"
"""Module of each server of --data-parallel-multi-port-external-lb."""
_FLAGS = {spec.name: spec for spec in flags_of(ServerConfig)}


def command_line() -> CommandLine:
    options = [*(flag_option(spec) for spec in _FLAGS.values()), *engine_options()]
    names = {option.name for option in options}
    return CommandLine(
        "quire serve",
        "Serve a model over HTTP, with OpenAI's, vLLM's, Anthropic's and Ollama's API. Ctrl-C or SIGTERM ends it.",
        options,
        Positional("model_name", "The model, as in --model. A hub id is fetched first; quire pull lists small ones."),
        "Flags of `vllm serve` that are not listed are accepted, too: docs/compat.md lists their effect.",
        ForeignFlags(partial(vllm_options, names | {"config"}), settle_vllm_flags),
    )


def server_config(args: Arguments) -> ServerConfig:
    """Returns the `ServerConfig` that `args` gives. Raises ConfigError."""
    given = args.given_among(_FLAGS)
    for name, value in given.items():
        if _FLAGS[name].is_list:  # a list per use of the flag
            given[name] = tuple(item for part in value for item in ([part] if isinstance(part, str) else part))
    return ServerConfig(**given)


def run(args: Arguments) -> int:
    """Serves until a signal ends it. Raises ConfigError and ModelLoadError where nothing can be served."""
    start = time.monotonic()
    if not envs.LOGGING_LEVEL.is_set:
        logging.getLogger("quire").setLevel(logging.INFO)
    config = server_config(args)
    if config.log_level is not None:
        logging.getLogger("quire").setLevel(config.log_level)
    if config.log_format is not None:
        use_format(config.log_format)
    keys = read_api_keys(config)
    config = dataclasses.replace(config, api_key=())  # from here on only their digests are kept
    defaults: dict[str, Any] = dict(QUEUE_LIMITS)
    if args["model_name"] is not None:
        defaults["model"] = args["model_name"]
    if config.enable_admin:
        defaults["trace_events"] = TRACE_EVENTS
    if config.lora_modules:
        for module in config.lora_modules:
            parse_lora_module(module)  # an item that is none is reported before anything is loaded
        defaults["enable_lora"] = True
    engine_config = engine_args(args, **defaults).create_engine_config("serving")
    if engine_config.parallel_config.headless:
        if args.given_among(("api_server_count",)).get("api_server_count"):
            raise ConfigError("--headless answers no HTTP: leave --api-server-count out")
        resolve("quire.frontend.supervision.node:serve_node")(engine_config)
        logger.info("quire: ended")
        return 0
    if engine_config.parallel_config.data_parallel_multi_port_external_lb:
        resolve("quire.frontend.fleet.ports:serve_on_ports")(engine_config, config, keys, PORT_SERVER)
        logger.info("quire: ended")
        return 0
    return serve_model(engine_config, config, keys, start)


def serve_model(engine_config: EngineConfig, config: ServerConfig, keys: tuple[bytes, ...], start: float) -> int:
    """Serves by these configurations until a signal ends it. `keys` are digests, `start` is on the monotonic clock."""
    hold_garbage()  # until the server is ready
    try:
        return _serve(engine_config, config, keys, start)
    finally:
        gc.enable()


def _serve(engine_config: EngineConfig, config: ServerConfig, keys: tuple[bytes, ...], start: float) -> int:
    listeners = resolve("quire.frontend.http.server:Listeners").bind(config)
    on_ready = partial(_log_ready, config, engine_config.model_config.names[0], listeners, start)
    if not keys and is_open_to_others(listeners.url):
        logger.warning(
            "anyone who can reach this machine can use the server: it listens on %s and asks for no key; --api-key "
            "sets one, --host 127.0.0.1 keeps the server to this machine",
            listeners.url,
        )
    try:
        logger.info("quire %s: loading %s for %s", __version__, engine_config.model_config.name, listeners.url)
        if config.api_server_count > 1:
            serve_with_processes = resolve("quire.frontend.fleet.parent:serve_with_processes")
            serve_with_processes(engine_config, config, keys, listeners, on_ready)
        else:
            _serve_alone(engine_config, config, keys, listeners, on_ready)
    finally:
        listeners.close()
    logger.info("quire: ended")
    return 0


def _serve_alone(
    engine_config: EngineConfig,
    config: ServerConfig,
    keys: tuple[bytes, ...],
    listeners: Any,
    on_ready: Callable[[], None],
) -> None:
    """Runs the whole frontend in this process."""
    waiting_room = resolve("quire.frontend.http.connection:WaitingRoom")
    model = engine_config.model_config.names[0]
    with waiting_room(listeners.sockets, listeners.tls, config.root_path or "", model):
        engine = resolve("quire.frontend.async_llm:AsyncLLM").from_engine_config(engine_config)
    recent = resolve("quire.frontend.metrics.publish.stat_loggers:RecentRequests")()
    engine.pipeline.stat_loggers.add(recent)
    try:
        state = resolve("quire.frontend.http.state:ServerState")(
            engine,
            config,
            key_digests=keys,
            stall_s=engine_config.frontend_config.slow_client_timeout_s,
            recent=recent,
        )
        resolve("quire.frontend.openai.app:add_parts")(state)
        patience_s = engine_config.lifecycle_config.shutdown_timeout
        main = serve_until_signal(state, listeners, patience_s, on_ready)
        with asyncio.Runner(loop_factory=resolve("uvloop:new_event_loop")) as runner:
            runner.run(main)
    finally:
        engine.shutdown()


def is_open_to_others(url: str) -> bool:
    """Returns whether a server at this URL can be reached from other machines."""
    if url.startswith("unix:"):
        return False
    host = urlsplit(url).hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _log_ready(config: ServerConfig, model_name: str, listeners: Any, start: float) -> None:
    """Logs that the server is ready."""
    admin = f"; admin routes on {listeners.admin_url}" if listeners.admin_url else ""
    took_s = time.monotonic() - start
    logger.info("quire %s: serving %s on %s%s (%.1f s)", __version__, model_name, listeners.url, admin, took_s)
    if not config.disable_ui:
        logger.info("%s", describe_pages(listeners.url, listeners.admin_url))


def describe_pages(url: str, admin_url: str | None) -> str:
    """Returns a line with the URLs of the pages, as they are reached from this machine."""
    if url.startswith("unix:"):
        return "pages: /ui to talk to the model, /ui/dashboard to watch the engine"
    shown, admin = (_ANYWHERE.sub("//localhost", one or "") for one in (url, admin_url))
    text = f"pages: {shown}/ui to talk to the model, {shown}/ui/dashboard to watch the engine"
    return f"{text}; {admin}/ui/dashboard can abort requests, too" if admin else text


async def serve_until_signal(
    state: Any, listeners: Any, shutdown_timeout_s: float, on_ready: Callable[[], None]
) -> None:
    """Runs the server. `on_ready` is called when it is ready."""
    await resolve("quire.frontend.openai.app:load_adapters")(state)
    run_server = resolve("quire.frontend.http.server:serve")
    build_app = resolve("quire.frontend.openai.app:build_app")
    await run_server(state, build_app, listeners, shutdown_timeout_s=shutdown_timeout_s, on_ready=on_ready)
