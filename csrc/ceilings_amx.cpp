// ceilings.cpp on tiles.
#include "amx.h"
#include "context.h"
#include "kernels.h"

namespace QK_ISA {

int64_t multiply_bf16(qk_context& context, int64_t rounds) {
    auto work = [&](int64_t begin, int64_t end, int) {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.rows[tile] = 16;
            config.column_bytes[tile] = 64;
        }
        load_tile_config(config);
        QK_TILE_ZERO(0);
        QK_TILE_ZERO(1);
        QK_TILE_ZERO(2);
        QK_TILE_ZERO(3);
        QK_TILE_ZERO(4);
        QK_TILE_ZERO(5);
        QK_TILE_ZERO(6);
        QK_TILE_ZERO(7);
        for (int64_t round = begin * 16; round < end * 16; ++round) {
            QK_TILE_DOT_BF16(0, 4, 6);
            QK_TILE_DOT_BF16(1, 4, 7);
            QK_TILE_DOT_BF16(2, 5, 6);
            QK_TILE_DOT_BF16(3, 5, 7);
        }
        release_tiles();
    };
    context.parallel(rounds, 1, work);
    return rounds * 16 * 4 * 16 * 16 * 32 * 2;
}

}  // namespace QK_ISA
