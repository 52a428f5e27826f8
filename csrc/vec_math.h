// Functions of sixteen floats, within two units in the last place, the same bits for the same input everywhere.
// Polynomials are those of S. L. Moshier's Cephes library (single precision).
#pragma once

#include "quire_kernels.h"
#include "vec.h"

namespace QK_ISA {

// (e^x - 1 - x) / x^2 for |x| <= log 2 / 2.
QK_INLINE F16 exp_polynomial(F16 x) {
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, x, set1(1.3981999507e-3f));
    p = fma(p, x, set1(8.3334519073e-3f));
    p = fma(p, x, set1(4.1665795894e-2f));
    p = fma(p, x, set1(1.6666665459e-1f));
    return fma(p, x, set1(5.0000001201e-1f));
}

// Below -87.3 it stays at about 1e-38, above 88.3 at about 2e38.
QK_INLINE F16 exp(F16 x) {
    x = min(max(x, set1(-87.3365447f)), set1(88.3762626f));
    F16 n = round_even(mul(x, set1(1.44269504f)));
    x = fma(n, set1(-0.693359375f), x);  // log 2 in two parts
    x = fma(n, set1(2.12194440e-4f), x);
    F16 p = add(fma(exp_polynomial(x), mul(x, x), x), set1(1.0f));
    return scale_by_power(p, n);
}

// e^x - 1 - x for x <= 0, without losing digits near zero.
QK_INLINE F16 exp_rest(F16 x) {
    F16 small = mul(exp_polynomial(x), mul(x, x)), large = sub(sub(exp(x), set1(1.0f)), x);
    return select(less(set1(-0.34f), x), small, large);
}

// 2^x within three units in the last place, for x <= 127; below -126 it stays at about 1e-38. The polynomial is a minimax fit of
// degree 5 on [-1/2, 1/2], the first coefficient fixed.
QK_INLINE F16 exp2(F16 x) {
    x = max(x, set1(-126.0f));
    F16 n = round_even(x), r = sub(x, n);
    F16 p = set1(0.001326472731307149f);
    p = fma(p, r, set1(0.009671512991189957f));
    p = fma(p, r, set1(0.05550733581185341f));
    p = fma(p, r, set1(0.24022242426872253f));
    p = fma(p, r, set1(0.6931470036506653f));
    p = fma(p, r, set1(1.0f));
    return scale_by_power(p, n);
}

QK_INLINE F16 tanh(F16 x) {
    F16 a = abs(x), z = mul(x, x);
    F16 p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    F16 small = fma(mul(p, z), x, x);
    F16 large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(a, a)), set1(1.0f))));
    return select(less(a, set1(0.625f)), small, copy_sign(large, x));
}

// Within 1.5e-7: M. Abramowitz and I. Stegun, Handbook of Mathematical Functions, 7.1.26.
QK_INLINE F16 erf(F16 x) {
    F16 a = abs(x);
    F16 t = div(set1(1.0f), fma(a, set1(0.3275911f), set1(1.0f)));
    F16 p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    F16 y = sub(set1(1.0f), mul(mul(p, t), exp(sub(zero(), mul(a, a)))));
    return copy_sign(y, x);
}

QK_INLINE F16 silu(F16 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
QK_INLINE F16 gelu(F16 x) {
    return mul(mul(x, set1(0.5f)), add(set1(1.0f), erf(mul(x, set1(0.707106781f)))));
}
QK_INLINE F16 gelu_tanh(F16 x) {
    F16 inner = mul(mul(x, set1(0.797884561f)), fma(mul(x, x), set1(0.044715f), set1(1.0f)));
    return mul(mul(x, set1(0.5f)), add(set1(1.0f), tanh(inner)));
}
QK_INLINE F16 sigmoid(F16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
// log(1 + e^x): the larger of x and 0, and log(1 + t) = 2 artanh(t / (2 + t)) of t = e^-|x|, whose series is cut where it no longer counts.
QK_INLINE F16 softplus(F16 x) {
    F16 t = exp(sub(zero(), abs(x))), s = div(t, add(t, set1(2.0f))), z = mul(s, s), p = set1(1.0f / 15.0f);
    for (float divisor = 13.0f; divisor > 0.0f; divisor -= 2.0f) p = fma(p, z, set1(1.0f / divisor));
    return fma(add(s, s), p, max(zero(), x));
}
QK_INLINE F16 quick_gelu(F16 x) { return div(x, add(set1(1.0f), exp(mul(x, set1(-1.702f))))); }
QK_INLINE F16 relu2(F16 x) {
    F16 y = max(x, zero());
    return mul(y, y);
}

// positive * x^2 + slope * x for x > 0, else negative * (e^min(x, least) - 1 - x) + slope * x (Huang and Schlag 2024).
struct Xielu {
    float positive, negative, slope, least;
};
QK_INLINE F16 xielu(F16 x, const Xielu& a) {
    F16 t = min(x, set1(a.least));
    F16 rest = add(exp_rest(t), sub(t, x)), line = mul(x, set1(a.slope));
    F16 above = fma(mul(x, set1(a.positive)), x, line), below = fma(rest, set1(a.negative), line);
    return select(less(zero(), x), above, below);
}
QK_INLINE F16 soft_cap(F16 x, float cap) { return mul(tanh(div(x, set1(cap))), set1(cap)); }

QK_INLINE F16 activate(int kind, F16 x) {
    switch (kind) {
        case QK_RELU: return max(x, zero());
        case QK_SILU: return silu(x);
        case QK_GELU: return gelu(x);
        case QK_GELU_TANH: return gelu_tanh(x);
        case QK_RELU2: return relu2(x);
        case QK_QUICK_GELU: return quick_gelu(x);
        case QK_SIGMOID: return sigmoid(x);
        case QK_SOFTPLUS: return softplus(x);
        default: return x;
    }
}

// gpt-oss's gated unit.
QK_INLINE F16 clamped_swiglu(F16 gate, F16 up) {
    gate = min(set1(7.0f), gate);  // of a NaN and a number the second is taken
    up = max(set1(-7.0f), min(set1(7.0f), up));
    const F16 glu = div(gate, add(set1(1.0f), exp(mul(gate, set1(-1.702f)))));
    return mul(add(up, set1(1.0f)), glu);
}

// What a gated layer makes of its two halves.
QK_INLINE F16 gate(int kind, F16 first, F16 second) {
    return kind == QK_CLAMPED_SWIGLU ? clamped_swiglu(first, second) : mul(activate(kind, first), second);
}

}  // namespace QK_ISA
