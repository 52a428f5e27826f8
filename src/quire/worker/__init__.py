"""The worker's side: everything that touches tensors.

Importing it settles how torch's idle OpenMP threads wait, which must happen before torch is loaded: asleep, not
spinning. A spinning thread that shares its core with another process holds the whole step up until its time slice is
over: on a busy 2-core machine a small model ran 35 times slower (docs/performance.md). OMP_WAIT_POLICY in the
environment wins.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
