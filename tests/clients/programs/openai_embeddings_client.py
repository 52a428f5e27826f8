"""OpenAI's own client on a pooling model: embeddings of texts and of token ids, as base64 and as numbers."""

from __future__ import annotations

import os

import openai

URL, KEY = os.environ["QUIRE_URL"], os.environ["QUIRE_API_KEY"]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
TEXTS = ["What is prefix caching?", "A KV block", "What is prefix caching?"]


def near(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) < 1e-5 for x, y in zip(a, b, strict=True))


answer = client.embeddings.create(model="demo", input=TEXTS)  # as base64, which the client decodes
assert [one.index for one in answer.data] == [0, 1, 2]
vectors = [one.embedding for one in answer.data]
assert all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in vectors)
assert near(vectors[0], vectors[2])
assert not near(vectors[0], vectors[1])
assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3

numbers = client.embeddings.create(model="demo", input=TEXTS[0], encoding_format="float")
assert near(numbers.data[0].embedding, vectors[0])
ids = client.post(f"{URL}/tokenize", body={"prompt": TEXTS[0]}, cast_to=dict)["tokens"]
for given in (ids, [ids, ids[:1]]):
    of_ids = client.embeddings.create(model="demo", input=given)
    assert near(of_ids.data[0].embedding, vectors[0])

for refused, kind in (
    ({"input": "x", "dimensions": 3}, openai.BadRequestError),
    ({"input": []}, openai.BadRequestError),
    ({"input": "x", "model": "other"}, openai.NotFoundError),
):
    try:
        client.embeddings.create(**{"model": "demo", **refused})
    except kind:
        pass
    else:
        raise AssertionError(f"{refused} was not refused")
try:
    client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])
except openai.NotFoundError:
    pass
else:
    raise AssertionError("a pooling model answered a conversation")
print("embeddings are right")
