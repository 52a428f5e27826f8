// vec.h in portable C++ (GCC and Clang vector extensions): four 128-bit registers. On arm64 products are fused.
#pragma once

#include <cmath>

#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace QK_ISA {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef uint16_t H4 __attribute__((vector_size(8)));

struct F16 {
    F4 a, b, c, d;
};
struct M16 {
    I4 a, b, c, d;
};

// Applies `f` to each quarter.
#define QK_EACH(type, f) (type{f(a), f(b), f(c), f(d)})

QK_INLINE F4 set4(float x) { return F4{x, x, x, x}; }
QK_INLINE F4 load4(const float* p) {
    F4 x;
    memcpy(&x, p, 16);
    return x;
}
QK_INLINE F4 load4(const uint16_t* p) {
    H4 half;
    memcpy(&half, p, 8);
    return (F4)(__builtin_convertvector(half, U4) << 16);
}
QK_INLINE F4 select4(I4 mask, F4 yes, F4 no) { return (F4)((mask & (I4)yes) | (~mask & (I4)no)); }
QK_INLINE F4 fma4(F4 a, F4 b, F4 c) {
#ifdef __aarch64__
    return (F4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

QK_INLINE F16 set1(float x) { return {set4(x), set4(x), set4(x), set4(x)}; }
QK_INLINE F16 zero() { return set1(0.0f); }
QK_INLINE F16 load_f32(const float* p) { return {load4(p), load4(p + 4), load4(p + 8), load4(p + 12)}; }
QK_INLINE F16 load_bf16(const uint16_t* p) { return {load4(p), load4(p + 4), load4(p + 8), load4(p + 12)}; }
QK_INLINE void store_f32(float* p, F16 x) { memcpy(p, &x, 64); }
QK_INLINE void store_bf16_4(uint16_t* p, F4 x) {
    U4 bits = (U4)x;
    U4 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    U4 nan = (U4)(x != x);
    rounded = (nan & (bits | 0x400000u)) | (~nan & rounded);
    H4 half = __builtin_convertvector(rounded >> 16, H4);
    memcpy(p, &half, 8);
}
QK_INLINE void store_bf16(uint16_t* p, F16 x) {
    store_bf16_4(p, x.a);
    store_bf16_4(p + 4, x.b);
    store_bf16_4(p + 8, x.c);
    store_bf16_4(p + 12, x.d);
}

QK_INLINE F16 add(F16 x, F16 y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
QK_INLINE F16 sub(F16 x, F16 y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
QK_INLINE F16 mul(F16 x, F16 y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
QK_INLINE F16 div(F16 x, F16 y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }
QK_INLINE F16 fma(F16 x, F16 y, F16 z) {
    return {fma4(x.a, y.a, z.a), fma4(x.b, y.b, z.b), fma4(x.c, y.c, z.c), fma4(x.d, y.d, z.d)};
}
QK_INLINE F4 max4(F4 x, F4 y) { return select4(x > y, x, y); }
QK_INLINE F4 min4(F4 x, F4 y) { return select4(x < y, x, y); }
QK_INLINE F16 max(F16 x, F16 y) { return {max4(x.a, y.a), max4(x.b, y.b), max4(x.c, y.c), max4(x.d, y.d)}; }
QK_INLINE F16 min(F16 x, F16 y) { return {min4(x.a, y.a), min4(x.b, y.b), min4(x.c, y.c), min4(x.d, y.d)}; }
QK_INLINE F4 abs4(F4 x) { return (F4)((I4)x & 0x7fffffff); }
QK_INLINE F16 abs(F16 x) { return {abs4(x.a), abs4(x.b), abs4(x.c), abs4(x.d)}; }

QK_INLINE M16 less(F16 x, F16 y) { return {x.a < y.a, x.b < y.b, x.c < y.c, x.d < y.d}; }
QK_INLINE uint32_t bits4(I4 mask) {
    const I4 place = {1, 2, 4, 8}, bit = mask & place;
    return uint32_t(bit[0] | bit[1] | bit[2] | bit[3]);
}
QK_INLINE uint32_t bits(M16 m) { return bits4(m.a) | bits4(m.b) << 4 | bits4(m.c) << 8 | bits4(m.d) << 12; }
QK_INLINE I4 lanes4(int begin, int end) {
    const I4 index = {0, 1, 2, 3};
    return (index >= begin) & (index < end);
}
QK_INLINE M16 lanes(int begin, int end) {
    return {lanes4(begin, end), lanes4(begin - 4, end - 4), lanes4(begin - 8, end - 8), lanes4(begin - 12, end - 12)};
}
QK_INLINE F16 select(M16 m, F16 x, F16 y) {
    return {select4(m.a, x.a, y.a), select4(m.b, x.b, y.b), select4(m.c, x.c, y.c), select4(m.d, x.d, y.d)};
}
QK_INLINE int store_selected(float* out, M16 mask, F16 x) {
    float values[16];
    memcpy(values, &x, 64);
    int n = 0;
    for (uint32_t rest = bits(mask); rest; rest &= rest - 1) out[n++] = values[__builtin_ctz(rest)];
    return n;
}
QK_INLINE F4 copy_sign4(F4 magnitude, F4 sign) {
    return (F4)(((I4)magnitude & 0x7fffffff) | (I4)((U4)sign & 0x80000000u));
}
QK_INLINE F16 copy_sign(F16 x, F16 y) {
    return {copy_sign4(x.a, y.a), copy_sign4(x.b, y.b), copy_sign4(x.c, y.c), copy_sign4(x.d, y.d)};
}

// For |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
QK_INLINE F4 round_even4(F4 x) {
    const F4 big = set4(12582912.0f);
    return (x + big) - big;
}
QK_INLINE F16 round_even(F16 x) {
    return {round_even4(x.a), round_even4(x.b), round_even4(x.c), round_even4(x.d)};
}
QK_INLINE F4 scale4(F4 x, F4 n) { return x * (F4)((__builtin_convertvector(n, I4) + 127) << 23); }
QK_INLINE F16 scale_by_power(F16 x, F16 n) {
    return {scale4(x.a, n.a), scale4(x.b, n.b), scale4(x.c, n.c), scale4(x.d, n.d)};
}

QK_INLINE float reduce_add(F16 x) {
    F4 y = (x.a + x.c) + (x.b + x.d);
    return (y[0] + y[2]) + (y[1] + y[3]);
}
QK_INLINE float reduce_max(F16 x) {
    F4 y = max4(max4(x.a, x.c), max4(x.b, x.d));
    float even = y[0] > y[2] ? y[0] : y[2], odd = y[1] > y[3] ? y[1] : y[3];
    return even > odd ? even : odd;
}

struct FloatDot {
    using E = float;
    static constexpr int step = 1;
    static constexpr int tile_rows = 6, tile_blocks = 1;
    using A = F4;
    using W = F16;
    QK_INLINE A broadcast(const float* x) { return set4(*x); }
    QK_INLINE W weights(const void* w) { return load_f32((const float*)w); }
    QK_INLINE F16 dot(F16 s, A a, W w) {
        return {fma4(a, w.a, s.a), fma4(a, w.b, s.b), fma4(a, w.c, s.c), fma4(a, w.d, s.d)};
    }
};

struct Bf16Dot {
    using E = uint16_t;
    static constexpr int step = 2;
    static constexpr int tile_rows = 5, tile_blocks = 1;
    struct A {
        F4 even, odd;
    };
    struct W {
        F16 even, odd;
    };
    QK_INLINE A broadcast(const uint16_t* x) {
        uint32_t pair;
        memcpy(&pair, x, 4);
        return split(U4{pair, pair, pair, pair});
    }
    QK_INLINE A split(U4 pairs) { return {(F4)(pairs << 16), (F4)(pairs & 0xffff0000u)}; }
    QK_INLINE W weights(const void* w) {
        U4 q[4];
        memcpy(q, w, 64);
        A a = split(q[0]), b = split(q[1]), c = split(q[2]), d = split(q[3]);
        return {{a.even, b.even, c.even, d.even}, {a.odd, b.odd, c.odd, d.odd}};
    }
    QK_INLINE F4 dot4(F4 s, A a, F4 even, F4 odd) { return fma4(a.odd, odd, fma4(a.even, even, s)); }
    QK_INLINE F16 dot(F16 s, A a, W w) {
        return {dot4(s.a, a, w.even.a, w.odd.a), dot4(s.b, a, w.even.b, w.odd.b), dot4(s.c, a, w.even.c, w.odd.c),
                dot4(s.d, a, w.even.d, w.odd.d)};
    }
};

}  // namespace QK_ISA
