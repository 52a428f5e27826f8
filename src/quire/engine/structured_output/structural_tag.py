"""Structural tags: text whose parts each have a form of their own, as one grammar for llguidance.

`{"format": …}` is a tree of formats in xgrammar's words; the older `{"structures": …, "triggers": …}` is one such tree.
Free text is the difficulty: a lexer that reads it would read what follows it, too. So a format is always written
together with what ends it (`until`), and free text becomes one lexeme with its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance

MAX_INTEGER = 9 * 10**18
"""Bound of integers without one of their own (near 2**63, where llguidance's ranges end): their digits would never end.
"""

_SCHEMA_KEYS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_SCHEMA_LIST_KEYS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SCHEMA_MAP_KEYS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def bound_schema(text: str, *, disable_additional_properties: bool = False) -> str:
    """Returns the schema with bounds on its integers and, if asked for, closed objects."""
    schema = json.loads(text)
    for node in _nodes(schema):
        _bound_integer(node)
        if disable_additional_properties and ("properties" in node or "patternProperties" in node):
            node.setdefault("additionalProperties", False)
    return json.dumps(schema)


def _nodes(schema: Any) -> list[dict[str, Any]]:
    """Yields every schema inside `schema`, itself first. Skips values (of enum, const, default)."""
    found: list[dict[str, Any]] = []
    todo = [schema]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue
        found.append(node)
        todo += [node[key] for key in _SCHEMA_KEYS if key in node]
        for key in _SCHEMA_LIST_KEYS:
            if isinstance(node.get(key), list):
                todo += node[key]
        for key in _SCHEMA_MAP_KEYS:
            if isinstance(node.get(key), dict):
                todo += node[key].values()
    return found


def _bound_integer(node: dict[str, Any]) -> None:
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or {"enum", "const", "multipleOf", "$ref"} & node.keys():
        return
    low: Any = node.get("minimum", node.get("exclusiveMinimum"))
    high: Any = node.get("maximum", node.get("exclusiveMaximum"))
    if low is None and high is None:
        node.update(minimum=-MAX_INTEGER, maximum=MAX_INTEGER)
    elif low is None and _is_number(high) and high > -MAX_INTEGER:
        node["minimum"] = -MAX_INTEGER
    elif high is None and _is_number(low) and low < MAX_INTEGER:
        node["maximum"] = MAX_INTEGER


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Node = Mapping[str, Any]

_TEXT = "/(.|\\n)*/"
_ENDLESS = ("any_text", "triggered_tags")
"""Formats that have no end of their own."""


def make_tag_grammar(tag: Node, json_options: Any) -> str:
    """Returns the grammar. Raises ValueError for an invalid tag, or one that cannot be distinguished from the text
    around it."""
    writer = _Writer(json_options)
    start = writer.write(format_of(tag), ())
    lines = ["%llguidance {}", f"start: {start or _literal('')}", *writer.rules]
    return json.dumps({"grammars": [{"name": "tag", "lark_grammar": "\n".join(lines)}, *writer.grammars]})


def format_of(tag: Node) -> Any:
    """Returns the format of a tag, which may be of the older kind. Raises ValueError."""
    if "format" in tag:
        return tag["format"]
    if not isinstance(tag.get("structures"), list):
        raise ValueError('it must be {"format": …}, or {"structures": [{"begin", "schema", "end"}], "triggers": […]}')
    contents = [{"type": "json_schema", "json_schema": s.get("schema") or {}} for s in tag["structures"]]
    tags = [
        {"type": "tag", "begin": s["begin"], "content": content, "end": s.get("end", "")}
        for s, content in zip(tag["structures"], contents, strict=True)
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers") or [], "tags": tags}


class _Writer:
    """Turns formats into expressions of Lark, and collects the rules and grammars that they need."""

    def __init__(self, json_options: Any) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._json_options = json_options
        self._num_names = 0
        self._writers: dict[str, Callable[[Node, Sequence[str]], str]] = {
            "any_text": self._any_text,
            "or": self._or,
            "sequence": lambda node, until: self._sequence(_list(node, "elements"), until),
            "tag": lambda node, until: _join(_literal(_text(node, "begin")), self._tag_rest(node, until)),
            "triggered_tags": self._triggered_tags,
        }
        self._closed_writers: dict[str, Callable[[Node], str]] = {
            "const_string": lambda node: _literal(_text(node, "value")),
            "json_schema": self._json_schema,
            "regex": lambda node: self._terminal(f"/{llguidance.regex_to_lark(_text(node, 'pattern'))}/"),
            "grammar": lambda node: self._nested(str(llguidance.grammar_from("grammar", _text(node, "grammar")))),
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda node: self._repeated(node, "?"),
            "star": lambda node: self._repeated(node, "*"),
            "plus": lambda node: self._repeated(node, "+"),
            "repeat": self._repeat,
        }

    def write(self, node: Any, until: Sequence[str]) -> str:
        """Returns a format, followed by one of the texts `until`, if there are any."""
        kind = node.get("type") if isinstance(node, dict) else None
        if kind in self._writers:
            return self._writers[kind](node, until)
        if kind not in self._closed_writers:
            known = ", ".join([*self._closed_writers, *self._writers])
            raise ValueError(f"the format type {str(kind)[:60]!r} is not one of {known}")
        return _join(self._closed_writers[kind](node), _literals(until))

    # -- forms with an end of their own -------------------------------------------------------------------------------

    def _json_schema(self, node: Node) -> str:
        if node.get("style", "json") != "json":
            raise ValueError(f"the style {str(node['style'])[:60]!r} of a json_schema is not supported; leave it out")
        given = node.get("json_schema")
        schema = json.loads(bound_schema(json.dumps({} if given is None or given is True else given)))
        schema["x-guidance"] = self._json_options
        return f"%json {json.dumps(schema)}"

    def _nested(self, lark: str) -> str:
        name = self._name("nested")
        self.grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _tags_with_separator(self, node: Node) -> str:
        tags = self._choice([self.write(tag, ()) for tag in _list(node, "tags")])
        first = self._rule("tags", tags)
        if not node.get("stop_after_first"):
            separated = _join(_literal(_text(node, "separator")), first)
            first = f"{first} ({separated})*"
        return f"({first})" if node.get("at_least_one") else f"({first})?"

    def _repeated(self, node: Node, how: str) -> str:
        content = node.get("content")
        if _is_endless(content):
            raise ValueError(f"the content of {node['type']!r} has no end of its own; put free text into a tag")
        return f"{self._rule('part', self.write(content, ()))}{how}"

    def _repeat(self, node: Node) -> str:
        low, high = node.get("min", 0), node.get("max", -1)
        if not all(isinstance(v, int) for v in (low, high)) or low < 0 or max(low, high) > MAX_REPEATS:
            raise ValueError(f"a repeat needs min and max of at most {MAX_REPEATS}")
        return self._repeated(node, f"{{{low},{high if high >= 0 else ''}}}")

    # -- forms that end where what follows begins ---------------------------------------------------------------------

    def _any_text(self, node: Node, until: Sequence[str]) -> str:
        return self._free_text(until, _list(node, "excludes", optional=True))

    def _free_text(self, until: Sequence[str], excludes: Sequence[str] = ()) -> str:
        """Returns text up to and with the first of `until`; without those, all that follows."""
        text = _TEXT
        if excludes:
            parts = "|".join(_escaped(part) for part in excludes)
            text = f"({_TEXT} & ~/(.|\\n)*({parts})(.|\\n)*/)"
        if not any(until):
            return self._terminal(text)
        name = self._name("text")
        self.rules.append(f"{name}[lazy]: {self._terminal(text)} {_literals(until)}")
        return name

    def _or(self, node: Node, until: Sequence[str]) -> str:
        return self._choice([self.write(element, until) for element in _list(node, "elements")])

    def _sequence(self, elements: Sequence[Any], until: Sequence[str]) -> str:
        if not elements:
            return _literals(until)
        first, *rest = elements
        if not rest:
            return self.write(first, until)
        if not _is_endless(first):
            return _join(self.write(first, ()), self._sequence(rest, until))
        follower, *others = rest
        match follower.get("type") if isinstance(follower, dict) else None:
            case "const_string":
                return _join(self.write(first, (_text(follower, "value"),)), self._sequence(others, until))
            case "tag":
                after = self._tag_rest(follower, () if others else until)
                following = self._sequence(others, until) if others else ""
                return _join(self.write(first, (_text(follower, "begin"),)), after, following)
            case _:
                raise ValueError("free text in a sequence must be its last element, or before a const_string or a tag")

    def _tag_rest(self, node: Node, until: Sequence[str]) -> str:
        """Returns a tag after its begin."""
        end = node.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not all(isinstance(e, str) for e in ends):
            raise ValueError("the end of a tag is a text, or a list of texts")
        if ends == [""]:
            return self.write(node.get("content"), until)
        return _join(self.write(node.get("content"), ends), _literals(until))

    def _triggered_tags(self, node: Node, until: Sequence[str]) -> str:
        triggers = [t for t in _list(node, "triggers") if isinstance(t, str) and t]
        excludes = _list(node, "excludes", optional=True)
        tags = []
        for tag in _list(node, "tags"):
            begin = _text(tag, "begin")
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {begin!r}")
            rest = _literal(begin[len(trigger) :])
            tags.append(_join(self._free_text((trigger,), excludes), rest, self._tag_rest(tag, ())))
        tag_rule = self._rule("tags", self._choice(tags))
        if node.get("stop_after_first"):
            found = _join(tag_rule, _literals(until))
            return found if node.get("at_least_one") else self._choice([found, self._free_text(until, excludes)])
        return _join(f"{tag_rule}{'+' if node.get('at_least_one') else '*'}", self._free_text(until, excludes))

    # -- names --------------------------------------------------------------------------------------------------------

    def _name(self, prefix: str) -> str:
        self._num_names += 1
        return f"{prefix}_{self._num_names}"

    def _rule(self, prefix: str, body: str) -> str:
        name = self._name(prefix)
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        return self._rule("TEXT", body)

    def _choice(self, options: Sequence[str]) -> str:
        if not options:
            raise ValueError("a choice among no formats allows no output")
        return f"({' | '.join(option or _literal('') for option in options)})"


MAX_REPEATS = 1024


def _is_endless(node: Any) -> bool:
    """Returns whether a format ends only where what follows it begins."""
    if not isinstance(node, dict):
        return False
    kind = node.get("type")
    if kind in ("or", "sequence"):
        elements = node.get("elements") or [None]
        return any(map(_is_endless, elements)) if kind == "or" else _is_endless(elements[-1])
    if kind == "tag":
        return node.get("end", "") == "" and _is_endless(node.get("content"))
    return kind in _ENDLESS


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part and part != '""')


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literals(texts: Sequence[str]) -> str:
    """Returns an expression for one of the texts; empty if there are none."""
    if not any(texts):
        return ""
    return _literal(texts[0]) if len(texts) == 1 else f"({' | '.join(map(_literal, texts))})"


def _escaped(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError("excludes is a list of texts")
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$/" else "\\n" if c == "\n" else c for c in text)


def _text(node: Any, name: str) -> str:
    value = node.get(name) if isinstance(node, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{name} is missing, or is no text")
    return value


def _list(node: Node, name: str, *, optional: bool = False) -> list[Any]:
    value = node.get(name)
    if value is None and optional:
        return []
    if not isinstance(value, list) or not (value or optional):
        raise ValueError(f"{name} is missing, or is no list with something in it")
    return value
