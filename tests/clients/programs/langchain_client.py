"""langchain-openai's chat model."""

from __future__ import annotations

import os

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

PLACE = {"base_url": f"{os.environ['QUIRE_URL']}/v1", "api_key": os.environ["QUIRE_API_KEY"], "model": "demo"}
chat = ChatOpenAI(temperature=0, stream_usage=True, **PLACE)
answer = chat.invoke([HumanMessage("What is prefix caching?")])
assert "KV blocks" in answer.content, answer
assert answer.usage_metadata["output_tokens"] > 5
chunks = list(chat.stream("What is prefix caching?"))
assert "".join(chunk.content for chunk in chunks) == answer.content
assert any(chunk.usage_metadata for chunk in chunks)
talk = [HumanMessage("What is prefix caching?"), AIMessage(answer.content), HumanMessage("Why does that matter?")]
assert chat.invoke(talk).content
assert len(chat.batch(["Hi", "What is a KV block?"])) == 2
assert OpenAI(max_tokens=5, temperature=0, **PLACE).invoke("Prefix caching is")
print("invoke, stream with usage, talk, batch, completion")
