// Linear layers on quantized weights, with vectors: 16 outputs in each register, inputs broadcast.
#include "quantized.h"

#include "kernels.h"

namespace QK_ISA {
namespace {

constexpr int64_t CHUNK_STEPS = 4;  // that all rows go through before the next; 16 KiB in either form

// The function for a number of rows, from MIN to MAX.
template <template <int> class Function, int MAX, int MIN = 1>
auto for_rows(int64_t rows) -> decltype(&Function<MIN>::run) {
    if constexpr (MIN < MAX)
        if (rows > MIN) return for_rows<Function, MAX, MIN + 1>(rows);
    return &Function<MIN>::run;
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

// Groups of inputs that all rows go through before the next: `groups` whole ones of `steps` steps each, or a part of one.
struct Span {
    int64_t groups, steps;
    bool is_begun, is_whole;  // whether the first has sums from the span before; whether the last ends here
};

// Values are expanded once for all rows, a span at a time, and while the rows go through the span before it: units that multiply are
// busy then, those that expand are not.
template <class D, int FORM>
struct Expanded {
    using E = typename D::E;
    static constexpr int ROWS_PER_STEP = int(STEP_INPUTS) / D::step, BLOCK_BYTES = ROWS_PER_STEP * int(qk::ROW_BYTES);
    static constexpr int64_t STEP_BYTES = BLOCK_BYTES * qk::PANEL_BLOCKS, LINES_PER_STEP = qk::PANEL_BLOCKS * qk::bits_of(FORM);
    static constexpr int64_t SPAN_BYTES = 32768, SPAN_STEPS = SPAN_BYTES / STEP_BYTES;
    // Fewer groups of rows take half as much at a time: a span and the next stay in the first-level cache. More are better off with fewer calls.
    static constexpr int64_t MANY_GROUPS = 5;

    // totals[ROWS][PANEL] += x times a span of D::tile_blocks neighbouring blocks.
    template <int ROWS>
    struct Multiply {
        static __attribute__((noinline)) void run(const E* x, int64_t stride, const char* w, const Span& span, GroupScales scales,
                                                  float* sums, float* totals, Expansion<FORM, E>& expansion, int64_t lines_per_step) {
            constexpr int BLOCKS = D::tile_blocks;
            Expansion<FORM, E> next = expansion;
            F16 c[ROWS][BLOCKS];
            for (int64_t g = 0; g < span.groups; ++g, scales = scales.after(1)) {
                each<ROWS>(QK_EACH_AS(r) {
                    each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = span.is_begun ? load_f32(sums + r * PANEL + b * 16) : zero(); });
                });
                for (int64_t t = 0; t < span.steps; ++t, w += STEP_BYTES) {
                    int64_t lines = lines_per_step;
                    for (int i = 0; i < ROWS_PER_STEP; ++i, x += D::step) {
                        if (lines) next.expand(1), --lines;
                        typename D::W weights[BLOCKS];
                        each<BLOCKS>(QK_EACH_AS(b) { weights[b] = D::weights(w + b * BLOCK_BYTES + i * qk::ROW_BYTES); });
                        each<ROWS>(QK_EACH_AS(r) {
                            const typename D::A input = D::broadcast(x + r * stride);
                            each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = D::dot(c[r][b], input, weights[b]); });
                        });
                    }
                }
                each<ROWS>(QK_EACH_AS(r) {
                    each<BLOCKS>(QK_EACH_AS(b) {
                        if (span.is_whole)
                            scales.add_to(totals + r * PANEL + b * 16, c[r][b], r, b * 16);
                        else
                            store_f32(sums + r * PANEL + b * 16, c[r][b]);
                    });
                });
            }
            expansion = next;
        }
    };

    // The steps from `first` on that a span takes: whole groups, or what a span can hold of one.
    static int64_t span_steps(int64_t first, int64_t steps, int64_t group_steps, int64_t max_steps) {
        const int64_t begun = first % group_steps, left = steps - first;
        if (begun || group_steps > max_steps) {
            const int64_t of_group = group_steps - begun < left ? group_steps - begun : left;
            return of_group < max_steps ? of_group : max_steps;
        }
        const int64_t whole = (max_steps < left ? max_steps : left) / group_steps;
        return whole ? whole * group_steps : left;  // the last group may be short
    }

    static void multiply(const E* x, int64_t stride, int64_t rows, const PanelValues& panel, int64_t steps, int64_t group_steps,
                         const GroupScales& scales, char* scratch, float* sums, float* totals) {
        const int64_t row_groups = qk::ceil_div(rows, int64_t(D::tile_rows)), group_rows = qk::ceil_div(rows, row_groups);
        const int64_t passes = row_groups * (qk::PANEL_BLOCKS / D::tile_blocks);
        const int64_t max_steps = row_groups < MANY_GROUPS ? SPAN_STEPS / 2 : SPAN_STEPS;
        int64_t count = span_steps(0, steps, group_steps, max_steps);
        char *now = scratch, *other = scratch + SPAN_BYTES;
        Expansion<FORM, E> next{(const uint16_t*)panel.values, panel.exponents, (E*)now, count * LINES_PER_STEP};
        next.expand(next.left);
        for (int64_t t = 0; t < steps;) {
            const int64_t end = t + count, next_count = end < steps ? span_steps(end, steps, group_steps, max_steps) : 0;
            const int64_t groups = count > group_steps ? count / group_steps : 1;
            const Span span{groups, count / groups, t % group_steps != 0, end % group_steps == 0 || end == steps};
            next.to = (E*)other;
            next.left = next_count * LINES_PER_STEP;
            const int64_t lines = qk::ceil_div(next.left, passes * count);
            for (int64_t row = 0; row < rows; row += group_rows) {
                const int64_t some = row + group_rows < rows ? group_rows : rows - row;
                for (int b = 0; b < qk::PANEL_BLOCKS; b += D::tile_blocks)
                    for_rows<Multiply, D::tile_rows>(some)(x + row * stride + t * STEP_INPUTS, stride, now + b * BLOCK_BYTES, span,
                                                           scales.after(t / group_steps).at(row, b * 16), sums + row * PANEL + b * 16,
                                                           totals + row * PANEL + b * 16, next, lines);
            }
            next.expand(next.left);
            std::swap(now, other);
            t = end;
            count = next_count;
        }
    }
};

#ifdef __AVX512BF16__

// As Expanded<Bf16Dot, FORM>::Multiply, with values expanded in registers, all of a panel: few rows wait for memory, and have time for it.
template <int FORM, int ROWS, int BLOCKS>
struct MultiplyNibbles {
    static constexpr int64_t BLOCK_BYTES = 256;

    static __attribute__((noinline)) void run(const bf16* x, int64_t stride, const char* w, const uint8_t* exponents, int64_t steps,
                                              int64_t group_steps, GroupScales scales, bool is_first, float* totals) {
        constexpr int LINES = 4;
        constexpr int64_t STEP_BYTES = BLOCK_BYTES * qk::PANEL_BLOCKS;
        const __m512i table = value_table<FORM>();
        F16 c[ROWS][BLOCKS];
        for (int64_t first = 0; first < steps; first += group_steps, scales = scales.after(1)) {
            const int64_t last = first + group_steps < steps ? first + group_steps : steps;
            each<ROWS>(QK_EACH_AS(r) { each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = zero(); }); });
            for (int64_t t = first; t < last; ++t, w += STEP_BYTES) {
                for (int64_t line = 0; is_first && line < STEP_BYTES; line += 64) __builtin_prefetch(w + 8 * STEP_BYTES + line, 0, 2);
                __m512i offsets[BLOCKS];
                if constexpr (FORM == QK_MXFP4) {
                    each<BLOCKS>(QK_EACH_AS(b) { offsets[b] = mxfp4_offsets(exponents + b * qk::BLOCK); });
                    exponents += PANEL;
                }
                for (int j = 0; j < LINES; ++j) {
                    __m512i line[BLOCKS];
                    each<BLOCKS>(QK_EACH_AS(b) { line[b] = _mm512_loadu_si512(w + b * BLOCK_BYTES + j * qk::LINE_BYTES); });
                    for (int part = 0; part < 4; ++part, x += 2) {
                        __m512bh weights[BLOCKS];
                        each<BLOCKS>(QK_EACH_AS(b) {
                            __m512i values = _mm512_permutexvar_epi16(line[b], table);  // looks at the low bits only
                            if constexpr (FORM == QK_MXFP4) values = _mm512_adds_epi16(values, offsets[b]);
                            weights[b] = (__m512bh)values;
                            line[b] = _mm512_srli_epi16(line[b], 4);
                        });
                        each<ROWS>(QK_EACH_AS(r) {
                            const __m512bh input = Bf16Dot::broadcast(x + r * stride);
                            each<BLOCKS>(QK_EACH_AS(b) { c[r][b] = Bf16Dot::dot(c[r][b], input, weights[b]); });
                        });
                    }
                }
            }
            each<ROWS>(QK_EACH_AS(r) {
                each<BLOCKS>(QK_EACH_AS(b) { scales.add_to(totals + r * PANEL + b * 16, c[r][b], r, b * 16); });
            });
        }
    }
};

// What fits into registers: the fewer blocks, the more rows, and the fewer times a value is expanded.
template <int FORM>
struct Nibbles {
    template <int ROWS>
    using OfFour = MultiplyNibbles<FORM, ROWS, 4>;
    template <int ROWS>
    using OfTwo = MultiplyNibbles<FORM, ROWS, 2>;
};

#endif

template <class D>
struct WeightsOnlyVectorProduct {
    using E = typename D::E;
    static constexpr size_t SCRATCH_BYTES = size_t(2 * Expanded<D, QK_W4>::SPAN_BYTES);
    static constexpr int FEW_ROWS = 12;

    explicit WeightsOnlyVectorProduct(int32_t form) : form_(form) {}

    void multiply(const E* x, int64_t stride, int64_t rows, const PanelValues& panel, int64_t steps, int64_t group_steps,
                  const GroupScales& scales, char* scratch, float* sums, float* totals) const {
        const auto multiply_form = [&](auto form) {
#ifdef __AVX512BF16__
            if constexpr (D::step == 2 && qk::bits_of(form) == 4)
                if (rows <= FEW_ROWS) return multiply_nibbles<form>(x, stride, rows, panel, steps, group_steps, scales, totals);
#endif
            Expanded<D, form>::multiply(x, stride, rows, panel, steps, group_steps, scales, scratch, sums, totals);
        };
        for_form(form_, multiply_form);
    }

  private:
#ifdef __AVX512BF16__
    template <int FORM>
    static void multiply_nibbles(const bf16* x, int64_t stride, int64_t rows, const PanelValues& panel, int64_t steps, int64_t group_steps,
                                 const GroupScales& scales, float* totals) {
        using Of = Nibbles<FORM>;
        constexpr int FEW = FEW_ROWS / 2;
        const int blocks = rows <= FEW ? 4 : 2;
        const auto run = blocks == 4 ? for_rows<Of::template OfFour, FEW>(rows) : for_rows<Of::template OfTwo, FEW_ROWS, FEW + 1>(rows);
        for (int b = 0; b < qk::PANEL_BLOCKS; b += blocks)
            run(x, stride, panel.values + b * Of::template OfTwo<1>::BLOCK_BYTES, panel.exponents ? panel.exponents + b * qk::BLOCK : nullptr,
                steps, group_steps, scales.at(0, b * 16), b == 0, totals + b * 16);
    }
#endif

    int32_t form_;
};

}  // namespace

void grouped_quantized_linear(qk_context& context, const qk::GroupedLinearArgs& args) {
    if (args.quantization->form == QK_W8A8)
        int8_linear_with<Int8VectorProduct>(context, args);
    else if (args.linear.dtype == QK_BFLOAT16)
        weights_only_linear_with<WeightsOnlyVectorProduct<Bf16Dot>>(context, args);
    else
        weights_only_linear_with<WeightsOnlyVectorProduct<FloatDot>>(context, args);
}

}  // namespace QK_ISA
