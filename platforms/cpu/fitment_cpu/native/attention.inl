// paged_attention: softmax(scale q k^T) v over a paged cache, exact to fp32 sums (the online softmax of arXiv:1805.02867, split
// along the keys as in https://pytorch.org/blog/flash-decoding).
//
// The work is a list of blocks: some query rows (query x head of one key-value head) of one sequence, which share every key and
// value loaded, for one or more key-value heads. Few rows take more heads, since the heads of a page lie one after the other and
// memory is read twice as fast in longer runs. A block's keys are reduced chunk by chunk from the first, chunks folded in order.
// A thread gets a consecutive stretch of this list; a block of few rows may be cut between chunks, its chunks then going through
// scratch memory to the second phase, which folds them by the same code. Whatever the cut, a row gives the same bits.

namespace attention {

// Products of a query element and a key element below which a second thread costs more than it saves.
constexpr int64_t attention_grain = int64_t(1) << 17;

struct Block {
    int seq, group;
    int kv_head, heads;       // key-value heads [kv_head, kv_head + heads)
    int64_t first_row, rows;  // among the sequence's query rows of one key-value head, query by query; the same for each head
    int64_t first_keys;       // keys that the sequence's first query sees (negative where lengths are inconsistent)
    int64_t keys;             // keys that the last row sees
    bool may_be_cut;

    int64_t keys_of(int64_t row) const { return lesser(first_keys + query(row), keys); }
    int64_t query(int64_t row) const { return (first_row + row) / group; }
    int64_t query_head(int head, int64_t row) const { return (kv_head + head) * int64_t(group) + (first_row + row) % group; }
    int64_t chunks() const { return (keys + attention_chunk - 1) / attention_chunk; }
    int64_t cost() const { return heads * rows * greater(keys, 1); }  // one without keys still has zeros to write
};

// Calls f(head, row, index) for every row of every head, where index counts them.
template <class Function>
FITMENT_INLINE void for_rows(const Block& b, Function f) {
    int index = 0;
    for (int h = 0; h < b.heads; ++h)
        for (int r = 0; r < b.rows; ++r) f(h, r, index++);
}

// What one chunk, or several folded, leave of a block: for each head's rows the greatest score, the sum of exponentials, the weighted values.
struct Partial {
    float* greatest;
    float* sum;
    float* values;  // rows of `stride` floats
    int stride;
};

FITMENT_INLINE Partial partial_at(float* memory, int head_size) {
    int rows = attention_block_rows(head_size);
    return {memory, memory + rows, memory + 2 * rows, attention_padded(head_size)};
}

// The cache is read in runs of a page (of several heads), too short for the hardware to see what comes next. Found by trial on Zen 4:
// 112 µs without, 70 µs with, for 9 query heads against 1.5 MB of keys and values in memory.
template <class C>
FITMENT_INLINE void prefetch(const C* p) {
    constexpr int64_t ahead = 6144;
    __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead, 0, 2);
}

// ---- Scores ------------------------------------------------------------------------------------------------------------------

// Scores of `lanes` keys against Rows rows; PerPass keys at a time fill the registers.
template <class C, int Rows, int PerPass>
inline void score_tile(const float* q, int q_stride, const C* k, int head_size, float scale, float* scores) {
    F32 passes[Rows][lanes / PerPass];
#pragma GCC unroll 16
    for (int pass = 0; pass < lanes / PerPass; ++pass) {
        const C* keys = k + int64_t(pass) * PerPass * head_size;
        F32 products[Rows][PerPass] = {};
        int d = 0;
        for (; d + lanes <= head_size; d += lanes) {
            F32 query[Rows];
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) query[r] = load(q + r * q_stride + d);
#pragma GCC unroll 16
            for (int i = 0; i < PerPass; ++i) {
                F32 key = load(keys + i * head_size + d);
                prefetch(keys + i * head_size + d);
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r) products[r][i] = fma(query[r], key, products[r][i]);
            }
        }
        if (d < head_size) {
#pragma GCC unroll 16
            for (int i = 0; i < PerPass; ++i) {
                F32 key = load_part(keys + i * head_size + d, head_size - d);
#pragma GCC unroll 16
                for (int r = 0; r < Rows; ++r) products[r][i] = fma(load(q + r * q_stride + d), key, products[r][i]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) passes[r][pass] = combine_all<1, PerPass>(products[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) store(scores + r * attention_chunk, combine_all<PerPass, lanes / PerPass>(passes[r]) * scale);
}

template <class C>
FITMENT_INLINE void score_rows(const float* q, int q_stride, const C* k, int head_size, float scale, float* scores, int rows) {
    constexpr int quarter = lanes / 4, half = lanes / 2;
    for (; rows >= 4; rows -= 4, q += 4 * q_stride, scores += 4 * attention_chunk)
        score_tile<C, 4, quarter>(q, q_stride, k, head_size, scale, scores);
    if (rows == 3) score_tile<C, 3, half>(q, q_stride, k, head_size, scale, scores);
    if (rows == 2) score_tile<C, 2, half>(q, q_stride, k, head_size, scale, scores);
    if (rows == 1) score_tile<C, 1, lanes>(q, q_stride, k, head_size, scale, scores);
}

// The row's scores of a chunk become exponentials against their greatest; what lies past `count` is not looked at.
inline void exponentials(float* scores, int count, float* most, float* total) {
    const F32 nothing = splat(-__builtin_inff()), index = lane_index();
    F32 highest = nothing;
    int i = 0;
    for (; i + lanes <= count; i += lanes) highest = max(load(scores + i), highest);
    F32 last = nothing;
    if (i < count) last = index < float(count - i) ? load(scores + i) : nothing;
    highest = max(last, highest);
    float greatest_score = greatest(highest);
    F32 sums = {};
    for (i = 0; i + lanes <= count; i += lanes) {
        F32 e = exp(load(scores + i) - greatest_score);
        store(scores + i, e);
        sums += e;
    }
    if (i < count) {
        F32 e = index < float(count - i) ? exp(last - greatest_score) : F32{};
        store(scores + i, e);
        sums += e;
    }
    *most = greatest_score;
    *total = sum(sums);
}

// ---- Values ------------------------------------------------------------------------------------------------------------------

// values[r] += weights[r][i] * v[i] over `count` consecutive slots, for Vectors vectors of the head from element d on.
template <class C, int Rows, int Vectors>
inline void value_tile(const float* weights, const C* v, int head_size, int count, float* values, int stride) {
    F32 sums[Rows][Vectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < Vectors; ++j) sums[r][j] = load(values + r * stride + j * lanes);
    for (int i = 0; i < count; ++i) {
        F32 value[Vectors];
#pragma GCC unroll 16
        for (int j = 0; j < Vectors; ++j) {
            value[j] = load(v + int64_t(i) * head_size + j * lanes);
            prefetch(v + int64_t(i) * head_size + j * lanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            F32 weight = splat(weights[r * attention_chunk + i]);
#pragma GCC unroll 16
            for (int j = 0; j < Vectors; ++j) sums[r][j] = fma(weight, value[j], sums[r][j]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < Vectors; ++j) store(values + r * stride + j * lanes, sums[r][j]);
}

template <class C, int Rows>
inline void value_tail(const float* weights, const C* v, int head_size, int count, float* values, int stride, int n) {
    F32 sums[Rows];
    for (int r = 0; r < Rows; ++r) sums[r] = load(values + r * stride);
    for (int i = 0; i < count; ++i) {
        F32 value = load_part(v + int64_t(i) * head_size, n);
        for (int r = 0; r < Rows; ++r) sums[r] = fma(splat(weights[r * attention_chunk + i]), value, sums[r]);
    }
    for (int r = 0; r < Rows; ++r) store(values + r * stride, sums[r]);
}

template <class C, int Rows>
inline void value_rows(const float* weights, const C* v, int head_size, int count, float* values, int stride) {
    constexpr int wide = lanes == 16 || Rows <= 2 ? 4 : 2;  // as the registers allow
    if (count <= 0) return;
    int d = 0;
    for (; d + wide * lanes <= head_size; d += wide * lanes)
        value_tile<C, Rows, wide>(weights, v + d, head_size, count, values + d, stride);
    if constexpr (wide == 4) {
        if (d + 2 * lanes <= head_size) {
            value_tile<C, Rows, 2>(weights, v + d, head_size, count, values + d, stride);
            d += 2 * lanes;
        }
    }
    for (; d + lanes <= head_size; d += lanes) value_tile<C, Rows, 1>(weights, v + d, head_size, count, values + d, stride);
    if (d < head_size) value_tail<C, Rows>(weights, v + d, head_size, count, values + d, stride, head_size - d);
}

// Rows that see different numbers of these slots: first what all of them see, then the rest row by row. What a row does not see is
// not read for it, so a NaN there does not reach it.
template <int Rows, class C>
FITMENT_INLINE void value_ragged(const float* weights, const C* v, int head_size, const int* seen, float* values, int stride) {
    int common = seen[0];
    for (int r = 1; r < Rows; ++r) common = int(lesser(common, seen[r]));
    value_rows<C, Rows>(weights, v, head_size, common, values, stride);
    if constexpr (Rows > 1) {
        for (int r = 0; r < Rows; ++r)
            value_rows<C, 1>(weights + r * attention_chunk + common, v + int64_t(common) * head_size, head_size, seen[r] - common,
                             values + r * stride, stride);
    }
}

// ---- Chunks ------------------------------------------------------------------------------------------------------------------

// Fold row `from` of one partial into row `into` of another.
inline void fold(const Partial& from, const Partial& into, int row, bool is_first) {
    float* values = into.values + int64_t(row) * into.stride;
    const float* more = from.values + int64_t(row) * from.stride;
    if (is_first) {
        into.greatest[row] = from.greatest[row];
        into.sum[row] = from.sum[row];
        for (int d = 0; d < into.stride; d += lanes) store(values + d, load(more + d));
        return;
    }
    float old_greatest = into.greatest[row], new_greatest = from.greatest[row];
    float most = new_greatest > old_greatest ? new_greatest : old_greatest;
    F32 keep = exp(splat(old_greatest - most)), add = exp(splat(new_greatest - most));
    into.greatest[row] = most;
    into.sum[row] = fma(splat(into.sum[row]), keep, splat(from.sum[row]) * add)[0];
    for (int d = 0; d < into.stride; d += lanes) store(values + d, fma(load(values + d), keep, load(more + d) * add));
}

// Slots of a page that are taken at once, and the head size up to which they are widened to fp32 first when many rows read them.
constexpr int run_slots = 32;
constexpr int widest_head = 256;
constexpr int widening_rows = 5;

inline void load_queries(const PagedAttention& a, const Block& b, float* q) {
    int stride = attention_padded(a.head_size);
    int64_t first = a.cu_query_lens[b.seq];
    with_type(a.type, [&]<class T>(T*) {
        for_rows(b, [&](int h, int r, int index) {
            const T* from = static_cast<const T*>(a.q) + (first + b.query(r)) * a.q_stride + b.query_head(h, r) * a.q_head_stride;
            float* to = q + index * stride;
            for (int d = 0; d < stride; d += lanes) store(to + d, F32{});
            for_vectors(a.head_size, [&](int64_t d, int n) { store_n(to + d, n, load_n(from + d, n)); });
        });
    });
}

inline void store_outputs(const PagedAttention& a, const Block& b, const Partial& p) {
    int64_t first = a.cu_query_lens[b.seq];
    with_type(a.type, [&]<class T>(T*) {
        for_rows(b, [&](int h, int r, int index) {
            T* to = static_cast<T*>(a.out) + (first + b.query(r)) * a.out_stride + b.query_head(h, r) * a.out_head_stride;
            const float* from = p.values + index * p.stride;
            bool sees_any = b.keys_of(r) > 0;
            F32 factor = sees_any ? splat(1.0f / p.sum[index]) : F32{};
            for_vectors(a.head_size, [&](int64_t d, int n) { store_n(to + d, n, sees_any ? load(from + d) * factor : F32{}); });
        });
    });
}

// Fold the chunk that begins at key `start` into `folded`, for the rows that see some of it.
inline void fold_chunk(const Block& b, const Partial& chunk, const Partial& folded, int64_t start) {
    for_rows(b, [&](int, int r, int index) {
        if (b.keys_of(r) > start) fold(chunk, folded, index, start == 0);
    });
}

// The keys [start, stop) of a block's sequence.
struct Chunk {
    const PagedAttention& a;
    const Block& b;
    int64_t start, stop;
    int seen[attention_rows];  // by each row
    int first_row;             // that sees any: those that see none come first

    Chunk(const PagedAttention& args, const Block& block, int64_t begin, int64_t end) : a(args), b(block), start(begin), stop(end), first_row(0) {
        for (int r = 0; r < b.rows; ++r) {
            seen[r] = int(greater(lesser(b.keys_of(r), stop) - start, 0));
            if (seen[r] == 0) first_row = r + 1;
        }
    }

    // Calls f(head, slots, first key, end) for each run of slots; keys count from the chunk's first.
    template <class C, class Function>
    FITMENT_INLINE void for_runs(const void* cache, Function f) const {
        const int32_t* table = a.block_table + int64_t(b.seq) * a.max_blocks;
        for (int64_t key = start, end; key < stop; key = end) {
            int64_t page = key / a.block_size, slot = key % a.block_size;
            end = lesser(key + lesser(a.block_size - slot, run_slots), stop);
            for (int h = 0; h < b.heads; ++h) {
                int64_t run = int64_t(table[page]) * a.num_kv_heads + b.kv_head + h;
                f(h, static_cast<const C*>(cache) + (run * a.block_size + slot) * a.head_size, int(key - start), int(end - start));
            }
        }
    }
};

// Scores become exponentials against each row's greatest, whose sum is noted; values begin at zero.
inline void start_values(const Block& b, float* scores, const Partial& p, const Chunk& c) {
    for_rows(b, [&](int, int r, int index) {
        if (c.seen[r] == 0) return;
        exponentials(scores + index * attention_chunk, c.seen[r], &p.greatest[index], &p.sum[index]);
        for (int d = 0; d < p.stride; d += lanes) store(p.values + index * p.stride + d, F32{});
    });
}

#if defined(__AVX512BF16__)
#include "attention_bf16.inl"
#endif

struct RowBuffers {
    alignas(64) float wide[run_slots * widest_head];
    alignas(64) float q[attention_row_floats];
    alignas(64) float scores[attention_rows * attention_chunk];
    alignas(64) float chunk[attention_row_floats + 2 * attention_rows];
    alignas(64) float folded[attention_row_floats + 2 * attention_rows];
#if defined(__AVX512BF16__)
    PairBuffers pairs;
#endif
};

// Fill `p` with what a chunk gives each row of the block that sees any of it.
template <class C>
inline void reduce_chunk(const PagedAttention& a, const Block& b, RowBuffers& buffers, const Partial& p, const Chunk& c) {
    const float* q = buffers.q;
    float* scores = buffers.scores;
    int size = a.head_size, stride = p.stride, rows = int(b.rows);
    auto for_runs = [&](const void* cache, auto f) {  // of fp32 values, where many rows read them
        c.for_runs<C>(cache, [&](int h, const C* slots, int key, int end) {
            if (sizeof(C) < sizeof(float) && rows - c.first_row >= widening_rows && size <= widest_head) {
                convert(slots, buffers.wide, int(end - key + 15) / 16 * 16 * size);
                f(h, static_cast<const float*>(buffers.wide), key, end);
            } else {
                f(h, slots, key, end);
            }
        });
    };
    for_runs(a.k_cache, [&](int h, const auto* k, int key, int end) {
        int r = c.first_row;
        for (; key < end; key += lanes, k += lanes * size) {
            while (c.seen[r] <= key) ++r;
            int index = h * rows + r;
            score_rows(q + index * stride, stride, k, size, a.scale, scores + index * attention_chunk + key, rows - r);
        }
    });
    start_values(b, scores, p, c);
    for_runs(a.v_cache, [&](int h, const auto* v, int key, int end) {
        int here[attention_rows];
        for (int r = c.first_row; r < rows; ++r) here[r] = int(greater(lesser(c.seen[r], end) - key, 0));
        for_row_blocks<4>(rows - c.first_row, [&]<int N>(Number<N>, int i) {
            int r = c.first_row + i, index = h * rows + r;
            value_ragged<N>(scores + index * attention_chunk + key, v, size, here + r, p.values + index * stride, stride);
        });
    });
}

// A sequence with a page outside the cache gives NaN, not what lies there.
inline bool has_valid_pages(const PagedAttention& a, const Block& b) {
    const int32_t* table = a.block_table + int64_t(b.seq) * a.max_blocks;
    uint32_t most = 0;
    for (int64_t i = 0; i * a.block_size < b.keys; ++i) most = uint32_t(table[i]) > most ? uint32_t(table[i]) : most;
    return b.keys <= 0 || most < uint32_t(a.num_blocks);
}

// Chunks [begin, end) of a block: folded and written out, or, with `scratch`, left there one by one.
inline void attend_block(const PagedAttention& a, const Block& b, int64_t begin, int64_t end, float* scratch, RowBuffers& buffers) {
    Partial folded = partial_at(buffers.folded, a.head_size);
    if (!has_valid_pages(a, b)) {
        if (scratch) return;
        for_rows(b, [&](int, int, int index) {
            folded.sum[index] = __builtin_nanf("");
            for (int d = 0; d < folded.stride; d += lanes) store(folded.values + index * folded.stride + d, F32{});
        });
        return store_outputs(a, b, folded);
    }
    load_queries(a, b, buffers.q);
    auto for_chunks = [&](auto reduce) {
        for (int64_t c = begin; c < end; ++c) {
            int64_t start = c * attention_chunk, stop = lesser(start + attention_chunk, b.keys);
            Partial p = partial_at(scratch ? scratch + c * attention_chunk_floats(a.head_size) : buffers.chunk, a.head_size);
            reduce(p, Chunk(a, b, start, stop));
            if (!scratch) fold_chunk(b, p, folded, start);
        }
    };
#if defined(__AVX512BF16__)
    if (a.cache_type == Type::bf16 && a.head_size % 2 == 0 && a.head_size <= widest_head) {
        round_pairs(buffers.q, int(b.heads * b.rows) * folded.stride, buffers.pairs.q);
        for_chunks([&](const Partial& p, const Chunk& c) { reduce_chunk(a, b, buffers.pairs, buffers.scores, p, c); });
        if (!scratch) store_outputs(a, b, folded);
        return;
    }
#endif
    with_type(a.cache_type, [&]<class C>(C*) {
        for_chunks([&](const Partial& p, const Chunk& c) { reduce_chunk<C>(a, b, buffers, p, c); });
    });
    if (!scratch) store_outputs(a, b, folded);
}

// Fold what phase one left of a block in scratch memory, and write it out.
inline void merge_block(const PagedAttention& a, const Block& b, float* scratch, RowBuffers& buffers) {
    if (!has_valid_pages(a, b)) return attend_block(a, b, 0, 0, nullptr, buffers);
    Partial folded = partial_at(buffers.folded, a.head_size);
    for (int64_t c = 0; c < b.chunks(); ++c)
        fold_chunk(b, partial_at(scratch + c * attention_chunk_floats(a.head_size), a.head_size), folded, c * attention_chunk);
    store_outputs(a, b, folded);
}

// ---- Work --------------------------------------------------------------------------------------------------------------------

// Calls f(block) for every block, of at most `most_heads` key-value heads, in order; f returns whether to go on.
template <class Function>
FITMENT_INLINE void for_blocks(const PagedAttention& a, int64_t most_heads, Function f) {
    int group = a.num_heads / a.num_kv_heads;
    int64_t step = attention_block_rows(a.head_size), capacity = int64_t(a.max_blocks) * a.block_size;
    for (int s = 0; s < a.num_seqs; ++s) {
        int64_t queries = int64_t(a.cu_query_lens[s + 1]) - a.cu_query_lens[s], length = a.seq_lens[s];
        for (int64_t row = 0; row < queries * group; row += step) {
            Block b{s, group, 0, 0, row, lesser(step, queries * group - row), length - queries + 1, lesser(length, capacity), false};
            b.may_be_cut = queries <= attention_cut_queries;
            b.keys = greater(b.keys_of(b.rows - 1), 0);
            int64_t heads = lesser(most_heads, step / b.rows);
            for (; b.kv_head < a.num_kv_heads; b.kv_head += b.heads) {
                b.heads = int(lesser(heads, a.num_kv_heads - b.kv_head));
                if (!f(b)) return;
            }
        }
    }
}

// Calls f(block, begin, end, cut) for the chunks that belong to `part`; cut is -1 for a block that has one owner, else it counts the
// cut blocks. With Merge, only for cut blocks that begin in this part.
template <bool Merge, class Function>
FITMENT_INLINE void for_share(const PagedAttention& a, int part, int parts, Function f) {
    int64_t total = 0, chunks = 0;
    for_blocks(a, 1, [&](const Block& b) {
        total += b.cost();
        chunks += b.chunks();
        return true;
    });
    parts = int(lesser(parts, greater(total * a.head_size / attention_grain, 1)));
    if (part >= parts || (Merge && parts == 1)) return;
    int64_t most_heads = greater(parts == 1 ? a.num_kv_heads : chunks / (2 * parts), 1);
    int64_t cuts_left = a.scratch ? attention_cuts(a, parts) : 0, cut = 0;
    int64_t at = 0, owner = 0, stop = total / parts;
    int64_t begin_cost = total * part / parts, end_cost = total * (part + 1) / parts;
    for_blocks(a, most_heads, [&](const Block& b) {
        while (at >= stop && owner + 1 < parts) stop = total * (++owner + 1) / parts;
        if (owner > part) return false;
        int64_t chunks = b.chunks(), chunk_cost = b.heads * b.rows * attention_chunk;
        if (b.may_be_cut && cuts_left > 0 && chunks > 1 && at + (chunks - 1) * chunk_cost >= stop) {
            auto first_from = [&](int64_t bound) {  // the first chunk that begins at a cost of `bound` or later
                return bound <= at ? 0 : lesser((bound - at + chunk_cost - 1) / chunk_cost, chunks);
            };
            int64_t begin = first_from(begin_cost), end = part + 1 == parts ? chunks : first_from(end_cost);
            if (Merge ? owner == part : begin < end) f(b, begin, end, cut);
            --cuts_left;
            ++cut;
        } else if (!Merge && owner == part) {
            f(b, int64_t(0), chunks, int64_t(-1));
        }
        at += b.cost();
        return true;
    });
}

inline void attend(const void* args, int part, int parts) {
    const PagedAttention& a = *static_cast<const PagedAttention*>(args);
    RowBuffers buffers;
    for_share<false>(a, part, parts, [&](const Block& b, int64_t begin, int64_t end, int64_t cut) {
        float* scratch = cut < 0 ? nullptr : static_cast<float*>(a.scratch) + cut * attention_cut_floats(a);
        attend_block(a, b, begin, end, scratch, buffers);
    });
}

inline void merge(const void* args, int part, int parts) {
    const PagedAttention& a = *static_cast<const PagedAttention*>(args);
    RowBuffers buffers;
    for_share<true>(a, part, parts, [&](const Block& b, int64_t, int64_t, int64_t cut) {
        merge_block(a, b, static_cast<float*>(a.scratch) + cut * attention_cut_floats(a), buffers);
    });
}

}  // namespace attention

constexpr fitment::Kernel paged_attention_kernel{{&attention::attend, &attention::merge, nullptr}};
