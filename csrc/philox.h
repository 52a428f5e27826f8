// The random number of a (seed, output index): worker/sample/torch_kernel.py, to the bit.
// Philox4x32-10: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC '11.
#pragma once

#include "vec.h"

namespace QK_ISA {

// In [0, 1), a multiple of 2^-52.
QK_INLINE double uniform(uint64_t seed, uint64_t index) {
    uint32_t counter[4] = {uint32_t(index), uint32_t(index >> 32), 0, 0};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t even = uint64_t(0xD2511F53u) * counter[0], odd = uint64_t(0xCD9E8D57u) * counter[2];
        const uint32_t next[4] = {uint32_t(odd >> 32) ^ counter[1] ^ key[0], uint32_t(odd),
                                  uint32_t(even >> 32) ^ counter[3] ^ key[1], uint32_t(even)};
        memcpy(counter, next, sizeof next);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return double((uint64_t(counter[0]) << 32 | counter[1]) >> 12) * 0x1p-52;
}

}  // namespace QK_ISA
