// From logits to tokens: the likeliest, or a draw from a filtered distribution; log-probabilities. One thread does a row.
#include "kernels.h"
#include "philox.h"
#include "sampling.h"
#include "select.h"

namespace QK_ISA {
namespace {

constexpr int64_t ELEMENTS_PER_PIECE = 8192;  // less is not worth another thread

int64_t rows_per_piece(int64_t vocab) { return vocab < ELEMENTS_PER_PIECE ? ELEMENTS_PER_PIECE / vocab : 1; }

// x > below(bound) means x >= bound.
float below(float bound) { return nextafterf(bound, -INFINITY); }

// The first token of the largest logit.
int64_t likeliest(const Row& row) {
    for (int64_t block = 0; block < row.num_blocks; ++block) {
        if (!has_above(row, block, below(row.max))) continue;
        for (int64_t i = block * BLOCK; i < block_end(row, block); ++i)
            if (row.x[i] == row.max) return i;
    }
    return 0;  // nothing but NaNs and negative infinities
}

// A lower bound of the row's k-th largest logit; -inf where the survey is too coarse. `scratch`: 16 per block.
float bound_of_kth(const Row& row, int64_t k, float* scratch) {
    const int64_t n = 16 * row.num_blocks;
    if (k > n) return -INFINITY;
    memcpy(scratch, row.peaks, size_t(n) * sizeof(float));
    return qk::kth_largest(scratch, n, k);
}

// The logits above `bound`, in order of ids; returns how many. `out` has room for 16 more.
int64_t collect(const Row& row, float bound, float* out) {
    int64_t n = 0;
    for (int64_t block = 0; block < row.num_blocks; ++block) {
        if (!has_above(row, block, bound)) continue;
        for (int64_t i = block * BLOCK; i < block_end(row, block); i += 16) {
            const F16 v = tokens_at(row.x, i, row.vocab);
            n += store_selected(out + n, less(set1(bound), v), v);
        }
    }
    return n;
}

// What a logit weighs: one, to count them, or its unnormalised probability.
struct Count {
    __attribute__((always_inline)) F16 operator()(F16) const { return set1(1.0f); }
};
struct Weight {
    float max, rate;  // rate: 1 / temperature
    __attribute__((always_inline)) F16 operator()(F16 x) const { return exp(mul(sub(x, set1(max)), set1(rate))); }
};

constexpr int FEW = 128, NUM_CUTS = 7;
constexpr int64_t STRETCH = 1024;  // float32 sums are added up in float64 after so many

// How much the logits above each of the cuts weigh. What x holds past its end is read, and left aside.
template <class Measure>
void weigh_above(const float* x, int64_t n, const float* cuts, Measure measure, double* totals) {
    for (int c = 0; c < NUM_CUTS; ++c) totals[c] = 0.0;
    for (int64_t begin = 0; begin < n; begin += STRETCH) {
        F16 sums[NUM_CUTS];
        for (int c = 0; c < NUM_CUTS; ++c) sums[c] = zero();
        const int64_t end = n - begin < STRETCH ? n : begin + STRETCH;
        for (int64_t i = begin; i < end; i += 16) {
            const F16 v = i + 16 <= end ? load(x + i) : select(lanes(0, int(end - i)), load(x + i), set1(-INFINITY));
            const F16 w = measure(v);
            for (int c = 0; c < NUM_CUTS; ++c) sums[c] = add(sums[c], select(less(set1(cuts[c]), v), w, zero()));
        }
        for (int c = 0; c < NUM_CUTS; ++c) totals[c] += double(reduce_add(sums[c]));
    }
}

// Moves the logits above `low` and below `high` to the front; returns how many.
int64_t keep_between(float* x, int64_t n, float low, float high) {
    int64_t m = 0;
    for (int64_t i = 0; i < n; i += 16) {
        F16 v = load(x + i);
        if (i + 16 > n) v = select(lanes(0, int(n - i)), v, set1(-INFINITY));
        v = select(less(v, set1(high)), v, set1(-INFINITY));
        m += store_selected(x + m, less(set1(low), v), v);
    }
    return m;
}

void find_range(const float* x, int64_t n, float& least, float& most) {
    F16 lo = set1(INFINITY), hi = set1(-INFINITY);
    for (int64_t i = 0; i < n; i += 16) {
        const M16 there = lanes(0, int(n - i < 16 ? n - i : 16));
        lo = min(select(there, load(x + i), lo), lo);
        hi = max(select(there, load(x + i), hi), hi);
    }
    least = -reduce_max(sub(zero(), lo));
    most = reduce_max(hi);
}

template <class Measure>
float reach_among_few(float* x, int64_t n, double target, Measure measure) {
    qk::sort_descending(x, n);
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += 16) {
        float weight[16];
        store(weight, measure(load(x + i)));
        for (int64_t j = i; j < n && j < i + 16; ++j)
            if ((sum += double(weight[j - i])) >= target) return x[j];
    }
    return x[n - 1];
}

// The largest logit such that all that are no smaller weigh at least `target` together; the smallest if all weigh less. n > 0,
// no NaNs nor infinities. Reorders x, which has room for 16 more.
template <class Measure>
float reach(float* x, int64_t n, double target, Measure measure) {
    while (n > FEW) {
        float least, most, cuts[NUM_CUTS];
        find_range(x, n, least, most);
        for (int c = 0; c < NUM_CUTS; ++c) cuts[c] = below(most - (most - least) * (float(c + 1) / float(NUM_CUTS + 1)));
        double totals[NUM_CUTS];
        weigh_above(x, n, cuts, measure, totals);
        int c = 0;
        while (c < NUM_CUTS && totals[c] < target) ++c;
        const float low = c < NUM_CUTS ? cuts[c] : -INFINITY, high = c ? nextafterf(cuts[c - 1], INFINITY) : INFINITY;
        const int64_t kept = keep_between(x, n, low, high);
        if (c) target -= totals[c - 1];
        if (kept == n) break;  // almost all are equal, or too far apart
        n = kept;
    }
    return reach_among_few(x, n, target, measure);
}

// Sums of the weights above `bound` up to and including each block. Returns the total.
double sum_weights(const Row& row, float bound, Weight weight, double* sums) {
    const F16 limit = set1(bound);
    double total = 0.0;
    for (int64_t block = 0; block < row.num_blocks; ++block) {
        if (has_above(row, block, bound)) {
            F16 s[4] = {zero(), zero(), zero(), zero()};
            const int64_t end = block_end(row, block);
            int64_t i = block * BLOCK;
            for (; i + 64 <= end; i += 64)
                for (int j = 0; j < 4; ++j) {
                    const F16 v = load(row.x + i + 16 * j);
                    s[j] = add(s[j], select(less(limit, v), weight(v), zero()));
                }
            for (; i < end; i += 16) {
                const F16 v = tokens_at(row.x, i, row.vocab);
                s[0] = add(s[0], select(less(limit, v), weight(v), zero()));
            }
            total += double(reduce_add(add(add(s[0], s[1]), add(s[2], s[3]))));
        }
        sums[block] = total;
    }
    return total;
}

// The token at which the sum of the weights above `bound` exceeds `target`.
int64_t find_token(const Row& row, float bound, Weight weight, const double* sums, double target) {
    int64_t block = 0;
    while (block < row.num_blocks - 1 && !(sums[block] > target)) ++block;
    double sum = block ? sums[block - 1] : 0.0;
    int64_t last = 0;
    for (int64_t i = block * BLOCK; i < block_end(row, block); i += 16) {
        float weights[16];
        const F16 v = tokens_at(row.x, i, row.vocab);
        store(weights, select(less(set1(bound), v), weight(v), zero()));
        for (int j = 0; j < 16; ++j) {
            if (!(weights[j] > 0.0f)) continue;
            last = i + j;
            if ((sum += double(weights[j])) > target) return last;
        }
    }
    return last;  // the block's own sum was rounded up
}

struct Filters {
    float temperature, min_p, top_p;
    int64_t top_k;
};

struct Scratch {
    float* peaks;      // [num_blocks, 16]
    float* kth;        // [num_blocks, 16]
    float* collected;  // [vocab + 16]
    double* sums;      // [num_blocks]
};

size_t scratch_bytes(int64_t vocab) {
    const size_t blocks = size_t(block_count(vocab));
    return blocks * (2 * 16 * sizeof(float) + sizeof(double)) + size_t(vocab + 16) * sizeof(float);
}

Scratch divide(void* memory, int64_t vocab) {
    const int64_t blocks = block_count(vocab);
    double* sums = (double*)memory;
    float* peaks = (float*)(sums + blocks);
    return {peaks, peaks + 16 * blocks, peaks + 32 * blocks, sums};
}

// Below it no token may be drawn, before top_k and top_p.
float least_by_min_p(float max, const Filters& f) {
    const double share = f.min_p > 0.0f ? log(double(f.min_p)) : -87.0;
    const float least = float(double(max) + double(f.temperature) * (share > -87.0 ? share : -87.0));
    return least > -FLT_MAX ? least : -FLT_MAX;
}

float least_by_top_k(const Row& row, float least, int64_t k, const Scratch& s) {
    const float bound = bound_of_kth(row, k, s.kth);
    const int64_t n = collect(row, below(bound > least ? bound : least), s.collected);
    return n < k ? least : reach(s.collected, n, double(k), Count{});
}

// `total` is the weight of all tokens from `least` on. Those that weigh less than an even share of what may be dropped cannot be
// among the kept: all of them together would not fill it.
float least_by_top_p(const Row& row, float least, double total, const Filters& f, Weight weight, const Scratch& s) {
    const double share = (1.0 - double(f.top_p)) * total / double(row.vocab) * 0.999;
    const float bound = float(double(row.max) + double(f.temperature) * log(share));
    const int64_t n = collect(row, below(bound > least ? bound : least), s.collected);
    return n ? reach(s.collected, n, double(f.top_p) * total, weight) : least;
}

int64_t draw(const Row& row, const Filters& f, double u, const Scratch& s) {
    if (!(fabsf(row.max) <= FLT_MAX)) return likeliest(row);
    const Weight weight{row.max, 1.0f / f.temperature};
    float least = least_by_min_p(row.max, f);
    if (f.top_k > 0 && f.top_k < row.vocab) least = least_by_top_k(row, least, f.top_k, s);
    double total = sum_weights(row, below(least), weight, s.sums);
    if (f.top_p < 1.0f) {
        least = least_by_top_p(row, least, total, f, weight, s);
        total = sum_weights(row, below(least), weight, s.sums);
    }
    return find_token(row, below(least), weight, s.sums, u * total);
}

// -- log-probabilities -------------------------------------------------------------------------------------------------------

// Sum of e^(x - max), and how many logits are above `bound`.
double sum_and_count(const Row& row, float bound, int64_t& count) {
    const Weight weight{row.max, 1.0f};
    const F16 limit = set1(bound), one = set1(1.0f);
    F16 above = zero();
    double total = 0.0;
    for (int64_t block = 0; block < row.num_blocks; ++block) {
        F16 s[2] = {zero(), zero()};
        for (int64_t i = block * BLOCK; i < block_end(row, block); i += 32)
            for (int j = 0; j < 2; ++j) {
                const F16 v = tokens_at(row.x, i + 16 * j, row.vocab);
                s[j] = add(s[j], weight(v));
                above = add(above, select(less(limit, v), one, zero()));
            }
        total += double(reduce_add(add(s[0], s[1])));
    }
    count = int64_t(reduce_add(above));
    return total;
}

// The keys of the k likeliest tokens, in order.
void rank(const Row& row, int64_t k, float* scratch, uint64_t* keys) {
    const float bound = bound_of_kth(row, k, scratch);
    int64_t n = 0;
    if (bound > -INFINITY) {
        const float limit = below(bound);
        for (int64_t block = 0; block < row.num_blocks; ++block) {
            if (!has_above(row, block, limit)) continue;
            for (int64_t i = block * BLOCK; i < block_end(row, block); i += 16) {
                uint32_t rest = bits(less(set1(limit), tokens_at(row.x, i, row.vocab)));
                for (; rest; rest &= rest - 1) {
                    const int64_t token = i + __builtin_ctz(rest);
                    keys[n++] = qk::token_key(row.x[token], token);
                }
            }
        }
    } else {
        for (; n < row.vocab; ++n) keys[n] = qk::token_key(row.x[n], n);
    }
    qk::sort_largest(keys, n, k);
}

size_t logprobs_scratch_bytes(int64_t vocab) {
    return size_t(vocab) * sizeof(uint64_t) + size_t(block_count(vocab)) * 2 * 16 * sizeof(float);
}

void logprobs_of_row(const qk_logprobs_args& a, int64_t r, void* memory) {
    uint64_t* keys = (uint64_t*)memory;
    float* peaks = (float*)(keys + a.vocab);
    const Row row = survey(a.logits + a.which[r] * a.stride, a.vocab, peaks);
    const float selected = row.x[a.selected[r]];
    int64_t above;
    const double total = sum_and_count(row, selected, above);
    const double log_total = double(row.max) + log(total);
    int64_t* ids = a.token_ids + r * (1 + a.num_top);
    float* values = a.logprobs + r * (1 + a.num_top);
    ids[0] = a.selected[r];
    if (a.num_top) rank(row, a.num_top, peaks + 16 * row.num_blocks, keys);
    for (int64_t i = 0; i < a.num_top; ++i) ids[1 + i] = qk::token_of_key(keys[i]);
    for (int64_t i = 0; i <= a.num_top; ++i) values[i] = float(double(row.x[ids[i]]) - log_total);
    a.ranks[r] = above + 1;
    a.log_totals[r] = log_total;
}

}  // namespace

void sample(qk_context& context, const qk_sample_args& a) {
    auto work = [&](int64_t begin, int64_t end, int thread) {
        const Scratch scratch = divide(context.thread_scratch(thread, scratch_bytes(a.vocab)), a.vocab);
        for (int64_t r = begin; r < end; ++r) {
            const Row row = survey(a.logits + r * a.stride, a.vocab, scratch.peaks);
            if (!a.temperature || a.temperature[r] == 0.0f) {
                a.token_ids[r] = likeliest(row);
            } else {
                const Filters filters{a.temperature[r], a.min_p[r], a.top_p[r], a.top_k[r]};
                a.token_ids[r] = draw(row, filters, uniform(a.seeds[r], uint64_t(a.indices[r])), scratch);
            }
        }
    };
    context.parallel(a.rows, rows_per_piece(a.vocab), work);
}

void logprobs(qk_context& context, const qk_logprobs_args& a) {
    auto work = [&](int64_t begin, int64_t end, int thread) {
        void* memory = context.thread_scratch(thread, logprobs_scratch_bytes(a.vocab));
        for (int64_t r = begin; r < end; ++r) logprobs_of_row(a, r, memory);
    };
    context.parallel(a.rows, rows_per_piece(a.vocab), work);
}

}  // namespace QK_ISA
