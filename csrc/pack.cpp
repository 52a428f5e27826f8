// Packing of weights, its inverse, and single rows of a packed table. Bytes are moved, never changed.
#include <cstring>

#include "context.h"
#include "layout.h"
#include "plan.h"

namespace qk {
namespace {

// Where the row of the unpacked matrix that is output `lane` of `block` begins, in elements; -1 if there is none.
int64_t source_offset(const qk_pack_args& a, int64_t block, int64_t lane) {
    const int64_t within = (a.gated ? block / 2 : block) * BLOCK + lane;
    if (within >= a.n) return -1;
    return within * a.stride + (a.gated ? block % 2 * a.half_stride : 0);
}

// A unit is what one output takes of a 64-byte row: one float, or two bfloat16.
using Unit = uint32_t;

struct Panel {
    const qk_pack_args& a;
    const PackedShape shape;
    const int64_t element_bytes;

    const char* source(int64_t offset) const { return static_cast<const char*>(a.weights) + offset * element_bytes; }
    char* target(int64_t block, int64_t row) const { return static_cast<char*>(a.packed) + shape.row_offset(block, row); }

    void pack(int64_t panel) const {
        memset(static_cast<char*>(a.packed) + panel * shape.panel_bytes(), 0, size_t(shape.panel_bytes()));
        each_row(panel, [&](int64_t block, int64_t lane, const char* from) {
            const int64_t whole = shape.k / shape.inputs_per_row(), rest = shape.k % shape.inputs_per_row();
            for (int64_t r = 0; r < whole; ++r) memcpy(target(block, r) + lane * sizeof(Unit), from + r * sizeof(Unit), sizeof(Unit));
            if (rest) memcpy(target(block, whole) + lane * sizeof(Unit), from + whole * sizeof(Unit), size_t(element_bytes));
        });
    }

    void unpack(int64_t panel) const {
        each_row(panel, [&](int64_t block, int64_t lane, const char* source) {
            unpack_row(shape, a.packed, block, lane, const_cast<char*>(source));
        });
    }

    template <class Visit>
    void each_row(int64_t panel, Visit visit) const {
        for (int64_t block = panel * PANEL_BLOCKS; block < (panel + 1) * PANEL_BLOCKS; ++block)
            for (int64_t lane = 0; lane < BLOCK && block < shape.blocks(); ++lane) {
                const int64_t offset = source_offset(a, block, lane);
                if (offset >= 0) visit(block, lane, source(offset));
            }
    }

    static void unpack_row(const PackedShape& shape, const void* packed, int64_t block, int64_t lane, char* to) {
        const char* base = static_cast<const char*>(packed) + lane * int64_t(sizeof(Unit));
        const int64_t whole = shape.k / shape.inputs_per_row(), rest = shape.k % shape.inputs_per_row();
        for (int64_t r = 0; r < whole; ++r) memcpy(to + r * sizeof(Unit), base + shape.row_offset(block, r), sizeof(Unit));
        if (rest) memcpy(to + whole * sizeof(Unit), base + shape.row_offset(block, whole), sizeof(Unit) / 2);
    }
};

int64_t bytes_of(int32_t dtype) { return dtype == QK_BFLOAT16 ? 2 : 4; }

}  // namespace
}  // namespace qk

using namespace qk;

int64_t qk_packed_bytes(int64_t n, int64_t k, int32_t dtype, int32_t gated) {
    const PackedShape shape{n, k, dtype, gated};
    return shape.panels() * shape.panel_bytes();
}

void qk_pack(qk_context* context, const qk_pack_args* args) {
    const Panel panels{*args, {args->n, args->k, args->dtype, args->gated}, bytes_of(args->dtype)};
    auto work = [&](int64_t begin, int64_t end, int) {
        for (int64_t panel = begin; panel < end; ++panel) panels.pack(panel);
    };
    context->parallel(panels.shape.panels(), 1, work);
}

void qk_unpack(qk_context* context, const qk_pack_args* args) {
    const Panel panels{*args, {args->n, args->k, args->dtype, args->gated}, bytes_of(args->dtype)};
    auto work = [&](int64_t begin, int64_t end, int) {
        for (int64_t panel = begin; panel < end; ++panel) panels.unpack(panel);
    };
    context->parallel(panels.shape.panels(), 1, work);
}

void qk_gather(qk_context* context, const qk_gather_args* args) {
    if (context->recording) return context->recording->add(*args);
    const qk_gather_args& a = *args;
    const int64_t row_bytes = a.dim * bytes_of(a.dtype);
    const PackedShape shape{0, a.dim, a.dtype, 0};
    auto work = [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            char* y = static_cast<char*>(a.y) + row * row_bytes;
            const int64_t id = a.ids[row] - a.first;
            if (a.count && (id < 0 || id >= a.count)) continue;
            if (a.packed)
                Panel::unpack_row(shape, a.table, id / BLOCK, id % BLOCK, y);
            else
                memcpy(y, static_cast<const char*>(a.table) + id * row_bytes, size_t(row_bytes));
        }
    };
    context->parallel(a.rows, 8, work);
    if (a.adapters && a.adapters->batch->segments) context->kernels.gather_low_rank(*context, a);
}
