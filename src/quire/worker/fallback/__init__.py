"""Runs transformers' models on Quire's paged cache, scheduler and kernels: `--model-impl transformers`.

Only this room imports transformers, and the loader reaches it by dotted name. docs/fallback.md is its page.
"""
