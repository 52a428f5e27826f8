"""The KV cache as the scheduler sees it: block tables, prefix reuse, and how large the cache is.

`manager` is the way in, `block_pool` owns the blocks, `group_manager` knows full attention and sliding windows,
`hashing` and `prefix_query` decide what is equal, `sizing` turns memory into blocks. No keys or values, no torch.
"""
