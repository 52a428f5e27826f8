"""Chat templates in the style of published ones: how each family writes turns, tools and calls, in a few lines.

They are written from the formats' markers. `Sample` says which parsers a server must choose for one; None: none,
because nothing marks the format, or several would do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A template, and what it must choose."""

    template: str
    tools: str | None
    reasoning: str | None = None
    end: str = ""
    """Text behind an assistant's turn."""
    reads: str | None = None
    """The tool parser that reads its calls, where the template does not choose one."""


def chatml(tools: str, call: str, *, think: str = "", between: str = "\n") -> str:
    """A template with ChatML's turns."""
    return turns("<|im_start|>{role}\n", "<|im_end|>\n", tools, call, think=think, between=between)


def turns(
    head: str, end: str, tools: str, call: str, *, think: str = "", between: str = "\n", bot: str = "assistant",
    around: tuple[str, str] = ("", ""),
) -> str:  # fmt: skip
    """A template of turns between `head` and `end`, with instructions for tools and an assistant's calls."""
    first, second = head.split("{role}")
    role = "{{ 'ROLE' if m.role == 'assistant' else m.role }}".replace("ROLE", bot)
    return (
        "{%- if tools %}" + first + "system" + second + tools + "{{ tools | tojson }}" + end + "{%- endif %}"
        "{%- for m in messages %}" + first + role + second + "{%- if m.tool_calls %}"
        "{{- m.content or '' }}" + around[0] + "{%- for c in m.tool_calls %}{%- set f = c.function %}"
        "{%- if not loop.first %}{{ " + repr(between) + " }}{%- endif %}" + call + "{%- endfor %}"
        + around[1] + "{%- else %}{{- m.content }}{%- endif %}" + end + "{%- endfor %}"
        "{%- if add_generation_prompt %}" + first + bot + second + think + "{%- endif %}"
    )  # fmt: skip


HERMES_TOOLS = (
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n'
)
HERMES_CALL = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
THOUGHTS = "{%- set thoughts = '<think>' ~ '</think>' %}"
XML_CALL = (
    "<function={{ f.name }}>\n{%- for k, v in f.arguments.items() %}\n<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>{%- endfor %}\n</function>"
)
LLAMA_HEAD, LLAMA_END = "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"
GLM_CALL = (
    "<tool_call>{{ f.name }}{%- for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{%- endfor %}</tool_call>"
)
ROLES = "<|start_of_role|>{role}<|end_of_role|>"
DEEPSEEK = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n"
    "```<｜tool▁call▁end｜>"
)
PYTHON_CALL = (
    "{{ f.name }}({%- for k, v in f.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}="
    "{{ 'True' if v is true else v | tojson }}{%- endfor %})"
)
GEMMA_VALUE = (
    '{%- macro value(v) %}{%- if v is string %}<|"|>{{ v }}<|"|>{%- elif v is mapping %}{ {%- for k, w in v.items() %}'
    "{{ ',' if not loop.first }}{{ k }}:{{ value(w) }}{%- endfor %}}{%- elif v is iterable %}[{%- for w in v %}"
    "{{ ',' if not loop.first }}{{ value(w) }}{%- endfor %}]{%- else %}{{ v | tojson }}{%- endif %}{%- endmacro %}"
)

TEMPLATES: dict[str, Sample] = {
    "Qwen 2.5": Sample(chatml(HERMES_TOOLS, HERMES_CALL), "hermes", end="<|im_end|>\n"),
    "Hermes 3": Sample(chatml("You are a function calling AI model. " + HERMES_TOOLS, HERMES_CALL), "hermes"),
    "Qwen 3": Sample(THOUGHTS + chatml(HERMES_TOOLS, HERMES_CALL), "hermes", end="<|im_end|>\n"),
    "SmolLM 3": Sample(THOUGHTS + chatml("### Tools\n" + HERMES_TOOLS, HERMES_CALL), "hermes"),
    "Qwen 3 Coder": Sample(
        chatml(
            "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n",
            f"<tool_call>\n{XML_CALL}\n</tool_call>",
        ),
        "qwen3_coder",
        end="<|im_end|>\n",
    ),
    "Qwen 3.5": Sample(
        THOUGHTS
        + chatml(
            "<tool_call>\n<function=f>\n<parameter=p>\n", f"<tool_call>\n{XML_CALL}\n</tool_call>", think="<think>\n"
        ),
        "qwen3_coder",
    ),
    "Nemotron 3": Sample(
        THOUGHTS + chatml("<tool_call>\n<function=f>\n<parameter=p>\n", f"<tool_call>\n{XML_CALL}\n</tool_call>"),
        "qwen3_coder",
    ),
    "Seed-OSS": Sample(
        turns(
            "<seed:bos>{role}\n",
            "<seed:eos>",
            "<seed:tool_call>\n<function=example_function_name>\n<parameter=p>value</parameter>\n</function>",
            f"<seed:tool_call>\n{XML_CALL}\n</seed:tool_call>",
        )
        + "{# <seed:think> </seed:think> #}",
        "seed_oss",
        "seed_oss",
        end="<seed:eos>",
    ),
    "MiniMax M2": Sample(
        THOUGHTS
        + turns(
            "]~b]{role}\n",
            "[e~[\n",
            '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>',
            '<invoke name="{{ f.name }}">\n{%- for k, v in f.arguments.items() %}<parameter name="{{ k }}">'
            "{{ v if v is string else v | tojson }}</parameter>\n{%- endfor %}</invoke>",
            think="<think>\n",
            bot="ai",
            around=("\n<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        ),
        "minimax_m2",
        "minimax_m2",
        end="[e~[\n",
    ),
    "GLM 4.5": Sample(
        THOUGHTS
        + turns(
            "<|{role}|>\n",
            "",
            "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>",
            GLM_CALL,
        ),
        "glm45",
    ),
    "GLM 4.7": Sample(
        THOUGHTS + turns("<|{role}|>", "", "<tool_call>{function-name}<arg_key><arg_value>", GLM_CALL, think="<think>"),
        "glm45",
    ),
    "Kimi K2": Sample(
        turns(
            "<|im_{role}|>{role}<|im_middle|>".replace("<|im_{role}|>", "<|im_bot|>"),
            "<|im_end|>",
            "tool_declare",
            "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
            "{{ f.arguments | tojson }}<|tool_call_end|>",
            between="",
            around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        "kimi_k2",
        end="<|im_end|>",
    ),
    "DeepSeek V3": Sample(
        turns(
            "<｜{role}｜>",
            "<｜end▁of▁sentence｜>",
            "",
            DEEPSEEK,
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        "deepseek_v3",
        end="<｜end▁of▁sentence｜>",
    ),
    "DeepSeek R1": Sample(
        THOUGHTS
        + turns(
            "<｜{role}｜>",
            "<｜end▁of▁sentence｜>",
            "",
            DEEPSEEK,
            think="<think>\n",
            around=("<｜tool▁calls▁begin｜>", ""),
        ),
        "deepseek_v3",
    ),
    "DeepSeek V3.1": Sample(
        THOUGHTS
        + turns(
            "<｜{role}｜>",
            "<｜end▁of▁sentence｜>",
            "",
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
            between="",
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        "deepseek_v3",
        end="<｜end▁of▁sentence｜>",
    ),
    "Mistral 7B v0.3": Sample(
        "{%- for m in messages %}{%- if m.role == 'user' %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
        "[INST] {{ m.content }}[/INST]{%- elif m.tool_calls %}[TOOL_CALLS] [{%- for c in m.tool_calls %}"
        "{{ ', ' if not loop.first }}{{ c.function | tojson }}{%- endfor %}]</s>{%- else %} {{ m.content }}</s>"
        "{%- endif %}{%- endfor %}",
        "mistral",
        end="</s>",
    ),
    "Mistral Small 3.2": Sample(
        "{%- for m in messages %}{%- if m.role == 'user' %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
        "[INST]{{ m.content }}[/INST]{%- elif m.tool_calls %}{%- for c in m.tool_calls %}[TOOL_CALLS]"
        "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{%- endfor %}</s>{%- endif %}{%- endfor %}",
        "mistral",
        end="</s>",
    ),
    "Magistral": Sample(
        "[SYSTEM_PROMPT][THINK]Your thoughts[/THINK]Here[/SYSTEM_PROMPT]{%- for m in messages %}"
        "{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{%- elif m.tool_calls %}{%- for c in m.tool_calls %}"
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{%- endfor %}</s>{%- endif %}"
        "{%- endfor %}",
        "mistral",
        "mistral",
        end="</s>",
    ),
    "Llama 3.1": Sample(
        turns(
            LLAMA_HEAD,
            LLAMA_END,
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        ),
        None,
        end=LLAMA_END,
        reads="llama3_json",
    ),
    "Llama 3.2 in Python": Sample(
        turns(
            LLAMA_HEAD,
            LLAMA_END,
            "[func_name1(params_name1=params_value1)]",
            PYTHON_CALL,
            between=", ",
            around=("[", "]"),
        ),
        None,
        end=LLAMA_END,
        reads="pythonic",
    ),
    "Llama 4": Sample(
        turns(
            "<|header_start|>{role}<|header_end|>\n\n",
            "<|eot|>",
            "[func_name1(params_name1=params_value1)]",
            PYTHON_CALL,
            between=", ",
            around=("<|python_start|>[", "]<|python_end|>"),
        ),
        None,
        end="<|eot|>",
        reads="llama4_pythonic",
    ),
    "Phi-4-mini": Sample(
        "{%- for m in messages %}{%- if m.role == 'system' and m.tools %}<|system|>{{ m.content }}<|tool|>{{ m.tools }}"
        "<|/tool|><|end|>{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{%- endif %}",
        "phi4_mini_json",
    ),
    "Phi-4": Sample(
        "{%- for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{%- endfor %}", None
    ),
    "Granite 3": Sample(
        turns(
            ROLES,
            "<|end_of_text|>\n",
            "When a tool is required, respond with <|tool_call|> followed by a JSON list of tools used.",
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
            between=", ",
            around=("<|tool_call|>[", "]"),
        ),
        "granite",
        end="<|end_of_text|>\n",
    ),
    "Granite 4": Sample(
        turns(ROLES, "<|end_of_text|>\n", HERMES_TOOLS, HERMES_CALL), "granite4", end="<|end_of_text|>\n"
    ),
    "LFM 2": Sample(
        chatml(
            "List of tools: <|tool_list_start|><|tool_list_end|>",
            PYTHON_CALL,
            between=", ",
        )
        .replace("{{- m.content or '' }}", "<|tool_call_start|>[")
        .replace("{%- endfor %}{%- else %}", "{%- endfor %}]<|tool_call_end|>{%- else %}"),
        "lfm2",
        end="<|im_end|>\n",
    ),
    "OLMo 3": Sample(
        chatml("<functions></functions> Output within <function_calls></function_calls> XML tags", PYTHON_CALL)
        .replace("{{- m.content or '' }}", "<function_calls>")
        .replace("{%- endfor %}{%- else %}", "{%- endfor %}</function_calls>{%- else %}"),
        "olmo3",
        end="<|im_end|>\n",
    ),
    "ERNIE 4.5 thinking": Sample(
        THOUGHTS
        + chatml(HERMES_TOOLS, HERMES_CALL, think="<think>\n").replace(
            "{{- m.content }}", "<response>\n{{ m.content }}\n</response>"
        ),
        "ernie45",
        "ernie45",
    ),
    "ERNIE 4.5": Sample("{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{%- endfor %}", None),
    "Hunyuan A13B": Sample(
        THOUGHTS
        + turns(
            "<|{role}|>",
            "<|eos|>",
            "",
            '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
            between=", ",
            around=("<tool_calls>[", "]</tool_calls>"),
        ).replace("{{- m.content }}", "<answer>\n{{ m.content }}\n</answer>"),
        "hunyuan_a13b",
        "hunyuan_a13b",
        end="<|eos|>",
    ),
    "Command A": Sample(
        turns(
            "<|START_OF_TURN_TOKEN|><|{role}|>",
            "<|END_OF_TURN_TOKEN|>",
            "",
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
            '"parameters": {{ f.arguments | tojson }}}',
            between=",\n",
            around=("<|START_ACTION|>[\n", "\n]<|END_ACTION|>"),
        ).replace("{{- m.content }}", "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"),
        "cohere_command",
        "cohere_command",
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "Apertus": Sample(
        turns(
            "<|{role}_start|>",
            "<|assistant_end|>",
            "",
            '{"{{ f.name }}": {{ f.arguments | tojson }}}',
            between=", ",
            around=("<|tools_prefix|>[", "]<|tools_suffix|>"),
        )
        + "{# <|inner_prefix|> <|inner_suffix|> #}",
        "apertus",
        "apertus",
        end="<|assistant_end|>",
    ),
    "Gemma 4": Sample(
        GEMMA_VALUE
        + turns(
            "<|turn>{role}\n",
            "<turn|>\n",
            "<|tool>declaration:<tool|>",
            "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>",
            between="",
            bot="model",
        )
        + "{# <|channel>thought <channel|> #}",
        "gemma4",
        "gemma4",
        end="<turn|>\n",
    ),
    "Gemma 3": Sample(
        "{%- for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{%- endfor %}",
        None,
    ),
    "gpt-oss": Sample(
        "{%- for m in messages %}{%- if m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions."
        "{{ m.tool_calls[0].function.name }} <|constrain|>json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}",
        "openai",
        "openai_gptoss",
    ),
    "InternLM 3": Sample(
        chatml(
            "",
            '<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
            "<|action_end|>",
        ),
        "internlm",
        end="<|im_end|>\n",
    ),
    "StarCoder, BLOOM and others": Sample("{%- for m in messages %}{{ m.content }}\n{%- endfor %}", None),
}
"""Templates by the models they are like."""
