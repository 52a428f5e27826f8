"""`quire replay`: repeats the decisions of a recording without a model, and predicts the effect of other settings."""

from __future__ import annotations

from quire.cli.command_line import Arguments, CommandLine, Option, Positional
from quire.cli.option_groups import engine_options
from quire.config.engine_args import FLAGS
from quire.resolve import resolve

CHANGES = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "scheduling_policy": "scheduling_policy",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
    "watermark": "watermark",
}
"""Flags of a what-if question, and the field of `Changes` that each sets."""
NOT_OURS = {"model", "record", "record_prompts"}


def command_line() -> CommandLine:
    own = [
        Option(name="json", help="Print one JSON object.", is_switch=True, default=False),
        Option(name="check", help="Only replay, without predictions.", is_switch=True, default=False),
        Option(name="rerun", help="Also serve the recorded load with this model, and report the error of the "
               "prediction. Other engine flags are for this run.", metavar="MODEL"),
    ]  # fmt: skip
    return CommandLine(
        "quire replay",
        "Replay a recording (--record FILE) without a model: the scheduler must repeat every decision. "
        "With settings of the scheduler or the cache: predict their effect.",
        [*own, *engine_options(without=NOT_OURS)],
        Positional("file", "The recording."),
        epilog="What-if flags: " + ", ".join(FLAGS[name].option for name in CHANGES) + ".\n"
        "Exit code 1: a decision differs.",
    )


def run(args: Arguments) -> int:
    """Runs `replay_report.replay`, named by a string so that --help loads no engine."""
    code: int = resolve("quire.cli.replay_report:replay")(args)
    return code
