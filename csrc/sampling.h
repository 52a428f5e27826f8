// A row of logits, surveyed once: which stretches of it can hold what is looked for.
//
// A row is cut into blocks of 1,024 tokens, and the survey keeps the largest of every 64 in one (those that share a lane). The
// k-th largest of these is no larger than the k-th largest of the row, and a block without one above a threshold is never
// looked at again: most of a vocabulary is read twice, and nothing of it sorted.
#pragma once

#include <cfloat>
#include <math.h>

#include "context.h"
#include "vec_math.h"

namespace QK_ISA {

constexpr int64_t BLOCK = 1024;

QK_INLINE int64_t block_count(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK; }

// Tokens from `at`; past the end there are only tokens that are never chosen.
QK_INLINE F16 tokens_at(const float* x, int64_t at, int64_t vocab) {
    if (at + 16 <= vocab) return load(x + at);
    const int n = at < vocab ? int(vocab - at) : 0;
    return select(lanes(0, n), load_n(x + at, n), set1(-INFINITY));
}

struct Row {
    const float* x;
    int64_t vocab, num_blocks;
    float* peaks;  // [num_blocks, 16]
    float max;
};

QK_INLINE bool has_above(const Row& row, int64_t block, float bound) {
    return bits(less(set1(bound), load(row.peaks + 16 * block))) != 0;
}
QK_INLINE int64_t block_end(const Row& row, int64_t block) {
    return block + 1 < row.num_blocks ? (block + 1) * BLOCK : row.vocab;
}

// Fills in `peaks`, which has room for 16 floats per block. NaNs count for nothing.
QK_INLINE Row survey(const float* x, int64_t vocab, float* peaks) {
    Row row{x, vocab, block_count(vocab), peaks, 0.0f};
    const F16 least = set1(-INFINITY);
    F16 most = least;
    for (int64_t block = 0; block < row.num_blocks; ++block) {
        F16 m[4] = {least, least, least, least};
        const int64_t end = block_end(row, block);
        int64_t i = block * BLOCK;
        for (; i + 64 <= end; i += 64)
            for (int j = 0; j < 4; ++j) m[j] = max(load(x + i + 16 * j), m[j]);
        for (; i < end; i += 16) m[0] = max(tokens_at(x, i, vocab), m[0]);
        const F16 peak = max(max(m[0], m[1]), max(m[2], m[3]));
        store(peaks + 16 * block, peak);
        most = max(peak, most);
    }
    row.max = reduce_max(most);
    return row;
}

}  // namespace QK_ISA
