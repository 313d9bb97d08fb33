// Memory for weights and scratch: in pages as large as the system gives, since weights are streamed and 4 KB pages cost a walk each.
#pragma once

#include <cstddef>
#include <memory>

namespace fitment {

// At least `bytes`, aligned to a cache line, zeroed. Small pieces share a mapping, which lives as long as any of them.
// Throws std::bad_alloc.
std::shared_ptr<void> allocate(std::size_t bytes);

}  // namespace fitment
