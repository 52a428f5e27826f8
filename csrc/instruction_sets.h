// Which instruction sets this library was compiled with, and which of them this CPU has.
#pragma once

#include "context.h"

namespace qk {

// The n-th of those this CPU can run, the best first; nullptr past the last.
const KernelTable* kernel_table(int n);

}  // namespace qk
