// unseal and checksum; and the decoder that attention falls back to where its own loops don't fit the shape.
#include "layout.h"
#include "simd.h"

namespace kvdrift {
namespace {

float stored(const uint8_t *at, int32_t bytes) {
    float x;
    if (bytes == 4) return std::memcpy(&x, at, 4), x;
    u16x16 h = {};
    std::memcpy(&h, at, 2);
    return from_half(h)[0];
}

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

// One row of codes, times scale plus low, to to[e * step].
void code_row(const TensorSpec &s, const uint8_t *codes, const uint8_t *scales, const uint8_t *lows, float *to,
              int64_t step) {
    const int plane = s.plane(), group = s.group(), mask = (1 << s.bits) - 1;
    const int64_t next_group = int64_t(s.rows) * s.scale_bytes;
    for (int g = 0; g < s.groups; g++) {
        const float scale = stored(scales + g * next_group, s.scale_bytes);
        const float low = s.kind == UNIFORM ? stored(lows + g * next_group, s.scale_bytes) : 0.0f;
        for (int e = g * group; e < (g + 1) * group; e += LANES) {
            const int count = (g + 1) * group - e < LANES ? (g + 1) * group - e : LANES;
            i32x16 code = {};
            for (int i = 0; i < count; i++)
                code[i] = codes[(e + i) % plane] >> (s.bits * ((e + i) / plane)) & mask;
            const f32x16 x = s.kind == UNIFORM ? to_float(code) * scale + low : from_e4m3(low_bytes(code)) * E4M3_UNIT * scale;
            for (int i = 0; i < count; i++) to[(e + i) * step] = x[i];
        }
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
    const uint8_t *scales = page + s.stored_offset(s.scales, head), *lows = page + s.stored_offset(s.lows, head);
    for (int r = 0; r < s.rows; r++, codes += s.row_bytes) {
        if (s.kind == EXACT)
            exact_row(codes, s.row, dtype, out + r * stride);
        else
            code_row(s, codes, scales + r * s.scale_bytes, lows + r * s.scale_bytes,
                     s.channel_major ? out + r : out + r * stride, s.channel_major ? stride : 1);
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
