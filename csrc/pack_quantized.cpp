// Packing of quantized values.
#include <cstring>

#include "context.h"
#include "quantized_layout.h"

namespace qk {
namespace {

struct QuantizedPanel {
    const qk_pack_quantized_args& a;
    const QuantizedShape shape;

    // The values of output `lane` of `block`; null if there is no such output. As in pack.cpp: halves take turns, block by block.
    const int8_t* source(int64_t block, int64_t lane) const {
        const int64_t within = (shape.gated ? block / 2 : block) * BLOCK + lane;
        if (within >= shape.n) return nullptr;
        return a.values + (within + (shape.gated ? block % 2 * shape.n : 0)) * a.stride;
    }

    void pack(int64_t panel) const {
        uint8_t* to = static_cast<uint8_t*>(a.packed) + panel * shape.panel_bytes();
        memset(to, 0, size_t(shape.panel_bytes()));
        for (int64_t b = 0; b < PANEL_BLOCKS; ++b)
            for (int64_t lane = 0; lane < BLOCK; ++lane)
                if (const int8_t* from = source(panel * PANEL_BLOCKS + b, lane))
                    for (int64_t i = 0; i < shape.k; ++i) place(to + i / shape.step_inputs() * shape.step_bytes() + b * shape.block_bytes(), lane, i % shape.step_inputs(), from[i]);
    }

    // Value of input `i` of a step, in the step's part of one block.
    void place(uint8_t* block, int64_t lane, int64_t i, int8_t value) const {
        if (shape.form == QK_W8A8) {
            block[i / 4 * ROW_BYTES + lane * 4 + i % 4] = uint8_t(value);
            return;
        }
        const int64_t row = i / 2, per_lane = shape.form == QK_W8 ? 2 : 4, bits = shape.form == QK_W8 ? 8 : 4;
        uint8_t* at = block + row / per_lane * LINE_BYTES + (lane * 2 + i % 2) * 2;
        uint16_t old;
        memcpy(&old, at, 2);
        const uint16_t mask = uint16_t((1 << bits) - 1);
        old = uint16_t(old | (uint16_t(value) & mask) << (row % per_lane * bits));
        memcpy(at, &old, 2);
    }
};

}  // namespace
}  // namespace qk

using namespace qk;

int64_t qk_quantized_bytes(int64_t n, int64_t k, int32_t form, int32_t gated) {
    const QuantizedShape shape{n, k, form, gated};
    return shape.panels() * shape.panel_bytes();
}

void qk_pack_quantized(qk_context* context, const qk_pack_quantized_args* args) {
    const QuantizedPanel panels{*args, {args->n, args->k, args->form, args->gated}};
    auto work = [&](int64_t begin, int64_t end, int) {
        for (int64_t panel = begin; panel < end; ++panel) panels.pack(panel);
    };
    context->parallel(panels.shape.panels(), 1, work);
}
