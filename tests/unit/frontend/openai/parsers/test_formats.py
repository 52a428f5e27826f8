"""Every tool parser: what it makes of its texts, however they are cut and whatever they are."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.openai.parsers.constrained import parse_required, required_schema
from quire.frontend.openai.parsers.events import StreamParser
from quire.frontend.openai.parsers.harmony import parse_harmony
from quire.frontend.openai.parsers.tools import TOOL_PARSERS
from tests.seeds import FRESH, examples

from ..reading import all_text, count_work, read, split
from .texts import PIECES, TEXTS

FORMATS = sorted(TOOL_PARSERS)
REWRITTEN = (
    "pythonic", "llama4_pythonic", "lfm2", "olmo3", "gemma4", "qwen3_coder", "qwen3_xml", "glm45", "glm47",
    "minimax_m2", "seed_oss",
)  # fmt: skip
"""Formats whose arguments are not JSON."""
DISTINCT = sorted({id(TEXTS[name]): name for name in reversed(FORMATS)}.values())
"""One name of each format."""
CASES = [(name, text, meaning) for name in FORMATS for text, meaning in TEXTS[name]]

hostile_texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)
json_objects = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@pytest.mark.parametrize(("name", "text", "meaning"), CASES)
def test_a_text_means_the_same_however_it_is_cut(name: str, text: str, meaning: list[tuple[str, str]]) -> None:
    program = TOOL_PARSERS[name].program
    assert read(program, [text]) == meaning
    for size in (1, 2, 3, 7, 20):
        assert read(program, split(text, size)) == meaning


@pytest.mark.parametrize("name", DISTINCT)
@settings(max_examples=examples(30))
@given(data=st.data(), text=hostile_texts)
def test_hostile_text_means_the_same_however_it_is_cut(name: str, data: st.DataObject, text: str) -> None:
    program = TOOL_PARSERS[name].program
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(program, [text])
    assert read(program, pieces) == whole
    if all(kind == "content" for kind, _ in whole) and name != "openai":
        assert all_text(whole) == text  # what is no call is content, to the last character


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in REWRITTEN])
@settings(max_examples=examples(25))
@given(arguments=json_objects, size=st.integers(1, 9), indent=st.none() | st.integers(0, 2))
def test_arguments_are_the_text_the_model_wrote(name: str, arguments: object, size: int, indent: int | None) -> None:
    text = json.dumps(arguments, ensure_ascii=False, indent=indent)
    call = f'{{"name": "f", "arguments": {text}}}'
    written = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "granite4": f"<tool_call>{call}</tool_call>",
        "ernie45": f"<tool_call>{call}</tool_call>",
        "internlm": f"<|action_start|><|plugin|>{call}<|action_end|>",
        "phi4_mini_json": f"functools[{call}]",
        "hunyuan_a13b": f"<tool_calls>[{call}]</tool_calls>",
        "jamba": f"<tool_calls>[{call}]</tool_calls>",
        "granite": f"<|tool_call|>[{call}]",
        "cohere_command": f'<|START_ACTION|>[{{"tool_name": "f", "parameters": {text}}}]<|END_ACTION|>',
        "apertus": f'<|tools_prefix|>[{{"f": {text}}}]<|tools_suffix|>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{text}<|tool_call_end|><|tool_calls_section_end|>",
        "mistral": f"[TOOL_CALLS][{call}]",
        "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{text}\n```",
        "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
        "openai": f"<|channel|>commentary to=functions.f<|message|>{text}<|call|>",
    }.get(name, call)
    assert read(TOOL_PARSERS[name].program, split(written, size)) == [("call", "f"), ("arguments", text)]


@settings(max_examples=examples(40))
@given(arguments=json_objects, size=st.integers(1, 9))
def test_python_literals_become_json(arguments: dict[str, object], size: int) -> None:
    keywords = {f"k{i}": value for i, value in enumerate(arguments.values())}
    call_text = "f(" + ", ".join(f"{name}={value!r}" for name, value in keywords.items()) + ")"
    for name, text in {
        "pythonic": f"[{call_text}]",
        "llama4_pythonic": f"<|python_start|>[{call_text}]<|python_end|>",
        "lfm2": f"<|tool_call_start|>[{call_text}]<|tool_call_end|>",
        "olmo3": f"<function_calls>\n{call_text}\n</function_calls>",
    }.items():
        (call, (kind, written)) = read(TOOL_PARSERS[name].program, split(text, size))
        assert (call, kind) == (("call", "f"), "arguments")
        assert json.loads(written) == keywords


def in_gemmas_notation(value: object) -> str:
    """Returns a value as Gemma 4's chat template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(in_gemmas_notation, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{in_gemmas_notation(k)}:{in_gemmas_notation(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@settings(max_examples=examples(40))
@given(arguments=json_objects, size=st.integers(1, 9))
def test_gemmas_notation_becomes_json(arguments: dict[str, object], size: int) -> None:
    values = {f"k{i}": value for i, value in enumerate(arguments.values())}
    inner = ",".join(f"{key}:{in_gemmas_notation(value)}" for key, value in values.items())
    text = f"<|tool_call>call:f{{{inner}}}<tool_call|>"
    (call, (kind, written)) = read(TOOL_PARSERS["gemma4"].program, split(text, size))
    assert (call, kind) == (("call", "f"), "arguments")
    assert json.loads(written) == values


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
@settings(max_examples=examples(40))
@given(arguments=json_objects, size=st.integers(1, 9), are_known=st.booleans())
def test_values_in_tags_become_json(name: str, arguments: dict[str, object], size: int, are_known: bool) -> None:
    """Their schemas decide; without them, their form."""
    values = {f"k{i}": value for i, value in enumerate(arguments.values()) if "</" not in str(value)}
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in values.items()}
    if name == "glm45":
        parts = [f"<arg_key>{k}</arg_key>\n<arg_value>{text}</arg_value>\n" for k, text in texts.items()]
        written = f"<tool_call>f\n{''.join(parts)}</tool_call>"
    elif name == "minimax_m2":
        parts = [f'<parameter name="{k}">\n{text}\n</parameter>\n' for k, text in texts.items()]
        written = f'<minimax:tool_call>\n<invoke name="f">\n{"".join(parts)}</invoke>\n</minimax:tool_call>'
    elif name == "seed_oss":
        parts = [f"<parameter={k}>\n{text}\n</parameter>\n" for k, text in texts.items()]
        written = f"<seed:tool_call>\n<function=f>\n{''.join(parts)}</function>\n</seed:tool_call>"
    else:
        parts = [f"<parameter={k}>\n{text}\n</parameter>\n" for k, text in texts.items()]
        written = f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {k: {"type": kinds.get(type(v), "null")} for k, v in values.items()}
    tools = [{"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]
    program = TOOL_PARSERS[name].program_for(tools if are_known else [])
    (call, (kind, found)) = read(program, split(written, size))
    assert (call, kind) == (("call", "f"), "arguments")
    read_values = json.loads(found)
    assert read_values.keys() == values.keys()
    for key, value in values.items():
        if are_known or not isinstance(value, str):
            assert read_values[key] == value
            assert type(read_values[key]) is type(value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": "number"}, "12", 12),
        ({"type": "float"}, "1.5", 1.5),
        ({"type": "int"}, "12", 12),
        ({"type": ["bool", "null"]}, "true", True),
        ({"type": "str"}, "12", "12"),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "boolean"}, "True", True),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 7}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
        ({"oneOf": [{"type": "string"}, {"anyOf": []}]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"enum": ["a"]}]}, "7", "7"),
        ({}, "{'a': 1}", "{'a': 1}"),
        (True, "7", 7),
        ({"type": 5}, "[" * 5000, "[" * 5000),
        ({"type": "integer"}, "1" * 5000, "1" * 5000),
    ],
)
def test_what_a_value_means(schema: object, text: str, value: object) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    written = f"<function=f><parameter=a>{text}</parameter></function>"
    _, (_, arguments) = read(TOOL_PARSERS["qwen3_coder"].program_for(tools), [written])
    assert json.loads(arguments) == {"a": value}


def test_arguments_are_passed_on_as_they_come() -> None:
    """No reader waits for the end of a call."""
    for name, beginning, more in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x"),
        ("mistral", "[TOOL_CALLS]f{", '"'),
        ("pythonic", "[f(a='", "x"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>", "{"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "{"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{", '"'),
        ("apertus", '<|tools_prefix|>[{"f": {"a": "', "x"),
        ("cohere_command", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "', "x"),
        ("lfm2", "<|tool_call_start|>[f(a='", "x"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>', "x"),
    ):
        parser = StreamParser(TOOL_PARSERS[name].program, trims=True)
        parser.feed(beginning)
        (event,) = [e for e in parser.feed(more) if type(e).__name__ == "Arguments"]
        assert event.text.endswith(more)


BOMBS = {
    "braces": "{" * 4_000,
    "a call of braces": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 4_000,
    "brackets in Python": "[f(a=" + "[" * 4_000,
    "an open string": '<tool_call>{"name": "f", "arguments": {"a": "' + "x\\n" * 300,
    "a key without an end": '<tool_call>{"' + "k" * 4_000,
    "tags": "<tool_call>" * 600,
    "half tags": "<tool_call" * 600,
    "almost calls": '<tool_call>{"name": "f", ' * 400,
    "almost Mistral": "[TOOL_CALLS][" * 400,
    "almost DeepSeek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" * 200,
    "almost Qwen": "<tool_call><function=f><parameter=a>" * 100,
    "an open value": "<tool_call><function=f><parameter=a>" + "x</param" * 400,
    "almost GLM": "<tool_call>f<arg_key>" * 200,
    "almost harmony": "<|channel|>analysis" * 400,
    "white space": "<tool_call>" + " " * 4_000,
    "escapes": "[f(a='" + "\\x4" * 300,
    "Llama": '{"name": "f", "parameters": {}};' * 300,
    "almost Phi": 'functools[{"name": ' * 300,
    "almost Kimi": "<|tool_calls_section_begin|><|tool_call_begin|>f" * 100,
    "almost Apertus": '<|tools_prefix|>[{"f": ' * 200,
    "almost LFM2": "<|tool_call_start|>[f(a=1" * 200,
    "almost OLMo": "<function_calls>f(" * 200,
    "almost Gemma": "<|tool_call>call:f{a:" * 200,
    "Gemma's brackets": "<|tool_call>call:f{a:" + "[" * 4_000,
    "Gemma's quotes": '<|tool_call>call:f{a:<|"|>' + '<|"' * 600,
    "almost MiniMax": '<invoke name="f"><parameter name="a">x</' * 100,
}


@pytest.mark.parametrize("size", [3, 4096])
@pytest.mark.parametrize("bomb", sorted(BOMBS))
def test_work_grows_no_faster_than_the_text(bomb: str, size: int) -> None:
    """Each format reads each text in pieces of one size; of both in the fresh tier."""
    text, first = BOMBS[bomb], (sorted(BOMBS).index(bomb) + (size == 3)) % 2
    length = min(len(text) // 4, 600)
    for name in DISTINCT if FRESH else DISTINCT[first::2]:
        program = TOOL_PARSERS[name].program
        small = count_work(program, split(text[: length // 2], size))
        large = count_work(program, split(text[:length], size))
        assert large <= 2.2 * small + 2000, (name, small, large)
        assert large <= 120 * length, (name, large)


def test_a_hundred_thousand_braces() -> None:
    for name in DISTINCT:
        for text in ("{" * 100_000, '<tool_call>{"name": "f", "arguments": ' + "{" * 100_000, "[f(a=" + "[" * 100_000):
            whole = read(TOOL_PARSERS[name].program, [text])
            assert len(all_text(whole)) >= 100_000


def test_forced_calls_are_read_however_they_are_cut() -> None:
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    for size in (1, 5, 100):
        assert read(parse_required, split(text, size)) == [
            ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
        ]  # fmt: skip
    assert read(parse_required, []) == []
    assert read(parse_required, ["No."]) == [("content", "No.")]


def test_the_schema_of_forced_calls_keeps_the_references_of_each_function() -> None:
    zone = {
        "properties": {"zone": {"$ref": "#/$defs/Z"}, "all": {"items": [{"$ref": "#"}]}},
        "$defs": {"Z": {"enum": [1]}},
    }
    schema = required_schema([{"name": "f", "parameters": zone}, {"name": "g"}], is_parallel=True)
    moved = schema["$defs"]["function_0"]
    assert moved["properties"]["zone"] == {"$ref": "#/$defs/function_0/$defs/Z"}
    assert moved["properties"]["all"] == {"items": [{"$ref": "#/$defs/function_0"}]}
    assert moved["$defs"]["Z"] == {"enum": [1]}
    assert schema["$defs"]["function_1"] == {"type": "object"}
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"enum": ["f"]}, {"enum": ["g"]}]
    assert required_schema([{"name": "f"}], is_parallel=False)["maxItems"] == 1


def test_calls_without_tools_are_content() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert read(partial(parse_harmony, has_tools=False), [text]) == [("content", "{}")]
