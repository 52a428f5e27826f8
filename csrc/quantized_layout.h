// The layout of packed quantized values, the same for every instruction set. Panels of 64 outputs in 4 blocks of 16, as in layout.h;
// a panel is contiguous, in steps of some inputs, each step block by block.
//
// QK_W8A8: a step is 64 inputs, a block of it 16 rows of 64 bytes, a row 16 outputs by four inputs side by side: what AMX and VNNI
// multiply. The others: a step is 32 inputs, a block of it lines of 64 bytes. A line is 32 lanes of 16 bits, output by output with
// two neighbouring inputs each, as in a row of bfloat16 weights; a lane holds, from its low bits up, the values of 2 (8 bits) or 4 (4 bits) such rows.
#pragma once

#include "layout.h"

namespace qk {

constexpr int64_t LINE_BYTES = 64, LANES = 32;

constexpr int bits_of(int32_t form) { return form == QK_W4 || form == QK_MXFP4 ? 4 : 8; }

struct QuantizedShape {
    int64_t n, k;
    int32_t form, gated;

    __attribute__((always_inline)) int64_t step_inputs() const { return form == QK_W8A8 ? 64 : 32; }
    __attribute__((always_inline)) int64_t steps() const { return ceil_div(k, step_inputs()); }
    __attribute__((always_inline)) int64_t block_bytes() const { return form == QK_W8A8 ? 1024 : 64 * bits_of(form); }
    __attribute__((always_inline)) int64_t step_bytes() const { return block_bytes() * PANEL_BLOCKS; }
    __attribute__((always_inline)) int64_t blocks() const { return ceil_div(n, BLOCK) * (gated ? 2 : 1); }
    __attribute__((always_inline)) int64_t panels() const { return ceil_div(blocks(), PANEL_BLOCKS); }
    __attribute__((always_inline)) int64_t panel_bytes() const { return steps() * step_bytes(); }
};

}  // namespace qk
