"""Tests of the test: every planted bug must be noticed. The unmutated code passes the same seeds in test_simulation."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Literal

import pytest

from quire.engine.kv_cache.manager import KVCacheManager
from tests.simulation.adapters import Adapters
from tests.simulation.episode import run_episode
from tests.simulation.harness import SimulationError
from tests.simulation.invariants import Invariants
from tests.simulation.mutants import CHANGE_NO_TOKEN, FRONTEND_MUTANTS, MUTANTS, TIER_MUTANTS
from tests.simulation.run import EPISODE_OPERATIONS

MAX_OPERATIONS = 100_000
LUCKY_SEEDS: dict[str, dict[str, int]] = {
    "plain": {
        "abort_in_flight_lost": 4, "abort_while_pausing_freezes": 13, "adapter_begins_unsettled": 16,
        "adapter_evicted_in_use": 11, "adapter_in_the_keys_before_it_begins": 66, "adapters_beyond_the_budget": 1,
        "admitted_before_it_is_loaded": 1, "bonus_from_the_wrong_row": 7, "budget_off_by_one": 1,
        "cached_tokens_not_reported": 2, "collisions_are_hits": 14, "copies_are_events": 2, "core_not_woken": 6,
        "counts_every_look_up": 5, "double_free": 2, "drafts_are_hashed": 227, "drafts_are_not_rolled_back": 61,
        "drafts_are_rolled_back_one_too_far": 7, "drafts_of_two_requests_swapped": 15, "drafts_preempt": 15,
        "drafts_survive_preemption": 11, "end_forgotten_when_the_id_is_used_again": 1, "end_kept_from_the_gates": 1,
        "end_told_again_after_a_restart": 11, "evict_in_use": 2, "evicted_block_stays_findable": 2,
        "eviction_from_the_tail": 8, "eviction_unnoticed_by_look_up": 3, "failed_steps_stay_cached": 5,
        "half_awake": 39, "hash_without_adapter": 2, "hash_without_parent": 2, "hash_without_salt": 3,
        "last_block_never_hit": 8, "last_steps_blocks_unregistered": 25, "lookahead_counted_as_computed": 3,
        "min_tokens_ignored": 1, "new_block_unnoticed_by_look_up": 38, "nobody_is_computed_again": 2,
        "one_adapter_too_many": 16, "one_request_too_many": 9, "preempted_to_the_tail": 4,
        "prefixes_outlive_a_sleep": 2, "prefixes_outlive_the_weights": 10, "prompt_not_reserved": 8,
        "registered_before_computed": 110, "reset_keeps_the_cache": 2, "resumed_on_other_files": 41,
        "revision_not_in_the_key": 66, "run_not_cut_at_a_stop": 49, "shared_block_not_counted": 2,
        "sleep_with_steps_in_flight": 4, "stale_table_after_preemption": 4, "stop_check_skipped": 3,
        "token_after_a_mismatch_kept": 15, "token_in_flight_computed_again": 176, "victim_keeps_its_tokens": 3,
        "watermark_ignored": 22, "window_blocks_leak": 1, "window_freed_too_early": 1, "window_hit_too_short": 2,
        "wrong_free_order": 2,
    },
    "answers": {
        "abort_in_flight_lost": 4, "abort_while_pausing_freezes": 13, "adapter_begins_unsettled": 26,
        "adapter_evicted_in_use": 11, "adapter_in_the_keys_before_it_begins": 66, "admitted_before_it_is_loaded": 1,
        "bonus_from_the_wrong_row": 7, "budget_off_by_one": 1, "collisions_are_hits": 14, "core_not_woken": 6,
        "double_free": 2, "drafts_are_not_rolled_back": 101, "drafts_are_rolled_back_one_too_far": 7,
        "drafts_of_two_requests_swapped": 15, "end_forgotten_when_the_id_is_used_again": 1,
        "end_kept_from_the_gates": 1, "end_told_again_after_a_restart": 11, "evict_in_use": 2,
        "evicted_block_stays_findable": 2, "eviction_unnoticed_by_look_up": 16, "failed_steps_stay_cached": 5,
        "half_awake": 12, "hash_without_adapter": 2, "hash_without_parent": 2, "hash_without_salt": 3,
        "lookahead_counted_as_computed": 57, "min_tokens_ignored": 1, "nobody_is_computed_again": 14,
        "one_request_too_many": 9, "prefixes_outlive_a_sleep": 102, "prefixes_outlive_the_weights": 14,
        "registered_before_computed": 110, "resumed_on_other_files": 41, "revision_not_in_the_key": 66,
        "run_not_cut_at_a_stop": 25, "shared_block_not_counted": 2, "sleep_with_steps_in_flight": 4,
        "stale_table_after_preemption": 4, "stop_check_skipped": 3, "token_after_a_mismatch_kept": 15,
        "token_in_flight_computed_again": 370, "victim_keeps_its_tokens": 3, "window_blocks_leak": 3,
        "window_freed_too_early": 1, "window_hit_too_short": 2,
    },
    "metrics": {
        "drafts_of_all_segments_in_each": 57, "earlier_segments_forgotten": 2, "journal_loses_the_last_token": 44,
        "last_output_kept": 1, "queued_again_after_a_restart": 44, "queued_input_forgotten": 1,
        "rejected_drafts_are_not_the_requests": 43, "runs_count_as_one_draft": 35, "session_without_room_is_sent": 2,
    },
    "tiered": {
        "accepted_for_other_tokens": 25, "accepted_from_the_first_worker": 115, "accepted_past_a_failure": 16,
        "counted_before_it_has_ended": 16, "end_unnoticed": 19, "fails_instead_of_waiting": 23,
        "freed_while_written": 3, "load_survives_its_request": 3, "loaded_beside_a_step": 30,
        "one_rejection_per_load": 25, "postponed_block_is_not_looked_at": 65,
        "saved_before_it_is_computed": 19, "store_of_the_old_weights": 9, "waits_for_loads_beside_steps": 120,
        "waits_for_loads_that_were_given_up": 50,
    },
}  # fmt: skip
"""Seeds that have caught mutants in few operations: with all checks, by the answers alone, by the metrics, with a
store. They save time and may age: all seeds follow."""


def operations_until_caught(
    name: str, by: Literal["plain", "answers", "metrics", "tiered"]
) -> tuple[int, SimulationError | None]:
    """Run the lucky seed, then seeds 0, 1, 2, ... until something is noticed; for "metrics" all of them have theirs
    scraped, for "tiered" all have a store outside the engine."""
    done, audited, tiered = 0, by == "metrics", True if by == "tiered" else None
    for seed in (LUCKY_SEEDS[by].get(name, 0), *range(MAX_OPERATIONS // EPISODE_OPERATIONS)):
        try:
            done += run_episode(seed, EPISODE_OPERATIONS, audited=audited, tiered=tiered)["operations"]
        except SimulationError as error:
            if isinstance(error.cause, AttributeError | NameError | TypeError):
                raise  # a mutant that no longer fits the code it patches must not pass for one that was caught
            return done + error.operation + 1, error
    return done, None


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    MUTANTS[name](monkeypatch)
    done, error = operations_until_caught(name, "plain")
    assert error is not None, f"{name}: {done} operations noticed nothing"
    with capsys.disabled():
        print(f"\n{name}: {done} operations, {type(error.cause).__name__}: {str(error.cause)[:90]}", end=" ")


@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - CHANGE_NO_TOKEN))
def test_mutant_is_caught_by_its_answers_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every check of the engine's inside switched off, outputs or messages to the worker are wrong."""
    for check in ("check", "scheduling", "scheduled", "heard", "heard_stats", "check_idle", "reset_prefix_cache"):
        monkeypatch.setattr(Invariants, check, lambda *args, **kwargs: None)
    for check in ("check", "check_idle"):
        monkeypatch.setattr(Adapters, check, lambda self: None)
    monkeypatch.setattr(Invariants, "free_order", lambda *args: nullcontext())
    monkeypatch.setattr(KVCacheManager, "check_integrity", lambda self: None)
    MUTANTS[name](monkeypatch)
    done, error = operations_until_caught(name, "answers")
    assert error is not None, f"{name}: {done} operations gave only right answers"


@pytest.mark.parametrize("name", TIER_MUTANTS)
def test_mutant_is_caught_with_a_store(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TIER_MUTANTS[name](monkeypatch)
    done, error = operations_until_caught(name, "tiered")
    assert error is not None, f"{name}: {done} operations noticed nothing"
    with capsys.disabled():
        print(f"\n{name}: {done} operations, {type(error.cause).__name__}: {str(error.cause)[:90]}", end=" ")


@pytest.mark.parametrize("name", FRONTEND_MUTANTS)
def test_mutant_is_caught_by_the_metrics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FRONTEND_MUTANTS[name](monkeypatch)
    done, error = operations_until_caught(name, "metrics")
    assert error is not None, f"{name}: {done} operations, and every scrape added up"
