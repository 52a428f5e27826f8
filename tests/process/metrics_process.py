"""An API process as the metrics see it: keeps books as its standard input says, and answers scrapes on its output.

Its arguments are the descriptor of its connection to the parent, and its number. A line of input is the name of an
operation of `Books` and how often, or "scrape"; the answer to each is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

from quire.errors import ServerError
from quire.frontend.fleet.metrics import encode_report, gather_from_parent
from quire.frontend.fleet.peer_link import PeerLink
from quire.wire.peers import PeerMessage
from tests.unit.frontend.metrics.books import Books


async def main(descriptor: str, name: str) -> None:
    """Reports until the input ends, and then for the last time."""
    books = Books(name)

    async def handle(call: PeerMessage) -> Any:
        return encode_report(books.take()) if call.method == "report" else None

    link = PeerLink(handle)
    await link.connect(socket.socket(fileno=int(descriptor)))
    reading = asyncio.create_task(link.run())
    await link.call("join")
    await link.call("report", encode_report(books.take()), False)
    await link.call("ready")
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).decode():
        operation, *count = line.split()
        answer = ""
        if operation == "scrape":
            try:
                answer = books.metrics.write(await gather_from_parent(link, 3600.0))
            except ServerError as e:
                answer = f"error: {e}"
        else:
            for _ in range(int(count[0])):
                getattr(books, operation)()
        print(json.dumps(answer), flush=True)
    await link.call("report", encode_report(books.take()), True)
    await link.end()
    await reading


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
