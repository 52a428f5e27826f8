// The paged KV cache of a layer, and how attention is cut into pieces.
//
// A page holds block_size tokens of one key/value head. Where block_size and head_size are multiples of 16 it is tiled: keys
// as the weights of a matrix (layout.h: rows of 64 bytes, 16 keys by `step` elements of the head), values with `step`
// consecutive keys side by side for each element of the head. Values that are the first elements of keys (latent_size) have no
// pages: their tiles are made in scratch memory as keys are read. Otherwise a page is simply [block_size, head_size], and is tiled
// in scratch memory as it is read: slower, the same bits.
//
// Keys are taken in chunks of CHUNK at fixed absolute positions. Each chunk gives a maximum, a sum and a weighted sum of
// values; chunks are merged in order. So a query's result depends on its own position and on nothing else: not on the tile
// it is computed in, nor on which chunks other threads take.
#pragma once

#include <cmath>

#include "context.h"
#include "layout.h"
#include "vec_math.h"

namespace QK_ISA {

constexpr int64_t CHUNK = 256;           // keys
constexpr int64_t KEYS = 16;             // keys in a group: the lanes of a register
constexpr int64_t GROUPS = CHUNK / KEYS;

// One layer's cache for elements of D.
template <class D>
struct Pages {
    using E = typename D::E;
    const qk_attention_args& a;

    bool latent() const { return a.latent_size != 0; }  // values are parts of keys
    int64_t value_size() const { return latent() ? a.latent_size : a.head_size; }
    int64_t padded_key() const { return qk::ceil_div(a.head_size, 16) * 16; }
    int64_t padded_value() const { return qk::ceil_div(value_size(), 16) * 16; }
    bool tiled() const { return a.block_size % KEYS == 0 && a.head_size % 16 == 0 && value_size() % 16 == 0; }
    int64_t page_elements() const { return int64_t(a.block_size) * a.head_size; }
    int64_t block_stride() const { return a.block_stride ? a.block_stride : a.num_kv_heads * page_elements(); }
    E* page(void* cache, int64_t block, int64_t kv_head) const {
        return (E*)cache + block * block_stride() + kv_head * page_elements();
    }
    // Elements of a tiled group of 16 keys, or values.
    int64_t key_group() const { return KEYS * padded_key(); }
    int64_t value_group() const { return KEYS * padded_value(); }

    void store_token(int64_t token) const {
        const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
        for (int64_t head = 0; head < a.num_kv_heads; ++head) {
            const E* key = (const E*)a.key + token * a.key_stride + head * a.head_size;
            E* keys = page(a.key_cache, block, head);
            if (tiled())
                put_key(keys + offset / KEYS * key_group(), offset % KEYS, key);
            else
                memcpy(keys + offset * a.head_size, key, size_t(a.head_size) * sizeof(E));
            if (latent()) continue;
            const E* value = (const E*)a.value + token * a.value_stride + head * a.head_size;
            E* values = page(a.value_cache, block, head);
            if (!tiled()) {
                memcpy(values + offset * a.head_size, value, size_t(a.head_size) * sizeof(E));
                continue;
            }
            E* group = values + offset / KEYS * value_group();
            put_value(group, offset % KEYS, value, a.head_size);
            // Values are read `step` keys at a time. One that is not there yet may hold anything; zero it, unless it is
            // being written right now.
            const bool is_alone = token + 1 == a.num_tokens || a.slots[token + 1] != a.slots[token] + 1;
            if (D::step == 2 && offset % 2 == 0 && is_alone) clear_value(group, offset % KEYS + 1, a.head_size);
        }
    }

    void put_key(E* group, int64_t lane, const E* key) const {
        for (int64_t i = 0; i < a.head_size; i += D::step)
            memcpy(group + i * KEYS + lane * D::step, key + i, D::step * sizeof(E));
    }
    void put_value(E* group, int64_t lane, const E* value, int64_t row_size) const {
        E* row = group + lane / D::step * row_size * D::step + lane % D::step;
        for (int64_t i = 0; i < value_size(); ++i) row[i * D::step] = value[i];
    }
    void clear_value(E* group, int64_t lane, int64_t row_size) const {
        E* row = group + lane / D::step * row_size * D::step + lane % D::step;
        for (int64_t i = 0; i < value_size(); ++i) row[i * D::step] = 0;
    }
    // Makes the values of a tiled group of keys that holds both. Of `count` keys; those past them become zeros.
    void take_values(E* values, const E* keys, int64_t count) const {
        const int64_t size = value_size();
        if (D::step == 1) {
            for (int64_t i = 0; i < size; ++i)
                for (int64_t lane = 0; lane < KEYS; ++lane) values[lane * size + i] = keys[i * KEYS + lane];
        } else {  // four elements at a time: two keys beside each other, two elements of each
            for (int64_t i = 0; i < size; i += 2)
                for (int64_t lane = 0; lane < KEYS; lane += 2) {
                    uint64_t four;
                    memcpy(&four, keys + i * KEYS + lane * 2, 8);
                    four = (four & 0xffff00000000ffffu) | (four >> 16 & 0xffff0000u) | (four & 0xffff0000u) << 16;
                    memcpy(values + lane * size + i * 2, &four, 8);
                }
        }
        for (int64_t lane = count; lane < KEYS; ++lane) clear_value(values, lane, size);
    }
};

// The keys and values of one chunk as groups of 16, for one request and key/value head.
template <class D>
struct ChunkView {
    using E = typename D::E;
    const E* keys[GROUPS];
    const E* values[GROUPS];
    int64_t first_group, num_groups;
    int64_t last_rows;  // of values in the last group, `step` keys each: what is past them was not written

    // Positions [low, end) of the chunk at `start`. Values of other slots are never used: they may be
    // unwritten, or another request's. `scratch` has room for CHUNK keys and values. Values that are parts of tiled keys
    // are not made: see take_values.
    void open(const Pages<D>& pages, const int32_t* table, int64_t kv_head, int64_t start, int64_t low, int64_t end,
              E* scratch) {
        first_group = low > start ? (low - start) / KEYS : 0;
        num_groups = qk::ceil_div(end - start, KEYS);
        last_rows = qk::ceil_div(end - start - (num_groups - 1) * KEYS, D::step);
        if (pages.tiled())
            open_tiled(pages, table, kv_head, start, scratch);
        else
            open_plain(pages, table, kv_head, start, low, end, scratch);
        for (int64_t g = num_groups; g % D::tile_blocks; ++g) {  // computed, never used
            keys[g] = keys[num_groups - 1];
            values[g] = values[num_groups - 1];
        }
    }

    // Makes the values of tiled keys that hold them, in the scratch memory of `open`. `end` as there.
    void take_values(const Pages<D>& pages, int64_t start, int64_t end, E* scratch) {
        for (int64_t g = first_group; g < num_groups; ++g) {
            const int64_t left = end - start - g * KEYS;
            pages.take_values(scratch + g * pages.value_group(), keys[g], left < KEYS ? left : KEYS);
        }
    }

    // Replaces the values of a last group that has not all of its keys by a copy with zeros, in the scratch memory of `open`.
    void complete(const Pages<D>& pages, E* scratch) {
        const int64_t rows = KEYS / D::step;
        if (last_rows == rows || !pages.tiled() || pages.latent()) return;  // zeros are there
        const int64_t row_elements = pages.padded_value() * D::step;
        memcpy(scratch, values[num_groups - 1], size_t(last_rows * row_elements) * sizeof(E));
        memset(scratch + last_rows * row_elements, 0, size_t((rows - last_rows) * row_elements) * sizeof(E));
        values[num_groups - 1] = scratch;
    }

  private:
    void open_tiled(const Pages<D>& pages, const int32_t* table, int64_t kv_head, int64_t start, E* scratch) {
        const qk_attention_args& a = pages.a;
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t position = start + g * KEYS, block = table[position / a.block_size];
            const int64_t within = position % a.block_size / KEYS * pages.key_group();
            keys[g] = pages.page(a.key_cache, block, kv_head) + within;
            values[g] = pages.latent() ? scratch + g * pages.value_group() : pages.page(a.value_cache, block, kv_head) + within;
        }
    }

    void open_plain(const Pages<D>& pages, const int32_t* table, int64_t kv_head, int64_t start, int64_t low, int64_t end,
                    E* scratch) {
        const qk_attention_args& a = pages.a;
        const int64_t elements = pages.key_group() + pages.value_group();
        memset(scratch, 0, size_t(num_groups * elements) * sizeof(E));
        for (int64_t g = 0; g < num_groups; ++g) {
            E* key_group = scratch + g * elements;
            E* value_group = key_group + pages.key_group();
            keys[g] = key_group;
            values[g] = value_group;
            for (int64_t lane = 0; lane < KEYS; ++lane) {
                const int64_t position = start + g * KEYS + lane, offset = position % a.block_size * a.head_size;
                if (position < low || position >= end) continue;
                const int64_t block = table[position / a.block_size];
                const E* key = pages.page(a.key_cache, block, kv_head) + offset;
                const E* value = pages.latent() ? key : pages.page(a.value_cache, block, kv_head) + offset;
                pages.put_key(key_group, lane, key);
                pages.put_value(value_group, lane, value, pages.padded_value());
            }
        }
    }
};

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

// `Products` computes what has most of the operations (attention.cpp with vectors, attention_amx.cpp with tiles), for one thread:
//   score(view, queries, size, rows, scores)                  scores [rows, CHUNK] of queries [rows, size] and the keys of `view`
//   accumulate(view, next_keys, weights, rows, width, sums)   sums [rows, width] of its values, weighted; next_keys may be fetched
// WHOLE_GROUPS: `accumulate` reads all 16 values of a group, so those that were not written must be zeros.
// TILE_QUERIES: rows (a query token times a head of its group) that share what is read of a chunk.
template <class D, class Products>
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
            Products products;
            Tile next = find_tile(begin, request);
            for (int64_t item = begin; item < end; ++item) {
                const Tile tile = next;
                if (item + 1 < end) next = find_tile(item + 1, request);
                compute(tile, next, products, thread);
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
    static constexpr int64_t TILE_QUERIES = Products::TILE_QUERIES;
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
    void compute(const Tile& tile, const Tile& next, Products& products, int thread) {
        const int64_t rows = tile.num_tokens * group_;
        // [rows, CHUNK] scores and weights, [rows, width] chunk sums and sums, [rows] states, the queries, a chunk's groups of
        // keys and values
        const size_t floats = size_t(rows * (CHUNK + 2 * width_ + 4));
        const size_t elements = size_t(rows * (CHUNK + pages_.padded_key()) + CHUNK * (pages_.padded_key() + width_));
        float* scores = (float*)context_.thread_scratch(thread, floats * sizeof(float) + elements * sizeof(E));
        float* chunk_sums = scores + rows * CHUNK;
        float* sums = chunk_sums + rows * width_;
        State* chunk_states = (State*)(sums + rows * width_);
        State* states = chunk_states + rows;
        E* weights = (E*)(states + rows);
        E* queries = weights + rows * CHUNK;
        E* chunk_scratch = queries + rows * pages_.padded_key();

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
            if (Products::WHOLE_GROUPS) view.complete(pages_, chunk_scratch);
            products.score(view, queries, pages_.padded_key(), rows, scores);
            for (int64_t r = 0; r < rows; ++r)
                chunk_states[r] = weigh(tile.request, tile.kv_head * group_ + r % group_, tile.position + r / group_, start, view,
                                        scores + r * CHUNK, weights + r * CHUNK);
            products.accumulate(view, next_keys, weights, rows, width_, chunk_sums);
            if (tile.partial) return leave_partial(tile.partial, chunk_states, chunk_sums);
            for (int64_t r = 0; r < rows; ++r)
                merge(states[r], sums + r * width_, chunk_states[r], chunk_sums + r * width_, width_);
        }
        for (int64_t r = 0; r < rows; ++r)
            finish_row(tile.first_row + r / group_, tile.kv_head * group_ + r % group_, states[r], sums + r * width_);
    }

    // Rows are padded with zeros to whole groups of 16 elements.
    void gather_queries(const Tile& tile, E* queries) const {
        const int64_t size = a_.head_size, padded = pages_.padded_key();
        for (int64_t r = 0; r < tile.num_tokens * group_; ++r, queries += padded) {
            const int64_t head = tile.kv_head * group_ + r % group_;
            memcpy(queries, (const E*)a_.query + (tile.first_row + r / group_) * a_.query_stride + head * size, size_t(size) * sizeof(E));
            memset(queries + size, 0, size_t(padded - size) * sizeof(E));
        }
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

}  // namespace QK_ISA
