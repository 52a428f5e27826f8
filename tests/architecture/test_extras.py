"""docs/extras.md against pyproject.toml and the code: each extra is on the page, and something imports it."""

from __future__ import annotations

import re
import tomllib

from .sources import CHECKOUT, ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
SELF = re.compile(r"quire\[(.*)\]")


def _distributions(extra: str) -> list[str]:
    """Returns what an extra installs, other extras resolved."""
    names: list[str] = []
    for requirement in EXTRAS[extra]:
        match = SELF.fullmatch(requirement)
        if match:
            names += [name for other in match[1].split(",") for name in _distributions(other)]
        else:
            names.append(re.split(r"[<>=!~ ;\[]", requirement)[0])
    return names


def _rows() -> dict[str, str]:
    """Extra -> what it installs."""
    lines = (ROOT / "docs" / "extras.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {name.strip("`"): installs for name, installs, _ in rows}


def test_the_page_lists_what_is_declared() -> None:
    rows = _rows()
    assert list(rows) == list(EXTRAS)
    for extra, installs in rows.items():
        if extra != "all":
            assert installs.split(", ") == _distributions(extra)


def test_all_is_all_of_them() -> None:
    assert set(_distributions("all")) == {name for extra in EXTRAS if extra != "all" for name in _distributions(extra)}


def test_something_imports_what_an_extra_installs() -> None:
    imported = {found.package for found in CHECKOUT.all_imports}
    for path in (ROOT / "src").rglob("*.py"):  # by a dotted string: resolve("package.module:name")
        imported |= set(re.findall(r'"(\w+)(?:\.\w+)*:\w+"', path.read_text(encoding="utf-8")))
    for extra in EXTRAS:
        for name in _distributions(extra):
            top = "opentelemetry" if name.startswith("opentelemetry-") else name
            assert top in imported, f"nothing imports {name} of the extra {extra}"
