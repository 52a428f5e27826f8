// Mixture of experts: which experts a token goes to, and what they answer.
//
// Row-invariance: a token's experts are linear layers on its own row, so their sums are those of linear.h, whichever other tokens chose them;
// their answers are added in the order of the token's own choices, from a float32 copy that no other token shares.
#include <cmath>

#include "context.h"
#include "kernels.h"
#include "layout.h"
#include "vec_math.h"

namespace QK_ISA {
namespace {

constexpr int64_t ROUTES_PER_PIECE = 16, ELEMENTS_PER_PIECE = 8192;

// The largest of `values` that is not taken, the first of equal ones. What is not a number is never larger.
int largest(const float* values, const bool* taken, int count) {
    int best = -1;
    for (int i = 0; i < count; ++i)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// Sum of exp(logits - top), which it leaves in `exponentials`; that may be `logits`.
float sum_exponentials(const float* logits, int count, float top, float* exponentials) {
    F16 total = zero();
    for (int i = 0; i < count; i += 16) {
        const int n = count - i < 16 ? count - i : 16;
        const F16 p = select(lanes(0, n), exp(sub(load_n(logits + i, n), set1(top))), zero());
        total = add(total, p);
        store_n(exponentials + i, p, n);
    }
    return reduce_add(total);
}

void sigmoids(const float* logits, int count, float* scores) {
    for (int i = 0; i < count; i += 16) {
        const int n = count - i < 16 ? count - i : 16;
        store_n(scores + i, div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), load_n(logits + i, n))))), n);
    }
}

// The choices of one token. What is chosen by are the logits where that is the same: nothing of them was rounded.
class Route {
  public:
    static size_t scratch_bytes(int num_experts) { return size_t(num_experts) * (3 * sizeof(float) + 2 * sizeof(bool)); }

    Route(const qk_route_args& args, int64_t token, void* scratch)
        : a_(args),
          logits_(args.logits + token * args.num_experts),
          ids_(args.ids + token * args.chosen),
          weights_(args.weights + token * args.chosen),
          scores_((float*)scratch),
          sums_(scores_ + args.num_experts),
          of_groups_(sums_ + args.num_experts),
          taken_((bool*)(of_groups_ + args.num_experts)) {}

    void run() {
        memset(taken_, 0, size_t(a_.num_experts));
        a_.score == QK_SCORE_SPARSEMIXER ? choose_by_turns() : choose_by_scores();
        if (a_.normalize) normalize();
        for (int j = 0; j < a_.chosen; ++j) {
            float weight = weights_[j] * a_.factor;
            if (a_.expert_scale) weight *= a_.expert_scale[ids_[j]];
            float buffer[16] = {weight};
            if (a_.round_to_bf16) store_f32(buffer, round_to(load_f32(buffer), (const bf16*)nullptr));
            weights_[j] = buffer[0];
        }
    }

  private:
    void choose_by_scores() {
        const bool needs_sums = a_.choice_bias || a_.groups > 1;
        if (!needs_sums) choose(logits_);
        float total = 1.0f;
        if (a_.score == QK_SCORE_SIGMOID) {
            sigmoids(logits_, a_.num_experts, scores_);
        } else {
            const float top = logits_[needs_sums ? largest(logits_, taken_, a_.num_experts) : ids_[0]];
            total = sum_exponentials(logits_, a_.num_experts, top, scores_);
        }
        if (needs_sums) {
            for (int i = 0; i < a_.num_experts; ++i) sums_[i] = scores_[i] / total + (a_.choice_bias ? a_.choice_bias[i] : 0.0f);
            if (a_.groups > 1) leave_out_groups();
            choose(sums_);
        }
        if (a_.normalize && a_.norm_eps == 0.0f && a_.norm_min == 0.0f) total = 1.0f;  // it cancels
        for (int j = 0; j < a_.chosen; ++j) weights_[j] = scores_[ids_[j]] / total;
    }

    void choose(const float* by) {
        for (int j = 0; j < a_.chosen; ++j) {
            ids_[j] = largest(by, taken_, a_.num_experts);
            taken_[ids_[j]] = true;
        }
    }

    // Counts the experts of all groups but the best as taken.
    void leave_out_groups() {
        const int size = a_.num_experts / a_.groups;
        bool* kept = taken_ + a_.num_experts;
        memset(kept, 0, size_t(a_.groups));
        for (int g = 0; g < a_.groups; ++g) {
            const float* sums = sums_ + g * size;
            bool* taken = taken_ + g * size;
            const int best = largest(sums, taken, size);
            of_groups_[g] = sums[best];
            taken[best] = true;
            if (a_.group_by_two && size > 1) of_groups_[g] += sums[largest(sums, taken, size)];
        }
        for (int j = 0; j < a_.kept_groups; ++j) kept[largest(of_groups_, kept, a_.groups)] = true;
        for (int i = 0; i < a_.num_experts; ++i) taken_[i] = !kept[i / size];
    }

    void choose_by_turns() {
        for (int j = 0; j < a_.chosen; ++j) {
            const int best = largest(logits_, taken_, a_.num_experts);
            const float top = logits_[best];
            for (int i = 0; i < a_.num_experts; ++i) {
                const float size = std::fabs(logits_[i]) > top ? std::fabs(logits_[i]) : top;
                const bool is_in = !taken_[i] && !((top - logits_[i]) / size > a_.threshold);
                sums_[i] = is_in ? logits_[i] : -INFINITY;
            }
            weights_[j] = 1.0f / sum_exponentials(sums_, a_.num_experts, top, scores_);
            ids_[j] = best;
            taken_[best] = true;
        }
    }

    void normalize() {
        float total = 0.0f;
        for (int j = 0; j < a_.chosen; ++j) total += weights_[j];
        total = (total < a_.norm_min ? a_.norm_min : total) + a_.norm_eps;
        for (int j = 0; j < a_.chosen; ++j) weights_[j] /= total;
    }

    const qk_route_args& a_;
    const float* const logits_;
    int64_t* const ids_;
    float* const weights_;
    float* const scores_;     // [num_experts]
    float* const sums_;       // [num_experts] scores + biases
    float* const of_groups_;  // [groups]
    bool* const taken_;       // [num_experts]; behind it whether a group is kept
};

template <class E>
class Experts {
  public:
    Experts(qk_context& context, const qk_experts_args& args) : context_(context), a_(args), rows_(args.tokens * args.chosen) {
        const int64_t per_tile = qk::PackedShape{0, 0, args.dtype, 0}.inputs_per_tile();
        hidden_ = qk::ceil_div(args.hidden, per_tile) * per_tile;
        inner_ = args.between ? args.between_stride : qk::ceil_div(args.expert_size, per_tile) * per_tile;
    }

    void run() {
        take_memory();
        sort_choices();
        if (a_.pool && !a_.answers) memset(answers_, 0, size_t(rows_ * a_.outputs) * sizeof(float));  // others' experts have no answers
        if (a_.gate_up_adapters && a_.gate_up_adapters->batch->segments) divide_by_adapter(*a_.gate_up_adapters->batch);
        if (a_.steps & QK_EXPERTS_BETWEEN) {
            gather_inputs();
            multiply(a_.gate_up, a_.gate_up_quantization, a_.gate_up_bias, a_.gate_up_adapters, a_.inner, a_.hidden, true, inputs_, hidden_,
                     between_ + a_.inner_start, inner_, a_.dtype);
        }
        if (a_.steps & QK_EXPERTS_ANSWERS)
            multiply(a_.down, a_.down_quantization, a_.down_bias, a_.down_adapters, a_.outputs, a_.expert_size, false, between_, inner_, answers_,
                     a_.outputs, QK_FLOAT32);
        if (a_.steps & QK_EXPERTS_SUMS) combine(a_.tokens, 0);
    }

    // The sums of `tokens` tokens, of which the first has the number `first` among those whose choices were sorted.
    void combine(int64_t tokens, int64_t first) const {
        auto work = [&](int64_t begin, int64_t end, int) {
            for (int64_t token = begin; token < end; ++token) combine_token(token, first);
        };
        context_.parallel(tokens, rows_per_piece(), work);
    }

  private:
    void take_memory() {
        const auto aligned = [](int64_t bytes) { return size_t((bytes + 63) / 64 * 64); };
        const size_t sizes[] = {
            aligned((a_.num_experts + 1) * int64_t(sizeof(int64_t))), aligned(rows_ * int64_t(sizeof(int64_t))),
            aligned(rows_ * hidden_ * int64_t(sizeof(E))),            aligned(rows_ * inner_ * int64_t(sizeof(E))),
            aligned(rows_ * a_.outputs * int64_t(sizeof(float))),     aligned((rows_ + 1) * int64_t(sizeof(int64_t))),
            aligned(rows_ * int64_t(sizeof(int32_t))),                aligned((a_.own_experts + 1) * int64_t(sizeof(int64_t))),
        };
        size_t total = 0;
        for (size_t size : sizes) total += size;
        char* memory = (char*)context_.shared_scratch(total);
        starts_ = (int64_t*)memory;
        rows_of_choices_ = (int64_t*)(memory += sizes[0]);
        inputs_ = (E*)(memory += sizes[1]);
        between_ = (E*)(memory += sizes[2]);
        answers_ = (float*)(memory += sizes[3]);
        adapter_starts_ = (int64_t*)(memory += sizes[4]);
        adapter_slots_ = (int32_t*)(memory += sizes[5]);
        own_starts_ = (int64_t*)(memory += sizes[6]);
        if (a_.between) between_ = (E*)a_.between;
        if (a_.answers) answers_ = a_.answers;
    }

    int64_t place(int64_t expert) const { return a_.places ? a_.places[expert] : expert; }

    // Rows by expert, in each in the order of the tokens.
    void sort_choices() {
        memset(starts_, 0, size_t(a_.num_experts + 1) * sizeof(int64_t));
        for (int64_t i = 0; i < rows_; ++i) ++starts_[place(a_.ids[i]) + 1];
        for (int32_t e = 0; e < a_.num_experts; ++e) starts_[e + 1] += starts_[e];
        for (int64_t i = 0; i < rows_; ++i) rows_of_choices_[i] = starts_[place(a_.ids[i])]++;
        for (int32_t e = a_.num_experts; e > 0; --e) starts_[e] = starts_[e - 1];  // they had moved on to the next
        starts_[0] = 0;
        first_row_ = starts_[a_.first_expert];
        for (int32_t e = 0; e <= a_.own_experts; ++e) own_starts_[e] = starts_[a_.first_expert + e] - first_row_;
    }

    // A copy of a token for each of its experts, padded, and the padding of what comes between the two matrices.
    void gather_inputs() {
        auto work = [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t own = rows_of_choices_[i] - first_row_;
                if (own < 0 || own >= own_starts_[a_.own_experts]) continue;  // another worker's
                E* row = inputs_ + rows_of_choices_[i] * hidden_;
                const E* x = (const E*)a_.x + i / a_.chosen * a_.x_stride;
                a_.scale_inputs ? scale(x, a_.weights[i], row) : (void)memcpy(row, x, size_t(a_.hidden) * sizeof(E));
                memset(row + a_.hidden, 0, size_t(hidden_ - a_.hidden) * sizeof(E));
                memset(between_ + rows_of_choices_[i] * inner_ + a_.expert_size, 0, size_t(inner_ - a_.expert_size) * sizeof(E));
            }
        };
        context_.parallel(rows_, rows_per_piece(), work);
    }

    // The segments of this worker's sorted rows: those of one expert for neighbouring tokens of one adapter. The matrices that an adapter
    // changes of all experts stand one after another.
    void divide_by_adapter(const qk_adapter_batch& batch) {
        for (int64_t i = 0; i < rows_; ++i) adapter_slots_[i] = -1;
        for (int64_t s = 0; s < batch.segments; ++s) {
            const int64_t end = batch.starts[s + 1] < a_.tokens ? batch.starts[s + 1] : a_.tokens;
            for (int64_t i = batch.starts[s] * a_.chosen; i < end * a_.chosen; ++i)
                adapter_slots_[rows_of_choices_[i]] = batch.slots[s] < 0 ? -1 : batch.slots[s] * a_.num_experts + int32_t(a_.ids[i]);
        }
        const int64_t rows = own_starts_[a_.own_experts];  // those of other workers' experts are before and after them
        int64_t segments = 0;
        for (int64_t row = 0; row < rows; ++row) {
            const int32_t slot = adapter_slots_[first_row_ + row];
            if (segments && slot == adapter_slots_[segments - 1]) continue;
            adapter_starts_[segments] = row;
            adapter_slots_[segments++] = slot;
        }
        adapter_starts_[segments] = rows;
        adapters_ = {segments, adapter_starts_, adapter_slots_};
    }

    void scale(const E* x, float weight, E* y) const {
        for (int64_t i = 0; i < a_.hidden; i += 16) {
            const int n = int(a_.hidden - i < 16 ? a_.hidden - i : 16);
            store_n(y + i, mul(set1(weight), load_n(x + i, n)), n);
        }
    }

    void multiply(const void* packed, const qk_quantization* quantization, const float* bias, const qk_adapter_site* adapters, int64_t n,
                  int64_t k, bool is_gated, const void* x, int64_t x_stride, void* y, int64_t y_stride, int32_t out_dtype) const {
        const int64_t rows = own_starts_[a_.own_experts];
        if (!rows) return;
        qk::GroupedLinearArgs grouped = {};
        grouped.quantization = quantization;
        grouped.groups = a_.own_experts;
        grouped.starts = own_starts_;
        qk_linear_args& linear = grouped.linear;
        linear.m = rows;
        linear.n = n;
        linear.k = k;
        linear.dtype = a_.dtype;
        linear.out_dtype = out_dtype;
        linear.gated = is_gated;
        linear.activation = is_gated ? a_.activation : QK_IDENTITY;
        linear.divisor = 1.0f;
        linear.packed = packed;
        linear.bias = bias;
        grouped.bias_stride = is_gated ? 2 * n : n;
        const int64_t out_bytes = out_dtype == QK_FLOAT32 ? int64_t(sizeof(float)) : int64_t(sizeof(E));
        linear.x = (const E*)x + first_row_ * x_stride;
        linear.x_stride = x_stride;
        linear.y = (char*)y + first_row_ * y_stride * out_bytes;
        linear.y_stride = y_stride;
        const qk_adapter_site site = {&adapters_, adapters ? adapters->by_slot : nullptr};
        if (adapters && adapters_.segments) linear.adapters = &site;
        (quantization ? context_.kernels.grouped_quantized_linear : context_.kernels.grouped_linear)(context_, grouped);
    }

    void combine_token(int64_t token, int64_t first) const {
        const int64_t* rows = rows_of_choices_ + (first + token) * a_.chosen;
        const float* weights = a_.weights + token * a_.chosen;
        const auto weight = [&](int32_t j) { return set1(a_.scale_inputs ? 1.0f : weights[j]); };
        E* y = (E*)a_.y + token * a_.y_stride;
        for (int64_t i = 0; i < a_.outputs; i += 16) {
            const int n = int(a_.outputs - i < 16 ? a_.outputs - i : 16);
            F16 sum = mul(weight(0), load_n(answers_ + rows[0] * a_.outputs + i, n));
            for (int32_t j = 1; j < a_.chosen; ++j)
                sum = fma(weight(j), load_n(answers_ + rows[j] * a_.outputs + i, n), sum);
            if (a_.shared) sum = add(sum, load_n((const E*)a_.shared + token * a_.shared_stride + i, n));
            if (a_.residual) sum = add(sum, load_n((const E*)a_.residual + token * a_.residual_stride + i, n));
            store_n(y + i, sum, n);
        }
    }

    int64_t rows_per_piece() const { return a_.hidden < ELEMENTS_PER_PIECE ? ELEMENTS_PER_PIECE / a_.hidden : 1; }

    qk_context& context_;
    const qk_experts_args& a_;
    const int64_t rows_;                  // one for each choice of each token
    int64_t hidden_, inner_;              // padded to whole tiles
    int64_t* starts_ = nullptr;           // [num_experts + 1] where each expert's rows start
    int64_t* own_starts_ = nullptr;       // [own_experts + 1] the same for this worker's, from its first row
    int64_t first_row_ = 0;               // of this worker's experts
    int64_t* rows_of_choices_ = nullptr;  // [tokens, chosen]
    E* inputs_ = nullptr;                 // [rows, hidden_]
    E* between_ = nullptr;                // [rows, inner_]
    float* answers_ = nullptr;            // [rows, outputs]
    int64_t* adapter_starts_ = nullptr;   // [rows + 1] where the segments of an adapter and an expert start
    int32_t* adapter_slots_ = nullptr;    // [rows]
    qk_adapter_batch adapters_ = {};
};

// Computes own experts for the tokens of all engines, and the sums of own tokens.
template <class E>
int32_t pooled_experts(qk_context& context, const qk_experts_args& args) {
    const qk_experts_pool& pool = *args.pool;
    const qk_pool_step& step = *pool.step;
    E* inputs = (E*)pool.inputs + step.first * args.hidden;
    for (int64_t i = 0; i < args.tokens; ++i)
        memcpy(inputs + i * args.hidden, (const E*)args.x + i * args.x_stride, size_t(args.hidden) * sizeof(E));
    memcpy(pool.choices + step.first * args.chosen, args.ids, size_t(args.tokens * args.chosen) * sizeof(int64_t));
    if (const int32_t failure = qk_barrier(&context, step.barrier)) return failure;
    qk_experts_args all = args;
    all.tokens = step.tokens;
    all.x = pool.inputs, all.x_stride = args.hidden, all.ids = pool.choices, all.answers = pool.answers;
    all.steps = QK_EXPERTS_BETWEEN | QK_EXPERTS_ANSWERS;
    Experts<E> experts(context, all);
    experts.run();
    if (const int32_t failure = qk_barrier(&context, step.barrier)) return failure;
    experts.combine(args.tokens, step.first);
    return 0;
}

template <class E>
int32_t experts_of(qk_context& context, const qk_experts_args& args) {
    if (args.pool && args.pool->step->barrier) return pooled_experts<E>(context, args);
    Experts<E>(context, args).run();
    return 0;
}

}  // namespace

void route(qk_context& context, const qk_route_args& a) {
    auto work = [&](int64_t begin, int64_t end, int thread) {
        void* scratch = context.thread_scratch(thread, Route::scratch_bytes(a.num_experts));
        for (int64_t token = begin; token < end; ++token) Route(a, token, scratch).run();
    };
    context.parallel(a.tokens, ROUTES_PER_PIECE, work);
}

int32_t experts(qk_context& context, const qk_experts_args& args) {
    return args.dtype == QK_BFLOAT16 ? experts_of<bf16>(context, args) : experts_of<float>(context, args);
}

}  // namespace QK_ISA
