// The layout of packed quantized values, the same for every instruction set. Panels of 64 outputs in 4 blocks of 16, as in layout.h;
// a panel is contiguous, in steps of some inputs, each step block by block.
//
// QK_W8A8: a step is 64 inputs, a block of it 16 rows of 64 bytes, a row 16 outputs by four inputs side by side: what AMX and VNNI
// multiply. QK_W8 and QK_W4: a step is 32 inputs, a block of it lines of 64 bytes. A line is 32 lanes of 16 bits, output by output with
// two neighbouring inputs each, as in a row of bfloat16 weights; a lane holds, from its low bits up, the values of 2 or 4 such rows.
#pragma once

#include "layout.h"

namespace qk {

constexpr int64_t LINE_BYTES = 64, LANES = 32;

struct QuantizedShape {
    int64_t n, k;
    int32_t form, gated;

    __attribute__((always_inline)) int64_t step_inputs() const { return form == QK_W8A8 ? 64 : 32; }
    __attribute__((always_inline)) int64_t steps() const { return ceil_div(k, step_inputs()); }
    __attribute__((always_inline)) int64_t block_bytes() const { return form == QK_W8A8 ? 1024 : form == QK_W8 ? 512 : 256; }
    __attribute__((always_inline)) int64_t step_bytes() const { return block_bytes() * PANEL_BLOCKS; }
    __attribute__((always_inline)) int64_t blocks() const { return ceil_div(n, BLOCK) * (gated ? 2 : 1); }
    __attribute__((always_inline)) int64_t panels() const { return ceil_div(blocks(), PANEL_BLOCKS); }
    __attribute__((always_inline)) int64_t panel_bytes() const { return steps() * step_bytes(); }
};

}  // namespace qk
