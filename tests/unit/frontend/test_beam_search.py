"""Beam search against a brute-force oracle on random tables of probabilities, and against transformers'."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from quire.frontend.beam_search import score, search
from quire.outputs import Logprob
from quire.sampling_params import BeamSearchParams
from tests.seeds import examples

VOCAB = 5
EOS = 0


def table(seed: int, tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of the next token: a fixed function of the tokens so far."""
    rng = random.Random(f"{seed}:{list(tokens)}")
    weights = [rng.random() + 0.01 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def all_beams(
    seed: int, prompt: Sequence[int], params: BeamSearchParams, eos: set[int]
) -> list[tuple[float, list[int]]]:
    """The textbook algorithm over the whole vocabulary, without any early end."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, params.max_tokens + 1):
        candidates = [
            (total + logprob, [*tokens, token])
            for total, tokens in live
            for token, logprob in sorted(enumerate(table(seed, [*prompt, *tokens])), key=lambda item: -item[1])
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, tokens in candidates[: params.beam_width]:
            if tokens[-1] in eos:
                done.append((total / length**params.length_penalty, tokens))
        live = [c for c in candidates if c[1][-1] not in eos][: params.beam_width]
    done += [(total / params.max_tokens**params.length_penalty, tokens) for total, tokens in live]
    done.sort(key=lambda item: -item[0])
    return done[: params.beam_width]


def run(
    seed: int, prompts: list[list[int]], params: BeamSearchParams, eos: set[int], room: int = 99
) -> list[list[list[int]]]:
    def next_tokens(sequences: list[list[int]]) -> list[dict[int, Logprob]]:
        answers = []
        for tokens in sequences:
            ranked = sorted(enumerate(table(seed, tokens)), key=lambda item: -item[1])[: params.beam_width + len(eos)]
            answers.append({token: Logprob(value, rank) for rank, (token, value) in enumerate(ranked, 1)})
        return answers

    found = search(next_tokens, prompts, params, frozenset(eos), room)
    for prompt, beams in zip(prompts, found, strict=True):
        for beam in beams:
            assert beam.tokens[: len(prompt)] == prompt
            assert beam.finish_reason in ("stop", "length")
            total = sum(
                position[token].logprob
                for position, token in zip(beam.logprobs, generated(beam.tokens, prompt), strict=False)
            )
            if params.include_stop_str_in_output or beam.finish_reason == "length":
                assert total == pytest.approx(beam.cum_logprob)
    return [[generated(beam.tokens, prompt) for beam in beams] for prompt, beams in zip(prompts, found, strict=True)]


def generated(tokens: list[int], prompt: list[int]) -> list[int]:
    return tokens[len(prompt) :]


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 5),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    eos=st.sampled_from([set(), {EOS}, {EOS, 3}]),
)
def test_equal_to_the_textbook(seed: int, width: int, max_tokens: int, penalty: float, eos: set[int]) -> None:
    """Early ending and looking at width + len(eos) candidates per beam change nothing."""
    params = BeamSearchParams(width, max_tokens, length_penalty=penalty, include_stop_str_in_output=True)
    prompts = [[1, 2], [3]]
    expected = [[tokens for _, tokens in all_beams(seed, prompt, params, eos)] for prompt in prompts]
    assert run(seed, prompts, params, eos) == expected


def test_the_end_token_is_shown_only_when_asked_for() -> None:
    with_end = BeamSearchParams(3, 4, include_stop_str_in_output=True)
    without = BeamSearchParams(3, 4)
    shown, hidden = (run(4, [[1]], params, {EOS})[0] for params in (with_end, without))
    assert any(tokens[-1] == EOS for tokens in shown)
    assert hidden == [tokens[:-1] if tokens[-1] == EOS else tokens for tokens in shown]


def test_a_full_context_ends_beams() -> None:
    assert {len(tokens) for tokens in run(1, [[1, 2]], BeamSearchParams(2, 50), set(), room=6)[0]} == {4}


def test_the_score_is_divided_by_the_penalized_length() -> None:
    assert score(-6.0, 3, 1.0) == -2.0
    assert score(-6.0, 3, 0.0) == -6.0
    assert score(-6.0, 2, -1.0) == -12.0


@pytest.fixture(scope="module")
def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("with_eos", [True, False])
def test_equal_to_transformers(tiny_llama: LlamaForCausalLM, penalty: float, with_eos: bool) -> None:
    """With `early_stopping="never"` transformers ends only when nothing better can come, as we do."""
    width, max_tokens = 4, 8
    params = BeamSearchParams(width, max_tokens, length_penalty=penalty, include_stop_str_in_output=True)

    @torch.no_grad()
    def next_tokens(sequences: list[list[int]]) -> list[dict[int, Logprob]]:
        answers = []
        for tokens in sequences:
            top = tiny_llama(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1).topk(width + with_eos)
            answers.append({i: Logprob(v) for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)})
        return answers

    for prompt in ([1, 5, 9], [1, 7], [3, 3, 3, 3]):
        theirs = tiny_llama.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            early_stopping="never",
            do_sample=False,
            eos_token_id=2 if with_eos else None,
            pad_token_id=0,
        )
        rows = [row[len(prompt) :] for row in theirs.tolist()]
        expected = [row[: row.index(2) + 1] if with_eos and 2 in row else row for row in rows]  # the rest is padding
        (beams,) = search(next_tokens, [prompt], params, frozenset({2}) if with_eos else frozenset(), 99)
        assert [beam.tokens[len(prompt) :] for beam in beams] == expected
