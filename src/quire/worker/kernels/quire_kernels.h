/* The C ABI of Quire's native CPU kernels: raw pointers in, raw pointers out, no torch and no Python.
 *
 * Row-invariance is the contract of every function here: what a row of the output holds depends on that row's own
 * inputs (and, for attention, on the keys and values it sees) and on the instruction set, to the last bit; never on how
 * many rows there are, where the row stands, how the work was split, or how many threads there were.
 *
 * Matrices are row-major; "stride" is the distance between two rows in elements. Nothing is checked here: the Python side
 * (worker/kernels) does that once. A change of anything in this file changes QK_ABI_VERSION.
 */
#ifndef QUIRE_KERNELS_H
#define QUIRE_KERNELS_H

#include <stdint.h>

#define QK_ABI_VERSION 16

#if defined(__GNUC__)
#define QK_EXPORT __attribute__((visibility("default")))
#else
#define QK_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { QK_FLOAT32 = 0, QK_BFLOAT16 = 1 };
enum {
    QK_IDENTITY = 0, QK_RELU = 1, QK_SILU = 2, QK_GELU = 3, QK_GELU_TANH = 4,
    QK_RELU2 = 5, QK_QUICK_GELU = 6, QK_SIGMOID = 7, QK_XIELU = 8, /* qk_activation only */
    QK_SOFTPLUS = 10,
    QK_CLAMPED_SWIGLU = 9 /* always gated: gate * sigmoid(1.702 gate) * (up + 1), the gate at most 7, up between -7 and 7 */
};

/* -- context: instruction set, threads, scratch memory. One thread at a time may use a context. ----------------------- */

typedef struct qk_context qk_context;

QK_EXPORT int32_t qk_abi_version(void);
/* Bytes of the n-th argument struct below, in the order of this file; 0 past the last. */
QK_EXPORT int64_t qk_struct_size(int32_t n);
/* Name of the n-th instruction set this library can run on this CPU, the best first; NULL past the last. */
QK_EXPORT const char* qk_instruction_set(int32_t n);
/* NULL if the CPU lacks the instruction set. `num_threads` counts the calling thread. */
QK_EXPORT qk_context* qk_create(int32_t num_threads, const char* instruction_set);
QK_EXPORT void qk_destroy(qk_context* context);

/* -- adapters: low-rank changes of linear layers ------------------------------------------------------------------------ */

/* A row with an adapter gets sums of x W^T + h B^T + bias, h = scale * (x A^T) being rounded to the type of x. h are float32 sums, and
 * what they give is added to the float32 sums of x W^T before all else. A row without adapter takes no part in any of it. */
typedef struct {
    int64_t num_h;       /* a multiple of 16 */
    int64_t block_bytes; /* from 16 h to the next in a */
    const void* a;       /* 16 h in each block, as outputs stand in packed weights: tile after tile */
    const void* b;       /* block after block of 16 outputs in the order of packed weights, each with the lines of its h */
    const float* scales; /* [num_h] */
    const float* bias;   /* [blocks, 16]; NULL for none */
    const int32_t* ranges; /* [blocks, 3]: a block's first h, its lines of 64 bytes, and where they begin in b, in lines */
} qk_low_rank;

typedef struct {
    /* Rows starts[i] to starts[i + 1] have the adapter slots[i], or none (-1), as those behind the last segment. */
    int64_t segments; /* 0: no row has an adapter */
    const int64_t* starts; /* [segments + 1], the first is 0 */
    const int32_t* slots;
} qk_adapter_batch;

/* Of one linear layer. Address and fields stay; what they point to may change between two calls. */
typedef struct {
    const qk_adapter_batch* batch;
    const qk_low_rank* const* by_slot; /* NULL: the adapter does not change this layer */
} qk_adapter_site;

typedef struct {
    int64_t n, k; /* outputs (of each half, if gated) and inputs of the layer */
    int32_t dtype; /* of a and b */
    int32_t gated;
    int64_t parts;
    const int64_t* sizes;  /* [parts] outputs of each, from top to bottom: n, or 2 n in all */
    const int64_t* ranks;  /* [parts]; 0: the part is not changed */
    const float* scales;   /* [parts] */
    const void* const* a;  /* [parts] of [rank, k]; NULL: `packed` is filled already */
    const void* const* b;  /* [parts] of [size, rank] */
    const float* const* biases; /* [parts] of [size], which get the scale, too; NULL for none */
    void* packed; /* at a multiple of 64 */
} qk_pack_low_rank_args;
/* Bytes of `packed`, which is not read. */
QK_EXPORT int64_t qk_low_rank_bytes(const qk_pack_low_rank_args* args);
/* Fills `packed`, and `low_rank`, which points into it. Any thread may call it. */
QK_EXPORT void qk_pack_low_rank(const qk_pack_low_rank_args* args, qk_low_rank* low_rank);

/* -- linear layers on packed weights ---------------------------------------------------------------------------------- */

/* Packed weights: blocks of 16 outputs, zero-padded, in tiles of 16 rows of 64 bytes; see linear.h. A gated matrix holds two
 * halves of n outputs each, block by block in turn. The layout is the same for every instruction set. */
QK_EXPORT int64_t qk_packed_bytes(int64_t n, int64_t k, int32_t dtype, int32_t gated);

typedef struct {
    int64_t n, k; /* outputs (of each half, if gated) and inputs */
    int32_t dtype;
    int32_t gated;
    const void* weights; /* n rows, or 2 n */
    int64_t stride, half_stride; /* elements from a row to the next of its half, and from the first half to the second */
    void* packed;
} qk_pack_args;
QK_EXPORT void qk_pack(qk_context* context, const qk_pack_args* args);
/* The inverse: writes `weights`. */
QK_EXPORT void qk_unpack(qk_context* context, const qk_pack_args* args);

typedef struct {
    /* y = activation((x W^T + bias) / divisor) + residual, or, gated, activation(first half) * second half. Sums are float32.
     * soft_cap: what is divided becomes soft_cap * tanh(it / soft_cap); 0 for none. clip: then it is cut to [-clip, clip]; 0 for
     * none. Divisor, soft_cap and clip are not for gated layers. */
    int64_t m, n, k;
    int32_t dtype; /* of x, weights, residual */
    int32_t out_dtype;
    int32_t gated;
    int32_t activation;
    float divisor, soft_cap, clip;
    int32_t reserved;
    const void* packed;
    const float* bias;    /* [n], or [2 n] if gated; NULL for none */
    const void* residual; /* [m, n]; NULL for none; may be y */
    int64_t residual_stride;
    const void* x; /* [m, k] */
    int64_t x_stride;
    void* y; /* [m, n] */
    int64_t y_stride;
    const qk_adapter_site* adapters; /* NULL for none */
} qk_linear_args;
QK_EXPORT void qk_linear(qk_context* context, const qk_linear_args* args);

typedef struct {
    /* A linear layer for each head: y[i, h] = x[i, h] W[h]^T. A copy of tail[i, h] follows it. */
    int64_t m, heads, n, k, tail_size;
    int32_t dtype;
    int32_t reserved;
    const void* packed; /* each head's matrix, as qk_pack makes it, after that of the head before */
    const void* x; /* [m, heads, k] */
    int64_t x_stride, x_head_stride;
    const void* tail; /* [m, heads, tail_size]; not read if that is 0 */
    int64_t tail_stride, tail_head_stride;
    void* y; /* [m, heads, n + tail_size] */
} qk_batched_linear_args;
QK_EXPORT void qk_batched_linear(qk_context* context, const qk_batched_linear_args* args);

/* -- linear layers on quantized weights -------------------------------------------------------------------------------- */

/* Int8 weights and inputs, each row of inputs quantized by its own maximum; or inputs as they are, and weights of 8 or 4 bits: integers,
 * e4m3 floats, or e2m1 floats with a power of two for each 32 inputs (MXFP4). */
enum { QK_W8A8 = 0, QK_W8 = 1, QK_W4 = 2, QK_E4M3 = 3, QK_MXFP4 = 4 };

/* Packed values: see quantized_layout.h. */
QK_EXPORT int64_t qk_quantized_bytes(int64_t n, int64_t k, int32_t form, int32_t gated);

typedef struct {
    int64_t n, k; /* outputs (of each half, if gated) and inputs */
    int32_t form;
    int32_t gated;
    const void* values; /* n rows of k bytes, or 2 n; QK_MXFP4: of k / 2 bytes, the first of two inputs in the low bits, k a multiple of 32 */
    int64_t stride, half_stride; /* bytes from a row to the next of its half, and from the first half to the second */
    void* packed;
} qk_pack_quantized_args;
QK_EXPORT void qk_pack_quantized(qk_context* context, const qk_pack_quantized_args* args);

typedef struct {
    /* What packed values stand for: weights (values - zeros) * scales. Outputs stand as in packed values: 64 to a panel, halves block by
     * block in turn, 0 where there is none. Of several matrices those of one follow those of another. */
    int32_t form;
    int32_t reserved;
    int64_t group_size; /* inputs that share a scale: a multiple of 32, or all */
    const float* scales; /* [panels, groups, 64]; NULL with QK_MXFP4 */
    const float* zeros;  /* [panels, groups, 64]; NULL for none; never with QK_W8A8 */
    const int32_t* corrections; /* QK_W8A8: [panels, 64], 128 times the sum of each output's values */
    const uint8_t* exponents; /* QK_MXFP4: [panels, k / 32, 64], what values are multiplied with is 2^(exponent - 127); 2 to 252 */
} qk_quantization;

typedef struct {
    qk_linear_args linear; /* `packed` holds values */
    qk_quantization quantization;
} qk_quantized_linear_args;
QK_EXPORT void qk_quantized_linear(qk_context* context, const qk_quantized_linear_args* args);

/* -- row by row ------------------------------------------------------------------------------------------------------- */

typedef struct {
    /* y = norm(x) * (offset + weight) + residual; see layers/norm.py for the two places of rounding. */
    int64_t rows, dim;
    int32_t dtype;
    int32_t scale_in_float32;
    float eps, offset;
    const void* weight; /* [dim] */
    const void* residual; /* NULL for none */
    int64_t residual_stride;
    const void* x;
    int64_t x_stride;
    void* y;
    int64_t y_stride;
} qk_rms_norm_args;
QK_EXPORT void qk_rms_norm(qk_context* context, const qk_rms_norm_args* args);

typedef struct {
    /* y = (x - mean) / sqrt(variance + eps) * weight + bias + residual, in float32, for each of the `groups` parts of a row by itself:
     * heads, or the whole row. */
    int64_t rows, groups, dim; /* elements of a part */
    int32_t dtype;
    float eps;
    const void* weight; /* [dim], or [groups, dim]; NULL for none */
    const void* bias;   /* like weight */
    int64_t weight_stride; /* between the weights, and the biases, of two groups; 0: they are the same */
    const void* residual; /* NULL for none */
    int64_t residual_stride;
    const void* x; /* [rows, groups * dim] */
    int64_t x_stride;
    void* y;
    int64_t y_stride;
} qk_layer_norm_args;
QK_EXPORT void qk_layer_norm(qk_context* context, const qk_layer_norm_args* args);

typedef struct {
    /* Heads of queries and keys, in place: an optional norm over each head, then the rotation of its first elements. */
    int64_t tokens;
    int32_t dtype, table_dtype;
    int32_t num_heads, num_kv_heads, head_size;
    int32_t rotary_half; /* pairs that turn; 0 for none */
    int32_t scale_in_float32;
    float eps, offset;
    const void* query_norm; /* [head_size]; NULL for none */
    const void* key_norm;
    const int64_t* positions; /* [tokens] rows of cos and sin */
    const void* cos; /* [..., rotary_half] */
    const void* sin;
    void* query; /* [tokens, num_heads * head_size] */
    int64_t query_stride;
    void* key;
    int64_t key_stride;
} qk_rotate_args;
QK_EXPORT void qk_rotate(qk_context* context, const qk_rotate_args* args);

typedef struct {
    /* y = activation(x) * factors + residual, or, gated, activation(x[:, :dim]) * x[:, dim:] + residual; rounded once, to out_dtype. */
    int64_t rows, dim;
    int32_t dtype; /* of x, factors, residual */
    int32_t out_dtype; /* dtype, or QK_FLOAT32 */
    int32_t gated;
    int32_t activation;
    float positive, negative, slope, least; /* of QK_XIELU: vec_math.h */
    int64_t repeats;     /* an element of x is for so many adjacent ones of y: dim is a multiple; gated: 1 */
    const void* factors; /* [rows, dim]; NULL for none */
    int64_t factors_stride;
    const void* residual; /* [rows, dim]; NULL for none */
    int64_t residual_stride;
    const void* x; /* [rows, dim / repeats], or [rows, 2 dim] if gated */
    int64_t x_stride;
    void* y;
    int64_t y_stride;
} qk_activation_args;
QK_EXPORT void qk_activation(qk_context* context, const qk_activation_args* args);

typedef struct {
    /* Rows of a table, plain or packed. */
    int64_t rows, dim;
    int32_t dtype;
    int32_t packed;
    const void* table;
    const int64_t* ids;
    void* y; /* [rows, dim] */
    const qk_adapter_site* adapters; /* of a layer whose inputs are 1 at a row's id and 0 elsewhere; NULL for none */
    int64_t first, count; /* the table holds `count` rows, and the first of them has this id; rows of y for other ids stay as they are.
                           * count 0: all ids */
} qk_gather_args;
QK_EXPORT void qk_gather(qk_context* context, const qk_gather_args* args);

/* -- barriers: workers that compute a step together, each in a process of its own ----------------------------------------- */

enum { QK_BARRIER_ABORTED = 1, QK_BARRIER_LATE = 2 };

typedef struct {
    /* `words` is memory that all of them share, zeroes at first: a cache line whose first int32 is set to 1 by one that sees another
     * fail (the abort word); then a line for each rank: int32 generation, int32 sleepers, int64 barriers, int64 nanoseconds waited. */
    int32_t rank, size;
    int64_t spin_ns;    /* time to look before sleeping */
    int64_t timeout_ms;
    void* words;
} qk_barrier_args;
/* Returns once all ranks have called it as often as this one: 0. All they wrote before is visible then. QK_BARRIER_ABORTED if the
 * abort word is set, QK_BARRIER_LATE after the timeout. May be recorded. */
QK_EXPORT int32_t qk_barrier(qk_context* context, const qk_barrier_args* args);

/* -- mixture of experts ------------------------------------------------------------------------------------------------- */

/* Scores of experts: of all a softmax; of each a sigmoid; or of each choice a softmax of its own (qk_route_args.threshold). */
enum { QK_SCORE_SOFTMAX = 0, QK_SCORE_SIGMOID = 1, QK_SCORE_SPARSEMIXER = 2 };

typedef struct {
    /* Chooses the experts with the largest score + bias, the largest first, of equal ones the first. Groups: of `groups` groups of adjacent
     * experts only those of the `kept_groups` best are chosen from. A weight is the score of what was chosen (without the bias),
     * if `normalize` is set divided by max(norm_min, their sum) + norm_eps; times factor, times the expert's scale. */
    int64_t tokens;
    int32_t num_experts, chosen;
    int32_t score;
    int32_t normalize;
    int32_t groups, kept_groups; /* 1, 1: none. Kept groups hold `chosen` experts or more */
    int32_t group_by_two;  /* a group is as good as the sum of its two best; else as its best */
    int32_t round_to_bf16; /* round weights to bfloat16 at the end, still stored as float32 */
    float norm_eps, norm_min, factor;
    float threshold; /* QK_SCORE_SPARSEMIXER: a softmax over those not chosen yet that are below the best by no more than this
                      * share of the larger of the best and the logit's magnitude */
    const float* choice_bias;  /* [num_experts]; NULL for none */
    const float* expert_scale; /* [num_experts]; NULL for none */
    const float* logits;       /* [tokens, num_experts] */
    int64_t* ids;              /* [tokens, chosen] */
    float* weights;            /* [tokens, chosen] */
} qk_route_args;
QK_EXPORT void qk_route(qk_context* context, const qk_route_args* args);

typedef struct {
    /* The tokens of a step of several engines that share experts. A run of a plan reads it again. */
    int64_t tokens, first;           /* of all engines, and the number of this engine's first */
    const qk_barrier_args* barrier;  /* of all engines; NULL: this one is alone, and the answers of others' experts are zeroes */
} qk_pool_step;

typedef struct {
    /* Experts that several engines share: each has some, whole, and computes those for the tokens of all, in memory that all map. An engine
     * writes inputs when all have passed the second barrier of the call before, and answers when all have passed the first of this call. */
    const qk_pool_step* step;
    void* inputs;     /* [tokens of all, hidden] */
    int64_t* choices; /* [tokens of all, chosen] */
    float* answers;   /* [tokens of all * chosen, hidden]: rows by expert */
} qk_experts_pool;

/* What a call of qk_experts does: the first matrices, the second ones, the sums. */
enum { QK_EXPERTS_BETWEEN = 1, QK_EXPERTS_ANSWERS = 2, QK_EXPERTS_SUMS = 4 };

typedef struct {
    /* y = residual + shared + the sum over a token's experts, in the order of `ids`, of weight * down(activation(gate(x)) * up(x)).
     * What the experts answer is kept in float32 and rounded once, with the residual.
     * Several workers may share it, in several calls with a barrier between them. Either each has some outputs of every matrix, and
     * all write and read `between`; or each has whole experts, and all write and read `answers`. */
    int64_t tokens, hidden, expert_size;
    int32_t dtype;
    int32_t num_experts, chosen;
    int32_t activation;
    int32_t scale_inputs; /* an expert gets weight * x, rounded, and its answer has weight 1 */
    int32_t steps; /* QK_EXPERTS_*, added */
    const void* gate_up;  /* packed, gated, one expert after another */
    const void* down;     /* packed, one expert after another */
    const qk_quantization* gate_up_quantization; /* of all experts: `gate_up` holds values; NULL: it holds weights */
    const qk_quantization* down_quantization;
    const float* gate_up_bias; /* [num_experts, 2 * expert_size]; NULL for none */
    const float* down_bias;    /* [num_experts, hidden]; NULL for none */
    const qk_adapter_site* gate_up_adapters; /* by_slot: [slots, num_experts]; the batch is of tokens; both NULL for none */
    const qk_adapter_site* down_adapters;
    const int64_t* ids;   /* [tokens, chosen], each below num_experts */
    const float* weights; /* [tokens, chosen] */
    const void* shared;   /* [tokens, hidden], what other experts answered, like the residual; NULL for none */
    int64_t shared_stride;
    const void* residual; /* [tokens, hidden]; NULL for none; may be y */
    int64_t residual_stride;
    const void* x; /* [tokens, hidden] */
    int64_t x_stride;
    void* y; /* [tokens, hidden] */
    int64_t y_stride;
    int64_t inner_start, inner; /* outputs of gate_up that this worker has: expert_size of them if it has all */
    int64_t outputs;            /* of down: hidden if it has all; y, residual and shared have as many columns */
    void* between; /* [tokens * chosen, between_stride]: rows by expert; NULL: private memory */
    int64_t between_stride; /* expert_size, rounded up to a multiple of 64 */
    float* answers; /* [tokens * chosen, hidden]: rows by expert; NULL: private memory */
    const int32_t* places; /* [num_experts] order of the experts, in which a worker's are adjacent; NULL: their numbers */
    int32_t first_expert, own_experts; /* places of the experts whose matrices there are */
    const qk_experts_pool* pool; /* all steps in one call, without `scale_inputs`, `between` and `answers`; the adapters' batch is of the
                                  * tokens of all engines. NULL: the experts are not shared by engines */
} qk_experts_args;
/* Returns 0, or with a pool what its barriers return. */
QK_EXPORT int32_t qk_experts(qk_context* context, const qk_experts_args* args);

/* -- attention -------------------------------------------------------------------------------------------------------- */

typedef struct {
    /* Stores the keys and values of a step in the paged cache, then attends. A layer's cache is keys, then values, each
     * [num_blocks, num_kv_heads, page], a page holding block_size * head_size elements in the order of attention.h. Without
     * `key` nothing is stored: another layer of the step stored it. */
    int64_t num_tokens, num_reqs;
    int32_t dtype;
    int32_t num_heads, num_kv_heads, head_size, block_size;
    int32_t window; /* keys a query sees up to its own; 0 for all */
    int32_t ahead;  /* keys after its own that it sees, too; -1 for all. Not 0: the step holds whole sequences */
    float scale, soft_cap; /* soft_cap 0: none */
    const float* sinks; /* [num_heads]; NULL for none */
    const int64_t* query_lens; /* [num_reqs] */
    const int64_t* seq_lens;
    const int32_t* block_table; /* [num_reqs, ...] */
    int64_t block_table_stride;
    const int64_t* slots; /* [num_tokens] */
    const void* query; /* [num_tokens, num_heads * head_size] */
    int64_t query_stride;
    const void* key;
    int64_t key_stride;
    const void* value;
    int64_t value_stride;
    void* key_cache;
    void* value_cache;
    void* y; /* [num_tokens, num_heads * head_size, or latent_size] */
    int64_t y_stride;
    const float* slopes;  /* [num_heads]: a score grows by slope * (key's position - query's); NULL for none */
    int64_t chunk;        /* a query sees keys of its own stretch of so many positions only; 0 for all */
    int64_t growth_length, growth_offset; /* scale is multiplied by 1 + growth * ln(1 + floor((position + offset) / length)); */
    float growth;                         /* 0: it is not */
    int32_t latent_size;  /* values are the first so many elements of keys, and there is no value_cache; 0: they are stored */
    int64_t block_stride; /* elements from one block to the next, in either cache; 0: a block follows the one before it */
} qk_attention_args;
QK_EXPORT void qk_attention(qk_context* context, const qk_attention_args* args);

/* -- plans: the calls of a step, recorded once, run many times --------------------------------------------------------- */

typedef struct {
    int64_t num_tokens;
    const int64_t* ids;       /* [num_tokens] */
    const int64_t* positions; /* [num_tokens] */
    int64_t num_batches;
    const qk_attention_args* const* batches; /* of each group of layers that share a block table: what of its arguments is the batch's */
} qk_step_args;

typedef struct qk_plan qk_plan;

/* From here to qk_end_plan kernels are not run, but recorded. `example` is what they are called for; it names ids, positions and
 * batches (by their slots) by address. A run may have as many tokens, or fewer. Results go where the recorded calls put them. */
QK_EXPORT qk_plan* qk_begin_plan(qk_context* context, const qk_step_args* example);
/* 0 if some call was not for each token, or for other ids, positions or batches: such a plan must not be run. */
QK_EXPORT int32_t qk_end_plan(qk_context* context);
/* 0, or what a barrier of the plan returned: then the calls after it were not run. */
QK_EXPORT int32_t qk_run_plan(qk_context* context, qk_plan* plan, const qk_step_args* step);
QK_EXPORT void qk_destroy_plan(qk_plan* plan);

/* -- from logits to tokens -------------------------------------------------------------------------------------------- */

typedef struct {
    /* One token per row. Equal logits are equally good: filters keep or drop them together, and only the greedy choice, the
     * first of them, prefers one. A NaN is never chosen; a row without a finite largest logit gives some token or other.
     *
     * A token's weight is e^((logit - largest) / temperature), or 0 where that is below e^-87. Of the tokens with
     * weight >= min_p, then of the top_k largest, then of the fewest largest that have together top_p of what is left, one is
     * drawn: the first at which the sum of the weights, in the order of ids, exceeds u times their total. u is philox.h's
     * number of (seed, index). */
    int64_t rows, vocab;
    const float* logits; /* [rows, vocab] */
    int64_t stride;
    const float* temperature; /* [rows], 0: greedy; NULL: all are, and what follows is not read */
    const float* min_p;       /* [rows], 0: off */
    const int64_t* top_k;     /* 0: off */
    const float* top_p;       /* 1: off */
    const uint64_t* seeds;
    const int64_t* indices;
    int64_t* token_ids; /* [rows] */
} qk_sample_args;
QK_EXPORT void qk_sample(qk_context* context, const qk_sample_args* args);

typedef struct {
    /* Per row: the log-probabilities of one selected token and of the num_top most likely, likeliest first, the smaller id
     * first among equals; how many tokens are likelier than the selected one, plus one; and what to subtract from a logit to
     * get any other. */
    int64_t rows, vocab, num_top;
    const float* logits;
    int64_t stride;
    const int64_t* which;    /* [rows]: which row of `logits` each is */
    const int64_t* selected; /* [rows] */
    int64_t* token_ids;      /* [rows, 1 + num_top] */
    float* logprobs;         /* [rows, 1 + num_top] */
    int64_t* ranks;          /* [rows] */
    double* log_totals;      /* [rows] */
} qk_logprobs_args;
QK_EXPORT void qk_logprobs(qk_context* context, const qk_logprobs_args* args);

/* -- where the last tokens of a text occurred before, for drafts ---------------------------------------------------------- */

/* Returns how many of the last tokens, at most `longest` (below n), stand together earlier in the n tokens; *end: the token after them,
 * of several places with as many the latest. 0: the last token does not occur before. */
QK_EXPORT int64_t qk_find_match(const int32_t* tokens, int64_t n, int64_t longest, int64_t* end);

/* -- suffix indexes: which tokens followed which in texts, for drafts ---------------------------------------------------- */

/* A store of indexes in at most `max_bytes` of memory. An index counts the strings of up to `depth` tokens (2 or more) in its texts.
 * One thread at a time may use a store. */
typedef struct qk_suffix qk_suffix;

/* NULL if there is no such memory. */
QK_EXPORT qk_suffix* qk_suffix_create(int32_t depth, int64_t max_bytes);
QK_EXPORT void qk_suffix_destroy(qk_suffix* suffix);
/* Memory that is taken; what is given back is used again, and still counted. */
QK_EXPORT int64_t qk_suffix_bytes(const qk_suffix* suffix);
/* Nodes in use. */
QK_EXPORT int64_t qk_suffix_nodes(const qk_suffix* suffix);
/* A new, empty index; -1 if memory is full. */
QK_EXPORT int32_t qk_suffix_open(qk_suffix* suffix);
QK_EXPORT void qk_suffix_close(qk_suffix* suffix, int32_t index);
/* Appends tokens (0 or more each) to the last text; returns how many, fewer than n if memory is full. */
QK_EXPORT int64_t qk_suffix_extend(qk_suffix* suffix, int32_t index, const int32_t* tokens, int64_t n);
/* Ends the last text: the next token begins another. 0 if memory is full. */
QK_EXPORT int32_t qk_suffix_end(qk_suffix* suffix, int32_t index);
/* Forgets the first text, which must have ended. */
QK_EXPORT void qk_suffix_drop_first(qk_suffix* suffix, int32_t index);
/* What may follow `context` (NULL: the last text), returned as how many tokens. Each is what followed the longest suffix, below `depth`
 * tokens, of all before it most often, of equals what did so last. At most max_drafts, and factor times the length of the first suffix;
 * none whose probability, the product of shares of occurrences up to it, is below the least. score: the sum of these products.
 * confidences: 4 * min(3, log2 of the suffix' length) + 0 to 3 for a share, of which once in one is the middle. */
QK_EXPORT int32_t qk_suffix_propose(qk_suffix* suffix, int32_t index, const int32_t* context, int64_t n, int32_t max_drafts,
                                    double factor, double min_probability, int32_t* token_ids, int32_t* confidences, double* score);

/* -- the machine's ceilings, for benchmarks ----------------------------------------------------------------------------- */

/* Reads `bytes` (a multiple of 65536) once. */
QK_EXPORT void qk_read_memory(qk_context* context, const void* memory, int64_t bytes);
/* Multiplies in registers; returns how many floating-point operations that was. */
QK_EXPORT int64_t qk_multiply_bf16(qk_context* context, int64_t rounds);

#ifdef __cplusplus
}
#endif
#endif
