"""Flags of `quire serve` that no engine needs (address, access, limits), and the form in which any configuration is
sent to another process: msgpack, typed, no pickle.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire import envs
from quire.config.engine import EngineConfig
from quire.config.flags import flag, parse_human_int
from quire.errors import ConfigError

MAX_KEY_FILE_BYTES = 1 << 20


def parse_names(text: str) -> list[str]:
    """One name, or a JSON list of them."""
    if not text.lstrip().startswith("["):
        return [text]
    try:
        names = json.loads(text)
    except json.JSONDecodeError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{text!r} is not a JSON list of strings")
    return names


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """One HTTP server. Lists are flags that may be repeated."""

    host: str | None = flag(None, "Address to listen on. Default: every one of this machine's.")
    port: int = flag(8000, "Port to listen on; 0 for any free one.", parse=int, minimum=0, maximum=65535)
    uds: str | None = flag(None, "Listen on this Unix socket instead of a port.", metavar="PATH")
    api_server_count: int = flag(
        1,
        "Processes that answer HTTP, in front of one engine core; all limits are for them together. Several help where "
        "requests come faster than one process can read and write them.",
        parse=int,
        minimum=1,
        maximum=64,
        short="-asc",
    )
    root_path: str | None = flag(None, "Path under which a proxy shows this server.", metavar="PATH")
    api_key: tuple[str, ...] = flag(
        (), "A key that clients must show; may be repeated. QUIRE_API_KEY adds one.", parse=parse_names, metavar="KEY"
    )
    api_key_file: str | None = flag(None, "File of keys, one a line; what ps shows nobody.", metavar="FILE")
    protect_metrics: bool = flag(False, "Ask for the key at /metrics, too.")
    isolate_cache_by_key: bool = flag(
        False, "Let only requests with the same API key share cached prefixes: nobody learns what others have asked."
    )
    max_requests_per_key: int | None = flag(
        None,
        "Requests that one API key may have under way, each output of each prompt counted; more are refused (429). "
        "Default: no limit.",
        parse=int,
        minimum=1,
    )
    max_tokens_per_key: int | None = flag(
        None,
        "Tokens that one API key's requests may have under way, prompts and the longest outputs they ask for; more are "
        "refused (429). Default: no limit.",
        parse=parse_human_int,
        minimum=1,
    )
    enable_admin: bool = flag(
        False, "Serve the admin routes (sleep, pause, update_weights, ...) on a listener of their own."
    )
    admin_host: str = flag("127.0.0.1", "Address of the admin listener.")
    admin_port: int = flag(
        8001,
        "Port of the admin listener; that of --port puts the admin routes beside the others.",
        parse=int,
        minimum=0,
        maximum=65535,
    )
    lora_modules: tuple[str, ...] = flag(
        (),
        "A LoRA adapter to load and serve under a name: NAME=PATH, or a JSON object (docs/lora.md). Implies "
        "--enable-lora.",
        takes_many=True,
        metavar="NAME=PATH",
    )
    enable_scale_out: bool = flag(
        False, "Answer at the render routes: the token ids and sampling parameters of a request, nothing generated."
    )
    enable_tokenizer_info_endpoint: bool = flag(False, "Serve /tokenizer_info.")
    trust_request_chat_template: bool = flag(False, "Let requests bring a chat template of their own.")
    default_chat_template_kwargs: str | None = flag(
        None, "JSON object: variables of the chat template; a request's win.", metavar="JSON"
    )
    chat_template_content_format: str = flag(
        "auto", "How messages' content is given to the template.", choices=("auto", "string", "openai")
    )
    tool_call_parser: str | None = flag(
        None,
        "How the model writes tool calls: hermes, llama3_json, mistral, ... (docs/tool_calling.md), or none. Default: "
        "as the chat template tells, if it leaves no doubt.",
        metavar="NAME",
    )
    enable_auto_tool_choice: bool = flag(
        False, 'Refuse to start unless tool_choice "auto" can be served. With a parser it always is.'
    )
    exclude_tools_when_tool_choice_none: bool = flag(
        True, 'Keep the tools out of the prompt when tool_choice is "none".'
    )
    reasoning_parser: str | None = flag(
        None,
        "How the model writes its reasoning: qwen3, deepseek_r1, ... (docs/tool_calling.md), or none.",
        metavar="NAME",
    )
    enable_reasoning_content: bool = flag(
        False, "Give reasoning under its former name, reasoning_content, too, for older clients."
    )
    response_role: str = flag("assistant", "The role of answers.")
    return_tokens_as_token_ids: bool = flag(False, "Show tokens in log-probabilities as token_id:N.")
    enable_force_include_usage: bool = flag(False, "Send usage in every stream.")
    enable_prompt_tokens_details: bool = flag(False, "Say how many prompt tokens came from the cache.")
    max_request_bytes: int = flag(
        32 << 20, "Largest request body; larger ones are refused (413).", parse=parse_human_int, minimum=1024
    )
    max_prompts_per_request: int = flag(
        2048, "Most prompts, and most outputs, of one request.", parse=int, minimum=1, maximum=1 << 20
    )
    max_stored_responses: int = flag(
        1024,
        "Most responses of /v1/responses that are stored in memory for later requests; 0 stores none.",
        parse=int,
        minimum=0,
        maximum=1 << 20,
    )
    max_stored_response_bytes: int = flag(
        64 << 20, "Approximate bytes of all stored responses; the oldest are dropped.", parse=parse_human_int, minimum=0
    )
    body_timeout_s: float = flag(
        60.0, "Seconds a client may take to send a body; then 408.", parse=float, minimum=0.001
    )
    header_timeout_s: float = flag(
        10.0,
        "Seconds a client may take to send a request's line and headers; then its connection ends (408).",
        parse=float,
        minimum=0.001,
    )
    sse_keep_alive_interval: float = flag(
        5.0, "Seconds of silence after which a stream gets a comment line; 0 for none.", parse=float, minimum=0
    )
    drain_accept_s: float = flag(
        0.0,
        "Seconds after SIGTERM during which requests are still accepted, until load balancers stop sending them.",
        parse=float,
        minimum=0,
    )
    allow_credentials: bool = flag(False, "CORS: allow credentials.")
    allowed_origins: tuple[str, ...] = flag((), "CORS: an allowed origin, or *.", parse=parse_names)
    allowed_methods: tuple[str, ...] = flag(("*",), "CORS: an allowed method.", parse=parse_names)
    allowed_headers: tuple[str, ...] = flag(("*",), "CORS: an allowed header.", parse=parse_names)
    middleware: tuple[str, ...] = flag(
        (), "ASGI middleware class, or function(request, call_next), as package.module.name.", metavar="NAME"
    )
    disable_fastapi_docs: bool = flag(False, "No /docs, /redoc and /openapi.json.")
    disable_ui: bool = flag(False, "No pages at /ui, and no /debug/state, which the dashboard reads.")
    ssl_keyfile: str | None = flag(None, "Key of the TLS certificate.", metavar="FILE")
    ssl_certfile: str | None = flag(None, "TLS certificate; serves HTTPS.", metavar="FILE")
    ssl_ca_certs: str | None = flag(None, "Certificates that clients' are checked against.", metavar="FILE")
    ssl_cert_reqs: int = flag(
        0, "Must clients show a certificate: 0 no, 1 if they have one, 2 yes.", parse=int, minimum=0, maximum=2
    )
    ssl_ciphers: str | None = flag(None, "TLS ciphers, as OpenSSL writes them.")
    log_level: str | None = flag(
        None,
        "Log level; QUIRE_LOGGING_LEVEL does the same. Default: INFO.",
        choices=("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"),
    )
    log_format: str | None = flag(
        None, "Form of the log; QUIRE_LOG_FORMAT does the same. Default: text.", choices=("text", "json")
    )
    enable_log_requests: bool = flag(
        False,
        "Log each request as it is handed in: its id, lengths and sampling; its text only with --max-log-len.",
        alias="log_requests",
    )
    enable_log_outputs: bool = flag(
        False, "Log how each output of a request ended: its length and reason; its text only with --max-log-len."
    )
    max_log_len: int = flag(
        0,
        "Characters of a prompt, and of an output, to show in the log where requests are logged; 0 shows none.",
        parse=parse_human_int,
        minimum=0,
        maximum=1 << 20,
    )
    fingerprint_mode: str = flag(
        "full",
        "system_fingerprint in answers: full (the version, and a hash of the model and its settings), the hash alone, "
        "none, or custom: --fingerprint-value.",
        choices=("full", "hash", "custom", "none"),
    )
    fingerprint_value: str | None = flag(None, "The system_fingerprint of --fingerprint-mode custom.", metavar="TEXT")
    disable_uvicorn_access_log: bool = flag(False, "No line per request.")
    disable_access_log_for_endpoints: str | None = flag(
        None, "Paths, with commas between, whose requests are not logged.", metavar="PATHS"
    )
    uvicorn_log_level: str = flag(
        "warning", "Log level of the HTTP server.", choices=("critical", "error", "warning", "info", "debug", "trace")
    )
    h11_max_incomplete_event_size: int = flag(
        4 << 20,
        "Most bytes of a request's line and headers; more are refused (431).",
        parse=parse_human_int,
        minimum=1024,
    )

    def __post_init__(self) -> None:
        if self.uds is not None and self.ssl_certfile is not None:
            raise ConfigError("--uds and --ssl-certfile exclude each other: a Unix socket has no TLS")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile belong together; give both or neither")
        if (self.fingerprint_mode == "custom") != (self.fingerprint_value is not None):
            raise ConfigError("--fingerprint-mode custom and --fingerprint-value belong together; give both or neither")

    @property
    def admin_is_apart(self) -> bool:
        """Returns whether the admin routes have a listener of their own."""
        return self.enable_admin and (self.uds is not None or self.admin_port != self.port or self.admin_port == 0)


def read_api_keys(config: ServerConfig) -> tuple[bytes, ...]:
    """Returns the SHA-256 of every key: of --api-key, --api-key-file and QUIRE_API_KEY. Raises ConfigError."""
    keys = [*config.api_key, *([envs.API_KEY.get()] if envs.API_KEY.get() else [])]
    if config.api_key_file is not None:
        keys += _read_key_file(Path(config.api_key_file).expanduser())
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty; give one that nobody guesses")
    for name in ("max_requests_per_key", "max_tokens_per_key"):
        if getattr(config, name) is not None and not keys:
            raise ConfigError(f"--{name.replace('_', '-')} limits each key, and there is none; give --api-key")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def _read_key_file(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_KEY_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {path} cannot be read: {e}") from None
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one a line")
    return keys


Config = TypeVar("Config", EngineConfig, ServerConfig)


def encode_config(config: EngineConfig | ServerConfig) -> bytes:
    """Returns a configuration as bytes."""
    return msgspec.msgpack.encode(config, enc_hook=_encode_path)


def decode_config(data: bytes) -> EngineConfig:
    """Decodes the configuration of an engine. Raises ConfigError for anything else."""
    return _decode(data, EngineConfig, "engine")


def decode_server_config(data: bytes) -> ServerConfig:
    """Decodes the configuration of a server. Raises ConfigError for anything else."""
    return _decode(data, ServerConfig, "server")


def _decode(data: bytes, kind: type[Config], name: str) -> Config:
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_path)
    except (msgspec.MsgspecError, TypeError, ValueError) as e:
        raise ConfigError(f"the {name} configuration sent by the frontend cannot be read: {e}") from e


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a configuration holds a {type(value).__name__}, which cannot cross a process boundary")


def _decode_path(declared: Any, value: Any) -> Path:
    if declared is Path:
        return Path(value)
    raise TypeError(f"a configuration field is declared as {declared!r}, which cannot cross a process boundary")
