"""Every drafter without weights keeps to the contract; so do drafters that are always wrong, or fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire import LLM
from quire.errors import ConfigError
from quire.resolve import resolve
from quire.worker.spec_decode.drafter import DRAFTER_METHODS, Drafter, DrafterContext, DraftRow, Proposal
from quire.worker.spec_decode.ngram import NgramDrafter
from quire.worker.spec_decode.registry import DRAFTERS, find_drafter
from quire.worker.spec_decode.speculation import Speculation

from ..toy import VOCAB, make_runner, new_request, run_step
from .contract import LOOP, PARAMS, check_forgetting, check_limits, check_sameness, generate, make_context

MODEL_FREE = [method for method, spec in DRAFTERS.items() if not spec.has_kv and not spec.reads_hidden]


@pytest.mark.parametrize("check", [check_sameness, check_limits, check_forgetting])
@pytest.mark.parametrize("method", MODEL_FREE)
def test_every_row_keeps_to_the_contract(method: str, check: object) -> None:
    assert callable(check)
    check(resolve(DRAFTERS[method].factory))


class Wrong(NgramDrafter):
    """Proposes the token after the right one, too many, and then one outside the vocabulary."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [
            Proposal([(i + 1) % VOCAB for i in p.token_ids] + [VOCAB, 3], [15] * (len(p.token_ids) + 2))
            for p in super().propose(rows)
        ]


def test_wrong_drafts_change_nothing() -> None:
    check_sameness(Wrong)


def test_right_drafts_are_accepted() -> None:
    """The last tokens of a loop are drafted in runs: the run takes fewer steps than tokens."""
    steps = []

    class Counting(NgramDrafter):
        def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None:
            assert num_accepted == len(token_ids) - 1
            steps.append(num_accepted)

    tokens, _ = generate(Counting, PARAMS["looped"])
    assert len(tokens) == 30
    assert sum(steps) + len(steps) >= 30
    assert max(steps) > 1


class Failing(Drafter):
    def __init__(self, context: DrafterContext) -> None:
        self.num_calls = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.num_calls += 1
        raise RuntimeError("no")

    def observe(self, req_id: str, token_ids: Sequence[int], num_accepted: int) -> None: ...

    def forget(self, req_id: str) -> None: ...


def test_a_drafter_that_fails_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner()
    context = make_context(runner)
    drafter = Failing(context)
    speculation = Speculation(context, drafter)
    runner.on_step = speculation.end_step
    for i in range(3):
        speculation.begin_step({f"gone{i}"})
        run_step(runner, new_request(f"r{i}", LOOP, len(LOOP), first_block=1 + 40 * i))
        proposed = speculation.propose()
        assert not proposed.is_enabled
        assert proposed.draft_token_ids == []
    assert drafter.num_calls == 1
    assert caplog.text.count("the drafter failed") == 1


@pytest.mark.parametrize(
    ("prompt_len", "fields", "expected"),
    [(20, {}, 5), (20, {"max_model_len": 23}, 1), (20, {"max_model_len": 22}, None), (123, {}, 3), (126, {}, None)],
)
def test_drafts_end_with_the_context(prompt_len: int, fields: dict[str, int], expected: int | None) -> None:
    runner = make_runner()
    context = make_context(runner, **fields)
    seen: list[int] = []

    class Watching(NgramDrafter):
        def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
            seen.extend(row.max_drafts for row in rows)
            return super().propose(rows)

    speculation = Speculation(context, Watching(context))
    runner.on_step = speculation.end_step
    speculation.begin_step(())
    step = new_request("a", [1] * prompt_len, prompt_len)
    step.scheduled_new_reqs[0].block_ids = (list(range(1, 33)), list(range(40, 72)))
    step.scheduled_new_reqs[0].sampling_params.max_tokens = None  # type: ignore[union-attr]
    run_step(runner, step)
    speculation.propose()
    assert seen == ([] if expected is None else [expected])


def test_a_class_of_the_users_own_is_named_with_a_colon_or_a_dot() -> None:
    assert find_drafter("custom_class", "a.b.C").factory == find_drafter("custom_class", "a.b:C").factory == "a.b:C"


@pytest.mark.parametrize("method", DRAFTERS)
def test_every_drafter_has_all_methods(method: str) -> None:
    drafter = resolve(DRAFTERS[method].factory)
    assert [name for name in DRAFTER_METHODS if not callable(getattr(drafter, name, None))] == []


def test_a_class_without_a_method_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error at the first reset would switch speculation off, hours later."""
    monkeypatch.setenv("QUIRE_ENABLE_MULTIPROCESSING", "0")
    with pytest.raises(ConfigError, match="HalfADrafter has no method forget, reset; derive the class from"):
        LLM(
            "demo",
            max_model_len=64,
            speculative_config={"model": f"{__name__}:HalfADrafter", "num_speculative_tokens": 2},
        )


class HalfADrafter:
    def __init__(self, context: DrafterContext) -> None:
        self.propose = self.observe = print
