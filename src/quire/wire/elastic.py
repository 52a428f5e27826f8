"""Another number of engines that share experts: what the frontend asks of each, and what engines report by themselves.

`engine/elastic.py` has the states of an engine meanwhile, `frontend/client/elastic.py` the whole course.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

EEP_NOTIFICATION_CALL_ID = -1
"""Call id of an engine's own notification: no call has it, and no answer is expected."""


class EEPNotificationType(StrEnum):
    """Notifications of an engine whose group changes."""

    RECONFIGURE_FINISHED = "RECONFIGURE_FINISHED"
    """Report of an engine that has its new experts, and has joined the new group."""
    SHUTDOWN_COMPLETE = "SHUTDOWN_COMPLETE"
    """Report of an engine that is not in the new group, and ends."""


class ReconfigureRankType(IntEnum):
    """Values of `new_data_parallel_rank` that are no ranks."""

    KEEP_CURRENT_RANK = -1
    SHUTDOWN_CURRENT_RANK = -2
    """The engine is not in the new group."""


class ReconfigureDistributedRequest(msgspec.Struct, frozen=True):
    """The group that an engine prepares for. vLLM's addresses and ports have no meaning here: engines meet in a page
    and in a file that they have inherited."""

    new_data_parallel_size: int
    new_data_parallel_rank: int = ReconfigureRankType.KEEP_CURRENT_RANK
    new_data_parallel_rank_local: int = ReconfigureRankType.KEEP_CURRENT_RANK
    new_data_parallel_master_ip: str = ""
    new_data_parallel_master_port: int = 0
    new_data_parallel_master_port_list: list[int] = []
    coord_store_port: int = 0
    generation: int = 0
    """Number of the group."""
    group_file: str = ""
    """Page of the group."""
