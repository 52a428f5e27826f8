// Attention with vectors. See attention.h for what is computed in which order.
#include "attention.h"

#include "kernels.h"

namespace QK_ISA {
namespace {

// scores[ROWS][CHUNK] of D::tile_blocks groups of keys. A group of values has as many lines as one of keys, and is fetched
// meanwhile: pages lie anywhere in memory, where the processor would not guess them.
template <class D, int ROWS, bool FETCH>
__attribute__((noinline)) void multiply_keys(const typename D::E* q, int64_t head_size, const typename D::E* const* keys,
                                             const typename D::E* const* values, float* scores) {
    constexpr int BLOCKS = D::tile_blocks;
    F16 c[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) c[r][b] = zero();
    for (int64_t i = 0; i < head_size; i += D::step) {
        typename D::W w[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) {
            w[b] = D::weights(keys[b] + i * KEYS);
            if (FETCH) __builtin_prefetch(values[b] + i * KEYS, 0, 2);
        }
        for (int r = 0; r < ROWS; ++r) {
            const typename D::A input = D::broadcast(q + r * head_size + i);
            for (int b = 0; b < BLOCKS; ++b) c[r][b] = D::dot(c[r][b], input, w[b]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store_f32(scores + r * CHUNK + b * KEYS, c[r][b]);
}

// sums[ROWS][16 * BLOCKS of `width`] of the values of all groups, weighted. The keys that come next are fetched meanwhile.
template <class D, int ROWS, int BLOCKS, bool FETCH>
__attribute__((noinline)) void multiply_values(const typename D::E* weights, const ChunkView<D>& view,
                                               const typename D::E* const* next_keys, int64_t width, int64_t at, float* sums) {
    F16 c[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) c[r][b] = zero();
    for (int64_t g = view.first_group; g < view.num_groups; ++g) {
        const int64_t keys = g + 1 < view.num_groups ? KEYS : view.last_rows * D::step;
        for (int64_t i = 0; i < keys; i += D::step) {
            typename D::W w[BLOCKS];
            for (int b = 0; b < BLOCKS; ++b) {
                const int64_t offset = i * width + (at + 16 * b) * D::step;
                w[b] = D::weights(view.values[g] + offset);
                if (FETCH) __builtin_prefetch(next_keys[g] + offset, 0, 2);
            }
            for (int r = 0; r < ROWS; ++r) {
                const typename D::A input = D::broadcast(weights + r * CHUNK + g * KEYS + i);
                for (int b = 0; b < BLOCKS; ++b) c[r][b] = D::dot(c[r][b], input, w[b]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store_f32(sums + r * width + at + 16 * b, c[r][b]);
}

// Calls f(rows, first row) with a compile-time number of rows, until `rows` are done.
template <int MAX, class F>
QK_INLINE void in_groups_of_rows(int64_t rows, F f) {
    const int64_t group = qk::ceil_div(rows, qk::ceil_div(rows, int64_t(MAX)));
    for (int64_t r = 0; r < rows; r += group) f(r, r + group < rows ? group : rows - r);
}

// Calls a function whose template arguments are the number of rows and whether they are the first, which fetch for all.
#define QK_FOR_ROWS(count, is_first, call)                     \
    switch (is_first ? count : count + 8) {                    \
        case 1: call(1, true); break;                          \
        case 2: call(2, true); break;                          \
        case 3: call(3, true); break;                          \
        case 4: call(4, true); break;                          \
        case 5: call((D::tile_rows < 5 ? 1 : 5), true); break; \
        case 6: call((D::tile_rows < 6 ? 1 : 6), true); break; \
        case 9: call(1, false); break;                         \
        case 10: call(2, false); break;                        \
        case 11: call(3, false); break;                        \
        case 12: call(4, false); break;                        \
        case 13: call((D::tile_rows < 5 ? 1 : 5), false); break; \
        default: call((D::tile_rows < 6 ? 1 : 6), false); break; \
    }

template <class D>
class VectorProducts {
  public:
    using E = typename D::E;
    static constexpr bool WHOLE_GROUPS = false;  // keys that were not written are not read
    static constexpr int64_t TILE_QUERIES = 48;

    static void score(const ChunkView<D>& view, const E* queries, int64_t size, int64_t rows, float* scores) {
        for (int64_t g = view.first_group / D::tile_blocks * D::tile_blocks; g < view.num_groups; g += D::tile_blocks)
            in_groups_of_rows<D::tile_rows>(rows, [&](int64_t r, int64_t count) {
                const E* q = queries + r * size;
                float* to = scores + r * CHUNK + g * KEYS;
#define QK_CALL(n, fetch) multiply_keys<D, n, fetch>(q, size, view.keys + g, view.values + g, to)
                QK_FOR_ROWS(count, r == 0, QK_CALL)
#undef QK_CALL
            });
    }

    static void accumulate(const ChunkView<D>& view, const E* const* next_keys, const E* weights, int64_t rows, int64_t width,
                           float* sums) {
        in_groups_of_rows<D::tile_rows>(rows, [&](int64_t r, int64_t count) {
            const E* from = weights + r * CHUNK;
            float* to = sums + r * width;
            int64_t at = accumulate_blocks<D::tile_blocks>(view, next_keys, from, count, r == 0, 0, width, to);
            // Two at a time where a head of 32 or 96 leaves them: a block alone waits for each of its own sums.
            at = accumulate_blocks<(D::tile_blocks < 2 ? 1 : 2)>(view, next_keys, from, count, r == 0, at, width, to);
            accumulate_blocks<1>(view, next_keys, from, count, r == 0, at, width, to);
        });
    }

  private:
    // Whole groups of BLOCKS from element `at` of the head; where they end.
    template <int BLOCKS>
    static int64_t accumulate_blocks(const ChunkView<D>& view, const E* const* next_keys, const E* weights, int64_t count,
                                     bool is_first, int64_t at, int64_t width, float* sums) {
#define QK_CALL(n, fetch) multiply_values<D, n, BLOCKS, fetch>(weights, view, next_keys, width, at, sums)
        for (; at + 16 * BLOCKS <= width; at += 16 * BLOCKS) QK_FOR_ROWS(count, is_first, QK_CALL)
#undef QK_CALL
        return at;
    }
};

}  // namespace

void attention(qk_context& context, const qk_attention_args& args) {
    if (args.dtype == QK_BFLOAT16)
        Attention<Bf16Dot, VectorProducts<Bf16Dot>>(context, args).run();
    else
        Attention<FloatDot, VectorProducts<FloatDot>>(context, args).run();
}

}  // namespace QK_ISA
