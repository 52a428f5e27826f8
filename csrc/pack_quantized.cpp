// Packing of quantized values: four bytes of the packed form at a time, what one output takes of a line (quantized_layout.h).
#include <cstring>
#include <utility>

#include "context.h"
#include "quantized_layout.h"

namespace qk {
namespace {

// Bits of every second of the eight 4-bit values in `word`, from the first on, side by side.
uint32_t even_nibbles(uint32_t word) {
    word &= 0x0f0f0f0fu;
    word = (word | word >> 4) & 0x00ff00ffu;
    return (word | word >> 8) & 0xffffu;
}

struct QuantizedPanel {
    const qk_pack_quantized_args& a;
    const QuantizedShape shape;

    // The values of output `lane` of `block`; null if there is no such output. As in pack.cpp: halves take turns, block by block.
    const uint8_t* source(int64_t block, int64_t lane) const {
        const int64_t within = (shape.gated ? block / 2 : block) * BLOCK + lane;
        if (within >= shape.n) return nullptr;
        return static_cast<const uint8_t*>(a.values) + within * a.stride + (shape.gated ? block % 2 * a.half_stride : 0);
    }

    void pack(int64_t panel) const {
        uint8_t* to = static_cast<uint8_t*>(a.packed) + panel * shape.panel_bytes();
        memset(to, 0, size_t(shape.panel_bytes()));
        for (int64_t b = 0; b < PANEL_BLOCKS; ++b)
            for (int64_t lane = 0; lane < BLOCK; ++lane)
                if (const uint8_t* from = source(panel * PANEL_BLOCKS + b, lane)) pack_output(from, to + b * shape.block_bytes() + lane * 4);
    }

    // One output of a block; `to` is its place in the first line.
    void pack_output(const uint8_t* from, uint8_t* to) const {
        const int64_t word_inputs = bits_of(shape.form) == 4 ? 8 : 4, step_words = shape.step_inputs() / word_inputs;
        for (int64_t i = 0, word = 0; i < shape.k; i += word_inputs, ++word) {
            const int64_t count = shape.k - i < word_inputs ? shape.k - i : word_inputs;
            const uint32_t value = take(from, i, count);
            memcpy(to + word / step_words * shape.step_bytes() + word % step_words * LINE_BYTES, &value, 4);
        }
    }

    // The four bytes that the values of `count` inputs from `i` on become.
    uint32_t take(const uint8_t* from, int64_t i, int64_t count) const {
        uint8_t bytes[8] = {};
        uint32_t word;
        if (shape.form == QK_MXFP4) {
            memcpy(&word, from + i / 2, 4);
            return even_nibbles(word) | even_nibbles(word >> 4) << 16;
        }
        memcpy(bytes, from + i, size_t(count));
        if (shape.form == QK_W4) {
            word = 0;
            for (int j = 0; j < 8; ++j) word |= uint32_t(bytes[j] & 15) << (j % 2 * 16 + j / 2 * 4);
            return word;
        }
        if (shape.form != QK_W8A8) std::swap(bytes[1], bytes[2]);
        memcpy(&word, bytes, 4);
        return word;
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
