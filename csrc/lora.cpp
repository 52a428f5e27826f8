// Packing of adapters (lora.h), and waiting for their first half.
#include <sched.h>

#include <cstring>

#include "context.h"
#include "layout.h"

namespace qk {

void await_count(const int64_t* done, int64_t count) {
    for (int64_t spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < count; ++spins) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
        if (spins > 4096) sched_yield();  // the thread that has the last piece may need this processor
    }
}

namespace {

class LowRankPacking {
  public:
    explicit LowRankPacking(const qk_pack_low_rank_args& args) : a_(args), shape_{args.n, args.k, args.dtype, args.gated} {
        num_h_ = first_of(a_.parts);
        for (int64_t block = 0; block < shape_.blocks(); ++block) {
            const LowRankRange range = range_of(block);
            num_lines_ += range.lines;
            const int64_t end = range.first + range.lines * shape_.inputs_per_row();
            if (end > num_h_) num_h_ = end;
        }
        num_h_ = ceil_div(num_h_, BLOCK) * BLOCK;
        bool has_bias = false;
        for (int64_t part = 0; a_.biases && part < a_.parts; ++part) has_bias |= a_.biases[part] != nullptr;
        ranges_at_ = aligned(num_h_ * int64_t(sizeof(float)));
        bias_at_ = ranges_at_ + aligned(shape_.blocks() * int64_t(sizeof(LowRankRange)));
        a_at_ = bias_at_ + (has_bias ? shape_.blocks() * BLOCK * int64_t(sizeof(float)) : 0);
        b_at_ = a_at_ + num_h_ / BLOCK * block_bytes();
        has_bias_ = has_bias;
    }

    int64_t bytes() const { return b_at_ + num_lines_ * ROW_BYTES; }

    qk_low_rank view() const {
        char* memory = (char*)a_.packed;
        return {num_h_, block_bytes(), memory + a_at_, memory + b_at_, (const float*)memory,
                has_bias_ ? (const float*)(memory + bias_at_) : nullptr, (const int32_t*)(memory + ranges_at_)};
    }

    void fill() const {
        memset(a_.packed, 0, size_t(a_at_));
        for (int64_t block = 0; block < num_h_ / BLOCK; ++block) fill_a(block);
        LowRankRange* ranges = (LowRankRange*)((char*)a_.packed + ranges_at_);
        int32_t place = 0;
        for (int64_t block = 0; block < shape_.blocks(); ++block) {
            ranges[block] = range_of(block);
            ranges[block].place = place;
            place += ranges[block].lines;
            fill_b(block, ranges[block]);
        }
    }

  private:
    static int64_t aligned(int64_t bytes) { return ceil_div(bytes, ROW_BYTES) * ROW_BYTES; }
    int64_t block_bytes() const { return shape_.tiles() * TILE_BYTES; }
    int64_t element_bytes() const { return a_.dtype == QK_BFLOAT16 ? 2 : 4; }

    // The h of a part begin with a line.
    int64_t first_of(int64_t part) const {
        int64_t lines = 0;
        for (int64_t p = 0; p < part; ++p) lines += ceil_div(a_.ranks[p], shape_.inputs_per_row());
        return lines * shape_.inputs_per_row();
    }

    // The row of the layer's weight that is output `lane` of `block`; -1 if there is none.
    int64_t row_of(int64_t block, int64_t lane) const {
        const int64_t within = (a_.gated ? block / 2 : block) * BLOCK + lane;
        return within >= a_.n ? -1 : within + (a_.gated ? block % 2 * a_.n : 0);
    }

    // The part that a row belongs to; `row` becomes its number in the part.
    int64_t part_of(int64_t& row) const {
        int64_t part = 0;
        for (; row >= a_.sizes[part]; ++part) row -= a_.sizes[part];
        return part;
    }

    // All but its place.
    LowRankRange range_of(int64_t block) const {
        int64_t from = -1, to = -1;
        int64_t lanes = BLOCK;
        while (row_of(block, lanes - 1) < 0) --lanes;
        int64_t first = row_of(block, 0), last = row_of(block, lanes - 1);
        for (int64_t part = part_of(first), end = part_of(last); part <= end; ++part) {
            if (!a_.ranks[part]) continue;
            if (from < 0) from = first_of(part);
            to = first_of(part + 1);
        }
        if (from < 0) return {0, 0, 0};
        const int64_t lines = (to - from) / shape_.inputs_per_row(), tiles = ceil_div(lines, TILE_ROWS);
        return {int32_t(from), int32_t(tiles * ceil_div(lines, tiles)), 0};
    }

    // Writes `lines` lines, of which line i has the i-th four bytes of each source; zeros where a source is NULL or has ended.
    static void interleave(char* to, const char* const (&from)[BLOCK], int64_t bytes, int64_t lines) {
        alignas(64) uint32_t some[BLOCK][TILE_ROWS];  // of each source
        for (int64_t first = 0; first < lines; first += TILE_ROWS) {
            const int64_t left = bytes - first * int64_t(sizeof(uint32_t)), count = left < 0 ? 0 : left < ROW_BYTES ? left : ROW_BYTES;
            for (int64_t lane = 0; lane < BLOCK; ++lane) {
                const char* source = from[lane] ? from[lane] + first * int64_t(sizeof(uint32_t)) : nullptr;
                if (source && count == ROW_BYTES) {
                    memcpy(some[lane], source, ROW_BYTES);
                    continue;
                }
                memset(some[lane], 0, ROW_BYTES);
                if (source && count) memcpy(some[lane], source, size_t(count));
            }
            const int64_t end = lines - first < TILE_ROWS ? lines - first : TILE_ROWS;
            for (int64_t line = 0; line < end; ++line) {
                uint32_t* words = (uint32_t*)(to + (first + line) * ROW_BYTES);
                for (int64_t lane = 0; lane < BLOCK; ++lane) words[lane] = some[lane][line];
            }
        }
    }

    void fill_a(int64_t block) const {
        const char* from[BLOCK] = {};
        for (int64_t part = 0; part < a_.parts; ++part)
            for (int64_t lane = 0; lane < BLOCK; ++lane) {
                const int64_t j = block * BLOCK + lane - first_of(part);
                if (j < 0 || j >= a_.ranks[part]) continue;
                ((float*)a_.packed)[block * BLOCK + lane] = a_.scales[part];
                from[lane] = (const char*)a_.a[part] + j * a_.k * element_bytes();
            }
        interleave((char*)a_.packed + a_at_ + block * block_bytes(), from, a_.k * element_bytes(), shape_.tiles() * TILE_ROWS);
    }

    void fill_b(int64_t block, const LowRankRange& range) const {
        char* to = (char*)a_.packed + b_at_ + range.place * ROW_BYTES;
        memset(to, 0, size_t(range.lines * ROW_BYTES));
        int64_t parts[BLOCK], rows[BLOCK];  // of each output
        for (int64_t lane = 0; lane < BLOCK; ++lane) {
            rows[lane] = row_of(block, lane);
            parts[lane] = rows[lane] < 0 ? -1 : part_of(rows[lane]);
        }
        for (int64_t part = 0; part < a_.parts; ++part) {
            const int64_t rank = a_.ranks[part];
            const char* from[BLOCK] = {};
            bool has_rows = false;
            for (int64_t lane = 0; lane < BLOCK; ++lane) {
                if (!rank || parts[lane] != part) continue;
                has_rows = true;
                from[lane] = (const char*)a_.b[part] + rows[lane] * rank * element_bytes();
                if (has_bias_ && a_.biases[part])
                    ((float*)((char*)a_.packed + bias_at_))[block * BLOCK + lane] = a_.scales[part] * a_.biases[part][rows[lane]];
            }
            if (has_rows)
                interleave(to + (first_of(part) - range.first) / shape_.inputs_per_row() * ROW_BYTES, from, rank * element_bytes(),
                           ceil_div(rank, shape_.inputs_per_row()));
        }
    }

    const qk_pack_low_rank_args& a_;
    const PackedShape shape_;
    int64_t num_h_ = 0, num_lines_ = 0;
    int64_t ranges_at_, bias_at_, a_at_, b_at_;  // in bytes; scales stand first
    bool has_bias_;
};

}  // namespace
}  // namespace qk

int64_t qk_low_rank_bytes(const qk_pack_low_rank_args* args) { return qk::LowRankPacking(*args).bytes(); }

void qk_pack_low_rank(const qk_pack_low_rank_args* args, qk_low_rank* low_rank) {
    const qk::LowRankPacking packing(*args);
    if (args->a) packing.fill();
    *low_rank = packing.view();
}
