"""docs/recipes/add_a_model.md is followed to the letter, so that it stays true.

Its example is in the house by now: the recipe must end where the repository is, and work from where it was before.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from quire.config.family_defaults import FAMILY_DEFAULTS
from quire.testing import tiny_models
from quire.worker.models import seed_oss
from quire.worker.models.registry import MODELS

from .test_oracle import assert_same_logits

RECIPE = Path(__file__).parents[4] / "docs" / "recipes" / "add_a_model.md"
FAMILY = "seed_oss"


def test_the_recipe_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = RECIPE.read_text(encoding="utf-8")
    tables: list[Any] = [MODELS, FAMILY_DEFAULTS, tiny_models.FAMILY_CONFIGS]
    rows = [ast.literal_eval("{" + row + "}") for row in re.findall(r'^    (".*": .*,)$', text, flags=re.MULTILINE)]
    assert len(rows) == len(tables)
    for table, row in zip(tables, rows, strict=True):
        for key, value in row.items():
            assert table[key] == value, f"{key} has another row in the repository than in the recipe"
            monkeypatch.delitem(table, key)
            monkeypatch.setitem(table, key, value)

    source = re.search(r'^    """Seed-OSS.*?(?=^\S)', text, flags=re.MULTILINE | re.DOTALL)
    assert source is not None
    written = textwrap.dedent(source.group())
    assert written.strip() == Path(seed_oss.__file__).read_text(encoding="utf-8").strip()
    module = types.ModuleType("seed_oss")
    exec(written, module.__dict__)
    monkeypatch.setitem(sys.modules, MODELS["SeedOssForCausalLM"].partition(":")[0], module)

    assert_same_logits(tiny_models.make_tiny_checkpoint(tmp_path, FAMILY), 5, 200)
