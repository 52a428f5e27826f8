"""Evaluate the exported checkpoints on phrasings and instances that training never sees, and print the table.

Answers are generated greedily with transformers from the shipped files, so the figures are those of the shipped
weights. An answer counts only if the whole text, up to the end token, is exactly the expected one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tools.demo_model import topics
from tools.demo_model.documents import CALL_END, CALL_START, Message, Tool
from tools.demo_model.extraction import draw_extraction, word_lists
from tools.demo_model.small_tasks import calculate, draw_capital, draw_completion, draw_operands, draw_sum, draw_words
from tools.demo_model.tool_tasks import draw_offer, draw_tool_talk
from tools.demo_model.topics import Exchange
from tools.demo_model.train import FOLDERS

SEED = 20240
REPORT = Path(__file__).parents[2] / "docs" / "demo_model.md"
TABLE_MARK = "<!-- table -->"


@dataclass(frozen=True)
class Case:
    """One prompt and the expected text. ``plain`` prompts go in as they are, the others through the chat template."""

    row: str
    expected: str
    plain: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class Result:
    """What the model wrote for a case. ``ended`` says whether it stopped by itself."""

    case: Case
    text: str
    ended: bool

    @property
    def right(self) -> bool:
        return self.ended and self.text == self.case.expected


def topic_cases(rng: random.Random) -> list[Case]:
    """Ability (a): questions about Quire in held-out phrasings, as chat and as plain text."""
    written, templates = topics.held_written(), topics.held_templates(rng)
    cases = [_chat(_row(item), item) for item in written + templates + topics.held_blind()]
    systems = word_lists()["systems_held"]
    cases += [
        _chat("(a) written paraphrase, with a system prompt", item, system=rng.choice(systems))
        for item in rng.sample(written, 100)
    ]
    cases += [
        _chat("(a) template, lower case with a typo", item) for item in topics.noisy(rng.sample(templates, 150), rng)
    ]
    plain = rng.sample(written, 100) + rng.sample(templates, 100)
    return cases + [Case("(a) plain text, question then newline", f"\n{i.answer}", plain=i.question) for i in plain]


def _row(item: Exchange) -> str:
    return {"written": "(a) written paraphrase", "blind": "(a) blind question"}.get(item.kind, f"(a) {item.kind}")


def chat_cases(rng: random.Random) -> list[Case]:
    """Ability (b): follow-ups whose subject stands in the turn before, and a change of subject."""
    cases = []
    for first, follow_up in topics.held_follow_ups(rng):
        messages = (*_turns(first), _user(follow_up.question))
        cases.append(Case(f"(b) follow-up {follow_up.intent}", follow_up.answer, messages=messages))
    questions = topics.held_templates(rng, 1)
    for _ in range(80):
        one, two, three = rng.sample(questions, 3)
        history = (*_turns(one), *_turns(two), _user(three.question))
        cases.append(Case("(b) third question of a chat", three.answer, messages=history))
    return cases


def json_cases(rng: random.Random) -> list[Case]:
    """Ability (c): JSON with unseen values in unseen instructions."""
    items = [draw_extraction(rng, held=True) for _ in range(150)]
    return [_chat(f"(c) {item.kind}", item) for item in items]


def tool_cases(rng: random.Random) -> list[Case]:
    """Ability (c): the right call, the reply to its result, and no call where none is needed."""
    cases = []
    for _ in range(120):
        talk = draw_tool_talk(rng, held=True)
        messages = talk.messages()
        tools = tuple(talk.tools)
        cases.append(Case("(c) tool call", talk.call(), messages=tuple(messages[:1]), tools=tools))
        cases.append(Case("(c) reply to a tool result", talk.use.reply, messages=tuple(messages[:3]), tools=tools))
    for item in rng.sample(topics.held_templates(rng, 1), 60):
        tools = tuple(entry.schema() for entry in draw_offer(rng))
        cases.append(Case("(c) tools offered, none needed", item.answer, messages=(_user(item.question),), tools=tools))
    return cases


def small_cases(rng: random.Random) -> list[Case]:
    """Ability (d): sums, word lists, and the sentences people type first."""
    sums = [draw_sum(rng, held=True) for _ in range(200)]
    products = [item for item in (draw_sum(rng) for _ in range(800)) if item.kind == "sum *"][:80]
    cases = [_chat(f"(d) {item.kind.replace('sum', 'unseen sum')}", item) for item in sums]
    cases += [_chat("(d) product up to 12 x 12 (seen)", item) for item in products]
    for _ in range(80):
        a, sign, b = draw_operands(rng, held=True)
        cases.append(Case("(d) plain 12 + 7 =", f" {calculate(a, sign, b)}", plain=f"{a} {sign} {b} ="))
    words = [draw_words(rng, held=True) for _ in range(160)]
    cases += [_chat(f"(d) {item.kind} words", item) for item in words]
    cases += [_chat("(d) capitals (seen)", draw_capital(rng)) for _ in range(40)]
    seen = [draw_completion(rng) for _ in range(60)]
    return cases + [Case("(d) well-known sentences (seen)", rest, plain=prompt) for prompt, rest in seen]


def statement_cases(rng: random.Random) -> list[Case]:
    """The first words of an answer as plain text; these texts are in the training data."""
    cases = []
    for topic in topics.load_topics():
        if not topic.about:
            words = topic.answers["what"].split(" ")
            given = min(5, len(words) - 2)
            rest = " " + " ".join(words[given:])
            cases.append(Case("(a) plain start of a sentence (seen)", rest, plain=" ".join(words[:given])))
    return cases


def all_cases() -> list[Case]:
    """The whole evaluation; the same on every machine."""
    makers = (topic_cases, statement_cases, chat_cases, json_cases, tool_cases, small_cases)
    return [case for number, make in enumerate(makers) for case in make(random.Random(SEED + number))]


def _chat(row: str, item: Exchange, system: str | None = None) -> Case:
    opening = ({"role": "system", "content": system},) if system else ()
    return Case(row, item.answer, messages=(*opening, _user(item.question)))


def _user(question: str) -> Message:
    return {"role": "user", "content": question}


def _turns(item: Exchange) -> tuple[Message, Message]:
    return _user(item.question), {"role": "assistant", "content": item.answer}


class Generator:
    """A checkpoint in transformers, answering batches of cases greedily."""

    def __init__(self, folder: Path, device: str) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model = model.to(device).eval()
        self.ends = set(self.model.generation_config.eos_token_id)

    def prompt(self, case: Case) -> str:
        """The text that goes into the model."""
        if case.plain is not None:
            return case.plain
        return str(
            self.tokenizer.apply_chat_template(
                list(case.messages), tools=list(case.tools) or None, add_generation_prompt=True, tokenize=False
            )
        )

    def answer(self, cases: list[Case], batch: int = 64) -> list[Result]:
        """Results in the order of the cases; batches are formed by length, to pad little."""
        prompts = [self.prompt(case) for case in cases]
        order = sorted(range(len(cases)), key=lambda at: (len(cases[at].expected), len(prompts[at])))
        results: dict[int, Result] = {}
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            for at, tokens in zip(part, self._generate([prompts[at] for at in part]), strict=True):
                results[at] = self._result(cases[at], tokens)
        return [results[at] for at in range(len(cases))]

    @torch.no_grad()
    def _generate(self, prompts: list[str]) -> list[list[int]]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        out = self.model.generate(**inputs, max_new_tokens=96, do_sample=False)
        return [row[inputs["input_ids"].shape[1] :].tolist() for row in out]

    @torch.no_grad()
    def agreement(self, results: list[Result], batch: int = 64) -> tuple[int, int]:
        """How many tokens of these texts this model would have written too, given the text before, and of how many.

        This is what a draft model is for: the share bounds how often speculation of one token succeeds.
        """
        right = total = 0
        ordered = sorted(results, key=lambda result: len(result.text))
        for start in range(0, len(ordered), batch):
            prompts = [self.tokenizer.encode(self.prompt(one.case)) for one in ordered[start : start + batch]]
            texts = [self.tokenizer.encode(one.text) for one in ordered[start : start + batch]]
            width = max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True))
            ids = torch.zeros(len(prompts), width, dtype=torch.long)
            for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                ids[row, : len(prompt) + len(text)] = torch.tensor(prompt + text)
            guesses = self.model(ids.to(self.model.device)).logits.argmax(-1).cpu()
            for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                at = len(prompt)
                right += int((guesses[row, at - 1 : at + len(text) - 1] == ids[row, at : at + len(text)]).sum())
                total += len(text)
        return right, total

    def _result(self, case: Case, tokens: list[int]) -> Result:
        end = next((at for at, token in enumerate(tokens) if token in self.ends), None)
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=False)
        return Result(case, text, ended=end is not None)


def well_formed(result: Result) -> bool | None:
    """Whether JSON or a tool call parses; None for rows without a format."""
    if result.case.row.startswith("(c) json"):
        return _parses(result.text)
    if result.case.row == "(c) tool call":
        inside = result.text.removeprefix(CALL_START).removesuffix(CALL_END)
        return result.text.startswith(CALL_START) and result.text.endswith(CALL_END) and _parses(inside)
    return None


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def summarise(results: list[Result]) -> dict[str, tuple[int, int]]:
    """Right answers and cases per row, in the order of the rows, with the totals that the goals speak of."""
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        rows[result.case.row].append(result)
    table = {row: (sum(result.right for result in found), len(found)) for row, found in rows.items()}
    for row in [name for name in rows if name.startswith("(c) json") or name == "(c) tool call"]:
        table[f"{row}: parses"] = (sum(bool(well_formed(result)) for result in rows[row]), len(rows[row]))
    held = [name for name in rows if name.startswith("(a)") and "(seen)" not in name]
    table["(a) all held-out phrasings"] = (sum(table[name][0] for name in held), sum(table[name][1] for name in held))
    table["stopped by itself"] = (sum(result.ended for result in results), len(results))
    return dict(sorted(table.items()))


def format_table(tables: dict[str, dict[str, tuple[int, int]]]) -> str:
    """A Markdown table with one column per model."""
    names = list(tables)
    lines = ["| row | cases | " + " | ".join(names) + " |", "|---|---:|" + "---:|" * len(names)]
    for row, (_, count) in next(iter(tables.values())).items():
        shares = (f"{100 * tables[name][row][0] / tables[name][row][1]:.1f} %" for name in names)
        lines.append(f"| {row} | {count} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def write_report(table: str) -> None:
    """Replace the table in docs/demo_model.md."""
    before, _, rest = REPORT.read_text(encoding="utf-8").partition(TABLE_MARK)
    _, _, after = rest.partition(TABLE_MARK)
    REPORT.write_text(f"{before}{TABLE_MARK}\n{table}\n{TABLE_MARK}{after}", encoding="utf-8")


def main() -> None:
    """Print the table for the chosen checkpoints."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", default=[], help="main, draft or checkpoint folders; both models if none")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case, for a quick look")
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    parser.add_argument("--write", action="store_true", help="put the table into docs/demo_model.md")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables: dict[str, dict[str, tuple[int, int]]] = {}
    written: list[Result] = []
    for name in args.names or list(FOLDERS):
        generator = Generator(FOLDERS.get(name, Path(name)), device)
        results = generator.answer(all_cases()[:: args.every])
        written = written or results
        tables[name] = summarise(results)
        tables[name]["tokens of the first model's texts that this model expects"] = generator.agreement(written)
        for result in results if args.wrong else ():
            if not result.right:
                _print_wrong(result)
    table = format_table(tables)
    print(table)
    if args.write:
        write_report(table)


def _print_wrong(result: Result) -> None:
    asked = result.case.plain or result.case.messages[-1]["content"]
    print(f"{result.case.row}\n  asked    {asked!r}\n  expected {result.case.expected!r}\n  got      {result.text!r}")


if __name__ == "__main__":
    main()
