"""Texts of models by format, as (text, its meaning), and pieces for hostile texts."""

from __future__ import annotations

from ..reading import Summary

WEATHER = '{"city": "Os}lo \\"x\\"", "days": [1, {"a": null}]}'

V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

TEXTS: dict[str, list[tuple[str, Summary]]] = {
    "hermes": [
        ("", []),
        ("Hi there", [("content", "Hi there")]),
        ("  \n", [("content", "  \n")]),
        (
            f'So:\n<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>\n'
            '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>\n',
            [("content", "So:\n"), ("call", "f"), ("arguments", WEATHER), ("call", "g"), ("arguments", '{"a": 1}')],
        ),
        ('\n\n<tool_call>{"name": "f"}</tool_call> Done', [("call", "f"), ("arguments", "{}"), ("content", " Done")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("call", "f"), ("arguments", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("call", "f"), ("arguments", '{"a": 1}')]),
        ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [{}]}', [("call", "f"), ("arguments", "{}")]),
        # Cut off: within the arguments, behind them, within the closing tag, before the call has begun.
        ('<tool_call>{"name": "f", "arguments": {"a": "b', [("call", "f"), ("arguments", '{"a": "b')]),
        ('<tool_call>{"name": "f", "arguments": {}', [("call", "f"), ("arguments", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool', [("call", "f"), ("arguments", "{}")]),
        ('<tool_call>{"name": "f", "arg', [("content", '<tool_call>{"name": "f", "arg')]),
        ("a <tool_ca", [("content", "a <tool_ca")]),
        # Arguments that are not JSON end where they stop being JSON.
        (
            '<tool_call>{"name": "f", "arguments": {"a": b}}</tool_call>',
            [("call", "f"), ("arguments", '{"a": b'), ("content", "}}</tool_call>")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": [1, 2,]}}</tool_call>',
            [("call", "f"), ("arguments", '{"a": [1, 2,'), ("content", "]}}</tool_call>")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a" 1]}}</tool_call>',
            [("call", "f"), ("arguments", '{"a" '), ("content", "1]}}</tool_call>")],
        ),
        # No calls.
        ("<tool_call>(x)</tool_call>", [("content", "<tool_call>(x)</tool_call>")]),
        ('<tool_call>{"name": 3}</tool_call>', [("content", '<tool_call>{"name": 3}</tool_call>')]),
        ('<tool_call>{"name": "a b", "arguments": {}}', [("content", '<tool_call>{"name": "a b", "arguments": {}}')]),
        ('<tool_call>{"name": "f", "arguments": [1]}', [("content", '<tool_call>{"name": "f", "arguments": [1]}')]),
        ('<tool_call>{"a": 1}</tool_call>', [("content", '<tool_call>{"a": 1}</tool_call>')]),
        # Partly.
        ('<tool_call><tool_call>{"name": "f"}', [("content", "<tool_call>"), ("call", "f"), ("arguments", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Bye',
            [("call", "f"), ("arguments", '{"a": 1'), ("content", "</tool_call> Bye")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}} Bye',
            [("call", "f"), ("arguments", "{}"), ("content", " Bye")],
        ),
    ],
    "llama3_json": [
        (f'{{"name": "f", "parameters": {WEATHER}}}', [("call", "f"), ("arguments", WEATHER)]),
        (
            '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
            [("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", '{"a": 1}')],
        ),
        ('{"name": "Ada", "age": 36}', [("content", '{"name": "Ada", "age": 36}')]),
        ('{"name": "f"}', [("content", '{"name": "f"}')]),
        (
            'Say {"name": "f", "parameters": {}} or {"a": 1}{"name": "g", "parameters": {"b": 2}}; {',
            [
                *(("content", "Say "), ("call", "f"), ("arguments", "{}"), ("content", ' or {"a": 1}')),
                *(("call", "g"), ("arguments", '{"b": 2}'), ("content", "; {")),
            ],
        ),
        ('In {braces} { "name": "f"', [("content", 'In {braces} { "name": "f"')]),
        ("<|python_tag|>print(1)", [("content", "<|python_tag|>print(1)")]),
        ('{"name": "f", "parameters": {}} Bye', [("call", "f"), ("arguments", "{}"), ("content", " Bye")]),
    ],
    "mistral": [
        (
            f'[TOOL_CALLS] [{{"name": "f", "arguments": {WEATHER}}}, {{"name": "g", "arguments": {{}}}}]',
            [("call", "f"), ("arguments", WEATHER), ("call", "g"), ("arguments", "{}")],
        ),
        (
            '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{"b": 2}',
            [("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", '{"b": 2}')],
        ),
        ('Hi[TOOL_CALLS]{"name": "f"}', [("content", "Hi"), ("call", "f"), ("arguments", "{}")]),
        ("[TOOL_CALLS] []", [("content", "[TOOL_CALLS] []")]),
        ("[TOOL_CALLS]hello", [("content", "[TOOL_CALLS]hello")]),
        ("a [TOOL", [("content", "a [TOOL")]),
    ],
    "pythonic": [
        (
            "[f(city='Oslo', days=2, o={'a': [1, -2.5e3, ], \"b\": None}, t=True), g()]",
            [
                ("call", "f"),
                ("arguments", '{"city": "Oslo", "days": 2, "o": {"a": [1, -2.5e3], "b": null}, "t": true}'),
                ("call", "g"),
                ("arguments", "{}"),
            ],
        ),
        (
            r"""[f(a='\'"\n\x41\u00e9\U0001F600\q')]""",
            [("call", "f"), ("arguments", r"""{"a": "'\"\n\u0041\u00e9😀\\q"}""")],
        ),
        ("[1, 2]", [("content", "[1, 2]")]),
        ("[f(x)]", [("content", "[f(x)]")]),
        ("[f(a=g())]", [("content", "[f(a=g())]")]),
        ("Hi [f(a=1)]", [("content", "Hi [f(a=1)]")]),
        ("[f(a=1, b=g)] x", [("call", "f"), ("arguments", '{"a": 1'), ("content", ", b=g)] x")]),
        ("[f(a=0x10)]", [("content", "[f(a=0x10)]")]),
        ("[f(a='b", [("call", "f"), ("arguments", '{"a": "b')]),
        ("[f(a=[1, (2)])]", [("call", "f"), ("arguments", '{"a": [1, '), ("content", "(2)])]")]),
    ],
    "deepseek_v3": [
        (
            f"Ok {V3}\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("content", "Ok "), ("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", WEATHER)],
        ),
        (V3, [("call", "f"), ("arguments", "{}")]),
        ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", [("content", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>")]),
        ("<｜tool▁calls▁begin｜>x", [("content", "<｜tool▁calls▁begin｜>x")]),
    ],
    "qwen3_coder": [
        (
            'So:\n<tool_call>\n<function=f>\n<parameter=city>\nOs"lo\n</parameter>\n<parameter=days>\n[1, 2]\n'
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            [
                ("content", "So:\n"),
                ("call", "f"),
                ("arguments", '{"city": "Os\\"lo", "days": [1, 2]}'),
                ("call", "g"),
                ("arguments", "{}"),
            ],
        ),
        (  # the outer tags are forgotten now and then
            "<function=f><parameter=a>True</parameter></function></tool_call> Done",
            [("call", "f"), ("arguments", '{"a": true}'), ("content", " Done")],
        ),
        (
            "<tool_call><function=f><parameter=a>\n\nx\n\n</parameter></function><function=g></function></tool_call>",
            [("call", "f"), ("arguments", '{"a": "\\nx\\n"}'), ("call", "g"), ("arguments", "{}")],
        ),
        ("<function=f><parameter=a>NaN</parameter></function>", [("call", "f"), ("arguments", '{"a": "NaN"}')]),
        (  # a closing tag is forgotten now and then
            "<function=f><parameter=a>\nOslo\n<parameter=b>\n2\n</function></tool_call> Done",
            [("call", "f"), ("arguments", '{"a": "Oslo", "b": 2}'), ("content", " Done")],
        ),
        # Cut off: in a value, behind it, in the header.
        ("<function=f><parameter=a>\nOs", [("call", "f"), ("arguments", '{"a": "Os')]),
        ("<function=f><parameter=a>1</parameter>\n</fun", [("call", "f"), ("arguments", '{"a": 1}')]),
        ("<function=f><parameter=a", [("content", "<function=f><parameter=a")]),
        # No calls.
        ("<tool_call>x</tool_call>", [("content", "<tool_call>x</tool_call>")]),
        ("<function=a b></function>", [("content", "<function=a b></function>")]),
        ("<function=f>x</function>", [("content", "<function=f>x</function>")]),
        # Partly.
        (
            "<function=f><parameter=a>1</parameter>Bye</function>",
            [("call", "f"), ("arguments", '{"a": 1'), ("content", "Bye</function>")],
        ),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            [("call", "f"), ("arguments", '{"a": 1'), ("content", "<parameter=a>2</parameter></function>")],
        ),
    ],
    "glm45": [
        (
            "Ok\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo\n</arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
            [
                ("content", "Ok\n"),
                ("call", "f"),
                ("arguments", '{"city": "Oslo\\n", "n": 2}'),
                ("call", "g"),
                ("arguments", "{}"),
            ],
        ),
        ("<tool_call>f\n<arg_key>a</arg_key>", [("content", "<tool_call>f\n<arg_key>a</arg_key>")]),
        ('<tool_call>{"name": "f"}</tool_call>', [("content", '<tool_call>{"name": "f"}</tool_call>')]),
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value> Bye",
            [("call", "f"), ("arguments", '{"a": 1'), ("content", " Bye")],
        ),
    ],
    "openai": [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>So:<|end|>"
            f"<|start|>assistant{HARMONY_CALL}{WEATHER}<|call|>",
            [("reasoning", "Hm."), ("content", "So:"), ("call", "f"), ("arguments", WEATHER)],
        ),
        ("<|channel|>final<|message|>Hi<|return|>", [("content", "Hi")]),
        (
            f" to=functions.f<|channel|>commentary json<|message|>{WEATHER}<|call|>",
            [("call", "f"), ("arguments", WEATHER)],
        ),
        (
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
            f"<|message|>{WEATHER}<|call|>",
            [("reasoning", "Hm."), ("call", "f"), ("arguments", WEATHER)],
        ),
        (" to=functions.f is a call", [("content", " to=functions.f is a call")]),
        ("Hi", [("content", "Hi")]),
        (HARMONY_CALL.replace("functions.f", "browser") + "{}", [("content", "{}")]),
        ("<|channel|>x<|end|>y", [("content", "<|channel|>x<|end|>y")]),
        ("<|channel|>" + "x" * 2000, [("content", "<|channel|>" + "x" * 2000)]),
    ],
    "phi4_mini_json": [
        (
            f'functools[{{"name": "f", "arguments": {WEATHER}}}, {{"name": "g", "arguments": {{}}}}]',
            [("call", "f"), ("arguments", WEATHER), ("call", "g"), ("arguments", "{}")],
        ),
        (
            'Hm: <|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|> Done',
            [("content", "Hm: "), ("call", "f"), ("arguments", "{}"), ("content", " Done")],
        ),
        ('functools[{"name": "f", "argu', [("content", 'functools[{"name": "f", "argu')]),
        ('functools[{"name": "f", "arguments": {"a": 1', [("call", "f"), ("arguments", '{"a": 1')]),
        ("functools is a module", [("content", "functools is a module")]),
        ("functools[1]", [("content", "functools[1]")]),
    ],
    "hunyuan_a13b": [
        (
            f'Ok\n<tool_calls>[{{"name": "f", "arguments": {WEATHER}}}]</tool_calls>\n',
            [("content", "Ok\n"), ("call", "f"), ("arguments", WEATHER)],
        ),
        ('<tool_calls>\n[{"name": "f", "arguments": {}}', [("call", "f"), ("arguments", "{}")]),
        ("<tool_calls>[]</tool_calls>", [("content", "<tool_calls>[]</tool_calls>")]),
        ("<tool_calls>{}</tool_calls>", [("content", "<tool_calls>{}</tool_calls>")]),
        (
            '<tool_calls>[{"name": "f", "arguments": {}}, 7]</tool_calls>',
            [("call", "f"), ("arguments", "{}"), ("content", ", 7]</tool_calls>")],
        ),
    ],
    "granite": [
        (
            f'<|tool_call|>[{{"name": "f", "arguments": {WEATHER}}}] Bye',
            [("call", "f"), ("arguments", WEATHER), ("content", " Bye")],
        ),
        ('<tool_call>[{"name": "f", "arguments": {}}]', [("call", "f"), ("arguments", "{}")]),
        ('<|tool_call|>{"name": "f"}', [("content", '<|tool_call|>{"name": "f"}')]),
    ],
    "cohere_command": [
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
            f'{WEATHER}}},\n    {{"tool_call_id": "1", "tool_name": "g", "parameters": {{}}}}\n]<|END_ACTION|>',
            [("call", "f"), ("arguments", WEATHER), ("call", "g"), ("arguments", "{}")],
        ),
        ('<|START_ACTION|>[{"name": "f"}]', [("content", '<|START_ACTION|>[{"name": "f"}]')]),
        ('<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>', [("call", "f"), ("arguments", "{}")]),
    ],
    "apertus": [
        (
            f'Ok<|tools_prefix|>[{{"f": {WEATHER}}}, {{"g": {{}}}}]<|tools_suffix|>',
            [("content", "Ok"), ("call", "f"), ("arguments", WEATHER), ("call", "g"), ("arguments", "{}")],
        ),
        ('<|tools_prefix|>[{"f": {"a": 1', [("call", "f"), ("arguments", '{"a": 1')]),
        ('<|tools_prefix|>[{"f": 1}]', [("content", '<|tools_prefix|>[{"f": 1}]')]),
        ('<|tools_prefix|>[{"f g": {}}]', [("content", '<|tools_prefix|>[{"f g": {}}]')]),
        (
            '<|tools_prefix|>[{"f": {}, "g": {}}]',
            [("call", "f"), ("arguments", "{}"), ("content", ', "g": {}}]')],
        ),
    ],
    "kimi_k2": [
        (
            "Ok <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            f"{WEATHER}<|tool_call_end|><|tool_call_begin|>functions.a.g:1<|tool_call_argument_begin|>{{}}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            [("content", "Ok "), ("call", "f"), ("arguments", WEATHER), ("call", "a.g"), ("arguments", "{}")],
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|> f <|tool_call_argument_begin|> {",
            [("call", "f"), ("arguments", "{")],
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}",
            [("content", "<|tool_calls_section_begin|><|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}")],
        ),
        (
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
            [("content", "<|tool_calls_section_begin|><|tool_calls_section_end|>")],
        ),
    ],
    "internlm": [
        (
            f'Ok<|action_start|><|plugin|>\n{{"name": "f", "parameters": {WEATHER}}}<|action_end|>\n',
            [("content", "Ok"), ("call", "f"), ("arguments", WEATHER)],
        ),
        ("<|action_start|><|interpreter|>1", [("content", "<|action_start|><|interpreter|>1")]),
    ],
    "lfm2": [
        (
            "So <|tool_call_start|>[f(city='Oslo', days=[1, None]), g()]<|tool_call_end|>Now",
            [
                *(("content", "So "), ("call", "f"), ("arguments", '{"city": "Oslo", "days": [1, null]}')),
                *(("call", "g"), ("arguments", "{}"), ("content", "Now")),
            ],
        ),
        ("<|tool_call_start|>[f(a=1)", [("call", "f"), ("arguments", '{"a": 1}')]),
        ("<|tool_call_start|>f(a=1)", [("content", "<|tool_call_start|>f(a=1)")]),
        (
            "<|tool_call_start|>[f(a=1), x]<|tool_call_end|>",
            [("call", "f"), ("arguments", '{"a": 1}'), ("content", ", x]<|tool_call_end|>")],
        ),
        (
            "<|tool_call_start|>[f()]<|tool_call_start|>[g()]",
            [("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", "{}")],
        ),
        ("[f(a=1)]", [("content", "[f(a=1)]")]),
    ],
    "llama4_pythonic": [
        ("<|python_start|>[f(a=1)]<|python_end|>", [("call", "f"), ("arguments", '{"a": 1}')]),
        ("[f(a='x')] Bye", [("call", "f"), ("arguments", '{"a": "x"}'), ("content", " Bye")]),
        ("<|python_start|>print(1)", [("content", "<|python_start|>print(1)")]),
        ("Hi [f()]", [("content", "Hi [f()]")]),
    ],
    "olmo3": [
        (
            'So\n<function_calls>\nf(city="Oslo", days=2)\ng()\n</function_calls>\n',
            [
                ("content", "So\n"),
                ("call", "f"),
                ("arguments", '{"city": "Oslo", "days": 2}'),
                ("call", "g"),
                ("arguments", "{}"),
            ],
        ),
        ("<function_calls>f(a=1)</functi", [("call", "f"), ("arguments", '{"a": 1}')]),
        ("<function_calls>none</function_calls>", [("content", "<function_calls>none</function_calls>")]),
        (
            "<function_calls>f()\nand g</function_calls>",
            [("call", "f"), ("arguments", "{}"), ("content", "\nand g</function_calls>")],
        ),
    ],
    "minimax_m2": [
        (
            'So:\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Os"lo</parameter>\n'
            '<parameter name="days">[1, 2]</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
            "</minimax:tool_call>\n",
            [
                *(("content", "So:\n"), ("call", "f"), ("arguments", '{"city": "Os\\"lo", "days": [1, 2]}')),
                *(("call", "g"), ("arguments", "{}")),
            ],
        ),
        ('<invoke name="f"><parameter name="a">x', [("call", "f"), ("arguments", '{"a": "x')]),
        ('<invoke name="f"><parameter name="a', [("content", '<invoke name="f"><parameter name="a')]),
        ("<minimax:tool_call>x", [("content", "<minimax:tool_call>x")]),
    ],
    "seed_oss": [
        (
            "So:\n<seed:tool_call>\n<function=f>\n<parameter=city>Oslo</parameter>\n<parameter=n>\n2\n</parameter>\n"
            "</function>\n</seed:tool_call>\n",
            [("content", "So:\n"), ("call", "f"), ("arguments", '{"city": "Oslo", "n": 2}')],
        ),
        ("<seed:tool_call></seed:tool_call>", [("content", "<seed:tool_call></seed:tool_call>")]),
    ],
    "gemma4": [
        (
            'Ok <|tool_call>call:f{city:<|"|>Os"}\nlo<|"|>,days:[1,-2.5e3,],o:{<|"|>a b<|"|>:null,b: true}}<tool_call|>'
            "<|tool_call>call:g{}<tool_call|>",
            [
                ("content", "Ok "),
                ("call", "f"),
                (
                    "arguments",
                    '{"city": "Os\\"}\\nlo", "days": [1, -2.5e3], "o": {"a b": null, "b": true}}',
                ),
                ("call", "g"),
                ("arguments", "{}"),
            ],
        ),
        ('<|tool_call>call:f{a:<|"|>x<|"', [("call", "f"), ("arguments", '{"a": "x<|\\"')]),
        ("<|tool_call>call:f{a:1", [("call", "f"), ("arguments", '{"a": 1')]),
        (
            "<|tool_call>call:f{a:b}<tool_call|>",
            [("call", "f"), ("arguments", '{"a": '), ("content", "b}<tool_call|>")],
        ),
        ("<|tool_call>call:f{:1}", [("call", "f"), ("arguments", "{"), ("content", ":1}")]),
        ("<|tool_call>call:f<tool_call|>", [("content", "<|tool_call>call:f<tool_call|>")]),
        ("<|tool_call>f{}", [("content", "<|tool_call>f{}")]),
    ],
}
TEXTS["llama4_json"] = TEXTS["llama3_json"]
TEXTS["qwen3_xml"] = TEXTS["qwen3_coder"]
TEXTS["deepseek_v31"] = TEXTS["deepseek_v3"]
TEXTS["ernie45"] = TEXTS["granite4"] = TEXTS["hermes"]
TEXTS["glm47"] = TEXTS["glm45"]
TEXTS["jamba"] = TEXTS["hunyuan_a13b"]

PIECES = [
    "<tool_call>", "</tool_call>", "<tool_", "call>", '{"name": "f"', ', "arguments": ', '"parameters"', "{", "}", "[",
    "]", '"', "\\", ":", ",", ";", " ", "\n", "f(", "a=", "'", "1", "-", "None", ")", "\\u12", "[TOOL_CALLS]", "[ARGS]",
    "<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "```json", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "analysis", "commentary to=functions.f",
    "<function=f>", "<function=", "</function>", "<parameter=a>", "<parameter=", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "é", "😀", "\x00", "null", "functools[",
    "<|tool_call|>", "<|/tool_call|>", "<tool_calls>", "</tool_calls>", "<|START_ACTION|>", "<|END_ACTION|>",
    '"tool_name": "f"', "<|tools_prefix|>", "<|tools_suffix|>", '{"f": ', "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|action_start|><|plugin|>", "<|action_end|>", "<|tool_call_start|>", "<|python_start|>",
    "<|python_end|>", "[f(a=1)", "<function_calls>", "</function_calls>", "<minimax:tool_call>", "</minimax:tool_call>",
    '<invoke name="f">', '<parameter name="a">', "</invoke>", "<seed:tool_call>", "</seed:tool_call>", "<|tool_call>",
    "call:f{", '<|"|>', "a:", "<tool_call|>", "<|channel>", "<channel|>", "<response>", "</response>", "<answer>",
]  # fmt: skip
"""Hostile texts are these in any order."""
