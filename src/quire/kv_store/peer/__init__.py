"""KV blocks over the network: a server of records, and its client (`wire/kv_peers.py` has the protocol)."""
