"""Which text is compared with which, by whichever kind of model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.errors import ValidationError
from quire.frontend.new_request import ParsedPrompt
from quire.frontend.scoring import PairScorer, cosine, pair_texts
from quire.outputs import PoolingOutput, PoolingRequestOutput


def test_one_with_several_or_each_with_its_own() -> None:
    assert pair_texts("a", "b") == [("a", "b")]
    assert pair_texts("a", ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert pair_texts(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    for first, second, param in ((["a", "b"], ["c"], "data_1"), ([], "a", "data_1"), ("a", [1], "data_2")):
        with pytest.raises(ValidationError) as caught:
            pair_texts(first, second)  # type: ignore[arg-type]
        assert caught.value.param == param


def test_an_embedding_model_reads_each_text_once() -> None:
    scorer = PairScorer(None, None, ("embed", "token_embed"))  # type: ignore[arg-type]
    job = scorer.plan([("a", "b"), ("a", "c"), ("c", "a")])
    assert (job.task, job.prompts, job.pairs) == ("embed", ["a", "b", "c"], [(0, 1), (0, 2), (2, 0)])
    vectors = [np.array(v, np.float32) for v in ([1, 0], [0, 2], [3, 3])]
    outputs = [PoolingRequestOutput(str(i), PoolingOutput(v), [i], True) for i, v in enumerate(vectors)]
    results = job.results(outputs)
    np.testing.assert_allclose([r.outputs.score for r in results], [0, 0.5**0.5, 0.5**0.5], atol=1e-6)
    assert [(r.request_id, r.prompt_token_ids) for r in results] == [("0_1", [0, 1]), ("0_2", [0, 2]), ("2_0", [2, 0])]
    with pytest.raises(ValidationError, match="chat_template"):
        scorer.plan([("a", "b")], chat_template="x")


def test_a_template_makes_the_prompt_of_a_pair() -> None:
    class Templates:
        def apply_chat_template(self, messages: Any, chat_template: str) -> list[int]:
            assert chat_template == "template"
            return [len(m["role"]) for m in messages]

    job = PairScorer(None, Templates(), ("classify", "score")).plan([("a", "b")], chat_template="template")  # type: ignore[arg-type]
    assert (job.task, job.prompts, job.pairs) == ("score", [ParsedPrompt(token_ids=[5, 8])], None)
    with pytest.raises(ValidationError, match="needs the tokenizer"):
        PairScorer(None, None, ("score",)).plan([("a", "b")], chat_template="template")  # type: ignore[arg-type]


def test_other_models_give_no_scores() -> None:
    with pytest.raises(ValidationError, match="this one supports token_classify"):
        PairScorer(None, None, ("token_classify",)).plan([("a", "b")])  # type: ignore[arg-type]


def test_nothing_is_like_nothing() -> None:
    assert cosine(np.zeros(2, np.float32), np.ones(2, np.float32)) == 0.0


def test_a_model_that_generates_names_the_flag_for_scores() -> None:
    scorer = PairScorer(None, None, ("generate",))  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"supports generate; --runner pooling \(LLM\(runner='pooling'\)\) loads"):
        scorer.plan([("a", "b")])
