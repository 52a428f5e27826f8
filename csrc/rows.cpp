// What is done to each row by itself: norms, rotation of heads, activations.
#include <cmath>

#include "context.h"
#include "kernels.h"
#include "vec_math.h"

namespace QK_ISA {
namespace {

constexpr int64_t ELEMENTS_PER_PIECE = 8192;  // less is not worth another thread

int64_t rows_per_piece(int64_t row_elements) {
    return row_elements < ELEMENTS_PER_PIECE ? ELEMENTS_PER_PIECE / row_elements : 1;
}

// 1 / sqrt(mean of squares + eps)
template <class E>
QK_INLINE float inverse_rms(const E* x, int64_t dim, float eps) {
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 64 <= dim; i += 64)
        for (int j = 0; j < 4; ++j) {
            F16 v = load(x + i + 16 * j);
            sums[j] = fma(v, v, sums[j]);
        }
    for (; i < dim; i += 16) {
        F16 v = load_n(x + i, int(dim - i < 16 ? dim - i : 16));
        sums[0] = fma(v, v, sums[0]);
    }
    const float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    return 1.0f / std::sqrt(sum / float(dim) + eps);
}

// Up to 16 elements from x, less their mean.
template <class E>
QK_INLINE F16 centred(const E* x, F16 mean, int n) {
    return select(lanes(0, n), sub(load_n(x, n), mean), zero());
}

template <class E>
QK_INLINE void layer_norm_part(const qk_layer_norm_args& a, const E* x, const E* weight, const E* bias, const E* residual, E* y) {
    const auto count = [&](int64_t i) { return int(a.dim - i < 16 ? a.dim - i : 16); };
    F16 sums[2] = {zero(), zero()};
    for (int64_t i = 0; i < a.dim; i += 16) {
        F16& sum = sums[i / 16 % 2];
        sum = add(sum, load_n(x + i, count(i)));
    }
    const F16 mean = set1(reduce_add(add(sums[0], sums[1])) / float(a.dim));
    F16 squares[2] = {zero(), zero()};
    for (int64_t i = 0; i < a.dim; i += 16) {
        F16 &sum = squares[i / 16 % 2], v = centred(x + i, mean, count(i));
        sum = fma(v, v, sum);
    }
    const float variance = reduce_add(add(squares[0], squares[1])) / float(a.dim);
    const F16 inverse = set1(1.0f / std::sqrt(variance + a.eps));
    for (int64_t i = 0; i < a.dim; i += 16) {
        const int n = count(i);
        F16 v = mul(centred(x + i, mean, n), inverse);
        if (weight) v = mul(v, load_n(weight + i, n));
        if (bias) v = add(v, load_n(bias + i, n));
        if (residual) v = add(load_n(residual + i, n), round_to(v, y));
        store_n(y + i, v, n);
    }
}

template <class E>
void layer_norm_rows(const qk_layer_norm_args& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        for (int64_t group = 0; group < a.groups; ++group) {
            const int64_t at = group * a.dim, of_weight = group * a.weight_stride;
            layer_norm_part(a, (const E*)a.x + row * a.x_stride + at, a.weight ? (const E*)a.weight + of_weight : nullptr,
                            a.bias ? (const E*)a.bias + of_weight : nullptr,
                            a.residual ? (const E*)a.residual + row * a.residual_stride + at : nullptr,
                            (E*)a.y + row * a.y_stride + at);
        }
}

struct NormScale {
    float inverse, offset;
    bool in_float32;
};

// Sixteen normalised elements times their weights, rounded where the family rounds.
template <class E>
QK_INLINE F16 scaled(F16 x, const E* weight, int n, const NormScale& s) {
    F16 w = load_n(weight, n), normed = mul(x, set1(s.inverse));
    if (s.in_float32) return mul(normed, add(set1(s.offset), w));
    return mul(w, round_to(normed, weight));
}

template <class E>
void rms_norm_rows(const qk_rms_norm_args& a, int64_t begin, int64_t end) {
    const E* weight = (const E*)a.weight;
    for (int64_t row = begin; row < end; ++row) {
        const E* x = (const E*)a.x + row * a.x_stride;
        const E* residual = a.residual ? (const E*)a.residual + row * a.residual_stride : nullptr;
        E* y = (E*)a.y + row * a.y_stride;
        const NormScale scale{inverse_rms(x, a.dim, a.eps), a.offset, a.scale_in_float32 != 0};
        for (int64_t i = 0; i < a.dim; i += 16) {
            const int n = int(a.dim - i < 16 ? a.dim - i : 16);
            F16 normed = scaled(load_n(x + i, n), weight + i, n, scale);
            if (residual) normed = add(load_n(residual + i, n), round_to(normed, y));
            store_n(y + i, normed, n);
        }
    }
}

// Up to 16 elements of a head from `at`, normalised if there is a weight.
template <class E>
QK_INLINE F16 head_elements(const E* x, const E* weight, int64_t at, int n, const NormScale& scale) {
    F16 v = load_n(x + at, n);
    return weight ? round_to(scaled(v, weight + at, n, scale), x) : v;
}

template <class E, class T>
QK_INLINE void rotate_head(const qk_rotate_args& a, E* x, const E* weight, const T* cos, const T* sin) {
    const NormScale scale{weight ? inverse_rms(x, a.head_size, a.eps) : 0.0f, a.offset, a.scale_in_float32 != 0};
    const int64_t half = a.rotary_half;
    for (int64_t i = 0; i < half; i += 16) {
        const int n = int(half - i < 16 ? half - i : 16);
        const F16 first = head_elements(x, weight, i, n, scale), second = head_elements(x, weight, half + i, n, scale);
        const F16 c = load_n(cos + i, n), s = load_n(sin + i, n);
        store_n(x + i, sub(mul(first, c), mul(second, s)), n);
        store_n(x + half + i, add(mul(second, c), mul(first, s)), n);
    }
    if (!weight) return;
    for (int64_t i = 2 * half; i < a.head_size; i += 16) {
        const int n = int(a.head_size - i < 16 ? a.head_size - i : 16);
        store_n(x + i, head_elements(x, weight, i, n, scale), n);
    }
}

template <class E, class T>
void rotate_tokens(const qk_rotate_args& a, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        const int64_t at = a.rotary_half ? a.positions[token] * a.rotary_half : 0;
        const T* cos = (const T*)a.cos + at;
        const T* sin = (const T*)a.sin + at;
        E* query = (E*)a.query + token * a.query_stride;
        E* key = (E*)a.key + token * a.key_stride;
        for (int32_t h = 0; h < a.num_heads; ++h)
            rotate_head<E, T>(a, query + int64_t(h) * a.head_size, (const E*)a.query_norm, cos, sin);
        for (int32_t h = 0; h < a.num_kv_heads; ++h)
            rotate_head<E, T>(a, key + int64_t(h) * a.head_size, (const E*)a.key_norm, cos, sin);
    }
}

template <class E, class Y>
void activate_rows(const qk_activation_args& a, int64_t begin, int64_t end) {
    const int64_t count = a.dim / a.repeats;
    for (int64_t row = begin; row < end; ++row) {
        const E* x = (const E*)a.x + row * a.x_stride;
        const E* factors = a.factors ? (const E*)a.factors + row * a.factors_stride : nullptr;
        const E* residual = a.residual ? (const E*)a.residual + row * a.residual_stride : nullptr;
        Y* y = (Y*)a.y + row * a.y_stride;
        const auto put = [&](int64_t at, F16 v, int n) {
            if (factors) v = mul(v, load_n(factors + at, n));
            if (residual) v = add(load_n(residual + at, n), v);
            store_n(y + at, v, n);
        };
        for (int64_t i = 0; i < count; i += 16) {
            const int n = int(count - i < 16 ? count - i : 16);
            const F16 v = load_n(x + i, n);
            const F16 active = a.activation == QK_XIELU ? xielu(v, {a.positive, a.negative, a.slope, a.least})
                               : a.gated ? gate(a.activation, v, load_n(x + a.dim + i, n)) : activate(a.activation, v);
            if (a.repeats == 1) {
                put(i, active, n);
                continue;
            }
            float each[16];
            store_f32(each, active);
            for (int64_t at = i * a.repeats, end_of_x = at; at < (i + n) * a.repeats; at = end_of_x) {
                const F16 one = set1(each[at / a.repeats - i]);
                end_of_x += a.repeats;
                for (; at < end_of_x; at += 16) put(at, one, int(end_of_x - at < 16 ? end_of_x - at : 16));
            }
        }
    }
}

}  // namespace

void rms_norm(qk_context& context, const qk_rms_norm_args& a) {
    auto work = [&](int64_t begin, int64_t end, int) {
        a.dtype == QK_BFLOAT16 ? rms_norm_rows<bf16>(a, begin, end) : rms_norm_rows<float>(a, begin, end);
    };
    context.parallel(a.rows, rows_per_piece(a.dim), work);
}

void layer_norm(qk_context& context, const qk_layer_norm_args& a) {
    auto work = [&](int64_t begin, int64_t end, int) {
        a.dtype == QK_BFLOAT16 ? layer_norm_rows<bf16>(a, begin, end) : layer_norm_rows<float>(a, begin, end);
    };
    context.parallel(a.rows, rows_per_piece(a.groups * a.dim), work);
}

void rotate(qk_context& context, const qk_rotate_args& a) {
    auto work = [&](int64_t begin, int64_t end, int) {
        if (a.dtype == QK_FLOAT32)
            rotate_tokens<float, float>(a, begin, end);
        else if (a.table_dtype == QK_FLOAT32)
            rotate_tokens<bf16, float>(a, begin, end);
        else
            rotate_tokens<bf16, bf16>(a, begin, end);
    };
    context.parallel(a.tokens, rows_per_piece(int64_t(a.num_heads + a.num_kv_heads) * a.head_size), work);
}

void activation(qk_context& context, const qk_activation_args& a) {
    auto work = [&](int64_t begin, int64_t end, int) {
        if (a.dtype == QK_FLOAT32)
            activate_rows<float, float>(a, begin, end);
        else
            a.out_dtype == QK_FLOAT32 ? activate_rows<bf16, float>(a, begin, end) : activate_rows<bf16, bf16>(a, begin, end);
    };
    context.parallel(a.rows, rows_per_piece(a.dim), work);
}

}  // namespace QK_ISA
