"""The configuration of speculative decoding: its flags, and what they resolve to."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Resolved parameters of `--speculative-config`: checked, and with all defaults filled in."""

    method: str
    """A row of `worker/spec_decode/registry.py`."""
    num_speculative_tokens: int
    """K: most drafts of a request in a step, 1 to 128."""
    model: ModelConfig | None = None
    """Checkpoint of a drafter that is a model or a head."""
    drafter_cls: str | None = None
    """Dotted name of a drafter of the user's own (`custom_class`)."""
    max_model_len: int | None = None
    """Longest request that is drafted for; None: the engine's context."""
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_bytes: int = 256 << 20
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """(from, to, most drafts) by number of running requests, inclusive; gaps and the tail carry the last."""
    adaptive: bool = True
    """Lengths follow measured costs and acceptance; False: always K."""

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens beyond those of a step for which blocks are allocated: a model writes the keys of its drafts there."""
        return 0 if self.model is None else self.num_speculative_tokens


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding."""

    drafting: Drafting | None = None
    """None: no speculation."""
