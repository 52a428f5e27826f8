"""Shares of API keys as a request takes them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.frontend.admission import AdmissionControl, Charge
from quire.frontend.http.auth import Tenants


def take_share(
    tenants: Tenants, owner: bytes, num_reqs: int, num_tokens: int, control: AdmissionControl | None = None
) -> Sequence[Charge]:
    """Checks and takes a share. `control`, without limits of its own, counts refusals."""
    charges = tenants.charges(owner, num_reqs, num_tokens)
    (control or AdmissionControl()).reserve_all([], charges)
    return charges


def release(charges: Sequence[Charge]) -> None:
    """Gives a share back."""
    for quota, amount in charges:
        quota.change(-amount)
