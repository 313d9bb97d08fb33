// Packed weights: what the linear and embedding kernels stream.
//
// A weight [rows, cols] is cut into tiles of 16 rows (the last one padded with zeros); a tile lies in one piece, column after column,
// in lines of 64 bytes:
//
//   affine4   a line is 16 rows x 8 columns: each row's 32-bit word holds the codes of columns k..k+7 in the nibbles at bits
//             0 16 4 20 8 24 12 28. So the words shifted by 0 4 8 12 and masked are pairs of neighbouring columns in 16-bit halves
//             (for bf16 dot products), and the low and the high nibbles are four columns each in bytes (for int8 dot products).
//   affine8   16 rows x 4 columns: the codes of columns k..k+3 in the bytes at bits 0 16 8 24.
//   bf16      16 rows x 2 columns, a row's pair in a 32-bit word.
//   fp16      16 rows of column k, then 16 rows of column k + 1.
//   fp32      16 rows x 1 column.
//
// A group that is a whole row is padded with codes of 0 to a multiple of 8 columns, and so is x with zeros.
//
// Behind the lines of each group of an affine weight lie its 16 scales and 16 biases, w = scale * code + bias: as fp16 where all of
// the weight's are exact so, else as fp32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "args.h"

namespace fitment {

enum class Kind : int32_t { fp32, bf16, fp16, affine4, affine8 };

constexpr int tile_rows = 16;
constexpr int line_bytes = 64;

// Where the codes of a line's columns begin in a row's word.
constexpr int nibble_bits[8] = {0, 16, 4, 20, 8, 24, 12, 28};
constexpr int byte_bits[4] = {0, 16, 8, 24};

struct Weight {
    Kind kind;
    int32_t rows, cols;
    int32_t group;          // columns of a group, a multiple of 8; 0 where there are none
    bool half_params;       // scales and biases are fp16
    int64_t tile_bytes;
    int64_t bytes;
    uint8_t* data;          // 64-byte aligned, owned

    // Always inlined: the linker keeps one copy of a function, perhaps of an instruction set that does not run here.
    __attribute__((always_inline)) int32_t tiles() const { return (rows + tile_rows - 1) / tile_rows; }
    __attribute__((always_inline)) int32_t padded_cols() const { return group ? groups() * group : cols; }
    __attribute__((always_inline)) int32_t groups() const { return group ? (cols + group - 1) / group : 0; }
    // Of a tile's group: its scales and biases, and all of it.
    __attribute__((always_inline)) int32_t param_bytes() const { return tile_rows * (half_params ? 4 : 8); }
    __attribute__((always_inline)) int64_t group_bytes() const { return groups() ? tile_bytes / groups() : 0; }
};

// What packing reads: dense values, or codes (a byte each) with fp32 scales and biases [rows, groups].
struct Pack {
    Weight* weight;
    const void* source;     // dense values in the weight's type, or codes
    const float* scale;
    const float* bias;
    int64_t source_stride;  // elements
};

// The size of a packed weight, set in it. Returns false for a shape that cannot be packed.
bool plan_weight(Weight& weight);

// Packs the share of thread `part` of `parts`; a Phase over Pack.
void pack_tiles(const void* args, int part, int parts);

// Whether every one of `count` numbers is exact in fp16.
bool exact_in_half(const float* values, int64_t count);

}  // namespace fitment
