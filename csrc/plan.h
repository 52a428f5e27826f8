// The kernels of a step as a list, made once and run many times: calling them one by one from Python takes longer than a small
// model does. Made of the very calls of a step with as many tokens as the plan is for; a run puts in its own number of tokens,
// its ids and positions, and its batches. All else stays as it was: weights, caches, and where results go.
#pragma once

#include <vector>

#include "quire_kernels.h"

struct qk_plan {
  public:
    explicit qk_plan(const qk_step_args& example) : example_(example), batches_(example.batches, example.batches + example.num_batches) {}

    void add(const qk_linear_args& args);
    void add(const qk_batched_linear_args& args);
    void add(const qk_quantized_linear_args& args);
    void add(const qk_rms_norm_args& args);
    void add(const qk_layer_norm_args& args);
    void add(const qk_rotate_args& args);
    void add(const qk_activation_args& args);
    void add(const qk_gather_args& args);
    void add(const qk_route_args& args);
    void add(const qk_experts_args& args);
    void add(const qk_attention_args& args);
    void add(const qk_barrier_args& args);

    bool is_whole() const { return is_whole_; }
    int32_t run(qk_context& context, const qk_step_args& step);

  private:
    enum Kind { LINEAR, BATCHED_LINEAR, QUANTIZED_LINEAR, RMS_NORM, LAYER_NORM, ROTATE, ACTIVATION, GATHER, ROUTE, EXPERTS, ATTENTION, BARRIER };
    struct Call {
        Kind kind;
        int64_t batch;      // of an attention
        bool of_positions;  // of a gather: its ids are the positions
        union {
            qk_linear_args linear;
            qk_batched_linear_args batched_linear;
            qk_quantized_linear_args quantized_linear;
            qk_rms_norm_args rms_norm;
            qk_layer_norm_args layer_norm;
            qk_rotate_args rotate;
            qk_activation_args activation;
            qk_gather_args gather;
            qk_route_args route;
            qk_experts_args experts;
            qk_attention_args attention;
            qk_barrier_args barrier;
        };
    };

    // A new call, of `rows` rows.
    Call& append(Kind kind, int64_t rows);
    static void put_batch(qk_attention_args& args, const qk_attention_args& batch);

    const qk_step_args example_;
    const std::vector<const qk_attention_args*> batches_;
    std::vector<Call> calls_;
    bool is_whole_ = true;
};
