// Linear layers on quantized weights, with vectors: 16 outputs in each register, inputs broadcast.
#include "quantized.h"

#include "kernels.h"

namespace QK_ISA {
namespace {

constexpr int64_t CHUNK_STEPS = 4;  // that all rows go through before the next; 16 KiB in either form

// The function for a number of rows up to MAX.
template <template <int> class Function, int MAX>
auto for_rows(int64_t rows) -> decltype(&Function<1>::run) {
    switch (rows) {
        case 1: return &Function<1>::run;
        case 2: return &Function<MAX < 2 ? 1 : 2>::run;
        case 3: return &Function<MAX < 3 ? 1 : 3>::run;
        case 4: return &Function<MAX < 4 ? 1 : 4>::run;
        case 5: return &Function<MAX < 5 ? 1 : 5>::run;
        default: return &Function<MAX < 6 ? 1 : 6>::run;
    }
}

// -- int8 weights and inputs ---------------------------------------------------------------------------------------------

template <int ROWS>
struct MultiplyInt8 {
    static __attribute__((noinline)) void run(const Int8Dot::E* x, int64_t stride, const char* w, int64_t steps, int32_t* sums,
                                              bool add_to_sums, int64_t ahead) {
        constexpr int BLOCKS = Int8Dot::tile_blocks;
        S16 c[ROWS][BLOCKS];
        each<ROWS>(QK_EACH_AS(r) {
            each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = add_to_sums ? load_sums(sums + r * PANEL + b * 16) : zero_sums(); });
        });
        for (int64_t t = 0; t < steps; ++t, w += qk::STEP_BYTES) {
            if (ahead)
                for (int64_t line = 0; line < qk::STEP_BYTES; line += 64) __builtin_prefetch(w + ahead + line, 0, 2);
            for (int i = 0; i < qk::TILE_ROWS; ++i, x += 4) {
                Int8Dot::W weights[BLOCKS];
                each<BLOCKS>(QK_EACH_AS(b) { weights[b] = Int8Dot::weights(w + b * qk::TILE_BYTES + i * qk::ROW_BYTES); });
                each<ROWS>(QK_EACH_AS(r) {
                    const Int8Dot::A input = Int8Dot::broadcast(x + r * stride);
                    each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = Int8Dot::dot(c[r][b], input, weights[b]); });
                });
            }
        }
        each<ROWS>(QK_EACH_AS(r) { each<BLOCKS>(QK_EACH_AS(b) { store_sums(sums + r * PANEL + b * 16, c[r][b]); }); });
    }
};

struct Int8VectorProduct {
    using Dot = Int8Dot;

    void multiply(const Dot::E* x, int64_t stride, int64_t rows, const char* panel, int64_t steps, int32_t* sums) const {
        const int64_t groups = qk::ceil_div(rows, int64_t(Dot::tile_rows)), group_rows = qk::ceil_div(rows, groups);
        const bool is_only_pass = groups == 1 && Dot::tile_blocks == qk::PANEL_BLOCKS;
        const int64_t chunk = is_only_pass ? steps : CHUNK_STEPS;
        for (int64_t t = 0; t < steps; t += chunk) {
            const int64_t count = t + chunk < steps ? chunk : steps - t;
            for (int64_t row = 0; row < rows; row += group_rows) {
                const int64_t some = row + group_rows < rows ? group_rows : rows - row;
                for (int b = 0; b < qk::PANEL_BLOCKS; b += Dot::tile_blocks)
                    for_rows<MultiplyInt8, Dot::tile_rows>(some)(x + row * stride + t * 64, stride,
                                                                 panel + t * qk::STEP_BYTES + b * qk::TILE_BYTES, count,
                                                                 sums + row * PANEL + b * 16, t > 0, is_only_pass ? 4 * qk::STEP_BYTES : row == 0 && b == 0 ? count * qk::STEP_BYTES : 0);
            }
        }
    }
};

// -- weights only ----------------------------------------------------------------------------------------------------------

// sums[ROWS][PANEL] (+)= x times expanded steps of D::tile_blocks neighbouring blocks.
template <class D>
struct Expanded {
    static constexpr int ROWS_PER_STEP = int(STEP_INPUTS) / D::step, BLOCK_BYTES = ROWS_PER_STEP * int(qk::ROW_BYTES);
    static constexpr int64_t STEP_BYTES = BLOCK_BYTES * qk::PANEL_BLOCKS;

    template <int ROWS>
    struct Multiply {
        static __attribute__((noinline)) void run(const typename D::E* x, int64_t stride, const char* w, int64_t steps, float* sums,
                                                  bool add_to_sums) {
            constexpr int BLOCKS = D::tile_blocks;
            F16 c[ROWS][BLOCKS];
            each<ROWS>(QK_EACH_AS(r) {
                each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = add_to_sums ? load_f32(sums + r * PANEL + b * 16) : zero(); });
            });
            for (int64_t t = 0; t < steps; ++t, w += STEP_BYTES)
                for (int i = 0; i < ROWS_PER_STEP; ++i, x += D::step) {
                    typename D::W weights[BLOCKS];
                    each<BLOCKS>(QK_EACH_AS(b) { weights[b] = D::weights(w + b * BLOCK_BYTES + i * qk::ROW_BYTES); });
                    each<ROWS>(QK_EACH_AS(r) {
                        const typename D::A input = D::broadcast(x + r * stride);
                        each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = D::dot(c[r][b], input, weights[b]); });
                    });
                }
            each<ROWS>(QK_EACH_AS(r) { each<BLOCKS>(QK_EACH_AS(b) { store_f32(sums + r * PANEL + b * 16, c[r][b]); }); });
        }
    };
};

#ifdef __AVX512BF16__

// As Expanded<Bf16Dot>::Multiply on all four blocks, with 4-bit values expanded in registers: weights are read once.
template <int ROWS>
struct MultiplyNibbles {
    static __attribute__((noinline)) void run(const bf16* x, int64_t stride, const char* w, int64_t steps, float* sums, bool is_first) {
        constexpr int BLOCKS = int(qk::PANEL_BLOCKS), LINES = 4;
        constexpr int64_t BLOCK_BYTES = LINES * qk::LINE_BYTES, STEP_BYTES = BLOCK_BYTES * BLOCKS;
        alignas(64) bf16 values[qk::LANES];
        for (int i = 0; i < qk::LANES; ++i) values[i] = exact_bf16(i % 16 < 8 ? i % 16 : i % 16 - 16);
        const __m512i table = _mm512_load_si512(values);
        F16 c[ROWS][BLOCKS];
        each<ROWS>(QK_EACH_AS(r) { each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = zero(); }); });
        for (int64_t t = 0; t < steps; ++t, w += STEP_BYTES) {
            for (int64_t line = 0; is_first && line < STEP_BYTES; line += 64) __builtin_prefetch(w + 8 * STEP_BYTES + line, 0, 2);
            for (int j = 0; j < LINES; ++j) {
                __m512i line[BLOCKS];
                each<BLOCKS>(QK_EACH_AS(b) { line[b] = _mm512_loadu_si512(w + b * BLOCK_BYTES + j * qk::LINE_BYTES); });
                for (int part = 0; part < 4; ++part, x += 2) {
                    __m512bh weights[BLOCKS];
                    each<BLOCKS>(QK_EACH_AS(b) {
                        weights[b] = (__m512bh)_mm512_permutexvar_epi16(line[b], table);  // looks at the low bits only
                        line[b] = _mm512_srli_epi16(line[b], 4);
                    });
                    each<ROWS>(QK_EACH_AS(r) {
                        const __m512bh input = Bf16Dot::broadcast(x + r * stride);
                        each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = Bf16Dot::dot(c[r][b], input, weights[b]); });
                    });
                }
            }
        }
        each<ROWS>(QK_EACH_AS(r) { each<BLOCKS>(QK_EACH_AS(b) { store_f32(sums + r * PANEL + b * 16, c[r][b]); }); });
    }
};

#endif

template <class D>
struct GroupVectorProduct {
    using E = typename D::E;
    static constexpr size_t SCRATCH_BYTES = size_t(CHUNK_STEPS * Expanded<D>::STEP_BYTES);

    explicit GroupVectorProduct(int32_t form) : form_(form) {}

    void multiply(const E* x, int64_t stride, int64_t rows, const char* weights, int64_t steps, char* scratch, float* sums) const {
#ifdef __AVX512BF16__
        if constexpr (D::step == 2)
            if (form_ == QK_W4) return multiply_nibbles(x, stride, rows, weights, steps, sums);
#endif
        const int64_t step_bytes = QuantizedShape{0, 0, form_, 0}.step_bytes();
        const int64_t groups = qk::ceil_div(rows, int64_t(D::tile_rows)), group_rows = qk::ceil_div(rows, groups);
        for (int64_t t = 0; t < steps; t += CHUNK_STEPS) {
            const int64_t count = t + CHUNK_STEPS < steps ? CHUNK_STEPS : steps - t;
            form_ == QK_W4 ? expand_steps<4>(weights + t * step_bytes, count, (E*)scratch)
                           : expand_steps<8>(weights + t * step_bytes, count, (E*)scratch);
            for (int64_t row = 0; row < rows; row += group_rows) {
                const int64_t some = row + group_rows < rows ? group_rows : rows - row;
                for (int b = 0; b < qk::PANEL_BLOCKS; b += D::tile_blocks)
                    for_rows<Expanded<D>::template Multiply, D::tile_rows>(some)(x + row * stride + t * STEP_INPUTS, stride,
                                                                                 scratch + b * Expanded<D>::BLOCK_BYTES, count,
                                                                                 sums + row * PANEL + b * 16, t > 0);
            }
        }
    }

  private:
#ifdef __AVX512BF16__
    static void multiply_nibbles(const bf16* x, int64_t stride, int64_t rows, const char* weights, int64_t steps, float* sums) {
        const int64_t groups = qk::ceil_div(rows, int64_t(D::tile_rows)), group_rows = qk::ceil_div(rows, groups);
        for (int64_t row = 0; row < rows; row += group_rows) {
            const int64_t some = row + group_rows < rows ? group_rows : rows - row;
            for_rows<MultiplyNibbles, D::tile_rows>(some)(x + row * stride, stride, weights, steps, sums + row * PANEL, row == 0);
        }
    }
#endif

    int32_t form_;
};

}  // namespace

void quantized_linear(qk_context& context, const qk_quantized_linear_args& args) {
    if (args.form == QK_W8A8)
        int8_linear_with<Int8VectorProduct>(context, args);
    else if (args.linear.dtype == QK_BFLOAT16)
        grouped_linear_of<GroupVectorProduct<Bf16Dot>>(context, args);
    else
        grouped_linear_of<GroupVectorProduct<FloatDot>>(context, args);
}

}  // namespace QK_ISA
