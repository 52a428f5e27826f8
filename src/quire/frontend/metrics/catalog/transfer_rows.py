"""Rows of the transfers of KV blocks: loads, saves, leases, and what a store holds."""

from __future__ import annotations

from operator import attrgetter

from quire.frontend.metrics.catalog.spec import MetricSpec, each, labelled, of_transfers
from quire.wire.kv_transfer import REJECTIONS, REMOTE_SAVE_OUTCOMES

TRANSFER_OUTCOMES = ("ok", "partial", "failed", "cancelled")
TIERS = ("disk", "remote", "peer")
SAVE_STATES = ("pinned", "postponed")
HELD_STATES = ("loading", "loaded", "pinned", "zombie", "quarantined", "leased")

TRANSFERS: tuple[MetricSpec, ...] = (
    of_transfers(
        name="kv_loads",
        kind="counter",
        help="Loads of KV blocks that have ended or were given up, by outcome: partial ones brought some blocks.",
        labels=("outcome",),
        known=each(TRANSFER_OUTCOMES),
        samples=lambda transfers: labelled(transfers.num_loads),
    ),
    of_transfers(
        name="kv_tier_loads",
        kind="counter",
        help="The same by tier. disk: the directory of --kv-store. remote: a block server. peer: another engine.",
        labels=("tier", "outcome"),
        known=tuple((tier, outcome) for tier in TIERS for outcome in TRANSFER_OUTCOMES),
        samples=lambda transfers: [
            ((tier, outcome), number)
            for tier, outcomes in transfers.num_tier_loads.items()
            for outcome, number in outcomes.items()
        ],
    ),
    of_transfers(
        name="kv_loads_begun",
        kind="counter",
        help="Loads of KV blocks that were ordered. They are those by outcome, and those in flight.",
        value=attrgetter("num_loads_begun"),
    ),
    of_transfers(
        name="kv_loads_in_flight",
        kind="gauge",
        help="Loads of KV blocks that requests wait for.",
        value=attrgetter("num_loads_in_flight"),
    ),
    of_transfers(
        name="kv_load_seconds",
        kind="histogram",
        help="Seconds that a request waited for a load that brought blocks.",
        values=attrgetter("load_seconds"),
        family="time_to_first_token",
    ),
    of_transfers(
        name="kv_records_read",
        kind="counter",
        help="Records that were read, by loads that have ended. They are those accepted, and those rejected.",
        value=attrgetter("num_read_records"),
    ),
    of_transfers(
        name="kv_records_accepted",
        kind="counter",
        help="Records that were read and are what they should be: tag, key and tokens agree.",
        value=attrgetter("num_accepted_records"),
    ),
    of_transfers(
        name="kv_records_rejected",
        kind="counter",
        help="Records of the store that were read and not used, by reason. mac: damaged, or of another key. key: of "
        "another block or model.",
        labels=("reason",),
        known=each(REJECTIONS),
        samples=lambda transfers: labelled(transfers.num_rejected_records),
    ),
    of_transfers(
        name="kv_audited_blocks",
        kind="counter",
        help="KV blocks that audit_share had computed instead of read, by outcome of the comparison with the store. "
        "skipped: not compared, because it was gone or unreadable, or too many waited.",
        labels=("outcome",),
        known=each(("same", "differs", "skipped")),
        samples=lambda transfers: labelled(transfers.num_audited_blocks),
    ),
    of_transfers(
        name="kv_saves_begun",
        kind="counter",
        help="KV blocks that were to be saved. They are those that were saved, that were dropped, and that wait.",
        value=attrgetter("num_saves_begun"),
    ),
    of_transfers(
        name="kv_saves_waiting",
        kind="gauge",
        help="KV blocks to be saved, by state. pinned: ordered. postponed: to be offered again, unless they are "
        "evicted before.",
        labels=("state",),
        known=each(SAVE_STATES),
        samples=lambda transfers: [((state,), transfers.num_waiting_saves.get(state, 0)) for state in SAVE_STATES],
    ),
    of_transfers(
        name="kv_save_lag_seconds",
        kind="histogram",
        help="Seconds from the time that a block was computed until it was saved; the oldest block of each save.",
        values=attrgetter("save_lags"),
        family="time_to_first_token",
    ),
    of_transfers(
        name="kv_saved_blocks",
        kind="counter",
        help="KV blocks that were saved outside the engine.",
        value=attrgetter("num_saved_blocks"),
    ),
    of_transfers(
        name="kv_saves_dropped",
        kind="counter",
        help="KV blocks that were to be saved and were not, by reason. pins: too many waited, or room was needed. "
        "evicted: postponed for too long. present: postponed, and stored meanwhile. full: the store or the disk. "
        "rate: the store is slower than the engine.",
        labels=("reason",),
        known=each(("pins", "evicted", "present", "full", "error", "rate")),
        samples=lambda transfers: labelled(transfers.num_dropped_blocks),
    ),
    of_transfers(
        name="kv_remote_saves_begun",
        kind="counter",
        help="Records of KV blocks that were to be put to a block server. They are those by outcome, and those that "
        "wait.",
        value=attrgetter("num_remote_saves_begun"),
    ),
    of_transfers(
        name="kv_remote_saves_waiting",
        kind="gauge",
        help="Records of KV blocks that wait to be put to a block server.",
        value=attrgetter("num_waiting_remote_saves"),
    ),
    of_transfers(
        name="kv_remote_saves",
        kind="counter",
        help="Records of KV blocks that were to be put to a block server, by outcome. stored: it has written it. "
        "present: it had it. full, rate, error: it has not written it. gone: it was deleted here before. refused: it "
        "takes none. pins: its block was needed here. away: it did not answer; the block is put again if it is still "
        "in memory.",
        labels=("outcome",),
        known=each(REMOTE_SAVE_OUTCOMES),
        samples=lambda transfers: labelled(transfers.num_remote_saves),
    ),
    of_transfers(
        name="kv_leases",
        kind="counter",
        help="Leases of KV blocks to other engines that have ended, by end. broken: the blocks were needed here.",
        labels=("end",),
        known=each(("released", "expired", "broken", "error")),
        samples=lambda transfers: labelled(transfers.num_leases),
    ),
    of_transfers(
        name="kv_held_blocks",
        kind="gauge",
        help="References of KV blocks that transfers hold, by state. zombie: of a load that was given up and has not "
        "ended. quarantined: the same for more than 5 s.",
        labels=("state",),
        known=each(HELD_STATES),
        samples=lambda transfers: [((state,), transfers.num_held_blocks.get(state, 0)) for state in HELD_STATES],
    ),
    of_transfers(
        name="kv_store_blocks",
        kind="gauge",
        help="KV blocks of this model in the store, as of the last step.",
        value=attrgetter("num_stored_blocks"),
    ),
    of_transfers(
        name="kv_store_bytes",
        kind="gauge",
        help="Bytes of the store as of the last step, those of other models included.",
        value=attrgetter("num_stored_bytes"),
    ),
)
