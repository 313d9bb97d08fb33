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
    bool is_solo;  // too small to share: one thread runs it
    alignas(16) unsigned char args[max_args_bytes];
};

template <class Args>
Call make_call(const Kernel& kernel, const Args& args, bool is_solo) {
    static_assert(sizeof(Args) <= max_args_bytes);
    Call call{{kernel.phases[0], kernel.phases[1], kernel.phases[2]}, is_solo, {}};
    __builtin_memcpy(call.args, &args, sizeof args);
    return call;
}

// Memory that calls refer to, aligned to 64 bytes.
using Buffer = std::shared_ptr<void>;

// Calls in order, and the scratch memory that they use.
struct Tape {
    std::vector<Call> calls;
    std::vector<Buffer> buffers;
};

// Threads that kernels run on, the calling one included.
int num_threads();

// Sets how many; takes effect at the next run. At least 1.
void set_num_threads(int count);

// Runs calls in order and returns when all are done. From several threads at once: one after the other.
void run(const Call* calls, std::size_t count);

// Runs one call and, while this thread records, keeps it on the tape.
void launch(const Call& call);

// Scratch memory of at least `bytes`, shared by all calls since they run in order. Hold it until the call has run; a tape that records
// keeps it alive.
Buffer scratch(std::size_t bytes);

// The tape that this thread's launches are recorded on, or null.
Tape* recording();
void set_recording(Tape* tape);

}  // namespace fitment
