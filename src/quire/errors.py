"""Every error Quire raises on purpose.

::

    QuireError
    ├── ClientError                 the caller's fault: HTTP 4xx; `param` names the field
    │   ├── ValidationError         400  a value is out of its declared bound (also a ValueError)
    │   │   └── PromptTooLongError  400  prompt + output cannot fit the model's context
    │   ├── AdapterError            400  an adapter's files are faulty, or do not fit the model
    │   ├── NotFoundError           404  no such model, adapter or request
    │   ├── OverloadedError         503  a declared limit of the server is reached; nothing was started
    │   │   └── QuotaExceededError  429  the limit is the client's own
    │   └── SlowClientError         408  the client did not read its output for too long; it was aborted
    ├── ConfigError                 the operator's fault: a flag, a file, a combination (also a ValueError)
    │   ├── UnknownArgumentError    a keyword argument that does not exist (also a TypeError)
    │   └── ModelLoadError          the checkpoint cannot be served: names file and tensor
    │       └── UnsupportedModelError   its architecture or a feature of it is unknown here
    └── ServerError                 our fault: HTTP 5xx
        ├── GenerationError         500  this request failed inside the engine; others live
        ├── DeadlineExceededError   504  the request's time was up; it was aborted, or never begun
        └── EngineDeadError         500  the engine core is gone
            └── NodesMissingError   500  machines with its workers did not come

A message gives the situation, the value, the limit and the remedy, in that order, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class QuireError(Exception):
    """Root of the tree. `status_code` is the HTTP status a server answers with."""

    status_code: int = 500


class ClientError(QuireError):
    """The request is at fault. `param` is the offending field's name, `value` what it held."""

    status_code = 400

    def __init__(self, message: str, *, param: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.param = param
        self.value = value


class ValidationError(ClientError, ValueError):
    """A request field is outside its declared bound."""


class PromptTooLongError(ValidationError):
    """The prompt leaves no room for a single output token in the model's context."""


class AdapterError(ClientError):
    """An adapter cannot be loaded. The message names the file and the tensor or field."""

    def __init__(self, message: str, *, param: str | None = "lora_path", value: Any = None) -> None:
        super().__init__(message, param=param, value=value)


class NotFoundError(ClientError):
    """A named thing (model, adapter, request) does not exist."""

    status_code = 404


class OverloadedError(ClientError):
    """A limit is reached; the request was refused before any work was done for it.

    `retry_after_s` is the time after which it might be accepted.
    """

    status_code = 503

    def __init__(self, message: str, *, param: str | None = None, value: Any = None, retry_after_s: int = 1) -> None:
        super().__init__(message, param=param, value=value)
        self.retry_after_s = retry_after_s


class QuotaExceededError(OverloadedError):
    """The client's own limit is reached; others are served."""

    status_code = 429


class SlowClientError(ClientError):
    """The client has read no output for --slow-client-timeout-s although some was ready; the request was aborted.

    The status 408 cannot be sent in a stream that has begun: there only the message arrives.
    """

    status_code = 408


class ConfigError(QuireError, ValueError):
    """A flag, environment variable, configuration file or combination of them cannot work."""


class UnknownArgumentError(ConfigError, TypeError):
    """A keyword argument does not exist. The message names the nearest one."""


class ModelLoadError(ConfigError):
    """A checkpoint cannot be loaded. The message names the file and, where there is one, the tensor."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint's architecture, or a feature it needs, is not implemented here."""


class ServerError(QuireError):
    """A fault of Quire."""


class GenerationError(ServerError):
    """One request failed inside the engine. It may be retried; other requests are not affected."""


class DeadlineExceededError(ServerError):
    """The request was not finished by its deadline and was aborted. It may be retried."""

    status_code = 504


class EngineDeadError(ServerError):
    """The engine core is gone and cannot serve this request."""


class NodesMissingError(EngineDeadError):
    """Machines that have workers of the engine are not there, and were waited for: it is not started again."""


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Returns "did you mean X?" for the known word nearest to `word`, or `otherwise`."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def error_name(error: BaseException) -> str:
    """Returns the name under which `make_error` finds the class of `error`, or its nearest base; empty if there is
    none."""
    return next((c.__name__ for c in type(error).__mro__ if globals().get(c.__name__) is c), "")


def make_error(name: str, message: str, default: type[QuireError]) -> QuireError:
    """Returns an error that was raised in another process: of the class of that name, or of `default` if there
    is none."""
    error_class = globals().get(name)
    if isinstance(error_class, type) and issubclass(error_class, QuireError):
        return error_class(message)
    return default(message)
