// seal: blocks of keys and values into pages, one (block, head, tensor) at a time.
// A block's values go through a float32 tile that stays in the core's cache; from there on only float32 is handled.
#include <algorithm>
#include <vector>

#include "encode.h"

namespace kvdrift {
namespace {

struct Strided {
    const uint8_t *data;
    int64_t block, head, token;  // bytes
};

struct Scratch {
    std::vector<float> tile;                   // [tokens][stride], padded with zeros to whole lanes
    std::vector<float> smallest, highest;      // [groups][rows, padded]
    std::vector<float> divisor, base;          // the same, as stored
    mutable std::vector<int64_t> group_of;     // where a token's group lies in those
};

template <class V>
INLINE V load_part(const void *from, int n) {  // the first n lanes' bytes; zeros behind them
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

// Fills the tile; false where a value isn't finite.
template <int32_t D>
bool load_tile(const uint8_t *data, int64_t token_bytes, int tokens, int channels, float *tile, int64_t stride) {
    constexpr int64_t AHEAD = 4096;  // blocks follow each other in memory, so this also begins the next one
    i32x16 largest = {};
    const auto convert = [&largest](f32x16 x, float *to) {
        const i32x16 m = magnitude(x);
        largest = m > largest ? m : largest;
        store(to, to_float32(x));
    };
    for (int t = 0; t < tokens; t++, data += token_bytes, tile += stride) {
        int c = 0;
        for (; c + LANES <= channels; c += LANES) {
            __builtin_prefetch(data + c * bytes_of(D) + AHEAD);
            convert(load_values<D>(data + c * bytes_of(D), LANES), tile + c);
        }
        if (c < channels) convert(load_values<D>(data + c * bytes_of(D), channels - c), tile + c);
    }
    return !any(largest >= INFINITE);
}

bool load_tile(int32_t dtype, const uint8_t *data, int64_t token_bytes, int tokens, int channels, float *tile,
               int64_t stride) {
    const auto load = dtype == FLOAT32 ? load_tile<FLOAT32> : dtype == FLOAT16 ? load_tile<FLOAT16> : load_tile<BFLOAT16>;
    return load(data, token_bytes, tokens, channels, tile, stride);
}

// Smallest and highest of each group, [groups][padded]: groups along time, up to 4 × 16 channels at a time …
template <int N>
INLINE void channel_range(const float *x, int64_t stride, int group, float *smallest, float *highest) {
    f32x16 lo[N], hi[N];
    for (int n = 0; n < N; n++) lo[n] = hi[n] = load<f32x16>(x + n * LANES);
    for (int t = 1; t < group; t++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const f32x16 v = load<f32x16>(x + t * stride + n * LANES);
            lo[n] = min(lo[n], v), hi[n] = max(hi[n], v);
        }
    for (int n = 0; n < N; n++) store(smallest + n * LANES, lo[n]), store(highest + n * LANES, hi[n]);
}

void channel_ranges(const TensorSpec &s, const float *tile, int64_t stride, float *smallest, float *highest) {
    const int group = s.group();
    for (int g = 0; g < s.groups; g++, tile += group * stride, smallest += stride, highest += stride) {
        int c = 0;
        for (; c + 4 * LANES <= stride; c += 4 * LANES) channel_range<4>(tile + c, stride, group, smallest + c, highest + c);
        for (; c < stride; c += LANES) channel_range<1>(tile + c, stride, group, smallest + c, highest + c);
    }
}

// … or along one token's channels, four tokens at a time.
void token_ranges(const TensorSpec &s, const float *tile, int64_t stride, float *smallest, float *highest,
                  int64_t padded) {
    const int group = s.group();
    for (int t = 0; t < s.rows; t += 4)
        for (int g = 0; g < s.groups; g++) {
            f32x16 lo[4], hi[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const float *x = tile + (t + i < s.rows ? t + i : t) * stride + g * group;
                lo[i] = hi[i] = broadcast(x[0]);
                int e = 0;
                for (; e + LANES <= group; e += LANES) {
                    const f32x16 v = load<f32x16>(x + e);
                    lo[i] = min(lo[i], v), hi[i] = max(hi[i], v);
                }
                for (; e < group; e++) lo[i] = min(lo[i], broadcast(x[e])), hi[i] = max(hi[i], broadcast(x[e]));
            }
            store(smallest + g * padded + t, fold4(lo[0], lo[1], lo[2], lo[3], Min()));
            store(highest + g * padded + t, fold4(hi[0], hi[1], hi[2], hi[3], Max()));
        }
}

void store_scale(uint8_t *to, f32x16 x, bool half, int n) {
    if (half) {
        const u16x16 h = to_half(x);
        std::memcpy(to, &h, 2 * (n < LANES ? n : LANES));
    } else {
        std::memcpy(to, &x, 4 * (n < LANES ? n : LANES));
    }
}

// Scales and lows of every group into the page; what the codes need into `divisor` and `base`.
bool store_steps(const TensorSpec &s, uint8_t *page, int64_t head, Scratch &w, int64_t padded) {
    const bool half = s.scale_bytes == 2;
    const float levels = float((1 << s.bits) - 1);
    i32x16 bad = {};
    for (int g = 0; g < s.groups; g++)
        for (int r = 0; r < s.rows; r += LANES) {
            const int64_t at = g * padded + r, offset = (int64_t(g) * s.rows + r) * s.scale_bytes;
            const f32x16 lo = load<f32x16>(&w.smallest[at]), hi = load<f32x16>(&w.highest[at]);
            f32x16 scale;
            const Step step =
                s.kind == UNIFORM ? uniform_step(lo, hi, levels, half, scale) : float8_step(lo, hi, half, scale);
            bad |= step.bad;
            store(&w.divisor[at], step.divisor), store(&w.base[at], step.base);
            store_scale(page + s.stored_offset(s.scales, head) + offset, scale, half, s.rows - r);
            if (s.kind == UNIFORM)
                store_scale(page + s.stored_offset(s.lows, head) + offset, step.base, half, s.rows - r);
        }
    return !any(bad);
}

// Sixteen lanes' steps for elements from `e` on of one token-major row; small groups may differ from lane to lane.
INLINE f32x16 along_row(const float *steps, int64_t padded, int e, int group, int row) {
    f32x16 x = {};
    for (int i = 0; i < LANES && e + i < row; i++) x[i] = steps[(e + i) / group * padded];
    return x;
}

// Aligned: groups and planes are whole lanes, so that sixteen elements share a step.
template <class Code, int Bits, bool Aligned>
void token_codes(const TensorSpec &s, const float *tile, int64_t stride, const Scratch &w, uint8_t *codes) {
    constexpr int P = 8 / Bits;
    const int plane = s.plane(), group = s.group();
    const int64_t padded = round_up(s.rows, LANES);
    int64_t group_of[1024 / LANES];
    for (int e = 0; Aligned && e < s.row; e += LANES) group_of[e / LANES] = e / group * padded;
    for (int t = 0; t < s.rows; t++, codes += s.row_bytes, tile += stride) {
        const float *divisors = &w.divisor[t], *bases = &w.base[t];
        for (int i = 0; i < plane; i += LANES) {
            i32x16 bytes = {};
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const int e = p * plane + i;
                const int64_t at = Aligned ? group_of[e / LANES] : 0;
                const f32x16 divisor = Aligned ? broadcast(divisors[at]) : along_row(divisors, padded, e, group, s.row);
                const f32x16 base = Aligned ? broadcast(bases[at]) : along_row(bases, padded, e, group, s.row);
                const f32x16 x =
                    Aligned || e + LANES <= stride ? load<f32x16>(tile + e) : load_part<f32x16>(tile + e, stride - e);
                bytes |= Code::of(x, divisor, base) << (Bits * p);
            }
            const u8x16 packed = low_bytes(bytes);
            if (Aligned)
                store(codes + i, packed);
            else
                std::memcpy(codes + i, &packed, std::min(plane - i, LANES));
        }
    }
}

template <class Code, int Bits>
void channel_codes(const TensorSpec &s, const float *tile, int64_t stride, const Scratch &w, uint8_t *codes) {
    constexpr int P = 8 / Bits;
    const int plane = s.plane(), group = s.group();
    std::vector<int64_t> &group_of = w.group_of;
    group_of.resize(s.row);
    for (int t = 0; t < s.row; t++) group_of[t] = t / group * stride;
    for (int c = 0; c < s.rows; c += LANES)
        for (int first = 0; first < plane; first += 16) {
            i32x16 words[4] = {};
            for (int k = 0; k < 4; k++)
#pragma GCC unroll 4
                for (int byte = 0; byte < 4; byte++)
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) {
                        const int t = p * plane + std::min(first + 4 * k + byte, plane - 1);
                        const int64_t at = group_of[t] + c;
                        words[k] |= Code::of(load<f32x16>(tile + t * stride + c), load<f32x16>(&w.divisor[at]),
                                             load<f32x16>(&w.base[at]))
                                    << (8 * byte + Bits * p);
                    }
            store_columns(words, codes + c * s.row_bytes + first, s.row_bytes, std::min(s.rows - c, LANES),
                          std::min(plane - first, 16));
        }
}

template <int Bits>
struct Uniform {
    static INLINE i32x16 of(f32x16 x, f32x16 divisor, f32x16 base) { return uniform_code<Bits>(x, divisor, base); }
};
struct Float8 {
    static INLINE i32x16 of(f32x16 x, f32x16 divisor, f32x16 base) { return float8_code(x, divisor, base); }
};

template <class Code, int Bits>
void codes(const TensorSpec &s, const float *tile, int64_t stride, const Scratch &w, uint8_t *to) {
    if (s.channel_major) return channel_codes<Code, Bits>(s, tile, stride, w, to);
    const bool aligned = s.plane() % LANES == 0 && s.group() % LANES == 0 && s.row <= 1024;
    return aligned ? token_codes<Code, Bits, true>(s, tile, stride, w, to)
                   : token_codes<Code, Bits, false>(s, tile, stride, w, to);
}

template <int32_t D>
bool seal_exact(const TensorSpec &s, const uint8_t *data, int64_t token_bytes, uint8_t *to) {
    i32x16 bad = {};
    for (int t = 0; t < s.rows; t++, data += token_bytes, to += s.row_bytes) {
        std::memcpy(to, data, s.row_bytes);
        for (int c = 0; c < s.row; c += LANES) bad |= not_finite(load_values<D>(data + c * bytes_of(D), s.row - c));
    }
    return !any(bad);
}

bool seal_tensor(const TensorSpec &s, const BlockSpec &b, const uint8_t *data, int64_t token_bytes, int32_t dtype,
                 uint8_t *page, int64_t head, Scratch &w) {
    if (s.kind == EXACT) {
        const auto copy = dtype == FLOAT32 ? seal_exact<FLOAT32> : dtype == FLOAT16 ? seal_exact<FLOAT16> : seal_exact<BFLOAT16>;
        return copy(s, data, token_bytes, s.codes_of(page, head));
    }
    const int64_t stride = round_up(b.head_dim, LANES), padded = round_up(s.rows, LANES);
    w.tile.resize(b.block * stride);
    for (auto *x : {&w.smallest, &w.highest, &w.divisor, &w.base}) x->assign(s.groups * padded, 0.0f);
    bool fits = load_tile(dtype, data, token_bytes, b.block, b.head_dim, w.tile.data(), stride);
    if (s.channel_major)
        channel_ranges(s, w.tile.data(), stride, w.smallest.data(), w.highest.data());
    else
        token_ranges(s, w.tile.data(), stride, w.smallest.data(), w.highest.data(), padded);
    fits &= store_steps(s, page, head, w, padded);
    const auto write = s.kind == FP8_E4M3 ? codes<Float8, 8>
                       : s.bits == 8      ? codes<Uniform<8>, 8>
                       : s.bits == 4      ? codes<Uniform<4>, 4>
                                          : codes<Uniform<2>, 2>;
    write(s, w.tile.data(), stride, w, s.codes_of(page, head));
    return fits;
}

// What no head writes: alignment between sections, and the page's end.
void zero_gaps(const BlockSpec &b, uint8_t *page) {
    const auto zero = [page](int64_t from, int64_t to) { std::memset(page + from, 0, to - from); };
    for (const TensorSpec *s : {&b.key, &b.value}) {
        zero(s->codes + int64_t(b.kv_heads) * s->rows * s->row_bytes, s->scales);
        const int64_t section = int64_t(b.kv_heads) * s->groups * s->rows * s->scale_bytes;
        zero(s->kind == UNIFORM ? s->lows + section : s->scales + section, s->end);
    }
    zero(b.value.end, b.page_bytes);
}

}  // namespace
}  // namespace kvdrift

using namespace kvdrift;

// `strides` are bytes: key block, head, token, then the value's.
extern "C" void kvdrift_seal(const BlockSpec *spec, const uint8_t *keys, const uint8_t *values, const int64_t *strides,
                             int32_t dtype, uint8_t *arena, const int32_t *pages, int64_t blocks, uint8_t *fits,
                             int32_t threads) {
    const BlockSpec &b = *spec;
    const Strided inputs[2] = {{keys, strides[0], strides[1], strides[2]}, {values, strides[3], strides[4], strides[5]}};
    const int64_t heads = b.kv_heads;
    std::memset(fits, 1, blocks);
#pragma omp parallel num_threads(threads) if (blocks * heads > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < blocks * heads; item++) {
            const int64_t head = item / blocks, block = item % blocks;
            uint8_t *page = arena + pages[block] * b.page_bytes;
            bool ok = true;
            for (int i = 0; i < 2; i++)
                ok &= seal_tensor(i ? b.value : b.key, b, inputs[i].data + block * inputs[i].block + head * inputs[i].head,
                                  inputs[i].token, dtype, page, head, scratch);
            if (!ok) __atomic_store_n(fits + block, uint8_t(0), __ATOMIC_RELAXED);
            if (head == 0) zero_gaps(b, page);
        }
    }
}
