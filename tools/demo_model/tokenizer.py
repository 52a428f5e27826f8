"""The tokenizer: byte-level BPE trained on the corpus, and the files that ship beside it.

Owns the vocabulary size and the special tokens. Digits are tokens of their own, so that arithmetic can be learned.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tools.demo_model.corpus import documents
from tools.demo_model.documents import CALL_END, CALL_START, END_OF_TEXT, TEMPLATE_FILE, TURN_END, TURN_START, Document

VOCAB_SIZE = 3072
MAX_CONTEXT = 2048
ANSWER_LIMIT = 256
# One digit, a word with the space before it, a run of punctuation likewise, or white space.
WORDS = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

WORDS_CUT = 1 / 8
_WORD = re.compile(r"(?<![\w|>])[A-Za-z]{4,}")  # not within a mark such as <|im_start|>, nor the role after one


def train_tokenizer(seed: int, count: int = 20000) -> Tokenizer:
    """Byte-level BPE over the first documents of the corpus. Every byte is in the alphabet: no text is unknown."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The marks of a tool call are ordinary text to a client, so they are added but not special.
    specials = [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, TURN_START, TURN_END)]
    marks = [AddedToken(text, special=False, normalized=False) for text in (CALL_START, CALL_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(marks),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, count), trainer)
    tokenizer.add_tokens(marks)
    return tokenizer


def _texts(seed: int, count: int) -> Iterator[str]:
    for document in islice(documents(seed), count):
        text = "".join(piece.text for piece in document)
        for mark in (END_OF_TEXT, TURN_START, TURN_END, CALL_START, CALL_END):
            text = text.replace(mark, "\n")
        yield text


def encode_document(
    tokenizer: Tokenizer, document: Document, cuts: random.Random | None = None
) -> tuple[list[int], list[bool]]:
    """Token ids and, for each, whether it is learned.

    With ``cuts`` some words of the context are cut in two and so become other tokens than usual: names and typing
    errors that the model never saw then look less strange. The idea is BPE-dropout (Provilkov et al. 2020).
    """
    ids: list[int] = []
    learned: list[bool] = []
    for piece in document:
        texts = [piece.text] if piece.learned or cuts is None else cut_words(piece.text, cuts)
        piece_ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids]
        ids += piece_ids
        learned += [piece.learned] * len(piece_ids)
    return ids, learned


def cut_words(text: str, rng: random.Random) -> list[str]:
    """The text in parts that end inside words: one longer word in eight is cut."""
    places = [
        rng.randrange(found.start() + 1, found.end()) for found in _WORD.finditer(text) if rng.random() < WORDS_CUT
    ]
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_CONTEXT,
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": _added_tokens(tokenizer),
            "chat_template": TEMPLATE_FILE.read_text(encoding="utf-8"),
        },
    )
    turn_end, text_end = end_ids(tokenizer)
    write_json(
        folder / "generation_config.json",
        {
            # transformers reads do_sample, engines of vLLM's kind read temperature: both mean greedy here.
            "do_sample": False,
            "temperature": 0.0,
            "max_new_tokens": ANSWER_LIMIT,
            "eos_token_id": [turn_end, text_end],
            "pad_token_id": text_end,
        },
    )


def end_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens that end a chat turn and a plain text."""
    ids = (tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT))
    if ids[0] is None or ids[1] is None:
        raise ValueError(f"the tokenizer lacks {TURN_END} or {END_OF_TEXT}; train it again")
    return ids[0], ids[1]


def _added_tokens(tokenizer: Tokenizer) -> dict[str, dict[str, object]]:
    return {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }


def write_json(path: Path, value: object) -> None:
    """Indented JSON with the keys in the given order."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Train the tokenizer and write it into the given folders."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = train_tokenizer(args.seed)
    for folder in args.folders:
        save_tokenizer(tokenizer, folder)
    print(f"vocabulary of {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
