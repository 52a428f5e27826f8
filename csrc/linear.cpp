// Linear layers with vectors: 16 outputs in each register, inputs broadcast one by one.
#include "linear.h"

#include "kernels.h"

namespace QK_ISA {
namespace {

// Tiles of a panel that all rows use before the next: 16 KiB, which stay in the first-level cache. With many rows, sums should
// go to memory and back less often.
constexpr int64_t CHUNK_TILES = 4, MANY_ROWS_CHUNK_TILES = 8, MANY_GROUPS = 6;
constexpr int64_t LINE = 64;

// sums[ROWS][PANEL] (+)= x times `tiles` tiles of D::tile_blocks neighbouring blocks.
template <class D, int ROWS>
__attribute__((noinline)) void multiply_tiles(const typename D::E* x, int64_t stride, const char* w, int64_t tiles,
                                              float* sums, bool add_to_sums, const char* ahead, int64_t lines_per_tile) {
    constexpr int BLOCKS = D::tile_blocks;
    F16 c[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) c[r][b] = add_to_sums ? load_f32(sums + r * PANEL + b * 16) : zero();
    for (int64_t t = 0; t < tiles; ++t, w += qk::STEP_BYTES) {
        // One row waits for nothing but memory, and best asks for all of it at once; more rows have time between. They fetch
        // into the second-level cache, which waits for more lines at a time than the first.
        constexpr int LEVEL = ROWS == 1 ? 3 : 2;
        const int64_t lines_per_step = ROWS == 1 ? 0 : lines_per_tile / qk::TILE_ROWS;
        for (int64_t line = lines_per_step * qk::TILE_ROWS; line < lines_per_tile; ++line, ahead += LINE)
            __builtin_prefetch(ahead, 0, LEVEL);
        for (int i = 0; i < qk::TILE_ROWS; ++i, x += D::step) {
            for (int64_t line = 0; line < lines_per_step; ++line, ahead += LINE) __builtin_prefetch(ahead, 0, LEVEL);
            typename D::W weights[BLOCKS];
            for (int b = 0; b < BLOCKS; ++b) weights[b] = D::weights(w + b * qk::TILE_BYTES + i * qk::ROW_BYTES);
            for (int r = 0; r < ROWS; ++r) {
                const typename D::A input = D::broadcast(x + r * stride);
                for (int b = 0; b < BLOCKS; ++b) c[r][b] = D::dot(c[r][b], input, weights[b]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store_f32(sums + r * PANEL + b * 16, c[r][b]);
}

template <class D>
struct VectorProduct {
    using E = typename D::E;
    using Multiply = void (*)(const E*, int64_t, const char*, int64_t, float*, bool, const char*, int64_t);

    static Multiply for_rows(int64_t rows) {
        switch (rows) {
            case 1: return multiply_tiles<D, 1>;
            case 2: return multiply_tiles<D, 2>;
            case 3: return multiply_tiles<D, 3>;
            case 4: return multiply_tiles<D, 4>;
            case 5: return multiply_tiles<D, D::tile_rows < 5 ? 1 : 5>;
            default: return multiply_tiles<D, D::tile_rows < 6 ? 1 : 6>;
        }
    }

    // While rows go through one stretch of weights, the next is fetched: it follows in memory.
    void multiply(const E* x, int64_t stride, int64_t rows, const char* panel, int64_t tiles, float* sums) const {
        const int64_t groups = qk::ceil_div(rows, int64_t(D::tile_rows)), group_rows = qk::ceil_div(rows, groups);
        const int64_t passes = groups * (qk::PANEL_BLOCKS / D::tile_blocks);
        const int64_t chunk = passes == 1 ? tiles : groups < MANY_GROUPS ? CHUNK_TILES : MANY_ROWS_CHUNK_TILES;
        const int64_t lines = qk::ceil_div(qk::STEP_BYTES / LINE, passes);
        for (int64_t t = 0; t < tiles; t += chunk) {
            const int64_t count = t + chunk < tiles ? chunk : tiles - t;
            const char* w = panel + t * qk::STEP_BYTES;
            const char* ahead = w + (passes == 1 ? 4 : count) * qk::STEP_BYTES;
            for (int64_t row = 0; row < rows; row += group_rows) {
                const int64_t some = row + group_rows < rows ? group_rows : rows - row;
                const E* from = x + row * stride + t * qk::TILE_ROWS * D::step;
                for (int b = 0; b < qk::PANEL_BLOCKS; b += D::tile_blocks, ahead += count * lines * LINE)
                    for_rows(some)(from, stride, w + b * qk::TILE_BYTES, count, sums + row * PANEL + b * 16, t > 0, ahead,
                                   lines);
            }
        }
    }
};

// Rows of a head, zero-padded to whole tiles where they are not whole.
template <class E>
const E* pad_heads(qk_context& context, const qk_batched_linear_args& a, int64_t padded, int64_t& stride, int64_t& head_stride) {
    stride = a.x_stride, head_stride = a.x_head_stride;
    if (padded == a.k) return (const E*)a.x;
    stride = a.heads * padded, head_stride = padded;
    E* copy = (E*)context.shared_scratch(size_t(a.m * stride) * sizeof(E));
    for (int64_t i = 0; i < a.m * a.heads; ++i) {
        memcpy(copy + i * padded, (const E*)a.x + i / a.heads * a.x_stride + i % a.heads * a.x_head_stride, size_t(a.k) * sizeof(E));
        memset(copy + i * padded + a.k, 0, size_t(padded - a.k) * sizeof(E));
    }
    return copy;
}

template <class Product>
void batched_linear_with(qk_context& context, const qk_batched_linear_args& a) {
    using E = typename Product::E;
    const PackedShape shape{a.n, a.k, a.dtype, 0};
    const int64_t tiles = shape.tiles(), panels = shape.panels(), width = a.n + a.tail_size;
    int64_t stride, head_stride;
    const E* x = pad_heads<E>(context, a, tiles * shape.inputs_per_tile(), stride, head_stride);
    if (a.m == 0) return;
    const int64_t chunks = qk::ceil_div(a.m, MAX_CHUNK_ROWS), chunk_rows = qk::ceil_div(a.m, chunks);
    auto work = [&](int64_t begin, int64_t end, int thread) {
        float* sums = (float*)context.thread_scratch(thread, size_t(chunk_rows * PANEL) * sizeof(float));
        Product product;
        for (int64_t item = begin; item < end; ++item) {
            const int64_t head = item / (panels * chunks), panel = item / chunks % panels, from = item % chunks * chunk_rows;
            const int64_t to = from + chunk_rows < a.m ? from + chunk_rows : a.m;
            if (from >= to) continue;
            const char* weights = (const char*)a.packed + (head * panels + panel) * shape.panel_bytes();
            product.multiply(x + from * stride + head * head_stride, stride, to - from, weights, tiles, sums);
            qk_linear_args of_head = {};
            of_head.n = a.n, of_head.dtype = of_head.out_dtype = a.dtype, of_head.divisor = 1.0f;
            of_head.y = (E*)a.y + head * width, of_head.y_stride = a.heads * width;
            finish_rows(of_head, panel, from, to, sums);
            for (int64_t row = from; panel == 0 && a.tail_size && row < to; ++row)
                memcpy((E*)of_head.y + row * of_head.y_stride + a.n,
                       (const E*)a.tail + row * a.tail_stride + head * a.tail_head_stride, size_t(a.tail_size) * sizeof(E));
        }
    };
    context.parallel(a.heads * panels * chunks, 1, work);
}

}  // namespace

void batched_linear(qk_context& context, const qk_batched_linear_args& args) {
    if (args.dtype == QK_BFLOAT16)
        batched_linear_with<VectorProduct<Bf16Dot>>(context, args);
    else
        batched_linear_with<VectorProduct<FloatDot>>(context, args);
}

void linear(qk_context& context, const qk_linear_args& args) {
    if (args.dtype == QK_BFLOAT16)
        linear_with<VectorProduct<Bf16Dot>>(context, args);
    else
        linear_with<VectorProduct<FloatDot>>(context, args);
}

void gather_low_rank(qk_context& context, const qk_gather_args& args) {
    if (args.dtype == QK_BFLOAT16)
        gather_low_rank_with<Bf16Blocks>(context, args);
    else
        gather_low_rank_with<FloatBlocks>(context, args);
}

void grouped_linear(qk_context& context, const qk::GroupedLinearArgs& args) {
    if (args.linear.dtype == QK_BFLOAT16)
        grouped_linear_with<VectorProduct<Bf16Dot>>(context, args);
    else
        grouped_linear_with<VectorProduct<FloatDot>>(context, args);
}

}  // namespace QK_ISA
