// The layout of packed weights, the same for every instruction set and element type.
//
// A row is 64 bytes: 16 outputs by one float32 input, or by two bfloat16 inputs side by side. A tile is 16 rows (1 KiB), what
// an AMX tile register holds. A panel is 64 outputs (4 blocks of 16); it is contiguous, its tiles in the order (input, block),
// so that multiplying by it reads memory once, in order. Outputs and inputs that are not there are zero. In a gated matrix block
// 2 i is block i of the first half and block 2 i + 1 block i of the second.
#pragma once

#include <cstdint>

#include "quire_kernels.h"

namespace qk {

constexpr int64_t BLOCK = 16, ROW_BYTES = 64, TILE_ROWS = 16, TILE_BYTES = 1024, PANEL_BLOCKS = 4;
constexpr int64_t PANEL = BLOCK * PANEL_BLOCKS, STEP_BYTES = TILE_BYTES * PANEL_BLOCKS;

inline __attribute__((always_inline)) int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct PackedShape {
    int64_t n, k;
    int32_t dtype, gated;

    __attribute__((always_inline)) int64_t inputs_per_row() const { return dtype == QK_BFLOAT16 ? 2 : 1; }
    // Inputs per tile: what k is padded to a multiple of.
    __attribute__((always_inline)) int64_t inputs_per_tile() const { return TILE_ROWS * inputs_per_row(); }
    __attribute__((always_inline)) int64_t tiles() const { return ceil_div(k, inputs_per_tile()); }
    __attribute__((always_inline)) int64_t blocks() const { return ceil_div(n, BLOCK) * (gated ? 2 : 1); }
    __attribute__((always_inline)) int64_t panels() const { return ceil_div(blocks(), PANEL_BLOCKS); }
    __attribute__((always_inline)) int64_t panel_bytes() const { return tiles() * STEP_BYTES; }
    // Where the row of 16 outputs of `block` begins, by number of rows along the inputs.
    __attribute__((always_inline)) int64_t row_offset(int64_t block, int64_t row) const {
        return block / PANEL_BLOCKS * panel_bytes() + row / TILE_ROWS * STEP_BYTES + block % PANEL_BLOCKS * TILE_BYTES +
               row % TILE_ROWS * ROW_BYTES;
    }
};

// What a block of 16 outputs takes of an adapter (qk_low_rank): `lines` of 64 bytes, as many h as inputs in a row of weights each. They are
// a whole number of tiles of at most TILE_ROWS lines, all of one size.
struct LowRankRange {
    int32_t first, lines, place;

    __attribute__((always_inline)) int64_t tiles() const { return ceil_div(lines, TILE_ROWS); }
};

}  // namespace qk
