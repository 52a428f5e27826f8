"""Every measure on a small package whose numbers can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.measures import Checkout, attributes_of, main, parameters_of

FILES = {
    "__init__.py": "",
    "errors.py": '"""Errors."""\n\nclass E(Exception):\n    """One."""\n',
    "engine/core.py": '''"""Core."""
from typing import TYPE_CHECKING

from quire import errors
from quire.wire.frames import Frame

if TYPE_CHECKING:
    from quire.engine.step import Step


class Core:
    def __init__(self, a: int, /, b: int, *rest: int, c: int = 0, **more: int) -> None:
        self.a, self.b = a, b
        self.rest: tuple[int, ...] = rest
        self.rest[0].c = c

    def step(self, frame):
        # a comment

        from quire import errors
        assert frame
        raise errors.E
''',
    "engine/step.py": '''"""Step."""
from quire.engine.core import Core
START = "quire.cli.serve:main"

class Step: ...
''',
    "wire/frames.py": '"""Frames."""\nfrom quire.errors import E\nFrame = E\n',
    "frontend/llm.py": '"""LLM."""\n',
    "frontend/openai/app.py": '"""App."""\n' + "x = 1\n" * 400,
    "cli/serve.py": '"""Serve."""\n',
}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    for name, text in FILES.items():
        path = tmp_path / "src" / "quire" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("x = 1\n" * 43)
    return Checkout(tmp_path)


def test_lines_are_counted_per_folder_and_in_the_core_ring(checkout: Checkout) -> None:
    lines = checkout.lines_per_folder()
    assert lines["engine"] == (27, 2)
    assert lines[""] == (4, 2)
    assert lines["frontend/openai"] == (401, 1)
    assert checkout.core_ring() == (27 + 3 + 1, 4)  # not frontend/openai


def test_code_lines_leave_out_blank_lines_comments_and_docstrings(checkout: Checkout) -> None:
    assert checkout.modules["quire.engine.core"].num_code_lines == 14
    assert checkout.modules["quire.errors"].num_code_lines == 1


def test_attributes_and_parameters_are_those_of_self_and_named(checkout: Checkout) -> None:
    core = checkout.modules["quire.engine.core"]
    assert attributes_of(core.classes[0]) == {"a", "b", "rest"}
    assert [arg.arg for arg in parameters_of(core.functions[0])] == ["a", "b", "c"]


def test_a_cycle_for_type_checkers_is_counted_apart(checkout: Checkout) -> None:
    assert checkout.cycles() == []
    assert checkout.cycles(typing_too=True) == [["quire.engine.core", "quire.engine.step"]]


def test_a_file_earns_its_name_by_importers_lines_or_a_door(checkout: Checkout) -> None:
    unearned = [source.module for source in checkout.unearned()]
    # errors has two importers, app has 401 lines, a string names serve
    assert unearned == ["quire.engine.core", "quire.engine.step", "quire.frontend.llm", "quire.wire.frames"]


def test_the_command_prints_every_measure(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(checkout.root), "--unearned"])
    printed = {line[:50].strip(): line for line in capsys.readouterr().out.splitlines()}
    text = "\n".join(printed.values())
    for row in ("modules; median / mean lines", "longest file", "asserts : raises", "frontend/openai"):
        assert row in text
    assert "1 : 1" in text
    assert "50 % (1 of 2)" in text  # annotated functions
    assert "0.10 (43 lines, 1 files)" in text
    assert "imports inside functions" in text


def test_a_directory_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
