"""Every example runs as its reader would run it, and shows what it says it shows."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.scripts
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

SLOW_STEPS = {"streams": 0.05, "ledger": 0.1}
"""Example -> seconds by which the steps of its engine are longer: its streams last until a reader that waits for a
processor has seen a part of them."""


def environment(step_s: float = 0.0) -> dict[str, str]:
    """Variables of an example, whose engine waits so long before each step."""
    slow = {"QUIRE_FAILPOINTS": f"core.step.execute=sleep({step_s})"} if step_s else {}
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **slow}


def run(*argv: str, step_s: float = 0.0) -> str:
    """Standard output of a command of the examples' README, run from the project's root."""
    env = environment(step_s)
    command = [sys.executable, *(["-m", *argv] if argv[0] == "quire" else argv)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_generate(out: str) -> None:
    lines = out.splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'What is prefix caching?'",
        "'What is a KV block?'",
        "'What does num_preemptions mean?'",
    ]
    assert all(len(line.partition(" -> ")[2]) > 20 for line in lines)


def check_chat(out: str) -> None:
    assert re.findall(r"^(\w+): \S", out, flags=re.MULTILINE) == ["user", "assistant", "user", "assistant"]


def check_sampling(out: str) -> None:
    answers = re.findall(r"^answer \d: (.+)$", out, flags=re.MULTILINE)
    assert len(set(answers)) == 3
    assert "again: True\nalone: True\n" in out
    assert len(re.findall(r"^token \d+: .+ -?\d+\.\d\d, not .+ -\d+\.\d\d$", out, flags=re.MULTILINE)) == 5


def check_structured_output(out: str) -> None:
    person, choice, pattern, tag = out.splitlines()
    assert person == "person: ['age', 'first_name', 'languages'] int"
    assert choice in ("choice: large", "choice: small")
    assert re.fullmatch(r"regex: 20\d\d-\d\d-\d\d", pattern)
    assert re.fullmatch(r'tag: <call>"(up|down)"</call>', tag)


def check_prefix_caching(out: str) -> None:
    (num_first, cached_first), *others = [tuple(map(int, line.split()[:2])) for line in out.splitlines()[1:]]
    assert num_first > 100
    assert cached_first == 0
    assert len(others) == 3
    assert all(cached > 0.8 * num_first for _, cached in others)


def check_new_weights(out: str) -> None:
    first, second, third = out.splitlines()
    assert first.startswith("version 0: ")
    assert second.startswith("version step 1: ")
    assert first.partition(": ")[2] != second.partition(": ")[2]
    assert third == "version the old ones: the same answer as at first: True"


def check_streams(out: str) -> None:
    *answers, first = out.splitlines()
    assert len(answers) == 3
    assert all(int(line.split()[-2]) > 1 for line in answers)
    assert first.startswith("first piece: ")


def check_kill_the_core(out: str) -> None:
    assert len(re.findall(r"^Core process \d+ is killed\.$", out, flags=re.MULTILINE)) == 3
    assert len(set(re.findall(r"^Core process (\d+) takes its place\.$", out, flags=re.MULTILINE))) == 3
    assert len(re.findall(r"^equal: .+ '.{20,}'$", out, flags=re.MULTILINE)) == 8
    assert out.endswith("8 of 8 texts are equal to those of the undisturbed run.\n")


def check_same_bits(out: str) -> None:
    assert re.match(r"\d\d tokens, each with 5 log-probabilities\n", out)
    assert out.endswith("from a warm cache, the same bits: True\namong 30 others, the same bits: True\n")


def check_ledger(out: str) -> None:
    *equations, verdict = out.splitlines()
    assert verdict == "every law holds: True"
    assert len(equations) == 4
    for equation in equations:
        left, right = re.sub(r"\(.*\)", "", equation).split("=")
        assert int(re.findall(r"\d+", left)[0]) == sum(map(int, re.findall(r"\d+", right)))
    assert equations[0] == "24 requests received = 24 accepted + 0 rejected"
    # A reader that waits for the processor gets its whole answer as the first piece, and has nothing left to abort.
    assert re.search(r"\([1-8] aborted\)", equations[1])


def check_adapters(out: str) -> None:
    answers = re.findall(r"^ *(demo|json|pirate|bold): (.+)$", out, flags=re.MULTILINE)
    assert [name for name, _ in answers] == ["demo", "json", "pirate"] * 3 + ["bold"]
    for name, text in answers:
        match name:
            case "json":
                assert json.loads(text)["answer"]
            case "pirate":
                assert text.startswith("Arr! ")
                assert text.endswith(" Yo ho ho!")
            case "bold":
                assert re.fullmatch(r"\*\*.+\*\*", text)
    assert re.search(r"^loaded bold in \d+ ms$", out, flags=re.MULTILINE)
    assert "pieces of the streams meanwhile: [" in out


def check_warm_restart(out: str) -> None:
    cold, killed, warm = out.splitlines()
    line = r"(\d+) of (\d+) tokens were read, and (\[.+\]) came next"
    first, second = re.fullmatch(line, cold), re.fullmatch(line, warm)
    assert first is not None
    assert second is not None
    assert re.fullmatch(r"it was killed, and [\d,]+ bytes are stored", killed)
    assert (first[1], first[2], first[3]) == ("0", second[2], second[3])
    assert 0 <= int(second[2]) - int(second[1]) <= 16


CHECKS: dict[str, Callable[[str], None]] = {
    "generate": check_generate,
    "chat": check_chat,
    "sampling": check_sampling,
    "structured_output": check_structured_output,
    "prefix_caching": check_prefix_caching,
    "new_weights": check_new_weights,
    "adapters": check_adapters,
    "streams": check_streams,
    "kill_the_core": check_kill_the_core,
    "same_bits": check_same_bits,
    "ledger": check_ledger,
    "warm_restart": check_warm_restart,
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_shows_what_it_says(path: Path) -> None:
    CHECKS[path.stem](run(str(path.relative_to(ROOT)), step_s=SLOW_STEPS.get(path.stem, 0.0)))


def test_kill_the_core_on_a_terminal() -> None:
    """There it draws the streams in place, four beside one another."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    env = {**environment(step_s=0.02), "TERM": "xterm"}  # a reader that is late finds several tokens at once
    for name in ("COLUMNS", "LINES"):
        env.pop(name, None)
    with subprocess.Popen(
        [sys.executable, "examples/kill_the_core.py"], cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        out = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other end is closed (Linux)
                break
            if not data:
                break
            out += data
        os.close(ours)
        assert process.wait(400) == 0, out[-2000:]
    text = out.decode().replace("\r\n", "\n")
    assert text.endswith("8 of 8 texts are equal to those of the undisturbed run.\n")
    frames = re.split(r"\x1b\[\d+F", text)
    assert len(frames) > 10
    assert "What is prefix caching?  What is a KV block?" in frames[-1]
    assert all(len(re.sub(r"\x1b\[2K", "", line)) <= 100 for line in frames[5].split("\n"))


def test_the_batch_of_the_examples_is_answered_once(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    for _ in range(2):  # the second time there is nothing left to do
        run("quire", "batch", "examples/batch.jsonl", "-o", str(results))
        rows = {row["custom_id"]: row for row in map(json.loads, results.read_text(encoding="utf-8").splitlines())}
        assert sorted(rows) == ["block", "caching", "seeds", "text"]
        assert [row["error"] for row in rows.values()] == [None] * 4
        assert len(rows["seeds"]["response"]["body"]["choices"]) == 2


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"examples/([\w.]+)", page)) - {"README.md"}
    assert named == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}


def test_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    code, output = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    ).groups()  # type: ignore[union-attr]
    program = tmp_path / "readme.py"
    program.write_text(code, encoding="utf-8")
    assert run(str(program)) == output
