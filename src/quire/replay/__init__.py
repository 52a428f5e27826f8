"""Replays recordings (`engine/recording/`) without a model: checks, measurements and what-if predictions."""
