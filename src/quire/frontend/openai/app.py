"""The table of routes and the state that they share.

A new endpoint is a file under `routes/` with its `ENDPOINTS`, and a row in `ROUTERS`.
"""

from __future__ import annotations

from starlette.applications import Starlette

from quire.config.server import ServerConfig
from quire.frontend.http.endpoint import Endpoint, make_app, select_endpoints
from quire.frontend.http.state import ServerState
from quire.frontend.openai.chat.format import ChatFormat
from quire.frontend.openai.rendering import PromptRenderer
from quire.frontend.openai.responses.store import LocalResponses, ResponseStore, ServerResponses
from quire.frontend.openai.routes import (
    admin,
    batch,
    chat,
    completions,
    embeddings,
    health,
    invocations,
    messages,
    models,
    ollama,
    pages,
    render,
    responses,
    scores,
    tokens,
)

ROUTERS: tuple[tuple[Endpoint, ...], ...] = (
    health.ENDPOINTS,
    models.ENDPOINTS,
    tokens.ENDPOINTS,
    completions.ENDPOINTS,
    chat.ENDPOINTS,
    batch.ENDPOINTS,
    responses.ENDPOINTS,
    messages.ENDPOINTS,
    ollama.ENDPOINTS,
    embeddings.ENDPOINTS,
    scores.ENDPOINTS,
    render.ENDPOINTS,
    invocations.ENDPOINTS,
    pages.ENDPOINTS,
    admin.ENDPOINTS,
)
"""All endpoints, one row per file of `routes/`."""


def add_parts(state: ServerState) -> ServerState:
    """Adds the objects that the routes share to `state`, and returns it. Raises ConfigError for flags that do not fit
    the model."""
    engine, config, member = state.engine, state.config, state.member
    templates = engine.tokenizer.chat_templates if engine.tokenizer is not None else {}
    state.add_part(PromptRenderer(engine, config))
    state.add_part(ChatFormat(config, templates.get("tool_use", templates.get("default"))))
    max_num, max_bytes = config.max_stored_responses, config.max_stored_response_bytes
    store = ResponseStore(-(-max_num // member.num_processes), max_bytes // member.num_processes)
    state.add_part(ServerResponses(LocalResponses(store), member))
    return state


def endpoints_of(config: ServerConfig, *, is_admin: bool) -> list[Endpoint]:
    """Returns the endpoints of the main listener, or of the admin one."""
    return select_endpoints((endpoint for router in ROUTERS for endpoint in router), config, is_admin=is_admin)


def build_app(state: ServerState, *, is_admin: bool = False) -> Starlette:
    """Returns the application of one listener. Raises ConfigError for a middleware that cannot be used."""
    return make_app(state, (endpoint for router in ROUTERS for endpoint in router), is_admin=is_admin)
