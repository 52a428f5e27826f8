// What the machine can do at most: loads and products that depend on nothing. benchmarks/kernels.py times them.
#include "context.h"
#include "kernels.h"
#include "vec.h"

namespace QK_ISA {
namespace {

constexpr int64_t PIECE = 1 << 16;  // bytes

volatile float sink;

}  // namespace

void read_memory(qk_context& context, const void* memory, int64_t bytes) {
    auto work = [&](int64_t begin, int64_t end, int) {
        F16 sums[8];
        for (F16& sum : sums) sum = zero();
        for (const char* p = (const char*)memory + begin * PIECE; p < (const char*)memory + end * PIECE; p += 512)
            for (int i = 0; i < 8; ++i) sums[i] = add(sums[i], load_f32((const float*)(p + 64 * i)));
        for (int i = 1; i < 8; ++i) sums[0] = add(sums[0], sums[i]);
        sink = reduce_add(sums[0]);
    };
    context.parallel(bytes / PIECE, 16, work);
}

int64_t multiply_bf16(qk_context& context, int64_t rounds) {
    constexpr int CHAINS = Bf16Dot::tile_rows * Bf16Dot::tile_blocks;
    auto work = [&](int64_t begin, int64_t end, int) {
        alignas(64) const bf16 ones[32] = {};
        F16 sums[CHAINS];
#pragma GCC unroll 32
        for (int i = 0; i < CHAINS; ++i) sums[i] = set1(float(i));  // all different: none may stand for another
        typename Bf16Dot::A a = Bf16Dot::broadcast(ones);
        typename Bf16Dot::W w = Bf16Dot::weights(ones);
        for (int64_t round = begin * 1024; round < end * 1024; ++round) {
#pragma GCC unroll 32
            for (F16& sum : sums) sum = Bf16Dot::dot(sum, a, w);
            asm volatile("" : "+m"(*(char*)&sink));  // rounds are not merged into one
        }
#pragma GCC unroll 32
        for (int i = 1; i < CHAINS; ++i) sums[0] = add(sums[0], sums[i]);
        sink = reduce_add(sums[0]);
    };
    context.parallel(rounds, 1, work);
    return rounds * 1024 * CHAINS * 16 * 2 * 2;
}

}  // namespace QK_ISA
