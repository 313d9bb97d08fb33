// A chunk of attention over a bf16 cache with bf16 dot products (AVX-512 BF16). Included by attention.inl.
//
// Queries and weights are rounded to bf16, sums are fp32. A run of slots is brought into the order in which it is multiplied, once for
// all rows of a block: keys so that a vector holds one pair of elements of sixteen keys, values so that it holds a pair of keys for
// sixteen elements. A score is a sum over pairs of elements in order, and a row's values are sums over pairs of keys in order, from the
// chunk's first: how many rows go together changes nothing.

// Sixteen rows of sixteen 32-bit words become columns.
FITMENT_INLINE void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // fours[4 i + j]: word j of each quarter, of rows 4 i to 4 i + 3
        fours[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m512i low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x44), high = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xee);
        __m512i more_low = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x44);
        __m512i more_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xee);
        rows[j] = _mm512_shuffle_i32x4(low, more_low, 0x88);
        rows[4 + j] = _mm512_shuffle_i32x4(low, more_low, 0xdd);
        rows[8 + j] = _mm512_shuffle_i32x4(high, more_high, 0x88);
        rows[12 + j] = _mm512_shuffle_i32x4(high, more_high, 0xdd);
    }
}

FITMENT_INLINE __m512i load_words(const void* p, int count) {  // the first `count` of sixteen, else zero
    return _mm512_maskz_loadu_epi32(__mmask16(count >= 16 ? 0xffff : (1 << count) - 1), p);
}

// Keys of a run: out[word][slot], a row of `run_slots` words for each pair of elements.
FITMENT_INLINE void order_keys(const Bf16* k, int head_size, int count, uint32_t* out) {
    for (int slot = 0; slot < count; slot += 16) {
        for (int word = 0; word < head_size / 2; word += 16) {
            __m512i lines[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                const Bf16* from = k + int64_t(slot + i) * head_size + 2 * word;
                prefetch(from);
                lines[i] = load_words(from, head_size / 2 - word);
            }
            transpose(lines);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) _mm512_store_si512(out + (word + i) * run_slots + slot, lines[i]);
        }
    }
}

// Values of a run: out[pair][element], padded to whole vectors; the slots from `count` on are zero.
FITMENT_INLINE void order_values(const Bf16* v, int head_size, int stride, int count, uint32_t* out) {
    const __m512i low = _mm512_set_epi32(0x002f000f, 0x002e000e, 0x002d000d, 0x002c000c, 0x002b000b, 0x002a000a, 0x00290009, 0x00280008,
                                         0x00270007, 0x00260006, 0x00250005, 0x00240004, 0x00230003, 0x00220002, 0x00210001, 0x00200000);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int slot = 0; slot < count; slot += 2, out += stride) {
        const Bf16 *first = v + int64_t(slot) * head_size, *second = first + head_size;
        for (int d = 0; d < stride; d += 32) {
            int words = (head_size - d) / 2;
            __m512i a = load_words(first + d, words), b = slot + 1 < count ? load_words(second + d, words) : _mm512_setzero_si512();
            prefetch(first + d);
            prefetch(second + d);
            _mm512_store_si512(out + d, _mm512_permutex2var_epi16(a, low, b));
            if (d + 16 < stride) _mm512_store_si512(out + d + 16, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

FITMENT_INLINE __m512bh pair_of(const uint32_t* p) { return bits_as<__m512bh>(_mm512_set1_epi32(int(*p))); }
FITMENT_INLINE __m512bh pairs_at(const uint32_t* p) { return bits_as<__m512bh>(_mm512_load_si512(p)); }

// Scores of `Vectors` times sixteen keys for N rows of `words` pairs each.
template <int N, int Vectors>
inline void score_pairs(const uint32_t* q, int q_stride, const uint32_t* keys, int words, float scale, float* scores) {
    F32 sums[N][Vectors] = {};
    for (int word = 0; word < words; ++word) {
        __m512bh key[Vectors];
#pragma GCC unroll 2
        for (int j = 0; j < Vectors; ++j) key[j] = pairs_at(keys + word * run_slots + 16 * j);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            __m512bh query = pair_of(q + n * q_stride + word);
#pragma GCC unroll 2
            for (int j = 0; j < Vectors; ++j) sums[n][j] = _mm512_dpbf16_ps(sums[n][j], query, key[j]);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int j = 0; j < Vectors; ++j) store(scores + n * attention_chunk + 16 * j, sums[n][j] * scale);
}

// values[n] += weights x the pairs of keys [0, pairs), for Vectors vectors of elements. Of an odd number of keys the last pair's second
// one is left out, whatever it holds.
template <int N, int Vectors>
inline void value_pairs(const uint32_t* weights, const uint32_t* v, int v_stride, int count, float* values, int stride) {
    F32 sums[N][Vectors];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) sums[n][j] = load(values + n * stride + 16 * j);
    auto add = [&](int pair, __m512i mask) __attribute__((always_inline)) {
        __m512bh pairs[Vectors];
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j)
            pairs[j] = bits_as<__m512bh>(_mm512_and_si512(_mm512_load_si512(v + pair * v_stride + 16 * j), mask));
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            __m512bh weight = pair_of(weights + n * (attention_chunk / 2) + pair);
#pragma GCC unroll 4
            for (int j = 0; j < Vectors; ++j) sums[n][j] = _mm512_dpbf16_ps(sums[n][j], weight, pairs[j]);
        }
    };
    for (int pair = 0; pair < count / 2; ++pair) add(pair, _mm512_set1_epi32(-1));
    if (count % 2) add(count / 2, _mm512_set1_epi32(0xffff));
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) store(values + n * stride + 16 * j, sums[n][j]);
}

template <int N>
FITMENT_INLINE void value_row_pairs(const uint32_t* weights, const uint32_t* v, int count, float* values, int stride) {
    int d = 0;
    if (count <= 0) return;
    for (; d + 64 <= stride; d += 64) value_pairs<N, 4>(weights, v + d, stride, count, values + d, stride);
    for (; d < stride; d += 16) value_pairs<N, 1>(weights, v + d, stride, count, values + d, stride);
}

// fp32 as pairs of bf16; what lies past `count` in the last pair is zero.
FITMENT_INLINE void round_pairs(const float* from, int count, uint32_t* to) {
    for_vectors(count, [&](int64_t i, int n) {
        __m256i rounded = bits_as<__m256i>(_mm512_cvtneps_pbh(load_n(from + i, n)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + i / 2), rounded);
    });
}

struct PairBuffers {
    alignas(64) uint32_t run[run_slots / 2 * widest_head];  // of keys or of values
    alignas(64) uint32_t q[attention_row_floats / 2];
    alignas(64) uint32_t weights[attention_rows * attention_chunk / 2];
};

inline void reduce_chunk(const PagedAttention& a, const Block& b, PairBuffers& buffers, float* scores, const Partial& p, const Chunk& c) {
    int size = a.head_size, stride = p.stride;
    c.for_runs<Bf16>(a.k_cache, [&](int h, const Bf16* k, int key, int end) {
        order_keys(k, size, end - key, buffers.run);
        int r = c.first_row;
        while (c.seen[r] <= key) ++r;
        for_row_blocks<6>(int(b.rows) - r, [&]<int N>(Number<N>, int i) {
            int index = h * int(b.rows) + r + i;
            const uint32_t* q = buffers.q + index * (stride / 2);
            float* to = scores + index * attention_chunk + key;
            if (end - key > 16) return score_pairs<N, 2>(q, stride / 2, buffers.run, size / 2, a.scale, to);
            score_pairs<N, 1>(q, stride / 2, buffers.run, size / 2, a.scale, to);
        });
    });
    start_values(b, scores, p, c);
    for_rows(b, [&](int, int r, int index) {
        round_pairs(scores + index * attention_chunk, c.seen[r], buffers.weights + index * (attention_chunk / 2));
    });
    c.for_runs<Bf16>(a.v_cache, [&](int h, const Bf16* v, int key, int end) {
        order_values(v, size, stride, end - key, buffers.run);
        for_row_blocks<6>(int(b.rows) - c.first_row, [&]<int N>(Number<N>, int i) {
            int r = c.first_row + i, index = h * int(b.rows) + r, common = end - key;
            for (int n = 0; n < N; ++n) common = int(lesser(common, greater(c.seen[r + n] - key, 0)));
            common -= common % 2;
            const uint32_t* weights = buffers.weights + index * (attention_chunk / 2) + key / 2;
            float* values = p.values + index * stride;
            value_row_pairs<N>(weights, buffers.run, common, values, stride);
            for (int n = 0; n < N; ++n) {  // what not all of them see, row by row
                int rest = int(lesser(c.seen[r + n], end)) - key - common;
                value_row_pairs<1>(weights + n * (attention_chunk / 2) + common / 2, buffers.run + common / 2 * stride, rest, values + n * stride,
                                   stride);
            }
        });
    });
}
