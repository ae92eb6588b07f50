// seal: blocks of keys and values into pages, one (block, head, tensor) at a time.
// A block's values go through a float32 tile that stays in the core's cache; from there on only float32 is handled.
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
    std::vector<uint8_t> planar;               // one chunk of channels, before its transpose
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
    i32x16 bad = {};
    for (int t = 0; t < tokens; t++, data += token_bytes, tile += stride)
        for (int c = 0; c < channels; c += LANES) {
            const f32x16 x = load_values<D>(data + c * bytes_of(D), channels - c);
            bad |= not_finite(x);
            store(tile + c, to_float32(x));
        }
    return !any(bad);
}

bool load_tile(int32_t dtype, const uint8_t *data, int64_t token_bytes, int tokens, int channels, float *tile,
               int64_t stride) {
    const auto load = dtype == FLOAT32 ? load_tile<FLOAT32> : dtype == FLOAT16 ? load_tile<FLOAT16> : load_tile<BFLOAT16>;
    return load(data, token_bytes, tokens, channels, tile, stride);
}

// Smallest and highest of each group, [groups][padded]: groups along time, sixteen channels at a time …
void channel_ranges(const TensorSpec &s, const float *tile, int64_t stride, float *smallest, float *highest) {
    const int group = s.group();
    for (int g = 0; g < s.groups; g++)
        for (int c = 0; c < s.rows; c += LANES) {
            const float *x = tile + int64_t(g) * group * stride + c;
            f32x16 lo = load<f32x16>(x), hi = lo;
            for (int t = 1; t < group; t++) {
                const f32x16 v = load<f32x16>(x + t * stride);
                lo = min(lo, v), hi = max(hi, v);
            }
            store(smallest + g * stride + c, lo), store(highest + g * stride + c, hi);
        }
}

// … or along one token's channels.
void token_ranges(const TensorSpec &s, const float *tile, int64_t stride, float *smallest, float *highest,
                  int64_t padded) {
    const int group = s.group();
    for (int t = 0; t < s.rows; t++)
        for (int g = 0; g < s.groups; g++) {
            const float *x = tile + t * stride + g * group;
            float lo = x[0], hi = x[0];
            int i = 0;
            if (group >= LANES) {
                f32x16 los = load<f32x16>(x), his = los;
                for (i = LANES; i + LANES <= group; i += LANES) {
                    const f32x16 v = load<f32x16>(x + i);
                    los = min(los, v), his = max(his, v);
                }
                lo = lane_min(los), hi = lane_max(his);
            }
            for (; i < group; i++) lo = x[i] < lo ? x[i] : lo, hi = x[i] > hi ? x[i] : hi;
            smallest[g * padded + t] = lo, highest[g * padded + t] = hi;
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

// Sixteen lanes of one token-major row from element `e` on: each lane's group may differ where groups are small.
INLINE f32x16 along_row(const float *steps, int64_t padded, int t, int e, int group, int row) {
    if (group == row || (group % LANES == 0 && e % LANES == 0)) return broadcast(steps[e / group * padded + t]);
    f32x16 x = {};
    for (int i = 0; i < LANES && e + i < row; i++) x[i] = steps[(e + i) / group * padded + t];
    return x;
}

template <class Code, int Bits>
void token_codes(const TensorSpec &s, const float *tile, int64_t stride, const Scratch &w, int64_t padded,
                 uint8_t *codes) {
    const int plane = s.plane(), group = s.group();
    for (int t = 0; t < s.rows; t++, codes += s.row_bytes, tile += stride)
        for (int i = 0; i < plane; i += LANES) {
            i32x16 bytes = {};
#pragma GCC unroll 4
            for (int p = 0; p < 8 / Bits; p++) {
                const int e = p * plane + i;
                const f32x16 divisor = along_row(w.divisor.data(), padded, t, e, group, s.row);
                const f32x16 base = along_row(w.base.data(), padded, t, e, group, s.row);
                const f32x16 x = e + LANES <= stride ? load<f32x16>(tile + e) : load_part<f32x16>(tile + e, stride - e);
                bytes |= Code::of(x, divisor, base) << (Bits * p);
            }
            const u8x16 packed = low_bytes(bytes);
            std::memcpy(codes + i, &packed, plane - i < LANES ? plane - i : LANES);
        }
}

template <class Code, int Bits>
void channel_codes(const TensorSpec &s, const float *tile, int64_t stride, Scratch &w, uint8_t *codes) {
    const int plane = s.plane(), group = s.group();
    const int64_t padded = stride;
    u8x16 columns[16];
    for (int c = 0; c < s.rows; c += LANES)
        for (int i0 = 0; i0 < plane; i0 += 16) {
            const int n = plane - i0 < 16 ? plane - i0 : 16;
            for (int i = 0; i < n; i++) {
                i32x16 bytes = {};
#pragma GCC unroll 4
                for (int p = 0; p < 8 / Bits; p++) {
                    const int t = p * plane + i0 + i;
                    const int64_t at = t / group * padded + c;
                    bytes |= Code::of(load<f32x16>(tile + t * stride + c), load<f32x16>(&w.divisor[at]),
                                      load<f32x16>(&w.base[at]))
                             << (Bits * p);
                }
                columns[i] = low_bytes(bytes);
            }
            for (int i = n; i < 16; i++) columns[i] = u8x16{};
            transpose16(columns, codes + c * s.row_bytes + i0, s.row_bytes, s.rows - c < 16 ? s.rows - c : 16, n);
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
void codes(const TensorSpec &s, const float *tile, int64_t stride, Scratch &w, int64_t padded, uint8_t *to) {
    if (s.channel_major)
        channel_codes<Code, Bits>(s, tile, stride, w, to);
    else
        token_codes<Code, Bits>(s, tile, stride, w, padded, to);
}

bool seal_exact(const TensorSpec &s, const uint8_t *data, int64_t token_bytes, int32_t dtype, uint8_t *to) {
    bool fits = true;
    const int64_t width = bytes_of(dtype);
    for (int t = 0; t < s.rows; t++, data += token_bytes, to += s.row_bytes) {
        std::memcpy(to, data, s.row_bytes);
        for (int c = 0; c < s.row; c++) {
            uint32_t bits = 0;
            std::memcpy(&bits, data + c * width, width);
            const uint32_t infinite = dtype == FLOAT32 ? 0x7f800000u : dtype == FLOAT16 ? 0x7c00u : 0x7f80u;
            fits &= (bits & infinite) != infinite;
        }
    }
    return fits;
}

bool seal_tensor(const TensorSpec &s, const BlockSpec &b, const uint8_t *data, int64_t token_bytes, int32_t dtype,
                 uint8_t *page, int64_t head, Scratch &w) {
    if (s.kind == EXACT) return seal_exact(s, data, token_bytes, dtype, s.codes_of(page, head));
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
    write(s, w.tile.data(), stride, w, padded, s.codes_of(page, head));
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
            const int64_t block = item / heads, head = item % heads;
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
