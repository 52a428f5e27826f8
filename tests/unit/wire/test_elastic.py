"""The words of elastic expert parallelism are those of the documents."""

from __future__ import annotations

from quire.wire.elastic import EEP_NOTIFICATION_CALL_ID, EEPNotificationType, ReconfigureRankType


def test_vocabulary() -> None:
    assert EEP_NOTIFICATION_CALL_ID == -1
    assert all(kind.value == kind.name for kind in EEPNotificationType)
    assert [kind.name for kind in EEPNotificationType] == [
        "NEW_CORE_ENGINES_INIT_READY",
        "NEW_CORE_ENGINES_WEIGHTS_INIT_READY",
        "RECONFIGURE_FINISHED",
        "SHUTDOWN_COMPLETE",
    ]
    assert ReconfigureRankType.KEEP_CURRENT_RANK == -1
    assert ReconfigureRankType.SHUTDOWN_CURRENT_RANK == -2
