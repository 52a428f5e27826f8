"""The KV cache as the scheduler sees it: block tables, prefix reuse, and the size of the cache.

`manager` is the interface, `block_pool` owns the blocks, `group_manager` knows full attention and sliding windows and
looks up prefixes, `hashing` decides which prefixes are equal, `sizing` turns memory into blocks. No keys or values, no
torch.
"""
