"""A server that runs elsewhere, seen from the command line: plain asyncio and HTTP/1.1, no torch and no engine."""
