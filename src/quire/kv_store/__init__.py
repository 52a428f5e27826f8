"""KV blocks outside of the engine's memory: records, the files that hold them, and what they were computed with.

Shared by the engine (which blocks there are), the worker (their bytes) and `quire kv-store`. Nothing here knows a
request, a scheduler or torch: keys and values are memoryviews.
"""
