"""The worker: everything that touches tensors.

Importing it makes torch's idle OpenMP threads sleep instead of spin, which must be set before torch is loaded. A
spinning thread that shares its core with another process holds up the whole step until its time slice is over: on a
busy 2-core machine a small model ran 35 times slower (docs/performance.md). OMP_WAIT_POLICY in the environment wins.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
