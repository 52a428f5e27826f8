// The C ABI's side of a context, and the calls that only pass on to the kernels of an instruction set.
#include "context.h"

#include <cstdlib>
#include <cstring>

#include "instruction_sets.h"
#include "plan.h"

namespace qk {

Scratch::Scratch(Scratch&& other) noexcept : memory_(other.memory_), size_(other.size_) {
    other.memory_ = nullptr;
    other.size_ = 0;
}

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::get(size_t bytes) {
    if (bytes > size_) {
        std::free(memory_);
        size_ = (bytes + 4095) / 4096 * 4096;
        memory_ = std::aligned_alloc(64, size_);
        if (!memory_) std::abort();
    }
    return memory_;
}

}  // namespace qk

qk_context::qk_context(int num_threads, const qk::KernelTable& kernel_table)
    : pool(num_threads), kernels(kernel_table), of_thread_(size_t(num_threads)) {}

void* qk_context::shared_scratch(size_t bytes) { return shared_.get(bytes); }
void* qk_context::inner_scratch(size_t bytes) { return inner_.get(bytes); }
void* qk_context::low_rank_scratch(size_t bytes) { return low_rank_.get(bytes); }
void* qk_context::thread_scratch(int thread, size_t bytes) { return of_thread_[size_t(thread)].get(bytes); }

int32_t qk_abi_version(void) { return QK_ABI_VERSION; }

int64_t qk_struct_size(int32_t n) {
    constexpr int64_t sizes[] = {sizeof(qk_pack_low_rank_args),
                                 sizeof(qk_pack_args),       sizeof(qk_linear_args), sizeof(qk_batched_linear_args),
                                 sizeof(qk_pack_quantized_args), sizeof(qk_quantized_linear_args), sizeof(qk_rms_norm_args),
                                 sizeof(qk_layer_norm_args), sizeof(qk_rotate_args),     sizeof(qk_activation_args),
                                 sizeof(qk_gather_args),     sizeof(qk_barrier_args), sizeof(qk_route_args),  sizeof(qk_experts_args),
                                 sizeof(qk_attention_args),  sizeof(qk_step_args),   sizeof(qk_sample_args),
                                 sizeof(qk_logprobs_args)};
    return n >= 0 && n < int32_t(sizeof sizes / sizeof *sizes) ? sizes[n] : 0;
}

const char* qk_instruction_set(int32_t n) {
    const qk::KernelTable* table = qk::kernel_table(n);
    return table ? table->name : nullptr;
}

qk_context* qk_create(int32_t num_threads, const char* instruction_set) {
    for (int n = 0; const qk::KernelTable* table = qk::kernel_table(n); ++n)
        if (!strcmp(table->name, instruction_set)) return new qk_context(num_threads, *table);
    return nullptr;
}

void qk_destroy(qk_context* context) { delete context; }

// A quantized linear layer is one group of them.
static void quantized_linear(qk_context& context, const qk_quantized_linear_args& args) {
    const int64_t starts[] = {0, args.linear.m};
    context.kernels.grouped_quantized_linear(context, {args.linear, &args.quantization, 1, starts, 0});
}

// Runs a kernel, or records the call.
template <class Args>
static void call(qk_context* context, void (*kernel)(qk_context&, const Args&), const Args* args) {
    context->recording ? context->recording->add(*args) : kernel(*context, *args);
}

void qk_linear(qk_context* context, const qk_linear_args* args) { call(context, context->kernels.linear, args); }
void qk_batched_linear(qk_context* context, const qk_batched_linear_args* args) {
    call(context, context->kernels.batched_linear, args);
}
void qk_quantized_linear(qk_context* context, const qk_quantized_linear_args* args) {
    call(context, quantized_linear, args);
}
void qk_rms_norm(qk_context* context, const qk_rms_norm_args* args) { call(context, context->kernels.rms_norm, args); }
void qk_layer_norm(qk_context* context, const qk_layer_norm_args* args) { call(context, context->kernels.layer_norm, args); }
void qk_rotate(qk_context* context, const qk_rotate_args* args) { call(context, context->kernels.rotate, args); }
void qk_activation(qk_context* context, const qk_activation_args* args) { call(context, context->kernels.activation, args); }
void qk_route(qk_context* context, const qk_route_args* args) { call(context, context->kernels.route, args); }
int32_t qk_experts(qk_context* context, const qk_experts_args* args) {
    if (!context->recording) return context->kernels.experts(*context, *args);
    context->recording->add(*args);
    return 0;
}
void qk_attention(qk_context* context, const qk_attention_args* args) { call(context, context->kernels.attention, args); }
void qk_sample(qk_context* context, const qk_sample_args* args) { context->kernels.sample(*context, *args); }
void qk_logprobs(qk_context* context, const qk_logprobs_args* args) { context->kernels.logprobs(*context, *args); }
void qk_read_memory(qk_context* context, const void* memory, int64_t bytes) {
    context->kernels.read_memory(*context, memory, bytes);
}
int64_t qk_multiply_bf16(qk_context* context, int64_t rounds) { return context->kernels.multiply_bf16(*context, rounds); }
