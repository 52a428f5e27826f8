#include "plan.h"

#include "context.h"

qk_plan::Call& qk_plan::append(Kind kind, int64_t rows) {
    if (rows != example_.num_tokens) is_whole_ = false;  // a call for something else than each token
    calls_.emplace_back();
    calls_.back().kind = kind;
    calls_.back().batch = 0;
    calls_.back().of_positions = false;
    return calls_.back();
}

void qk_plan::add(const qk_linear_args& args) { append(LINEAR, args.m).linear = args; }
void qk_plan::add(const qk_batched_linear_args& args) { append(BATCHED_LINEAR, args.m).batched_linear = args; }
void qk_plan::add(const qk_quantized_linear_args& args) { append(QUANTIZED_LINEAR, args.linear.m).quantized_linear = args; }
void qk_plan::add(const qk_rms_norm_args& args) { append(RMS_NORM, args.rows).rms_norm = args; }
void qk_plan::add(const qk_layer_norm_args& args) { append(LAYER_NORM, args.rows).layer_norm = args; }
void qk_plan::add(const qk_activation_args& args) { append(ACTIVATION, args.rows).activation = args; }
void qk_plan::add(const qk_route_args& args) { append(ROUTE, args.tokens).route = args; }
void qk_plan::add(const qk_experts_args& args) { append(EXPERTS, args.tokens).experts = args; }

void qk_plan::add(const qk_barrier_args& args) { append(BARRIER, example_.num_tokens).barrier = args; }

void qk_plan::add(const qk_gather_args& args) {
    if (args.ids != example_.ids && args.ids != example_.positions) is_whole_ = false;
    Call& call = append(GATHER, args.rows);
    call.gather = args;
    call.of_positions = args.ids == example_.positions;
}

void qk_plan::add(const qk_rotate_args& args) {
    if (args.rotary_half && args.positions != example_.positions) is_whole_ = false;
    append(ROTATE, args.tokens).rotate = args;
}

void qk_plan::add(const qk_attention_args& args) {
    Call& call = append(ATTENTION, args.num_tokens);
    call.attention = args;
    for (call.batch = 0; call.batch < int64_t(batches_.size()); ++call.batch)
        if (batches_[size_t(call.batch)]->slots == args.slots) return;
    is_whole_ = false;
}

void qk_plan::put_batch(qk_attention_args& args, const qk_attention_args& batch) {
    args.num_tokens = batch.num_tokens;
    args.num_reqs = batch.num_reqs;
    args.block_size = batch.block_size;
    args.query_lens = batch.query_lens;
    args.seq_lens = batch.seq_lens;
    args.block_table = batch.block_table;
    args.block_table_stride = batch.block_table_stride;
    args.slots = batch.slots;
}

int32_t qk_plan::run(qk_context& context, const qk_step_args& step) {
    for (Call& call : calls_) switch (call.kind) {
            case LINEAR:
                call.linear.m = step.num_tokens;
                qk_linear(&context, &call.linear);
                break;
            case BATCHED_LINEAR:
                call.batched_linear.m = step.num_tokens;
                qk_batched_linear(&context, &call.batched_linear);
                break;
            case QUANTIZED_LINEAR:
                call.quantized_linear.linear.m = step.num_tokens;
                qk_quantized_linear(&context, &call.quantized_linear);
                break;
            case RMS_NORM:
                call.rms_norm.rows = step.num_tokens;
                qk_rms_norm(&context, &call.rms_norm);
                break;
            case LAYER_NORM:
                call.layer_norm.rows = step.num_tokens;
                qk_layer_norm(&context, &call.layer_norm);
                break;
            case ROTATE:
                call.rotate.tokens = step.num_tokens;
                call.rotate.positions = step.positions;
                qk_rotate(&context, &call.rotate);
                break;
            case ACTIVATION:
                call.activation.rows = step.num_tokens;
                qk_activation(&context, &call.activation);
                break;
            case GATHER:
                call.gather.rows = step.num_tokens;
                call.gather.ids = call.of_positions ? step.positions : step.ids;
                qk_gather(&context, &call.gather);
                break;
            case ROUTE:
                call.route.tokens = step.num_tokens;
                qk_route(&context, &call.route);
                break;
            case EXPERTS:
                call.experts.tokens = step.num_tokens;
                if (const int32_t failure = qk_experts(&context, &call.experts)) return failure;
                break;
            case ATTENTION:
                put_batch(call.attention, *step.batches[call.batch]);
                qk_attention(&context, &call.attention);
                break;
            case BARRIER:
                if (const int32_t failure = qk_barrier(&context, &call.barrier)) return failure;
                break;
        }
    return 0;
}

qk_plan* qk_begin_plan(qk_context* context, const qk_step_args* example) {
    context->recording = new qk_plan(*example);
    return context->recording;
}
int32_t qk_end_plan(qk_context* context) {
    const bool is_whole = context->recording->is_whole();
    context->recording = nullptr;
    return is_whole;
}
int32_t qk_run_plan(qk_context* context, qk_plan* plan, const qk_step_args* step) { return plan->run(*context, *step); }
void qk_destroy_plan(qk_plan* plan) { delete plan; }
