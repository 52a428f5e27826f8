// Order among a few numbers. Compiled once, for every CPU: what the standard library makes of its templates for one instruction
// set must never be linked into the kernels of another.
#pragma once

#include <cstdint>

namespace qk {

// A key that orders tokens: the larger logit first, then the smaller token id. NaNs have some place or other.
static inline __attribute__((always_inline)) uint64_t token_key(float logit, int64_t token_id) {
    const float value = logit + 0.0f;  // no negative zero
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~uint32_t(token_id));
}
static inline __attribute__((always_inline)) int64_t token_of_key(uint64_t key) { return int64_t(uint32_t(~uint32_t(key))); }

// The k-th largest, 1 <= k <= n. Reorders `values`, none of which is a NaN.
float kth_largest(float* values, int64_t n, int64_t k);
// The largest first.
void sort_descending(float* values, int64_t n);
// The first k are then the largest k, the largest first.
void sort_largest(uint64_t* keys, int64_t n, int64_t k);

}  // namespace qk
