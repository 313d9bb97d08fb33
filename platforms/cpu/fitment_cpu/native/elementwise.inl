// rms_norm, rotary, silu_mul and write_kv: what a row gives depends on that row alone.

namespace elementwise {

// Elements below which a second thread costs more than it saves.
constexpr int64_t elementwise_grain = 8192;

// ---- rms_norm ----------------------------------------------------------------------------------------------------------------

template <class T>
inline void rms_norm_row(const T* x, const float* weight, float eps, T* out, T* residual, int hidden) {
    constexpr int sums = 4;
    F32 squares[sums] = {};
    const T* h = residual ? residual : x;
    auto add = [&](int64_t i, int n, F32& square) {
        F32 value = load_n(x + i, n);
        if (residual) {
            store_n(residual + i, n, value + load_n(residual + i, n));
            value = load_n(residual + i, n);
        }
        square = fma(value, value, square);
    };
    int64_t i = 0;
    for (; i + sums * lanes <= hidden; i += sums * lanes)
        for (int s = 0; s < sums; ++s) add(i + s * lanes, lanes, squares[s]);
    for_vectors(hidden - i, [&](int64_t j, int n) { add(i + j, n, squares[0]); });
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(hidden);
    F32 factor = splat(1.0f / __builtin_sqrtf(mean + eps));
    for_vectors(hidden, [&](int64_t j, int n) { store_n(out + j, n, load_n(h + j, n) * factor * load_n(weight + j, n)); });
}

inline void rms_norm_rows(const void* args, int part, int parts) {
    const RmsNorm& a = *static_cast<const RmsNorm*>(args);
    Share rows = share(a.n, greater(elementwise_grain / greater(a.hidden, 1), 1), part, parts);
    with_type(a.type, [&]<class T>(T*) {
        for (int64_t i = rows.begin; i < rows.end; ++i) {
            T* residual = a.residual ? static_cast<T*>(a.residual) + i * a.residual_stride : nullptr;
            rms_norm_row(static_cast<const T*>(a.x) + i * a.x_stride, a.weight, a.eps, static_cast<T*>(a.out) + i * a.out_stride,
                         residual, a.hidden);
        }
    });
}

// ---- rotary ------------------------------------------------------------------------------------------------------------------

template <class T>
FITMENT_INLINE void turn(T* head, const float* cos_sin, int half) {
    for_vectors(half, [&](int64_t i, int n) {
        F32 cos = load_n(cos_sin + i, n), sin = load_n(cos_sin + half + i, n);
        F32 x1 = load_n(head + i, n), x2 = load_n(head + half + i, n);
        store_n(head + i, n, fma(x1, cos, -(x2 * sin)));
        store_n(head + half + i, n, fma(x2, cos, x1 * sin));
    });
}

template <class T>
inline void rotary_heads(T* row, int64_t head_stride, int num_heads, const float* cos_sin, int half) {
    for (int h = 0; h < num_heads; ++h) {
        T* head = row + h * head_stride;
        if (cos_sin) {
            turn(head, cos_sin, half);
        } else {  // A position outside the table: as loud as an id outside the embedding.
            for_vectors(2 * half, [&](int64_t i, int n) { store_n(head + i, n, splat(__builtin_nanf(""))); });
        }
    }
}

inline void rotary_rows(const void* args, int part, int parts) {
    const Rotary& a = *static_cast<const Rotary*>(args);
    int64_t work = int64_t(a.rot) * (a.num_heads + a.num_kv_heads);
    Share rows = share(a.n, greater(elementwise_grain / greater(work, 1), 1), part, parts);
    with_type(a.type, [&]<class T>(T*) {
        for (int64_t i = rows.begin; i < rows.end; ++i) {
            int32_t position = a.positions[i];
            const float* cos_sin = position >= 0 && position < a.max_position ? a.cos_sin + int64_t(position) * a.rot : nullptr;
            rotary_heads(static_cast<T*>(a.q) + i * a.q_stride, a.q_head_stride, a.num_heads, cos_sin, a.rot / 2);
            rotary_heads(static_cast<T*>(a.k) + i * a.k_stride, a.k_head_stride, a.num_kv_heads, cos_sin, a.rot / 2);
        }
    });
}

// ---- silu_mul ----------------------------------------------------------------------------------------------------------------

inline void silu_mul_segments(const void* args, int part, int parts) {
    constexpr int64_t width = 1024;
    const SiluMul& a = *static_cast<const SiluMul*>(args);
    int64_t in_row = (a.m + width - 1) / width;
    Share segments = share(a.n * in_row, elementwise_grain / 2 / width, part, parts);
    with_type(a.type, [&]<class T>(T*) {
        for (int64_t s = segments.begin; s < segments.end; ++s) {
            int64_t row = s / in_row, start = s % in_row * width;
            const T* gate = static_cast<const T*>(a.x) + row * a.x_stride + start;
            const T* up = gate + a.m;
            T* out = static_cast<T*>(a.out) + row * a.out_stride + start;
            for_vectors(lesser(width, a.m - start), [&](int64_t i, int n) {
                F32 g = load_n(gate + i, n);
                store_n(out + i, n, g / (1.0f + exp(-g)) * load_n(up + i, n));
            });
        }
    });
}

// ---- write_kv ----------------------------------------------------------------------------------------------------------------

inline void write_kv_rows(const void* args, int part, int parts) {
    const WriteKv& a = *static_cast<const WriteKv*>(args);
    int64_t work = int64_t(2) * a.num_kv_heads * a.head_size;
    Share rows = share(a.n, greater(elementwise_grain / greater(work, 1), 1), part, parts);
    int64_t slots = int64_t(a.num_blocks) * a.block_size;
    with_type(a.type, [&]<class T>(T*) {
        with_type(a.cache_type, [&]<class C>(C*) {
            for (int64_t i = rows.begin; i < rows.end; ++i) {
                int64_t slot = a.slot_mapping[i];
                if (slot < 0 || slot >= slots) continue;
                int64_t block = slot / a.block_size, offset = slot % a.block_size;
                for (int h = 0; h < a.num_kv_heads; ++h) {
                    int64_t at = ((block * a.num_kv_heads + h) * a.block_size + offset) * a.head_size;
                    convert(static_cast<const T*>(a.k) + i * a.k_stride + h * a.k_head_stride, static_cast<C*>(a.k_cache) + at,
                            a.head_size);
                    convert(static_cast<const T*>(a.v) + i * a.v_stride + h * a.v_head_stride, static_cast<C*>(a.v_cache) + at,
                            a.head_size);
                }
            }
        });
    });
}

}  // namespace elementwise

constexpr fitment::Kernel rms_norm_kernel{{&elementwise::rms_norm_rows, nullptr, nullptr}};
constexpr fitment::Kernel rotary_kernel{{&elementwise::rotary_rows, nullptr, nullptr}};
constexpr fitment::Kernel silu_mul_kernel{{&elementwise::silu_mul_segments, nullptr, nullptr}};
constexpr fitment::Kernel write_kv_kernel{{&elementwise::write_kv_rows, nullptr, nullptr}};
