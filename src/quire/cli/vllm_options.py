"""vLLM's flags on our command line: so that changing the program's name is all that a start script needs."""

from __future__ import annotations

from collections.abc import Collection

from quire.cli.options import Option
from quire.config.flags import parse_json_object
from quire.config.vllm_flags import VllmFlag, vllm_flags

GROUP = "Flags of vLLM without a counterpart"


def vllm_options(known: Collection[str]) -> list[Option]:
    """Every flag of vLLM's that is not among the names `known`."""
    return [_option(flag) for flag in vllm_flags().values() if flag.name not in known]


def _option(flag: VllmFlag) -> Option:
    is_json = flag.name.endswith("_config") and flag.name != "logging_config"
    return Option(
        name=flag.name,
        help=f"Refused: {flag.refused}." if flag.refused else f"No effect: {flag.ignored}.",
        group=GROUP,
        parse=parse_json_object if is_json else str,
        default=flag.default,
        metavar="JSON" if is_json else None,
        is_switch=flag.is_switch,
        takes_many=flag.takes_many,
        short=flag.short,
    )
