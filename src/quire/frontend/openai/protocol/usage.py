"""How many tokens a request took."""

from __future__ import annotations

from typing import Any

from quire.outputs import RequestOutput


class TokenCount:
    """Counts the prompts and outputs of one HTTP request as they come."""

    def __init__(self, *, shows_cached: bool) -> None:
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens: int | None = None
        """Among those of the completions; None where no reasoning is read, and in a stream until its end."""
        self._shows_cached = shows_cached
        self._seen: set[int] = set()

    def add(self, index: int, output: RequestOutput) -> None:
        """One output of prompt `index`: what is new in it."""
        if index not in self._seen:
            self._seen.add(index)
            self.num_prompt_tokens += len(output.prompt_token_ids or ())
            self.num_cached_tokens += output.num_cached_tokens or 0
        self.num_completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def add_reasoning(self, num_tokens: int) -> None:
        """So many tokens of an output were thoughts."""
        self.num_reasoning_tokens = (self.num_reasoning_tokens or 0) + num_tokens

    @property
    def shown_cached_tokens(self) -> int:
        """How many prompt tokens came from the cache, where the operator lets it be known; 0 otherwise."""
        return self.num_cached_tokens if self._shows_cached else 0

    def in_chunk(self) -> dict[str, Any]:
        """As streams show it."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "completion_tokens": self.num_completion_tokens,
        }
        if self._shows_cached:
            counts["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        if self.num_reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return counts

    def in_answer(self) -> dict[str, Any]:
        """As whole answers show it."""
        counts = self.in_chunk()
        details = {name: counts.pop(name, None) for name in ("prompt_tokens_details", "completion_tokens_details")}
        return counts | details
