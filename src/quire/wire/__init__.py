"""What crosses a process boundary, and nothing else: plain structs, no behaviour beyond their own fields.

`engine_core` is the frontend's side of the engine, `execution` the worker's side, `stats` what both report,
`kv_cache` the layout of the KV cache the engine and the worker agree on at start-up.
"""
