// bfloat16 attention on AMX: up to 16 rows by 16 keys, or by 16 elements of values, in each tile register.
//
// Register use: sums in 0-3, rows in 4 (32 elements of queries) or 5 (16 weights, or the last 16 elements of queries), keys in 6 (32
// elements) or 7 (the last 16), values in 7. Values of a group of 16 keys fill half a tile. Two groups would fill one only if they
// were neighbours in memory, and the pages that hold them are not.
#include "amx.h"
#include "attention.h"

#include "kernels.h"

namespace QK_ISA {
namespace {

constexpr int64_t TILE_ROWS = 16, TILE_INPUTS = 32, HALF_INPUTS = 16, TILE_SUMS = 4;
constexpr int64_t KEY_STRIDE = 64, SCORE_STRIDE = CHUNK * sizeof(float), WEIGHT_STRIDE = CHUNK * sizeof(bf16);

// Adds to sums 0 to COUNT - 1: tile `rows` times what lies at place(0), place(1), ..., each by way of tile `other`.
#define QK_DOT_EACH(COUNT, rows, other, place, stride) \
    QK_TILE_LOAD(other, place(0), stride);             \
    QK_TILE_DOT_BF16(0, rows, other);                  \
    if (COUNT > 1) {                                   \
        QK_TILE_LOAD(other, place(1), stride);         \
        QK_TILE_DOT_BF16(1, rows, other);              \
    }                                                  \
    if (COUNT > 2) {                                   \
        QK_TILE_LOAD(other, place(2), stride);         \
        QK_TILE_DOT_BF16(2, rows, other);              \
    }                                                  \
    if (COUNT > 3) {                                   \
        QK_TILE_LOAD(other, place(3), stride);         \
        QK_TILE_DOT_BF16(3, rows, other);              \
    }

class TileProducts {
  public:
    using E = bf16;
    static constexpr bool WHOLE_GROUPS = true;
    static constexpr int64_t TILE_QUERIES = 96;

    TileProducts() = default;
    ~TileProducts() {
        if (rows_) release_tiles();
    }
    TileProducts(const TileProducts&) = delete;
    TileProducts& operator=(const TileProducts&) = delete;

    void score(const ChunkView<Bf16Dot>& view, const E* queries, int64_t size, int64_t rows, float* scores) {
        for (int64_t g = view.first_group; g < view.num_groups; g += TILE_SUMS)
            in_tiles(rows, [&](int64_t r) {
                const E* q = queries + r * size;
                float* to = scores + r * CHUNK + g * KEYS;
                if (r == 0)
                    for (int64_t i = g; i < g + TILE_SUMS && i < view.num_groups; ++i) fetch(view.values[i], size);
                switch (view.num_groups - g) {
                    case 1: return multiply_keys<1>(q, size, view.keys + g, to);
                    case 2: return multiply_keys<2>(q, size, view.keys + g, to);
                    case 3: return multiply_keys<3>(q, size, view.keys + g, to);
                    default: return multiply_keys<4>(q, size, view.keys + g, to);
                }
            });
        QK_TILE_BARRIER();  // the scores are in memory
    }

    void accumulate(const ChunkView<Bf16Dot>& view, const E* const* next_keys, const E* weights, int64_t rows, int64_t width,
                    float* sums) {
        for (int64_t at = 0; at < width; at += TILE_SUMS * KEYS)
            in_tiles(rows, [&](int64_t r) {
                const E* from = weights + r * CHUNK;
                float* to = sums + r * width + at;
                if (at == 0 && r == 0)
                    for (int64_t g = view.first_group; g < view.num_groups; ++g) fetch(next_keys[g], width);
                switch ((width - at) / KEYS) {
                    case 1: return multiply_values<1>(from, view, width, at, to);
                    case 2: return multiply_values<2>(from, view, width, at, to);
                    case 3: return multiply_values<3>(from, view, width, at, to);
                    default: return multiply_values<4>(from, view, width, at, to);
                }
            });
        QK_TILE_BARRIER();
    }

  private:
    // Calls f(first row) for tiles of equally many rows: the last may have rows of the one before it, which get the same sums.
    template <class F>
    void in_tiles(int64_t rows, F f) {
        const int64_t each = qk::ceil_div(rows, qk::ceil_div(rows, TILE_ROWS));
        configure(each);
        for (int64_t r = 0; r < rows; r += each) f(r + each < rows ? r : rows - each);
    }

    void configure(int64_t rows) {
        if (rows == rows_) return;
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.column_bytes[tile] = tile == 5 ? HALF_INPUTS * sizeof(E) : 64;
            config.rows[tile] = uint8_t(tile == 6 ? 16 : tile == 7 ? 8 : rows);
        }
        load_tile_config(config);
        rows_ = rows;
    }

    // The memory of a group of 16 keys, or values.
    static void fetch(const E* group, int64_t size) {
        for (int64_t i = 0; i < size * KEYS; i += 32) __builtin_prefetch(group + i, 0, 2);
    }

    template <int GROUPS>
    static void multiply_keys(const E* q, int64_t size, const E* const* keys, float* scores) {
        clear<GROUPS>();
        int64_t i = 0;
        const auto group = [&](int n) { return keys[n] + i * KEYS; };
        for (; i + TILE_INPUTS <= size; i += TILE_INPUTS) {
            QK_TILE_LOAD(4, q + i, size * sizeof(E));
            QK_DOT_EACH(GROUPS, 4, 6, group, KEY_STRIDE)
        }
        if (i < size) {
            QK_TILE_LOAD(5, q + i, size * sizeof(E));
            QK_DOT_EACH(GROUPS, 5, 7, group, KEY_STRIDE)
        }
        store<GROUPS>(scores, SCORE_STRIDE);
    }

    template <int BLOCKS>
    static void multiply_values(const E* weights, const ChunkView<Bf16Dot>& view, int64_t width, int64_t at, float* sums) {
        clear<BLOCKS>();
        for (int64_t g = view.first_group; g < view.num_groups; ++g) {
            const auto block = [&](int n) { return view.values[g] + (at + n * KEYS) * Bf16Dot::step; };
            QK_TILE_LOAD(5, weights + g * KEYS, WEIGHT_STRIDE);
            QK_DOT_EACH(BLOCKS, 5, 7, block, width * Bf16Dot::step * sizeof(E))
        }
        store<BLOCKS>(sums, width * sizeof(float));
    }

    template <int COUNT>
    static void clear() {
        QK_TILE_ZERO(0);
        if (COUNT > 1) QK_TILE_ZERO(1);
        if (COUNT > 2) QK_TILE_ZERO(2);
        if (COUNT > 3) QK_TILE_ZERO(3);
    }

    template <int COUNT>
    static void store(float* to, int64_t stride) {
        QK_TILE_STORE(0, to, stride);
        if (COUNT > 1) QK_TILE_STORE(1, to + 16, stride);
        if (COUNT > 2) QK_TILE_STORE(2, to + 32, stride);
        if (COUNT > 3) QK_TILE_STORE(3, to + 48, stride);
    }

    int64_t rows_ = 0;  // of the tiles' configuration
};

}  // namespace

void attention(qk_context& context, const qk_attention_args& args) { Attention<Bf16Dot, TileProducts>(context, args).run(); }

}  // namespace QK_ISA
