"""docs/extras.md against pyproject.toml and the code: what is declared, and which of it is in use."""

from __future__ import annotations

import re
import tomllib

from .sources import CHECKOUT, ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
IMPORT_NAMES = {"pillow": "PIL", "opentelemetry-sdk": "opentelemetry"}
SELF = re.compile(r"quire\[(.*)\]")


def _distributions(extra: str) -> list[str]:
    """What an extra installs, other extras resolved."""
    names: list[str] = []
    for requirement in EXTRAS[extra]:
        match = SELF.fullmatch(requirement)
        if match:
            names += [name for other in match[1].split(",") for name in _distributions(other)]
        else:
            names.append(re.split(r"[<>=!~ ;\[]", requirement)[0])
    return names


def _rows() -> dict[str, tuple[str, str]]:
    """Extra -> (installs, state)."""
    lines = (ROOT / "docs" / "extras.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {name.strip("`"): (installs, state) for name, installs, _, state in rows}


def test_the_page_lists_what_is_declared() -> None:
    rows = _rows()
    assert list(rows) == ["hf", "bench", *(name for name in EXTRAS if name not in ("hf", "bench"))]
    for extra, (installs, _) in rows.items():
        if extra != "all":
            assert installs.split(", ") == _distributions(extra)


def test_all_is_all_of_them() -> None:
    assert set(_distributions("all")) == {name for extra in EXTRAS if extra != "all" for name in _distributions(extra)}


def test_an_extra_is_declared_only_as_long_as_nothing_imports_it() -> None:
    imported = {found.package for found in CHECKOUT.all_imports}
    for extra, (_, state) in _rows().items():
        names = {IMPORT_NAMES.get(name, name) for name in _distributions(extra)}
        if state == "declared":
            assert not names & imported, f"docs/extras.md says that nothing uses {extra}"
        elif extra == "hf":
            assert names & imported
