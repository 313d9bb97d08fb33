// What this machine can do at most: bytes read a second, and int8 multiply-adds a second. Prints JSON.
//
//   g++ -O3 -march=native -pthread limits.cpp -o limits && ./limits THREADS
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using Vector = int64_t __attribute__((vector_size(64)));

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Best of several rounds, in units a second, of `units` done by all threads together.
template <class Work>
static double best(int threads, double units, Work work) {
    double most = 0;
    for (int round = 0; round < 7; ++round) {
        double start = now();
        std::vector<std::thread> team;
        for (int t = 0; t < threads; ++t) team.emplace_back([&, t] { work(t); });
        for (auto& member : team) member.join();
        double rate = units / (now() - start);
        if (rate > most) most = rate;
    }
    return most;
}

int main(int argc, char** argv) {
    int threads = argc > 1 ? atoi(argv[1]) : int(std::thread::hardware_concurrency());
    constexpr int64_t bytes = int64_t(1) << 29;
    auto memory = static_cast<Vector*>(aligned_alloc(64, bytes));
    memset(memory, 1, bytes);
    volatile int64_t sink = 0;
    double read = best(threads, double(bytes), [&](int t) {
        int64_t count = bytes / 64, begin = count * t / threads, end = count * (t + 1) / threads;
        Vector sums[8] = {};
        for (int64_t i = begin; i + 8 <= end; i += 8) {
            for (int j = 0; j < 8; ++j) {
                sums[j] ^= memory[i + j];
                __builtin_prefetch(memory + i + j + 64);
            }
        }
        Vector all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
        sink = sink + all[0];
    });
    double dots = 0;
#if defined(__AVX512VNNI__)
    constexpr int64_t rounds = 20000000;
    dots = best(threads, double(rounds) * 12 * 64 * threads, [&](int t) {
        __m512i a = _mm512_set1_epi32(t + 0x01020304), b = _mm512_set1_epi32(0x01010101), sums[12];
        for (auto& sum : sums) sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
            for (int j = 0; j < 12; ++j) sums[j] = _mm512_dpbusd_epi32(sums[j], a, b);
            asm volatile("" : "+v"(a));
        }
        for (int j = 1; j < 12; ++j) sums[0] = _mm512_add_epi32(sums[0], sums[j]);
        sink = sink + _mm512_reduce_add_epi32(sums[0]);
    });
#endif
    printf("{\"threads\": %d, \"read_bytes_per_s\": %.4g, \"int8_macs_per_s\": %.4g}\n", threads, read, dots);
    free(memory);
}
