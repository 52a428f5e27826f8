"""The drafters, by the method's name in `--speculative-config`."""

from __future__ import annotations

from typing import NamedTuple


class DrafterSpec(NamedTuple):
    """A row of `DRAFTERS`."""

    factory: str
    """package.module:Class, called with a `DrafterContext`; imported when the method is chosen."""
    reads_hidden: bool = False
    """True if it needs the target's hidden states of every step: `propose` is called with no rows, too."""
    has_kv: bool = False
    """True if it is a `ModelDrafter`: it has weights, and layers in the KV cache."""


DRAFTERS: dict[str, DrafterSpec] = {
    "draft_model": DrafterSpec("quire.worker.spec_decode.draft_model:DraftModel", has_kv=True),
    "eagle": DrafterSpec("quire.worker.spec_decode.hidden_head:HiddenHead", reads_hidden=True, has_kv=True),
    "eagle3": DrafterSpec("quire.worker.spec_decode.hidden_head:HiddenHead", reads_hidden=True, has_kv=True),
    "ngram": DrafterSpec("quire.worker.spec_decode.ngram:NgramDrafter"),
    "suffix": DrafterSpec("quire.worker.spec_decode.suffix:SuffixDrafter"),
}
CUSTOM_CLASS = "custom_class"
"""Method whose drafter is `Drafting.drafter_cls`."""


def find_drafter(method: str, drafter_cls: str | None) -> DrafterSpec:
    """Returns the row of a method; a row for `drafter_cls` (package.module:Class or package.module.Class) if it is
    custom_class."""
    if method != CUSTOM_CLASS:
        return DRAFTERS[method]
    assert drafter_cls is not None, "the configuration names the class"
    return DrafterSpec(drafter_cls if ":" in drafter_cls else ":".join(drafter_cls.rsplit(".", 1)))
