"""Datasets of a load: random lengths, the prompts of a file, or a trace with arrival times.

A dataset gives `count` requests for repetition `rep`. Synthetic prompts differ from one repetition to the next, so that
none is in the prefix cache; those of a file are the same in each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quire.cli.bench.load import LoadRequest
from quire.cli.bench.workloads import Lengths
from quire.cli.remote.protocol import RefusedError
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.remote.client import HttpClient

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan "
    "college interest death experience effect use class control field development role effort rate heart drug show "
    "leader light voice wife police mind return price report decision son view relationship town road arm difference "
    "value building action season society tax director position player record paper space ground form event matter "
    "center couple site project activity star table need court oil situation cost industry figure street image phone "
    "data picture practice piece land product doctor wall patient worker news test movie north love support technology"
)
_WORDS = tuple(_TEXT.split(" "))


@dataclass(frozen=True)
class Material:
    """Token ids of plain words for synthetic prompts (empty where the server has no /tokenize), and tokens per word."""

    token_ids: tuple[int, ...] = ()
    tokens_per_word: float = 1.0

    def ids(self, rng: random.Random, count: int) -> list[int]:
        """Returns `count` token ids."""
        return rng.choices(self.token_ids, k=count)

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Returns words that take about `num_tokens` tokens."""
        return " ".join(rng.choices(_WORDS, k=max(1, round(num_tokens / self.tokens_per_word))))


async def find_material(client: HttpClient, model: str) -> Material:
    """Asks the server's /tokenize, as Quire and vLLM have it; without that route, prompts are words.

    Raises RemoteError.
    """
    body = {"model": model, "prompt": _TEXT, "add_special_tokens": False}
    try:
        answer = await client.post("/tokenize", body)
    except RefusedError:
        return Material()
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, int) for t in tokens):
        return Material()
    return Material(tuple(sorted(set(tokens))), len(tokens) / len(_WORDS))


T = TypeVar("T")

TRACE_BLOCK = 512
"""Tokens that an entry of a trace's `hash_ids` stands for (Mooncake's format)."""
CHARACTERS_PER_TOKEN = 4
_MAX_FILE_BYTES = 4 << 30


class Dataset(Protocol):
    """A source of requests. `size` is their number, None where there is no end."""

    @property
    def size(self) -> int | None: ...

    def requests(self, count: int, rep: int) -> list[LoadRequest]:
        """Returns the requests of repetition `rep`."""


@dataclass(frozen=True)
class RandomDataset:
    """Prompts and outputs of drawn lengths. A prompt begins with one of `num_prefixes` texts of `prefix_len` tokens."""

    material: Material
    as_text: bool
    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1
    seed: int = 0
    max_model_len: int | None = None
    size: int | None = None

    def requests(self, count: int, rep: int) -> list[LoadRequest]:
        """Returns requests whose lengths depend on the seed only, and whose tokens on the repetition, too."""
        lengths, rng = random.Random(f"{self.seed} lengths"), random.Random(f"{self.seed} tokens {rep}")
        prefixes = [self._draw(rng, self.prefix_len) for _ in range(self.num_prefixes if self.prefix_len else 0)]
        return [self._request(lengths, rng, prefixes) for _ in range(count)]

    def _request(self, lengths: random.Random, rng: random.Random, prefixes: list[Any]) -> LoadRequest:
        room = None if self.max_model_len is None else self.max_model_len - self.prefix_len - 1
        input_len = self.input_len.draw(lengths, room)
        output_len = self.output_len.draw(lengths, None if room is None else room + 1 - input_len)
        prompt = self._draw(rng, input_len)
        if prefixes:
            prefix = prefixes[lengths.randrange(len(prefixes))]
            prompt = f"{prefix} {prompt}" if self.as_text else prefix + prompt
        return LoadRequest(prompt, output_len)

    def _draw(self, rng: random.Random, num_tokens: int) -> Any:
        return self.material.text(rng, num_tokens) if self.as_text else self.material.ids(rng, num_tokens)


@dataclass(frozen=True)
class FileDataset:
    """The rows of a file, in order, and again from the beginning where more are needed."""

    rows: Sequence[LoadRequest]

    @property
    def size(self) -> int | None:
        return len(self.rows)

    def check_endpoint(self, *, is_chat: bool) -> None:
        """Raises ConfigError for rows of the other kind: messages for completions, token ids for a chat."""
        for row in self.rows:
            if isinstance(row.prompt, list) and isinstance(row.prompt[0], dict) != is_chat:
                kind = "token ids" if is_chat else "messages"
                raise ConfigError(
                    f"the dataset holds {kind}, which --endpoint {'chat' if is_chat else 'completions'} "
                    f"does not take; use --endpoint {'completions' if is_chat else 'chat'}"
                )

    def requests(self, count: int, rep: int) -> list[LoadRequest]:
        """Returns the same requests for every repetition."""
        return [self.rows[i % len(self.rows)] for i in range(count)]


@dataclass(frozen=True)
class TraceDataset:
    """Synthetic prompts with the lengths and arrival times of a trace. Equal `hash_ids` give equal tokens."""

    rows: Sequence[TraceRow]
    material: Material
    as_text: bool
    seed: int = 0
    speed: float = 1.0

    @property
    def size(self) -> int | None:
        return len(self.rows)

    def requests(self, count: int, rep: int) -> list[LoadRequest]:
        """Returns the requests of the first `count` rows."""
        rng = random.Random(f"{self.seed} trace {rep}")
        return [
            LoadRequest(self._prompt(row, rng, rep), row.output_len, row.arrival_s / self.speed)
            for row in self.rows[:count]
        ]

    def _prompt(self, row: TraceRow, rng: random.Random, rep: int) -> Any:
        draw = self.material.text if self.as_text else self.material.ids
        parts: list[Any] = []
        left = row.input_len
        for hash_id in row.hash_ids:
            if left <= 0:
                break
            parts.append(draw(random.Random(f"{self.seed} block {rep} {hash_id}"), min(left, TRACE_BLOCK)))
            left -= TRACE_BLOCK
        if left > 0:
            parts.append(draw(rng, left))
        return " ".join(parts) if self.as_text else [token for part in parts for token in part]


@dataclass(frozen=True)
class TraceRow:
    """One line of a trace."""

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


# -- files ------------------------------------------------------------------------------------------------------------


def read_sharegpt(path: Path, output_len: Lengths | None, seed: int) -> FileDataset:
    """Reads the first questions of a JSON list of {"conversations": [{"from": "human", "value": ...}, ...]}.

    An output is as long as the answer in the file, or drawn from `output_len`. Raises ConfigError.
    """
    try:
        content = json.loads(_read(path))
    except ValueError as e:
        raise ConfigError(f"--dataset-path {path} is not JSON: {e}") from None
    rng = random.Random(f"{seed} outputs")
    rows = []
    for item in content if isinstance(content, list) else []:
        turns = item.get("conversations") if isinstance(item, dict) else None
        texts: list[Any] = [t.get("value", t.get("content")) for t in turns or () if isinstance(t, dict)]
        if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts[:2]):
            continue
        estimate = max(1, len(texts[1]) // CHARACTERS_PER_TOKEN)
        rows.append(LoadRequest(texts[0], estimate if output_len is None else output_len.draw(rng)))
    if not rows:
        raise ConfigError(f"--dataset-path {path} holds no conversation of two turns in ShareGPT's form")
    return FileDataset(rows)


def read_custom(path: Path, output_len: Lengths, seed: int) -> FileDataset:
    """Reads a JSON object per line: {"prompt": text or token ids} or {"messages": [...]}, and perhaps "output_len".

    Raises ConfigError.
    """
    rng = random.Random(f"{seed} outputs")

    def read(row: dict[str, Any]) -> LoadRequest:
        prompt: Any = row.get("messages", row.get("prompt"))
        is_text = isinstance(prompt, str) and prompt != ""
        is_list = isinstance(prompt, list) and prompt != []
        kinds = {type(item) for item in prompt} if is_list else set()
        if (not is_text and kinds not in ({int}, {dict})) or ("messages" in row and kinds != {dict}):
            raise ValueError('it has neither "prompt" (a text or token ids) nor "messages" (a conversation)')
        named = next((row[name] for name in ("output_len", "output_tokens", "max_tokens") if name in row), None)
        return LoadRequest(prompt, output_len.draw(rng) if named is None else _whole(named, "output_len", 1))

    return FileDataset(_read_lines(path, read))


def read_trace(path: Path) -> list[TraceRow]:
    """Reads a trace in Mooncake's format, a JSON object per line.

    Its fields are "timestamp" in ms or "arrival_s", "input_length", "output_length" and perhaps "hash_ids". Rows are
    sorted by time, which begins at the first. Raises ConfigError.
    """

    def read(row: dict[str, Any]) -> TraceRow:
        arrival = row["arrival_s"] if "arrival_s" in row else row["timestamp"] / 1e3
        hash_ids = row.get("hash_ids") or []
        if not isinstance(arrival, int | float) or not 0 <= arrival < 1e12:
            raise ValueError(f"its time {arrival!r} is not a number from 0 on")
        if not isinstance(hash_ids, list) or not all(isinstance(h, int) for h in hash_ids):
            raise ValueError("hash_ids is not a list of integers")
        lengths = _whole(row["input_length"], "input_length", 1), _whole(row["output_length"], "output_length", 1)
        return TraceRow(float(arrival), *lengths, tuple(hash_ids))

    rows = sorted(_read_lines(path, read), key=lambda row: row.arrival_s)
    start = rows[0].arrival_s
    return [TraceRow(r.arrival_s - start, r.input_len, r.output_len, r.hash_ids) for r in rows]


def _read_lines(path: Path, read: Callable[[dict[str, Any]], T]) -> list[T]:
    rows = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise ValueError("it is not a JSON object")
            rows.append(read(content))
        except (ValueError, TypeError) as e:
            raise ConfigError(f"--dataset-path {path}, line {number}: {e}") from None
        except KeyError as e:
            raise ConfigError(f"--dataset-path {path}, line {number}: it has no {e.args[0]!r}") from None
    if not rows:
        raise ConfigError(f"--dataset-path {path} is empty")
    return rows


def _whole(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} {value!r} is not a whole number of {least} or more")
    return value


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"--dataset-path {path} is larger than {_MAX_FILE_BYTES >> 30} GiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--dataset-path {path}: {getattr(e, 'strerror', None) or e}") from None
