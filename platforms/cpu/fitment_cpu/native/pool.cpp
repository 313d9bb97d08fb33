#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

namespace fitment {

namespace {

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spinning is bounded: cores are shared, and a thread that another one waits for may have none. Then the waiter gives its core away.
constexpr int barrier_spins = 2000;
constexpr int idle_spins = 20000;  // some hundred microseconds, then sleep

int num_phases(const Call& call) {
    int count = 0;
    while (count < max_phases && call.phases[count]) ++count;
    return count;
}

void run_alone(const Call& call) {
    for (int i = 0, count = num_phases(call); i < count; ++i) call.phases[i](call.args, 0, 1);
}

class Pool {
public:
    explicit Pool(int threads) : threads_(threads) {
        for (int part = 1; part < threads; ++part) workers_.emplace_back([this, part] { work(part); });
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex_);
            is_over_ = true;
            epoch_.fetch_add(1);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    void run(const Call* calls, std::size_t count) {
        calls_ = calls;
        count_ = count;
        epoch_.fetch_add(1);  // publishes the two above
        if (sleepers_.load() > 0) {
            std::lock_guard lock(mutex_);
            wake_.notify_all();
        }
        go_through(0);
    }

private:
    void work(int part) {
        std::uint64_t seen = 0;
        while (true) {
            for (int i = 0; i < idle_spins && epoch_.load(std::memory_order_acquire) == seen; ++i) relax();
            if (epoch_.load() == seen) {
                std::unique_lock lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return epoch_.load() != seen; });
                sleepers_.fetch_sub(1);
            }
            ++seen;
            if (is_over_) return;
            go_through(part);
        }
    }

    // The calls as thread `part` sees them. Every thread passes the same barriers. Behind the last one the caller may free the calls, so
    // that what is looked at is looked at before it.
    void go_through(int part) {
        const Call* calls = calls_;
        std::size_t count = count_;
        for (std::size_t i = 0; i < count; ++i) {
            const Call& call = calls[i];
            bool is_last = i + 1 == count;
            if (call.is_solo) {
                bool ends_here = is_last || !calls[i + 1].is_solo;
                if (part == 0) run_alone(call);
                if (ends_here) meet();
                continue;
            }
            int left = num_phases(call);
            for (const Phase* phase = call.phases; left > 0; --left, ++phase) {
                (*phase)(call.args, part, threads_);
                meet();
            }
        }
    }

    void meet() {
        std::uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            if (spins < barrier_spins) {
                relax();
            } else {
                sched_yield();
            }
        }
    }

    const int threads_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool is_over_ = false;
    const Call* calls_ = nullptr;
    std::size_t count_ = 0;
    alignas(64) std::atomic<std::uint64_t> epoch_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<std::uint32_t> round_{0};
};

int wanted_threads = 1;

// Never destroyed: threads may outlive static objects. After a fork the child has none of the threads, and makes a new pool.
struct State {
    std::mutex mutex;
    Pool* pool = nullptr;
    Buffer scratch;
    std::size_t scratch_bytes = 0;
};

State* state = new State;

void forget_after_fork() { state = new State; }

const int registered = pthread_atfork(nullptr, nullptr, &forget_after_fork);

thread_local Tape* tape = nullptr;

}  // namespace

int num_threads() { return wanted_threads; }

void set_num_threads(int count) { wanted_threads = count < 1 ? 1 : count; }

void run(const Call* calls, std::size_t count) {
    if (count == 0) return;
    State& s = *state;
    std::lock_guard lock(s.mutex);
    if (s.pool && s.pool->threads() != wanted_threads) {
        delete s.pool;
        s.pool = nullptr;
    }
    if (!s.pool) s.pool = new Pool(wanted_threads);
    if (count == 1 && calls->is_solo) {
        run_alone(*calls);
        return;
    }
    s.pool->run(calls, count);
}

void launch(const Call& call) {
    run(&call, 1);
    if (tape) tape->calls.push_back(call);
}

Buffer scratch(std::size_t bytes) {
    State& s = *state;
    std::lock_guard lock(s.mutex);
    if (bytes > s.scratch_bytes) {
        bytes += bytes / 4;
        s.scratch = Buffer(::operator new(bytes, std::align_val_t(64)), [](void* p) { ::operator delete(p, std::align_val_t(64)); });
        s.scratch_bytes = bytes;
    }
    if (tape && s.scratch && (tape->buffers.empty() || tape->buffers.back() != s.scratch)) tape->buffers.push_back(s.scratch);
    return s.scratch;
}

Tape* recording() { return tape; }

void set_recording(Tape* to) { tape = to; }

}  // namespace fitment
