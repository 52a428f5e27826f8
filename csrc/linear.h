// Linear layers: how the work is cut, and what happens to a sum once it is complete. The products themselves are in
// linear.cpp (vectors) and linear_amx.cpp (tiles).
//
// Row-invariance: an output is one accumulator that starts at zero and takes the inputs in order; it may rest in memory
// (in float32, exactly) but is never split. Nothing else of the matrix enters into it.
#pragma once

#include "context.h"
#include "layout.h"
#include "lora.h"
#include "vec_math.h"

namespace QK_ISA {

using qk::PANEL;
using qk::PackedShape;

// Rows of x that go through a panel together: their sums (64 KiB) and their inputs stay in the second-level cache.
constexpr int64_t MAX_CHUNK_ROWS = 252;

template <class E>
QK_INLINE void finish_block(const qk_linear_args& a, F16 sum, F16 second, int64_t row, int64_t block, E* y) {
    const int64_t n0 = block * qk::BLOCK;
    const int count = int(a.n - n0 < qk::BLOCK ? a.n - n0 : qk::BLOCK);
    if (a.bias) sum = add(sum, load_n(a.bias + n0, count));
    if (a.divisor != 1.0f) sum = div(sum, set1(a.divisor));
    if (a.soft_cap != 0.0f) sum = soft_cap(sum, a.soft_cap);
    if (a.clip != 0.0f) sum = min(set1(a.clip), max(set1(-a.clip), sum));  // a NaN stays one
    if (a.gated && a.bias) second = add(second, load_n(a.bias + a.n + n0, count));
    sum = a.gated ? gate(a.activation, sum, second) : activate(a.activation, sum);
    if (a.residual) {
        const int64_t at = row * a.residual_stride + n0;
        sum = add(sum, a.dtype == QK_BFLOAT16 ? load_n((const bf16*)a.residual + at, count)
                                              : load_n((const float*)a.residual + at, count));
    }
    store_n(y + row * a.y_stride + n0, sum, count);
}

// Writes the outputs of one panel for rows [begin, end), whose sums are in `sums` [end - begin, PANEL].
template <class E>
QK_INLINE void finish_panel(const qk_linear_args& a, int64_t panel, int64_t begin, int64_t end, const float* sums) {
    const int64_t blocks_per_output = a.gated ? 2 : 1, blocks = qk::ceil_div(a.n, qk::BLOCK);
    const int64_t first = panel * qk::PANEL_BLOCKS / blocks_per_output;
    int64_t last = first + qk::PANEL_BLOCKS / blocks_per_output;
    if (last > blocks) last = blocks;
    for (int64_t row = begin; row < end; ++row) {
        const float* s = sums + (row - begin) * PANEL;
        for (int64_t block = first; block < last; ++block, s += qk::BLOCK * blocks_per_output)
            finish_block(a, load(s), a.gated ? load(s + qk::BLOCK) : zero(), row, block, (E*)a.y);
    }
}

QK_INLINE void finish_rows(const qk_linear_args& a, int64_t panel, int64_t begin, int64_t end, const float* sums) {
    a.out_dtype == QK_BFLOAT16 ? finish_panel<bf16>(a, panel, begin, end, sums)
                               : finish_panel<float>(a, panel, begin, end, sums);
}

// Copies x with its rows padded with zeros to whole tiles, where they are not whole already.
template <class E>
const E* pad_inputs(qk_context& context, const qk_linear_args& a, const PackedShape& shape, int64_t& stride) {
    stride = a.x_stride;
    const int64_t padded = shape.tiles() * shape.inputs_per_tile();
    if (padded == a.k) return (const E*)a.x;
    E* copy = (E*)context.shared_scratch(size_t(a.m * padded) * sizeof(E));
    for (int64_t row = 0; row < a.m; ++row) {
        memcpy(copy + row * padded, (const E*)a.x + row * a.x_stride, size_t(a.k) * sizeof(E));
        memset(copy + row * padded + a.k, 0, size_t(padded - a.k) * sizeof(E));
    }
    stride = padded;
    return copy;
}

// The layer of one group.
QK_INLINE qk_linear_args layer_of(const qk::GroupedLinearArgs& g, int64_t group) {
    qk_linear_args a = g.linear;
    if (a.bias) a.bias += group * g.bias_stride;
    return a;
}

// A panel of one group's weights, and rows of that group.
struct Piece {
    int64_t group, panel, from, to;
};

// Where the pieces of a job over several groups of rows begin: a group has a piece for each panel and chunk of rows.
struct GroupedPieces {
    const qk::GroupedLinearArgs& g;
    const int64_t panels;
    int64_t group = 0, first = 0;  // the group that was found last, and its first piece

    int64_t rows(int64_t i) const { return g.starts[i + 1] - g.starts[i]; }
    int64_t chunks(int64_t i) const { return qk::ceil_div(rows(i), MAX_CHUNK_ROWS); }
    int64_t count() const {
        int64_t pieces = 0;
        for (int64_t i = 0; i < g.groups; ++i) pieces += panels * chunks(i);
        return pieces;
    }
    // May be without rows. Pieces must come in ascending order.
    Piece find(int64_t piece) {
        for (; piece - first >= panels * chunks(group); ++group) first += panels * chunks(group);
        const int64_t chunk_rows = qk::ceil_div(rows(group), chunks(group)), end = g.starts[group + 1];
        const int64_t from = g.starts[group] + (piece - first) % chunks(group) * chunk_rows;
        return {group, (piece - first) / chunks(group), from, from + chunk_rows < end ? from + chunk_rows : end};
    }
};

// Several linear layers of one shape, each on the rows that chose it, in one job. Rows are zero-padded to whole tiles.
template <class Product>
void grouped_linear_with(qk_context& context, const qk::GroupedLinearArgs& g) {
    using E = typename Product::E;
    const qk_linear_args& a = g.linear;
    const PackedShape shape{a.n, a.k, a.dtype, a.gated};
    const int64_t tiles = shape.tiles(), panel_bytes = shape.panel_bytes();
    Adapters adapters(context, a, true);
    auto work = [&](int64_t begin, int64_t end, int thread) {
        adapters.shrink();
        GroupedPieces pieces{g, shape.panels()};
        Product product;
        for (int64_t piece = begin; piece < end; ++piece) {
            const Piece p = pieces.find(piece);
            if (p.from >= p.to) continue;
            float* sums = (float*)context.thread_scratch(thread, size_t((p.to - p.from) * PANEL) * sizeof(float));
            const char* weights = (const char*)a.packed + (p.group * shape.panels() + p.panel) * panel_bytes;
            product.multiply((const E*)a.x + p.from * a.x_stride, a.x_stride, p.to - p.from, weights, tiles, sums);
            adapters.expand(p.panel, p.from, p.to, sums);
            finish_rows(layer_of(g, p.group), p.panel, p.from, p.to, sums);
        }
    };
    context.parallel(GroupedPieces{g, shape.panels()}.count(), 1, work);
}

// `Product::multiply(x, stride, rows, panel, tiles, sums)` fills sums [rows, PANEL] with x times a panel of weights.
template <class Product>
void linear_with(qk_context& context, const qk_linear_args& a) {
    using E = typename Product::E;
    const PackedShape shape{a.n, a.k, a.dtype, a.gated};
    int64_t stride;
    const E* x = pad_inputs<E>(context, a, shape, stride);
    if (a.m == 0) return;
    const int64_t chunks = qk::ceil_div(a.m, MAX_CHUNK_ROWS), chunk_rows = qk::ceil_div(a.m, chunks);
    const int64_t tiles = shape.tiles(), panel_bytes = shape.panel_bytes();
    Adapters adapters(context, a);
    auto work = [&](int64_t begin, int64_t end, int thread) {
        adapters.shrink();
        float* sums = (float*)context.thread_scratch(thread, size_t(chunk_rows * PANEL) * sizeof(float));
        Product product;
        for (int64_t item = begin; item < end; ++item) {
            const int64_t panel = item / chunks, from = item % chunks * chunk_rows;
            const int64_t to = from + chunk_rows < a.m ? from + chunk_rows : a.m;
            if (from >= to) continue;
            product.multiply(x + from * stride, stride, to - from, (const char*)a.packed + panel * panel_bytes, tiles, sums);
            adapters.expand(panel, from, to, sums);
            finish_rows(a, panel, from, to, sums);
        }
    };
    context.parallel(shape.panels() * chunks, 1, work);
}

}  // namespace QK_ISA
