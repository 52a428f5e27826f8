"""Recordings: what reached a scheduler and what it decided, on disk. `quire.replay` reads them."""
