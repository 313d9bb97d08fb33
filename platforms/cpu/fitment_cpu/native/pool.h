// The threads that run launches: made once, taking parts of phases as they come, asleep when idle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "args.h"

namespace fitment {

constexpr std::size_t max_args_bytes = 160;

// One launch: a kernel's phases over a copy of its arguments.
struct Call {
    Phase phases[max_phases];
    int threads;   // that it is for: its scratch memory is made for so many
    bool is_solo;  // too small to share: one thread runs it
    alignas(16) unsigned char args[max_args_bytes];
};

template <class Args>
Call make_call(const Kernel& kernel, const Args& args, int threads, bool is_solo) {
    static_assert(sizeof(Args) <= max_args_bytes);
    Call call{{kernel.phases[0], kernel.phases[1], kernel.phases[2]}, threads, is_solo, {}};
    __builtin_memcpy(call.args, &args, sizeof args);
    return call;
}

// What calls refer to: scratch memory or a weight.
using Buffer = std::shared_ptr<const void>;

// Calls in order, and what keeps alive the memory that they refer to.
struct Tape {
    std::vector<Call> calls;
    std::vector<Buffer> buffers;
};

// Threads that calls are made for from now on, the calling one included.
int num_threads();

// Sets how many, at least 1. Calls on a tape keep the number that they were recorded with.
void set_num_threads(int count);

// Runs calls in order and returns when all are done. From several threads at once: one after the other.
void run(const Call* calls, std::size_t count);

// Runs one call and, while this thread records, keeps it on the tape.
void launch(const Call& call);

// Scratch memory of at least `bytes`, aligned to 64 of them, shared by all calls since they run in order. Hold it until the call has run;
// a tape that records keeps it alive.
std::shared_ptr<void> scratch(std::size_t bytes);

// Has the tape that this thread records on, if any, keep `buffer` alive.
void keep(const Buffer& buffer);

// The tape that this thread's launches are recorded on, or null.
Tape* recording();
void set_recording(Tape* tape);

}  // namespace fitment
