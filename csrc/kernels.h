// The kernels every instruction set has.
#pragma once

#include "context.h"
#include "quire_kernels.h"

namespace QK_ISA {

void linear(qk_context& context, const qk_linear_args& args);
void grouped_linear(qk_context& context, const qk::GroupedLinearArgs& args);
void batched_linear(qk_context& context, const qk_batched_linear_args& args);
void rms_norm(qk_context& context, const qk_rms_norm_args& args);
void layer_norm(qk_context& context, const qk_layer_norm_args& args);
void rotate(qk_context& context, const qk_rotate_args& args);
void activation(qk_context& context, const qk_activation_args& args);
void attention(qk_context& context, const qk_attention_args& args);
void route(qk_context& context, const qk_route_args& args);
int32_t experts(qk_context& context, const qk_experts_args& args);
void sample(qk_context& context, const qk_sample_args& args);
void logprobs(qk_context& context, const qk_logprobs_args& args);
void read_memory(qk_context& context, const void* memory, int64_t bytes);
void gather_low_rank(qk_context& context, const qk_gather_args& args);
void grouped_quantized_linear(qk_context& context, const qk::GroupedLinearArgs& args);
int64_t multiply_bf16(qk_context& context, int64_t rounds);  // floating-point operations done

}  // namespace QK_ISA
