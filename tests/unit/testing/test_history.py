"""The judge of the kill tests: it must see what is wrong, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import RequestOutputKind
from quire.testing.history import History


def _output(*tokens: int, end: str | None = None, text: str | None = None, **fields: Any) -> RequestOutput:
    shown = "".join(chr(t) for t in tokens) if text is None else text
    completion = CompletionOutput(
        fields.pop("index", 0), shown, list(tokens), None, fields.pop("logprobs", None), end, **fields
    )
    return RequestOutput("r", None, [1], None, [completion], end is not None)


def _history(*outputs: RequestOutput, kind: RequestOutputKind = RequestOutputKind.CUMULATIVE) -> History:
    history = History(kind)
    for output in outputs:
        history.record(output)
    return history


GOOD = (_output(65), _output(65, 66), _output(65, 66, 67, end="length"))
DELTA = (_output(65), _output(66), _output(67, end="length"))


def test_a_stream_that_grows_and_ends() -> None:
    for history in (_history(*GOOD), _history(*DELTA, kind=RequestOutputKind.DELTA)):
        assert history.problems() == []
        assert history.num_tokens == 3
        assert history.streams["r", 0].text == "ABC"
        assert history.streams["r", 0].finish_reason == "length"
        assert history.differences(_history(*GOOD)) == []
        assert history.token_differences({("r", 0): [65, 66, 67]}) == []


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([_output(65, 66), _output(65)], "tokens changed"),
        ([_output(65, 66), _output(65, 67, end="stop")], "tokens changed"),
        ([_output(65, text="ab"), _output(65, 66, text="xb", end="stop")], "text changed"),
        ([_output(65)], "0 ends"),
        ([*GOOD, GOOD[-1]], "2 ends"),
        ([*GOOD, _output(65, 66, 67, 68)], "it had ended, and grew"),
        ([_output(65, end="error", error_message="the core died")], "the core died"),
    ],
)
def test_what_is_wrong_on_the_way_is_seen(outputs: list[RequestOutput], words: str) -> None:
    assert any(words in problem for problem in _history(*outputs).problems())


def test_a_repeated_delta_is_seen() -> None:
    seen = _history(DELTA[0], DELTA[1], DELTA[1], DELTA[2], kind=RequestOutputKind.DELTA)
    assert seen.differences(_history(*GOOD))
    late = _history(*DELTA, _output(68), kind=RequestOutputKind.DELTA)
    assert any("grew" in problem for problem in late.problems())


def test_a_request_that_began_is_owed_an_end() -> None:
    history = History()
    history.begin("r")
    assert history.problems() == ["r: 0 ends"]
    history.begin("r")
    assert "r: begun twice" in history.problems()


def test_an_error_is_an_end() -> None:
    history = _history(*GOOD[:2])
    history.record_error("r", RuntimeError("the core died"))
    assert history.problems() == ["r: the core died"]
    assert str(history.errors["r"]) == "the core died"
    history.record_error("r", RuntimeError("again"))
    assert "r: 2 ends" in history.problems()


def test_differences_from_an_undisturbed_run_are_named() -> None:
    expected = _history(*GOOD)
    assert "part at token 2" in _history(_output(65, 66, 68, end="length", text="ABC")).differences(expected)[0]
    assert "part at token 2" in _history(_output(65, 66, end="length", text="ABC")).differences(expected)[0]
    assert "text 'ABD'" in _history(_output(65, 66, 67, end="length", text="ABD")).differences(expected)[0]
    assert "ended by" in _history(_output(65, 66, 67, end="stop")).differences(expected)[0]
    assert "ended by" in _history(_output(65, 66, 67, end="length", stop_reason=3)).differences(expected)[0]
    assert History().differences(expected) == ["('r', 0): missing"]
    assert expected.differences(History()) == ["('r', 0): nobody expected it"]


def test_log_probabilities_are_compared_within_a_tolerance() -> None:
    def of(*values: float) -> History:
        rows = [{65: Logprob(values[0], 1), 66: Logprob(values[1], 2)}]
        return _history(_output(65, end="length", logprobs=rows))

    assert of(-0.5, -1.0).differences(of(-0.5, -1.0)) == []
    assert "at token 0" in of(-0.5, -1.001).differences(of(-0.5, -1.0))[0]
    assert of(-0.5, -1.001).differences(of(-0.5, -1.0), logprob_tolerance=0.01) == []
    assert of(-0.5, -1.1).differences(of(-0.5, -1.0), logprob_tolerance=0.01)
    assert "log-probabilities of 1 tokens, not 0" in of(-0.5, -1.0).differences(_history(_output(65, end="length")))[0]


def test_log_probabilities_of_prompts_are_compared_too() -> None:
    def of(*values: float) -> History:
        output = _output(65, end="length")
        output.prompt_logprobs = [None, *({66: Logprob(value, 1)} for value in values)]
        return _history(output)

    assert of(-0.5, -1.0).differences(of(-0.5, -1.0)) == []
    assert "prompt log-probabilities at token 2" in of(-0.5, -1.1).differences(of(-0.5, -1.0))[0]
    assert "prompt log-probabilities of 0 tokens, not 2" in _history(*GOOD).differences(of(-0.5))[0]


def test_tokens_of_a_live_stream_must_be_a_beginning() -> None:
    live = _history(_output(65, 66))
    assert live.token_differences({("r", 0): [65, 66, 67]}) == []
    assert live.token_differences({("r", 0): [65, 67, 67]})
    aborted = _history(_output(65, 66, end="abort"))
    assert aborted.token_differences({("r", 0): [65, 66, 67]}) == []
    assert aborted.token_differences({("r", 0): [65, 67, 67]})
    assert _history(_output(65, 66, end="length")).token_differences({("r", 0): [65, 66, 67]})


def test_several_outputs_of_a_request_are_streams_of_their_own() -> None:
    history = History()
    first = CompletionOutput(0, "A", [65], None, None, "length")
    second = CompletionOutput(1, "B", [66], None, None, None)
    history.record(RequestOutput("r", None, [1], None, [first, second], False))
    ended = CompletionOutput(1, "BC", [66, 67], None, None, "stop")
    history.record(RequestOutput("r", None, [1], None, [first, ended], True))
    assert history.problems() == []
    assert {key: s.token_ids for key, s in history.streams.items()} == {("r", 0): [65], ("r", 1): [66, 67]}
