#include "instruction_sets.h"

#if defined(QK_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define QK_ISA portable
#include "kernels.h"
#undef QK_ISA

#define QK_ALL_BUT_PRODUCTS(isa)                                                                              \
    isa::batched_linear, isa::rms_norm, isa::layer_norm, isa::rotate, isa::activation, isa::route, isa::experts, isa::sample, \
        isa::logprobs, isa::read_memory, isa::gather_low_rank
#define QK_ALL(isa) \
    {#isa, isa::linear, isa::grouped_linear, isa::attention, QK_ALL_BUT_PRODUCTS(isa), isa::multiply_bf16, isa::grouped_quantized_linear}

#ifdef QK_X86
#define QK_DECLARE(isa)                                                     \
    namespace isa {                                                         \
    void linear(qk_context& context, const qk_linear_args& args);           \
    void grouped_linear(qk_context& context, const qk::GroupedLinearArgs& args); \
    void batched_linear(qk_context& context, const qk_batched_linear_args& args); \
    void rms_norm(qk_context& context, const qk_rms_norm_args& args);       \
    void layer_norm(qk_context& context, const qk_layer_norm_args& args);   \
    void rotate(qk_context& context, const qk_rotate_args& args);           \
    void activation(qk_context& context, const qk_activation_args& args);   \
    void attention(qk_context& context, const qk_attention_args& args);     \
    void route(qk_context& context, const qk_route_args& args);             \
    int32_t experts(qk_context& context, const qk_experts_args& args);      \
    void sample(qk_context& context, const qk_sample_args& args);           \
    void logprobs(qk_context& context, const qk_logprobs_args& args);       \
    void read_memory(qk_context& context, const void* memory, int64_t bytes); \
    void gather_low_rank(qk_context& context, const qk_gather_args& args);  \
    int64_t multiply_bf16(qk_context& context, int64_t rounds);             \
    void grouped_quantized_linear(qk_context& context, const qk::GroupedLinearArgs& args); \
    }
QK_DECLARE(avx2)
QK_DECLARE(avx512)
QK_DECLARE(avx512_vnni)
QK_DECLARE(avx512_bf16)
QK_DECLARE(amx)
#ifdef QK_WITH_SIMULATED_AMX
QK_DECLARE(amx_simulated)
#endif
#endif

namespace qk {
namespace {

#ifdef QK_X86

// On AMX only products of bfloat16 matrices differ from AVX-512 with bfloat16: of weights, and of keys and values.
void linear_on_amx(qk_context& context, const qk_linear_args& args) {
    args.dtype == QK_BFLOAT16 ? amx::linear(context, args) : avx512_bf16::linear(context, args);
}

void grouped_linear_on_amx(qk_context& context, const GroupedLinearArgs& args) {
    args.linear.dtype == QK_BFLOAT16 ? amx::grouped_linear(context, args) : avx512_bf16::grouped_linear(context, args);
}

void attention_on_amx(qk_context& context, const qk_attention_args& args) {
    args.dtype == QK_BFLOAT16 ? amx::attention(context, args) : avx512_bf16::attention(context, args);
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_vnni() { return __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512() && has_vnni() && __builtin_cpu_supports("avx512bf16"); }

// With AVX-512 only int8 products differ where there is VNNI, and only in time.
void quantized_linear_on_avx512(qk_context& context, const GroupedLinearArgs& args) {
    has_vnni() ? avx512_vnni::grouped_quantized_linear(context, args) : avx512::grouped_quantized_linear(context, args);
}
bool has_tiles_for(const GroupedLinearArgs& args) {
    return args.quantization->form == QK_W8A8 || args.linear.dtype == QK_BFLOAT16;
}
void quantized_linear_on_amx(qk_context& context, const GroupedLinearArgs& args) {
    has_tiles_for(args) ? amx::grouped_quantized_linear(context, args) : avx512_bf16::grouped_quantized_linear(context, args);
}

// The CPU must have tiles, and Linux must be asked for the memory to save them in.
bool has_amx() {
#ifdef __linux__
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    unsigned eax, ebx, ecx, edx;
    if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if ((edx & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return false;
#endif
}

#ifdef QK_WITH_SIMULATED_AMX
void linear_on_simulated_amx(qk_context& context, const qk_linear_args& args) {
    args.dtype == QK_BFLOAT16 ? amx_simulated::linear(context, args) : portable::linear(context, args);
}
void attention_on_simulated_amx(qk_context& context, const qk_attention_args& args) {
    args.dtype == QK_BFLOAT16 ? amx_simulated::attention(context, args) : portable::attention(context, args);
}
void quantized_linear_on_simulated_amx(qk_context& context, const GroupedLinearArgs& args) {
    has_tiles_for(args) ? amx_simulated::grouped_quantized_linear(context, args) : portable::grouped_quantized_linear(context, args);
}
void grouped_linear_on_simulated_amx(qk_context& context, const GroupedLinearArgs& args) {
    args.linear.dtype == QK_BFLOAT16 ? amx_simulated::grouped_linear(context, args) : portable::grouped_linear(context, args);
}
#endif

#endif

bool always() { return true; }

struct InstructionSet {
    KernelTable table;
    bool (*is_there)();
};

const InstructionSet INSTRUCTION_SETS[] = {
#ifdef QK_X86
    {{"amx", linear_on_amx, grouped_linear_on_amx, attention_on_amx, QK_ALL_BUT_PRODUCTS(avx512_bf16), amx::multiply_bf16,
      quantized_linear_on_amx}, has_amx},
    {QK_ALL(avx512_bf16), has_avx512_bf16},
    {{"avx512", avx512::linear, avx512::grouped_linear, avx512::attention, QK_ALL_BUT_PRODUCTS(avx512), avx512::multiply_bf16, quantized_linear_on_avx512}, has_avx512},
    {QK_ALL(avx2), has_avx2},
#endif
    {QK_ALL(portable), always},
#ifdef QK_WITH_SIMULATED_AMX
    {{"amx_simulated", linear_on_simulated_amx, grouped_linear_on_simulated_amx, attention_on_simulated_amx, QK_ALL_BUT_PRODUCTS(portable),
      amx_simulated::multiply_bf16, quantized_linear_on_simulated_amx},
     always},
#endif
};

}  // namespace

const KernelTable* kernel_table(int n) {
    for (const InstructionSet& set : INSTRUCTION_SETS)
        if (set.is_there() && n-- == 0) return &set.table;
    return nullptr;
}

}  // namespace qk
