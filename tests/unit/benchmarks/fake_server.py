"""A server for tests: completions of any length at once. Arguments: how to misbehave, and the port."""

from __future__ import annotations

import asyncio
import json
import sys


def events(num_tokens: int) -> bytes:
    chunks = [{"choices": [{"text": "x", "finish_reason": None}]}] * num_tokens
    usage = {"choices": [], "usage": {"completion_tokens": num_tokens}}
    return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in [*chunks, usage]) + b"data: [DONE]\n\n"


async def main(mode: str, port: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        body = json.loads(await reader.readexactly(size))
        status = b"400 Bad Request" if mode == "refuse" else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n" + events(body["max_tokens"]))
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", port, limit=1 << 20) as server:
        await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "end":
        sys.exit("out of luck")
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
