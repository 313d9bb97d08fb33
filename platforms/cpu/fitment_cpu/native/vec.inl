// The vector of this instruction set: GCC vector types (clang has them too), with intrinsics where those fall short.
//
// Every operation is exact about its order and its fused multiplications, so that a row gives the same bits wherever it lies.

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif
constexpr int half_lanes = lanes / 2;

using F32 = float __attribute__((vector_size(4 * lanes)));
using I32 = int32_t __attribute__((vector_size(4 * lanes)));
using U32 = uint32_t __attribute__((vector_size(4 * lanes)));
using U16 = uint16_t __attribute__((vector_size(2 * lanes)));
using F64 = double __attribute__((vector_size(8 * half_lanes)));
using I64 = int64_t __attribute__((vector_size(8 * half_lanes)));
using U64 = uint64_t __attribute__((vector_size(8 * half_lanes)));
using HalfF32 = float __attribute__((vector_size(4 * half_lanes)));

FITMENT_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
FITMENT_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

FITMENT_INLINE F32 splat(float x) { return x - F32{}; }
FITMENT_INLINE F64 splat64(double x) { return x - F64{}; }

FITMENT_INLINE F32 lane_index() {
    F32 index;
    for (int i = 0; i < lanes; ++i) index[i] = float(i);
    return index;
}

template <class To, class From>
FITMENT_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// a * b + c with one rounding, where the instruction set has it.
FITMENT_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

FITMENT_INLINE F64 fma(F64 a, F64 b, F64 c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f64(c, a, b);
#else
    return a * b + c;
#endif
}

// The greater and the lesser one; b where either is NaN.
FITMENT_INLINE F32 max(F32 a, F32 b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

FITMENT_INLINE F32 min(F32 a, F32 b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

// ---- Conversions -------------------------------------------------------------------------------------------------------------

FITMENT_INLINE F32 to_fp32(U16 x, Bf16) { return bits_as<F32>(__builtin_convertvector(x, U32) << 16); }

FITMENT_INLINE F32 to_fp32(U16 x, Fp16) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(bits_as<__m256i>(x));
#elif defined(__AVX2__) && defined(__F16C__)
    return _mm256_cvtph_ps(bits_as<__m128i>(x));
#else
    U32 wide = __builtin_convertvector(x, U32);
    U32 magnitude = (wide & 0x7fff) << 13;
    U32 finite = bits_as<U32>(bits_as<F32>(magnitude) * 0x1p112f);
    U32 special = magnitude | 0x7f800000u;
    return bits_as<F32>((magnitude >= 0x0f800000u ? special : finite) | ((wide & 0x8000) << 16));
#endif
}

// To the nearest, ties to even; a NaN stays one.
FITMENT_INLINE U16 from_fp32(F32 x, Bf16) {
    U32 u = bits_as<U32>(x);
    U32 rounded = (u + (0x7fffu + ((u >> 16) & 1))) >> 16;
    U32 nan = (u >> 16) | 0x40;
    return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded, U16);
}

FITMENT_INLINE U16 from_fp32(F32 x, Fp16) {
    constexpr uint32_t denormal_magic = (127 - 15 + 23 - 10 + 1) << 23;
    U32 u = bits_as<U32>(x);
    U32 sign = u & 0x80000000u;
    u ^= sign;
    U32 special = u > 0x7f800000u ? U32{} + 0x7e00u : U32{} + 0x7c00u;
    U32 denormal = bits_as<U32>(bits_as<F32>(u) + bits_as<F32>(U32{} + denormal_magic)) - denormal_magic;
    U32 normal = (u + (((15u - 127u) << 23) + 0xfff) + ((u >> 13) & 1)) >> 13;
    U32 magnitude = u >= (143u << 23) ? special : (u < (113u << 23) ? denormal : normal);
    return __builtin_convertvector(magnitude | (sign >> 16), U16);
}

// ---- Loads and stores: `lanes` elements, or the first n (the rest reads as 0) ---------------------------------------------------

FITMENT_INLINE F32 load(const float* p) {
    F32 x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

FITMENT_INLINE void store(float* p, F32 x) { __builtin_memcpy(p, &x, sizeof x); }

template <class T>
FITMENT_INLINE F32 load(const T* p) {
    U16 x;
    __builtin_memcpy(&x, p, sizeof x);
    return to_fp32(x, T{});
}

template <class T>
FITMENT_INLINE void store(T* p, F32 x) {
    U16 rounded = from_fp32(x, T{});
    __builtin_memcpy(p, &rounded, sizeof rounded);
}

FITMENT_INLINE F32 load_part(const float* p, int n) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
#else
    float x[lanes] = {};
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return load(x);
#endif
}

FITMENT_INLINE void store_part(float* p, int n, F32 x) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x);
#else
    for (int i = 0; i < n; ++i) p[i] = x[i];
#endif
}

template <class T>
FITMENT_INLINE F32 load_part(const T* p, int n) {
    T x[lanes] = {};
    __builtin_memcpy(x, p, sizeof(T) * n);
    return load(x);
}

template <class T>
FITMENT_INLINE void store_part(T* p, int n, F32 x) {
    T rounded[lanes];
    store(rounded, x);
    __builtin_memcpy(p, rounded, sizeof(T) * n);
}

// Calls f(offset, n) for each whole vector of a row (n is `lanes`), then for what is left of it.
template <class Function>
FITMENT_INLINE void for_vectors(int64_t count, Function f) {
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) f(i, lanes);
    if (i < count) f(i, int(count - i));
}

template <class T>
FITMENT_INLINE F32 load_n(const T* p, int n) {
    return n == lanes ? load(p) : load_part(p, n);
}

template <class T>
FITMENT_INLINE void store_n(T* p, int n, F32 x) {
    n == lanes ? store(p, x) : store_part(p, n, x);
}

template <class From, class To>
FITMENT_INLINE void convert(const From* from, To* to, int count) {
    for_vectors(count, [&](int64_t i, int n) { store_n(to + i, n, load_n(from + i, n)); });
}

template <class T>
FITMENT_INLINE void convert(const T* from, T* to, int count) {
    __builtin_memcpy(to, from, sizeof(T) * count);
}

// ---- Across lanes --------------------------------------------------------------------------------------------------------------

// One step of summing `lanes` vectors at once. combine<1>, <2>, … over neighbours in turn leaves the sum of vector i in lane i;
// the order in which a vector's own lanes are added is the same for each i.
template <int Level>
FITMENT_INLINE F32 combine(F32 a, F32 b) {
#if defined(__AVX512F__)
    if constexpr (Level == 1) return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    if constexpr (Level == 2) {
        __m512d c = bits_as<__m512d>(a), d = bits_as<__m512d>(b);
        return bits_as<F32>(_mm512_unpacklo_pd(c, d)) + bits_as<F32>(_mm512_unpackhi_pd(c, d));
    }
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
#elif defined(__AVX2__) && defined(__FMA__)
    if constexpr (Level == 1) return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    if constexpr (Level == 2) {
        __m256d c = bits_as<__m256d>(a), d = bits_as<__m256d>(b);
        return bits_as<F32>(_mm256_unpacklo_pd(c, d)) + bits_as<F32>(_mm256_unpackhi_pd(c, d));
    }
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
#else
    if constexpr (Level == 1) return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
#endif
}

template <int Level, int Count>
FITMENT_INLINE F32 combine_all(const F32* v) {
    if constexpr (Count == 1) {
        return v[0];
    } else {
        F32 next[Count / 2];
#pragma GCC unroll 16
        for (int i = 0; i < Count / 2; ++i) next[i] = combine<Level>(v[2 * i], v[2 * i + 1]);
        return combine_all<2 * Level, Count / 2>(next);
    }
}

// Lane i gets lane i ^ Width.
template <int Width>
FITMENT_INLINE F32 swapped(F32 x) {
#if defined(__AVX512F__)
    if constexpr (Width == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
    if constexpr (Width == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    if constexpr (Width == 2) return _mm512_shuffle_ps(x, x, 0x4e);
    return _mm512_shuffle_ps(x, x, 0xb1);
#elif defined(__AVX2__) && defined(__FMA__)
    if constexpr (Width == 4) return _mm256_permute2f128_ps(x, x, 1);
    if constexpr (Width == 2) return _mm256_shuffle_ps(x, x, 0x4e);
    return _mm256_shuffle_ps(x, x, 0xb1);
#else
    if constexpr (Width == 2) return __builtin_shufflevector(x, x, 2, 3, 0, 1);
    return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#endif
}

template <int Width = half_lanes>
FITMENT_INLINE float sum(F32 x) {
    if constexpr (Width == 0) return x[0];
    else return sum<Width / 2>(x + swapped<Width>(x));
}

template <int Width = half_lanes>
FITMENT_INLINE float greatest(F32 x) {
    if constexpr (Width == 0) return x[0];
    else return greatest<Width / 2>(max(x, swapped<Width>(x)));
}

FITMENT_INLINE double sum(F64 x) {
    double total = 0;
    for (int i = 0; i < half_lanes; ++i) total += x[i];
    return total;
}

FITMENT_INLINE bool any(I32 mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(bits_as<__m512i>(mask), bits_as<__m512i>(mask)) != 0;
#else
    int32_t seen = 0;
    for (int i = 0; i < lanes; ++i) seen |= mask[i];
    return seen != 0;
#endif
}

// ---- exp -----------------------------------------------------------------------------------------------------------------------

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2. The Taylor sum of exp(r) stops where its rest is below 6e-9 (fp32) or 5e-18 (fp64) of it.
// n is found by adding 1.5 * 2^23 (2^52), which rounds to an integer that lies in the low bits. 2^n is applied in two halves, so
// that what overflows or is denormal comes out right; NaN stays NaN.

constexpr double log2_e = 1.4426950408889634074;

FITMENT_INLINE F32 exp(F32 x) {
    constexpr float magic = 0x1.8p23f;
    constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    x = min(splat(89.0f), max(splat(-104.0f), x));
    F32 shifted = fma(x, splat(float(log2_e)), splat(magic));
    F32 whole = shifted - magic;
    F32 r = fma(whole, splat(-ln2_high), x);
    r = fma(whole, splat(-ln2_low), r);
    F32 y = splat(1.0f / 5040);
    y = fma(y, r, splat(1.0f / 720));
    y = fma(y, r, splat(1.0f / 120));
    y = fma(y, r, splat(1.0f / 24));
    y = fma(y, r, splat(1.0f / 6));
    y = fma(y, r, splat(0.5f));
    y = fma(y, r, splat(1.0f));
    y = fma(y, r, splat(1.0f));
#if defined(__AVX512F__)
    return _mm512_scalef_ps(y, whole);
#else
    I32 n = bits_as<I32>(shifted) - bits_as<int32_t>(magic);
    I32 first = n >> 1;
    return y * bits_as<F32>((first + 127) << 23) * bits_as<F32>((n - first + 127) << 23);
#endif
}

FITMENT_INLINE F64 exp(F64 x) {
    constexpr double magic = 0x1.8p52;
    constexpr double ln2_high = 0x1.62e42fee00000p-1, ln2_low = 0x1.a39ef35793c76p-33;
    constexpr double inverse_factorials[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                             1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                                             1.0 / 6,          0.5,             1.0,            1.0};
    x = x < -746.0 ? splat64(-746.0) : x;
    x = x > 710.0 ? splat64(710.0) : x;
    F64 shifted = fma(x, splat64(log2_e), splat64(magic));
    F64 whole = shifted - magic;
    F64 r = fma(whole, splat64(-ln2_high), x);
    r = fma(whole, splat64(-ln2_low), r);
    F64 y = splat64(inverse_factorials[0]);
#pragma GCC unroll 16
    for (int i = 1; i < 14; ++i) y = fma(y, r, splat64(inverse_factorials[i]));
#if defined(__AVX512F__)
    return _mm512_scalef_pd(y, whole);
#else
    U64 n = bits_as<U64>(shifted) - bits_as<uint64_t>(magic) + 2046;
    U64 first = n >> 1;
    return y * bits_as<F64>(first << 52) * bits_as<F64>((n - first) << 52);
#endif
}

// ---- Work --------------------------------------------------------------------------------------------------------------------

// The half-open range of `count` units that belongs to thread `part` of `parts`, when one thread should get at least `grain`.
struct Share {
    int64_t begin, end;
};

FITMENT_INLINE Share share(int64_t count, int64_t grain, int part, int parts) {
    int64_t used = lesser(parts, greater(count / grain, 1));
    if (part >= used) return {0, 0};
    return {count * part / used, count * (part + 1) / used};
}

// A number that a function is called with as its template argument.
template <int N>
struct Number {};

// Calls f(Number<N>, first) over `count` rows, in blocks of N = Most and then of what fits of 4, 3, 2, 1.
template <int Most, class Function>
FITMENT_INLINE void for_row_blocks(int count, Function f) {
    int i = 0;
    for (; i + Most <= count; i += Most) f(Number<Most>{}, i);
    if constexpr (Most > 4)
        if (count - i >= 4) f(Number<4>{}, i), i += 4;
    if (count - i == 3) f(Number<3>{}, i);
    if (count - i == 2) f(Number<2>{}, i);
    if (count - i == 1) f(Number<1>{}, i);
}

// Calls f with a null pointer to the element type.
template <class Function>
FITMENT_INLINE void with_type(Type type, Function f) {
    switch (type) {
        case Type::fp32: return f(static_cast<float*>(nullptr));
        case Type::bf16: return f(static_cast<Bf16*>(nullptr));
        case Type::fp16: return f(static_cast<Fp16*>(nullptr));
    }
}
