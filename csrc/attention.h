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

}  // namespace QK_ISA
