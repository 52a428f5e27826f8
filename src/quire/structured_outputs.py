"""Form of an output: a JSON schema, a regular expression, a choice, a grammar.

Names are vLLM's (StructuredOutputsParams). This module checks what needs no grammar library; the compiler of a
schema or a grammar finds the other errors.
"""

from __future__ import annotations

import copy
import json as json_text
import reprlib
from typing import Any, NamedTuple, TypeGuard

import msgspec

from quire.errors import ValidationError
from quire.field_bounds import FieldBound, NamedFields

MAX_GRAMMAR_CHARS = 1 << 18
"""Longest text of a schema, a grammar or structural tags."""
MAX_JSON_DEPTH = 64
"""Deepest schema: deeper ones could overflow a stack."""

STRUCTURED_FIELDS: tuple[FieldBound, ...] = (
    FieldBound("regex", "str", max_len=1 << 16, optional=True),
    FieldBound("choice", "list[str]", max_len=4096, max_item_len=4096, optional=True),
    FieldBound("grammar", "str", max_len=MAX_GRAMMAR_CHARS, optional=True),
    FieldBound("json_object", "bool", optional=True),
    FieldBound("disable_any_whitespace", "bool"),
    FieldBound("disable_additional_properties", "bool"),
    FieldBound("whitespace_pattern", "str", max_len=1024, optional=True),
    FieldBound("structural_tag", "str", max_len=MAX_GRAMMAR_CHARS, optional=True),
)
"""All fields except `json`, which is text or an object."""


class GrammarSource(NamedTuple):
    """The form that was asked for: "json", "regex", "choice", "grammar" or "structural_tag", and its text."""

    kind: str
    text: str


class ReasoningTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens that a model puts around its reasoning, which comes before the answer."""

    close: int
    open: int | None = None
    """Token that begins the reasoning. None: the prompt ends with it."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All of these tokens."""
        return (self.close,) if self.open is None else (self.close, self.open)


class StructuredOutputsParams(msgspec.Struct, metaclass=NamedFields, frozen=True, omit_defaults=True):
    """The form an output must have: exactly one of the first five fields, or `structural_tag`.

    Raises ValidationError naming the field (as `structured_outputs.json`, …).
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object; kept as text."""
    regex: str | None = None
    """The whole output matches this regular expression (no look-around, no back-references)."""
    choice: list[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """A context-free grammar: Lark, or GBNF/EBNF with `root ::= …`."""
    json_object: bool | None = None
    """Accept any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between its parts."""
    disable_additional_properties: bool = False
    """JSON objects have only the properties their schema names, even where it allows others."""
    whitespace_pattern: str | None = None
    """Regular expression of the white space between parts of JSON; replaces the bounded default."""
    structural_tag: str | None = None
    """Free text with tags, as JSON: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    reasoning: ReasoningTokens | None = None
    """The form begins after these tokens, if the model reasons. A server sets them by itself (--reasoning-parser)."""

    def __post_init__(self) -> None:
        if self.json is not None:
            msgspec.structs.force_setattr(self, "json", _schema_text(self.json))
        for bound in STRUCTURED_FIELDS:
            try:
                bound.validate(getattr(self, bound.name))
            except ValidationError as e:
                raise _error(bound.name, str(e)) from None
        for text in (self.json, self.regex, self.grammar, self.whitespace_pattern, self.structural_tag):
            _validate_text(text)
        for text in self.choice or ():
            _validate_text(text)
        self._validate_one_kind()
        _validate_reasoning(self.reasoning)

    def _validate_one_kind(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar", "structural_tag") if self._has(name)]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise ValidationError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; exactly one of json, regex, choice, "
                "grammar, json_object and structural_tag is needed",
                param="structured_outputs",
            )
        if self.choice is not None and not self.choice:
            raise _error("choice", "choice is empty: there is nothing to say")
        if sum(map(len, self.choice or ())) > MAX_GRAMMAR_CHARS:
            raise _error("choice", f"the choices have more than {MAX_GRAMMAR_CHARS} characters together")
        if self.regex == "" or self.grammar == "":
            raise _error("regex" if self.regex == "" else "grammar", "an empty grammar allows no output")

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def behind(self, reasoning: ReasoningTokens) -> StructuredOutputsParams:
        """Returns the same form after the model's reasoning."""
        other = copy.copy(self)  # checked fields are not checked again
        msgspec.structs.force_setattr(other, "reasoning", reasoning)
        return other

    @property
    def source(self) -> GrammarSource:
        """Returns the kind of grammar and its text."""
        if self.json is not None:
            assert isinstance(self.json, str)  # __post_init__ ensures exactly one
            return GrammarSource("json", self.json)
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.choice is not None:
            return GrammarSource("choice", json_text.dumps(self.choice))
        if self.grammar is not None:
            return GrammarSource("grammar", self.grammar)
        if self.structural_tag is not None:
            return GrammarSource("structural_tag", self.structural_tag)
        return GrammarSource("json", '{"type": "object"}')


def make_structured_outputs(fields: dict[str, Any]) -> StructuredOutputsParams:
    """Makes parameters from an object with these names; other keys are ignored. Raises ValidationError."""
    known = [name for name in StructuredOutputsParams.__struct_fields__ if name != "reasoning"]
    unknown = fields.keys() - {*known, "_backend", "_backend_was_auto"}
    if unknown:
        raise ValidationError(
            f"structured_outputs cannot hold {', '.join(map(repr, sorted(map(str, unknown))))}; it may hold "
            f"{', '.join(known)}",
            param="structured_outputs",
        )
    given = {k: v for k, v in fields.items() if not str(k).startswith("_")}
    for switch in ("disable_any_whitespace", "disable_additional_properties"):
        if given.get(switch, False) is None:
            del given[switch]
    return StructuredOutputsParams(**given)


def _error(field: str, message: str) -> ValidationError:
    return ValidationError(f"structured_outputs.{field}: {message}", param=f"structured_outputs.{field}")


def _validate_text(text: object) -> None:
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValidationError(
                "structured_outputs is not valid text: it holds a lone surrogate", param="structured_outputs"
            ) from None


def are_reasoning_tokens(value: object) -> TypeGuard[ReasoningTokens]:
    """Returns whether the value has the right shape and numbers; it does not check them against a vocabulary."""
    return isinstance(value, ReasoningTokens) and all(type(token_id) is int for token_id in value.ids)


def _validate_reasoning(reasoning: object) -> None:
    if reasoning is None:
        return
    if not (are_reasoning_tokens(reasoning) and all(0 <= token_id < 1 << 31 for token_id in reasoning.ids)):
        raise _error("reasoning", f"{reprlib.repr(reasoning)} is no ReasoningTokens with token ids")


def _schema_text(schema: object) -> str:
    """Returns a schema as JSON text. Raises ValidationError if it is no JSON object, or too long or deep."""
    try:
        if not isinstance(schema, str):
            _check_length(len(msgspec.json.encode(schema)))  # much quicker than the code below, and never too strict
        text = schema if isinstance(schema, str) else json_text.dumps(schema, allow_nan=False)
        _check_length(len(text))
        value = json_text.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _error("json", f"the schema is nested too deeply; at most {MAX_JSON_DEPTH} levels are allowed") from None
    except ValidationError:
        raise
    except (TypeError, ValueError) as e:
        raise _error("json", f"the schema is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise _error("json", "the schema must be a JSON object")
    if _depth(value) > MAX_JSON_DEPTH:
        raise _error("json", f"the schema is nested too deeply; at most {MAX_JSON_DEPTH} levels are allowed")
    return text


def _check_length(num_chars: int) -> None:
    if num_chars > MAX_GRAMMAR_CHARS:
        raise _error("json", f"the schema has {num_chars} characters; at most {MAX_GRAMMAR_CHARS} are allowed")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _depth(value: object) -> int:
    """Returns the levels of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
