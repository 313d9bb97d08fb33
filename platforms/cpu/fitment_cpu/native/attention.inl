// paged_attention: softmax(scale q k^T) v over a paged cache, exact to fp32 sums (the online softmax of arXiv:1805.02867, split
// along the keys as in https://pytorch.org/blog/flash-decoding).
//
// The work is a list of blocks: up to attention_block_rows rows (query x head of one key-value head) of one sequence, which share
// every key and value loaded. A block's keys are reduced chunk by chunk from the sequence's first, and chunks are folded in order.
// A thread gets a consecutive stretch of this list; a block of few rows may be cut between chunks, its chunks then going through
// scratch memory to the second phase, which folds them by the same code. Whatever the cut, a row gives the same bits.

namespace attention {

// Products of a query element and a key element below which a second thread costs more than it saves.
constexpr int64_t attention_grain = int64_t(1) << 17;

struct Block {
    int seq, kv_head;
    int64_t first_row, rows;  // among the sequence's query rows of this key-value head, query by query
    int64_t row0_keys;        // keys that the sequence's first query sees (may be negative where lengths are inconsistent)
    int64_t keys;             // keys that the last row sees
    int group;
    bool may_be_cut;

    int64_t keys_of(int64_t row) const { return lesser(row0_keys + (first_row + row) / group, keys); }
    int64_t query(int64_t row) const { return (first_row + row) / group; }
    int64_t head(int64_t row) const { return kv_head * int64_t(group) + (first_row + row) % group; }
};

// What one chunk, or several folded, leave of a block: for each row the greatest score, the sum of exponentials, the weighted values.
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
        for (int j = 0; j < Vectors; ++j) value[j] = load(v + int64_t(i) * head_size + j * lanes);
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
template <class C, int Rows>
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

struct RowBuffers {
    alignas(64) float q[attention_row_floats];
    alignas(64) float scores[attention_rows * attention_chunk];
    alignas(64) float chunk[attention_row_floats + 2 * attention_rows];
    alignas(64) float folded[attention_row_floats + 2 * attention_rows];
};

inline void load_queries(const PagedAttention& a, const Block& b, float* q) {
    int stride = attention_padded(a.head_size);
    int64_t first = a.cu_query_lens[b.seq];
    with_type(a.type, [&]<class T>(T*) {
        for (int64_t r = 0; r < b.rows; ++r) {
            const T* from = static_cast<const T*>(a.q) + (first + b.query(r)) * a.q_stride + b.head(r) * a.q_head_stride;
            float* to = q + r * stride;
            for (int d = 0; d < stride; d += lanes) store(to + d, F32{});
            for_vectors(a.head_size, [&](int64_t d, int n) { store_n(to + d, n, load_n(from + d, n)); });
        }
    });
}

inline void store_outputs(const PagedAttention& a, const Block& b, const Partial& p) {
    int64_t first = a.cu_query_lens[b.seq];
    with_type(a.type, [&]<class T>(T*) {
        for (int64_t r = 0; r < b.rows; ++r) {
            T* to = static_cast<T*>(a.out) + (first + b.query(r)) * a.out_stride + b.head(r) * a.out_head_stride;
            const float* from = p.values + r * p.stride;
            bool sees_any = b.keys_of(r) > 0;
            F32 factor = sees_any ? splat(1.0f / p.sum[r]) : F32{};
            for_vectors(a.head_size, [&](int64_t d, int n) { store_n(to + d, n, sees_any ? load(from + d) * factor : F32{}); });
        }
    });
}

// Fill `p` with what the keys [start, stop) give each row of the block that sees any.
template <class C>
inline void reduce_chunk(const PagedAttention& a, const Block& b, const float* q, float* scores, const Partial& p, int64_t start,
                         int64_t stop) {
    const int32_t* table = a.block_table + int64_t(b.seq) * a.max_blocks;
    int size = a.head_size, stride = p.stride, rows = int(b.rows);
    int seen[attention_rows], first_row = 0;  // rows that see nothing here come first
    for (int r = 0; r < rows; ++r) {
        seen[r] = int(greater(lesser(b.keys_of(r), stop) - start, 0));
        if (seen[r] == 0) first_row = r + 1;
    }
    auto slots = [&](const void* cache, int64_t key) {  // from `key` on, to the end of its page
        int64_t page = int64_t(table[key / a.block_size]) * a.num_kv_heads + b.kv_head;
        return static_cast<const C*>(cache) + (page * a.block_size + key % a.block_size) * size;
    };
    for (int64_t key = start; key < stop; key += lanes) {
        while (seen[first_row] <= key - start) ++first_row;
        score_rows(q + first_row * stride, stride, slots(a.k_cache, key), size, a.scale,
                   scores + first_row * attention_chunk + (key - start), rows - first_row);
    }
    first_row = 0;
    for (int r = 0; r < rows; ++r) {
        if (seen[r] == 0) {
            first_row = r + 1;
            continue;
        }
        exponentials(scores + r * attention_chunk, seen[r], &p.greatest[r], &p.sum[r]);
        for (int d = 0; d < stride; d += lanes) store(p.values + r * stride + d, F32{});
    }
    for (int64_t key = start; key < stop;) {
        int64_t end = lesser((key / a.block_size + 1) * a.block_size, stop);
        const C* v = slots(a.v_cache, key);
        int here[attention_rows];
        for (int r = first_row; r < rows; ++r) here[r] = int(greater(lesser(start + seen[r], end) - key, 0));
        for (int r = first_row; r < rows;) {
            const float* weights = scores + r * attention_chunk + (key - start);
            float* values = p.values + r * stride;
            int left = rows - r;
            if (left >= 4) {
                value_ragged<C, 4>(weights, v, size, here + r, values, stride);
            } else if (left == 3) {
                value_ragged<C, 3>(weights, v, size, here + r, values, stride);
            } else if (left == 2) {
                value_ragged<C, 2>(weights, v, size, here + r, values, stride);
            } else {
                value_ragged<C, 1>(weights, v, size, here + r, values, stride);
            }
            r += left >= 4 ? 4 : left;
        }
        key = end;
    }
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
        for (int64_t r = 0; r < b.rows; ++r) {
            folded.sum[r] = __builtin_nanf("");
            for (int d = 0; d < folded.stride; d += lanes) store(folded.values + r * folded.stride + d, F32{});
        }
        return store_outputs(a, b, folded);
    }
    load_queries(a, b, buffers.q);
    with_type(a.cache_type, [&]<class C>(C*) {
        for (int64_t c = begin; c < end; ++c) {
            int64_t start = c * attention_chunk, stop = lesser(start + attention_chunk, b.keys);
            Partial p = partial_at(scratch ? scratch + c * attention_chunk_floats(a.head_size) : buffers.chunk, a.head_size);
            reduce_chunk<C>(a, b, buffers.q, buffers.scores, p, start, stop);
            if (scratch) continue;
            for (int r = 0; r < b.rows; ++r)
                if (b.keys_of(r) > start) fold(p, folded, r, c == 0);
        }
    });
    if (!scratch) store_outputs(a, b, folded);
}

// Fold what phase one left of a block in scratch memory, and write it out.
inline void merge_block(const PagedAttention& a, const Block& b, float* scratch, RowBuffers& buffers) {
    if (!has_valid_pages(a, b)) return attend_block(a, b, 0, 0, nullptr, buffers);
    Partial folded = partial_at(buffers.folded, a.head_size);
    for (int64_t c = 0; c * attention_chunk < b.keys; ++c) {
        Partial p = partial_at(scratch + c * attention_chunk_floats(a.head_size), a.head_size);
        for (int r = 0; r < b.rows; ++r)
            if (b.keys_of(r) > c * attention_chunk) fold(p, folded, r, c == 0);
    }
    store_outputs(a, b, folded);
}

// ---- Work --------------------------------------------------------------------------------------------------------------------

// Calls f(block) for every block of rows, in order; f returns whether to go on.
template <class Function>
FITMENT_INLINE void for_blocks(const PagedAttention& a, Function f) {
    int group = a.num_heads / a.num_kv_heads;
    int64_t step = attention_block_rows(a.head_size), capacity = int64_t(a.max_blocks) * a.block_size;
    for (int s = 0; s < a.num_seqs; ++s) {
        int64_t queries = int64_t(a.cu_query_lens[s + 1]) - a.cu_query_lens[s];
        int64_t length = lesser(a.seq_lens[s], capacity);
        for (int64_t row = 0; row < queries * group; row += step) {
            Block b{s, 0, row, lesser(step, queries * group - row), a.seq_lens[s] - queries + 1, 0, group, queries <= attention_cut_queries};
            b.keys = length;
            b.keys = greater(b.keys_of(b.rows - 1), 0);
            for (; b.kv_head < a.num_kv_heads; ++b.kv_head)
                if (!f(b)) return;
        }
    }
}

// Keys of all rows of a block, as its cost; a block without keys still has zeros to write.
FITMENT_INLINE int64_t cost(const Block& b) { return b.rows * greater(b.keys, 1); }

// Calls f(block, begin, end, cut) for the chunks that belong to `part`; cut is -1 for a block that has one owner, else it counts the
// cut blocks. With Merge, only for cut blocks that begin in this part.
template <bool Merge, class Function>
FITMENT_INLINE void for_share(const PagedAttention& a, int part, int parts, Function f) {
    int64_t total = 0;
    for_blocks(a, [&](const Block& b) { return total += cost(b), true; });
    parts = int(lesser(parts, greater(total * a.head_size / attention_grain, 1)));
    if (part >= parts || (Merge && parts == 1)) return;
    int64_t cuts_left = a.scratch ? attention_cuts(a, parts) : 0, cut = 0;
    int64_t at = 0, owner = 0, stop = total / parts;
    int64_t begin_cost = total * part / parts, end_cost = total * (part + 1) / parts;
    for_blocks(a, [&](const Block& b) {
        while (at >= stop && owner + 1 < parts) stop = total * (++owner + 1) / parts;
        if (owner > part) return false;
        int64_t chunk_cost = b.rows * attention_chunk, chunks = (b.keys + attention_chunk - 1) / attention_chunk;
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
        at += cost(b);
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
