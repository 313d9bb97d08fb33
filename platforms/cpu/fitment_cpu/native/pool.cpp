#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "memory.h"

namespace fitment {

namespace {

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spinning is bounded: cores are shared, and what a thread waits for may have none. Then the waiter gives its core away, or sleeps.
constexpr int wait_spins = 2000;
constexpr int idle_spins = 20000;  // some hundred microseconds

int num_phases(const Call& call) {
    int count = 0;
    while (count < max_phases && call.phases[count]) ++count;
    return count;
}

void run_alone(const Call& call) {
    for (int i = 0, count = num_phases(call); i < count; ++i) call.phases[i](call.args, 0, 1);
}

// A phase is as many parts as there are threads, and who is there takes the next one: a thread that the system has taken its core from
// holds nobody up, since another one takes its part. Who finishes the last part runs the solo calls that follow and publishes the next
// phase. So no thread waits for another one to arrive, only for parts that are being computed.
class Pool {
public:
    explicit Pool(int threads) : threads_(threads) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex_);
            is_over_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    void run(const Call* calls, std::size_t count) {
        calls_ = calls;
        count_ = count;
        index_ = 0;
        phase_ = 0;
        is_finished_.store(false, std::memory_order_relaxed);
        advance();
        for (int spins = 0; !is_finished_.load(std::memory_order_acquire);) {
            if (take_part()) {
                spins = 0;
            } else if (++spins < wait_spins) {
                relax();
            } else {
                sched_yield();
            }
        }
    }

private:
    // The state of the current phase in one word, so that a part is taken by one addition: its number, its parts, the next part.
    struct Ticket {
        std::uint64_t word;
        std::uint32_t next() const { return std::uint16_t(word); }
        std::uint32_t parts() const { return std::uint16_t(word >> 16); }
        bool has_work() const { return next() < parts(); }
    };

    Ticket ticket() const { return {ticket_.load(std::memory_order_seq_cst)}; }

    // Computes one part, if there is any left. Only with a part in hand may a thread look at the phase.
    bool take_part() {
        if (!ticket().has_work()) return false;
        Ticket mine{ticket_.fetch_add(1, std::memory_order_acq_rel)};
        if (!mine.has_work()) return false;
        int parts = int(mine.parts());
        current_(current_args_, int(mine.next()), parts);
        if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) advance();
        return true;
    }

    // Called by the one thread that finished a phase. After the last store here the caller may return, and start anew.
    void advance() {
        for (; index_ < count_; ++index_, phase_ = 0) {
            const Call& call = calls_[index_];
            if (call.is_solo) {
                run_alone(call);
            } else if (phase_ < num_phases(call)) {
                current_ = call.phases[phase_++];
                current_args_ = call.args;
                done_.store(0, std::memory_order_relaxed);
                std::uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
                ticket_.store(number << 32 | std::uint64_t(threads_) << 16, std::memory_order_seq_cst);
                if (sleepers_.load(std::memory_order_seq_cst) > 0) {
                    std::lock_guard lock(mutex_);
                    wake_.notify_all();
                }
                return;
            }
        }
        is_finished_.store(true, std::memory_order_release);
    }

    void work() {
        for (int spins = 0;;) {
            if (take_part()) {
                spins = 0;
            } else if (++spins < idle_spins) {
                relax();
            } else {
                std::unique_lock lock(mutex_);
                sleepers_.fetch_add(1, std::memory_order_seq_cst);
                wake_.wait(lock, [&] { return is_over_ || ticket().has_work(); });
                sleepers_.fetch_sub(1, std::memory_order_seq_cst);
                if (is_over_) return;
                spins = 0;
            }
        }
    }

    const int threads_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool is_over_ = false;  // under the mutex
    // What is run, and how far it has come: written by who advances.
    const Call* calls_ = nullptr;
    std::size_t count_ = 0, index_ = 0;
    int phase_ = 0;
    Phase current_ = nullptr;
    const void* current_args_ = nullptr;
    alignas(64) std::atomic<std::uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<bool> is_finished_{true};
    alignas(64) std::atomic<int> sleepers_{0};
};

std::atomic<int> wanted_threads{1};

// Never destroyed: threads may outlive static objects. After a fork the child has none of the threads, and makes a new pool.
struct State {
    std::mutex mutex;
    Pool* pool = nullptr;
    std::shared_ptr<void> scratch;
    std::size_t scratch_bytes = 0;

    // Runs calls that are for the same number of threads.
    void run(const Call* calls, std::size_t count) {
        if (count == 1 && calls->is_solo) return run_alone(*calls);
        if (pool && pool->threads() != calls->threads) {
            delete pool;
            pool = nullptr;
        }
        if (!pool) pool = new Pool(calls->threads);
        pool->run(calls, count);
    }
};

State* state = new State;

void forget_after_fork() { state = new State; }

const int registered = pthread_atfork(nullptr, nullptr, &forget_after_fork);

thread_local Tape* tape = nullptr;

}  // namespace

int num_threads() { return wanted_threads; }

void set_num_threads(int count) { wanted_threads = count < 1 ? 1 : count; }

void run(const Call* calls, std::size_t count) {
    State& s = *state;
    std::lock_guard lock(s.mutex);
    for (std::size_t start = 0, stop = 0; start < count; start = stop) {
        while (stop < count && calls[stop].threads == calls[start].threads) ++stop;
        s.run(calls + start, stop - start);
    }
}

void launch(const Call& call) {
    run(&call, 1);
    if (tape) tape->calls.push_back(call);
}

std::shared_ptr<void> scratch(std::size_t bytes) {
    State& s = *state;
    std::lock_guard lock(s.mutex);
    if (bytes > s.scratch_bytes) {
        bytes += bytes / 4;
        s.scratch = allocate(bytes);
        s.scratch_bytes = bytes;
    }
    keep(s.scratch);
    return s.scratch;
}

void keep(const Buffer& buffer) {
    if (tape && buffer && std::find(tape->buffers.begin(), tape->buffers.end(), buffer) == tape->buffers.end()) tape->buffers.push_back(buffer);
}

Tape* recording() { return tape; }

void set_recording(Tape* to) { tape = to; }

}  // namespace fitment
