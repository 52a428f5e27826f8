// The paged KV cache of a layer, and how attention is cut into pieces.
//
// A page holds block_size tokens of one key/value head. Where block_size and head_size are multiples of 16 it is tiled: keys
// as the weights of a matrix (layout.h: rows of 64 bytes, 16 keys by `step` elements of the head), values with `step`
// consecutive keys side by side for each element of the head. Otherwise a page is simply [block_size, head_size], and is tiled
// in scratch memory as it is read: slower, the same bits.
//
// Keys are taken in chunks of CHUNK at fixed absolute positions. Each chunk gives a maximum, a sum and a weighted sum of
// values; chunks are merged in order. So a query's result depends on its own position and on nothing else: not on the tile
// it is computed in, nor on which chunks other threads take.
#pragma once

#include "context.h"
#include "layout.h"
#include "vec_math.h"

namespace QK_ISA {

constexpr int64_t CHUNK = 256;           // keys
constexpr int64_t KEYS = 16;             // keys in a group: the lanes of a register
constexpr int64_t GROUPS = CHUNK / KEYS;
constexpr int64_t TILE_QUERIES = 48;     // rows (a query token times a head of its group) that share what is read of a chunk

// One layer's cache for elements of D.
template <class D>
struct Pages {
    using E = typename D::E;
    const qk_attention_args& a;

    int64_t padded_head() const { return qk::ceil_div(a.head_size, 16) * 16; }
    bool tiled() const { return a.block_size % KEYS == 0 && a.head_size % 16 == 0; }
    int64_t page_elements() const { return int64_t(a.block_size) * a.head_size; }
    E* page(void* cache, int64_t block, int64_t kv_head) const {
        return (E*)cache + (block * a.num_kv_heads + kv_head) * page_elements();
    }
    // Elements of a tiled group of 16 keys, or values.
    int64_t group_elements() const { return KEYS * padded_head(); }

    void store_token(int64_t token) const {
        const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
        for (int64_t head = 0; head < a.num_kv_heads; ++head) {
            const E* key = (const E*)a.key + token * a.key_stride + head * a.head_size;
            const E* value = (const E*)a.value + token * a.value_stride + head * a.head_size;
            E* keys = page(a.key_cache, block, head);
            E* values = page(a.value_cache, block, head);
            if (!tiled()) {
                memcpy(keys + offset * a.head_size, key, size_t(a.head_size) * sizeof(E));
                memcpy(values + offset * a.head_size, value, size_t(a.head_size) * sizeof(E));
                continue;
            }
            put_key(keys + offset / KEYS * group_elements(), offset % KEYS, key);
            E* group = values + offset / KEYS * group_elements();
            put_value(group, offset % KEYS, value, a.head_size);
            // Values are read `step` keys at a time. One that is not there yet may hold anything; zero it, unless it is
            // being written right now.
            const bool is_alone = token + 1 == a.num_tokens || a.slots[token + 1] != a.slots[token] + 1;
            if (D::step == 2 && offset % 2 == 0 && is_alone) clear_value(group, offset % KEYS + 1);
        }
    }

    void put_key(E* group, int64_t lane, const E* key) const {
        for (int64_t i = 0; i < a.head_size; i += D::step)
            memcpy(group + i * KEYS + lane * D::step, key + i, D::step * sizeof(E));
    }
    void put_value(E* group, int64_t lane, const E* value, int64_t row_size) const {
        E* row = group + lane / D::step * row_size * D::step + lane % D::step;
        for (int64_t i = 0; i < a.head_size; ++i) row[i * D::step] = value[i];
    }
    void clear_value(E* group, int64_t lane) const {
        E* row = group + lane / D::step * a.head_size * D::step + lane % D::step;
        for (int64_t i = 0; i < a.head_size; ++i) row[i * D::step] = 0;
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
    // unwritten, or another request's. `scratch` has room for 2 * CHUNK * padded_head() elements.
    void open(const Pages<D>& pages, const int32_t* table, int64_t kv_head, int64_t start, int64_t low, int64_t end,
              E* scratch) {
        first_group = low > start ? (low - start) / KEYS : 0;
        num_groups = qk::ceil_div(end - start, KEYS);
        last_rows = qk::ceil_div(end - start - (num_groups - 1) * KEYS, D::step);
        if (pages.tiled())
            open_tiled(pages, table, kv_head, start);
        else
            open_plain(pages, table, kv_head, start, low, end, scratch);
        for (int64_t g = num_groups; g % D::tile_blocks; ++g) {  // computed, never used
            keys[g] = keys[num_groups - 1];
            values[g] = values[num_groups - 1];
        }
    }

  private:
    void open_tiled(const Pages<D>& pages, const int32_t* table, int64_t kv_head, int64_t start) {
        const qk_attention_args& a = pages.a;
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t position = start + g * KEYS, block = table[position / a.block_size];
            const int64_t within = position % a.block_size / KEYS * pages.group_elements();
            keys[g] = pages.page(a.key_cache, block, kv_head) + within;
            values[g] = pages.page(a.value_cache, block, kv_head) + within;
        }
    }

    void open_plain(const Pages<D>& pages, const int32_t* table, int64_t kv_head, int64_t start, int64_t low, int64_t end,
                    E* scratch) {
        const qk_attention_args& a = pages.a;
        memset(scratch, 0, 2 * size_t(num_groups * pages.group_elements()) * sizeof(E));
        for (int64_t g = 0; g < num_groups; ++g) {
            E* key_group = scratch + 2 * g * pages.group_elements();
            E* value_group = key_group + pages.group_elements();
            keys[g] = key_group;
            values[g] = value_group;
            for (int64_t lane = 0; lane < KEYS; ++lane) {
                const int64_t position = start + g * KEYS + lane, offset = position % a.block_size * a.head_size;
                if (position < low || position >= end) continue;
                const int64_t block = table[position / a.block_size];
                pages.put_key(key_group, lane, pages.page(a.key_cache, block, kv_head) + offset);
                pages.put_value(value_group, lane, pages.page(a.value_cache, block, kv_head) + offset, pages.padded_head());
            }
        }
    }
};

}  // namespace QK_ISA
