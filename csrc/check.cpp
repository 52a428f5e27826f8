// The kernels beside plain loops in double, on the machine this runs on: for builds that have no Python, such as arm64's under an emulator.
// Every instruction set of this CPU, with one thread and with three; exits with 1 if anything is wrong, and prints what.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "quire_kernels.h"

namespace {

int failures = 0;
const char* instruction_set = "";
int threads = 0;

void expect(bool is_right, const char* what, int64_t a = 0, int64_t b = 0) {
    if (is_right) return;
    ++failures;
    printf("%s, %d threads: %s (%lld, %lld)\n", instruction_set, threads, what, (long long)a, (long long)b);
}

// Numbers in [-1, 1) that every type holds exactly.
struct Noise {
    uint32_t state = 1;
    float next() {
        state = state * 1664525u + 1013904223u;
        return float(int(state >> 24) - 128) / 128.0f;
    }
    std::vector<float> take(int64_t count) {
        std::vector<float> numbers;
        for (int64_t i = 0; i < count; ++i) numbers.push_back(next());
        return numbers;
    }
};

std::vector<uint16_t> to_bf16(const std::vector<float>& from) {
    std::vector<uint16_t> to;
    for (float value : from) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        to.push_back(uint16_t(bits >> 16));
    }
    return to;
}

// [m, n] of x [m, k] and weights [n, k].
std::vector<double> multiply(const std::vector<float>& x, const std::vector<float>& weights, int64_t m, int64_t n, int64_t k) {
    std::vector<double> y;
    for (int64_t row = 0; row < m; ++row)
        for (int64_t o = 0; o < n; ++o) {
            double sum = 0.0;
            for (int64_t i = 0; i < k; ++i) sum += double(x[size_t(row * k + i)]) * double(weights[size_t(o * k + i)]);
            y.push_back(sum);
        }
    return y;
}

void expect_near(const std::vector<float>& y, const std::vector<double>& expected, double tolerance, const char* what) {
    for (size_t i = 0; i < y.size(); ++i)
        if (!(std::fabs(double(y[i]) - expected[i]) <= tolerance)) return expect(false, what, int64_t(i), int64_t(y.size()));
}

// Runs `args` on all rows and on each alone: to the bit the same.
template <class Args, class Function>
std::vector<float> run_rows(qk_context* context, Args args, qk_linear_args& linear, Function function, const char* what) {
    std::vector<float> y(size_t(linear.m * linear.n), -1.0f), alone(size_t(linear.n));
    const int64_t rows = linear.m, element_bytes = linear.dtype == QK_BFLOAT16 ? 2 : 4;
    const char* x = (const char*)linear.x;
    linear.out_dtype = QK_FLOAT32;
    linear.y = y.data();
    function(context, args);
    linear.m = 1;
    linear.y = alone.data();
    for (int64_t row = 0; row < rows; ++row) {
        linear.x = x + row * linear.x_stride * element_bytes;
        function(context, args);
        expect(!memcmp(alone.data(), y.data() + row * linear.n, alone.size() * sizeof(float)), what, row, linear.k);
    }
    return y;
}

void check_linear(qk_context* context, int32_t dtype, int64_t n, int64_t k, int64_t m) {
    Noise noise;
    const std::vector<float> weights = noise.take(n * k), x = noise.take(m * k);
    const std::vector<uint16_t> half_weights = to_bf16(weights), half_x = to_bf16(x);
    const bool is_half = dtype == QK_BFLOAT16;
    std::vector<char> packed(size_t(qk_packed_bytes(n, k, dtype, 0)));
    const qk_pack_args pack = {n, k, dtype, 0, is_half ? (const void*)half_weights.data() : weights.data(), k, 0, packed.data()};
    qk_pack(context, &pack);
    qk_linear_args args = {};
    args.m = m, args.n = n, args.k = k, args.dtype = dtype, args.divisor = 1.0f, args.packed = packed.data();
    args.x = is_half ? (const void*)half_x.data() : x.data(), args.x_stride = k, args.y_stride = n;
    expect_near(run_rows(context, &args, args, qk_linear, "a row's bits of a linear layer"), multiply(x, weights, m, n, k),
                1e-5 * double(k), "a linear layer");
}

void check_quantized(qk_context* context, int32_t form, int32_t dtype, int64_t n, int64_t k, int64_t m, int64_t group_size) {
    Noise noise;
    const int64_t groups = form == QK_W8A8 ? 1 : (k + group_size - 1) / group_size, panels = (n + 63) / 64;
    std::vector<int8_t> values;
    std::vector<float> weights, scales(size_t(panels * groups * 64)), x = noise.take(m * k);
    std::vector<int32_t> corrections(size_t(panels * 64));
    for (int64_t o = 0; o < n; ++o)
        for (int64_t i = 0; i < k; ++i) {
            const int value = int(noise.next() * (form == QK_W4 ? 8 : 128));
            const int64_t group = form == QK_W8A8 ? 0 : i / group_size;
            float& scale = scales[size_t((o / 64 * groups + group) * 64 + o % 64)];
            scale = float(1 + (o + group) % 3) / 64.0f;
            values.push_back(int8_t(value));
            weights.push_back(float(value) * scale);
            corrections[size_t(o)] += 128 * value;
        }
    const std::vector<uint16_t> half_x = to_bf16(x);
    std::vector<char> packed(size_t(qk_quantized_bytes(n, k, form, 0)));
    const qk_pack_quantized_args pack = {n, k, form, 0, values.data(), k, 0, packed.data()};
    qk_pack_quantized(context, &pack);
    qk_quantized_linear_args args = {};
    qk_linear_args& linear = args.linear;
    linear.m = m, linear.n = n, linear.k = k, linear.dtype = dtype, linear.divisor = 1.0f, linear.packed = packed.data();
    linear.x = dtype == QK_BFLOAT16 ? (const void*)half_x.data() : x.data(), linear.x_stride = k, linear.y_stride = n;
    args.quantization = {form, 0, form == QK_W8A8 ? k : group_size, scales.data(), nullptr, corrections.data(), nullptr};
    const auto y = run_rows(context, &args, linear, qk_quantized_linear, "a row's bits of a quantized layer");
    // inputs of int8 are rounded to 1/127 of their row's largest, which is 1 at most; weights are 6 at most
    const double tolerance = form == QK_W8A8 ? 6.0 / 127.0 * double(k) / 4.0 : 2e-5 * double(k);
    expect_near(y, multiply(x, weights, m, n, k), tolerance, "a quantized layer");
}

void check_norm(qk_context* context, int64_t rows, int64_t dim) {
    Noise noise;
    const std::vector<float> x = noise.take(rows * dim), weight = noise.take(dim);
    std::vector<float> y(x.size());
    std::vector<double> expected;
    for (int64_t row = 0; row < rows; ++row) {
        double squares = 0.0;
        for (int64_t i = 0; i < dim; ++i) squares += std::pow(double(x[size_t(row * dim + i)]), 2);
        for (int64_t i = 0; i < dim; ++i)
            expected.push_back(double(x[size_t(row * dim + i)]) / std::sqrt(squares / double(dim) + 1e-6) * double(weight[size_t(i)]));
    }
    qk_rms_norm_args args = {};
    args.rows = rows, args.dim = dim, args.eps = 1e-6f, args.scale_in_float32 = 1, args.weight = weight.data();
    args.x = x.data(), args.x_stride = dim, args.y = y.data(), args.y_stride = dim;
    qk_rms_norm(context, &args);
    expect_near(y, expected, 1e-5, "a norm");
}

void check_layer_norm(qk_context* context, int64_t rows, int64_t groups, int64_t dim) {
    Noise noise;
    const int64_t width = groups * dim;
    const std::vector<float> x = noise.take(rows * width), weight = noise.take(width), bias = noise.take(width);
    std::vector<float> y(x.size());
    std::vector<double> expected;
    for (int64_t part = 0; part < rows * groups; ++part) {
        const float* p = x.data() + part * dim;
        const size_t own = size_t(part % groups * dim);
        double mean = 0.0, variance = 0.0;
        for (int64_t i = 0; i < dim; ++i) mean += double(p[i]) / double(dim);
        for (int64_t i = 0; i < dim; ++i) variance += std::pow(double(p[i]) - mean, 2) / double(dim);
        for (int64_t i = 0; i < dim; ++i)
            expected.push_back((double(p[i]) - mean) / std::sqrt(variance + 1e-5) * double(weight[own + size_t(i)]) + double(bias[own + size_t(i)]));
    }
    qk_layer_norm_args args = {};
    args.rows = rows, args.groups = groups, args.dim = dim, args.eps = 1e-5f, args.weight = weight.data(), args.bias = bias.data();
    args.weight_stride = dim, args.x = x.data(), args.x_stride = width, args.y = y.data(), args.y_stride = width;
    qk_layer_norm(context, &args);
    expect_near(y, expected, 1e-5, "a LayerNorm");
}

void check_activation(qk_context* context, int64_t dim) {
    Noise noise;
    const std::vector<float> x = noise.take(dim);
    std::vector<float> y(x.size());
    std::vector<double> expected;
    for (float value : x) expected.push_back(double(value) / (1.0 + std::exp(-double(value))));
    qk_activation_args args = {};
    args.rows = 1, args.dim = dim, args.activation = QK_SILU, args.x = x.data(), args.x_stride = dim, args.y = y.data(), args.y_stride = dim;
    qk_activation(context, &args);
    expect_near(y, expected, 1e-6, "an activation");
}

// One request of `length` tokens from the start: causal attention, on pages of 16.
void check_attention(qk_context* context, int64_t length, int32_t head_size) {
    Noise noise;
    const int64_t block = 16, blocks = (length + block - 1) / block + 1;
    const std::vector<float> q = noise.take(length * head_size), k = noise.take(length * head_size), v = noise.take(length * head_size);
    std::vector<float> cache(size_t(2 * blocks * block * head_size)), y(q.size());
    std::vector<int32_t> table;
    std::vector<int64_t> slots;
    for (int64_t i = 1; i < blocks; ++i) table.push_back(int32_t(i));
    for (int64_t i = 0; i < length; ++i) slots.push_back(block + i);
    qk_attention_args args = {};
    args.num_tokens = length, args.num_reqs = 1, args.num_heads = args.num_kv_heads = 1, args.head_size = head_size;
    args.block_size = int32_t(block), args.scale = 0.25f, args.query_lens = &length, args.seq_lens = &length;
    args.block_table = table.data(), args.block_table_stride = int64_t(table.size()), args.slots = slots.data();
    args.query = q.data(), args.key = k.data(), args.value = v.data(), args.y = y.data();
    args.query_stride = args.key_stride = args.value_stride = args.y_stride = head_size;
    args.key_cache = cache.data(), args.value_cache = cache.data() + blocks * block * head_size;
    qk_attention(context, &args);
    const std::vector<double> scores = multiply(q, k, length, length, head_size);
    std::vector<double> expected;
    for (int64_t row = 0; row < length; ++row) {
        std::vector<double> sum(size_t(head_size), 0.0);
        double total = 0.0;
        for (int64_t key = 0; key <= row; ++key) {
            const double weight = std::exp(0.25 * scores[size_t(row * length + key)]);
            total += weight;
            for (int32_t i = 0; i < head_size; ++i) sum[size_t(i)] += weight * double(v[size_t(key * head_size + i)]);
        }
        for (double value : sum) expected.push_back(value / total);
    }
    expect_near(y, expected, 1e-4, "attention");
}

void check_greedy(qk_context* context, int64_t rows, int64_t vocab) {
    Noise noise;
    std::vector<float> logits = noise.take(rows * vocab);
    std::vector<int64_t> found(size_t(rows), -1);
    for (int64_t row = 0; row < rows; ++row) logits[size_t(row * vocab + (row * 37) % vocab)] = 2.0f;
    qk_sample_args args = {};
    args.rows = rows, args.vocab = vocab, args.logits = logits.data(), args.stride = vocab, args.token_ids = found.data();
    qk_sample(context, &args);
    for (int64_t row = 0; row < rows; ++row) expect(found[size_t(row)] == (row * 37) % vocab, "a greedy choice", row, found[size_t(row)]);
}

void check_all(qk_context* context) {
    for (int32_t dtype : {QK_FLOAT32, QK_BFLOAT16})
        for (int64_t m : {1, 7, 40}) {
            check_linear(context, dtype, 70, 96, m);
            check_linear(context, dtype, 33, 45, m);
            for (int32_t form : {QK_W8A8, QK_W8, QK_W4})
                for (int64_t group_size : {32, 128, 288}) check_quantized(context, form, dtype, 70, 288, m, group_size);
        }
    check_norm(context, 5, 100);
    for (int64_t groups : {1, 3}) check_layer_norm(context, 5, groups, 100);
    check_activation(context, 100);
    for (int64_t length : {1, 20, 300}) check_attention(context, length, 32);
    check_greedy(context, 9, 1000);
}

}  // namespace

int main() {
    for (int32_t n = 0; const char* name = qk_instruction_set(n); ++n)
        for (int count : {1, 3}) {
            instruction_set = name;
            threads = count;
            qk_context* context = qk_create(count, name);
            check_all(context);
            qk_destroy(context);
            printf("%s, %d threads: checked\n", name, count);
        }
    return failures ? 1 : 0;
}
