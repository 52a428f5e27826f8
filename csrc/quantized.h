// Linear layers on quantized weights, one or a group of them (linear.h): how the work is cut. The products are in quantized.cpp (vectors) and quantized_amx.cpp (tiles).
//
// Row-invariance. Int8 weights and inputs (QK_W8A8): a row of inputs is quantized by its own maximum, and integer sums are exact. Weights
// only (QK_W8, QK_W4, QK_E4M3): the values themselves, exact in either float type, are multiplied with the inputs; a group of inputs is one sum
// that starts at zero and takes them in order, and the sums of the groups, each scaled, are added in order. QK_MXFP4: values times their power
// of two are exact in bfloat16, too; they are multiplied with the inputs as plain weights are (linear.h), and give the same bits.
#pragma once

#include <utility>

#include "linear.h"
#include "quantized_layout.h"
#include "vec_int8.h"

namespace QK_ISA {

using qk::QuantizedShape;

// f(0), ..., f(N - 1), each with a constant of its own: GCC 12 unrolls loops over an array of registers too late, and then keeps a
// copy of it in memory, written at every product.
template <int... I, class F>
QK_INLINE void each_of(std::integer_sequence<int, I...>, const F& f) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
QK_INLINE void each(const F& f) {
    each_of(std::make_integer_sequence<int, N>(), f);
}
#define QK_EACH_AS(index) [&](auto index) __attribute__((always_inline))

constexpr int64_t STEP_INPUTS = 32;  // of weights alone
constexpr float SMALLEST_MAXIMUM = 1e-30f;  // a row of nothing larger is a row of zeros

// -- int8 weights and inputs ---------------------------------------------------------------------------------------------

// One row of inputs as integers, padded with zeros; returns the scale. Not a number, if the row holds one, or an infinity.
template <class Dot, class E>
float quantize_row(const E* x, int64_t k, int64_t padded, typename Dot::E* to) {
    F16 largest = zero(), probe = zero();
    for (int64_t i = 0; i < k; i += 16) {
        const F16 v = load_n(x + i, int(k - i < 16 ? k - i : 16));
        largest = max(largest, abs(v));
        probe = fma(v, zero(), probe);  // 0, or not a number
    }
    const float maximum = reduce_max(largest);
    const F16 factor = set1(maximum > SMALLEST_MAXIMUM ? 127.0f / maximum : 0.0f), limit = set1(127.0f);
    for (int64_t i = 0; i < padded; i += 16) {
        const F16 v = i < k ? load_n(x + i, int(k - i < 16 ? k - i : 16)) : zero();
        Dot::store_inputs(to + i, max(min(round_even(mul(v, factor)), limit), sub(zero(), limit)));
    }
    return maximum / 127.0f + reduce_add(probe);
}

template <class Dot>
struct Int8Inputs {
    const typename Dot::E* values;  // [m, stride]
    const float* scales;            // [m]
    int64_t stride;
};

template <class Dot>
Int8Inputs<Dot> quantize_inputs(qk_context& context, const qk_linear_args& a, const QuantizedShape& shape) {
    const int64_t stride = shape.steps() * shape.step_inputs();
    auto* values = (typename Dot::E*)context.inner_scratch(size_t(a.m * stride) + size_t(a.m) * sizeof(float));
    float* scales = (float*)(values + a.m * stride);
    auto work = [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            auto* to = values + row * stride;
            scales[row] = a.dtype == QK_BFLOAT16 ? quantize_row<Dot>((const bf16*)a.x + row * a.x_stride, a.k, stride, to)
                                                 : quantize_row<Dot>((const float*)a.x + row * a.x_stride, a.k, stride, to);
        }
    };
    context.parallel(a.m, 16, work);
    return {values, scales, stride};
}

// Integer sums [rows, PANEL] to floats, in place. `at` is the panel's first output among all.
template <class Dot>
QK_INLINE void scale_sums(const qk_quantization& q, int64_t at, const float* row_scales, int64_t rows, int32_t* sums) {
    for (int64_t row = 0; row < rows; ++row, sums += PANEL)
        for (int64_t o = 0; o < PANEL; o += 16) {
            S16 sum = load_sums(sums + o);
            if (Dot::has_offset) sum = subtract(sum, load_sums(q.corrections + at + o));
            const F16 scaled = mul(to_floats(sum), load(q.scales + at + o));
            store_f32((float*)(sums + o), mul(scaled, set1(row_scales[row])));
        }
}

// `Product::multiply(x, stride, rows, panel, steps, sums)` fills int32 sums [rows, PANEL] with x times a panel of weights.
template <class Product>
void int8_linear_with(qk_context& context, const qk::GroupedLinearArgs& g) {
    using Dot = typename Product::Dot;
    const qk_linear_args& a = g.linear;
    const QuantizedShape shape{a.n, a.k, g.quantization->form, a.gated};
    const Int8Inputs<Dot> x = quantize_inputs<Dot>(context, a, shape);
    Adapters adapters(context, a);
    auto work = [&](int64_t begin, int64_t end, int thread) {
        adapters.shrink();
        GroupedPieces pieces{g, shape.panels()};
        Product product;
        for (int64_t piece = begin; piece < end; ++piece) {
            const Piece p = pieces.find(piece);
            if (p.from >= p.to) continue;
            const int64_t rows = p.to - p.from, panel = p.group * shape.panels() + p.panel;
            int32_t* sums = (int32_t*)context.thread_scratch(thread, size_t(rows * PANEL) * sizeof(int32_t));
            product.multiply(x.values + p.from * x.stride, x.stride, rows, (const char*)a.packed + panel * shape.panel_bytes(),
                             shape.steps(), sums);
            scale_sums<Dot>(*g.quantization, panel * PANEL, x.scales + p.from, rows, sums);
            adapters.expand(p.panel, p.from, p.to, (float*)sums);
            finish_rows(layer_of(g, p.group), p.panel, p.from, p.to, (const float*)sums);
        }
    };
    context.parallel(GroupedPieces{g, shape.panels()}.count(), 1, work);
}

// -- weights only ----------------------------------------------------------------------------------------------------------

// Inputs with rows padded with zeros to whole steps, and, where weights have zero points, the sum of each row over each group.
template <class E>
struct GroupedInputs {
    const E* values;
    int64_t stride;
    const float* group_sums;  // [m, groups]
};

template <class E>
GroupedInputs<E> group_inputs(qk_context& context, const qk_linear_args& a, const qk_quantization& q, int64_t steps, int64_t groups) {
    const int64_t padded = steps * STEP_INPUTS, copied = padded == a.k ? 0 : a.m * padded;
    const int64_t copied_bytes = qk::ceil_div(copied * int64_t(sizeof(E)), 64) * 64;
    const int64_t sum_count = q.zeros ? a.m * groups : 0;
    GroupedInputs<E> inputs{(const E*)a.x, a.x_stride, nullptr};
    if (!copied && !sum_count) return inputs;
    char* memory = (char*)context.inner_scratch(size_t(copied_bytes + sum_count * int64_t(sizeof(float))));
    E* copy = (E*)memory;
    float* sums = (float*)(memory + copied_bytes);
    auto work = [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            const E* x = (const E*)a.x + row * a.x_stride;
            if (copied) {
                memcpy(copy + row * padded, x, size_t(a.k) * sizeof(E));
                memset(copy + row * padded + a.k, 0, size_t(padded - a.k) * sizeof(E));
            }
            for (int64_t g = 0; sum_count && g < groups; ++g) {
                const int64_t first = g * q.group_size, last = first + q.group_size < a.k ? first + q.group_size : a.k;
                F16 sum = zero();
                for (int64_t i = first; i < last; i += 16) sum = add(sum, load_n(x + i, int(last - i < 16 ? last - i : 16)));
                sums[row * groups + g] = reduce_add(sum);
            }
        }
    };
    context.parallel(a.m, 16, work);
    if (copied) inputs.values = copy, inputs.stride = padded;
    inputs.group_sums = sums;
    return inputs;
}

// f(form) with a form of weights only as a constant.
template <class F>
QK_INLINE void for_form(int32_t form, const F& f) {
    switch (form) {
        case QK_W8: return f(std::integral_constant<int, QK_W8>());
        case QK_W4: return f(std::integral_constant<int, QK_W4>());
        case QK_E4M3: return f(std::integral_constant<int, QK_E4M3>());
        default: return f(std::integral_constant<int, QK_MXFP4>());
    }
}

// What the sum of a group of inputs becomes: totals += (sum - zeros * the inputs' sum) * scales, group by group of a panel.
struct GroupScales {
    const float *scales, *zeros;  // [groups, PANEL]; null: ones, zeros
    const float* input_sums;      // [rows, stride], those of one group; the next is one further
    int64_t stride;

    __attribute__((always_inline)) void add_to(float* total, F16 sum, int64_t row, int64_t output) const {
        if (zeros) sum = sub(sum, mul(load_f32(zeros + output), set1(input_sums[row * stride])));
        store_f32(total, scales ? fma(sum, load_f32(scales + output), load_f32(total)) : add(sum, load_f32(total)));
    }
    // Those of other rows and outputs, from these on.
    __attribute__((always_inline)) GroupScales at(int64_t row, int64_t output) const {
        return {scales ? scales + output : nullptr, zeros ? zeros + output : nullptr, zeros ? input_sums + row * stride : nullptr, stride};
    }
    __attribute__((always_inline)) GroupScales after(int64_t groups) const {
        return {scales ? scales + groups * PANEL : nullptr, zeros ? zeros + groups * PANEL : nullptr, zeros ? input_sums + groups : nullptr, stride};
    }
};

// A panel of values; with QK_MXFP4 [steps, PANEL] exponents, too.
struct PanelValues {
    const char* values;
    const uint8_t* exponents;
};

// `Product::multiply(x, stride, rows, panel, steps, group_steps, scales, scratch, sums, totals)` adds x times a panel of weights to float
// totals [rows, PANEL]. `sums` are as many, for what it likes.
template <class Product>
void weights_only_linear_with(qk_context& context, const qk::GroupedLinearArgs& g) {
    using E = typename Product::E;
    const qk_linear_args& a = g.linear;
    const qk_quantization& q = *g.quantization;
    const QuantizedShape shape{a.n, a.k, q.form, a.gated};
    const int64_t steps = shape.steps(), groups = q.exponents ? 1 : qk::ceil_div(a.k, q.group_size);
    const int64_t group_steps = groups == 1 ? steps : q.group_size / STEP_INPUTS;
    const GroupedInputs<E> x = group_inputs<E>(context, a, q, steps, groups);
    Adapters adapters(context, a);
    auto work = [&](int64_t begin, int64_t end, int thread) {
        adapters.shrink();
        GroupedPieces pieces{g, shape.panels()};
        Product product(q.form);
        for (int64_t piece = begin; piece < end; ++piece) {
            const Piece p = pieces.find(piece);
            if (p.from >= p.to) continue;
            const int64_t rows = p.to - p.from, panel = p.group * shape.panels() + p.panel, at = panel * groups * PANEL;
            const size_t sum_bytes = size_t(rows * PANEL) * sizeof(float);
            char* scratch = (char*)context.thread_scratch(thread, Product::SCRATCH_BYTES + 2 * sum_bytes);
            float *totals = (float*)(scratch + Product::SCRATCH_BYTES), *sums = (float*)(scratch + Product::SCRATCH_BYTES + sum_bytes);
            memset(totals, 0, sum_bytes);
            const GroupScales scales{q.scales ? q.scales + at : nullptr, q.zeros ? q.zeros + at : nullptr,
                                     q.zeros ? x.group_sums + p.from * groups : nullptr, groups};
            const PanelValues values{(const char*)a.packed + panel * shape.panel_bytes(),
                                     q.exponents ? q.exponents + panel * steps * PANEL : nullptr};
            product.multiply(x.values + p.from * x.stride, x.stride, rows, values, steps, group_steps, scales, scratch, sums, totals);
            adapters.expand(p.panel, p.from, p.to, totals);
            finish_rows(layer_of(g, p.group), p.panel, p.from, p.to, totals);
        }
    };
    context.parallel(GroupedPieces{g, shape.panels()}.count(), 1, work);
}

// -- values to floats --------------------------------------------------------------------------------------------------------

QK_INLINE bf16 exact_bf16(int value) {
    const float wide = float(value);
    uint32_t bits;
    memcpy(&bits, &wide, 4);
    return bf16(bits >> 16);
}

// 1 sign, 4 exponent and 3 mantissa bits, the exponent less 7; without infinities. In bfloat16 the same bits further apart, but for
// the smallest, multiples of 2^-9 below 2^-6, which are normal numbers there.
constexpr int E4M3_REBIAS = (127 - 7) << 7;
QK_INLINE bf16 e4m3_to_bf16(int code) {
    const int magnitude = code & 0x7f, sign = (code & 0x80) << 8;
    static const bf16 SMALLEST[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    return bf16(sign | (magnitude < 8 ? SMALLEST[magnitude] : (magnitude << 4) + E4M3_REBIAS));
}

// 1 sign, 2 exponent and 1 mantissa bits: 0, .5, 1, 1.5, 2, 3, 4, 6. Times 2^(exponent - 127), which is at least 2.
QK_INLINE bf16 mxfp4_to_bf16(int code, int exponent) {
    const int magnitude = code & 7, sign = (code & 8) << 12;
    const int bits = magnitude > 1 ? (magnitude << 6) + 0x3f00 : magnitude * 0x3f00;
    return bf16(sign | (magnitude ? bits + (exponent - 127) * 0x80 : 0));
}

// A line's value of one lane.
template <int FORM>
QK_INLINE bf16 expand_value(uint16_t lane, int shift, int exponent) {
    constexpr int BITS = qk::bits_of(FORM);
    if constexpr (FORM == QK_MXFP4) return mxfp4_to_bf16(lane >> shift, exponent);
    if constexpr (FORM == QK_E4M3) return e4m3_to_bf16(lane >> shift);
    return exact_bf16(int16_t(lane << (16 - BITS - shift)) >> (16 - BITS));
}

#if defined(__AVX512BW__)

// All sixteen 4-bit values, twice.
template <int FORM>
QK_INLINE __m512i value_table() {
    alignas(64) bf16 values[qk::LANES];
    // The largest scale; zeros are the smallest int16, where a sum that saturates stays: mxfp4_offsets.
    for (int i = 0; i < qk::LANES; ++i)
        values[i] = FORM == QK_MXFP4 ? (i & 7 ? mxfp4_to_bf16(i, 252) : bf16(0x8000)) : exact_bf16(i % 16 < 8 ? i % 16 : i % 16 - 16);
    return _mm512_load_si512(values);
}

// What is added to values at the largest scale, as integers, to have them at a block's own: never more than zero. For two inputs
// of 16 outputs.
QK_INLINE __m512i mxfp4_offsets(const uint8_t* exponents) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)exponents));
    const __m512i both = _mm512_or_si512(_mm512_slli_epi32(wide, 7), _mm512_slli_epi32(wide, 23));
    return _mm512_sub_epi16(both, _mm512_set1_epi16(int16_t(252 << 7)));
}

QK_INLINE __m512i e4m3_to_bf16(__m512i codes) {  // in the high bytes
    alignas(64) static const bf16 SMALLEST[qk::LANES] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i magnitude = _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi16(0x7f0));
    const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(E4M3_REBIAS));
    const __mmask32 is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(0x80));
    const __m512i found = _mm512_mask_permutexvar_epi16(normal, is_small, _mm512_srli_epi16(magnitude, 4), _mm512_load_si512(SMALLEST));
    return _mm512_or_si512(found, _mm512_and_si512(codes, _mm512_set1_epi16(int16_t(0x8000))));
}

#endif

// One line, its values at `shift` (from the low bits up), as a row of weights: 32 bfloat16, or 16 floats of the first inputs of the pairs
// and 16 of the second. `exponents` are the outputs' own (QK_MXFP4).
template <int FORM>
QK_INLINE void expand_line(const uint16_t* line, int shift, const uint8_t* exponents, bf16* to) {
#if defined(__AVX512BW__)
    if (qk::bits_of(FORM) == 4) {
        const __m512i indices = _mm512_srli_epi16(_mm512_loadu_si512(line), unsigned(shift));
        __m512i values = _mm512_permutexvar_epi16(indices, value_table<FORM>());
        if (FORM == QK_MXFP4) values = _mm512_adds_epi16(values, mxfp4_offsets(exponents));
        _mm512_storeu_si512(to, values);
        return;
    }
    if (FORM == QK_E4M3) {
        _mm512_storeu_si512(to, e4m3_to_bf16(_mm512_slli_epi16(_mm512_loadu_si512(line), unsigned(8 - shift))));
        return;
    }
#endif
    for (int i = 0; i < qk::LANES; ++i) to[i] = expand_value<FORM>(line[i], shift, exponents ? exponents[i / 2] : 0);
}

template <int FORM>
QK_INLINE void expand_line(const uint16_t* line, int shift, const uint8_t* exponents, float* to) {
    constexpr int BITS = qk::bits_of(FORM);
    bf16 row[qk::LANES];
    if (FORM == QK_MXFP4 || FORM == QK_E4M3) expand_line<FORM>(line, shift, exponents, row);
    for (int i = 0; i < qk::LANES; ++i)
        to[i % 2 * 16 + i / 2] = FORM == QK_MXFP4 || FORM == QK_E4M3 ? to_float(row[i]) : float(int16_t(line[i] << (16 - BITS - shift)) >> (16 - BITS));
}

// Expands packed lines to weights of type E, in the order [step, block, row], some at a time, and fetches those that follow.
template <int FORM, class E>
struct Expansion {
    static constexpr int64_t AHEAD_BYTES = 8192;
    static constexpr int BITS = qk::bits_of(FORM);

    const uint16_t* line;
    const uint8_t* exponents;  // of the next line's block
    E* to;
    int64_t left;  // lines

    __attribute__((always_inline)) void expand(int64_t lines) {
        if (lines > left) lines = left;
        for (; lines; --lines, --left, line += qk::LANES) {
            __builtin_prefetch((const char*)line + AHEAD_BYTES, 0, 2);
            each<16 / BITS>(QK_EACH_AS(part) {
                expand_line<FORM>(line, part * BITS, exponents, to);
                to += qk::LANES;
            });
            if (FORM == QK_MXFP4 && left % BITS == 1) exponents += qk::BLOCK;  // a block has as many lines as a value bits
        }
    }
};

}  // namespace QK_ISA
