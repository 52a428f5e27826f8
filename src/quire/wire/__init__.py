"""Structs and sockets that cross a process boundary: plain data, without behaviour beyond their own fields.

`engine_core` is between frontend and engine, `execution` between engine and worker, `stats` what both report,
`kv_cache` the layout of the KV cache that engine and worker agree on at start-up.
"""
