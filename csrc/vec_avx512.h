// vec.h on AVX-512: one register. With AVX512-BF16, bfloat16 rounding and products of pairs are instructions.
#pragma once

#include <immintrin.h>

namespace QK_ISA {

using F16 = __m512;
using M16 = __mmask16;

QK_INLINE F16 zero() { return _mm512_setzero_ps(); }
QK_INLINE F16 set1(float x) { return _mm512_set1_ps(x); }
QK_INLINE F16 load_f32(const float* p) { return _mm512_loadu_ps(p); }
QK_INLINE void store_f32(float* p, F16 x) { _mm512_storeu_ps(p, x); }
QK_INLINE F16 load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#ifdef __AVX512BF16__
QK_INLINE void store_bf16(uint16_t* p, F16 x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
#else
QK_INLINE void store_bf16(uint16_t* p, F16 x) {  // round to nearest even; NaNs stay NaNs
    __m512i bits = _mm512_castps_si512(x);
    __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

QK_INLINE F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
QK_INLINE F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
QK_INLINE F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
QK_INLINE F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
QK_INLINE F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
QK_INLINE F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
QK_INLINE F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
QK_INLINE F16 abs(F16 a) { return _mm512_abs_ps(a); }

QK_INLINE M16 less(F16 a, F16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
// Bit i of the result is lane i.
QK_INLINE uint32_t bits(M16 mask) { return mask; }
// Lanes begin <= i < end, for any begin and end.
QK_INLINE M16 lanes(int begin, int end) {
    begin = begin < 0 ? 0 : begin > 16 ? 16 : begin;
    end = end < 0 ? 0 : end > 16 ? 16 : end;
    return M16((1u << end) - 1) & ~M16((1u << begin) - 1);
}
QK_INLINE F16 select(M16 mask, F16 yes, F16 no) { return _mm512_mask_blend_ps(mask, no, yes); }
// yes with the sign of `sign`.
QK_INLINE F16 copy_sign(F16 magnitude, F16 sign) {
    const __m512i bit = _mm512_set1_epi32(int(0x80000000u));
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xca));
}

// Writes the lanes of the mask one after another and returns how many they are; what else of out[0 .. 15] it writes is undefined.
QK_INLINE int store_selected(float* out, M16 mask, F16 x) {
    store_f32(out, _mm512_maskz_compress_ps(mask, x));
    return __builtin_popcount(mask);
}

QK_INLINE F16 round_even(F16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for integral n in [-126, 127].
QK_INLINE F16 scale_by_power(F16 a, F16 n) { return _mm512_scalef_ps(a, n); }

// In one order, whatever the instruction set: lanes 8 apart first, then 4, 2, 1.
QK_INLINE float reduce_add(F16 a) {
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
QK_INLINE float reduce_max(F16 a) { return _mm512_reduce_max_ps(a); }

// Products of weights: 64 bytes of weights are 16 outputs by one float or two bfloat16 inputs.
struct FloatDot {
    using E = float;
    static constexpr int step = 1;  // inputs per 64 bytes of weights
    static constexpr int tile_rows = 6, tile_blocks = 4;  // that one pass of linear.cpp keeps in registers
    using A = F16;
    using W = F16;
    QK_INLINE A broadcast(const float* x) { return _mm512_set1_ps(*x); }
    QK_INLINE W weights(const void* w) { return _mm512_loadu_ps(w); }
    QK_INLINE F16 dot(F16 sum, A a, W w) { return _mm512_fmadd_ps(a, w, sum); }
};

#ifdef __AVX512BF16__
struct Bf16Dot {
    using E = uint16_t;
    static constexpr int step = 2;
    static constexpr int tile_rows = 6, tile_blocks = 4;
    using A = __m512bh;
    using W = __m512bh;
    QK_INLINE A broadcast(const uint16_t* x) {
        int32_t pair;
        memcpy(&pair, x, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    QK_INLINE W weights(const void* w) { return (__m512bh)_mm512_loadu_si512(w); }
    QK_INLINE F16 dot(F16 sum, A a, W w) { return _mm512_dpbf16_ps(sum, a, w); }
};
#else
struct Bf16Dot {
    using E = uint16_t;
    static constexpr int step = 2;
    static constexpr int tile_rows = 5, tile_blocks = 4;
    struct A {
        F16 even, odd;
    };
    using W = A;
    QK_INLINE A split(__m512i pairs) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))))};
    }
    QK_INLINE A broadcast(const uint16_t* x) {
        int32_t pair;
        memcpy(&pair, x, 4);
        return split(_mm512_set1_epi32(pair));
    }
    QK_INLINE W weights(const void* w) { return split(_mm512_loadu_si512(w)); }
    QK_INLINE F16 dot(F16 sum, A a, W w) { return _mm512_fmadd_ps(a.odd, w.odd, _mm512_fmadd_ps(a.even, w.even, sum)); }
};
#endif

}  // namespace QK_ISA
