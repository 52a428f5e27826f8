// bfloat16 linear layers on AMX: 16 rows by 16 outputs in each tile register, 32 inputs at a time.
//
// Register use. With up to 16 rows: sums of the panel's four blocks in 0-3, inputs in 4, weights in 6 and 7. With more: sums of
// 32 rows by two blocks in 0-3, inputs in 4 and 5, weights in 6 and 7, so that each tile that is loaded is used twice. A row's
// sums see the same products in the same order either way.
#include "amx.h"
#include "linear.h"

#include "kernels.h"

namespace QK_ISA {
namespace {

constexpr int64_t TILE_ROWS = 16, TILE_INPUTS = 32, PAIR_ROWS = 2 * TILE_ROWS;
// Tiles of two blocks that all rows go through before the next: 32 KiB, which stay in the first-level cache.
constexpr int64_t CHUNK_TILES = 16;
constexpr int64_t SUM_STRIDE = PANEL * sizeof(float), WEIGHT_STRIDE = qk::ROW_BYTES;

class TileProduct {
  public:
    using E = bf16;

    TileProduct() = default;
    ~TileProduct() {
        if (first_ >= 0) release_tiles();
    }
    TileProduct(const TileProduct&) = delete;
    TileProduct& operator=(const TileProduct&) = delete;

    void multiply(const E* x, int64_t stride, int64_t rows, const char* panel, int64_t tiles, float* sums) {
        if (rows <= TILE_ROWS) {
            configure(rows, rows);
            multiply_few(x, stride, panel, tiles, sums);
        } else {
            for (int64_t t = 0; t < tiles; t += CHUNK_TILES)
                for (int64_t block = 0; block < qk::PANEL_BLOCKS; block += 2)
                    multiply_chunk(x + t * TILE_INPUTS, stride, rows, panel + t * qk::STEP_BYTES + block * qk::TILE_BYTES,
                                   t + CHUNK_TILES < tiles ? CHUNK_TILES : tiles - t, sums + block * qk::BLOCK, t > 0);
        }
        QK_TILE_BARRIER();  // the sums are in memory
    }

  private:
    // Tiles 0, 1 and 4 get `first` rows, 2, 3 and 5 `second`.
    void configure(int64_t first, int64_t second) {
        if (first == first_ && second == second_) return;
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.column_bytes[tile] = 64;
            config.rows[tile] = tile >= 6 ? 16 : uint8_t(tile == 2 || tile == 3 || tile == 5 ? second : first);
        }
        load_tile_config(config);
        first_ = first;
        second_ = second;
    }

    static void multiply_few(const E* x, int64_t stride, const char* w, int64_t tiles, float* sums) {
        QK_TILE_ZERO(0);
        QK_TILE_ZERO(1);
        QK_TILE_ZERO(2);
        QK_TILE_ZERO(3);
        for (int64_t t = 0; t < tiles; ++t, x += TILE_INPUTS, w += qk::STEP_BYTES) {
            for (int64_t line = 0; line < qk::STEP_BYTES; line += 64) __builtin_prefetch(w + 4 * qk::STEP_BYTES + line, 0, 2);
            QK_TILE_LOAD(4, x, stride * sizeof(E));
            QK_TILE_LOAD(6, w, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(0, 4, 6);
            QK_TILE_LOAD(7, w + qk::TILE_BYTES, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(1, 4, 7);
            QK_TILE_LOAD(6, w + 2 * qk::TILE_BYTES, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(2, 4, 6);
            QK_TILE_LOAD(7, w + 3 * qk::TILE_BYTES, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(3, 4, 7);
        }
        QK_TILE_STORE(0, sums, SUM_STRIDE);
        QK_TILE_STORE(1, sums + 16, SUM_STRIDE);
        QK_TILE_STORE(2, sums + 32, SUM_STRIDE);
        QK_TILE_STORE(3, sums + 48, SUM_STRIDE);
    }

    // All rows times some tiles of two blocks.
    void multiply_chunk(const E* x, int64_t stride, int64_t rows, const char* w, int64_t tiles, float* sums, bool add) {
        for (int64_t row = 0; row < rows; row += PAIR_ROWS) {
            const int64_t left = rows - row, first = left < TILE_ROWS ? left : TILE_ROWS;
            const int64_t second = left - first < TILE_ROWS ? left - first : TILE_ROWS;
            const E* from = x + row * stride;
            float* to = sums + row * PANEL;
            configure(first, second ? second : first);
            if (second)
                multiply_pair(from, from + TILE_ROWS * stride, stride, w, tiles, to, to + TILE_ROWS * PANEL, add);
            else
                multiply_single(from, stride, w, tiles, to, add);
        }
    }

    static void multiply_pair(const E* x0, const E* x1, int64_t stride, const char* w, int64_t tiles, float* sums0,
                              float* sums1, bool add) {
        if (add) {
            QK_TILE_LOAD(0, sums0, SUM_STRIDE);
            QK_TILE_LOAD(1, sums0 + 16, SUM_STRIDE);
            QK_TILE_LOAD(2, sums1, SUM_STRIDE);
            QK_TILE_LOAD(3, sums1 + 16, SUM_STRIDE);
        } else {
            QK_TILE_ZERO(0);
            QK_TILE_ZERO(1);
            QK_TILE_ZERO(2);
            QK_TILE_ZERO(3);
        }
        for (int64_t t = 0; t < tiles; ++t, x0 += TILE_INPUTS, x1 += TILE_INPUTS, w += qk::STEP_BYTES) {
            QK_TILE_LOAD(4, x0, stride * sizeof(E));
            QK_TILE_LOAD(6, w, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(0, 4, 6);
            QK_TILE_LOAD(7, w + qk::TILE_BYTES, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(1, 4, 7);
            QK_TILE_LOAD(5, x1, stride * sizeof(E));
            QK_TILE_DOT_BF16(2, 5, 6);
            QK_TILE_DOT_BF16(3, 5, 7);
        }
        QK_TILE_STORE(0, sums0, SUM_STRIDE);
        QK_TILE_STORE(1, sums0 + 16, SUM_STRIDE);
        QK_TILE_STORE(2, sums1, SUM_STRIDE);
        QK_TILE_STORE(3, sums1 + 16, SUM_STRIDE);
    }

    static void multiply_single(const E* x, int64_t stride, const char* w, int64_t tiles, float* sums, bool add) {
        if (add) {
            QK_TILE_LOAD(0, sums, SUM_STRIDE);
            QK_TILE_LOAD(1, sums + 16, SUM_STRIDE);
        } else {
            QK_TILE_ZERO(0);
            QK_TILE_ZERO(1);
        }
        for (int64_t t = 0; t < tiles; ++t, x += TILE_INPUTS, w += qk::STEP_BYTES) {
            QK_TILE_LOAD(4, x, stride * sizeof(E));
            QK_TILE_LOAD(6, w, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(0, 4, 6);
            QK_TILE_LOAD(7, w + qk::TILE_BYTES, WEIGHT_STRIDE);
            QK_TILE_DOT_BF16(1, 4, 7);
        }
        QK_TILE_STORE(0, sums, SUM_STRIDE);
        QK_TILE_STORE(1, sums + 16, SUM_STRIDE);
    }

    int64_t first_ = -1, second_ = -1;
};

}  // namespace

void linear(qk_context& context, const qk_linear_args& args) { linear_with<TileProduct>(context, args); }

void grouped_linear(qk_context& context, const qk::GroupedLinearArgs& args) {
    grouped_linear_with<TileProduct>(context, args);
}

}  // namespace QK_ISA
