// Adapters of a linear layer: a row that has one gets x A^T (its h) times B^T added to its sums before they are finished.
//
// The threads of a layer share its h: each takes pieces of them before its first sums, and waits for the pieces of others when it has sums
// to add to, so that there is no job of its own to start and to end.
//
// Row-invariance: an h is one accumulator that takes the inputs in order, and is rounded once; what a block of 16 outputs gets is one that
// takes the h in order (with tiles one for each 32 h), and is added to the sums once. Rows of other adapters, or of none, are not touched.
#pragma once

#include <type_traits>

#include "context.h"
#include "layout.h"
#include "vec.h"

namespace QK_ISA {

using qk::LowRankRange;

constexpr int64_t SHRINK_ROWS = 48, SHRINK_BLOCKS = 4, SHRINK_WIDTH = SHRINK_BLOCKS * qk::BLOCK;

// Products of blocks of 16 outputs with vectors.
template <class D>
struct VectorBlocks {
    using E = typename D::E;
#if defined(__AVX512F__)
    static constexpr int MAX_ROWS = 8;
#elif defined(__AVX2__)
    static constexpr int MAX_ROWS = 4;
#else
    static constexpr int MAX_ROWS = 2;
#endif

    // sums[rows][SHRINK_WIDTH] = x times some blocks of A.
    static void shrink(const E* x, int64_t stride, int64_t rows, const char* a, int64_t block_bytes, int64_t blocks, int64_t tiles, float* sums) {
        for (int64_t b = 0; b < blocks; ++b)
            each_rows(x, stride, rows, a + b * block_bytes, tiles * qk::TILE_ROWS, sums + b * qk::BLOCK, SHRINK_WIDTH, false);
    }

    // sums[rows][PANEL] += h times some blocks of B.
    static void expand(const E* h, int64_t stride, int64_t rows, const char* b, const LowRankRange* ranges, int64_t blocks, float* sums) {
        for (int64_t i = 0; i < blocks; ++i)
            if (ranges[i].lines)
                each_rows(h + ranges[i].first, stride, rows, b + ranges[i].place * qk::ROW_BYTES, ranges[i].lines, sums + i * qk::BLOCK, qk::PANEL, true);
    }

  private:
    static constexpr int64_t AHEAD_BYTES = 4096;

    template <int ROWS>
    static void multiply(const E* x, int64_t stride, const char* w, int64_t lines, float* sums, int64_t sum_stride, bool add_to_sums) {
        F16 c[ROWS];
        for (int r = 0; r < ROWS; ++r) c[r] = zero();
        for (int64_t line = 0; line < lines; ++line, w += qk::ROW_BYTES, x += D::step) {
            __builtin_prefetch(w + AHEAD_BYTES, 0, 2);
            const typename D::W weights = D::weights(w);
            for (int r = 0; r < ROWS; ++r) c[r] = D::dot(c[r], D::broadcast(x + r * stride), weights);
        }
        for (int r = 0; r < ROWS; ++r)
            store_f32(sums + r * sum_stride, add_to_sums ? add(load_f32(sums + r * sum_stride), c[r]) : c[r]);
    }

    static void each_rows(const E* x, int64_t stride, int64_t rows, const char* w, int64_t lines, float* sums, int64_t sum_stride, bool add_to_sums) {
        int64_t row = 0;
        const auto take = [&](auto count) {
            for (; row + count <= rows; row += count)
                multiply<count>(x + row * stride, stride, w, lines, sums + row * sum_stride, sum_stride, add_to_sums);
        };
        if constexpr (MAX_ROWS >= 8) take(std::integral_constant<int, 8>());
        if constexpr (MAX_ROWS >= 4) take(std::integral_constant<int, 4>());
        take(std::integral_constant<int, 2>());
        take(std::integral_constant<int, 1>());
    }
};

#ifdef QK_TILE_ZERO

// Tiles are configured for another product, whose configuration comes back at the end.
class TilesOfAnother {
  public:
    TilesOfAnother() { store_tile_config(config_); }
    ~TilesOfAnother() {
        QK_TILE_BARRIER();
        load_tile_config(config_);
    }
    TilesOfAnother(const TilesOfAnother&) = delete;
    TilesOfAnother& operator=(const TilesOfAnother&) = delete;

  private:
    TileConfig config_;
};

// Products of blocks of 16 outputs with tiles. A product takes 16 cycles and its sum is there after 52, so three or four sums grow at a time.
// A change of the configuration takes longer: one object serves many adapters.
class TileBlocks {
  public:
    using E = bf16;
    static constexpr int64_t ROWS = 16, INPUTS = 32;

    void shrink(const E* x, int64_t stride, int64_t rows, const char* a, int64_t block_bytes, int64_t blocks, int64_t tiles, float* sums) {
        configured_rows_ = 0;
        const int64_t group = ROWS * (blocks == 1 ? 3 : blocks == 2 ? 2 : 1);
        for (int64_t row = 0; row < rows; row += group) {
            const int64_t some = rows - row < group ? rows - row : group;
            const E* from = x + row * stride;
            float* to = sums + row * SHRINK_WIDTH;
            if (blocks == 1)
                shrink_to_one(from, stride, some, a, tiles, to);
            else if (blocks == 2)
                shrink_to_two(from, stride, some, a, block_bytes, tiles, to);
            else
                shrink_to_more(from, stride, some, a, block_bytes, blocks, tiles, to);
        }
        QK_TILE_BARRIER();
    }

    void expand(const E* h, int64_t stride, int64_t rows, const char* b, const LowRankRange* ranges, int64_t blocks, float* sums) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t some = rows - row < ROWS ? rows - row : ROWS;
            int64_t many = 1;
            for (int64_t i = 0; i < blocks; i += many) {  // adjacent blocks that need the same configuration
                for (many = 1; i + many < blocks && ranges[i + many].lines == ranges[i].lines;) ++many;
                if (!ranges[i].lines) continue;
                const int64_t lines = ranges[i].lines / ranges[i].tiles();
                if (some != configured_rows_ || lines != configured_lines_) {
                    configure_expansion(some, lines);
                    configured_rows_ = some, configured_lines_ = lines;
                }
                expand_blocks(h + row * stride, stride, b, ranges + i, many, lines, sums + row * qk::PANEL + i * qk::BLOCK);
            }
        }
        QK_TILE_BARRIER();
    }

  private:
    static constexpr int64_t TILES_AHEAD = 6;

    static void fetch_ahead(const char* tile) {
        for (int64_t line = 0; line < qk::TILE_BYTES; line += 64) __builtin_prefetch(tile + TILES_AHEAD * qk::TILE_BYTES + line, 0, 2);
    }

    static constexpr int64_t SHRINK_STRIDE = SHRINK_WIDTH * sizeof(float), SUM_STRIDE = qk::PANEL * sizeof(float);

    // Rows of each tile.
    static void configure(const int64_t (&rows)[8]) {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.column_bytes[tile] = 64;
            config.rows[tile] = uint8_t(rows[tile]);
        }
        load_tile_config(config);
    }

    static int64_t rows_of(int64_t rows, int64_t tile) {
        const int64_t left = rows - tile * ROWS;
        return left > ROWS ? ROWS : left > 0 ? left : 1;  // a tile must have a row
    }

    static void shrink_to_one(const E* x, int64_t stride, int64_t rows, const char* a, int64_t tiles, float* sums) {
        const int64_t r0 = rows_of(rows, 0), r1 = rows_of(rows, 1), r2 = rows_of(rows, 2);
        configure({r0, r1, r2, 16, r0, r1, r2, 16});
        QK_TILE_ZERO(0);
        QK_TILE_ZERO(1);
        QK_TILE_ZERO(2);
        for (int64_t t = 0; t < tiles; ++t, x += INPUTS, a += qk::TILE_BYTES) {
            fetch_ahead(a);
            QK_TILE_LOAD(7, a, qk::ROW_BYTES);
            QK_TILE_LOAD(4, x, stride * sizeof(E));
            QK_TILE_DOT_BF16(0, 4, 7);
            if (rows > ROWS) {
                QK_TILE_LOAD(5, x + ROWS * stride, stride * sizeof(E));
                QK_TILE_DOT_BF16(1, 5, 7);
            }
            if (rows > 2 * ROWS) {
                QK_TILE_LOAD(6, x + 2 * ROWS * stride, stride * sizeof(E));
                QK_TILE_DOT_BF16(2, 6, 7);
            }
        }
        QK_TILE_STORE(0, sums, SHRINK_STRIDE);
        if (rows > ROWS) QK_TILE_STORE(1, sums + ROWS * SHRINK_WIDTH, SHRINK_STRIDE);
        if (rows > 2 * ROWS) QK_TILE_STORE(2, sums + 2 * ROWS * SHRINK_WIDTH, SHRINK_STRIDE);
    }

    static void shrink_to_two(const E* x, int64_t stride, int64_t rows, const char* a, int64_t block_bytes, int64_t tiles, float* sums) {
        const int64_t r0 = rows_of(rows, 0), r1 = rows_of(rows, 1);
        configure({r0, r0, r1, r1, r0, r1, 16, 16});
        QK_TILE_ZERO(0);
        QK_TILE_ZERO(1);
        QK_TILE_ZERO(2);
        QK_TILE_ZERO(3);
        for (int64_t t = 0; t < tiles; ++t, x += INPUTS, a += qk::TILE_BYTES) {
            fetch_ahead(a);
            fetch_ahead(a + block_bytes);
            QK_TILE_LOAD(4, x, stride * sizeof(E));
            QK_TILE_LOAD(6, a, qk::ROW_BYTES);
            QK_TILE_DOT_BF16(0, 4, 6);
            QK_TILE_LOAD(7, a + block_bytes, qk::ROW_BYTES);
            QK_TILE_DOT_BF16(1, 4, 7);
            if (rows > ROWS) {
                QK_TILE_LOAD(5, x + ROWS * stride, stride * sizeof(E));
                QK_TILE_DOT_BF16(2, 5, 6);
                QK_TILE_DOT_BF16(3, 5, 7);
            }
        }
        QK_TILE_STORE(0, sums, SHRINK_STRIDE);
        QK_TILE_STORE(1, sums + 16, SHRINK_STRIDE);
        if (rows > ROWS) {
            QK_TILE_STORE(2, sums + ROWS * SHRINK_WIDTH, SHRINK_STRIDE);
            QK_TILE_STORE(3, sums + ROWS * SHRINK_WIDTH + 16, SHRINK_STRIDE);
        }
    }

    static void shrink_to_more(const E* x, int64_t stride, int64_t rows, const char* a, int64_t block_bytes, int64_t blocks, int64_t tiles, float* sums) {
        configure({rows, rows, rows, rows, rows, 16, 16, 16});
        QK_TILE_ZERO(0);
        QK_TILE_ZERO(1);
        QK_TILE_ZERO(2);
        QK_TILE_ZERO(3);
        for (int64_t t = 0; t < tiles; ++t, x += INPUTS, a += qk::TILE_BYTES) {
            for (int64_t b = 0; b < blocks; ++b) fetch_ahead(a + b * block_bytes);
            QK_TILE_LOAD(4, x, stride * sizeof(E));
            QK_TILE_LOAD(5, a, qk::ROW_BYTES);
            QK_TILE_DOT_BF16(0, 4, 5);
            QK_TILE_LOAD(6, a + block_bytes, qk::ROW_BYTES);
            QK_TILE_DOT_BF16(1, 4, 6);
            QK_TILE_LOAD(7, a + 2 * block_bytes, qk::ROW_BYTES);
            QK_TILE_DOT_BF16(2, 4, 7);
            if (blocks > 3) {
                QK_TILE_LOAD(5, a + 3 * block_bytes, qk::ROW_BYTES);
                QK_TILE_DOT_BF16(3, 4, 5);
            }
        }
        QK_TILE_STORE(0, sums, SHRINK_STRIDE);
        QK_TILE_STORE(1, sums + 16, SHRINK_STRIDE);
        QK_TILE_STORE(2, sums + 32, SHRINK_STRIDE);
        if (blocks > 3) QK_TILE_STORE(3, sums + 48, SHRINK_STRIDE);
    }

    // Sums in tiles 0 to 3, h in 4, weights in 5 to 7.
    static void configure_expansion(int64_t rows, int64_t lines) {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.column_bytes[tile] = tile == 4 ? uint16_t(4 * lines) : 64;
            config.rows[tile] = uint8_t(tile < 5 ? rows : lines);
        }
        load_tile_config(config);
    }

    static void expand_blocks(const E* h, int64_t stride, const char* b, const LowRankRange* ranges, int64_t blocks, int64_t lines, float* sums) {
        const char* w = b + ranges->place * qk::ROW_BYTES;  // one block follows the other
        const int64_t tiles = ranges->tiles(), block_bytes = ranges->lines * qk::ROW_BYTES, tile_bytes = lines * qk::ROW_BYTES;
        QK_TILE_LOAD(0, sums, SUM_STRIDE);
        if (blocks > 1) QK_TILE_LOAD(1, sums + 16, SUM_STRIDE);
        if (blocks > 2) QK_TILE_LOAD(2, sums + 32, SUM_STRIDE);
        if (blocks > 3) QK_TILE_LOAD(3, sums + 48, SUM_STRIDE);
        for (int64_t t = 0; t < tiles; ++t, h += 2 * lines, w += tile_bytes) {
            QK_TILE_LOAD(4, h + ranges[0].first, stride * sizeof(E));
            QK_TILE_LOAD(5, w, qk::ROW_BYTES);
            QK_TILE_DOT_BF16(0, 4, 5);
            if (blocks > 1) {
                if (ranges[1].first != ranges[0].first) QK_TILE_LOAD(4, h + ranges[1].first, stride * sizeof(E));
                QK_TILE_LOAD(6, w + block_bytes, qk::ROW_BYTES);
                QK_TILE_DOT_BF16(1, 4, 6);
            }
            if (blocks > 2) {
                if (ranges[2].first != ranges[1].first) QK_TILE_LOAD(4, h + ranges[2].first, stride * sizeof(E));
                QK_TILE_LOAD(7, w + 2 * block_bytes, qk::ROW_BYTES);
                QK_TILE_DOT_BF16(2, 4, 7);
            }
            if (blocks > 3) {
                if (ranges[3].first != ranges[2].first) QK_TILE_LOAD(4, h + ranges[3].first, stride * sizeof(E));
                QK_TILE_LOAD(5, w + 3 * block_bytes, qk::ROW_BYTES);
                QK_TILE_DOT_BF16(3, 4, 5);
            }
        }
        QK_TILE_STORE(0, sums, SUM_STRIDE);
        if (blocks > 1) QK_TILE_STORE(1, sums + 16, SUM_STRIDE);
        if (blocks > 2) QK_TILE_STORE(2, sums + 32, SUM_STRIDE);
        if (blocks > 3) QK_TILE_STORE(3, sums + 48, SUM_STRIDE);
    }

    const TilesOfAnother scope_;
    int64_t configured_rows_ = 0, configured_lines_ = 0;  // for an expansion
};

using Bf16Blocks = TileBlocks;

#else

using Bf16Blocks = VectorBlocks<Bf16Dot>;

#endif

using FloatBlocks = VectorBlocks<FloatDot>;

// What an adapter adds to `rows` sums [PANEL] of a panel.
template <class Blocks>
QK_INLINE void expand_panel(Blocks& product, const qk_low_rank& w, const typename Blocks::E* h, int64_t stride, int64_t rows, int64_t panel, int64_t blocks, float* sums) {
    const int64_t first = panel * qk::PANEL_BLOCKS, count = blocks - first < qk::PANEL_BLOCKS ? blocks - first : qk::PANEL_BLOCKS;
    product.expand(h, stride, rows, (const char*)w.b, (const LowRankRange*)w.ranges + first, count, sums);
    if (!w.bias) return;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t o = 0; o < count * qk::BLOCK; o += 16) {
            float* sum = sums + row * qk::PANEL + o;
            store_f32(sum, add(load_f32(sum), load_f32(w.bias + first * qk::BLOCK + o)));
        }
}

// The adapters of one call of a linear layer, for all its threads.
class Adapters {
  public:
    // `is_padded`: the rows of x end with zeros up to a whole tile.
    Adapters(qk_context& context, const qk_linear_args& args, bool is_padded = false) : a_(args), shape_{args.n, args.k, args.dtype, args.gated} {
        if (args.adapters && args.adapters->batch->segments) prepare(context, is_padded);
    }
    Adapters(const Adapters&) = delete;
    Adapters& operator=(const Adapters&) = delete;

    // Takes pieces of h until none is left. Each thread calls it before `expand`.
    void shrink() {
        if (__atomic_load_n(&next_, __ATOMIC_RELAXED) >= num_pieces_) return;
        a_.dtype == QK_BFLOAT16 ? shrink_pieces<Bf16Blocks>() : shrink_pieces<FloatBlocks>();
    }

    // Adds to the sums [to - from, PANEL] of rows [from, to) what their adapters give.
    void expand(int64_t panel, int64_t from, int64_t to, float* sums) {
        if (!num_pieces_) return;
        if (__atomic_load_n(&done_, __ATOMIC_ACQUIRE) < num_pieces_) qk::await_count(&done_, num_pieces_);
        a_.dtype == QK_BFLOAT16 ? expand_rows<Bf16Blocks>(panel, from, to, sums) : expand_rows<FloatBlocks>(panel, from, to, sums);
    }

  private:
    // h of some rows of one adapter.
    struct Piece {
        const qk_low_rank* w;
        int64_t from, to, block, blocks;
    };

    const qk_low_rank* of_segment(int64_t segment) const {
        const int32_t slot = a_.adapters->batch->slots[segment];
        const qk_low_rank* w = slot < 0 ? nullptr : a_.adapters->by_slot[slot];
        return w && w->num_h ? w : nullptr;
    }
    int64_t end_of(int64_t segment) const {
        const int64_t end = a_.adapters->batch->starts[segment + 1];
        return end < a_.m ? end : a_.m;
    }

    // f(piece) for each piece.
    template <class F>
    void each_piece(const F& f) const {
        for (int64_t s = 0; s < a_.adapters->batch->segments; ++s) {
            const qk_low_rank* w = of_segment(s);
            if (!w) continue;
            const int64_t blocks = w->num_h / qk::BLOCK, groups = qk::ceil_div(blocks, SHRINK_BLOCKS), size = qk::ceil_div(blocks, groups);
            for (int64_t row = a_.adapters->batch->starts[s]; row < end_of(s); row += SHRINK_ROWS)
                for (int64_t block = 0; block < blocks; block += size)
                    f(Piece{w, row, row + SHRINK_ROWS < end_of(s) ? row + SHRINK_ROWS : end_of(s), block, block + size < blocks ? size : blocks - block});
        }
    }

    void prepare(qk_context& context, bool is_padded) {
        int64_t pieces = 0;
        each_piece([&](const Piece& piece) {
            ++pieces;
            if (piece.w->num_h > h_stride_) h_stride_ = piece.w->num_h;
        });
        if (!pieces) return;
        const auto aligned = [](int64_t bytes) { return qk::ceil_div(bytes, 64) * 64; };
        const int64_t element_bytes = a_.dtype == QK_BFLOAT16 ? 2 : 4, padded = shape_.tiles() * shape_.inputs_per_tile();
        const int64_t piece_bytes = aligned(pieces * int64_t(sizeof(Piece))), h_bytes = aligned(a_.m * h_stride_ * element_bytes);
        const bool is_whole = is_padded || padded == a_.k;
        char* memory = (char*)context.low_rank_scratch(size_t(piece_bytes + h_bytes + (is_whole ? 0 : a_.m * padded * element_bytes)));
        pieces_ = (Piece*)memory;
        h_ = memory + piece_bytes;
        x_ = (const char*)a_.x, x_stride_ = a_.x_stride;
        if (!is_whole) {  // rows padded with zeros to whole tiles
            x_ = h_ + h_bytes, x_stride_ = padded;
            for (int64_t row = 0; row < a_.m; ++row) {
                char* to = h_ + h_bytes + row * padded * element_bytes;
                memcpy(to, (const char*)a_.x + row * a_.x_stride * element_bytes, size_t(a_.k * element_bytes));
                memset(to + a_.k * element_bytes, 0, size_t((padded - a_.k) * element_bytes));
            }
        }
        each_piece([&](const Piece& piece) { pieces_[num_pieces_++] = piece; });
    }

    template <class Blocks>
    void shrink_pieces() {
        Blocks product;
        for (;;) {
            const int64_t piece = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
            if (piece >= num_pieces_) return;
            shrink_piece(product, pieces_[piece]);
            __atomic_fetch_add(&done_, 1, __ATOMIC_RELEASE);
        }
    }

    template <class Blocks>
    void shrink_piece(Blocks& product, const Piece& p) const {
        using E = typename Blocks::E;
        alignas(64) float sums[SHRINK_ROWS * SHRINK_WIDTH];
        product.shrink((const E*)x_ + p.from * x_stride_, x_stride_, p.to - p.from, (const char*)p.w->a + p.block * p.w->block_bytes,
                       p.w->block_bytes, p.blocks, shape_.tiles(), sums);
        for (int64_t row = p.from; row < p.to; ++row)
            for (int64_t i = 0; i < p.blocks * qk::BLOCK; i += qk::BLOCK) {
                const F16 sum = load_f32(sums + (row - p.from) * SHRINK_WIDTH + i), scale = load_f32(p.w->scales + p.block * qk::BLOCK + i);
                store((E*)h_ + row * h_stride_ + p.block * qk::BLOCK + i, mul(sum, scale));
            }
    }

    template <class Blocks>
    void expand_rows(int64_t panel, int64_t from, int64_t to, float* sums) const {
        using E = typename Blocks::E;
        const qk_adapter_batch& batch = *a_.adapters->batch;
        Blocks product;
        for (int64_t s = first_behind(from); s < batch.segments && batch.starts[s] < to; ++s) {
            const int64_t first = batch.starts[s] > from ? batch.starts[s] : from, last = end_of(s) < to ? end_of(s) : to;
            const qk_low_rank* w = of_segment(s);
            if (!w || first >= last) continue;
            expand_panel(product, *w, (const E*)h_ + first * h_stride_, h_stride_, last - first, panel, shape_.blocks(), sums + (first - from) * qk::PANEL);
        }
    }

    // The first segment that ends behind a row.
    int64_t first_behind(int64_t row) const {
        const qk_adapter_batch& batch = *a_.adapters->batch;
        int64_t low = 0, high = batch.segments;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            batch.starts[middle + 1] > row ? (void)(high = middle) : (void)(low = middle + 1);
        }
        return low;
    }

    const qk_linear_args& a_;
    const qk::PackedShape shape_;
    Piece* pieces_ = nullptr;
    int64_t num_pieces_ = 0, h_stride_ = 0, x_stride_ = 0;
    char* h_ = nullptr;  // [m, h_stride] of the type of x
    const char* x_ = nullptr;
    alignas(64) int64_t next_ = 0;
    alignas(64) int64_t done_ = 0;
};

// Adds to looked-up rows [dim] what their adapters give.
template <class Blocks>
void gather_low_rank_with(qk_context& context, const qk_gather_args& a) {
    using E = typename Blocks::E;
    const qk_adapter_batch& batch = *a.adapters->batch;
    const qk::PackedShape shape{a.dim, 0, a.dtype, 0};
    auto work = [&](int64_t begin, int64_t end, int thread) {
        Blocks product;
        for (int64_t row = begin, s = 0; row < end; ++row) {
            while (s < batch.segments && batch.starts[s + 1] <= row) ++s;
            const qk_low_rank* w = s < batch.segments && batch.slots[s] >= 0 ? a.adapters->by_slot[batch.slots[s]] : nullptr;
            if (!w || (a.count && (a.ids[row] < a.first || a.ids[row] >= a.first + a.count))) continue;  // the row is another worker's
            const int64_t per_line = shape.inputs_per_row(), line = a.ids[row] / per_line, within = a.ids[row] % per_line;
            E* h = (E*)context.thread_scratch(thread, size_t(w->num_h) * sizeof(E));
            for (int64_t block = 0; block < w->num_h / qk::BLOCK; ++block) {
                const E* from = (const E*)((const char*)w->a + block * w->block_bytes + line * qk::ROW_BYTES) + within;
                alignas(64) float values[qk::BLOCK];
                for (int64_t j = 0; j < qk::BLOCK; ++j) values[j] = to_float(from[j * per_line]);
                store(h + block * qk::BLOCK, mul(load_f32(values), load_f32(w->scales + block * qk::BLOCK)));
            }
            E* y = (E*)a.y + row * a.dim;
            for (int64_t panel = 0; panel < shape.panels(); ++panel) {
                alignas(64) float sums[qk::PANEL];
                const int64_t count = a.dim - panel * qk::PANEL < qk::PANEL ? a.dim - panel * qk::PANEL : qk::PANEL;
                for (int64_t o = 0; o < count; o += 16) store_f32(sums + o, load_n(y + panel * qk::PANEL + o, int(count - o)));
                expand_panel(product, *w, h, 0, 1, panel, shape.blocks(), sums);
                for (int64_t o = 0; o < count; o += 16) store_n(y + panel * qk::PANEL + o, load_f32(sums + o), int(count - o));
            }
        }
    };
    context.parallel(a.rows, 8, work);
}

}  // namespace QK_ISA
