"""OpenAI's own client: what it parses, streams and raises."""

from __future__ import annotations

import os

import openai

URL, KEY = os.environ["QUIRE_URL"], os.environ["QUIRE_API_KEY"]
QUESTION = [{"role": "user", "content": "What is prefix caching?"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)

(model,) = client.models.list().data
assert model.id == client.models.retrieve(model.id).id == "demo"

answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, seed=1)
(choice,) = answer.choices
assert choice.finish_reason == "stop"
assert "KV blocks" in choice.message.content, choice
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

chunks = list(
    client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
assert chunks[0].choices[0].delta.role == "assistant"
assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == choice.message.content
assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
assert chunks[-1].choices == []
assert chunks[-1].usage.total_tokens == answer.usage.total_tokens

logged = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=5, logprobs=True, top_logprobs=3)
content = logged.choices[0].logprobs.content
assert len(content) == 5
assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
assert all(bytes(token.bytes).decode(errors="replace") == token.token for token in content)

several = client.chat.completions.create(model="demo", messages=QUESTION, n=3, temperature=1, max_tokens=8, seed=3)
assert [c.index for c in several.choices] == [0, 1, 2]

completion = client.completions.create(
    model="demo", prompt=["Prefix caching is", "A KV block"], max_tokens=4, logprobs=2, echo=True, temperature=0
)
assert [c.index for c in completion.choices] == [0, 1]
assert completion.choices[0].text.startswith("Prefix caching is")
shown = completion.choices[0].logprobs
assert shown.token_logprobs[0] is None
assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.text_offset) == len(shown.top_logprobs)
assert "".join(shown.tokens) == completion.choices[0].text

stream = client.completions.create(model="demo", prompt="Prefix caching is", max_tokens=6, stream=True, temperature=0)
parts = [c.text for chunk in stream for c in chunk.choices]
assert len(parts) > 1
extra = {"top_k": 1, "min_tokens": 6, "repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True}
same = client.completions.create(model="demo", prompt="Prefix caching is", max_tokens=6, extra_body=extra)
assert "".join(parts) == same.choices[0].text
assert len(same.choices[0].token_ids) == 6

with client.chat.completions.create(model="demo", messages=QUESTION, stream=True) as left:
    next(iter(left))  # and gone

for error, kind, param in (
    ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ({"model": "other"}, openai.NotFoundError, "model"),
    ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, openai.BadRequestError, None),
):
    try:
        client.chat.completions.create(**{"model": "demo", "messages": QUESTION, **error})
    except kind as e:
        assert param is None or e.param == param, (error, e.param)
        assert e.request_id
    else:
        raise AssertionError(f"{error} was taken")
try:
    client.with_options(api_key="wrong").models.list()
except openai.AuthenticationError:
    pass
else:
    raise AssertionError("a wrong key was taken")
print("models, chat, completions, streams, logprobs, n, extra fields, errors")
