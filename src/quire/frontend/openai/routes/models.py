"""GET /v1/models: the served models."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from quire.frontend.http.auth import Access
from quire.frontend.http.endpoint import Endpoint, Exchange, json_response
from quire.frontend.http.state import ServerState, hash_model


async def list_models(exchange: Exchange) -> Response:
    """Lists the models that requests may name."""
    cards = [model_card(exchange.state, name) for name in exchange.state.model_names]
    return json_response({"object": "list", "data": cards})


async def show_model(exchange: Exchange) -> Response:
    """Returns one model."""
    name = exchange.state.check_model(exchange.request.path_params["model"])
    return json_response(model_card(exchange.state, name))


def model_card(state: ServerState, name: str) -> dict[str, Any]:
    """Returns a model in OpenAI's form, with vLLM's further fields. `root` is no path."""
    permission = {
        "id": f"modelperm-{hash_model(state.engine.model_config)}",
        "object": "model_permission",
        "created": state.member.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": state.member.created,
        "owned_by": "quire",
        "root": name,
        "parent": None,
        "max_model_len": state.max_model_len,
        "permission": [permission],
    }


ENDPOINTS = (
    Endpoint(path="/v1/models", handler=list_models, access=Access.KEY, methods=("GET",)),
    Endpoint(path="/v1/models/{model:path}", handler=show_model, access=Access.KEY, methods=("GET",)),
)
