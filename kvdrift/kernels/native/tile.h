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

// quantizers/groups.py: subnormals and negative zero become zero; NaN and infinities stay.
template <int32_t D>
INLINE f32x16 load_values(const uint8_t *from, int n) {
    if (D == FLOAT32) return to_float32(n < LANES ? load_part<f32x16>(from, n) : load<f32x16>(from));
    const u16x16 x = n < LANES ? load_part<u16x16>(from, n) : load<u16x16>(from);
    return D == FLOAT16 ? from_half(x) + 0.0f : from_bfloat_flushed(x);  // a half's subnormals are normal in float32
}

// One block of one head, on its way into the tile.
struct Reading {
    const uint8_t *data;
    int64_t token_bytes;
    int tokens, channels;
    float *tile;  // [tokens][stride], padded with zeros to whole lanes
    int64_t stride;
    int64_t ahead;  // bytes to what is read next, which is fetched meanwhile
};

// `spoiled` stays zero as long as every value is finite; four of them, since one chain of sums would be slow.
template <int32_t D>
INLINE f32x16 take(const uint8_t *from, int64_t ahead, int n, float *to, f32x16 &spoiled) {
    __builtin_prefetch(from + ahead);
    const f32x16 x = load_values<D>(from, n);
    spoiled = plus_zero_times(spoiled, x);
    store(to, x);
    return x;
}

INLINE bool zero(const f32x16 *spoiled) {
    return !any(as_int(spoiled[0] + spoiled[1] + spoiled[2] + spoiled[3]) << 1);
}

// N · 16 channels from c on of per-channel groups: smallest and highest are [groups][stride].
template <int32_t D, int N>
INLINE void read_columns(const Reading &in, int c, int group, float *smallest, float *highest, f32x16 *spoiled) {
    const int64_t token_bytes = in.token_bytes, stride = in.stride;
    const uint8_t *from = in.data + c * bytes_of(D);
    float *to = in.tile + c;
    const int part = N > 1 ? LANES : in.channels - c;
    for (int start = 0; start < in.tokens; start += group, smallest += stride, highest += stride) {
        f32x16 lo[N], hi[N];
        for (int n = 0; n < N; n++) lo[n] = broadcast(INFINITY), hi[n] = broadcast(-INFINITY);
        for (int t = 0; t < group; t++, from += token_bytes, to += stride)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const f32x16 x = take<D>(from + n * LANES * bytes_of(D), in.ahead, part, to + n * LANES, spoiled[n]);
                lo[n] = min(lo[n], x), hi[n] = max(hi[n], x);
            }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(smallest + c + n * LANES, lo[n]), store(highest + c + n * LANES, hi[n]);
    }
}

// False where a value isn't finite.
template <int32_t D>
bool read_channels(const Reading &in, int group, float *smallest, float *highest) {
    f32x16 spoiled[4] = {};
    int c = 0;
    for (; c + 4 * LANES <= in.channels; c += 4 * LANES)
        read_columns<D, 4>(in, c, group, smallest, highest, spoiled);
    for (; c < in.channels; c += LANES) read_columns<D, 1>(in, c, group, smallest, highest, spoiled);
    return zero(spoiled);
}

// Per-token groups, four tokens at a time: smallest and highest are [groups][padded tokens].
template <int32_t D, bool WholeLanes>
INLINE bool read_rows(const Reading &in, int group, float *smallest, float *highest, int64_t padded) {
    constexpr int STEP = WholeLanes ? LANES : 1;
    f32x16 spoiled[4] = {};
    for (int t = 0; t < in.tokens; t += 4) {
        const uint8_t *from[4];
        float *to[4];
        for (int i = 0; i < 4; i++) {
            const int row = std::min(t + i, in.tokens - 1);
            from[i] = in.data + row * in.token_bytes, to[i] = in.tile + row * in.stride;
            for (int c = 0; !WholeLanes && c < in.channels; c += LANES)
                take<D>(from[i] + c * bytes_of(D), in.ahead, in.channels - c, to[i] + c, spoiled[i]);
        }
        for (int start = 0, g = 0; start < in.channels; start += group, g++) {
            f32x16 lo[4], hi[4];
            for (int i = 0; i < 4; i++) lo[i] = broadcast(INFINITY), hi[i] = broadcast(-INFINITY);
            for (int c = start; c < start + group; c += STEP)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const f32x16 x = WholeLanes ? take<D>(from[i] + c * bytes_of(D), in.ahead, LANES, to[i] + c, spoiled[i])
                                                : broadcast(to[i][c]);
                    lo[i] = min(lo[i], x), hi[i] = max(hi[i], x);
                }
            store(smallest + g * padded + t, fold4(lo[0], lo[1], lo[2], lo[3], Min()));
            store(highest + g * padded + t, fold4(hi[0], hi[1], hi[2], hi[3], Max()));
        }
    }
    return zero(spoiled);
}

template <int32_t D>
bool read_tokens(const Reading &in, int group, float *smallest, float *highest, int64_t padded) {
    return group % LANES ? read_rows<D, false>(in, group, smallest, highest, padded)
                         : read_rows<D, true>(in, group, smallest, highest, padded);
}

}  // namespace kvdrift
