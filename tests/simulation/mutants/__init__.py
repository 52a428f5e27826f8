"""Planted bugs: what someone might break one day. Each patches the real code; the simulation must notice every one.

A mutant is a function that takes a `pytest.MonkeyPatch`; its docstring says what is wrong.
"""

from tests.simulation.mutants import adapters, books, kv_cache, lifecycle, scheduler, sessions, speculation, transfers
from tests.simulation.mutants.kv_cache import weak_hashes
from tests.simulation.mutants.registry import FRONTEND_MUTANTS, MUTANTS, TIER_MUTANTS

__all__ = [
    "CHANGE_NO_TOKEN",
    "FRONTEND_MUTANTS",
    "MUTANTS",
    "TIER_MUTANTS",
    "adapters",
    "books",
    "kv_cache",
    "lifecycle",
    "scheduler",
    "sessions",
    "speculation",
    "transfers",
    "weak_hashes",
]

CHANGE_NO_TOKEN = {
    *("wrong_free_order", "worthless_blocks_last", "eviction_from_the_tail", "last_block_never_hit"),
    *("new_block_unnoticed_by_look_up", "copies_are_events"),
    *("reset_keeps_the_cache", "counts_every_look_up", "cached_tokens_not_reported"),
    *("drafts_are_hashed", "drafts_preempt", "drafts_survive_preemption", "last_steps_blocks_unregistered"),
    *("preemption_kept_from_the_gates", "adapters_beyond_the_budget", "one_adapter_too_many"),
    *("threshold_ignored", "preempted_to_the_tail", "watermark_ignored", "prompt_not_reserved"),
}
"""They cost speed, fairness or true numbers only: tokens cannot show them, or very rarely (`drafts_are_hashed`)."""
