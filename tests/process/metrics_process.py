"""An API process as the metrics see it: keeps books as its standard input says, and answers scrapes on its output.

A line is the name of an operation of `Books` and how often, or "scrape"; the answer to each is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

from quire.errors import ServerError
from quire.frontend.metrics.hub_client import HubClient
from tests.unit.frontend.metrics.books import Books


async def main(path: str, name: str) -> None:
    """Until the input ends; then it reports for the last time."""
    books = Books(name)
    client = HubClient(path, name, books.take, report_interval_s=3600.0)
    await client.connect()
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).decode():
        operation, *count = line.split()
        answer = ""
        if operation == "scrape":
            try:
                answer = books.metrics.write(await client.gather())
            except ServerError as e:
                answer = f"error: {e}"
        else:
            for _ in range(int(count[0])):
                getattr(books, operation)()
        print(json.dumps(answer), flush=True)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
