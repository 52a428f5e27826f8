// What every kernel gets: threads, scratch memory, and the table of the kernels themselves.
#pragma once

#include <cstddef>
#include <vector>

#include "pool.h"
#include "quire_kernels.h"

namespace qk {

// A linear layer of each group on its own rows. Rows stand group by group; with plain weights, zero-padded to whole tiles (layout.h).
struct GroupedLinearArgs {
    qk_linear_args linear;  // of all rows; `packed` holds the weights of one group after another
    const qk_quantization* quantization;  // of all groups; not read with plain weights
    int64_t groups;
    const int64_t* starts;  // [groups + 1] where each group's rows start
    int64_t bias_stride;    // from a group's biases to the next one's
};

// Returns once *done is `count`, which other threads have it reach.
void await_count(const int64_t* done, int64_t count);

// The kernels of one instruction set.
struct KernelTable {
    const char* name;
    void (*linear)(qk_context&, const qk_linear_args&);
    void (*grouped_linear)(qk_context&, const GroupedLinearArgs&);
    void (*attention)(qk_context&, const qk_attention_args&);
    void (*batched_linear)(qk_context&, const qk_batched_linear_args&);
    void (*rms_norm)(qk_context&, const qk_rms_norm_args&);
    void (*layer_norm)(qk_context&, const qk_layer_norm_args&);
    void (*rotate)(qk_context&, const qk_rotate_args&);
    void (*activation)(qk_context&, const qk_activation_args&);
    void (*route)(qk_context&, const qk_route_args&);
    int32_t (*experts)(qk_context&, const qk_experts_args&);
    void (*sample)(qk_context&, const qk_sample_args&);
    void (*logprobs)(qk_context&, const qk_logprobs_args&);
    void (*read_memory)(qk_context&, const void* memory, int64_t bytes);
    void (*gather_low_rank)(qk_context&, const qk_gather_args&);
    int64_t (*multiply_bf16)(qk_context&, int64_t rounds);
    void (*grouped_quantized_linear)(qk_context&, const GroupedLinearArgs&);
};

// Memory that only grows, aligned to cache lines. Its content is lost with every `get`.
class Scratch {
  public:
    Scratch() = default;
    Scratch(Scratch&& other) noexcept;
    ~Scratch();
    void* get(size_t bytes);

  private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace qk

struct qk_context {
    qk_context(int num_threads, const qk::KernelTable& kernel_table);

    qk::Pool pool;
    const qk::KernelTable& kernels;
    qk_plan* recording = nullptr;  // what gets the calls of kernels instead of the processor

    // Nothing in this header may be compiled into a function of its own: kernels include it with the flags of their
    // instruction set, and the linker would keep any one of the copies for all.
    void* shared_scratch(size_t bytes);              // of the calling thread, across the parts of one kernel
    void* inner_scratch(size_t bytes);               // the same for a kernel that may be a part of another
    void* low_rank_scratch(size_t bytes);            // the same for adapters: what comes between A and B
    void* thread_scratch(int thread, size_t bytes);  // of each thread, within one piece of work

    // Runs `work(begin, end, thread)` over [0, items); see Pool::run.
    template <class Work>
    void parallel(int64_t items, int64_t grain, Work& work) {
        pool.run(
            items, grain,
            [](void* argument, int64_t begin, int64_t end, int thread) {
                (*static_cast<Work*>(argument))(begin, end, thread);
            },
            &work);
    }

  private:
    qk::Scratch shared_, inner_, low_rank_;
    std::vector<qk::Scratch> of_thread_;
};
