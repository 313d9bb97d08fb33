// How kernels cut their work, and the scratch memory that this takes. Shared by the kernels and by who allocates.
#pragma once

#include "args.h"
#include "pack.h"

namespace fitment {

// ---- linear --------------------------------------------------------------------------------------------------------------------

// Elements of x up to which each thread converts all of it for itself, which costs less than a barrier.
constexpr int64_t linear_few_elements = 4096;

static inline constexpr int64_t linear_padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows of int8 activations that are multiplied with all tiles before the next ones are: about 300 KB of them.
constexpr int int8_most_rows = 96;

static inline int int8_chunk(const Linear& a) {
    int rows = 300000 / (2 * a.weight->padded_cols()) / 6 * 6;
    return rows < 24 ? 24 : rows > int8_most_rows ? int8_most_rows : rows;
}

// Bytes of Linear::scratch that all threads share: x converted, as fp32 at most, with eight bytes and a mark for each group.
static inline int64_t linear_shared_bytes(const Linear& a) {
    int64_t row = linear_padded(int64_t(4) * a.weight->padded_cols() + 192), groups = a.weight->groups();
    return a.n * (row + linear_padded(8 * groups)) + linear_padded(a.n * groups);
}

// Lists of the rows of int8 activations that have second bytes.
static inline int64_t int8_list_bytes(const Linear& a) {
    int64_t groups = a.weight->groups();
    return linear_padded(4 * (groups * ((a.n + int8_chunk(a) - 1) / int8_chunk(a)) + 1)) + linear_padded(groups * a.n);
}

// What each thread has to itself: an fp32 row; or those lists, and four versions of the scales of two tiles.
static inline int64_t linear_own_bytes(const Linear& a) {
    int64_t row = 4 * int64_t(a.weight->padded_cols()), lists = int8_list_bytes(a) + int64_t(4) * 2 * 4 * tile_rows * a.weight->groups();
    return linear_padded(row > lists ? row : lists);
}

static inline int64_t linear_scratch_bytes(const Linear& a, int threads) { return linear_shared_bytes(a) + threads * linear_own_bytes(a); }

// ---- paged_attention -----------------------------------------------------------------------------------------------------------

// Keys are reduced in chunks of this many, counted from a sequence's first key, and chunks are merged in order: so a row's result
// depends neither on who else is computed nor on the number of threads.
constexpr int attention_chunk = 256;

// Query rows (query x head of one key-value head) that share each key loaded: at most this many rows and this many floats in all.
constexpr int attention_rows = 48;
constexpr int attention_row_floats = 4096;

// Only sequences with so few query tokens are cut between threads along their keys; longer ones have blocks of rows enough.
constexpr int attention_cut_queries = 8;

// Scratch memory is kept below this; work beyond it is not cut.
constexpr int64_t attention_scratch_limit = int64_t(64) << 20;

// A row's floats in scratch and on the stack: the head size, rounded up to any vector.
static inline constexpr int attention_padded(int head_size) { return (head_size + 15) / 16 * 16; }

static inline constexpr int attention_block_rows(int head_size) {
    int rows = attention_row_floats / attention_padded(head_size);
    return rows < attention_rows ? rows : attention_rows;
}

// Floats that one chunk of one block of rows leaves behind: each row's maximum, sum and weighted values.
static inline constexpr int64_t attention_chunk_floats(int head_size) {
    return int64_t(attention_block_rows(head_size)) * (attention_padded(head_size) + 2);
}

// Floats for the chunks of one block of rows.
static inline constexpr int64_t attention_cut_floats(const PagedAttention& a) {
    int64_t chunks = (int64_t(a.max_blocks) * a.block_size + attention_chunk - 1) / attention_chunk;
    return chunks * attention_chunk_floats(a.head_size);
}

// Blocks of rows that may be cut: threads work on consecutive stretches of the work, so each boundary cuts one at most.
static inline constexpr int64_t attention_cuts(const PagedAttention& a, int threads) {
    int64_t rows = attention_block_rows(a.head_size);
    int64_t group = a.num_heads / a.num_kv_heads;
    int64_t blocks = (attention_cut_queries * group + rows - 1) / rows * a.num_kv_heads * a.num_seqs;
    int64_t fit = attention_scratch_limit / 4 / (attention_cut_floats(a) + 1);
    int64_t cuts = threads - 1 < blocks ? threads - 1 : blocks;
    return cuts < fit ? cuts : fit;
}

// Bytes of PagedAttention::scratch for `threads` threads or fewer; 64-byte aligned memory is best. It never depends on seq_lens.
static inline int64_t paged_attention_scratch_bytes(const PagedAttention& a, int threads) {
    return 4 * attention_cuts(a, threads) * attention_cut_floats(a);
}

}  // namespace fitment
