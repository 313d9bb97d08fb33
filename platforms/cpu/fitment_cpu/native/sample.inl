// sample: greedy, or by one uniform number from what top-k, top-p and min-p keep.
//
// Weights are exp((logit - greatest) / temperature) in fp64, so that tokens are those of exact arithmetic. What a filter keeps is a
// prefix of the tokens by falling logit, hence a Cut, found by selection: the vocabulary is never sorted. Stretches of the
// vocabulary carry their greatest logit, so that most of it is passed over.

namespace sampling {

constexpr int stretch = 64;

// Kept are the logits above `floor`, and of those equal to it the first `ties` in vocabulary order.
struct Cut {
    float floor;
    int64_t ties;
};

// One thread's buffers for a vocabulary.
struct Buffers {
    float* tops = nullptr;   // the greatest logit of each stretch
    double* sums = nullptr;  // the weight kept of each stretch
    float* values = nullptr;
    float* above = nullptr;
    float* below = nullptr;
    int64_t capacity = -1;

    Buffers() = default;
    Buffers(const Buffers&) = delete;
    Buffers& operator=(const Buffers&) = delete;
    ~Buffers() { release(); }

    void release() {
        free(tops);
        free(sums);
        free(values);
        free(above);
        free(below);
    }

    void reserve(int64_t vocab) {
        if (vocab <= capacity) return;
        release();
        int64_t stretches = vocab / stretch + 1;
        tops = static_cast<float*>(take(stretches * 4));
        sums = static_cast<double*>(take(stretches * 8));
        values = static_cast<float*>(take(vocab * 4 + 4));
        above = static_cast<float*>(take(vocab * 4 + 4));
        below = static_cast<float*>(take(vocab * 4 + 4));
        capacity = vocab;
    }

    static void* take(int64_t bytes) {
        void* p = malloc(bytes);
        if (!p) abort();
        return p;
    }
};

// A row under its temperature.
struct Row {
    const float* logits;
    int64_t vocab;
    double most, inverse;  // the greatest logit, 1 / temperature
    Buffers& buffers;

    int64_t stretches() const { return (vocab + stretch - 1) / stretch; }
    int length(int64_t s) const { return int(lesser(stretch, vocab - s * stretch)); }

    FITMENT_INLINE F64 weights(HalfF32 x) const { return exp((__builtin_convertvector(x, F64) - most) * inverse); }
};

FITMENT_INLINE HalfF32 load_half(const float* p, int64_t n) {
    HalfF32 x;
    if (n >= half_lanes) {
        __builtin_memcpy(&x, p, sizeof x);
    } else {
        for (int i = 0; i < half_lanes; ++i) x[i] = i < n ? p[i] : -__builtin_inff();
    }
    return x;
}

inline double weigh(const Row& row, const float* values, int64_t n) {
    F64 total = {};
    for (int64_t i = 0; i < n; i += half_lanes) total += row.weights(load_half(values + i, n - i));
    return sum(total);
}

// The greatest logit of each stretch and of all; NaN when there is one.
inline float survey(const float* logits, int64_t vocab, float* tops) {
    const F32 nothing = splat(-__builtin_inff());
    F32 most = nothing;
    I32 bad = {};
    for (int64_t start = 0; start < vocab; start += stretch) {
        F32 top = nothing;
        auto look = [&](F32 x) {
            top = max(x, top);
            bad |= x != x;
        };
        if (vocab - start >= stretch) {
#pragma GCC unroll 16
            for (int i = 0; i < stretch; i += lanes) look(load(logits + start + i));
        } else {
            for_vectors(vocab - start, [&](int64_t i, int n) {
                F32 x = load_n(logits + start + i, n);
                look(lane_index() < float(n) ? x : nothing);
            });
        }
        most = max(top, most);
        tops[start / stretch] = greatest(top);
    }
    return any(bad) ? __builtin_nanf("") : greatest(most);
}

// The index of the `count`-th logit that equals `value`; the vocabulary's size if there are fewer.
inline int64_t find(const Row& row, float value, int64_t count) {
    for (int64_t s = 0; s < row.stretches(); ++s) {
        if (row.buffers.tops[s] < value) continue;
        const float* logits = row.logits + s * stretch;
        for (int i = 0; i < row.length(s); ++i)
            if (logits[i] == value && --count == 0) return s * stretch + i;
    }
    return row.vocab;
}

// Copies the logits of at least (or, if strict, above) `bound` to buffers.values; gives their number.
template <bool Strict>
inline int64_t collect(const Row& row, float bound) {
    float* out = row.buffers.values;
    int64_t count = 0;
    for (int64_t s = 0; s < row.stretches(); ++s) {
        if (row.buffers.tops[s] < bound) continue;
        const float* logits = row.logits + s * stretch;
        for (int i = 0, n = row.length(s); i < n; ++i) {
            out[count] = logits[i];
            count += Strict ? logits[i] > bound : logits[i] >= bound;
        }
    }
    return count;
}

FITMENT_INLINE float middle(float a, float b, float c) {
    float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : (c > high ? high : c);
}

// The shortest prefix by falling value of buffers.values whose weight reaches `target`; all of it if none does. weight(values, n)
// is the weight of n values.
template <class Weight>
inline Cut select(Buffers& buffers, int64_t n, double target, Weight weight) {
    float *values = buffers.values, *above = buffers.above, *below = buffers.below;
    double taken = 0;  // the weight of what is greater than all that is left
    while (true) {
        float pivot = middle(values[0], values[n / 2], values[n - 1]);
        int64_t num_above = 0, num_below = 0;
        for (int64_t i = 0; i < n; ++i) {
            float x = values[i];
            above[num_above] = x;
            num_above += x > pivot;
            below[num_below] = x;
            num_below += x < pivot;
        }
        double heavier = taken + (num_above ? weight(above, num_above) : 0);
        auto go_on = [&](float*& side, int64_t count) {
            float* used = values;
            values = side;
            side = used;
            n = count;
        };
        if (num_above && heavier >= target) {
            go_on(above, num_above);
            continue;
        }
        int64_t equal = n - num_above - num_below;
        double each = weight(&pivot, 1), reached = heavier + double(equal) * each;
        if (num_below && reached < target) {
            taken = reached;
            go_on(below, num_below);
            continue;
        }
        double missing = __builtin_ceil((target - heavier) / each);
        return {pivot, missing < double(equal) ? greater(int64_t(missing), 1) : equal};
    }
}

inline Cut most_probable(const Row& row, int64_t count) {
    auto number = [](const float*, int64_t n) { return double(n); };
    float bound = -__builtin_inff();
    if (count <= row.stretches()) {  // The count-th greatest top is not above the count-th greatest logit.
        __builtin_memcpy(row.buffers.values, row.buffers.tops, row.stretches() * sizeof(float));
        bound = select(row.buffers, row.stretches(), double(count), number).floor;
    }
    return select(row.buffers, collect<false>(row, bound), double(count), number);
}

// The nucleus (top-p) of what `cut` keeps; of all when there is no cut.
inline Cut nucleus(const Row& row, double top_p, const Cut* cut) {
    auto weight = [&](const float* values, int64_t n) { return weigh(row, values, n); };
    if (cut) {
        int64_t n = collect<true>(row, cut->floor);
        for (int64_t i = 0; i < cut->ties; ++i) row.buffers.values[n++] = cut->floor;
        return select(row.buffers, n, top_p * weigh(row, row.buffers.values, n), weight);
    }
    double total = weigh(row, row.logits, row.vocab);
    // Logits of less than this weight sum to less than what is outside: the nucleus ends before them. The margin covers rounding.
    double least = 0.5 * (1 - top_p) * total / double(row.vocab);
    float bound = float(row.most + (__builtin_log(least) - 1e-3) / row.inverse);
    bound -= 1e-6f * __builtin_fabsf(bound);
    return select(row.buffers, collect<false>(row, bound), top_p * total, weight);
}

// The weights of a stretch, 0 for what is not kept; gives their sum.
inline double kept_weights(const Row& row, int64_t s, double floor, double last_tie, double min_p, double* weights) {
    const float* logits = row.logits + s * stretch;
    F64 index, total = {};
    for (int i = 0; i < half_lanes; ++i) index[i] = double(s * stretch + i);
    for (int i = 0, n = row.length(s); i < n; i += half_lanes) {
        HalfF32 x = load_half(logits + i, n - i);
        F64 weight = row.weights(x), wide = __builtin_convertvector(x, F64);
        I64 is_kept = ((wide > floor) | ((wide == floor) & (index <= last_tie))) & (weight >= min_p);
        weight = is_kept ? weight : F64{};
        __builtin_memcpy(weights + i, &weight, sizeof weight);
        total += weight;
        index += double(half_lanes);
    }
    return sum(total);
}

inline int32_t draw(const Row& row, const Cut* cut, double min_p, double uniform) {
    double floor = cut ? cut->floor : -__builtin_inff();
    double last_tie = double(cut ? find(row, cut->floor, cut->ties) : row.vocab);
    double weights[stretch], total = 0;
    for (int64_t s = 0; s < row.stretches(); ++s) {
        row.buffers.sums[s] = row.buffers.tops[s] < floor ? 0 : kept_weights(row, s, floor, last_tie, min_p, weights);
        total += row.buffers.sums[s];
    }
    double target = uniform * total, running = 0;
    int64_t last = -1;
    for (int64_t s = 0; s < row.stretches(); ++s) {
        if (row.buffers.sums[s] == 0) continue;
        if (running + row.buffers.sums[s] <= target && s + 1 < row.stretches()) {
            running += row.buffers.sums[s];
            last = s;
            continue;
        }
        kept_weights(row, s, floor, last_tie, min_p, weights);
        for (int i = 0; i < row.length(s); ++i) {
            running += weights[i];
            if (weights[i] > 0 && running > target) return int32_t(s * stretch + i);
        }
        last = s;
    }
    // Rounding left the sum at or below the target: the last one kept.
    kept_weights(row, last, floor, last_tie, min_p, weights);
    int i = row.length(last) - 1;
    while (weights[i] == 0) --i;
    return int32_t(last * stretch + i);
}

inline int32_t sample_row(const float* logits, int64_t vocab, float temperature, int64_t top_k, float top_p, float min_p, float uniform,
                          Buffers& buffers) {
    float most = survey(logits, vocab, buffers.tops);
    if (!(__builtin_fabsf(most) < __builtin_inff()) || !(temperature >= 0 && temperature < __builtin_inff())) return -1;
    Row row{logits, vocab, most, 1.0 / temperature, buffers};
    if (temperature == 0) return int32_t(find(row, most, 1));
    bool has_top_k = top_k > 0 && top_k < vocab, has_top_p = top_p < 1;
    Cut cut{};
    if (has_top_k) cut = most_probable(row, top_k);
    if (has_top_p) cut = nucleus(row, top_p, has_top_k ? &cut : nullptr);
    return draw(row, has_top_k || has_top_p ? &cut : nullptr, min_p <= 1 ? min_p : 1.0, uniform);
}

inline void sample_rows(const void* args, int part, int parts) {
    static thread_local Buffers buffers;
    const Sample& a = *static_cast<const Sample*>(args);
    Share rows = share(a.n, 1, part, parts);
    if (rows.begin < rows.end) buffers.reserve(a.vocab);
    for (int64_t i = rows.begin; i < rows.end; ++i)
        a.out[i] = sample_row(a.logits + i * a.logits_stride, a.vocab, a.temperature[i], a.top_k[i], a.top_p[i], a.min_p[i],
                              a.uniform[i], buffers);
}

}  // namespace sampling

constexpr fitment::Kernel sample_kernel{{&sampling::sample_rows, nullptr, nullptr}};
