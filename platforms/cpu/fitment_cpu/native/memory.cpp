#include "memory.h"

#include <mutex>
#include <new>

#include <sys/mman.h>

namespace fitment {

namespace {

constexpr std::size_t line = 64, huge_page = std::size_t(2) << 20, shared_mapping = 4 * huge_page;

std::size_t rounded_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// A mapping that begins at a large page; what is not touched takes no memory.
std::shared_ptr<char> map(std::size_t bytes) {
    std::size_t whole = rounded_up(bytes, huge_page) + huge_page;
    void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    char* begin = reinterpret_cast<char*>(rounded_up(reinterpret_cast<std::size_t>(memory), huge_page));
#if defined(MADV_HUGEPAGE)
    madvise(begin, whole - huge_page, MADV_HUGEPAGE);  // a wish: small pages do as well, more slowly
#endif
    return {begin, [memory, whole](char*) { munmap(memory, whole); }};
}

struct Shared {
    std::mutex mutex;
    std::shared_ptr<char> mapping;
    std::size_t used = shared_mapping;
};

Shared* shared = new Shared;  // never destroyed: threads may outlive static objects

}  // namespace

std::shared_ptr<void> allocate(std::size_t bytes) {
    bytes = rounded_up(bytes, line);
    if (bytes > shared_mapping / 4) return map(bytes);
    std::lock_guard lock(shared->mutex);
    if (shared->used + bytes > shared_mapping) {
        shared->mapping = map(shared_mapping);
        shared->used = 0;
    }
    std::shared_ptr<void> piece(shared->mapping, shared->mapping.get() + shared->used);
    shared->used += bytes;
    return piece;
}

}  // namespace fitment
