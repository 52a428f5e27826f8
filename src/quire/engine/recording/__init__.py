"""Recordings: what came to a scheduler and what it decided, on disk; and the same again, without a model."""
