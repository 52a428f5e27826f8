// Paged attention. See attention.h for what is computed in which order.
#include "attention.h"

#include <cmath>

#include "kernels.h"

namespace QK_ISA {
namespace {

// scores[ROWS][CHUNK] of D::tile_blocks groups of keys. A group of values has as many lines as one of keys, and is fetched
// meanwhile: pages lie anywhere in memory, where the processor would not guess them.
template <class D, int ROWS, bool FETCH>
__attribute__((noinline)) void multiply_keys(const typename D::E* q, int64_t head_size, const typename D::E* const* keys,
                                             const typename D::E* const* values, float* scores) {
    constexpr int BLOCKS = D::tile_blocks;
    F16 c[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) c[r][b] = zero();
    for (int64_t i = 0; i < head_size; i += D::step) {
        typename D::W w[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) {
            w[b] = D::weights(keys[b] + i * KEYS);
            if (FETCH) __builtin_prefetch(values[b] + i * KEYS, 0, 2);
        }
        for (int r = 0; r < ROWS; ++r) {
            const typename D::A input = D::broadcast(q + r * head_size + i);
            for (int b = 0; b < BLOCKS; ++b) c[r][b] = D::dot(c[r][b], input, w[b]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store_f32(scores + r * CHUNK + b * KEYS, c[r][b]);
}

// sums[ROWS][16 * BLOCKS of `width`] of the values of all groups, weighted. The keys that come next are fetched meanwhile.
template <class D, int ROWS, int BLOCKS, bool FETCH>
__attribute__((noinline)) void multiply_values(const typename D::E* weights, const ChunkView<D>& view,
                                               const typename D::E* const* next_keys, int64_t width, int64_t at, float* sums) {
    F16 c[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) c[r][b] = zero();
    for (int64_t g = view.first_group; g < view.num_groups; ++g) {
        const int64_t keys = g + 1 < view.num_groups ? KEYS : view.last_rows * D::step;
        for (int64_t i = 0; i < keys; i += D::step) {
            typename D::W w[BLOCKS];
            for (int b = 0; b < BLOCKS; ++b) {
                const int64_t offset = i * width + (at + 16 * b) * D::step;
                w[b] = D::weights(view.values[g] + offset);
                if (FETCH) __builtin_prefetch(next_keys[g] + offset, 0, 2);
            }
            for (int r = 0; r < ROWS; ++r) {
                const typename D::A input = D::broadcast(weights + r * CHUNK + g * KEYS + i);
                for (int b = 0; b < BLOCKS; ++b) c[r][b] = D::dot(c[r][b], input, w[b]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store_f32(sums + r * width + at + 16 * b, c[r][b]);
}

// Calls f(rows, first row) with a compile-time number of rows, until `rows` are done.
template <int MAX, class F>
QK_INLINE void in_groups_of_rows(int64_t rows, F f) {
    const int64_t group = qk::ceil_div(rows, qk::ceil_div(rows, int64_t(MAX)));
    for (int64_t r = 0; r < rows; r += group) f(r, r + group < rows ? group : rows - r);
}

// Calls a function whose template arguments are the number of rows and whether they are the first, which fetch for all.
#define QK_FOR_ROWS(count, is_first, call)                     \
    switch (is_first ? count : count + 8) {                    \
        case 1: call(1, true); break;                          \
        case 2: call(2, true); break;                          \
        case 3: call(3, true); break;                          \
        case 4: call(4, true); break;                          \
        case 5: call((D::tile_rows < 5 ? 1 : 5), true); break; \
        case 6: call((D::tile_rows < 6 ? 1 : 6), true); break; \
        case 9: call(1, false); break;                         \
        case 10: call(2, false); break;                        \
        case 11: call(3, false); break;                        \
        case 12: call(4, false); break;                        \
        case 13: call((D::tile_rows < 5 ? 1 : 5), false); break; \
        default: call((D::tile_rows < 6 ? 1 : 6), false); break; \
    }

constexpr float LOG2_E = 1.44269504f;
alignas(64) constexpr float LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// What is known of a row after some chunks: its answer so far is sums / total, both relative to 2^maximum.
struct State {
    float maximum, total;
};

// Adds a chunk to what came before it; the first is taken as it is.
QK_INLINE void merge(State& state, float* sums, const State& chunk, const float* chunk_sums, int64_t width) {
    if (chunk.maximum == -INFINITY) return;  // sees nothing of it
    if (state.maximum == -INFINITY) {
        state = chunk;
        memcpy(sums, chunk_sums, size_t(width) * sizeof(float));
        return;
    }
    const float maximum = state.maximum > chunk.maximum ? state.maximum : chunk.maximum;
    float factors[16] = {state.maximum - maximum, chunk.maximum - maximum};
    store_f32(factors, exp2(load_f32(factors)));
    const F16 before = set1(factors[0]), now = set1(factors[1]);
    state = {maximum, state.total * factors[0] + chunk.total * factors[1]};
    for (int64_t i = 0; i < width; i += 16)
        store_f32(sums + i, add(mul(load_f32(sums + i), before), mul(load_f32(chunk_sums + i), now)));
}

// Some queries of one request, for one key/value head: rows are (token, head of the group).
struct Tile {
    int64_t request, kv_head;
    int64_t first_row;     // of the flat batch
    int64_t position;      // of the first token
    int64_t num_tokens;
    int64_t first_chunk, end_chunk;  // to compute here
    float* partial;        // where to leave the state of a single chunk; nullptr to finish the tile
};

template <class D>
class Attention {
  public:
    using E = typename D::E;

    Attention(qk_context& context, const qk_attention_args& args)
        : context_(context), a_(args), pages_{args}, group_(args.num_heads / args.num_kv_heads), width_(pages_.padded_value()) {}

    void run() {
        auto store = [&](int64_t begin, int64_t end, int) {
            for (int64_t token = begin; token < end; ++token) pages_.store_token(token);
        };
        const int64_t token_elements = int64_t(a_.num_kv_heads) * a_.head_size;
        if (a_.key) context_.parallel(a_.num_tokens, token_elements < 4096 ? 4096 / token_elements : 1, store);

        plan();
        auto attend = [&](int64_t begin, int64_t end, int thread) {
            int64_t request = 0;
            Tile next = find_tile(begin, request);
            for (int64_t item = begin; item < end; ++item) {
                const Tile tile = next;
                if (item + 1 < end) next = find_tile(item + 1, request);
                compute(tile, next, thread);
            }
        };
        context_.parallel(items_[a_.num_reqs], 1, attend);

        if (!split_) return;
        auto finish = [&](int64_t begin, int64_t end, int thread) {
            for (int64_t item = begin; item < end; ++item) finish_split(item / a_.num_kv_heads, item % a_.num_kv_heads, thread);
        };
        context_.parallel(a_.num_reqs * a_.num_kv_heads, 1, finish);
    }

  private:
    int64_t tokens_per_tile() const { return group_ >= TILE_QUERIES ? 1 : TILE_QUERIES / group_; }
    int64_t partial_floats() const { return group_ * (width_ + 2); }
    int64_t first_key(int64_t position) const {
        if (a_.chunk) return position / a_.chunk * a_.chunk;
        return a_.window && position >= a_.window ? position - a_.window + 1 : 0;
    }
    float scale(int64_t position) const {
        if (a_.growth == 0.0f) return a_.scale;
        const int64_t times = (position + a_.growth_offset) / a_.growth_length;
        return a_.scale * (1.0f + a_.growth * std::log(float(1 + times)));
    }
    int64_t end_key(int64_t request, int64_t position) const {
        const int64_t end = position + 1 + a_.ahead, all = a_.seq_lens[request];
        return a_.ahead < 0 || end > all ? all : end;
    }
    int64_t chunks(int64_t request) const {  // that the only query of a request sees
        return qk::ceil_div(a_.seq_lens[request], CHUNK) - first_key(a_.seq_lens[request] - 1) / CHUNK;
    }

    // Counts the work of each request. With few requests that decode, their chunks are shared out among the threads.
    void plan() {
        int64_t tiles = 0, partials = 0;
        for (int64_t r = 0; r < a_.num_reqs; ++r) tiles += qk::ceil_div(a_.query_lens[r], tokens_per_tile());
        split_ = tiles * a_.num_kv_heads < 4 * context_.pool.num_threads() && context_.pool.num_threads() > 1;
        const size_t head = size_t(3 * (a_.num_reqs + 1)) * sizeof(int64_t);
        for (int64_t r = 0; split_ && r < a_.num_reqs; ++r)
            if (is_split(r)) partials += chunks(r) * a_.num_kv_heads;
        char* memory = (char*)context_.shared_scratch(head + size_t(partials * partial_floats()) * sizeof(float));
        items_ = (int64_t*)memory;
        starts_ = items_ + a_.num_reqs + 1;
        partials_ = starts_ + a_.num_reqs + 1;
        partial_memory_ = (float*)(memory + head);
        items_[0] = starts_[0] = partials_[0] = 0;
        for (int64_t r = 0; r < a_.num_reqs; ++r) {
            const int64_t pieces = is_split(r) ? chunks(r) : qk::ceil_div(a_.query_lens[r], tokens_per_tile());
            items_[r + 1] = items_[r] + pieces * a_.num_kv_heads;
            starts_[r + 1] = starts_[r] + a_.query_lens[r];
            partials_[r + 1] = partials_[r] + (is_split(r) ? pieces * a_.num_kv_heads : 0);
        }
    }
    bool is_split(int64_t request) const { return split_ && a_.query_lens[request] == 1 && chunks(request) > 1; }

    // Starts to search at `request`, and leaves there which one it is.
    Tile find_tile(int64_t item, int64_t& request) const {
        while (items_[request + 1] <= item) ++request;
        return make_tile(request, item - items_[request]);
    }

    Tile make_tile(int64_t request, int64_t item) const {
        const int64_t kv_head = item % a_.num_kv_heads, piece = item / a_.num_kv_heads;
        const int64_t first_position = a_.seq_lens[request] - a_.query_lens[request];
        if (is_split(request)) {
            const int64_t chunk = first_key(first_position) / CHUNK + piece;
            float* partial = partial_memory_ + (partials_[request] + item) * partial_floats();
            return {request, kv_head, starts_[request], first_position, 1, chunk, chunk + 1, partial};
        }
        const int64_t token = piece * tokens_per_tile(), left = a_.query_lens[request] - token;
        const int64_t count = left < tokens_per_tile() ? left : tokens_per_tile(), position = first_position + token;
        return {request, kv_head, starts_[request] + token, position, count, first_key(position) / CHUNK,
                qk::ceil_div(end_key(request, position + count - 1), CHUNK), nullptr};
    }

    // Where the keys end that some query of the tile sees in the chunk.
    int64_t end_of(const Tile& tile, int64_t chunk) const {
        const int64_t end = (chunk + 1) * CHUNK, last = end_key(tile.request, tile.position + tile.num_tokens - 1);
        return end < last ? end : last;
    }

    void open(ChunkView<D>& view, const Tile& tile, int64_t chunk, E* scratch) const {
        const int32_t* table = a_.block_table + tile.request * a_.block_table_stride;
        view.open(pages_, table, tile.kv_head, chunk * CHUNK, first_key(tile.position), end_of(tile, chunk), scratch);
    }

    // `next` is what this thread computes after it.
    void compute(const Tile& tile, const Tile& next, int thread) {
        const int64_t rows = tile.num_tokens * group_;
        // [rows, CHUNK] scores and weights, [rows, width] chunk sums and sums, [rows] states, the queries, a chunk's groups of
        // keys and values
        const size_t floats = size_t(rows * (CHUNK + 2 * width_ + 4));
        const size_t elements = size_t(rows * (CHUNK + a_.head_size) + CHUNK * (pages_.padded_key() + width_));
        float* scores = (float*)context_.thread_scratch(thread, floats * sizeof(float) + elements * sizeof(E));
        float* chunk_sums = scores + rows * CHUNK;
        float* sums = chunk_sums + rows * width_;
        State* chunk_states = (State*)(sums + rows * width_);
        State* states = chunk_states + rows;
        E* weights = (E*)(states + rows);
        E* queries = weights + rows * CHUNK;
        E* chunk_scratch = queries + rows * a_.head_size;

        gather_queries(tile, queries);
        for (int64_t r = 0; r < rows; ++r) states[r] = {-INFINITY, 0.0f};
        memset(sums, 0, size_t(rows * width_) * sizeof(float));
        ChunkView<D> view, ahead;
        for (int64_t chunk = tile.first_chunk; chunk < tile.end_chunk; ++chunk) {
            const int64_t start = chunk * CHUNK;
            open(view, tile, chunk, chunk_scratch);
            if (pages_.latent() && pages_.tiled()) view.take_values(pages_, start, end_of(tile, chunk), chunk_scratch);
            const E* const* next_keys = view.keys;
            if (pages_.tiled()) {
                const bool is_last = chunk + 1 == tile.end_chunk;
                open(ahead, is_last ? next : tile, is_last ? next.first_chunk : chunk + 1, chunk_scratch);
                for (int64_t g = ahead.num_groups; g < GROUPS; ++g) ahead.keys[g] = ahead.keys[ahead.num_groups - 1];
                next_keys = ahead.keys;
            }
            score(view, queries, rows, scores);
            for (int64_t r = 0; r < rows; ++r)
                chunk_states[r] = weigh(tile.request, tile.kv_head * group_ + r % group_, tile.position + r / group_, start, view,
                                        scores + r * CHUNK, weights + r * CHUNK);
            accumulate(view, next_keys, weights, rows, chunk_sums);
            if (tile.partial) return leave_partial(tile.partial, chunk_states, chunk_sums);
            for (int64_t r = 0; r < rows; ++r)
                merge(states[r], sums + r * width_, chunk_states[r], chunk_sums + r * width_, width_);
        }
        for (int64_t r = 0; r < rows; ++r)
            finish_row(tile.first_row + r / group_, tile.kv_head * group_ + r % group_, states[r], sums + r * width_);
    }

    void gather_queries(const Tile& tile, E* queries) const {
        const size_t bytes = size_t(group_ * a_.head_size) * sizeof(E);
        for (int64_t t = 0; t < tile.num_tokens; ++t)
            memcpy(queries + t * group_ * a_.head_size,
                   (const E*)a_.query + (tile.first_row + t) * a_.query_stride + tile.kv_head * group_ * a_.head_size, bytes);
    }

    void score(const ChunkView<D>& view, const E* queries, int64_t rows, float* scores) const {
        for (int64_t g = view.first_group / D::tile_blocks * D::tile_blocks; g < view.num_groups; g += D::tile_blocks)
            in_groups_of_rows<D::tile_rows>(rows, [&](int64_t r, int64_t count) {
                const E* q = queries + r * a_.head_size;
                float* to = scores + r * CHUNK + g * KEYS;
#define QK_CALL(n, fetch) multiply_keys<D, n, fetch>(q, a_.head_size, view.keys + g, view.values + g, to)
                QK_FOR_ROWS(count, r == 0, QK_CALL)
#undef QK_CALL
            });
    }

    // Turns a row's scores into weights relative to their maximum. Logarithms are to base 2.
    State weigh(int64_t request, int64_t head, int64_t position, int64_t start, const ChunkView<D>& view, float* scores,
                E* weights) const {
        const int64_t low = first_key(position) - start, high = end_key(request, position) - start;
        const int64_t first = low > view.first_group * KEYS ? low / KEYS : view.first_group;
        const int64_t end = high < view.num_groups * KEYS ? qk::ceil_div(high, KEYS) : view.num_groups;
        for (int64_t g = view.first_group; g < first && g < view.num_groups; ++g) store(weights + g * KEYS, zero());
        for (int64_t g = end < view.first_group ? view.first_group : end; g < view.num_groups; ++g)
            store(weights + g * KEYS, zero());
        if (first >= end) return {-INFINITY, 0.0f};

        float factor = scale(position) * LOG2_E;
        if (a_.soft_cap != 0.0f || a_.slopes) {
            for (int64_t g = first; g < end; ++g) {
                F16 s = mul(load_f32(scores + g * KEYS), set1(scale(position)));
                if (a_.soft_cap != 0.0f) s = soft_cap(s, a_.soft_cap);
                if (a_.slopes) s = fma(add(load_f32(LANES), set1(float(start + g * KEYS - position))), set1(a_.slopes[head]), s);
                store_f32(scores + g * KEYS, s);
            }
            factor = LOG2_E;
        }
        const auto is_whole = [&](int64_t g) { return g * KEYS >= low && (g + 1) * KEYS <= high; };
        F16 maximum = set1(-INFINITY);
        for (int64_t g = first; g < end; ++g) {
            const F16 s = load_f32(scores + g * KEYS);
            maximum = max(is_whole(g) ? s : select(visible(g, low, high), s, set1(-INFINITY)), maximum);
        }
        const float top = reduce_max(maximum) * factor;
        F16 total = zero();
        for (int64_t g = first; g < end; ++g) {
            F16 p = exp2(fma(load_f32(scores + g * KEYS), set1(factor), set1(-top)));
            if (!is_whole(g)) p = select(visible(g, low, high), p, zero());
            total = add(total, p);
            store(weights + g * KEYS, p);
        }
        return {top, reduce_add(total)};
    }
    static M16 visible(int64_t group, int64_t low, int64_t high) {
        const int64_t at = group * KEYS;
        const int64_t begin = low > at ? low - at : 0, end = high < at ? 0 : high - at;
        return lanes(begin > KEYS ? KEYS : int(begin), end > KEYS ? KEYS : int(end));
    }

    void accumulate(const ChunkView<D>& view, const E* const* next_keys, const E* weights, int64_t rows, float* sums) const {
        in_groups_of_rows<D::tile_rows>(rows, [&](int64_t r, int64_t count) {
            const E* from = weights + r * CHUNK;
            float* to = sums + r * width_;
            int64_t at = accumulate_blocks<D::tile_blocks>(view, next_keys, from, count, r == 0, 0, to);
            // Two at a time where a head of 32 or 96 leaves them: a block alone waits for each of its own sums.
            at = accumulate_blocks<(D::tile_blocks < 2 ? 1 : 2)>(view, next_keys, from, count, r == 0, at, to);
            accumulate_blocks<1>(view, next_keys, from, count, r == 0, at, to);
        });
    }

    // Whole groups of BLOCKS from element `at` of the head; where they end.
    template <int BLOCKS>
    int64_t accumulate_blocks(const ChunkView<D>& view, const E* const* next_keys, const E* weights, int64_t count,
                              bool is_first, int64_t at, float* sums) const {
#define QK_CALL(n, fetch) multiply_values<D, n, BLOCKS, fetch>(weights, view, next_keys, width_, at, sums)
        for (; at + 16 * BLOCKS <= width_; at += 16 * BLOCKS) QK_FOR_ROWS(count, is_first, QK_CALL)
#undef QK_CALL
        return at;
    }

    void leave_partial(float* partial, const State* states, const float* sums) const {
        memcpy(partial, states, size_t(group_) * sizeof(State));
        memcpy(partial + 2 * group_, sums, size_t(group_ * width_) * sizeof(float));
    }

    void finish_split(int64_t request, int64_t kv_head, int thread) {
        if (!is_split(request)) return;
        float* sums = (float*)context_.thread_scratch(thread, size_t(width_) * sizeof(float));
        for (int64_t r = 0; r < group_; ++r) {
            State state = {-INFINITY, 0.0f};
            memset(sums, 0, size_t(width_) * sizeof(float));
            for (int64_t piece = 0; piece < chunks(request); ++piece) {
                const float* partial =
                    partial_memory_ + (partials_[request] + piece * a_.num_kv_heads + kv_head) * partial_floats();
                State chunk;
                memcpy(&chunk, partial + 2 * r, sizeof(State));
                merge(state, sums, chunk, partial + 2 * group_ + r * width_, width_);
            }
            finish_row(starts_[request], kv_head * group_ + r, state, sums);
        }
    }

    void finish_row(int64_t row, int64_t head, State state, const float* sums) const {
        float scale = 1.0f;
        if (a_.sinks) {  // a key whose value is zero
            const float sink = a_.sinks[head] * LOG2_E, maximum = state.maximum > sink ? state.maximum : sink;
            float factors[16] = {state.maximum - maximum, sink - maximum};
            store_f32(factors, exp2(load_f32(factors)));
            scale = factors[0];
            state.total = state.total * scale + factors[1];
        }
        const int64_t size = pages_.value_size();
        E* y = (E*)a_.y + row * a_.y_stride + head * size;
        const F16 total = set1(state.total);
        for (int64_t i = 0; i < size; i += 16)
            store_n(y + i, div(mul(load_f32(sums + i), set1(scale)), total), int(size - i < 16 ? size - i : 16));
    }

    qk_context& context_;
    const qk_attention_args& a_;
    const Pages<D> pages_;
    const int64_t group_, width_;
    bool split_ = false;
    int64_t* items_ = nullptr;     // [num_reqs + 1] where each request's pieces of work start
    int64_t* starts_ = nullptr;    // [num_reqs + 1] where its tokens start
    int64_t* partials_ = nullptr;  // [num_reqs + 1] where the states of its chunks start
    float* partial_memory_ = nullptr;
};

}  // namespace

void attention(qk_context& context, const qk_attention_args& args) {
    if (args.dtype == QK_BFLOAT16)
        Attention<Bf16Dot>(context, args).run();
    else
        Attention<FloatDot>(context, args).run();
}

}  // namespace QK_ISA
