"""gpt-oss from a checkpoint to a client: MXFP4 experts, the harmony template, its channels and calls.

Random weights say nothing: each step's logits, once computed, are edited to choose the next token of a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer

from quire.testing.tiny_models import make_tiny_checkpoint
from quire.worker import step_sampler
from quire.worker.sample.sampler import sample
from tests.unit.frontend.openai.serving import Server, check, client_of
from tests.unit.worker.quantization.writers import mxfp4_checkpoint

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = """<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions {
{%- for tool in tools %} type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}); {% endfor -%}
}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}
{%- set call = m.tool_calls[0].function %}<|start|>assistant<|channel|>commentary to=functions.{{ call.name }}
{{- ' <|constrain|>json<|message|>' }}{{ call.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)
ANSWER = (
    "<|channel|>analysis<|message|>Seven.<|end|><|start|>assistant<|channel|>final<|message|>It is 7 degrees.<|return|>"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt_oss")
    path, _ = mxfp4_checkpoint(make_tiny_checkpoint(directory / "tiny", "gpt_oss", vocab_size=400), directory)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(path / "tokenizer.json"))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    for name, key, value in (
        ("tokenizer_config.json", "chat_template", TEMPLATE),
        ("tokenizer_config.json", "eos_token", "<|return|>"),
        ("generation_config.json", "eos_token_id", ends),
        ("config.json", "eos_token_id", ends[0]),
    ):
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(content | {key: value}))
    return path


def test_calls_reasoning_and_answers_reach_a_client(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, script = Tokenizer.from_file(str(gpt_oss / "tokenizer.json")), list[int]()

    def follow(logits: torch.Tensor, metadata: Any, output_lens: Any, kernel: Any) -> Any:
        assert logits.isfinite().all()
        for row, length in zip(logits, output_lens, strict=True):
            row[script[length] if length < len(script) else 0] = 1e6
        return sample(logits, metadata, output_lens, kernel)

    monkeypatch.setattr(step_sampler, "sample", follow)

    async def ask(client: openai.AsyncOpenAI, says: str, *more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The whole choice, and what a stream of the same adds up to."""
        script[:] = tokenizer.encode(says, add_special_tokens=False).ids
        request: dict[str, Any] = {"model": "gpt-oss", "messages": [QUESTION, *more], "tools": TOOLS}
        whole = (await client.chat.completions.create(**request)).choices[0]
        found: dict[str, Any] = {"reasoning": "", "content": "", "name": "", "arguments": ""}
        async for chunk in await client.chat.completions.create(stream=True, **request):
            delta = chunk.choices[0].delta
            found["reasoning"] += getattr(delta, "reasoning", None) or ""
            found["content"] += delta.content or ""
            for call in delta.tool_calls or ():
                assert call.function is not None
                found["name"] += call.function.name or ""
                found["arguments"] += call.function.arguments or ""
            found["reason"] = chunk.choices[0].finish_reason
        return whole.model_dump(), found

    async def test(server: Server) -> None:
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=client_of(server.app), max_retries=0
        ) as client:
            whole, streamed = await ask(client, CALL)
            message = whole["message"]
            (call,) = message["tool_calls"]
            assert (message["reasoning"], message["content"], whole["finish_reason"]) == (
                "Look it up.",
                None,
                "tool_calls",
            )
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "weather",
                {"city": "Oslo"},
            )
            assert streamed == {
                "reasoning": "Look it up.",
                "content": "",
                "name": "weather",
                "arguments": call["function"]["arguments"],
                "reason": "tool_calls",
            }
            result = {"role": "tool", "tool_call_id": call["id"], "content": '{"degrees": 7}'}
            whole, streamed = await ask(client, ANSWER, message, result)
            assert (whole["message"]["reasoning"], whole["message"]["content"]) == ("Seven.", "It is 7 degrees.")
            assert whole["message"]["tool_calls"] is None
            assert (streamed["reasoning"], streamed["content"]) == ("Seven.", "It is 7 degrees.")
            assert whole["finish_reason"] == streamed["reason"] == "stop"
            prompt = (await server.answer("/tokenize", messages=[QUESTION, message, result], tools=TOOLS))["tokens"]
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            assert text.endswith(
                '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
                '<|start|>functions to=assistant<|channel|>commentary<|message|>{"degrees": 7}<|end|><|start|>assistant'
            )

    check(test, model=str(gpt_oss), executor=None, engine_flags={"served_model_name": "gpt-oss"}, timeout_s=60)
