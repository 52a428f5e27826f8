"""A script as users of vLLM have them: OpenAI's client and vLLM's further fields. Only the URL is Quire's."""

from __future__ import annotations

import json
import math
import os

import openai
import requests

BASE_URL = os.environ["QUIRE_URL"]
API_KEY = os.environ["QUIRE_API_KEY"]
MESSAGES = [{"role": "user", "content": "What is prefix caching?"}]
PROMPT = "Prefix caching is"

http = requests.Session()
http.headers["Authorization"] = f"Bearer {API_KEY}"
client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, timeout=60)

# Is it there, and what does it serve?
assert http.get(f"{BASE_URL}/health").status_code == 200
assert http.get(f"{BASE_URL}/version").json()["version"]
assert http.get(f"{BASE_URL}/load").json() == {"server_load": 0}
model = client.models.list().data[0]
name, max_model_len = model.id, model.max_model_len
assert max_model_len > 0

# Every further field of vLLM's requests, at its default: what scripts send that dump a whole request.
SHARED = {
    "use_beam_search": False, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "watermarking": None,
    "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
    "truncation_side": None, "prompt_logprobs": None, "logprob_token_ids": None, "allowed_token_ids": None,
    "bad_words": [], "structured_outputs": None, "response_format": None, "priority": 0, "session_id": None,
    "return_tokens_as_token_ids": None, "return_token_ids": None, "routed_experts_prompt_start": 0,
    "return_token_offsets": False, "mm_payload": "tensors", "return_mm_kwargs": None, "cache_salt": None,
    "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None,
    "thinking_token_budget": None, "stream_interval": None, "a_field_of_tomorrow": 1,
}  # fmt: skip
CHAT = {
    **SHARED, "reasoning_effort": None, "include_reasoning": True, "echo": False, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "documents": None, "chat_template": None,
    "chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None, "return_prompt_text": None,
}  # fmt: skip
plain = client.chat.completions.create(model=name, messages=MESSAGES, temperature=0, max_tokens=20)
spelt = client.chat.completions.create(model=name, messages=MESSAGES, temperature=0, max_tokens=20, extra_body=CHAT)
assert spelt.choices[0].message.content == plain.choices[0].message.content
plain_text = client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=8)
extra = {**SHARED, "add_special_tokens": True, "prompt_embeds": None}
spelt_text = client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=8, extra_body=extra)
assert spelt_text.choices[0].text == plain_text.choices[0].text

# Sampling.
body = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 12, "ignore_eos": True}
sampled = client.chat.completions.create(
    model=name, messages=MESSAGES, temperature=0.7, top_p=0.8, seed=7, max_tokens=12, extra_body=body
)
assert sampled.usage.completion_tokens == 12
again = client.chat.completions.create(
    model=name, messages=MESSAGES, temperature=0.7, top_p=0.8, seed=7, max_tokens=12, extra_body=body
)
assert again.choices[0].message.content == sampled.choices[0].message.content
(banned,) = {plain_text.choices[0].text.split()[0]}
without = client.completions.create(
    model=name, prompt=PROMPT, temperature=0, max_tokens=8, extra_body={"bad_words": [banned]}
)
assert banned not in without.choices[0].text

# Tokens in, tokens out, and their log-probabilities.
ids = http.post(f"{BASE_URL}/tokenize", json={"model": name, "prompt": PROMPT}).json()
assert (ids["count"], ids["max_model_len"]) == (len(ids["tokens"]), max_model_len)
text = http.post(f"{BASE_URL}/detokenize", json={"model": name, "tokens": ids["tokens"]}).json()["prompt"]
assert PROMPT in text
from_ids = client.completions.create(
    model=name, prompt=ids["tokens"], temperature=0, max_tokens=8, logprobs=1,
    extra_body={"return_token_ids": True, "prompt_logprobs": 1, "return_tokens_as_token_ids": True},
)  # fmt: skip
(choice,) = from_ids.choices
assert choice.text == plain_text.choices[0].text
assert choice.prompt_token_ids == ids["tokens"]
assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
assert choice.prompt_logprobs[0] is None
for token, logprobs in zip(ids["tokens"][1:], choice.prompt_logprobs[1:], strict=True):
    assert math.isfinite(logprobs[str(token)]["logprob"])
only = client.completions.create(
    model=name, prompt=PROMPT, max_tokens=4, extra_body={"allowed_token_ids": ids["tokens"], "return_token_ids": True}
)
assert set(only.choices[0].token_ids) <= set(ids["tokens"])
stopped = client.completions.create(
    model=name, prompt=PROMPT, temperature=0, max_tokens=8, extra_body={"stop_token_ids": [choice.token_ids[2]]}
)
assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", choice.token_ids[2])

# The form of an answer.
SCHEMA = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
for structured, holds in (
    ({"choice": ["positive", "negative"]}, lambda text: text in ("positive", "negative")),
    ({"regex": r"\d{3}-\d{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
    ({"json": SCHEMA, "disable_additional_properties": True}, json.loads),
    ({"grammar": 'root ::= "SELECT " ("a" | "b")'}, lambda text: text in ("SELECT a", "SELECT b")),
):
    formed = client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=60, extra_body={"structured_outputs": structured}
    )
    assert holds(formed.choices[0].message.content), formed.choices[0]

# Chat templates, an answer that is begun, and isolation of the cache.
begun = [*MESSAGES, {"role": "assistant", "content": "Prefix caching"}]
body = {
    "add_generation_prompt": False,
    "continue_final_message": True,
    "echo": True,
    "cache_salt": "mine",
    "priority": 1,
}
body |= {"chat_template_kwargs": {"enable_thinking": False}, "request_id": "my-request", "truncate_prompt_tokens": -1}
goes_on = client.chat.completions.create(model=name, messages=begun, temperature=0, max_tokens=8, extra_body=body)
assert goes_on.choices[0].message.content.startswith("Prefix caching")
assert "my-request" in goes_on.id

# Streams.
chunks = list(
    client.chat.completions.create(
        model=name, messages=MESSAGES, temperature=0, max_tokens=20, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}, extra_body={"return_token_ids": True},
    )
)  # fmt: skip
assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == plain.choices[0].message.content
assert all(chunk.usage is not None for chunk in chunks)
assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens

# Errors, and what Prometheus sees.
try:
    client.completions.create(model="other", prompt=PROMPT)
except openai.NotFoundError as e:
    assert e.body["code"] == 404
else:
    raise AssertionError("a model that is not served was found")
try:
    client.completions.create(model=name, prompt=[1] * (max_model_len + 1))
except openai.BadRequestError as e:
    assert str(max_model_len) in e.message
else:
    raise AssertionError("a prompt that is too long was taken")
metrics = http.get(f"{BASE_URL}/metrics").text
for series in ("vllm:num_requests_running{", "vllm:time_to_first_token_seconds_bucket{", "vllm:prompt_tokens_total{"):
    assert series in metrics
print("everything as it was")
