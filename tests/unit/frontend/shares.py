"""Shares of API keys as a request takes them."""

from __future__ import annotations

from quire.frontend.admission import AdmissionControl
from quire.frontend.http.admitted import Tenants, TenantShare


def take_share(
    tenants: Tenants, owner: bytes, num_reqs: int, num_tokens: int, control: AdmissionControl | None = None
) -> TenantShare:
    """Checks and takes a share. `control`, without limits of its own, counts refusals."""
    share = tenants.share_of(owner, num_reqs, num_tokens)
    (control or AdmissionControl()).reserve_all([], share.charges)
    share.take()
    return share
