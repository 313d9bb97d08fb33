// linear with int8 activations: how x is quantized, and its products with codes. Included by linear.inl.
//
// A row of x is quantized in steps that come from its root mean square (or its greatest value, if that is less than 4 rms), finer ones
// for groups whose values are small: 4 rms / 127 x 2^(-level / 2), level 0 to 3. So a group's step costs no multiplication: the products are scaled by one of four
// versions of the weight's scale, and by the row's step at the end.
//
// A few channels of a language model's activations are far greater than the others (arXiv:2208.07339); were they to set the steps, all
// else would be lost. A group with values beyond 4 rms has level 3 and a second byte for each value, which counts `coarse` steps. These
// are multiplied in a pass of their own, group by group, over the rows that have them. The greatest value that a row of n can have is
// sqrt(n) rms; two bytes reach to 359 rms.
//
// Whole numbers add up to the same in any order, and scaled sums are added in the same order for any number of rows: all groups, then
// those with second bytes.

// Found by trial on SmolLM2-135M: the error of its logits is about twice that of bf16 activations, and a sixth of the groups have second
// bytes. With a scale for each group and no second bytes it is five times, and one prompt in three is answered otherwise.
constexpr float bound_rms = 4.0f;
constexpr float coarse = 254.0f;
constexpr int levels = 4;
constexpr float level_steps[levels] = {1.0f, 0.70710678f, 0.5f, 0.35355339f}, level_inverses[levels] = {1.0f, 1.41421356f, 2.0f, 2.82842712f};

// Rows and tiles multiplied together. With AVX-512 their sums, scaled and not, fill 24 of 32 registers, and each byte of x that is
// loaded meets two tiles: loads would be the limit otherwise.
#if defined(__AVX512F__)
constexpr int int8_rows = 6, int8_tiles = 2;
#else
constexpr int int8_rows = 4, int8_tiles = 1;
#endif

// ---- x, quantized ------------------------------------------------------------------------------------------------------------

using I8x16 = int8_t __attribute__((vector_size(16)));

// Every lane combined with every other; all lanes of the result are equal.
template <class V, class Combine>
FITMENT_INLINE auto across(V x, Combine combine) {
    x = combine(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))[0];
}

// Calls f(offset, 16 values) for `count` (a multiple of 8) values; zeros fill the last sixteen.
template <class Function>
FITMENT_INLINE void for_sixteens(const float* x, int count, Function f) {
    int i = 0;
    for (; i + 16 <= count; i += 16) f(i, load_as<F32x16>(x + i));
    if (i < count) {
        F32x16 last = {};
        __builtin_memcpy(&last, x + i, 32);
        f(i, last);
    }
}

FITMENT_INLINE F32x16 max16(F32x16 a, F32x16 b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// The greatest magnitude of a group's values, and their squares added to `squares`. NaN is passed over.
FITMENT_INLINE float greatest_magnitude(const float* x, int count, F32x16& squares) {
    F32x16 most = {};
    for_sixteens(x, count, [&](int, F32x16 values) {
        squares = fma16(values, values, squares);
        most = max16(bits_as<F32x16>(bits_as<U32x16>(values) & 0x7fffffffu), most);
    });
    return across(most, max16);
}

// Rounded to integers, which are small.
FITMENT_INLINE I32x16 rounded(F32x16 x) {
#if defined(__AVX512F__)
    return bits_as<I32x16>(_mm512_cvtps_epi32(x));
#else
    constexpr float magic = 0x1.8p23f;  // adding it rounds to an integer, to even, that lies in the low bits
    return bits_as<I32x16>(x + magic) - bits_as<int32_t>(magic);
#endif
}

// Sixteen bytes (or the first eight) in the order of the weight's words.
template <bool Bytes>
FITMENT_INLINE void store_bytes(uint8_t* out, I32x16 values, int count) {
#if defined(__AVX512F__)
    I8x16 bytes = bits_as<I8x16>(_mm512_cvtepi32_epi8(bits_as<__m512i>(values)));
#else
    I8x16 bytes = __builtin_convertvector(values, I8x16);
#endif
    if constexpr (Bytes) {
        bytes = __builtin_shufflevector(bytes, bytes, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    } else {
        bytes = __builtin_shufflevector(bytes, bytes, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    }
    __builtin_memcpy(out, &bytes, count < 16 ? 8 : 16);
}

// What is known of a group of a quantized row.
struct Group {
    float total;      // of its values, in the row's steps
    int32_t version;  // bytes from the weight's scale to the version of its level
};

// `marks` gets, a row of x apart, whether each group has second bytes.
template <bool Bytes>
FITMENT_INLINE void quantize_row(const Layout& l, const float* x, int cols, uint8_t* row, uint8_t* marks, int64_t n) {
    auto step = reinterpret_cast<float*>(row + l.step_at);
    auto groups = reinterpret_cast<Group*>(row + l.groups_at);
    F32x16 squares = {};
    float most = 0;
    for (int g = 0; g < l.groups; ++g) {
        groups[g].total = greatest_magnitude(x + int64_t(g) * l.group, l.group, squares);
        most = groups[g].total > most ? groups[g].total : most;
    }
    auto add = [](auto a, auto b) { return a + b; };
    float square = across(squares, add), rms = __builtin_sqrtf(square / float(cols));
    bool is_finite = square <= 3.4e38f;
    bool is_zero = !(rms > 1e-30f);
    float bound = most < bound_rms * rms ? most : bound_rms * rms;
    *step = is_finite ? bound / 127 : __builtin_nanf("");
    float inverse = is_finite && !is_zero ? 127 / bound : 0.0f;
    for (int g = 0; g < l.groups; ++g) {
        const float* values = x + int64_t(g) * l.group;
        uint8_t *first = row + int64_t(g) * l.group, *second = first + l.second_at;
        float highest = groups[g].total;
        bool has_second = inverse > 0 && highest > bound;
        int level = has_second ? levels - 1 : (highest <= bound * level_steps[1]) + (highest <= bound * level_steps[2]) +
                                                  (highest <= bound * level_steps[3]);
        F32x16 factor = splat16(inverse * level_inverses[level]), coarse_factor = factor * (1 / coarse);
        I32x16 total = {}, coarse_total = {};
        for_sixteens(values, l.group, [&](int k, F32x16 part) {
            F32x16 scaled = part * factor;
            if (has_second) {
                I32x16 steps = rounded(part * coarse_factor);
                scaled = fma16(__builtin_convertvector(steps, F32x16), splat16(-coarse), scaled);
                coarse_total += steps;
                store_bytes<Bytes>(second + k, steps, l.group - k);
            }
            I32x16 steps = is_finite ? rounded(scaled) : I32x16{};
            total += steps;
            store_bytes<Bytes>(first + k, steps, l.group - k);
        });
        float sum = float(int32_t(across(total, add)));
        if (has_second) sum += coarse * float(int32_t(across(coarse_total, add)));
        groups[g] = {level_steps[level] * sum, level * tile_rows * 4};
        marks[g * n] = has_second;
    }
}

// The rows of each chunk and group that have second bytes: rows[starts[i]] to rows[starts[i + 1]], i = chunk x groups + group.
struct Seconds {
    int32_t* starts;
    uint8_t* rows;
};

FITMENT_INLINE Seconds find_seconds(const Layout& l, const uint8_t* marks, int64_t n, int chunk, uint8_t* memory) {
    int64_t lists = l.groups * ((n + chunk - 1) / chunk);
    Seconds s{reinterpret_cast<int32_t*>(memory), memory + linear_padded(4 * (lists + 1))};
    int32_t count = 0, list = 0;
    for (int64_t start = 0; start < n; start += chunk) {
        int64_t stop = lesser(start + chunk, n);
        for (int g = 0; g < l.groups; ++g) {
            s.starts[list++] = count;
            const uint8_t* of_group = marks + g * n;
            int64_t i = start;
            for (; i + 8 <= stop; i += 8) {
                for (uint64_t some = load_as<uint64_t>(of_group + i); some; some &= some - 1)
                    s.rows[count++] = uint8_t(i - start + __builtin_ctzll(some) / 8);
            }
            for (; i < stop; ++i)
                if (of_group[i]) s.rows[count++] = uint8_t(i - start);
        }
    }
    s.starts[list] = count;
    return s;
}

// ---- Products ----------------------------------------------------------------------------------------------------------------

// Sums of four products of unsigned and signed bytes, added to acc. Codes above 127 take another way where the instruction saturates.
template <bool FullBytes>
FITMENT_INLINE I32x16 dot_bytes(I32x16 acc, U32x16 codes, int32_t word) {
#if defined(__AVX512VNNI__)
    return bits_as<I32x16>(_mm512_dpbusd_epi32(bits_as<__m512i>(acc), bits_as<__m512i>(codes), _mm512_set1_epi32(word)));
#elif defined(__AVX512BW__)
    __m512i x = _mm512_set1_epi32(word), ones = _mm512_set1_epi16(1);
    auto dot = [&](U32x16 c) { return bits_as<I32x16>(_mm512_madd_epi16(_mm512_maddubs_epi16(bits_as<__m512i>(c), x), ones)); };
    if constexpr (!FullBytes) return acc + dot(codes);
    return acc + dot(codes & 0x0f0f0f0f) + (dot((codes >> 4) & 0x0f0f0f0f) << 4);
#elif defined(__AVX2__)
    __m256i x = _mm256_set1_epi32(word), ones = _mm256_set1_epi16(1);
    auto dot = [&](U32x16 c) {
        struct Halves {
            __m256i low, high;
        } h = bits_as<Halves>(c);
        h.low = _mm256_madd_epi16(_mm256_maddubs_epi16(h.low, x), ones);
        h.high = _mm256_madd_epi16(_mm256_maddubs_epi16(h.high, x), ones);
        return bits_as<I32x16>(h);
    };
    if constexpr (!FullBytes) return acc + dot(codes);
    return acc + dot(codes & 0x0f0f0f0f) + (dot((codes >> 4) & 0x0f0f0f0f) << 4);
#else
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc += bits_as<I32x16>((codes >> (8 * i)) & 0xff) * int32_t(int8_t(uint32_t(word) >> (8 * i)));
    return acc;
#endif
}

// Neighbouring tiles: the codes of one group, and how far ahead to fetch (0: nothing).
struct Codes {
    const uint8_t* lines;
    int64_t tile_bytes;
    int group;
    int64_t ahead;
};

// Whole sums of one group: the tiles' codes times bytes of x.
template <int T, int N, bool Bytes>
FITMENT_INLINE void dot_group(const Codes& c, const uint8_t* const (&x)[N], I32x16 (&sums)[T][N]) {
    constexpr int columns = Bytes ? 4 : 8;
    constexpr int chains = T * N <= 2 ? 2 : 1;  // many sums are independent enough
    I32x16 parts[chains][T][N] = {};
    const uint8_t* line = c.lines;
    for (int k = 0; k < c.group; k += columns, line += line_bytes) {
        U32x16 codes[T];
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) {
            if (c.ahead) __builtin_prefetch(line + t * c.tile_bytes + c.ahead);
            codes[t] = load_as<U32x16>(line + t * c.tile_bytes);
        }
#pragma GCC unroll 2
        for (int half = 0; half < columns / 4; ++half) {
            U32x16 bytes[T];
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) bytes[t] = Bytes ? codes[t] : (half ? codes[t] >> 4 : codes[t]) & 0x0f0f0f0f;
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) {
                int32_t word = load_as<int32_t>(x[n] + k + 4 * half);
#pragma GCC unroll 2
                for (int t = 0; t < T; ++t) {
                    I32x16& into = parts[Bytes ? k / columns % chains : half % chains][t][n];
                    into = dot_bytes<Bytes>(into, bytes[t], word);
                }
            }
        }
    }
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[t][n] = chains == 2 ? parts[0][t][n] + parts[chains - 1][t][n] : parts[0][t][n];
}

// The scales and biases of one group of T tiles. Many rows read versions of the scales that were made once, few make theirs.
template <int T>
struct GroupParams {
    F32x16 scale[T], bias[T];
    const uint8_t* versions;
};

template <int T>
FITMENT_INLINE GroupParams<T> group_params(const Weight& w, const Codes& c, const uint8_t* versions) {
    GroupParams<T> of;
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
        const uint8_t* p = c.lines + t * c.tile_bytes + w.group_bytes() - w.param_bytes();
        params(p, w.half_params, of.scale[t], of.bias[t]);
    }
    of.versions = versions;
    return of;
}

constexpr int version_bytes = levels * tile_rows * 4;

template <int T>
inline void make_versions(const Weight& w, Codes c, int groups, uint8_t* versions) {
    for (int g = 0; g < groups; ++g, c.lines += w.group_bytes()) {
        GroupParams<T> of = group_params<T>(w, c, nullptr);
        for (int t = 0; t < T; ++t, versions += version_bytes)
            for (int level = 0; level < levels; ++level) {
                F32x16 scale = of.scale[t] * level_steps[level];
                __builtin_memcpy(versions + level * tile_rows * 4, &scale, sizeof scale);
            }
    }
}

// First bytes of N rows against T tiles, all groups; a row's sums go to `out`, T x 16 of them.
template <int T, int N, bool Bytes>
inline void multiply_first(const Weight& w, const Layout& l, Codes c, const uint8_t* x, const uint8_t* versions, F32x16* out) {
    F32x16 acc[T][N] = {};
    const uint8_t* rows[N];
    const Group* groups[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        rows[n] = x + n * l.row_bytes;
        groups[n] = reinterpret_cast<const Group*>(rows[n] + l.groups_at);
    }
    for (int g = 0; g < l.groups; ++g, c.lines += w.group_bytes()) {
        I32x16 sums[T][N];
        dot_group<T, N, Bytes>(c, rows, sums);
        GroupParams<T> of = group_params<T>(w, c, versions);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            Group group = groups[n][g];
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                F32x16 scale = versions ? load_as<F32x16>(versions + t * version_bytes + group.version)
                                        : of.scale[t] * level_steps[group.version / (tile_rows * 4)];
                acc[t][n] = fma16(scale, __builtin_convertvector(sums[t][n], F32x16), acc[t][n]);
                acc[t][n] = fma16(of.bias[t], splat16(group.total), acc[t][n]);
            }
            rows[n] += l.group;
        }
        if (versions) versions += T * version_bytes;
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) out[n * T + t] = acc[t][n];
}

// Second bytes of N rows of a chunk, given by their numbers, for group g; added to their sums.
template <int T, int N, bool Bytes>
inline void multiply_second(const Weight& w, const Layout& l, const Codes& c, int g, const uint8_t* x, const uint8_t* numbers, F32x16* out) {
    const uint8_t* seconds[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) seconds[n] = x + numbers[n] * l.row_bytes + l.second_at + int64_t(g) * l.group;
    I32x16 sums[T][N];
    dot_group<T, N, Bytes>(c, seconds, sums);
    GroupParams<T> of = group_params<T>(w, c, nullptr);
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
        F32x16 scale = of.scale[t] * (coarse * level_steps[levels - 1]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            F32x16& into = out[numbers[n] * T + t];
            into = fma16(scale, __builtin_convertvector(sums[t][n], F32x16), into);
        }
    }
}

// Rows [start, start + rows) against T tiles. `versions` is memory for those of T tiles, or null for few rows; `starts` are the lists of
// this chunk.
template <int T, bool Bytes>
inline void multiply_int8_tiles(const Linear& a, const Layout& l, const uint8_t* x, int64_t start, int rows, const int32_t* starts,
                                const uint8_t* numbers, uint8_t* versions, int tile) {
    const Weight& w = *a.weight;
    F32x16 sums[int8_most_rows * T];
    Codes c{w.data + tile * w.tile_bytes, w.tile_bytes, l.group, 0};
    int first = tile * tile_rows, count = int(lesser(w.rows - first, T * tile_rows));
    if (versions) make_versions<T>(w, c, l.groups, versions);
    for_row_blocks<int8_rows>(rows, [&]<int N>(Number<N>, int i) {
        // One or two rows stream the weight. More stay with a tile, and the next one is fetched meanwhile.
        c.ahead = !versions ? 4096 : i == 0 ? T * w.tile_bytes : 0;
        multiply_first<T, N, Bytes>(w, l, c, x + i * l.row_bytes, versions, sums + i * T);
    });
    c.ahead = 0;
    for (int g = 0; g < l.groups; ++g, c.lines += w.group_bytes()) {
        for_row_blocks<int8_rows>(starts[g + 1] - starts[g], [&]<int N>(Number<N>, int i) {
            multiply_second<T, N, Bytes>(w, l, c, g, x, numbers + starts[g] + i, sums);
        });
    }
    with_type(a.out_type, [&]<class O>(O*) {
        for (int i = 0; i < rows; ++i) {
            O* out = static_cast<O*>(a.out) + (start + i) * a.out_stride + first;
            float step = *reinterpret_cast<const float*>(x + i * l.row_bytes + l.step_at);
            auto values = reinterpret_cast<const float*>(sums + i * T);
            for_vectors(count, [&](int64_t j, int m) { store_n(out + j, m, load_n(values + j, m) * step); });
        }
    });
}

// A chunk of rows, which the nearer caches hold, meets all tiles of the part.
template <bool Bytes>
inline void multiply_int8(const Linear& a, const Layout& l, const uint8_t* x, const uint8_t* marks, uint8_t* memory, int part, int parts) {
    Seconds seconds = find_seconds(l, marks, a.n, int8_chunk(a), memory);
    uint8_t* versions = a.n > 2 ? memory + int8_list_bytes(a) : nullptr;
    int64_t tiles = a.weight->tiles(), runs = (tiles + int8_tiles - 1) / int8_tiles;
    int64_t first = int8_tiles * (runs * part / parts), end = lesser(int8_tiles * (runs * (part + 1) / parts), tiles);
    const int32_t* starts = seconds.starts;
    for (int64_t start = 0; start < a.n; start += int8_chunk(a), starts += l.groups) {
        int rows = int(lesser(int8_chunk(a), a.n - start));
        const uint8_t* chunk = x + start * l.row_bytes;
        int64_t tile = first;
        if (int8_tiles == 2 && a.n > 2)
            for (; tile + 2 <= end; tile += 2)
                multiply_int8_tiles<int8_tiles, Bytes>(a, l, chunk, start, rows, starts, seconds.rows, versions, int(tile));
        for (; tile < end; ++tile) multiply_int8_tiles<1, Bytes>(a, l, chunk, start, rows, starts, seconds.rows, versions, int(tile));
    }
}
