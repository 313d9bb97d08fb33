// The arguments of every kernel launch: plain structs over fixed buffers, so that a tape can keep and replay them.
//
// Strides are in elements and may be wider than a row (columns of a wider buffer); last axes are contiguous. Contracts are
// those of fitment/ops. A launch has phases; a phase begins when all parts of the one before are done.
#pragma once

#include <cstdint>

namespace fitment {

enum class Type : int32_t { fp32, bf16, fp16 };

// What a linear layer multiplies with: its activations as they are, rounded to bf16, or quantized to int8.
enum class Activations : int32_t { fp32, bf16, int8 };

struct Weight;  // packed by pack.h

struct Linear {
    const void* x;            // T [n, cols]
    void* out;                // out_type [n, rows]
    const Weight* weight;
    void* scratch;            // x converted or quantized: as many bytes as linear_scratch_bytes (scratch.h) says
    int64_t x_stride, out_stride;
    int32_t n;
    Type x_type, out_type;
    Activations activations;
};

struct Embedding {
    const int32_t* ids;       // [n]; one outside [0, rows) gives a row of NaN
    void* out;                // T [n, cols]
    const Weight* weight;
    int64_t out_stride;
    int32_t n;
    Type type;
};

struct RmsNorm {
    const void* x;            // T [n, hidden]
    const float* weight;      // [hidden]
    void* out;                // T [n, hidden]; may be x
    void* residual;           // T [n, hidden], changed; or null
    int64_t x_stride, out_stride, residual_stride;
    float eps;
    int32_t n, hidden;
    Type type;
};

struct Rotary {
    void* q;                  // T [n, num_heads, head_size], changed; row stride q_stride, heads q_head_stride apart
    void* k;                  // T [n, num_kv_heads, head_size], changed
    const int32_t* positions; // [n]
    const float* cos_sin;     // [max_position, rot]; row stride rot
    int64_t q_stride, q_head_stride, k_stride, k_head_stride;
    int32_t n, num_heads, num_kv_heads, rot, max_position;
    Type type;
};

struct SiluMul {
    const void* x;            // T [n, 2 m]
    void* out;                // T [n, m]
    int64_t x_stride, out_stride;
    int32_t n, m;
    Type type;
};

// Caches are [block][kv_head][slot][dim], contiguous.
struct WriteKv {
    const void* k;            // T [n, num_kv_heads, head_size]
    const void* v;
    void* k_cache;            // cache_type
    void* v_cache;
    const int32_t* slot_mapping;  // [n]; negative or beyond the cache: not written
    int64_t k_stride, k_head_stride, v_stride, v_head_stride;
    int32_t n, num_kv_heads, head_size, num_blocks, block_size;
    Type type, cache_type;
};

struct PagedAttention {
    const void* q;            // T [n, num_heads, head_size]
    const void* k_cache;      // cache_type
    const void* v_cache;
    const int32_t* block_table;    // [num_seqs, max_blocks]
    const int32_t* cu_query_lens;  // [num_seqs + 1]
    const int32_t* seq_lens;       // [num_seqs]
    void* out;                // T [n, num_heads, head_size]
    void* scratch;            // as many bytes as paged_attention_scratch_bytes says, or null
    int64_t q_stride, q_head_stride, out_stride, out_head_stride;
    float scale;
    int32_t num_seqs, max_blocks, num_heads, num_kv_heads, head_size, num_blocks, block_size;
    Type type, cache_type;
};

struct Sample {
    const float* logits;      // [n, vocab]
    const float* temperature; // [n]
    const int32_t* top_k;     // [n]
    const float* top_p;       // [n]
    const float* min_p;       // [n]
    const float* uniform;     // [n]
    int32_t* out;             // [n]
    int64_t logits_stride;
    int32_t n, vocab;
};

// One phase of a kernel: part `part` of `parts`, which any thread may compute.
using Phase = void (*)(const void* args, int part, int parts);

constexpr int max_phases = 3;

// A kernel: its phases in order; unused ones are null.
struct Kernel {
    Phase phases[max_phases];
};

// Every kernel for one instruction set.
struct Table {
    const char* name;
    Kernel linear;        // converts x, then multiplies
    Kernel linear_few;    // each thread converts all of x for itself: no barrier, for few rows
    Kernel embedding, rms_norm, rotary, silu_mul, write_kv, paged_attention, sample;
};

}  // namespace fitment
