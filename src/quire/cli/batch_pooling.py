"""Lines of a batch file for pooling models: embeddings, scores and rankings. Their fields are those of the routes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.cli.batch_files import InputRow, make_row
from quire.cli.batch_requests import PAIR_URLS, POOLING_URLS, RANK_URLS, check_model, read_envelope
from quire.errors import ValidationError, nearest
from quire.frontend.http.bodies import BodyReader
from quire.frontend.openai.pooling_work import count_tokens, embedding_data, naming, rank, score_data
from quire.frontend.openai.protocol.completion import as_prompts
from quire.frontend.openai.protocol.pooling import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from quire.frontend.scoring import PairScorer, pair_texts
from quire.outputs import PoolingRequestOutput
from quire.pooling_params import PoolingParams

MAX_TEXTS = 1 << 20
_EMBEDDING, _SCORE, _RERANK = BodyReader(EmbeddingBody), BodyReader(ScoreBody), BodyReader(RerankBody)
Answer = Callable[[Sequence[PoolingRequestOutput]], dict[str, Any]]


@dataclass(frozen=True)
class PoolingRequest:
    """A row that can run. One engine request per item of `work`: a prompt and its parameters."""

    work: list[tuple[Any, PoolingParams]]
    priority: int
    options: Mapping[str, Any]
    """Further arguments of `LLMEngine.add_request`."""
    answer: Answer
    """Makes the body of the result, without its head."""
    prefix: str
    """Beginning of the result's id."""


class PoolingReader:
    """Turns rows into `PoolingRequest`s for one model."""

    def __init__(self, model_names: Sequence[str], engine: Any) -> None:
        self._model_names = model_names
        self._tasks: Sequence[str] = engine.get_supported_tasks()
        self._tokenizer = engine.get_tokenizer()
        self._scorer = PairScorer(engine.input_processor, self._tokenizer, self._tasks)

    def read(self, row: InputRow) -> PoolingRequest:
        """Returns the request of a row. Raises ValidationError or NotFoundError; the message names the field."""
        if row.error is not None:
            raise row.error
        _, url, content = read_envelope(row, POOLING_URLS, "this model pools, and does not generate")
        if url in PAIR_URLS:
            pairs = _read(_SCORE, content)
            first, second = pairs.texts()
            texts = pair_texts(first, second, names=("text_1", "text_2"))
            return self._pairs(pairs, texts, "score", score_data)
        if url in RANK_URLS:
            ranked = _read(_RERANK, content)
            documents = ranked.texts()
            texts = pair_texts(ranked.question(), documents, names=("query", "documents"))
            return self._pairs(ranked, texts, "rerank", lambda outputs: rank(ranked, documents, outputs))
        return self._embeddings(_read(_EMBEDDING, content))

    def _embeddings(self, body: EmbeddingBody) -> PoolingRequest:
        check_model(body.model, self._model_names)
        body.check_form()
        if "embed" not in self._tasks:
            raise ValidationError(f"this model makes no embeddings; it supports {', '.join(self._tasks)}", param="url")
        if body.messages is None:
            with naming("input"):
                prompts: Sequence[Any] = as_prompts(body.input, "input", MAX_TEXTS)
        else:
            prompts = [
                self._tokenizer.apply_chat_template(
                    body.messages,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    chat_template=body.chat_template,
                    **(body.chat_template_kwargs or {}),
                )
            ]
        params = body.params("embed")
        return self._request(
            body, [(prompt, params) for prompt in prompts], "embd", lambda outputs: embedding_data(body, outputs)
        )

    def _pairs(
        self, body: PoolingBody, pairs: list[tuple[str, str]], prefix: str, answer: Callable[[Any], dict[str, Any]]
    ) -> PoolingRequest:
        check_model(body.model, self._model_names)
        task = "score" if "score" in self._tasks else "embed"
        job = self._scorer.plan(pairs, body.params(task), body.tokenization())
        work = list(zip(job.prompts, job.params, strict=True))
        return self._request(body, work, prefix, lambda outputs: answer(job.results(outputs)))

    def _request(
        self, body: PoolingBody, work: list[tuple[Any, PoolingParams]], prefix: str, answer: Answer
    ) -> PoolingRequest:
        if body.cache_salt is not None:
            raise ValidationError("cache_salt is not supported in a batch for a pooling model", param="cache_salt")
        options = {"tokenization_kwargs": body.tokenization()}
        return PoolingRequest(work, body.priority, options, answer, prefix)

    def result_row(
        self, custom_id: str, request: PoolingRequest, outputs: Sequence[PoolingRequestOutput]
    ) -> dict[str, Any]:
        """Returns the row of a request that ran; `outputs` are in the order of its prompts."""
        head = {"object": "list", "created": int(time.time())} if request.prefix != "rerank" else {}
        body = {
            "id": f"{request.prefix}-{uuid.uuid4().hex[:16]}",
            **head,
            "model": self._model_names[0],
            "usage": count_tokens([output.prompt_token_ids for output in outputs]),
            **request.answer(outputs),
        }
        return make_row(f"batch_req_{uuid.uuid4().hex[:16]}", custom_id, 200, body, None)


def _read(reader: BodyReader[Any], content: Mapping[str, Any]) -> Any:
    """Returns the body. Raises ValidationError for a field of another type, or one that there is not."""
    known = reader.kind.__struct_fields__
    for name in content:
        if name not in known:
            hint = nearest(name, known, "remove it")
            raise ValidationError(f"{name} is not a field of such requests; {hint}", param=name)
    return reader.read(json.dumps(content).encode("utf-8", "surrogatepass"))
