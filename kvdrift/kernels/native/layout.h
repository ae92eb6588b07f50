// The byte layout of a page, as kvdrift/layout.py computes it. native.py mirrors these structs with ctypes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvdrift {

enum Kind : int32_t { EXACT = 0, UNIFORM = 1, FP8_E4M3 = 2 };
enum Dtype : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

constexpr int64_t HEADER_BYTES = 64;

inline int64_t bytes_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }
inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Waking a thread takes microseconds, so each gets some microseconds' work: that of `least` bytes or elements.
inline int32_t worth(int32_t threads, int64_t work, int64_t least) {
    return int32_t(std::max<int64_t>(1, std::min<int64_t>(threads, work / least)));
}

// One tensor of a block. A row is one channel's tokens when channel_major, else one token's channels.
struct TensorSpec {
    int32_t kind, bits, channel_major, scale_bytes;
    int32_t rows, row, groups, row_bytes;
    int64_t codes, scales, lows, end;

    int32_t group() const { return groups ? row / groups : row; }
    int32_t codes_per_byte() const { return kind == UNIFORM ? 8 / bits : 1; }
    int32_t plane() const { return row / codes_per_byte(); }  // elements of a row that share a bit position
    const uint8_t *codes_of(const uint8_t *page, int64_t head) const { return page + codes + head * rows * row_bytes; }
    uint8_t *codes_of(uint8_t *page, int64_t head) const { return page + codes + head * rows * row_bytes; }
    // Scales and lows are [kv_heads, groups, rows].
    int64_t stored_offset(int64_t section, int64_t head) const { return section + head * groups * rows * scale_bytes; }
};

struct BlockSpec {
    TensorSpec key, value;
    int32_t kv_heads, block, head_dim, dtype_bytes;
    int64_t page_bytes;
};

// Values of one block and head in float32, token-major: out[token * stride + channel]. Channels up to `stride` are
// zeroed. One product and one sum, each rounded, as in quantizers/.
void decode_block(const TensorSpec &spec, const uint8_t *page, int64_t head, int32_t dtype, float *out, int64_t stride);

}  // namespace kvdrift
