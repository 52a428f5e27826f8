"""The random numbers of sampling: a pure function of (seed, output index), with no state to lose.

Philox4x32-10, a counter-based generator: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC '11.
The key is the request's seed, the counter the index of the output token. In numpy on the host, so that every device
draws the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64Array = npt.NDArray[np.uint64]

ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_KEY_STEPS = np.array([[(r * w) & 0xFFFFFFFF for w in _WEYL] for r in range(ROUNDS)], dtype=np.uint64)[:, :, None]
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counters: U64Array, keys: U64Array) -> U64Array:
    """counters: [4, n], keys: [2, n], every element below 2**32. Returns [4, n] of the same kind."""
    even, odd = counters[0::2], counters[1::2]  # [2, n] each
    for round_keys in (keys + _KEY_STEPS) & _LOW_32:
        products = (_MULTIPLIERS * even)[::-1]
        even = (products >> _32) ^ odd ^ round_keys
        odd = products & _LOW_32
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: U64Array, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1), one for each (seed, output index).

    They are multiples of 2**-52, not 2**-53: then u * x < x holds for every positive float64 x after rounding, which
    the inverse CDF relies on.
    """
    unsigned = indices.astype(np.uint64)
    zeros = np.zeros_like(unsigned)
    counters = np.stack([unsigned & _LOW_32, unsigned >> _32, zeros, zeros])
    words = philox4x32(counters, np.stack([seeds & _LOW_32, seeds >> _32]))
    bits = ((words[0] << _32) | words[1]) >> np.uint64(12)
    result: npt.NDArray[np.float64] = bits * 2.0**-52
    return result
