// The search of the n-gram drafter: where the last tokens of a text occurred before.
#include "quire_kernels.h"

namespace {

constexpr int64_t BLOCK = 64;  // tokens that are compared at once, without a branch

}  // namespace

int64_t qk_find_match(const int32_t* tokens, int64_t n, int64_t longest, int64_t* end) {
    const int32_t last = tokens[n - 1];
    int64_t best = 0;
    for (int64_t stop = n - 1; stop > 0; stop -= BLOCK) {  // backwards: of equals the latest counts
        const int64_t start = stop > BLOCK ? stop - BLOCK : 0;
        int32_t found = 0;
        for (int64_t i = start; i < stop; ++i) found |= tokens[i] == last;
        if (!found) continue;
        for (int64_t i = stop - 1; i >= start; --i) {
            if (tokens[i] != last || i < best || tokens[i - best] != tokens[n - 1 - best]) continue;
            int64_t length = 1;
            while (length < longest && length <= i && tokens[i - length] == tokens[n - 1 - length]) ++length;
            if (length > best) best = length, *end = i + 1;
            if (best == longest) return best;
        }
    }
    return best;
}
