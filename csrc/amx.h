// Tile registers: the intrinsics, or (QK_SIMULATE_AMX) their meaning in plain C++, so that what is built on them can be tested
// on any machine. After Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3.
#pragma once

#include <cstdint>
#include <cstring>

namespace QK_ISA {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {};
    uint8_t rows[16] = {};
};

}  // namespace QK_ISA

#ifndef QK_SIMULATE_AMX

#include <immintrin.h>

// GCC 12's intrinsics do not declare to the compiler which memory they read and write.
#define QK_TILE_BARRIER() asm volatile("" ::: "memory")

namespace QK_ISA {

static inline __attribute__((always_inline)) void load_tile_config(const TileConfig& config) {
    QK_TILE_BARRIER();
    _tile_loadconfig(&config);
    QK_TILE_BARRIER();
}
static inline __attribute__((always_inline)) void store_tile_config(TileConfig& config) {
    QK_TILE_BARRIER();
    _tile_storeconfig(&config);
    QK_TILE_BARRIER();
}
static inline __attribute__((always_inline)) void release_tiles() { _tile_release(); }

}  // namespace QK_ISA

#define QK_TILE_ZERO(tile) _tile_zero(tile)
#define QK_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define QK_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define QK_TILE_DOT_BF16(sum, a, b) _tile_dpbf16ps(sum, a, b)
#define QK_TILE_DOT_U8S8(sum, a, b) _tile_dpbusd(sum, a, b)

#else

#define QK_TILE_BARRIER()

namespace QK_ISA {

struct SimulatedTiles {
    TileConfig config;
    uint8_t memory[8][16][64];

    void zero(int t) { memset(memory[t], 0, sizeof memory[t]); }
    void load(int t, const void* from, int64_t stride) {
        zero(t);
        for (int r = 0; r < config.rows[t]; ++r) memcpy(memory[t][r], (const char*)from + r * stride, config.column_bytes[t]);
    }
    void store(int t, void* to, int64_t stride) {
        for (int r = 0; r < config.rows[t]; ++r) memcpy((char*)to + r * stride, memory[t][r], config.column_bytes[t]);
    }
    static float element(const uint8_t* row, int i) {
        uint16_t half;
        memcpy(&half, row + 2 * i, 2);
        const uint32_t bits = uint32_t(half) << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    void dot_bf16(int sum, int a, int b) {
        for (int m = 0; m < config.rows[sum]; ++m)
            for (int n = 0; n < config.column_bytes[sum] / 4; ++n) {
                float even = 0, odd = 0, total;
                for (int k = 0; k < config.column_bytes[a] / 4; ++k) {
                    even += element(memory[a][m], 2 * k) * element(memory[b][k], 2 * n);
                    odd += element(memory[a][m], 2 * k + 1) * element(memory[b][k], 2 * n + 1);
                }
                memcpy(&total, memory[sum][m] + 4 * n, 4);
                total += even + odd;
                memcpy(memory[sum][m] + 4 * n, &total, 4);
            }
    }
    void dot_u8s8(int sum, int a, int b) {
        for (int m = 0; m < config.rows[sum]; ++m)
            for (int n = 0; n < config.column_bytes[sum] / 4; ++n) {
                int32_t total;
                memcpy(&total, memory[sum][m] + 4 * n, 4);
                for (int k = 0; k < config.column_bytes[a]; ++k) total += memory[a][m][k] * int8_t(memory[b][k / 4][4 * n + k % 4]);
                memcpy(memory[sum][m] + 4 * n, &total, 4);
            }
    }
};
static thread_local SimulatedTiles simulated_tiles;

static inline void load_tile_config(const TileConfig& config) { simulated_tiles.config = config; }
static inline void store_tile_config(TileConfig& config) { config = simulated_tiles.config; }
static inline void release_tiles() { simulated_tiles.config = TileConfig(); }

}  // namespace QK_ISA

#define QK_TILE_ZERO(tile) simulated_tiles.zero(tile)
#define QK_TILE_LOAD(tile, from, stride) simulated_tiles.load(tile, from, stride)
#define QK_TILE_STORE(tile, to, stride) simulated_tiles.store(tile, to, stride)
#define QK_TILE_DOT_BF16(sum, a, b) simulated_tiles.dot_bf16(sum, a, b)
#define QK_TILE_DOT_U8S8(sum, a, b) simulated_tiles.dot_u8s8(sum, a, b)

#endif
