"""Answers that a test writes, in place of the model's: at once, or piece by piece as the test says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

ANSWERS = "**/v1/chat/completions"

FEED = """
const real = window.fetch;
window.fetch = (url, options) => {
    if (!String(url).endsWith("/v1/chat/completions")) return real(url, options);
    const encoder = new TextEncoder();
    return Promise.resolve(new Response(new ReadableStream({ start(stream) {
        const send = (data) => stream.enqueue(encoder.encode(`data: ${data}\\n\\n`));
        window.feed = (delta) => send(JSON.stringify({ id: "x", choices: [{ index: 0, delta }] }));
        window.finish = () => { send("[DONE]"); stream.close(); };
        options.signal.addEventListener("abort", () => stream.error(new DOMException("stopped", "AbortError")));
    } })));
};
"""
"""Makes the page read answers from `feed(delta)` until `finish()`."""


def feed(page: Any, text: str, *, size: int = 3) -> None:
    """Writes text in pieces, each drawn before the next one comes."""
    page.wait_for_function("() => window.feed")
    page.evaluate(
        """async ([text, size]) => {
            for (let i = 0; i < text.length; i += size) {
                window.feed({ content: text.slice(i, i + size) });
                await new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)));
            }
        }""",
        [text, size],
    )


def stream(text: str, *, reasoning: str = "", calls: Iterable[dict[str, Any]] = (), is_whole: bool = True) -> str:
    """Returns the body of a streamed answer; one that is not whole breaks off."""
    deltas: list[dict[str, Any]] = [{"reasoning": reasoning}] if reasoning else []
    deltas += [{"content": text[i : i + 5]} for i in range(0, len(text), 5)]
    deltas += [{"tool_calls": list(calls)}] if calls else []
    chunks: list[dict[str, Any]] = [{"id": "x", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if is_whole:
        usage = {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}
        chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"id": "x", "choices": [], "usage": usage})
    events = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if is_whole else [])
    return "".join(f"data: {event}\n\n" for event in events)


def answer_with(page: Any, *bodies: str) -> list[list[dict[str, Any]]]:
    """Makes the page get these streams, the last one again and again. Returns the messages of every request."""
    left, sent = list(bodies), []

    def fulfil(route: Any) -> None:
        sent.append(json.loads(route.request.post_data)["messages"])
        body = left.pop(0) if len(left) > 1 else left[0]
        route.fulfill(content_type="text/event-stream", body=body)

    page.unroute(ANSWERS)
    page.route(ANSWERS, fulfil)
    return sent
