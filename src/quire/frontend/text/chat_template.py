"""Chat templates: messages to prompt text, through Jinja, exactly as transformers renders them.

The environment has transformers' options (`trim_blocks`, `lstrip_blocks`, loop controls, the `generation` tag, `tojson`
that escapes nothing, `raise_exception`, `strftime_now`) inside Jinja's immutable sandbox. Templates come from model
repositories: their size, their work (`template_sandbox.py`) and what they write are bounded, and whatever they raise is
a ValidationError.

Knows nothing of tokenizers: text in, text out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from quire.errors import ValidationError
from quire.frontend.text.template_sandbox import BoundedEnvironment, budget, size_of

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 26
ContentFormat = Literal["auto", "string", "openai"]
Message = Mapping[str, Any]
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where a message to be continued ends; its space shows whether the template strips messages."""
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Text-bearing content parts of the OpenAI formats: type -> field."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training. Here: its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.CallBlock:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_render_body"), [], [], body)
        block.set_lineno(lineno)
        return block

    def _render_body(self, caller: Any) -> Any:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_environment() -> BoundedEnvironment:
    env = BoundedEnvironment(
        filters={"tojson": _tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


_ENVIRONMENT = _make_environment()


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ValidationError(
            f"the chat template has {len(template)} characters; at most {MAX_TEMPLATE_CHARS} are accepted",
            param="chat_template",
        )
    try:
        with budget(len(template)):  # constant expressions are computed here
            return _ENVIRONMENT.from_string(template)
    except jinja2.TemplateSyntaxError as e:
        raise ValidationError(
            f"the chat template does not parse (line {e.lineno}): {e.message}", param="chat_template"
        ) from None
    except (RecursionError, MemoryError, SyntaxError, jinja2.TemplateError) as e:
        raise ValidationError(
            f"the chat template cannot be compiled ({type(e).__name__})", param="chat_template"
        ) from None


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    content_format: ContentFormat = "auto",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the prompt text of a conversation.

    `variables` are further names the template may use: special tokens and the caller's chat_template_kwargs. With
    `continue_final_message` the text ends in the middle of the last message. Raises ValidationError for a malformed
    conversation and for whatever the template raises.
    """
    if continue_final_message and add_generation_prompt:
        raise ValidationError(
            "continue_final_message and add_generation_prompt exclude each other: the last message is either continued "
            "or answered",
            param="continue_final_message",
        )
    compiled = _compile(template)
    conversation = _normalize(messages, template, content_format)
    if tools and _reads_tools_of_system(template):
        _put_tools_into_system(conversation, tools)
    continued = _mark_continuation(conversation) if continue_final_message else None
    context: dict[str, Any] = {
        **(variables or {}),
        "messages": conversation,
        "tools": list(tools) if tools is not None else None,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    text = _render(compiled, context)
    return text if continued is None else _cut_continuation(text, continued)


def _render(template: jinja2.Template, context: dict[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    try:
        with budget(size_of(context)):
            for part in template.generate(context):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateError(f"it wrote more than {MAX_RENDERED_CHARS} characters")
    except jinja2.TemplateError as e:
        raise ValidationError(f"the chat template refused the conversation: {e.message}", param="messages") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as e:
        raise ValidationError(
            f"the chat template cannot render this conversation ({type(e).__name__}: {e})", param="messages"
        ) from e
    return "".join(parts)


# -- messages ---------------------------------------------------------------------------------------------------------


def _normalize(messages: Sequence[Message], template: str, content_format: ContentFormat) -> list[dict[str, Any]]:
    """Returns messages as templates expect them: no null fields, text parts in the template's format, tool arguments
    parsed."""
    if not messages:
        raise ValidationError("messages is empty; a conversation needs at least one message", param="messages")
    if content_format not in ("auto", "string", "openai"):
        raise ValidationError(
            f"chat_template_content_format={content_format!r} is not one of auto, string, openai",
            param="chat_template_content_format",
            value=content_format,
        )
    wanted = detect_content_format(template) if content_format == "auto" else content_format
    wrap = wanted == "openai" and not _tests_for_string(template)
    return [_normalize_message(i, message, wanted, wrap) for i, message in enumerate(messages)]


def _normalize_message(index: int, message: Message, wanted: str, wrap: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValidationError(
            f"messages[{index}] must be an object with a role, got {type(message).__name__}", param="messages"
        )
    result = {k: v for k, v in message.items() if v is not None}
    if "content" in result:
        result["content"] = _content(index, result["content"], wanted, wrap)
    if "tool_calls" in result:
        if not isinstance(result["tool_calls"], Sequence):
            raise ValidationError(f"messages[{index}].tool_calls must be a list of calls", param="messages")
        result["tool_calls"] = [_parse_arguments(call) for call in result["tool_calls"]]
    if "reasoning" in result:  # templates know its former name
        result.setdefault("reasoning_content", result["reasoning"])
    if "reasoning_content" in result and not (result.get("content") and result.get("tool_calls")):
        result.setdefault("thinking", result["reasoning_content"])  # gpt-oss; with both others it is refused there
    return result


def _content(index: int, content: Any, wanted: str, wrap: bool) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wrap else content
    if not isinstance(content, Sequence):
        raise ValidationError(
            f"messages[{index}].content must be text or a list of parts, got {type(content).__name__}", param="messages"
        )
    texts = [_part_text(index, part) for part in content]
    return "\n".join(texts) if wanted == "string" else [{"type": "text", "text": text} for text in texts]


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    field = _TEXT_PARTS.get(kind)
    if field is None or not isinstance(part.get(field), str):
        raise ValidationError(
            f"messages[{index}].content holds a part of type {kind!r}; this model takes text parts only",
            param="messages",
            value=kind,
        )
    return str(part[field])


def _parse_arguments(call: Any) -> Any:
    """Returns a call's arguments as an object: OpenAI clients send JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, brackets of thousands of levels
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _put_tools_into_system(conversation: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    """Puts the functions into the system message, in place, as JSON text; a message that has some keeps them."""
    if conversation[0].get("role") != "system":
        conversation.insert(0, {"role": "system", "content": ""})
    functions = [tool.get("function", tool) for tool in tools]
    conversation[0].setdefault("tools", json.dumps(functions, ensure_ascii=False))


def _mark_continuation(conversation: list[dict[str, Any]]) -> str:
    """Marks the end of the last message (in place). Returns the text to be continued."""
    last = conversation[-1] = copy.deepcopy(conversation[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
        return content
    for part in reversed(content or ()):
        text = part["text"]
        part["text"] = text + _CONTINUE_TAG
        return str(text)
    raise ValidationError("continue_final_message: the last message has no text to continue", param="messages")


def _cut_continuation(text: str, continued: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if continued.strip() not in text or tag not in text:
        raise ValidationError(
            "continue_final_message: the chat template left the last message out, so it cannot be continued",
            param="continue_final_message",
        )
    end = text.rindex(tag)
    kept = text[:end]
    return kept if text.startswith(_CONTINUE_TAG, end) else kept.rstrip()


# -- what a template expects ------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def detect_content_format(template: str) -> Literal["string", "openai"]:
    """Returns "openai" if the template loops over a message's content (a list of parts), else "string"."""
    tree = _parse(template)
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
            aliases.add(assign.target.name)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, aliases) for loop in loops) else "string"


@lru_cache(maxsize=64)
def _tests_for_string(template: str) -> bool:
    return any(test.name == "string" for test in _parse(template).find_all(nodes.Test))


@lru_cache(maxsize=64)
def _reads_tools_of_system(template: str) -> bool:
    """Returns whether a template takes the tools from a message's field (Phi-4-mini) and not from the conversation."""
    if "tools" not in template:
        return False
    tree = _parse(template)
    if any(name.name == "tools" for name in tree.find_all(nodes.Name)):
        return False
    keys = (item.arg for item in tree.find_all(nodes.Getitem))
    return any(node.attr == "tools" for node in tree.find_all(nodes.Getattr)) or any(
        isinstance(key, nodes.Const) and key.value == "tools" for key in keys
    )


def _parse(template: str) -> nodes.Template:
    _compile(template)  # its errors are the readable ones
    return _ENVIRONMENT.parse(template)


def _is_content(node: nodes.Node, aliases: set[str]) -> bool:
    """Does `node` read a message's content: `message.content`, `message['content']` or a name for it?"""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
