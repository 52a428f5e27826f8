"""What synthetic prompts are made of: the token ids of plain words where the server tells them, else the words."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quire.cli.remote.client import HttpClient
from quire.cli.remote.failures import RefusedError

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
    """`token_ids` to draw prompts from (empty where the server does not tell any), and how many tokens a word takes."""

    token_ids: tuple[int, ...] = ()
    tokens_per_word: float = 1.0

    def ids(self, rng: random.Random, count: int) -> list[int]:
        """So many token ids."""
        return rng.choices(self.token_ids, k=count)

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Words that take about so many tokens."""
        return " ".join(rng.choices(_WORDS, k=max(1, round(num_tokens / self.tokens_per_word))))


async def find_material(client: HttpClient, model: str) -> Material:
    """Ask the server's /tokenize, as Quire and vLLM have it; a server without one gets words. Raises RemoteError."""
    body = {"model": model, "prompt": _TEXT, "add_special_tokens": False}
    try:
        answer = await client.post("/tokenize", body)
    except RefusedError:
        return Material()
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, int) for t in tokens):
        return Material()
    return Material(tuple(sorted(set(tokens))), len(tokens) / len(_WORDS))
