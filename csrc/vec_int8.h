// Products of int8 weights with int8 inputs, sixteen int32 sums at a time. All of them are exact, so every instruction set gives
// the same sums. 64 bytes of weights are 16 outputs by four inputs.
#pragma once

#include "vec.h"

namespace QK_ISA {

#if defined(__AVX512F__)

using S16 = __m512i;
QK_INLINE S16 zero_sums() { return _mm512_setzero_si512(); }
QK_INLINE S16 load_sums(const int32_t* p) { return _mm512_loadu_si512(p); }
QK_INLINE void store_sums(int32_t* p, S16 s) { _mm512_storeu_si512(p, s); }
QK_INLINE F16 to_floats(S16 s) { return _mm512_cvtepi32_ps(s); }
QK_INLINE S16 subtract(S16 a, S16 b) { return _mm512_sub_epi32(a, b); }
QK_INLINE __m128i to_bytes(F16 x) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)); }

#ifdef __AVX512VNNI__

// The instruction takes unsigned inputs: 128 is added to them, and 128 times each output's weights subtracted at the end.
struct Int8Dot {
    using E = uint8_t;
    static constexpr bool has_offset = true;
    static constexpr int tile_rows = 6, tile_blocks = 4;
    using A = __m512i;
    using W = __m512i;
    QK_INLINE void store_inputs(E* to, F16 x) {
        _mm_storeu_si128((__m128i*)to, _mm_xor_si128(to_bytes(x), _mm_set1_epi8(char(0x80))));
    }
    QK_INLINE A broadcast(const E* x) {
        int32_t four;
        memcpy(&four, x, 4);
        return _mm512_set1_epi32(four);
    }
    QK_INLINE W weights(const void* w) { return _mm512_loadu_si512(w); }
    QK_INLINE S16 dot(S16 sum, A a, W w) { return _mm512_dpbusd_epi32(sum, a, w); }
};

#else

struct Int8Dot {
    using E = int8_t;
    static constexpr bool has_offset = false;
    static constexpr int tile_rows = 5, tile_blocks = 4;
    struct A {
        __m512i even, odd;  // int16
    };
    using W = A;
    QK_INLINE void store_inputs(E* to, F16 x) { _mm_storeu_si128((__m128i*)to, to_bytes(x)); }
    QK_INLINE A split(__m512i x) { return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)}; }
    QK_INLINE A broadcast(const E* x) {
        int32_t four;
        memcpy(&four, x, 4);
        return split(_mm512_set1_epi32(four));
    }
    QK_INLINE W weights(const void* w) { return split(_mm512_loadu_si512(w)); }
    QK_INLINE S16 dot(S16 sum, A a, W w) {
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a.even, w.even));
        return _mm512_add_epi32(sum, _mm512_madd_epi16(a.odd, w.odd));
    }
};

#endif

#elif defined(__AVX2__)

struct S16 {
    __m256i lo, hi;
};
QK_INLINE S16 zero_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
QK_INLINE S16 load_sums(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
QK_INLINE void store_sums(int32_t* p, S16 s) {
    _mm256_storeu_si256((__m256i*)p, s.lo);
    _mm256_storeu_si256((__m256i*)p + 1, s.hi);
}
QK_INLINE F16 to_floats(S16 s) { return {_mm256_cvtepi32_ps(s.lo), _mm256_cvtepi32_ps(s.hi)}; }
QK_INLINE S16 subtract(S16 a, S16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }

struct Int8Dot {
    using E = int8_t;
    static constexpr bool has_offset = false;
    static constexpr int tile_rows = 4, tile_blocks = 1;
    struct A {
        __m256i even, odd;
    };
    struct W {
        A lo, hi;
    };
    QK_INLINE void store_inputs(E* to, F16 x) {
        const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
        const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
        const __m256i bytes = _mm256_packs_epi16(ordered, ordered);
        _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0x08)));
    }
    QK_INLINE A split(__m256i x) { return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)}; }
    QK_INLINE A broadcast(const E* x) {
        int32_t four;
        memcpy(&four, x, 4);
        return split(_mm256_set1_epi32(four));
    }
    QK_INLINE W weights(const void* w) {
        return {split(_mm256_loadu_si256((const __m256i*)w)), split(_mm256_loadu_si256((const __m256i*)w + 1))};
    }
    QK_INLINE __m256i dot8(__m256i sum, A a, A w) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a.even, w.even));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a.odd, w.odd));
    }
    QK_INLINE S16 dot(S16 sum, A a, W w) { return {dot8(sum.lo, a, w.lo), dot8(sum.hi, a, w.hi)}; }
};

#else

struct S16 {
    int32_t v[16];
};
QK_INLINE S16 zero_sums() { return {}; }
QK_INLINE S16 load_sums(const int32_t* p) {
    S16 s;
    memcpy(s.v, p, 64);
    return s;
}
QK_INLINE void store_sums(int32_t* p, S16 s) { memcpy(p, s.v, 64); }
QK_INLINE F16 to_floats(S16 s) {
    float f[16];
    for (int i = 0; i < 16; ++i) f[i] = float(s.v[i]);
    return load_f32(f);
}
QK_INLINE S16 subtract(S16 a, S16 b) {
    for (int i = 0; i < 16; ++i) a.v[i] -= b.v[i];
    return a;
}

struct Int8Dot {
    using E = int8_t;
    static constexpr bool has_offset = false;
    static constexpr int tile_rows = 1, tile_blocks = 1;
    struct A {
        int32_t x[4];
    };
    struct W {
        int8_t w[64];
    };
    QK_INLINE void store_inputs(E* to, F16 x) {
        float f[16];
        store_f32(f, x);
        for (int i = 0; i < 16; ++i) to[i] = f[i] >= -127.0f && f[i] <= 127.0f ? E(f[i]) : E(0);  // not a number: 0
    }
    QK_INLINE A broadcast(const E* x) { return {{x[0], x[1], x[2], x[3]}}; }
    QK_INLINE W weights(const void* p) {
        W w;
        memcpy(w.w, p, 64);
        return w;
    }
    QK_INLINE S16 dot(S16 sum, A a, const W& w) {
        for (int o = 0; o < 16; ++o)
            for (int i = 0; i < 4; ++i) sum.v[o] += a.x[i] * w.w[4 * o + i];
        return sum;
    }
};

#endif

}  // namespace QK_ISA
