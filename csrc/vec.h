// Sixteen floats at a time, on every instruction set: the one vocabulary kernels are written in.
//
// QK_ISA names the instruction set this translation unit is compiled for, and the namespace everything lives in, so that
// the same source compiled for several never meets itself at link time. No operation here is ever fused or reordered by the
// compiler (-ffp-contract=off, no -ffast-math): that is what makes a row's bits the same in every place it is computed.
#pragma once

#include <cstdint>
#include <cstring>

#define QK_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

namespace QK_ISA {

using bf16 = uint16_t;  // the upper half of a float

QK_INLINE float to_float(float x) { return x; }
QK_INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Loads and stores by element type, whole or only the first n of 16. What a partial load leaves out is zero.
QK_INLINE F16 load(const float* p) { return load_f32(p); }
QK_INLINE F16 load(const bf16* p) { return load_bf16(p); }
QK_INLINE void store(float* p, F16 x) { store_f32(p, x); }
QK_INLINE void store(bf16* p, F16 x) { store_bf16(p, x); }

template <class E>
QK_INLINE F16 load_n(const E* p, int n) {
    if (n >= 16) return load(p);
    E buffer[16] = {};
    memcpy(buffer, p, size_t(n) * sizeof(E));
    return load(buffer);
}

template <class E>
QK_INLINE void store_n(E* p, F16 x, int n) {
    if (n >= 16) return store(p, x);
    E buffer[16];
    store(buffer, x);
    memcpy(p, buffer, size_t(n) * sizeof(E));
}

// x rounded to the type E and back.
QK_INLINE F16 round_to(F16 x, const float*) { return x; }
QK_INLINE F16 round_to(F16 x, const bf16*) {
    bf16 buffer[16];
    store_bf16(buffer, x);
    return load_bf16(buffer);
}

}  // namespace QK_ISA
