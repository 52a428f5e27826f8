"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: the adapters of a running server.

They are on the admin listener. With QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1 they are on the public one, too, for adapters
below a --lora-dir: a client there chooses no other file of the machine, and no download.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta
from starlette.responses import Response

from quire import envs
from quire.config.lora import OWN_TEMPLATE, AdapterSpec
from quire.config.server import ServerConfig
from quire.errors import ValidationError
from quire.frontend.adapters import AdapterRegistry
from quire.frontend.http.auth import Access
from quire.frontend.http.bodies import BodyReader, Int64, RequestBody, Word
from quire.frontend.http.endpoint import Endpoint, Exchange, Handler
from quire.frontend.http.errors import error_body
from quire.lora_request import MAX_NAME_LEN

AdapterName = Annotated[str, Meta(max_length=MAX_NAME_LEN)]


class LoadAdapterBody(RequestBody, kw_only=True):
    """Body of /v1/load_lora_adapter: an adapter and the name that it gets."""

    lora_name: AdapterName
    lora_path: Word
    """Directory on the server's machine, or a hub id."""
    load_inplace: bool = False
    """Reads the files again where the name is in use: requests that come from now on get what they hold."""
    is_3d_lora_weight: bool = False
    """No effect: the layout follows from the tensors."""
    base_model_name: AdapterName | None = None
    """Parent that /v1/models shows."""
    chat_template: Word | None = None
    """"adapter" for the template in the adapter's directory, or a file; default: the model's."""

    EXAMPLE = {"lora_name": "sql", "lora_path": "/adapters/sql"}  # noqa: RUF012 - a ClassVar of the base class


class UnloadAdapterBody(RequestBody, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: AdapterName
    lora_int_id: Int64 | None = None
    """No effect: the name decides."""

    EXAMPLE = {"lora_name": "sql"}  # noqa: RUF012


LOAD = BodyReader(LoadAdapterBody)
UNLOAD = BodyReader(UnloadAdapterBody)


async def load_adapter(exchange: Exchange) -> Response:
    """Loads a LoRA adapter and serves it under a name. Answers once it is ready."""
    return await _load(exchange, await exchange.read(LOAD))


async def load_adapter_of_directory(exchange: Exchange) -> Response:
    """Loads a LoRA adapter that lies in a --lora-dir, and serves it under a name. Answers once it is ready."""
    body = await exchange.read(LOAD)
    dirs = exchange.state.part(AdapterRegistry).dirs
    if not dirs.holds(body.lora_path):
        where = "in a --lora-dir" if dirs.directories else "in a --lora-dir, and the server has none"
        raise ValidationError(
            f"lora_path must be a directory {where}; other adapters are loaded on the admin listener (--enable-admin)",
            param="lora_path",
        )
    if body.chat_template not in (None, OWN_TEMPLATE):
        raise ValidationError(
            f'chat_template must be "{OWN_TEMPLATE}" here; files are named on the admin listener (--enable-admin)',
            param="chat_template",
        )
    return await _load(exchange, body)


async def _load(exchange: Exchange, body: LoadAdapterBody) -> Response:
    _check_name(body.lora_name)
    if not body.lora_path:
        raise ValidationError("lora_path is empty; give the directory of the adapter", param="lora_path")
    await exchange.state.part(AdapterRegistry).names.load(
        AdapterSpec(
            body.lora_name,
            body.lora_path,
            body.base_model_name,
            body.chat_template,
            body.load_inplace,
            body.is_3d_lora_weight,
        )
    )
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")


async def unload_adapter(exchange: Exchange) -> Response:
    """Serves a LoRA adapter no more. Requests under way end with it."""
    body = await exchange.read(UNLOAD)
    _check_name(body.lora_name)
    await exchange.state.part(AdapterRegistry).names.unload(body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


def _check_name(name: str) -> None:
    if not name:
        raise ValidationError("lora_name is empty; name the adapter", param="lora_name")


def error_object(error: BaseException) -> dict[str, Any]:
    """Returns an error in OpenAI's shape, with vLLM's type of a bad adapter."""
    body = error_body(error)
    if body["error"]["code"] == 400:
        body["error"]["type"] = "InvalidUserInput"
    return body


def _is_public(config: ServerConfig) -> bool:
    has_admin_beside = config.enable_admin and not config.admin_is_apart
    return envs.ALLOW_RUNTIME_LORA_UPDATING.flag() and not has_admin_beside


def _rows(path: str, handler: Handler, public_handler: Handler, body: BodyReader[Any]) -> tuple[Endpoint, Endpoint]:
    """Returns the endpoint of the admin listener, and that of the public one."""
    admin = Endpoint(
        path=path,
        handler=handler,
        access=Access.ADMIN,
        body=body,
        is_enabled=lambda config: config.enable_admin,
        shape_error=error_object,
    )
    public = Endpoint(
        path=path,
        handler=public_handler,
        access=Access.KEY,
        body=body,
        is_enabled=_is_public,
        shape_error=error_object,
    )
    return admin, public


ENDPOINTS = (
    *_rows("/v1/load_lora_adapter", load_adapter, load_adapter_of_directory, LOAD),
    *_rows("/v1/unload_lora_adapter", unload_adapter, unload_adapter, UNLOAD),
)
