#include "pack.h"

#include <cstring>
#include <initializer_list>

namespace fitment {

namespace {

uint16_t to_half(float x) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x)); }

int columns_per_line(Kind kind) {
    switch (kind) {
        case Kind::affine4: return 8;
        case Kind::affine8: return 4;
        case Kind::bf16:
        case Kind::fp16: return 2;
        case Kind::fp32: return 1;
    }
    return 1;
}

uint32_t pack_word(const uint8_t* codes, const int* bits, int count) {
    uint32_t word = 0;
    for (int i = 0; i < count; ++i) word |= uint32_t(codes[i]) << bits[i];
    return word;
}

void pack_affine(const Pack& p, int tile, uint8_t* out) {
    const Weight& w = *p.weight;
    int first = tile * tile_rows, rows = w.rows - first < tile_rows ? w.rows - first : tile_rows;
    int columns = columns_per_line(w.kind), groups = w.groups();
    const int* bits = w.kind == Kind::affine4 ? nibble_bits : byte_bits;
    auto codes = static_cast<const uint8_t*>(p.source) + int64_t(first) * p.source_stride;
    for (int g = 0; g < groups; ++g) {
        for (int k = g * w.group; k < (g + 1) * w.group; k += columns, out += line_bytes) {
            uint32_t line[tile_rows] = {};
            int inside = w.cols - k < columns ? w.cols - k : columns;
            for (int r = 0; r < rows; ++r) line[r] = pack_word(codes + r * p.source_stride + k, bits, inside);
            std::memcpy(out, line, line_bytes);
        }
        for (const float* params : {p.scale, p.bias}) {
            float values[tile_rows] = {};
            for (int r = 0; r < rows; ++r) values[r] = params[int64_t(first + r) * groups + g];
            if (w.half_params) {
                uint16_t half[tile_rows];
                for (int r = 0; r < tile_rows; ++r) half[r] = to_half(values[r]);
                std::memcpy(out, half, sizeof half);
                out += sizeof half;
            } else {
                std::memcpy(out, values, sizeof values);
                out += sizeof values;
            }
        }
    }
}

template <class T>
void pack_dense(const Pack& p, int tile, uint8_t* out) {
    const Weight& w = *p.weight;
    int first = tile * tile_rows, rows = w.rows - first < tile_rows ? w.rows - first : tile_rows;
    int columns = columns_per_line(w.kind);
    bool is_split = w.kind == Kind::fp16;
    auto values = static_cast<const T*>(p.source) + int64_t(first) * p.source_stride;
    for (int k = 0; k < w.cols; k += columns, out += line_bytes) {
        T line[line_bytes / sizeof(T)] = {};
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns && k + c < w.cols; ++c)
                line[is_split ? c * tile_rows + r : r * columns + c] = values[r * p.source_stride + k + c];
        std::memcpy(out, line, line_bytes);
    }
}

}  // namespace

bool plan_weight(Weight& w) {
    int columns = columns_per_line(w.kind);
    bool is_affine = w.kind == Kind::affine4 || w.kind == Kind::affine8;
    if (w.rows < 1 || w.cols < 1) return false;
    if (is_affine && (w.group < 1 || w.group % 8 || (w.cols % w.group && w.groups() > 1))) return false;
    int64_t lines = (int64_t(w.padded_cols()) + columns - 1) / columns;
    w.tile_bytes = lines * line_bytes + int64_t(w.groups()) * w.param_bytes();
    w.bytes = w.tile_bytes * w.tiles();
    return true;
}

void pack_tiles(const void* args, int part, int parts) {
    const Pack& p = *static_cast<const Pack*>(args);
    int64_t tiles = p.weight->tiles();
    for (int64_t t = tiles * part / parts; t < tiles * (part + 1) / parts; ++t) {
        uint8_t* out = p.weight->data + t * p.weight->tile_bytes;
        switch (p.weight->kind) {
            case Kind::affine4:
            case Kind::affine8: pack_affine(p, int(t), out); break;
            case Kind::bf16:
            case Kind::fp16: pack_dense<uint16_t>(p, int(t), out); break;
            case Kind::fp32: pack_dense<float>(p, int(t), out); break;
        }
    }
}

bool exact_in_half(const float* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (float(static_cast<_Float16>(values[i])) != values[i]) return false;
    return true;
}

}  // namespace fitment
