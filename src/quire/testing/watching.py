"""Look at something again and again while a test does something to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def watching(watch: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `watch` while the block runs, and no longer. What it raises is raised at the block's end."""
    watcher = asyncio.create_task(watch)
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait({watcher})
        if not watcher.cancelled():
            watcher.result()
