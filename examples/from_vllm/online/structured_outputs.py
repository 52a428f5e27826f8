"""Forms of an answer: of vLLM's own fields, and of OpenAI's response_format."""

import argparse
import asyncio
from enum import Enum

from openai import AsyncOpenAI
from pydantic import BaseModel, Field


class Size(str, Enum):
    small = "small"
    large = "large"


class Block(BaseModel):
    name: str = Field(max_length=12)
    tokens: int = Field(ge=1, le=64)
    size: Size


BLOCK = Block.model_json_schema()
CASES = {
    "choice": {"extra_body": {"structured_outputs": {"choice": ["good", "bad"]}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": r"[a-z]{3,8}@[a-z]{3,8}\.com"}}, "stop": ["\n"]},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": 'root ::= "SELECT " ("id" | "name")'}}},
    "json": {"extra_body": {"structured_outputs": {"json": BLOCK}}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "block", "schema": BLOCK}}},
    "object": {"response_format": {"type": "json_object"}},
    "tag": {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": {"enum": ["up", "down"]}, "end": "</f>"}],
            "triggers": ["<f>"],
        }
    },
}


async def ask(client: AsyncOpenAI, model: str, kind: str, form: dict) -> str:
    messages = [{"role": "user", "content": "Describe a small KV block of 16 tokens as JSON."}]
    stream = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=80, temperature=0, stream=True, **form
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return f"{kind}: {Block.model_validate_json(text)!r}" if kind in ("json", "schema") else f"{kind}: {text}"


async def main(base_url: str) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key="EMPTY")
    model = (await client.models.list()).data[0].id
    for line in await asyncio.gather(*(ask(client, model, kind, form) for kind, form in CASES.items())):
        print(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    asyncio.run(main(parser.parse_args().base_url))
