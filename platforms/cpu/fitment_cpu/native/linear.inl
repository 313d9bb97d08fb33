// linear and embedding over packed weights (pack.h).
//
// A thread owns a stretch of tiles, 16 output rows each; for every block of rows of x it streams the tile once. What x is multiplied as
// decides the arithmetic: fp32; bf16 (dot products of pairs where the instruction set has them, else fp32 products of the rounded
// values); int8 with a scale for each row and group. Sums run along a group in two chains, and are folded group by group, in the same
// order for any number of rows: a row's result does not depend on the others.

namespace linear {

using F32x16 = float __attribute__((vector_size(64)));
using I32x16 = int32_t __attribute__((vector_size(64)));
using U32x16 = uint32_t __attribute__((vector_size(64)));
using U16x16 = uint16_t __attribute__((vector_size(32)));

#if defined(__AVX512F__)
constexpr int widest_rows = 12;  // with one chain of sums each, in 32 registers
#else
constexpr int widest_rows = 8;
#endif

constexpr int dense_group = 64;  // columns of a dense weight that are summed before they are folded

template <class V>
FITMENT_INLINE V load_as(const void* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

FITMENT_INLINE F32x16 fma16(F32x16 a, F32x16 b, F32x16 c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

FITMENT_INLINE F32x16 splat16(float x) { return x - F32x16{}; }

FITMENT_INLINE F32x16 half16(const void* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(load_as<__m256i>(p));
#else
    F32x16 out;
    auto from = static_cast<const Fp16*>(p);
    for (int i = 0; i < 16; i += lanes) {
        F32 part = load(from + i);
        __builtin_memcpy(reinterpret_cast<char*>(&out) + 4 * i, &part, sizeof part);
    }
    return out;
#endif
}

// The nibble at bits 0..3 of each word as a number.
FITMENT_INLINE F32x16 nibble_value(U32x16 word) {
#if defined(__AVX512F__)
    const F32x16 values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return _mm512_permutexvar_ps(bits_as<__m512i>(word), values);
#else
    return __builtin_convertvector(bits_as<I32x16>(word & 15), F32x16);
#endif
}

// ---- x, converted ------------------------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr bool has_bf16_dot = true;
#else
constexpr bool has_bf16_dot = false;
#endif

// How x lies in scratch memory: a row's values, then their sum in each group; of int8 second bytes too, the row's step, and groups.
struct Layout {
    int groups, group;       // of the sums; of a dense weight there are none
    bool is_int8, is_bf16;   // else fp32 values
    int64_t row_bytes, sums_at;
    int64_t second_at, step_at, groups_at;  // of int8 values
};

FITMENT_INLINE Layout layout_of(const Linear& a) {
    const Weight& w = *a.weight;
    Layout l{};
    l.groups = w.groups();
    l.group = w.group;
    l.is_int8 = a.activations == Activations::int8;
    l.is_bf16 = a.activations == Activations::bf16 && has_bf16_dot && w.kind != Kind::fp32 && w.kind != Kind::fp16;
    int64_t values = linear_padded(int64_t(w.padded_cols()) * (l.is_int8 ? 1 : l.is_bf16 ? 2 : 4) + 4);
    if (l.is_int8) {
        l.second_at = values;
        l.step_at = 2 * values;
        l.groups_at = l.step_at + 64;
        l.row_bytes = l.groups_at + linear_padded(int64_t(8) * l.groups);
    } else {
        l.sums_at = values;
        l.row_bytes = values + linear_padded(int64_t(4) * l.groups);
    }
    return l;
}

// A row's values as fp32, in order.
template <class T>
FITMENT_INLINE void widen(const T* x, float* out, int cols) {
    for_vectors(cols, [&](int64_t i, int n) { store_n(out + i, n, load_n(x + i, n)); });
}

FITMENT_INLINE float group_sum(const float* x, int count) {
    F32 sums = {};
    float rest = 0;
    int i = 0;
    for (; i + lanes <= count; i += lanes) sums += load(x + i);
    for (; i < count; ++i) rest += x[i];
    return sum(sums) + rest;
}

FITMENT_INLINE void params(const uint8_t*& p, bool half_params, F32x16& scale, F32x16& bias) {
    if (half_params) {
        scale = half16(p);
        bias = half16(p + 32);
        p += 64;
    } else {
        scale = load_as<F32x16>(p);
        bias = load_as<F32x16>(p + 64);
        p += 128;
    }
}

#include "linear_int8.inl"

// Row i of x into its place behind `x`; `wide` is memory for a row in fp32.
inline void convert_row(const Linear& a, const Layout& l, int64_t i, uint8_t* x, float* wide) {
    int cols = a.weight->cols;
    uint8_t* row = x + i * l.row_bytes;
    bool in_place = !l.is_int8 && !l.is_bf16;
    float* values = in_place ? reinterpret_cast<float*>(row) : wide;
    with_type(a.x_type, [&]<class T>(T*) { widen(static_cast<const T*>(a.x) + i * a.x_stride, values, cols); });
    for (int k = cols, padded = a.weight->padded_cols(); k < padded; ++k) values[k] = 0;
    if (l.is_int8) {
        uint8_t* marks = x + a.n * l.row_bytes + i;
        bool is_bytes = a.weight->kind == Kind::affine8;
        return is_bytes ? quantize_row<true>(l, values, cols, row, marks, a.n) : quantize_row<false>(l, values, cols, row, marks, a.n);
    }
    if (a.activations == Activations::bf16) {
        auto out = reinterpret_cast<Bf16*>(row);
        for_vectors(a.weight->padded_cols(), [&](int64_t k, int n) {
            U16 rounded = from_fp32(load_n(values + k, n), Bf16{});
            store_n(values + k, n, to_fp32(rounded, Bf16{}));
            if (l.is_bf16) __builtin_memcpy(out + k, &rounded, size_t(2 * n));
        });
        if (l.is_bf16 && cols % 2) out[cols] = {};
    }
    auto sums = reinterpret_cast<float*>(row + l.sums_at);
    for (int g = 0; g < l.groups; ++g) sums[g] = group_sum(values + int64_t(g) * l.group, l.group);
}

// ---- One tile against N rows -------------------------------------------------------------------------------------------------

struct Tile {
    const uint8_t* data;
    const Weight* weight;
    const Layout* layout;
    const uint8_t* x;  // the first row
    bool is_first;     // the first block of rows that meets this tile
};

template <int N>
struct Rows {
    F32x16 acc[N];
};

// One or two rows stream the weight: what lies 4 KB ahead is fetched. More rows stay with a tile: the next tile is fetched meanwhile.
template <int N>
FITMENT_INLINE void prefetch(const Tile& t, const uint8_t* p) {
    if constexpr (N <= 2) {
        __builtin_prefetch(p + 4096);
    } else if (t.is_first) {
        __builtin_prefetch(p + t.weight->tile_bytes, 0, 2);
    }
}

template <int N, bool Bytes>
FITMENT_INLINE void affine_fp32(const Tile& t, Rows<N>& rows) {
    constexpr int columns = Bytes ? 4 : 8;
    constexpr const int* bits = Bytes ? byte_bits : nibble_bits;
    const Layout& l = *t.layout;
    const uint8_t* p = t.data;
    for (int g = 0; g < l.groups; ++g) {
        F32x16 sums[N][2] = {};
        for (int k = g * l.group; k < (g + 1) * l.group; k += columns, p += line_bytes) {
            prefetch<N>(t, p);
            U32x16 line = load_as<U32x16>(p);
#pragma GCC unroll 16
            for (int c = 0; c < columns; ++c) {
                F32x16 w = Bytes ? __builtin_convertvector(bits_as<I32x16>((line >> bits[c]) & 0xff), F32x16) : nibble_value(line >> bits[c]);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) {
                    float x = reinterpret_cast<const float*>(t.x + n * l.row_bytes)[k + c];
                    sums[n][c % 2] = fma16(w, splat16(x), sums[n][c % 2]);
                }
            }
        }
        F32x16 scale, bias;
        params(p, t.weight->half_params, scale, bias);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            float total = reinterpret_cast<const float*>(t.x + n * l.row_bytes + l.sums_at)[g];
            rows.acc[n] = fma16(scale, sums[n][0] + sums[n][1], rows.acc[n]);
            rows.acc[n] = fma16(bias, splat16(total), rows.acc[n]);
        }
    }
}

#if defined(__AVX512BF16__)
FITMENT_INLINE F32x16 dot_pairs(F32x16 acc, U32x16 pairs, uint32_t word) {
    return _mm512_dpbf16_ps(acc, bits_as<__m512bh>(pairs), bits_as<__m512bh>(_mm512_set1_epi32(int(word))));
}

// The nibbles at bits 0..3 and 16..19 as a pair of bf16 numbers, each 128 too great: 128 + c is 0x4300 | c.
FITMENT_INLINE U32x16 nibble_pair(U32x16 word) {
    return bits_as<U32x16>(_mm512_ternarylogic_epi32(bits_as<__m512i>(word), _mm512_set1_epi32(0x000f000f), _mm512_set1_epi32(0x43004300), 0xea));
}

template <int N, bool Bytes>
FITMENT_INLINE void affine_bf16(const Tile& t, Rows<N>& rows) {
    constexpr int columns = Bytes ? 4 : 8;
    constexpr int chains = Bytes ? 2 : 1;  // of bytes, low and high nibbles are summed apart
    const Layout& l = *t.layout;
    const uint8_t* p = t.data;
    for (int g = 0; g < l.groups; ++g) {
        F32x16 sums[N][chains] = {};
        for (int k = g * l.group; k < (g + 1) * l.group; k += columns, p += line_bytes) {
            prefetch<N>(t, p);
            U32x16 line = load_as<U32x16>(p);
#pragma GCC unroll 4
            for (int step = 0; step < 4; ++step) {
                U32x16 pairs = nibble_pair(line >> (4 * step));
                int word = Bytes ? step / 2 : step;  // of bytes, a pair's low nibbles come first, then its high ones
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) {
                    uint32_t x = load_as<uint32_t>(t.x + n * l.row_bytes + 2 * k + 4 * word);
                    sums[n][step % chains] = dot_pairs(sums[n][step % chains], pairs, x);
                }
            }
        }
        F32x16 scale, bias;
        params(p, t.weight->half_params, scale, bias);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            float total = reinterpret_cast<const float*>(t.x + n * l.row_bytes + l.sums_at)[g];
            F32x16 products = sums[n][0] - splat16(128.0f * total);
            if constexpr (Bytes) products = fma16(splat16(16.0f), sums[n][1] - splat16(128.0f * total), products);
            rows.acc[n] = fma16(scale, products, rows.acc[n]);
            rows.acc[n] = fma16(bias, splat16(total), rows.acc[n]);
        }
    }
}

template <int N>
FITMENT_INLINE void dense_bf16(const Tile& t, Rows<N>& rows) {
    const Layout& l = *t.layout;
    const uint8_t* p = t.data;
    int pairs = (t.weight->cols + 1) / 2;
    for (int start = 0; start < pairs; start += dense_group / 2) {
        F32x16 sums[N] = {};
        int stop = pairs < start + dense_group / 2 ? pairs : start + dense_group / 2;
        for (int k = start; k < stop; ++k, p += line_bytes) {
            prefetch<N>(t, p);
            U32x16 line = load_as<U32x16>(p);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) {
                sums[n] = dot_pairs(sums[n], line, load_as<uint32_t>(t.x + n * l.row_bytes + 4 * k));
            }
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) rows.acc[n] += sums[n];
    }
}
#endif

// Column k of the line that holds it; lines of 16-bit types hold two.
template <Kind K>
FITMENT_INLINE F32x16 dense_column(const uint8_t* line, int half) {
    if constexpr (K == Kind::fp32) return load_as<F32x16>(line);
    if constexpr (K == Kind::fp16) return half16(line + 32 * half);
    U32x16 pair = load_as<U32x16>(line);
    return bits_as<F32x16>(half ? pair & 0xffff0000u : pair << 16);
}

template <int N, Kind K>
FITMENT_INLINE void dense_fp32(const Tile& t, Rows<N>& rows) {
    constexpr int columns = K == Kind::fp32 ? 1 : 2;
    const Layout& l = *t.layout;
    const uint8_t* p = t.data;
    int cols = t.weight->cols;
    for (int start = 0; start < cols; start += dense_group) {
        F32x16 sums[N] = {};
        int stop = cols < start + dense_group ? cols : start + dense_group;
        for (int k = start; k < stop; k += columns, p += line_bytes) {
            prefetch<N>(t, p);
#pragma GCC unroll 2
            for (int c = 0; c < columns; ++c) {
                if (c && k + c >= stop) break;
                F32x16 w = dense_column<K>(p, c);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n)
                    sums[n] = fma16(w, splat16(reinterpret_cast<const float*>(t.x + n * l.row_bytes)[k + c]), sums[n]);
            }
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) rows.acc[n] += sums[n];
    }
}

// ---- The kernel --------------------------------------------------------------------------------------------------------------

template <int N, class Product>
FITMENT_INLINE void multiply_rows(const Linear& a, const Layout& l, int tile, const uint8_t* x, int64_t i, Product product) {
    const Weight& w = *a.weight;
    Tile t{w.data + tile * w.tile_bytes, &w, &l, x + i * l.row_bytes, i == 0};
    Rows<N> rows = {};
    product(t, rows);
    int first = tile * tile_rows, count = w.rows - first < tile_rows ? w.rows - first : tile_rows;
    with_type(a.out_type, [&]<class T>(T*) {
        for (int n = 0; n < N; ++n) {
            T* out = static_cast<T*>(a.out) + (i + n) * a.out_stride + first;
            float values[tile_rows];
            __builtin_memcpy(values, &rows.acc[n], sizeof values);
            for_vectors(count, [&](int64_t j, int m) { store_n(out + j, m, load_n(values + j, m)); });
        }
    });
}

// `Widest` rows are multiplied together: as many as the registers take.
template <int Widest, class Product>
FITMENT_INLINE void multiply_tiles(const Linear& a, const Layout& l, const uint8_t* x, int part, int parts, Product product) {
    int64_t tiles = a.weight->tiles();
    for (int64_t tile = tiles * part / parts; tile < tiles * (part + 1) / parts; ++tile) {
        int64_t i = 0;
        for (; i + Widest <= a.n; i += Widest) multiply_rows<Widest>(a, l, int(tile), x, i, product);
        for (; i + 8 <= a.n; i += 8) multiply_rows<8>(a, l, int(tile), x, i, product);
        if (a.n - i >= 4) multiply_rows<4>(a, l, int(tile), x, i, product), i += 4;
        if (a.n - i >= 2) multiply_rows<2>(a, l, int(tile), x, i, product), i += 2;
        if (a.n - i >= 1) multiply_rows<1>(a, l, int(tile), x, i, product);
    }
}

// `memory` is this part's own.
inline void multiply_with(const Linear& a, const uint8_t* x, uint8_t* memory, int part, int parts) {
    Layout l = layout_of(a);
    bool is_bytes = a.weight->kind == Kind::affine8;
    if (l.is_int8) {
        const uint8_t* marks = x + a.n * l.row_bytes;
        if (is_bytes) return multiply_int8<true>(a, l, x, marks, memory, part, parts);
        return multiply_int8<false>(a, l, x, marks, memory, part, parts);
    }
    auto tiles = [&](auto product) { multiply_tiles<8>(a, l, x, part, parts, product); };
    auto wide_tiles = [&](auto product) { multiply_tiles<widest_rows>(a, l, x, part, parts, product); };
    switch (a.weight->kind) {
        case Kind::affine4:
        case Kind::affine8:
#if defined(__AVX512BF16__)
            if (l.is_bf16) {
                if (is_bytes) return tiles([]<int N>(const Tile& t, Rows<N>& r) { affine_bf16<N, true>(t, r); });
                return wide_tiles([]<int N>(const Tile& t, Rows<N>& r) { affine_bf16<N, false>(t, r); });
            }
#endif
            if (is_bytes) return tiles([]<int N>(const Tile& t, Rows<N>& r) { affine_fp32<N, true>(t, r); });
            return tiles([]<int N>(const Tile& t, Rows<N>& r) { affine_fp32<N, false>(t, r); });
        case Kind::bf16:
#if defined(__AVX512BF16__)
            if (l.is_bf16) return wide_tiles([]<int N>(const Tile& t, Rows<N>& r) { dense_bf16<N>(t, r); });
#endif
            return wide_tiles([]<int N>(const Tile& t, Rows<N>& r) { dense_fp32<N, Kind::bf16>(t, r); });
        case Kind::fp16: return wide_tiles([]<int N>(const Tile& t, Rows<N>& r) { dense_fp32<N, Kind::fp16>(t, r); });
        case Kind::fp32: return wide_tiles([]<int N>(const Tile& t, Rows<N>& r) { dense_fp32<N, Kind::fp32>(t, r); });
    }
}

// What a part has of scratch memory to itself: while x is converted a row in fp32, then the lists of rows with second bytes.
FITMENT_INLINE uint8_t* own_memory(const Linear& a, int part) {
    return static_cast<uint8_t*>(a.scratch) + linear_shared_bytes(a) + part * linear_own_bytes(a);
}

inline void convert(const void* args, int part, int parts) {
    const Linear& a = *static_cast<const Linear*>(args);
    Layout l = layout_of(a);
    auto wide = reinterpret_cast<float*>(own_memory(a, part));
    int64_t n = a.n;
    for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) convert_row(a, l, i, static_cast<uint8_t*>(a.scratch), wide);
}

inline void multiply(const void* args, int part, int parts) {
    const Linear& a = *static_cast<const Linear*>(args);
    multiply_with(a, static_cast<const uint8_t*>(a.scratch), own_memory(a, part), part, parts);
}

// Every thread has scratch memory of its own, and no barrier parts the phases.
inline void convert_and_multiply(const void* args, int part, int parts) {
    Linear a = *static_cast<const Linear*>(args);
    a.scratch = static_cast<uint8_t*>(a.scratch) + part * linear_scratch_bytes(a, 1);
    convert(&a, 0, 1);
    multiply_with(a, static_cast<const uint8_t*>(a.scratch), own_memory(a, 0), part, parts);
}

// ---- embedding ---------------------------------------------------------------------------------------------------------------

inline void unpack_row(const Weight& w, int row, float* out) {
    const uint8_t* p = w.data + int64_t(row / tile_rows) * w.tile_bytes;
    int lane = row % tile_rows;
    if (w.kind == Kind::fp32) {
        for (int k = 0; k < w.cols; ++k) out[k] = load_as<float>(p + int64_t(k) * line_bytes + 4 * lane);
        return;
    }
    if (w.kind == Kind::bf16 || w.kind == Kind::fp16) {
        for (int k = 0; k < w.cols; ++k) {
            const uint8_t* line = p + int64_t(k / 2) * line_bytes;
            if (w.kind == Kind::bf16) {
                out[k] = bits_as<float>(uint32_t(load_as<uint16_t>(line + 4 * lane + 2 * (k % 2))) << 16);
            } else {
                out[k] = float(load_as<_Float16>(line + 32 * (k % 2) + 2 * lane));
            }
        }
        return;
    }
    bool is_bytes = w.kind == Kind::affine8;
    int columns = is_bytes ? 4 : 8;
    for (int g = 0; g < w.groups(); ++g) {
        float* values = out + int64_t(g) * w.group;
        for (int k = 0; k < w.group; k += columns, p += line_bytes) {
            uint32_t word = load_as<uint32_t>(p + 4 * lane);
            for (int c = 0; c < columns; ++c)
                values[k + c] = float(is_bytes ? (word >> byte_bits[c]) & 0xff : (word >> nibble_bits[c]) & 15);
        }
        float scale, bias;
        if (w.half_params) {
            scale = float(load_as<_Float16>(p + 2 * lane));
            bias = float(load_as<_Float16>(p + 32 + 2 * lane));
            p += 64;
        } else {
            scale = load_as<float>(p + 4 * lane);
            bias = load_as<float>(p + 64 + 4 * lane);
            p += 128;
        }
        for (int k = 0; k < w.group; ++k) values[k] = __builtin_fmaf(scale, values[k], bias);
    }
}

inline void embed(const void* args, int part, int parts) {
    const Embedding& a = *static_cast<const Embedding*>(args);
    const Weight& w = *a.weight;
    int64_t n = a.n;
    auto row = static_cast<float*>(__builtin_malloc(sizeof(float) * size_t(w.padded_cols())));
    if (!row) __builtin_abort();
    with_type(a.type, [&]<class T>(T*) {
        for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) {
            int32_t id = a.ids[i];
            T* out = static_cast<T*>(a.out) + i * a.out_stride;
            if (id >= 0 && id < w.rows) unpack_row(w, id, row);
            bool is_inside = id >= 0 && id < w.rows;
            for_vectors(w.cols, [&](int64_t k, int m) { store_n(out + k, m, is_inside ? load_n(row + k, m) : splat(__builtin_nanf(""))); });
        }
    });
    __builtin_free(row);
}

}  // namespace linear

constexpr fitment::Kernel linear_kernel{{&linear::convert, &linear::multiply, nullptr}};
constexpr fitment::Kernel linear_few_kernel{{&linear::convert_and_multiply, nullptr, nullptr}};
constexpr fitment::Kernel embedding_kernel{{&linear::embed, nullptr, nullptr}};
