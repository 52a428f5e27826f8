// vec.h on AVX2 and FMA: two registers.
#pragma once

#include <immintrin.h>

namespace QK_ISA {

struct F16 {
    __m256 lo, hi;
};
struct M16 {
    __m256 lo, hi;
};

QK_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QK_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QK_INLINE F16 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QK_INLINE void store_f32(float* p, F16 x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
QK_INLINE __m256 widen(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
QK_INLINE F16 load_bf16(const uint16_t* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
QK_INLINE __m256i round_bf16(__m256 x) {  // to nearest even, NaNs stay NaNs; the result in the low halves
    __m256i bits = _mm256_castps_si256(x);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    return _mm256_srli_epi32(rounded, 16);
}
QK_INLINE void store_bf16(uint16_t* p, F16 x) {
    __m256i packed = _mm256_packus_epi32(round_bf16(x.lo), round_bf16(x.hi));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

QK_INLINE F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
QK_INLINE F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
QK_INLINE F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
QK_INLINE F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
QK_INLINE F16 fma(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
QK_INLINE F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
QK_INLINE F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
QK_INLINE __m256 sign_bits() { return _mm256_castsi256_ps(_mm256_set1_epi32(int(0x80000000u))); }
QK_INLINE F16 abs(F16 a) { return {_mm256_andnot_ps(sign_bits(), a.lo), _mm256_andnot_ps(sign_bits(), a.hi)}; }

QK_INLINE M16 less(F16 a, F16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
QK_INLINE uint32_t bits(M16 mask) {
    return uint32_t(_mm256_movemask_ps(mask.lo)) | uint32_t(_mm256_movemask_ps(mask.hi)) << 8;
}
QK_INLINE __m256 lanes_of_8(__m256i index, int begin, int end) {
    __m256i from = _mm256_cmpgt_epi32(index, _mm256_set1_epi32(begin - 1));
    __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), index);
    return _mm256_castsi256_ps(_mm256_and_si256(from, to));
}
QK_INLINE M16 lanes(int begin, int end) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {lanes_of_8(index, begin, end), lanes_of_8(index, begin - 8, end - 8)};
}
QK_INLINE F16 select(M16 mask, F16 yes, F16 no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, mask.lo), _mm256_blendv_ps(no.hi, yes.hi, mask.hi)};
}
QK_INLINE F16 copy_sign(F16 magnitude, F16 sign) {
    F16 a = abs(magnitude);
    return {_mm256_or_ps(a.lo, _mm256_and_ps(sign_bits(), sign.lo)),
            _mm256_or_ps(a.hi, _mm256_and_ps(sign_bits(), sign.hi))};
}

QK_INLINE int store_selected(float* out, M16 mask, F16 x) {
    float values[16];
    store_f32(values, x);
    int n = 0;
    for (uint32_t rest = bits(mask); rest; rest &= rest - 1) out[n++] = values[__builtin_ctz(rest)];
    return n;
}

QK_INLINE F16 round_even(F16 a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
QK_INLINE __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
QK_INLINE F16 scale_by_power(F16 a, F16 n) { return mul(a, {power_of_two(n.lo), power_of_two(n.hi)}); }

QK_INLINE float reduce_add(F16 a) {
    __m256 x = _mm256_add_ps(a.lo, a.hi);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
QK_INLINE float reduce_max(F16 a) {
    __m256 x = _mm256_max_ps(a.lo, a.hi);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}

struct FloatDot {
    using E = float;
    static constexpr int step = 1;
    static constexpr int tile_rows = 4, tile_blocks = 1;
    using A = __m256;
    using W = F16;
    QK_INLINE A broadcast(const float* x) { return _mm256_broadcast_ss(x); }
    QK_INLINE W weights(const void* w) { return load_f32((const float*)w); }
    QK_INLINE F16 dot(F16 sum, A a, W w) {
        return {_mm256_fmadd_ps(a, w.lo, sum.lo), _mm256_fmadd_ps(a, w.hi, sum.hi)};
    }
};

struct Bf16Dot {
    using E = uint16_t;
    static constexpr int step = 2;
    static constexpr int tile_rows = 4, tile_blocks = 1;
    struct A {
        __m256 even, odd;
    };
    struct W {
        F16 even, odd;
    };
    QK_INLINE __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
    QK_INLINE __m256 odd_of(__m256i pairs) {
        return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u))));
    }
    QK_INLINE A broadcast(const uint16_t* x) {
        int32_t pair;
        memcpy(&pair, x, 4);
        __m256i pairs = _mm256_set1_epi32(pair);
        return {even_of(pairs), odd_of(pairs)};
    }
    QK_INLINE W weights(const void* w) {
        __m256i lo = _mm256_loadu_si256((const __m256i*)w), hi = _mm256_loadu_si256((const __m256i*)w + 1);
        return {{even_of(lo), even_of(hi)}, {odd_of(lo), odd_of(hi)}};
    }
    QK_INLINE F16 dot(F16 sum, A a, W w) {
        return {_mm256_fmadd_ps(a.odd, w.odd.lo, _mm256_fmadd_ps(a.even, w.even.lo, sum.lo)),
                _mm256_fmadd_ps(a.odd, w.odd.hi, _mm256_fmadd_ps(a.even, w.even.hi, sum.hi))};
    }
};

}  // namespace QK_ISA
