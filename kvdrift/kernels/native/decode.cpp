// unseal and checksum; and the decoder that attention falls back to where its own loops don't fit the shape.
#include "layout.h"
#include "simd.h"

namespace kvdrift {
namespace {

void exact_row(const uint8_t *from, int n, int32_t dtype, float *to) {
    for (int e = 0; e < n; e += LANES) {
        const int count = n - e < LANES ? n - e : LANES;
        f32x16 x = {};
        u16x16 h = {};
        std::memcpy(dtype == FLOAT32 ? (void *)&x : (void *)&h, from + e * bytes_of(dtype), count * bytes_of(dtype));
        if (dtype != FLOAT32) x = dtype == FLOAT16 ? from_half(h) : from_bfloat(h);
        std::memcpy(to + e, &x, 4 * count);
    }
}

// One row of codes as numbers, without a scale; `to` has room for a vector behind the row.
void row_numbers(const TensorSpec &s, const uint8_t *codes, float *to) {
    const int plane = s.plane(), mask = (1 << s.bits) - 1;
    for (int p = 0; p < s.codes_per_byte(); p++)
        for (int i = 0; i < plane; i += LANES) {
            const u8x16 bytes = load<u8x16>(codes + i);  // behind the last row lie scales, so this stays in the page
            const f32x16 x = s.kind == UNIFORM ? to_float(widen(bytes) >> (s.bits * p) & mask) : from_e4m3(bytes) * E4M3_UNIT;
            store(to + p * plane + i, x);  // what is beyond the plane, the next one overwrites
        }
}

// A row's numbers, times scale plus low. Those of group g are scale[g * rows] and low[g * rows].
void scaled_row(const TensorSpec &s, const float *numbers, const float *scale, const float *low, float *to) {
    const int group = s.group();
    for (int g = 0; g < s.groups; g++)
        for (int e = g * group; e < (g + 1) * group; e += LANES) {
            f32x16 x = load<f32x16>(numbers + e) * scale[g * s.rows];
            if (s.kind == UNIFORM) x += low[g * s.rows];
            if (e + LANES <= s.row)
                store(to + e, x);  // what is beyond the group, the next one overwrites
            else
                std::memcpy(to + e, &x, 4 * (s.row - e));
        }
}

uint64_t payload_sum(const uint8_t *page, int64_t page_bytes) {
    uint32_t plain = 0, weighted = 0;
    for (int64_t i = 0; i < (page_bytes - HEADER_BYTES) / 4; i++) {
        uint32_t word;
        std::memcpy(&word, page + HEADER_BYTES + 4 * i, 4);
        plain += word, weighted += uint32_t(i + 1) * word;
    }
    return uint64_t(weighted) << 32 | plain;
}

}  // namespace

void decode_block(const TensorSpec &s, const uint8_t *page, int64_t head, int32_t dtype, float *out, int64_t stride) {
    const int tokens = s.channel_major ? s.row : s.rows, channels = s.channel_major ? s.rows : s.row;
    const uint8_t *codes = s.codes_of(page, head);
    static thread_local Floats scratch;
    const int64_t steps = int64_t(s.groups) * s.rows;
    float *numbers = scratch.room(2 * (s.row + LANES + steps)), *column = numbers + s.row + LANES;
    float *scales = column + s.row + LANES, *lows = scales + steps;
    const int32_t stored = s.scale_bytes == 4 ? FLOAT32 : FLOAT16;
    exact_row(page + s.stored_offset(s.scales, head), steps, stored, scales);
    if (s.kind == UNIFORM) exact_row(page + s.stored_offset(s.lows, head), steps, stored, lows);
    for (int r = 0; r < s.rows; r++, codes += s.row_bytes) {
        float *row = s.channel_major ? column : out + r * stride;
        if (s.kind == EXACT) {
            exact_row(codes, s.row, dtype, row);
            continue;
        }
        row_numbers(s, codes, numbers);
        scaled_row(s, numbers, scales + r, lows + r, row);
        for (int t = 0; s.channel_major && t < tokens; t++) out[t * stride + r] = column[t];
    }
    if (channels < stride)
        for (int t = 0; t < tokens; t++) std::memset(out + t * stride + channels, 0, 4 * (stride - channels));
}

}  // namespace kvdrift

using namespace kvdrift;

extern "C" void kvdrift_unseal(const BlockSpec *spec, const uint8_t *arena, const int32_t *pages, int64_t blocks,
                               int32_t dtype, float *keys, float *values, int32_t threads) {
    const BlockSpec &b = *spec;
    const int64_t heads = b.kv_heads, tile = int64_t(b.block) * b.head_dim;
#pragma omp parallel for num_threads(threads) if (blocks * heads > 1)
    for (int64_t item = 0; item < blocks * heads; item++) {
        const uint8_t *page = arena + pages[item / heads] * b.page_bytes;
        decode_block(b.key, page, item % heads, dtype, keys + item * tile, b.head_dim);
        decode_block(b.value, page, item % heads, dtype, values + item * tile, b.head_dim);
    }
}

extern "C" void kvdrift_checksum(const uint8_t *arena, int64_t page_bytes, const int32_t *pages, int64_t blocks,
                                 uint64_t *sums, int32_t threads) {
    threads = worth(threads, blocks * page_bytes, 1 << 18);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++)
        sums[block] = payload_sum(arena + pages[block] * page_bytes, page_bytes);
}

// A header ends with the checksum.
extern "C" void kvdrift_label(uint8_t *arena, int64_t page_bytes, const int32_t *pages, int64_t blocks,
                              const uint8_t *headers, int32_t threads) {
    threads = worth(threads, blocks * page_bytes, 1 << 18);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        uint8_t *page = arena + pages[block] * page_bytes;
        const uint64_t sum = payload_sum(page, page_bytes);
        std::memcpy(page, headers + block * HEADER_BYTES, HEADER_BYTES - sizeof sum);
        std::memcpy(page + HEADER_BYTES - sizeof sum, &sum, sizeof sum);
    }
}
