"""Text and stop strings against a brute-force oracle that decodes everything again at every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.frontend.text.detokenizer import IncrementalDetokenizer, StopMatch, StopStrings, TextDetokenizer, TextStream
from quire.frontend.text.tokenizer import REPLACEMENT, Tokenizer
from quire.sampling_params import SamplingParams
from tests.seeds import examples

from ..toy_tokenizers import KINDS

Tokenizers = dict[str, Tokenizer]
TEXTS = st.text(st.sampled_from("ab cdefgh é中数据😀👩‍👩‍👧🇩🇪\u0301\n"), max_size=30)


def stream_text(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **options: bool) -> str:
    stream = TextStream(tokenizer, prompt, **options)
    return "".join(stream.push(i) for i in ids) + stream.flush()


# -- text -------------------------------------------------------------------------------------------------------------


@given(text=TEXTS, kind=st.sampled_from(KINDS))
def test_text_is_the_full_decode(tokenizers_by_kind: Tokenizers, text: str, kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    for skip in (True, False):
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert stream_text(tokenizer, ids, skip_special=skip) == expected


@given(data=st.data(), kind=st.sampled_from(["byte_level", "wordpiece", "unigram"]))
def test_text_of_random_tokens_is_the_full_decode(
    tokenizers_by_kind: Tokenizers, data: st.DataObject, kind: str
) -> None:
    """Random ids are what a random-weight model says: mostly invalid UTF-8 for a byte-level tokenizer."""
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=60))
    for skip in (True, False):
        assert stream_text(tokenizer, ids, skip_special=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_looking_texts_up_changes_nothing(tokenizers_by_kind: Tokenizers, data: st.DataObject, kind: str) -> None:
    """A decoder of unknown kind has every token decoded in its window; the result is the same."""
    tokenizer = tokenizers_by_kind[kind]
    assert tokenizer.has_fixed_texts
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=40))
    fast, slow = (TextStream(tokenizer, ids[:4], skip_special=False) for _ in range(2))
    slow._look_up = False
    assert [fast.push(i) for i in ids] == [slow.push(i) for i in ids]
    assert fast.flush() == slow.flush()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_without_text_is_no_context(tokenizers_by_kind: Tokenizers, kind: str) -> None:
    """After ids that have no text, looked up or decoded, the first token is the first of its text: no leading space."""
    tokenizer = tokenizers_by_kind[kind]
    word = tokenizer.encode("word", add_special_tokens=False)
    unknown = len(tokenizer) + 3
    assert tokenizer.decode([unknown]) == ""
    for look_up in (True, False):
        stream = TextStream(tokenizer, [unknown], skip_special=False)
        stream._look_up = stream._look_up and look_up
        stream._plain_texts = stream._plain_texts if look_up else {}
        assert "".join(map(stream.push, word)) + stream.flush() == tokenizer.decode(word)


@given(data=st.data())
def test_byte_fallback_never_takes_text_back(tokenizers_by_kind: Tokenizers, data: st.DataObject) -> None:
    """One bad byte makes the decoder read the whole run of byte tokens as garbage; what is out already stays."""
    tokenizer = tokenizers_by_kind["metaspace"]
    byte_ids = [i for i in tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>" for b in range(256)) if i is not None]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(byte_ids), st.integers(3, len(tokenizer) - 1)), max_size=40))
    text, full = stream_text(tokenizer, ids), tokenizer.decode(ids, skip_special_tokens=True)
    if REPLACEMENT not in full:
        assert text == full
    assert text.encode().count(REPLACEMENT.encode()) <= full.count(REPLACEMENT)


def bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>" for b in data)
    assert None not in ids
    return [i for i in ids if i is not None]


def test_byte_fallback_rewriting_its_run(tokenizers_by_kind: Tokenizers) -> None:
    tokenizer = tokenizers_by_kind["metaspace"]
    ids = [*bytes_of(tokenizer, "中".encode() + b"\xe4"), *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.decode(ids) == REPLACEMENT * 4 + " a"
    assert stream_text(tokenizer, ids) == "中" + REPLACEMENT + " a"


def test_a_character_appears_with_its_last_byte(tokenizers_by_kind: Tokenizers) -> None:
    tokenizer = tokenizers_by_kind["metaspace"]
    stream = TextStream(tokenizer)
    assert [stream.push(i) for i in bytes_of(tokenizer, "é😀".encode())] == ["", "é", "", "", "", "😀"]
    assert stream.flush() == ""


def byte_level_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    by_text = {tokenizer.backend.decoder.decode([token]): i for token, i in tokenizer.get_vocab().items()}
    printable = {bytes([b]): by_text[chr(b)] for b in range(33, 127)}
    alphabet = {token: i for token, i in tokenizer.get_vocab().items() if len(token) == 1}
    order = sorted(alphabet)  # the byte alphabet keeps printable latin-1 and moves the rest past U+0100, in byte order
    moved = iter(t for t in order if ord(t) >= 0x100)
    table = {b: alphabet[chr(b)] if chr(b) in alphabet else alphabet[next(moved)] for b in range(256)}
    assert all(table[b[0]] == i for b, i in printable.items())
    return [table[b] for b in data]


@pytest.mark.parametrize(
    "data", [b"\x80" * 40 + "中a".encode(), b"\xe4\xb8" * 30 + b"x", b"\xf0\x9f" + b"\xff" * 25, b"\xe4"]
)
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_invalid_bytes_are_let_go(tokenizer: Tokenizer, data: bytes, cut: int) -> None:
    """Garbage does not pile up, and a character after (or inside) it is not torn apart."""
    ids = byte_level_ids(tokenizer, data[: len(data) - cut])
    stream = TextStream(tokenizer)
    shown = ""
    for position, token_id in enumerate(ids):
        shown += stream.push(token_id)
        assert len(shown) >= position // 3 - 16
    assert shown + stream.flush() == tokenizer.decode(ids)


def test_overflow_without_a_clean_cut_lets_go_of_everything(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = TextStream(tokenizer)
    monkeypatch.setattr(TextStream, "_decode", lambda self, ids: f"{len(ids)}{REPLACEMENT}")
    assert [stream.push(5) for _ in range(17)][-1] == f"17{REPLACEMENT}"
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", ["metaspace", "unigram", "wordpiece"])
def test_the_first_word_keeps_its_space_after_a_prompt(tokenizers_by_kind: Tokenizers, kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    half = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]) == "the quick")
    assert stream_text(tokenizer, ids[half:], ids[:half]) == " brown fox"
    assert stream_text(tokenizer, ids[half:]) == "brown fox"


def test_a_prompt_that_ends_inside_a_character_gives_no_context(tokenizer: Tokenizer) -> None:
    prompt = byte_level_ids(tokenizer, b"\xff" * 20 + "中".encode()[:2])
    assert stream_text(tokenizer, byte_level_ids(tokenizer, "中".encode()[2:] + b"a"), prompt) == REPLACEMENT + "a"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|><|user|>b", add_special_tokens=False)
    assert stream_text(tokenizer, ids) == "ab"
    assert stream_text(tokenizer, ids, skip_special=False) == "a<|end|><|user|>b"
    stream = TextStream(tokenizer)
    assert [stream.push(ids[1]) for _ in range(1000)] == [""] * 1000
    assert stream.push(ids[0]) == "a"


def test_spaces_between_special_tokens(tokenizers_by_kind: Tokenizers) -> None:
    tokenizer = tokenizers_by_kind["wordpiece"]
    ids = [*tokenizer.encode("the [SEP][PAD][SEP] fox", add_special_tokens=False)]
    assert stream_text(tokenizer, ids, skip_special=False, spaces=True) == "the [SEP] [PAD] [SEP] fox"
    assert stream_text(tokenizer, ids, skip_special=False, spaces=False) == "the [SEP][PAD][SEP] fox"


# -- requests ---------------------------------------------------------------------------------------------------------


def oracle(tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams) -> tuple[str, str | None, int]:
    """(text, stop string, tokens kept), decoding everything again after each token."""
    stops, text, searched_from = list(params.stop or ()), "", 0
    for count in range(1, len(ids) + 1):
        decoded = tokenizer.decode(ids[:count], skip_special_tokens=params.skip_special_tokens)
        text = text if decoded.endswith(REPLACEMENT) else decoded
        if count <= params.min_tokens:
            held = [n for n in range(len(text) - searched_from + 1) if is_beginning(text[len(text) - n :], stops)]
            searched_from = len(text) - max(held)
            continue
        matches = [
            (end, start, text[start:end])
            for start in range(searched_from, len(text))
            for end in range(start + 1, len(text) + 1)
            if text[start:end] in stops
        ]
        if matches:
            end, start, stop = min(matches)
            return text[: end if params.include_stop_str_in_output else start], stop, count
    return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens), None, len(ids)


def is_beginning(tail: str, stops: Sequence[str]) -> bool:
    return any(stop != tail and stop.startswith(tail) for stop in stops)


STOP_LISTS = st.lists(st.text(st.sampled_from("ab c中😀"), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=examples(100))
@example(text="aaa", stops=["a", "aaa"], min_tokens=2, include=True, delta=False, cuts=[2], kind="byte_level")
@given(
    text=st.text(st.sampled_from("abc 中😀"), max_size=24),
    stops=STOP_LISTS,
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    delta=st.booleans(),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    kind=st.sampled_from(["byte_level", "unigram"]),
)
def test_stop_strings_against_the_oracle(
    tokenizers_by_kind: Tokenizers,
    text: str,
    stops: list[str],
    min_tokens: int,
    include: bool,
    delta: bool,
    cuts: list[int],
    kind: str,
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=99, include_stop_str_in_output=include)
    expected_text, expected_stop, kept = oracle(tokenizer, ids, params)
    detokenizer = TextDetokenizer(tokenizer, params)
    shown, stop, rest = "", None, list(ids)
    for cut in [*cuts, len(ids) + 1]:
        step, rest = rest[:cut], rest[cut:]
        stop = detokenizer.update(step)
        new = detokenizer.get_next_output_text(stop is not None, delta)
        assert (shown + new if delta else new).startswith(shown)  # nothing shown is ever taken back
        shown = shown + new if delta else new
        assert expected_text.startswith(shown)
        if stop is not None:
            break
    final = detokenizer.get_next_output_text(True, delta)
    assert (shown + final if delta else final) == expected_text
    assert stop == expected_stop
    assert detokenizer.token_ids == ids[:kept]


@given(text=TEXTS, cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40), kind=st.sampled_from(KINDS))
def test_text_does_not_depend_on_how_tokens_arrive(
    tokenizers_by_kind: Tokenizers, text: str, cuts: list[int], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    at_once, in_steps = (TextDetokenizer(tokenizer, SamplingParams(), ids[:3]) for _ in range(2))
    at_once.update(ids)
    deltas, rest = [], list(ids)
    for cut in [*cuts, len(ids) + 1]:
        in_steps.update(rest[:cut])
        rest = rest[cut:]
        deltas.append(in_steps.get_next_output_text(False, True))
    deltas.append(in_steps.get_next_output_text(True, True))
    assert "".join(deltas) == at_once.get_next_output_text(True, False)
    assert in_steps.get_next_output_text(True, False) == "".join(deltas)


def run(tokenizer: Tokenizer, text: str, **params: object) -> tuple[list[str], str | None]:
    """(deltas, stop string) of a text fed token by token."""
    detokenizer = TextDetokenizer(tokenizer, SamplingParams(**params))  # type: ignore[arg-type]
    deltas = []
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        stop = detokenizer.update([token_id])
        deltas.append(detokenizer.get_next_output_text(stop is not None, True))
        if stop is not None:
            return deltas, stop
    deltas.append(detokenizer.get_next_output_text(True, True))
    return deltas, None


def test_a_stop_string_over_several_tokens_never_shows(tokenizer: Tokenizer) -> None:
    deltas, stop = run(tokenizer, "xyz###end", stop=["##en"])
    assert stop == "##en"
    assert "".join(deltas) == "xyz#"
    assert all("##" not in delta for delta in deltas)


def test_only_what_may_be_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    deltas, stop = run(tokenizer, "1#2##3", stop=["##!"])
    assert stop is None
    assert [d for d in deltas if d] == ["1", "#2", "##3"]


def test_include_stop_string_shows_it_without_holding_back(tokenizer: Tokenizer) -> None:
    deltas, stop = run(tokenizer, "1##!9", stop=["##!"], include_stop_str_in_output=True)
    assert stop == "##!"
    assert "".join(deltas) == "1##!"
    assert [d for d in deltas if d][:2] == ["1", "#"]


def test_min_tokens_lets_early_stop_strings_pass(tokenizer: Tokenizer) -> None:
    deltas, stop = run(tokenizer, "1!2!3", stop=["!"], min_tokens=2)
    assert ("".join(deltas), stop) == ("1!2", "!")
    assert len(tokenizer.encode("1!2!", add_special_tokens=False)) == 4


def test_a_stop_token_stays_out_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab!", add_special_tokens=False)
    for include, text in ((False, "ab"), (True, "ab!")):
        params = SamplingParams(include_stop_str_in_output=include)
        detokenizer = TextDetokenizer(tokenizer, params)
        assert detokenizer.update(ids, stop_terminated=True) is None
        assert detokenizer.get_next_output_text(True, False) == text
        assert detokenizer.token_ids == ids


def test_an_unfinished_character_shows_at_the_end_only(tokenizer: Tokenizer) -> None:
    detokenizer = TextDetokenizer(tokenizer, SamplingParams())
    detokenizer.update(byte_level_ids(tokenizer, b"a\xe4\xb8"))
    assert detokenizer.get_next_output_text(False, False) == "a"
    assert detokenizer.get_next_output_text(True, False) == "a" + REPLACEMENT
    assert detokenizer.get_next_output_text(True, False) == "a" + REPLACEMENT


def test_without_detokenize_there_are_only_ids(tokenizer: Tokenizer) -> None:
    for detokenizer in (
        IncrementalDetokenizer.from_params(tokenizer, SamplingParams(detokenize=False), [1]),
        IncrementalDetokenizer.from_params(None, SamplingParams(), [1]),
    ):
        assert detokenizer.update([5, 6], stop_terminated=True) is None
        assert detokenizer.token_ids == [5, 6]
        assert detokenizer.get_next_output_text(True, False) == ""
    assert isinstance(IncrementalDetokenizer.from_params(tokenizer, SamplingParams(), [1]), TextDetokenizer)


TEXT = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("text", "stops", "start", "match"),
    [
        ("hello", ["x"], 0, None),
        ("hello", ["ll"], 0, StopMatch("ll", 2, 4)),
        ("hello", ["lo", "ll"], 0, StopMatch("ll", 2, 4)),  # the one that is complete first, whatever the order
        ("hello", ["l", "hel"], 0, StopMatch("hel", 0, 3)),  # complete at the same character: the longest
        ("abc", ["abc", "b"], 0, StopMatch("b", 1, 2)),
        ("aa", ["a"], 1, StopMatch("a", 1, 2)),
        ("aa", ["aa"], 1, None),
        ("", ["a"], 0, None),
        ("abc", [], 0, None),
    ],
)
def test_the_first_stop_string_is_found(text: str, stops: list[str], start: int, match: StopMatch | None) -> None:
    assert StopStrings(stops).find(text, start) == match


@given(text=TEXT, stops=STOPS, start=st.integers(0, 12))
def test_find_is_what_a_reader_character_by_character_finds(text: str, stops: list[str], start: int) -> None:
    expected = None
    for end in range(start, len(text) + 1):
        read = text[start:end]
        ending = [stop for stop in stops if read.endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            expected = StopMatch(longest, end - len(longest), end)
            break
    assert StopStrings(stops).find(text, start) == expected


@given(text=TEXT, stops=STOPS, start=st.integers(0, 12))
def test_held_back_is_the_longest_beginning_of_a_stop_string(text: str, stops: list[str], start: int) -> None:
    tail = text[start:]
    expected = max(
        (n for n in range(len(tail) + 1) if any(n < len(s) and s.startswith(tail[len(tail) - n :]) for s in stops)),
        default=0,
    )
    assert StopStrings(stops).held_back(text, start) == expected


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [("ab", ["abc"], 2), ("ab", ["bcd"], 1), ("ab", ["ab"], 0), ("", ["a"], 0), ("ab", [], 0), ("aab", ["aabaa"], 3)],
)
def test_held_back_examples(text: str, stops: list[str], held: int) -> None:
    assert StopStrings(stops).held_back(text) == held
