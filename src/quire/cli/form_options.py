"""The flags that say what form the output must have (docs/structured_output.md)."""

from __future__ import annotations

from pathlib import Path

from quire.cli.options import Arguments, Option
from quire.errors import ConfigError
from quire.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputsParams

GROUP = "Form of the output"

_FIELDS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Flag to field of StructuredOutputsParams."""


def form_options() -> list[Option]:
    """One form at most may be given."""
    return [
        Option(name="json_schema", help="The output is JSON of this schema: JSON text, or a file.", group=GROUP),
        Option(name="regex", help="The output matches this regular expression.", group=GROUP),
        Option(name="choice", help="The output is this text, or another --choice.", group=GROUP, is_repeatable=True),
        Option(name="grammar", help="The output is of this grammar (Lark or GBNF): text, or a file.", group=GROUP),
    ]


def make_form(args: Arguments) -> StructuredOutputsParams | None:
    """What was asked for. Raises ConfigError for a file that cannot be read, ValidationError for a bad form."""
    given = {field: args[flag] for flag, field in _FIELDS.items() if args[flag]}
    for field, flag in (("json", "--json-schema"), ("grammar", "--grammar")):
        if field in given:
            given[field] = _text_or_file(given[field], flag)
    return StructuredOutputsParams(**given) if given else None


def _text_or_file(value: str, flag: str) -> str:
    if value.lstrip().startswith("{") or "::=" in value or "start:" in value:
        return value
    try:
        with Path(value).open(encoding="utf-8") as file:
            return file.read(MAX_GRAMMAR_CHARS + 1)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{flag} {value[:200]}: it is neither a grammar nor a file that can be read: {e}") from None
