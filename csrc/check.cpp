// The kernels beside plain loops in double, on the machine this runs on: for builds that have no Python, such as arm64's under an emulator.
// Every instruction set of this CPU, with one thread and with three; exits with 1 if anything is wrong, and prints what. Every kernel and
// every form of quantized_layout.h is here; sizes, types and switches in all combinations are for the contract tests in Python.
#include <algorithm>
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

// What activations are, in double; of a gated unit `up` is the second half.
double activate(int32_t kind, double x, double up) {
    const double sigmoid = 1.0 / (1.0 + std::exp(-x));
    switch (kind) {
        case QK_RELU: return std::fmax(x, 0.0) * up;
        case QK_SILU: return x * sigmoid * up;
        case QK_GELU: return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0))) * up;
        case QK_GELU_TANH: return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))) * up;
        case QK_RELU2: return std::pow(std::fmax(x, 0.0), 2) * up;
        case QK_QUICK_GELU: return x / (1.0 + std::exp(-1.702 * x)) * up;
        case QK_SIGMOID: return sigmoid * up;
        case QK_SOFTPLUS: return std::log1p(std::exp(x)) * up;
        case QK_XIELU: return x > 0.0 ? 0.7 * x * x + 0.4 * x : (std::expm1(std::fmin(x, -1e-3)) - x) * 1.3 + 0.4 * x;
        case QK_CLAMPED_SWIGLU: {
            const double gate = std::fmin(x, 7.0);
            return gate / (1.0 + std::exp(-1.702 * gate)) * (std::fmax(-7.0, std::fmin(up, 7.0)) + 1.0);
        }
        default: return x * up;
    }
}

const int32_t ACTIVATIONS[] = {QK_IDENTITY,   QK_RELU,    QK_SILU,     QK_GELU,           QK_GELU_TANH, QK_RELU2,
                               QK_QUICK_GELU, QK_SIGMOID, QK_SOFTPLUS, QK_CLAMPED_SWIGLU, QK_XIELU};

// All that may follow a product.
void check_linear_finish(qk_context* context, int32_t kind, bool gated) {
    Noise noise;
    const int64_t m = 5, n = 40, k = 50, halves = gated ? 2 : 1;
    const std::vector<float> weights = noise.take(halves * n * k), x = noise.take(m * k), bias = noise.take(halves * n), residual = noise.take(m * n);
    std::vector<char> packed(size_t(qk_packed_bytes(n, k, QK_FLOAT32, gated)));
    std::vector<float> unpacked(weights.size()), y(residual.size());
    qk_pack_args pack = {n, k, QK_FLOAT32, gated, weights.data(), k, n * k, packed.data()};
    qk_pack(context, &pack);
    pack.weights = unpacked.data();
    qk_unpack(context, &pack);
    expect(unpacked == weights, "unpacked weights");
    qk_linear_args args = {};
    args.m = m, args.n = n, args.k = k, args.gated = gated, args.activation = kind, args.packed = packed.data();
    args.divisor = 1.0f;
    if (!gated) args.divisor = 1.5f, args.soft_cap = 3.0f, args.clip = 2.0f;
    args.bias = bias.data(), args.residual = residual.data();
    args.residual_stride = args.y_stride = n, args.x = x.data(), args.x_stride = k, args.y = y.data();
    qk_linear(context, &args);
    const std::vector<double> sums = multiply(x, weights, m, halves * n, k);
    std::vector<double> expected;
    for (int64_t row = 0; row < m; ++row)
        for (int64_t o = 0; o < n; ++o) {
            double half[2] = {0.0, 1.0};
            for (int64_t h = 0; h < halves; ++h) {
                const double sum = sums[size_t((row * halves + h) * n + o)] + double(bias[size_t(h * n + o)]);
                half[h] = gated ? sum : std::fmax(-2.0, std::fmin(2.0, 3.0 * std::tanh(sum / 1.5 / 3.0)));
            }
            expected.push_back(activate(kind, half[0], half[1]) + double(residual[size_t(row * n + o)]));
        }
    expect_near(y, expected, 1e-4, "what follows a product");
}

void check_batched_linear(qk_context* context, int64_t m) {
    Noise noise;
    const int64_t heads = 3, n = 40, k = 50, tail_size = 5;
    std::vector<char> packed;
    std::vector<float> x = noise.take(m * heads * k), tail = noise.take(m * heads * tail_size), y(size_t(m * heads * (n + tail_size)));
    std::vector<double> expected(y.size());
    for (int64_t head = 0; head < heads; ++head) {
        const std::vector<float> weights = noise.take(n * k);
        std::vector<char> own(size_t(qk_packed_bytes(n, k, QK_FLOAT32, 0)));
        const qk_pack_args pack = {n, k, QK_FLOAT32, 0, weights.data(), k, 0, own.data()};
        qk_pack(context, &pack);
        packed.insert(packed.end(), own.begin(), own.end());
        for (int64_t row = 0; row < m; ++row) {
            const auto at = x.begin() + (row * heads + head) * k, end = tail.begin() + (row * heads + head) * tail_size;
            std::vector<double> answer = multiply({at, at + k}, weights, 1, n, k);
            answer.insert(answer.end(), end, end + tail_size);
            std::copy(answer.begin(), answer.end(), expected.begin() + (row * heads + head) * (n + tail_size));
        }
    }
    qk_batched_linear_args args = {};
    args.m = m, args.heads = heads, args.n = n, args.k = k, args.tail_size = tail_size, args.packed = packed.data();
    args.x = x.data(), args.x_stride = heads * k, args.x_head_stride = k;
    args.tail = tail.data(), args.tail_stride = heads * tail_size, args.tail_head_stride = tail_size, args.y = y.data();
    qk_batched_linear(context, &args);
    expect_near(y, expected, 1e-4, "a linear layer for each head");
}

// Random values of a quantized form, as they are packed and as numbers.
struct Quantized {
    const int64_t n, k, groups, panels;
    std::vector<uint8_t> values, exponents;
    std::vector<float> weights, scales, zeros;
    std::vector<int32_t> corrections;
    std::vector<char> packed;
    qk_quantization quantization;

    Quantized(qk_context* context, Noise& noise, int32_t form, int64_t outputs, int64_t inputs, int64_t group_size, bool has_zeros, bool gated)
        : n(outputs), k(inputs), groups(form == QK_W8A8 ? 1 : (k + group_size - 1) / group_size), panels((blocks_of(outputs, gated) + 3) / 4) {
        values.resize(size_t(n * k)), weights.resize(size_t(n * k)), corrections.resize(size_t(panels * 64));
        scales.resize(size_t(panels * groups * 64)), zeros.resize(scales.size()), exponents.resize(size_t(panels * ((k + 31) / 32) * 64));
        for (int64_t o = 0; o < n; ++o) {
            const int64_t place = place_of(o, gated);
            for (int64_t i = 0; i < k; ++i) {
                const int64_t group = form == QK_W8A8 ? 0 : i / group_size, at = (place / 64 * groups + group) * 64 + place % 64;
                const int64_t of_exponent = (place / 64 * (k / 32) + i / 32) * 64 + place % 64;
                scales[size_t(at)] = float(1 + (o + group) % 3) / 64.0f;
                zeros[size_t(at)] = has_zeros ? float((o + group) % 5 - 2) : 0.0f;
                exponents[size_t(of_exponent)] = uint8_t(122 + (o + i / 32) % 3);
                put(form, o, i, int(noise.next() * 128.0f), double(zeros[size_t(at)]), double(scales[size_t(at)]),
                    std::exp2(double(exponents[size_t(of_exponent)]) - 127.0));
                if (form == QK_W8A8) corrections[size_t(place)] += 128 * int8_t(values[size_t(o * k + i)]);
            }
        }
        packed.resize(size_t(qk_quantized_bytes(gated ? n / 2 : n, k, form, gated)));
        const int64_t stride = form == QK_MXFP4 ? k / 2 : k;
        const qk_pack_quantized_args pack = {gated ? n / 2 : n, k, form, gated, values.data(), stride, n / 2 * stride, packed.data()};
        qk_pack_quantized(context, &pack);
        const bool is_mxfp4 = form == QK_MXFP4;
        quantization = {form, 0, form == QK_W8A8 ? k : group_size, is_mxfp4 ? nullptr : scales.data(), has_zeros ? zeros.data() : nullptr,
                        corrections.data(), is_mxfp4 ? exponents.data() : nullptr};
    }

  private:
    static int64_t blocks_of(int64_t n, bool gated) { return gated ? (n / 2 + 15) / 16 * 2 : (n + 15) / 16; }
    // Where an output stands among those of the packed values: halves take turns, block by block.
    int64_t place_of(int64_t o, bool gated) const {
        const int64_t within = gated ? o % (n / 2) : o;
        return gated ? (within / 16 * 2 + o / (n / 2)) * 16 + within % 16 : o;
    }
    void put(int32_t form, int64_t o, int64_t i, int value, double zero, double scale, double power) {
        const double e2m1[] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
        double number = 0.0;
        if (form == QK_MXFP4) {
            const int nibble = value & 15;
            values[size_t(o * k / 2 + i / 2)] |= uint8_t(nibble << i % 2 * 4);
            number = (nibble & 8 ? -1.0 : 1.0) * e2m1[nibble & 7] * power;
        } else if (form == QK_E4M3) {
            const int exponent = value >> 3 & 7, mantissa = value & 7;  // magnitudes below 2: like weights
            values[size_t(o * k + i)] = uint8_t(value & 0xbf);
            number = (value & 0x80 ? -1.0 : 1.0) * std::ldexp(exponent ? 8 + mantissa : mantissa, (exponent ? exponent : 1) - 10) * scale;
        } else {
            if (form == QK_W4) value = int(value / 16);
            values[size_t(o * k + i)] = uint8_t(int8_t(value));
            number = (double(value) - zero) * scale;
        }
        weights[size_t(o * k + i)] = float(number);
    }
};

void check_quantized(qk_context* context, int32_t form, int32_t dtype, int64_t n, int64_t k, int64_t m, int64_t group_size) {
    Noise noise;
    const bool has_zeros = group_size == 128 && (form == QK_W8 || form == QK_W4);
    const Quantized matrix(context, noise, form, n, k, group_size, has_zeros, false);
    const std::vector<float> x = noise.take(m * k);
    const std::vector<uint16_t> half_x = to_bf16(x);
    qk_quantized_linear_args args = {};
    qk_linear_args& linear = args.linear;
    linear.m = m, linear.n = n, linear.k = k, linear.dtype = dtype, linear.divisor = 1.0f, linear.packed = matrix.packed.data();
    linear.x = dtype == QK_BFLOAT16 ? (const void*)half_x.data() : x.data(), linear.x_stride = k, linear.y_stride = n;
    args.quantization = matrix.quantization;
    const auto y = run_rows(context, &args, linear, qk_quantized_linear, "a row's bits of a quantized layer");
    // inputs of int8 are rounded to 1/127 of their row's largest, which is 1 at most; weights are 6 at most
    const double tolerance = form == QK_W8A8 ? 6.0 / 127.0 * double(k) / 4.0 : 2e-5 * double(k);
    expect_near(y, multiply(x, matrix.weights, m, n, k), tolerance, "a quantized layer");
}

// An adapter of two parts of a layer of 70 outputs.
struct Adapter {
    std::vector<float> a[2], b[2];
    std::vector<char> memory;
    qk_low_rank low_rank;

    Adapter(Noise& noise, int32_t dtype, int64_t k, int64_t rank, int64_t other) {
        const int64_t sizes[] = {45, 25}, ranks[] = {rank, other};
        const float scales[] = {0.5f, 0.25f};
        std::vector<uint16_t> halves[4];
        const void *as[2], *bs[2];
        for (int part = 0; part < 2; ++part) {
            a[part] = noise.take(ranks[part] * k), b[part] = noise.take(sizes[part] * ranks[part]);
            halves[part] = to_bf16(a[part]), halves[2 + part] = to_bf16(b[part]);
            as[part] = dtype == QK_BFLOAT16 ? (const void*)halves[part].data() : a[part].data();
            bs[part] = dtype == QK_BFLOAT16 ? (const void*)halves[2 + part].data() : b[part].data();
        }
        qk_pack_low_rank_args args = {70, k, dtype, 0, 2, sizes, ranks, scales, as, bs, nullptr, nullptr};
        memory.resize(size_t(qk_low_rank_bytes(&args)) + 64);
        args.packed = (void*)((uintptr_t(memory.data()) + 63) / 64 * 64);
        qk_pack_low_rank(&args, &low_rank);
    }

    void add_to(double* sums, const float* x, int64_t k) const {
        for (int64_t o = 0; o < 70; ++o) {
            const int part = o >= 45;
            const int64_t rank = int64_t(a[part].size()) / k;
            for (int64_t j = 0; j < rank; ++j) {
                double h = 0.0;
                for (int64_t i = 0; i < k; ++i) h += double(x[i]) * double(a[part][size_t(j * k + i)]);
                sums[o] += (part ? 0.25 : 0.5) * h * double(b[part][size_t((o - part * 45) * rank + j)]);
            }
        }
    }
};

// Rows of two adapters, of one that does not change the layer, and of none, on plain and on quantized weights.
void check_adapters(qk_context* context, int32_t dtype, int64_t k, int64_t rows) {
    Noise noise;
    const int64_t m = 4 * rows, n = 70;
    const bool is_half = dtype == QK_BFLOAT16;
    const std::vector<float> x = noise.take(m * k), weights = noise.take(n * k);
    const std::vector<uint16_t> half_x = to_bf16(x), half_weights = to_bf16(weights);
    std::vector<char> packed(size_t(qk_packed_bytes(n, k, dtype, 0)));
    const qk_pack_args pack = {n, k, dtype, 0, is_half ? (const void*)half_weights.data() : weights.data(), k, 0, packed.data()};
    qk_pack(context, &pack);
    const Quantized quantized(context, noise, QK_W8A8, n, k, k, false, false);
    const Adapter first(noise, dtype, k, 5, 34), second(noise, dtype, k, 16, 0);
    const qk_low_rank* by_slot[] = {&first.low_rank, nullptr, &second.low_rank};
    const int64_t starts[] = {0, rows, 2 * rows, 3 * rows};
    const int32_t slots[] = {0, 1, 2};
    qk_adapter_batch batch = {3, starts, slots};
    const qk_adapter_site site = {&batch, by_slot};
    qk_quantized_linear_args args = {};
    qk_linear_args& linear = args.linear;
    linear.n = n, linear.k = k, linear.dtype = dtype, linear.out_dtype = QK_FLOAT32, linear.divisor = 1.0f, linear.x_stride = k, linear.y_stride = n;
    args.quantization = quantized.quantization;
    for (bool is_quantized : {false, true}) {
        linear.packed = is_quantized ? quantized.packed.data() : packed.data();
        const auto run = [&](const void* from, int64_t count, const qk_adapter_site* adapters) {
            std::vector<float> y(size_t(count * n));
            linear.m = count, linear.x = from, linear.y = y.data(), linear.adapters = adapters;
            is_quantized ? qk_quantized_linear(context, &args) : qk_linear(context, &linear);
            return y;
        };
        const void* inputs = is_half ? (const void*)half_x.data() : x.data();
        batch = {3, starts, slots};
        const std::vector<float> y = run(inputs, m, &site), base = run(inputs, m, nullptr);
        std::vector<double> expected(base.begin(), base.end());
        for (int64_t row = 0; row < m; ++row) {
            if (row < rows) first.add_to(&expected[size_t(row * n)], &x[size_t(row * k)], k);
            if (row >= 2 * rows && row < 3 * rows) second.add_to(&expected[size_t(row * n)], &x[size_t(row * k)], k);
            const int64_t one[] = {0, 1};
            const int32_t slot[] = {row / rows < 3 ? int32_t(row / rows) : -1};
            batch = {1, one, slot};
            const std::vector<float> alone = run((const char*)inputs + row * k * (is_half ? 2 : 4), 1, &site);
            expect(!memcmp(alone.data(), &y[size_t(row * n)], alone.size() * sizeof(float)), "a row's bits with an adapter", row, k);
            const bool has_none = row / rows % 2;
            if (has_none) expect(!memcmp(&base[size_t(row * n)], &y[size_t(row * n)], alone.size() * sizeof(float)), "a row's bits without adapter", row, k);
        }
        expect_near(y, expected, is_half ? 0.5 : 1e-3, "an adapter");
    }
}

// A looked-up row and what an adapter adds to it.
void check_adapter_of_a_table(qk_context* context, int32_t dtype) {
    Noise noise;
    const int64_t vocab = 50, dim = 70, ids[] = {49, 3, 3};
    const bool is_half = dtype == QK_BFLOAT16;
    const std::vector<float> table = noise.take(vocab * dim);
    const std::vector<uint16_t> half_table = to_bf16(table);
    std::vector<char> y(size_t(3 * dim * 4), 0), base(y);
    const Adapter adapter(noise, dtype, vocab, 9, 4);
    const qk_low_rank* by_slot[] = {&adapter.low_rank};
    const int64_t starts[] = {0, 2};
    const int32_t slots[] = {0};
    const qk_adapter_batch batch = {1, starts, slots};
    const qk_adapter_site site = {&batch, by_slot};
    qk_gather_args args = {3, dim, dtype, 0, is_half ? (const void*)half_table.data() : table.data(), ids, y.data(), &site};
    qk_gather(context, &args);
    for (int64_t row = 0; row < 3; ++row) {
        std::vector<float> one(size_t(vocab), 0.0f);
        one[size_t(ids[row])] = 1.0f;
        std::vector<double> expected(&table[size_t(ids[row] * dim)], &table[size_t(ids[row] * dim)] + dim);
        if (row < 2) adapter.add_to(expected.data(), one.data(), vocab);
        for (int64_t i = 0; i < dim; ++i) {
            float value;
            uint32_t bits = 0;
            is_half ? (void)memcpy((char*)&bits + 2, y.data() + (row * dim + i) * 2, 2) : (void)memcpy(&bits, y.data() + (row * dim + i) * 4, 4);
            memcpy(&value, &bits, 4);
            expect(std::fabs(double(value) - expected[size_t(i)]) < (is_half ? 0.05 : 1e-5), "an adapter of a table", row, i);
        }
    }
}

void check_norm(qk_context* context, int64_t rows, int64_t dim, int32_t in_float32) {
    Noise noise;
    const std::vector<float> x = noise.take(rows * dim), weight = noise.take(dim), residual = noise.take(rows * dim);
    std::vector<float> y(x.size());
    std::vector<double> expected;
    const float offset = in_float32 ? 1.0f : 0.0f;
    for (int64_t row = 0; row < rows; ++row) {
        double squares = 0.0;
        for (int64_t i = 0; i < dim; ++i) squares += std::pow(double(x[size_t(row * dim + i)]), 2);
        for (int64_t i = 0; i < dim; ++i) {
            const size_t at = size_t(row * dim + i);
            expected.push_back(double(x[at]) / std::sqrt(squares / double(dim) + 1e-6) * double(offset + weight[size_t(i)]) + double(residual[at]));
        }
    }
    qk_rms_norm_args args = {};
    args.rows = rows, args.dim = dim, args.eps = 1e-6f, args.scale_in_float32 = in_float32, args.offset = offset, args.weight = weight.data();
    args.residual = residual.data(), args.residual_stride = args.x_stride = args.y_stride = dim, args.x = x.data(), args.y = y.data();
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

void check_activation(qk_context* context, int32_t kind, bool gated, int64_t repeats) {
    Noise noise;
    const int64_t rows = 3, count = 37, dim = count * repeats;
    std::vector<float> x = noise.take(rows * count * (gated ? 2 : 1));
    for (float& value : x) value *= 9.0f;
    const std::vector<float> factors = noise.take(rows * dim), residual = noise.take(rows * dim);
    std::vector<float> y(factors.size());
    std::vector<double> expected;
    for (int64_t i = 0; i < rows * dim; ++i) {
        const int64_t row = i / dim, at = row * count * (gated ? 2 : 1) + i % dim / repeats;
        const double up = gated ? double(x[size_t(at + count)]) : 1.0;
        expected.push_back(activate(kind, double(x[size_t(at)]), up) * double(factors[size_t(i)]) + double(residual[size_t(i)]));
    }
    qk_activation_args args = {};
    args.rows = rows, args.dim = dim, args.activation = kind, args.gated = gated, args.repeats = repeats, args.x = x.data();
    args.positive = 0.7f, args.negative = 1.3f, args.slope = 0.4f, args.least = -1e-3f, args.x_stride = count * (gated ? 2 : 1);
    args.factors = factors.data(), args.residual = residual.data(), args.y = y.data();
    args.factors_stride = args.residual_stride = args.y_stride = dim;
    qk_activation(context, &args);
    expect_near(y, expected, 2e-4, "an activation");
}

void check_rotate(qk_context* context, bool is_normed) {
    Noise noise;
    const int64_t tokens = 4, heads = 3, size = 40, half = 12, width = heads * size;
    std::vector<float> query = noise.take(tokens * width), key = noise.take(tokens * size);
    const std::vector<float> norm = noise.take(size), cos = noise.take(9 * half), sin = noise.take(9 * half);
    const int64_t positions[] = {8, 0, 3, 3};
    std::vector<double> expected;
    for (int64_t at = 0; at < tokens * heads; ++at) {
        double x[40], squares = 0.0;
        for (int64_t i = 0; i < size; ++i) squares += std::pow(x[i] = double(query[size_t(at * size + i)]), 2);
        for (int64_t i = 0; is_normed && i < size; ++i) x[i] *= (1.0 + double(norm[size_t(i)])) / std::sqrt(squares / double(size) + 1e-6);
        for (int64_t i = 0; i < half; ++i) {
            const size_t angle = size_t(positions[at / heads] * half + i);
            const double a = x[i], b = x[half + i], c = double(cos[angle]), s = double(sin[angle]);
            x[i] = a * c - b * s, x[half + i] = b * c + a * s;
        }
        expected.insert(expected.end(), x, x + size);
    }
    qk_rotate_args args = {};
    args.tokens = tokens, args.num_heads = int32_t(heads), args.num_kv_heads = 1, args.head_size = int32_t(size), args.rotary_half = int32_t(half);
    args.scale_in_float32 = 1, args.eps = 1e-6f, args.offset = 1.0f;
    if (is_normed) args.query_norm = args.key_norm = norm.data();
    args.positions = positions, args.cos = cos.data(), args.sin = sin.data();
    args.query = query.data(), args.query_stride = width, args.key = key.data(), args.key_stride = size;
    qk_rotate(context, &args);
    expect_near(query, expected, 1e-5, "a rotation");
}

void check_gather(qk_context* context) {
    Noise noise;
    const int64_t dim = 45, ids[] = {19, 0, 7};
    const std::vector<float> table = noise.take(20 * dim);
    std::vector<char> packed(size_t(qk_packed_bytes(20, dim, QK_FLOAT32, 0)));
    const qk_pack_args pack = {20, dim, QK_FLOAT32, 0, table.data(), dim, 0, packed.data()};
    qk_pack(context, &pack);
    for (int32_t is_packed : {0, 1}) {
        std::vector<float> y(size_t(3 * dim));
        const qk_gather_args args = {3, dim, QK_FLOAT32, is_packed, is_packed ? (const void*)packed.data() : table.data(), ids, y.data(), nullptr};
        qk_gather(context, &args);
        for (int64_t row = 0; row < 3; ++row)
            expect(std::equal(y.begin() + row * dim, y.begin() + (row + 1) * dim, table.begin() + ids[row] * dim), "a row of a table", row, is_packed);
    }
}

// The best of `count` numbers that are not taken, the first of equal ones.
int64_t best_of(const std::vector<double>& numbers, const std::vector<bool>& taken) {
    int64_t best = -1;
    for (size_t i = 0; i < numbers.size(); ++i)
        if (!taken[i] && (best < 0 || numbers[i] > numbers[size_t(best)])) best = int64_t(i);
    return best;
}

void check_route(qk_context* context, int32_t score, int32_t groups, bool group_by_two) {
    Noise noise;
    const int64_t experts = 24, chosen = 3, tokens = 5, size = experts / groups;
    const std::vector<float> logits = noise.take(tokens * experts), bias = noise.take(experts), scale = noise.take(experts);
    std::vector<int64_t> ids(size_t(tokens * chosen)), right;
    std::vector<float> weights(ids.size());
    std::vector<double> expected;
    const bool by_turns = score == QK_SCORE_SPARSEMIXER;
    for (int64_t token = 0; token < tokens; ++token) {
        const float* own = logits.data() + token * experts;
        std::vector<double> scores(size_t(experts), 0.0), sums, given;
        std::vector<bool> taken(size_t(experts), false);
        double total = 0.0, sum = 0.0;
        for (int64_t i = 0; i < experts; ++i) total += std::exp(double(own[i]));
        for (int64_t i = 0; i < experts; ++i) {
            scores[size_t(i)] = score == QK_SCORE_SIGMOID ? 1.0 / (1.0 + std::exp(-double(own[i]))) : std::exp(double(own[i])) / total;
            sums.push_back(by_turns ? double(own[i]) : scores[size_t(i)] + double(bias[size_t(i)]));
        }
        std::vector<double> of_groups;
        for (int32_t g = 0; groups > 1 && g < groups; ++g) {
            std::vector<double> sorted(sums.begin() + g * size, sums.begin() + (g + 1) * size);
            std::sort(sorted.rbegin(), sorted.rend());
            of_groups.push_back(sorted[0] + (group_by_two ? sorted[1] : 0.0));
        }
        std::vector<bool> kept(of_groups.size(), false);
        for (int j = 0; groups > 1 && j < 2; ++j) kept[size_t(best_of(of_groups, kept))] = true;
        for (int64_t i = 0; groups > 1 && i < experts; ++i) taken[size_t(i)] = !kept[size_t(i / size)];
        for (int64_t j = 0; j < chosen; ++j) {
            const int64_t id = best_of(sums, taken);
            double weight = scores[size_t(id)];
            if (by_turns) {  // a softmax over those near the best
                double near = 0.0;
                for (int64_t i = 0; i < experts; ++i)
                    if (!taken[size_t(i)] && (sums[size_t(id)] - sums[size_t(i)]) / std::fmax(std::fabs(sums[size_t(i)]), sums[size_t(id)]) <= 0.3)
                        near += std::exp(sums[size_t(i)] - sums[size_t(id)]);
                weight = 1.0 / near;
            }
            taken[size_t(id)] = true;
            right.push_back(id), given.push_back(weight), sum += weight;
        }
        for (int64_t j = 0; j < chosen; ++j)
            expected.push_back(given[size_t(j)] / (sum + 1e-3) * 2.5 * double(scale[size_t(right[right.size() - size_t(chosen - j)])]));
    }
    qk_route_args args = {};
    args.tokens = tokens, args.num_experts = int32_t(experts), args.chosen = int32_t(chosen), args.score = score, args.normalize = 1;
    args.groups = groups, args.kept_groups = groups > 1 ? 2 : 1, args.group_by_two = group_by_two, args.norm_eps = 1e-3f, args.factor = 2.5f;
    args.threshold = 0.3f, args.choice_bias = by_turns ? nullptr : bias.data(), args.expert_scale = scale.data();
    args.logits = logits.data(), args.ids = ids.data(), args.weights = weights.data();
    qk_route(context, &args);
    expect(ids == right, "the choice of experts", score, groups);
    expect_near(weights, expected, 1e-5, "the weights of experts");
}

// `form` below 0: plain weights.
void check_experts(qk_context* context, int32_t form, int32_t dtype, int64_t tokens, bool scale_inputs) {
    Noise noise;
    const int64_t experts = 4, chosen = 2, hidden = 96, size = 64;
    const std::vector<float> x = noise.take(tokens * hidden), shared = noise.take(tokens * hidden), share = noise.take(tokens * chosen);
    const std::vector<float> first_bias = noise.take(experts * 2 * size), bias = noise.take(experts * hidden);
    const std::vector<uint16_t> half_x = to_bf16(x), half_shared = to_bf16(shared);
    const bool is_half = dtype == QK_BFLOAT16;
    std::vector<std::vector<float>> weights[2];
    std::vector<char> packed[2];
    std::vector<float> scales[2];
    std::vector<uint8_t> exponents[2];
    qk_quantization quantizations[2] = {};
    for (int which : {0, 1})  // gates and what they are multiplied with; down
        for (int64_t e = 0; e < experts; ++e) {
            const int64_t n = which ? hidden : 2 * size, k = which ? size : hidden;
            if (form >= 0) {
                const Quantized matrix(context, noise, form, n, k, 32, false, !which);
                weights[which].push_back(matrix.weights);
                packed[which].insert(packed[which].end(), matrix.packed.begin(), matrix.packed.end());
                scales[which].insert(scales[which].end(), matrix.scales.begin(), matrix.scales.end());
                exponents[which].insert(exponents[which].end(), matrix.exponents.begin(), matrix.exponents.end());
                quantizations[which] = matrix.quantization;
                continue;
            }
            weights[which].push_back(noise.take(n * k));
            const std::vector<uint16_t> halves = to_bf16(weights[which].back());
            std::vector<char> own(size_t(qk_packed_bytes(which ? n : size, k, dtype, !which)));
            const qk_pack_args pack = {which ? n : size, k, dtype, !which, is_half ? (const void*)halves.data() : weights[which].back().data(), k, size * k, own.data()};
            qk_pack(context, &pack);
            packed[which].insert(packed[which].end(), own.begin(), own.end());
        }
    for (int which : {0, 1}) {
        quantizations[which].scales = form == QK_MXFP4 ? nullptr : scales[which].data();
        quantizations[which].exponents = form == QK_MXFP4 ? exponents[which].data() : nullptr;
    }
    std::vector<int64_t> ids;
    std::vector<double> expected;
    for (int64_t token = 0; token < tokens; ++token) {
        std::vector<double> sum(shared.begin() + token * hidden, shared.begin() + (token + 1) * hidden);
        for (int64_t j = 0; j < chosen; ++j) {
            const int64_t id = (token * 5 + j * 3) % experts;
            ids.push_back(id);
            const double weight = double(share[ids.size() - 1]);
            std::vector<float> own(x.begin() + token * hidden, x.begin() + (token + 1) * hidden), between;
            for (float& value : own) value *= scale_inputs ? float(weight) : 1.0f;
            const std::vector<double> both = multiply(own, weights[0][size_t(id)], 1, 2 * size, hidden);
            for (int64_t i = 0; i < size; ++i) {
                const float* biases = first_bias.data() + id * 2 * size + i;
                between.push_back(float(activate(QK_CLAMPED_SWIGLU, both[size_t(i)] + double(biases[0]), both[size_t(size + i)] + double(biases[size]))));
            }
            const std::vector<double> answer = multiply(between, weights[1][size_t(id)], 1, hidden, size);
            for (int64_t i = 0; i < hidden; ++i)
                sum[size_t(i)] += (scale_inputs ? 1.0 : weight) * (answer[size_t(i)] + double(bias[size_t(id * hidden + i)]));
        }
        expected.insert(expected.end(), sum.begin(), sum.end());
    }
    std::vector<char> y(size_t(tokens * hidden * (is_half ? 2 : 4))), alone(y.size());
    qk_experts_args args = {};
    args.tokens = tokens, args.hidden = hidden, args.expert_size = size, args.dtype = dtype, args.num_experts = int32_t(experts);
    args.chosen = int32_t(chosen), args.activation = QK_CLAMPED_SWIGLU, args.scale_inputs = scale_inputs;
    args.steps = QK_EXPERTS_BETWEEN | QK_EXPERTS_ANSWERS | QK_EXPERTS_SUMS, args.inner = size, args.outputs = hidden;
    args.own_experts = args.num_experts;
    args.gate_up = packed[0].data(), args.down = packed[1].data();
    if (form >= 0) args.gate_up_quantization = &quantizations[0], args.down_quantization = &quantizations[1];
    args.gate_up_bias = first_bias.data(), args.down_bias = bias.data(), args.x_stride = args.shared_stride = args.y_stride = hidden;
    const auto run = [&](int64_t from, int64_t count, std::vector<char>& to) {
        args.tokens = count, args.ids = ids.data() + from * chosen, args.weights = share.data() + from * chosen;
        args.x = is_half ? (const void*)(half_x.data() + from * hidden) : x.data() + from * hidden;
        args.shared = is_half ? (const void*)(half_shared.data() + from * hidden) : shared.data() + from * hidden;
        args.y = to.data() + from * hidden * (is_half ? 2 : 4);
        qk_experts(context, &args);
    };
    run(0, tokens, y);
    for (int64_t token = 0; token < tokens; ++token) run(token, 1, alone);
    expect(y == alone, "a row's bits of experts", form, tokens);
    if (!scale_inputs) {  // this engine's tokens come after three of another, which are the first ones
        const int64_t first = 3 < tokens ? 3 : tokens, item = is_half ? 2 : 4;
        alignas(64) char words[128] = {};
        const qk_barrier_args barrier = {0, 1, 0, 1000, words};
        const qk_pool_step step = {first + tokens, first, &barrier};
        std::vector<char> inputs(size_t((first + tokens) * hidden * item));
        std::vector<int64_t> choices(ids.begin(), ids.begin() + first * chosen);
        choices.resize(size_t((first + tokens) * chosen));
        std::vector<float> answers(size_t((first + tokens) * chosen * hidden));
        memcpy(inputs.data(), is_half ? (const void*)half_x.data() : x.data(), size_t(first * hidden * item));
        const qk_experts_pool pool = {&step, inputs.data(), choices.data(), answers.data()};
        args.pool = &pool;
        std::vector<char> pooled(y.size());
        run(0, tokens, pooled);
        expect(y == pooled, "bits of experts of several engines", form, tokens);
    }
    std::vector<float> numbers(expected.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
        const uint32_t bits = is_half ? uint32_t(((uint16_t*)y.data())[i]) << 16 : ((uint32_t*)y.data())[i];
        memcpy(&numbers[i], &bits, 4);
    }
    double largest = 1.0;
    for (double value : expected) largest = std::fmax(largest, std::fabs(value));
    expect_near(numbers, expected, largest * (is_half ? 2e-2 : 1e-4), "experts");
}

// Switches of attention.
struct Attention {
    int32_t window = 0, ahead = 0, head_size = 32, latent = 0;
    int64_t chunk = 0;
    float soft_cap = 0.0f, growth = 0.0f;
    bool sinks = false, slopes = false;
    int32_t dtype = QK_FLOAT32;
};

// One request of `length` tokens, two heads of queries for each of keys, on pages of 16: at once, and the last token alone.
void check_attention(qk_context* context, int64_t length, const Attention& is) {
    Noise noise;
    const int64_t block = 16, blocks = (length + block - 1) / block + 1, size = is.head_size, heads = 4, kv_heads = is.latent ? 1 : 2;
    const int64_t value_size = is.latent ? is.latent : size, bytes = is.dtype == QK_BFLOAT16 ? 2 : 4;
    const std::vector<float> q = noise.take(length * heads * size), k = noise.take(length * kv_heads * size), v = noise.take(length * kv_heads * size);
    const std::vector<uint16_t> half_q = to_bf16(q), half_k = to_bf16(k), half_v = to_bf16(v);
    std::vector<char> cache(size_t(2 * blocks * block * kv_heads * size * bytes)), y(size_t(length * heads * value_size * bytes)), last(size_t(heads * value_size * bytes));
    std::vector<int32_t> table;
    std::vector<int64_t> slots;
    for (int64_t i = 1; i < blocks; ++i) table.push_back(int32_t(i));
    for (int64_t i = 0; i < length; ++i) slots.push_back(block + i);
    const std::vector<float> sinks = noise.take(heads), slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    const auto data = [&](const std::vector<float>& wide, const std::vector<uint16_t>& half) {
        return is.dtype == QK_BFLOAT16 ? (const char*)half.data() : (const char*)wide.data();
    };
    qk_attention_args args = {};
    args.num_tokens = length, args.num_reqs = 1, args.dtype = is.dtype, args.num_heads = int32_t(heads), args.num_kv_heads = int32_t(kv_heads);
    args.head_size = int32_t(size), args.block_size = int32_t(block), args.scale = 0.25f, args.query_lens = &length, args.seq_lens = &length;
    args.window = is.window, args.ahead = is.ahead, args.soft_cap = is.soft_cap, args.chunk = is.chunk, args.latent_size = is.latent;
    args.growth = is.growth, args.growth_length = 50, args.growth_offset = 1;
    args.sinks = is.sinks ? sinks.data() : nullptr, args.slopes = is.slopes ? slopes.data() : nullptr;
    args.block_table = table.data(), args.block_table_stride = int64_t(table.size()), args.slots = slots.data();
    args.query = data(q, half_q), args.key = data(k, half_k), args.value = data(v, half_v), args.y = y.data();
    args.query_stride = heads * size, args.key_stride = args.value_stride = kv_heads * size, args.y_stride = heads * value_size;
    args.key_cache = cache.data(), args.value_cache = cache.data() + blocks * block * kv_heads * size * bytes;
    qk_attention(context, &args);
    std::vector<double> expected;
    for (int64_t row = 0; row < length; ++row)
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t kv = head / (heads / kv_heads);
            std::vector<double> sum(size_t(value_size), 0.0);
            double total = is.sinks ? std::exp(double(sinks[size_t(head)])) : 0.0;
            const double scale = 0.25 * (1.0 + double(is.growth) * std::log(1.0 + std::floor(double(row + 1) / 50.0)));
            for (int64_t key = 0; key < length; ++key) {
                const bool is_late = is.ahead >= 0 && key > row + is.ahead;
                if (is_late || (is.window && key <= row - is.window) || (is.chunk && key < row / is.chunk * is.chunk)) continue;
                double score = 0.0;
                for (int64_t i = 0; i < size; ++i) score += double(q[size_t((row * heads + head) * size + i)]) * double(k[size_t((key * kv_heads + kv) * size + i)]);
                score *= scale;
                if (is.soft_cap != 0.0f) score = double(is.soft_cap) * std::tanh(score / double(is.soft_cap));
                if (is.slopes) score += double(slopes[size_t(head)]) * double(key - row);
                const double weight = std::exp(score);
                total += weight;
                const std::vector<float>& from = is.latent ? k : v;
                for (int64_t i = 0; i < value_size; ++i) sum[size_t(i)] += weight * double(from[size_t((key * kv_heads + kv) * size + i)]);
            }
            for (double value : sum) expected.push_back(value / total);
        }
    std::vector<float> numbers(expected.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
        const uint32_t bits = bytes == 2 ? uint32_t(((uint16_t*)y.data())[i]) << 16 : ((uint32_t*)y.data())[i];
        memcpy(&numbers[i], &bits, 4);
    }
    expect_near(numbers, expected, bytes == 2 ? 2e-2 : 1e-4, "attention");
    if (is.ahead) return;
    const int64_t one = 1;
    args.num_tokens = 1, args.query_lens = &one, args.slots = slots.data() + length - 1, args.y = last.data();
    args.query = data(q, half_q) + (length - 1) * heads * size * bytes, args.key = data(k, half_k) + (length - 1) * kv_heads * size * bytes;
    args.value = data(v, half_v) + (length - 1) * kv_heads * size * bytes;
    qk_attention(context, &args);
    expect(!memcmp(last.data(), y.data() + (length - 1) * heads * value_size * bytes, last.size()), "a row's bits of attention", length, is.dtype);
}

// A table's rows plus those of positions, recorded for eight tokens and run for three.
void check_plan(qk_context* context) {
    Noise noise;
    const int64_t dim = 20, many[2][8] = {}, ids[] = {4, 0, 2}, positions[] = {7, 8, 9};
    const std::vector<float> words = noise.take(5 * dim), places = noise.take(10 * dim);
    std::vector<float> x(size_t(8 * dim), -1.0f), y(x.size());
    const qk_step_args example = {8, many[0], many[1], 0, nullptr}, step = {3, ids, positions, 0, nullptr};
    qk_plan* plan = qk_begin_plan(context, &example);
    const qk_gather_args of_words = {8, dim, QK_FLOAT32, 0, words.data(), many[0], x.data(), nullptr};
    const qk_gather_args of_places = {8, dim, QK_FLOAT32, 0, places.data(), many[1], y.data(), nullptr};
    qk_gather(context, &of_words);
    qk_gather(context, &of_places);
    qk_activation_args sum = {};
    sum.rows = 8, sum.dim = dim, sum.repeats = 1, sum.x = x.data(), sum.residual = y.data(), sum.y = y.data();
    sum.x_stride = sum.residual_stride = sum.y_stride = dim;
    qk_activation(context, &sum);
    expect(qk_end_plan(context) && x[0] == -1.0f, "a plan");
    qk_run_plan(context, plan, &step);
    qk_destroy_plan(plan);
    for (int64_t i = 0; i < 3 * dim; ++i)
        expect(y[size_t(i)] == words[size_t(ids[i / dim] * dim + i % dim)] + places[size_t(positions[i / dim] * dim + i % dim)], "a plan's result", i);
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

// A draw among the four largest is one of them, and the same alone; log-probabilities are those of a softmax.
void check_drawn(qk_context* context, int64_t rows, int64_t vocab) {
    Noise noise;
    const std::vector<float> logits = noise.take(rows * vocab), temperature(size_t(rows), 0.7f), min_p(size_t(rows), 0.01f), top_p(size_t(rows), 0.9f);
    const std::vector<int64_t> top_k(size_t(rows), 4);
    std::vector<int64_t> which, found(size_t(rows), -1), ids(size_t(rows * 5)), ranks(found);
    std::vector<uint64_t> seeds;
    std::vector<float> logprobs(ids.size());
    std::vector<double> totals(ranks.size());
    for (int64_t row = 0; row < rows; ++row) which.push_back(row), seeds.push_back(uint64_t(row));
    qk_sample_args args = {rows, vocab, logits.data(), vocab, temperature.data(), min_p.data(), top_k.data(), top_p.data(), seeds.data(), which.data(), found.data()};
    qk_sample(context, &args);
    qk_logprobs_args listed = {rows, vocab, 4, logits.data(), vocab, which.data(), found.data(), ids.data(), logprobs.data(), ranks.data(), totals.data()};
    qk_logprobs(context, &listed);
    for (int64_t row = 0; row < rows; ++row) {
        const float* own = logits.data() + row * vocab;
        double total = 0.0;
        int64_t alone = -1, larger = 1;
        for (int64_t i = 0; i < vocab; ++i) total += std::exp(double(own[i])), larger += own[i] > own[found[size_t(row)]];
        expect(ranks[size_t(row)] == larger && larger <= 4, "the rank of a draw", row, larger);
        for (int64_t i = 0; i < 5; ++i) {
            const size_t at = size_t(row * 5 + i);
            expect(std::fabs(double(logprobs[at]) - double(own[ids[at]]) + std::log(total)) < 1e-4, "a log-probability", row, i);
        }
        args.rows = 1, args.logits = own, args.seeds = &seeds[size_t(row)], args.indices = &which[size_t(row)], args.token_ids = &alone;
        qk_sample(context, &args);
        expect(alone == found[size_t(row)], "a draw alone", row, alone);
    }
}

void check_all(qk_context* context) {
    for (int32_t dtype : {QK_FLOAT32, QK_BFLOAT16})
        for (int64_t m : {1, 7, 40}) {
            check_linear(context, dtype, 70, 96, m);
            check_linear(context, dtype, 33, 45, m);
            for (int64_t k : {45, 288}) check_adapters(context, dtype, k, m);
            for (int32_t form : {QK_W8A8, QK_W8, QK_W4, QK_E4M3, QK_MXFP4})
                for (int64_t group_size : {32, 128, 288}) check_quantized(context, form, dtype, 70, 288, m, group_size);
            for (int32_t form : {-1, int32_t(QK_W8), int32_t(QK_W4), int32_t(QK_E4M3), int32_t(QK_MXFP4)})
                for (bool scale_inputs : {false, true}) check_experts(context, form, dtype, m, scale_inputs);
        }
    for (int32_t kind : ACTIVATIONS)
        for (bool gated : {false, true}) {
            const bool is_possible = gated ? kind != QK_XIELU : kind != QK_CLAMPED_SWIGLU;
            if (is_possible && kind != QK_XIELU) check_linear_finish(context, kind, gated);
            if (is_possible) check_activation(context, kind, gated, 1);
            if (is_possible && !gated) check_activation(context, kind, gated, 24);
        }
    for (int64_t m : {1, 7, 40}) check_batched_linear(context, m);
    check_gather(context);
    for (int32_t dtype : {QK_FLOAT32, QK_BFLOAT16}) check_adapter_of_a_table(context, dtype);
    for (bool is_normed : {false, true}) check_rotate(context, is_normed);
    for (int32_t score : {QK_SCORE_SOFTMAX, QK_SCORE_SIGMOID})
        for (int32_t groups : {1, 4})
            for (bool by_two : {false, true}) check_route(context, score, groups, by_two);
    check_route(context, QK_SCORE_SPARSEMIXER, 1, false);
    for (int32_t in_float32 : {0, 1}) check_norm(context, 5, 100, in_float32);
    for (int64_t groups : {1, 3}) check_layer_norm(context, 5, groups, 100);
    Attention variants[11];
    variants[1].window = 20, variants[2].ahead = -1, variants[3].ahead = 3, variants[4].head_size = 20, variants[5].latent = 16;
    variants[6].chunk = 64, variants[7].soft_cap = 0.5f, variants[8].growth = 0.3f, variants[9].sinks = true, variants[10].slopes = true;
    for (Attention& variant : variants)
        for (int32_t dtype : {QK_FLOAT32, QK_BFLOAT16})
            for (int64_t length : {1, 20, 300}) {
                variant.dtype = dtype;
                check_attention(context, length, variant);
            }
    check_plan(context);
    check_greedy(context, 9, 1000);
    check_drawn(context, 9, 1000);
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
