#include "select.h"

#include <algorithm>
#include <functional>

namespace qk {

float kth_largest(float* values, int64_t n, int64_t k) {
    std::nth_element(values, values + k - 1, values + n, std::greater<float>());
    return values[k - 1];
}

void sort_descending(float* values, int64_t n) { std::sort(values, values + n, std::greater<float>()); }

void sort_largest(uint64_t* keys, int64_t n, int64_t k) {
    if (2 * k < n) {
        std::nth_element(keys, keys + k, keys + n, std::greater<uint64_t>());
        n = k;
    }
    std::sort(keys, keys + n, std::greater<uint64_t>());
}

}  // namespace qk
