// Random operations on stores of suffix indexes, built with sanitizers by test_suffix_index.py.
#include <cstdio>
#include <vector>

#include "quire_kernels.h"

static uint32_t state;

static uint32_t below(uint32_t n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % n;
}

// 0 if all drafts are tokens, memory stays in its bounds, and nothing is left in the end.
static int run(uint32_t seed) {
    state = seed * 7919 + 1;
    const int depth = 2 + int(below(24)), vocab = 1 + int(below(6));
    const int64_t max_bytes = below(2) ? 1 << 24 : 3000 + below(60000);
    qk_suffix* store = qk_suffix_create(depth, max_bytes);
    std::vector<int> open, ended(64, 0);
    for (int op = 0; op < 600; ++op) {
        int32_t tokens[64], ids[128], confidences[128];
        double score;
        const int n = 1 + int(below(60));
        for (int i = 0; i < n; ++i) tokens[i] = i > 3 && below(9) ? tokens[i - 3] : int(below(uint32_t(vocab)));
        const size_t place = open.empty() ? 0 : below(uint32_t(open.size()));
        int index = open.empty() ? -1 : open[place];
        const uint32_t what = below(12);
        if (index < 0 || (what == 0 && open.size() < 40)) {
            index = qk_suffix_open(store);
            if (index >= 0) open.push_back(index), ended[size_t(index)] = 0;
        } else if (what < 7) {
            qk_suffix_extend(store, index, tokens, n);
        } else if (what < 9) {
            ended[size_t(index)] += qk_suffix_end(store, index);
        } else if (what < 11) {
            if (ended[size_t(index)]) --ended[size_t(index)], qk_suffix_drop_first(store, index);
        } else {
            qk_suffix_close(store, index);
            open.erase(open.begin() + int64_t(place));
            index = -1;
        }
        const int32_t* context = below(2) ? tokens : nullptr;
        const int count = index < 0 ? 0 : qk_suffix_propose(store, index, context, n, 1 + int(below(128)), 4.0, 0.0, ids, confidences, &score);
        for (int i = 0; i < count; ++i)
            if (ids[i] < 0 || ids[i] >= vocab || confidences[i] < 0 || confidences[i] > 15) return 1;
        if (qk_suffix_bytes(store) > max_bytes) return 2;
    }
    for (int index : open) qk_suffix_close(store, index);
    if (qk_suffix_nodes(store)) return 3;
    qk_suffix_destroy(store);
    return 0;
}

int main() {
    for (uint32_t seed = 0; seed < 300; ++seed)
        if (const int error = run(seed)) {
            printf("seed %u: error %d\n", seed, error);
            return 1;
        }
    return 0;
}
