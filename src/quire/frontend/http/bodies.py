"""The one door for request bodies: from bytes to a checked struct.

Every route's body is a `RequestBody`: a msgspec Struct whose annotations hold each field's type, bounds and sizes. The
validator, the OpenAPI document and the page docs/http_fields.md are all derived from the annotations; a test makes
sure that every field has a bound. JSON has no NaN and no Infinity, and the parser takes none. Numbers and booleans may
also be written in another form that loses nothing (5.0 or "5" for 5, "true" or 1 for true). Unknown fields are ignored,
as vLLM does. So are the fields of `NEUTRAL` while they ask for nothing, and those of `WITHOUT_EFFECT`, whose first use
is logged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.field_bounds import INT64_MAX
from quire.logger import init_logger

logger = init_logger(__name__)

MAX_TEXT_CHARS = 1 << 26
"""More than any context holds. The limit on the body is usually reached first."""
MAX_FLOAT = 1e38
"""About the largest number of single precision."""
MAX_SHOWN_CHARS = 60
MAX_WORDS_CHARS = 400
"""Length to which parser messages are cut: they repeat invalid values in full."""
MAX_BYTES_TO_QUOTE = 1 << 16
"""Largest body whose invalid value is quoted in the error: to quote it the body is parsed a second time."""
MAX_LAX_BYTES = 1 << 20
"""Largest body in which numbers may be texts: reading a text of millions of digits blocks the event loop."""

Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=1024)]
Word = Annotated[str, Meta(max_length=4096)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1 << 24)]
Finite = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
Object = Annotated[dict[Name, Any], Meta(max_length=1024)]
"""A free-form object for a chat template or a later check. The parser bounds its depth."""


class RequestBody(msgspec.Struct, kw_only=True):
    """A JSON object that a client sends."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields of other servers that are not supported, with the values that ask for nothing; others are refused."""
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {}
    """Fields of other servers that are accepted and change nothing, and why. Their first use is logged."""
    EXAMPLE: ClassVar[Mapping[str, Any]] = {}
    """A small useful body, for the OpenAPI document."""

    @property
    def own_names(self) -> Mapping[str, str]:
        """The names that the engine's fields have in this body, where they differ."""
        return {}


Body = TypeVar("Body", bound=RequestBody)

_LOCATION = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_GOT = re.compile(r", got `\w+`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")


class BodyReader(Generic[Body]):
    """Reads the bodies of one route."""

    def __init__(self, kind: type[Body]) -> None:
        self.kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._lax_decoder = msgspec.json.Decoder(kind, strict=False)

    def read(self, body: bytes) -> Body:
        """Returns the checked body. Raises ValidationError that names the field."""
        try:
            try:
                request = self._decoder.decode(body)
            except msgspec.ValidationError:
                if len(body) > MAX_LAX_BYTES:
                    raise
                request = self._lax_decoder.decode(body)
        except msgspec.ValidationError as e:
            raise _field_error(str(e), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise ValidationError(f"the body is not valid JSON: {str(e)[:MAX_WORDS_CHARS]}", param="body") from None
        except RecursionError:
            raise ValidationError("the body is nested too deeply", param="body") from None
        _check_foreign_fields(request)
        return request


_told: set[str] = set()


def _check_foreign_fields(request: RequestBody) -> None:
    """Raises ValidationError for a field of `NEUTRAL` that asks for something. Logs the first use of a field of
    `WITHOUT_EFFECT`."""
    for name, neutral in request.NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise ValidationError(
                f"{name} is not supported by this version of Quire; leave it out", param=name, value=value
            )
    for name, why in request.WITHOUT_EFFECT.items():
        if name not in _told and getattr(request, name):
            _told.add(name)
            logger.warning("requests set %s, which has no effect: %s", name, why)


def _field_error(message: str, body: bytes) -> ValidationError:
    found = _LOCATION.match(message)
    assert found is not None
    what, path = found["what"], (found["path"] or "").lstrip(".")
    missing = _MISSING.match(what)
    if missing is not None:
        where = f"{path}.{missing['name']}".lstrip(".")
        return ValidationError(f"{where} is missing; it is required", param=where.partition("[")[0])
    shown = _quote(body, path)
    words = what[:1].lower() + what[1:MAX_WORDS_CHARS]
    if shown:
        words = _GOT.sub("", words)
    return ValidationError(f"{path or 'the body'}: {words}{shown}", param=path.partition("[")[0] or "body")


def _quote(body: bytes, path: str) -> str:
    """ ", got VALUE" for the value at `path`; nothing where it cannot be found cheaply."""
    if len(body) > MAX_BYTES_TO_QUOTE:
        return ""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # what follows the first wrong field may be anything
    for key, index in re.findall(r"([A-Za-z_]\w*)|\[(\d+)\]", path):
        if "[...]" in path or not isinstance(value, dict | list):
            return ""
        value = value.get(key) if isinstance(value, dict) else value[int(index)]
    text = repr(value)
    return f", got {text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + '...'}"
