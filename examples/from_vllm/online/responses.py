"""The Responses API: an answer, its follow-up, a stream of events."""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
client = OpenAI(api_key="EMPTY", base_url=parser.parse_args().base_url)
model = client.models.list().data[0].id

first = client.responses.create(model=model, input="What is prefix caching?", temperature=0, max_output_tokens=48)
print("first:", first.output_text)
second = client.responses.create(
    model=model, input="Why does it matter?", previous_response_id=first.id, temperature=0, max_output_tokens=48
)
print("second:", second.output_text)
with client.responses.stream(model=model, input="What is a KV block?", temperature=0, max_output_tokens=48) as stream:
    kinds = [event.type for event in stream]
print("events:", kinds[0], "...", kinds[-1])
