"""instructor: objects of a pydantic model, through a named tool, through a JSON schema, and while they grow."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{os.environ['QUIRE_URL']}/v1", api_key=os.environ["QUIRE_API_KEY"], timeout=60)
QUESTION = [{"role": "user", "content": "Ann is 33 and lives in Oslo. Who is she?"}]


class Address(BaseModel):
    city: Literal["Oslo", "Bergen"]
    floor: int = Field(ge=0, le=9)


class Person(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    age: int = Field(ge=0, le=150)
    address: Address
    tags: list[Literal["a", "b"]] = Field(max_length=2)


def ask(mode: instructor.Mode) -> Person:
    made = instructor.from_openai(client, mode=mode)
    person = made.chat.completions.create(
        model="demo", response_model=Person, messages=QUESTION, temperature=0, max_tokens=400, max_retries=0
    )
    assert isinstance(person, Person), person
    return person


modes = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT)
for mode in modes:
    print(mode, ask(mode))

made = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
growing = list(
    made.chat.completions.create_partial(
        model="demo", response_model=Person, messages=QUESTION, temperature=0, max_tokens=400
    )
)
assert len(growing) > 1
assert growing[-1].address.city in ("Oslo", "Bergen")
Person.model_validate(growing[-1].model_dump())  # complete in the end

person, raw = made.chat.completions.create_with_completion(
    model="demo", response_model=Person, messages=QUESTION, temperature=0, max_tokens=400
)
assert raw.usage.completion_tokens > 5

try:  # a refusal is not tried again with the model's own words
    made.chat.completions.create(model="demo", response_model=Person, messages=QUESTION, temperature=9, max_retries=0)
except Exception as e:
    assert "temperature" in str(e), e
else:
    raise AssertionError("a temperature of 9 was taken")
print("tools, strict tools, JSON schema, partial, usage, error")
