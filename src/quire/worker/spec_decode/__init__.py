"""Speculative decoding in the worker: drafters, and how many drafts pay."""
