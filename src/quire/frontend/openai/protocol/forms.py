"""The form of an output, in the three ways a body may ask for it: OpenAI's `response_format`, vLLM's
`structured_outputs`, and vLLM's older `guided_*` fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.errors import ValidationError
from quire.frontend.http.bodies import Object, RequestBody, Text
from quire.structured_outputs import StructuredOutputsParams, make_structured_outputs


class FormBody(RequestBody, kw_only=True):
    """Fields that say what form the output must have. At most one of them may be set."""

    response_format: Object | None = None
    """{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}, or
    {"type": "structural_tag", "structures": […], "triggers": […]}."""
    structured_outputs: Object | None = None
    """One of json, regex, choice, grammar, json_object, structural_tag; see docs/structured_output.md."""
    guided_json: Object | Text | None = None
    """As structured_outputs.json."""
    guided_regex: Annotated[str, Meta(max_length=1 << 16)] | None = None
    """As structured_outputs.regex."""
    guided_choice: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=4096)] | None = None
    """As structured_outputs.choice."""
    guided_grammar: Text | None = None
    """As structured_outputs.grammar."""

    @property
    def own_names(self) -> Mapping[str, str]:
        given = [name for name in _FORMS if getattr(self, name)]
        return {"structured_outputs": given[0]} if given else {}

    def form(self) -> StructuredOutputsParams | None:
        """What was asked for; None for any text. Raises ValidationError."""
        forms: dict[str, Any] = {
            "response_format": _of_response_format(self.response_format),
            "structured_outputs": self.structured_outputs or None,
            **{f"guided_{kind}": _guided(kind, getattr(self, f"guided_{kind}")) for kind in _GUIDED_KINDS},
        }
        given = {name: fields for name, fields in forms.items() if fields is not None}
        if len(given) > 1:
            raise ValidationError(
                f"{' and '.join(given)} are set; the form of an output is asked for in one field", param=min(given)
            )
        for name, fields in given.items():
            try:
                return make_structured_outputs(fields)
            except ValidationError as e:
                raise ValidationError(str(e), param=e.param if name == "structured_outputs" else name) from None
        return None


_GUIDED_KINDS = ("json", "regex", "choice", "grammar")
_FORMS = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _GUIDED_KINDS))


def _guided(kind: str, value: Any) -> dict[str, Any] | None:
    return None if value is None else {kind: value}


def _of_response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if schema is None:
            raise ValidationError(
                "response_format of type json_schema needs json_schema.schema", param="response_format"
            )
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": msgspec.json.encode(value).decode()}
    raise ValidationError(
        f"response_format.type={str(kind)[:60]!r} is not one of text, json_object, json_schema, structural_tag",
        param="response_format",
    )
