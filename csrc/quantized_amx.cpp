// Linear layers on quantized weights, on AMX: up to 16 rows by the panel's four blocks in tiles 0-3, inputs in 4, weights in 6 and 7.
#include "amx.h"
#include "quantized.h"

#include "kernels.h"

namespace QK_ISA {
namespace {

constexpr int64_t TILE_ROWS = 16, CHUNK_STEPS = 4, TILE_INPUT_BYTES = 64;
constexpr int64_t SUM_STRIDE = PANEL * 4, WEIGHT_STRIDE = qk::ROW_BYTES;

class Tiles {
  public:
    Tiles() = default;
    ~Tiles() {
        if (rows_ > 0) release_tiles();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void configure(int64_t rows) {
        if (rows == rows_) return;
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.column_bytes[tile] = 64;
            config.rows[tile] = tile >= 6 ? 16 : uint8_t(rows);
        }
        load_tile_config(config);
        rows_ = rows;
    }

  private:
    int64_t rows_ = 0;
};

// Up to 16 rows times some tiles of the panel's blocks. `sums` are float or int32, as the product makes them.
#define QK_MULTIPLY(name, dot)                                                                                       \
    void name(const char* x, int64_t stride, const char* w, int64_t steps, void* sums, bool add) {                  \
        char* to = (char*)sums;                                                                                      \
        if (add) {                                                                                                   \
            QK_TILE_LOAD(0, to, SUM_STRIDE);                                                                         \
            QK_TILE_LOAD(1, to + 64, SUM_STRIDE);                                                                    \
            QK_TILE_LOAD(2, to + 128, SUM_STRIDE);                                                                   \
            QK_TILE_LOAD(3, to + 192, SUM_STRIDE);                                                                   \
        } else {                                                                                                     \
            QK_TILE_ZERO(0);                                                                                         \
            QK_TILE_ZERO(1);                                                                                         \
            QK_TILE_ZERO(2);                                                                                         \
            QK_TILE_ZERO(3);                                                                                         \
        }                                                                                                            \
        for (int64_t t = 0; t < steps; ++t, x += TILE_INPUT_BYTES, w += qk::STEP_BYTES) {                            \
            QK_TILE_LOAD(4, x, stride);                                                                              \
            QK_TILE_LOAD(6, w, WEIGHT_STRIDE);                                                                       \
            dot(0, 4, 6);                                                                                            \
            QK_TILE_LOAD(7, w + qk::TILE_BYTES, WEIGHT_STRIDE);                                                      \
            dot(1, 4, 7);                                                                                            \
            QK_TILE_LOAD(6, w + 2 * qk::TILE_BYTES, WEIGHT_STRIDE);                                                  \
            dot(2, 4, 6);                                                                                            \
            QK_TILE_LOAD(7, w + 3 * qk::TILE_BYTES, WEIGHT_STRIDE);                                                  \
            dot(3, 4, 7);                                                                                            \
        }                                                                                                            \
        QK_TILE_STORE(0, to, SUM_STRIDE);                                                                            \
        QK_TILE_STORE(1, to + 64, SUM_STRIDE);                                                                       \
        QK_TILE_STORE(2, to + 128, SUM_STRIDE);                                                                      \
        QK_TILE_STORE(3, to + 192, SUM_STRIDE);                                                                      \
    }
QK_MULTIPLY(multiply_int8, QK_TILE_DOT_U8S8)
QK_MULTIPLY(multiply_bf16_tiles, QK_TILE_DOT_BF16)

// Inputs as the tile instruction takes them: unsigned, as VNNI's.
struct OffsetDot {
    using E = uint8_t;
    static constexpr bool has_offset = true;
    QK_INLINE void store_inputs(E* to, F16 x) {
        float f[16];
        store_f32(f, x);
        for (int i = 0; i < 16; ++i) to[i] = f[i] >= -127.0f && f[i] <= 127.0f ? E(int(f[i]) + 128) : E(128);
    }
};

struct Int8TileProduct {
    using Dot = OffsetDot;

    void multiply(const uint8_t* x, int64_t stride, int64_t rows, const char* panel, int64_t steps, int32_t* sums) {
        const int64_t chunk = rows <= TILE_ROWS ? steps : CHUNK_STEPS;
        for (int64_t t = 0; t < steps; t += chunk)
            for (int64_t row = 0; row < rows; row += TILE_ROWS) {
                tiles.configure(rows - row < TILE_ROWS ? rows - row : TILE_ROWS);
                multiply_int8((const char*)x + row * stride + t * TILE_INPUT_BYTES, stride, panel + t * qk::STEP_BYTES,
                              t + chunk < steps ? chunk : steps - t, sums + row * PANEL, t > 0);
            }
        QK_TILE_BARRIER();  // the sums are in memory
    }

    Tiles tiles;
};

struct WeightsOnlyTileProduct {
    using E = bf16;
    static constexpr size_t SCRATCH_BYTES = size_t(CHUNK_STEPS * qk::STEP_BYTES);

    explicit WeightsOnlyTileProduct(int32_t form) : form(form) {}

    void multiply(const E* x, int64_t stride, int64_t rows, PanelValues panel, int64_t steps, int64_t group_steps, GroupScales scales,
                  char* scratch, float* sums, float* totals) {
        for (int64_t first = 0; first < steps; first += group_steps, scales = scales.after(1)) {
            const int64_t count = first + group_steps < steps ? group_steps : steps - first;
            for_form(form, [&](auto form) { multiply_group<form>(x + first * STEP_INPUTS, stride, rows, panel, count, scratch, sums); });
            panel.values += count * QuantizedShape{0, 0, form, 0}.step_bytes();
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t o = 0; o < PANEL; o += 16) scales.add_to(totals + row * PANEL + o, load_f32(sums + row * PANEL + o), row, o);
        }
    }

    template <int FORM>
    void multiply_group(const E* x, int64_t stride, int64_t rows, const PanelValues& panel, int64_t steps, char* scratch, float* sums) {
        constexpr int64_t LINES_PER_STEP = qk::PANEL_BLOCKS * qk::bits_of(FORM);
        Expansion<FORM, E> expansion{(const uint16_t*)panel.values, panel.exponents, nullptr, steps * LINES_PER_STEP};
        for (int64_t t = 0; t < steps; t += CHUNK_STEPS) {
            const int64_t count = t + CHUNK_STEPS < steps ? CHUNK_STEPS : steps - t;
            expansion.to = (E*)scratch;
            expansion.expand(count * LINES_PER_STEP);
            for (int64_t row = 0; row < rows; row += TILE_ROWS) {
                tiles.configure(rows - row < TILE_ROWS ? rows - row : TILE_ROWS);
                QK_TILE_BARRIER();  // the weights are in memory
                multiply_bf16_tiles((const char*)(x + row * stride + t * STEP_INPUTS), stride * int64_t(sizeof(E)), scratch, count,
                                    sums + row * PANEL, t > 0);
            }
        }
        QK_TILE_BARRIER();
    }

    int32_t form;
    Tiles tiles;
};

}  // namespace

void grouped_quantized_linear(qk_context& context, const qk::GroupedLinearArgs& args) {
    if (args.quantization->form == QK_W8A8)
        int8_linear_with<Int8TileProduct>(context, args);
    else
        weights_only_linear_with<WeightsOnlyTileProduct>(context, args);
}

}  // namespace QK_ISA
