"""Elastic expert parallelism: what is said when the number of engines changes (S3-DEF-003, -004, -048, -049).

The vocabulary only: engines that can be reconfigured come with data parallelism.
"""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec

EEP_NOTIFICATION_CALL_ID = -1
"""A `UtilityOutput` with this call id is no answer but a notice of the engine; nothing is sent back."""


class EEPNotificationType(Enum):
    """Notices of an engine that is being reconfigured. The value is the name."""

    NEW_CORE_ENGINES_INIT_READY = "NEW_CORE_ENGINES_INIT_READY"
    NEW_CORE_ENGINES_WEIGHTS_INIT_READY = "NEW_CORE_ENGINES_WEIGHTS_INIT_READY"
    RECONFIGURE_FINISHED = "RECONFIGURE_FINISHED"
    SHUTDOWN_COMPLETE = "SHUTDOWN_COMPLETE"


class ReconfigureRankType(IntEnum):
    """In place of a rank; negative, so that none is meant."""

    KEEP_CURRENT_RANK = -1
    SHUTDOWN_CURRENT_RANK = -2


class ReconfigureDistributedRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """To an engine: the new shape of the data-parallel group it is in. Ranks may be a `ReconfigureRankType`."""

    new_data_parallel_size: int
    new_data_parallel_rank: int
    new_data_parallel_rank_local: int
    new_data_parallel_master_ip: str
    new_data_parallel_master_port: int
    new_data_parallel_master_port_list: list[int]
    coord_store_port: int
