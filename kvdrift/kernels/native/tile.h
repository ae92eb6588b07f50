// The first half of sealing a block: its values into a float32 tile that stays in the core's cache, and the smallest
// and highest of each group. From there on only float32 is handled.
#pragma once
#include <algorithm>

#include "encode.h"

namespace kvdrift {

template <class V>
INLINE V load_part(const void *from, int n) {  // the first n lanes; zeros behind them
    V v = {};
    std::memcpy(&v, from, n * sizeof(v[0]));
    return v;
}

template <int32_t D>
INLINE f32x16 load_values(const uint8_t *from, int n) {
    if (D == FLOAT32) return n < LANES ? load_part<f32x16>(from, n) : load<f32x16>(from);
    const u16x16 x = n < LANES ? load_part<u16x16>(from, n) : load<u16x16>(from);
    return D == FLOAT16 ? from_half(x) : from_bfloat(x);
}

// One block of one head, on its way into the tile.
template <int32_t D>
struct Reading {
    static constexpr int64_t AHEAD = 4096;  // blocks follow each other in memory, so this also begins the next one

    const uint8_t *data;
    int64_t token_bytes;
    int tokens, channels;
    float *tile;  // [tokens][stride], padded with zeros to whole lanes
    int64_t stride;
    i32x16 largest = {};

    INLINE f32x16 take(int t, int c) {
        const uint8_t *from = data + t * token_bytes + c * bytes_of(D);
        __builtin_prefetch(from + AHEAD);
        const f32x16 x = load_values<D>(from, channels - c), clean = to_float32(x);
        const i32x16 m = magnitude(x);
        largest = m > largest ? m : largest;
        store(tile + t * stride + c, clean);
        return clean;
    }
    bool finite() const { return !any(largest >= INFINITE); }
};

// N · 16 channels of a per-channel group: smallest and highest are [groups][stride].
template <int32_t D, int N>
INLINE void read_columns(Reading<D> &in, int c, int group, float *smallest, float *highest) {
    for (int start = 0; start < in.tokens; start += group, smallest += in.stride, highest += in.stride) {
        f32x16 lo[N], hi[N];
        for (int n = 0; n < N; n++) lo[n] = hi[n] = in.take(start, c + n * LANES);
        for (int t = start + 1; t < start + group; t++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const f32x16 x = in.take(t, c + n * LANES);
                lo[n] = min(lo[n], x), hi[n] = max(hi[n], x);
            }
        for (int n = 0; n < N; n++) store(smallest + c + n * LANES, lo[n]), store(highest + c + n * LANES, hi[n]);
    }
}

// By value, so that the compiler keeps `in` in registers. False where a value isn't finite.
template <int32_t D>
bool read_channels(Reading<D> in, int group, float *smallest, float *highest) {
    int c = 0;
    for (; c + 4 * LANES <= in.channels; c += 4 * LANES) read_columns<D, 4>(in, c, group, smallest, highest);
    for (; c < in.channels; c += LANES) read_columns<D, 1>(in, c, group, smallest, highest);
    return in.finite();
}

// Per-token groups, four tokens at a time: smallest and highest are [groups][padded tokens].
template <int32_t D>
bool read_tokens(Reading<D> in, int group, float *smallest, float *highest, int64_t padded) {
    const bool whole_lanes = group % LANES == 0;
    for (int t = 0; t < in.tokens; t += 4)
        for (int start = 0, g = 0; start < in.channels; start += group, g++) {
            f32x16 lo[4], hi[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const int row = std::min(t + i, in.tokens - 1);
                if (!whole_lanes && start == 0)
                    for (int c = 0; c < in.channels; c += LANES) in.take(row, c);
                lo[i] = hi[i] = whole_lanes ? in.take(row, start) : broadcast(in.tile[row * in.stride + start]);
                for (int c = start + (whole_lanes ? LANES : 1); c < start + group; c += whole_lanes ? LANES : 1) {
                    const f32x16 x = whole_lanes ? in.take(row, c) : broadcast(in.tile[row * in.stride + c]);
                    lo[i] = min(lo[i], x), hi[i] = max(hi[i], x);
                }
            }
            store(smallest + g * padded + t, fold4(lo[0], lo[1], lo[2], lo[3], Min()));
            store(highest + g * padded + t, fold4(hi[0], hi[1], hi[2], hi[3], Max()));
        }
    return in.finite();
}

}  // namespace kvdrift
