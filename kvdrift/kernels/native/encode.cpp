// seal: blocks of keys and values into pages, one (block, head, tensor) at a time.
#include <algorithm>

#include "tile.h"
#include "words.h"

namespace kvdrift {
namespace {

struct Strided {
    const uint8_t *data;
    int64_t block, head, token;  // bytes
};

void store_scale(uint8_t *to, f32x16 x, bool half, int n) {
    if (half) {
        const u16x16 h = to_half(x);
        std::memcpy(to, &h, 2 * (n < LANES ? n : LANES));
    } else {
        std::memcpy(to, &x, 4 * (n < LANES ? n : LANES));
    }
}

// Scales and lows of every group into the page; what the codes need into `divisor` and `base`.
bool store_steps(const TensorSpec &s, uint8_t *page, int64_t head, const Groups &w, int64_t padded) {
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
            store(&w.divisor[at], step.divisor), store(&w.reciprocal[at], 1.0f / step.divisor);
            store(&w.base[at], step.base);
            store_scale(page + s.stored_offset(s.scales, head) + offset, scale, half, s.rows - r);
            if (s.kind == UNIFORM)
                store_scale(page + s.stored_offset(s.lows, head) + offset, step.base, half, s.rows - r);
        }
    return !any(bad);
}

// Aligned: groups and planes are whole lanes, so that sixteen elements share a step. OneGroup: the whole row does.
template <class Code, int Bits, bool Aligned, bool OneGroup>
void token_codes(const TensorSpec &s, const float *tile, int64_t stride, const Groups &w, uint8_t *codes) {
    constexpr int P = 8 / Bits;
    const int plane = s.plane(), group = s.group();
    const int64_t padded = round_up(s.rows, LANES);
    std::vector<int32_t> at;  // of each element's step
    if (!OneGroup) at.resize(s.row + LANES);
    for (int g = 0; !OneGroup && g < s.groups; g++) std::fill_n(&at[g * group], group, g * padded);
    for (int t = 0; t < s.rows; t++, codes += s.row_bytes, tile += stride) {
        const float *divisors = &w.divisor[t], *reciprocals = &w.reciprocal[t], *bases = &w.base[t];
        const Divisor only_divisor = {broadcast(divisors[0]), broadcast(reciprocals[0])};
        const f32x16 only_base = broadcast(bases[0]);
        for (int i = 0; i < plane; i += LANES) {
            i32x16 bytes = {};
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const int e = p * plane + i;
                const auto along = [&](const float *steps) {
                    return Aligned ? broadcast(steps[at[e]]) : gather(steps, &at[e]);
                };
                const Divisor divisor = OneGroup ? only_divisor : Divisor{along(divisors), along(reciprocals)};
                const f32x16 base = OneGroup ? only_base : along(bases);
                const f32x16 x =
                    Aligned || e + LANES <= stride ? load<f32x16>(tile + e) : load_part<f32x16>(tile + e, stride - e);
                bytes |= Code::of(x, divisor, base) << (Bits * p);  // what is above the low byte is dropped
            }
            const u8x16 packed = low_bytes(bytes);
            if (Aligned)
                store(codes + i, packed);
            else
                std::memcpy(codes + i, &packed, std::min(plane - i, LANES));
        }
    }
}

// Aligned: groups and planes are whole runs of sixteen tokens, so that a run shares its steps.
template <class Code, int Bits, bool Aligned>
void channel_codes(const TensorSpec &s, const float *tile, int64_t stride, const Groups &w, uint8_t *codes) {
    constexpr int P = 8 / Bits;
    uint32_t excess = 0;  // what Code::of is above its codes, in a whole word
    for (int at = 0; at < 32; at += Bits) excess += uint32_t(Code::above) << at;
    const int plane = s.plane(), group = s.group();
    for (int first = 0; first < plane; first += 16)
        for (int c = 0; c < s.rows; c += LANES) {
            Divisor divisor[P];
            f32x16 base[P];
            const auto steps_at = [&](int p, int t) {
                const int64_t at = t / group * stride + c;
                divisor[p] = {load<f32x16>(&w.divisor[at]), load<f32x16>(&w.reciprocal[at])};
                base[p] = load<f32x16>(&w.base[at]);
            };
            for (int p = 0; p < P; p++) steps_at(p, p * plane + first);
            i32x16 words[4] = {};
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++)
#pragma GCC unroll 4
                for (int byte = 0; byte < 4; byte++)
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) {
                        const int i = first + 4 * k + byte, t = p * plane + (Aligned ? i : std::min(i, plane - 1));
                        if (!Aligned) steps_at(p, t);
                        const f32x16 x = load<f32x16>(tile + t * stride + c);
                        words[k] += Code::of(x, divisor[p], base[p]) << (8 * byte + Bits * p);
                    }
            for (i32x16 &word : words) word -= int32_t(excess);
            store_columns(words, codes + c * s.row_bytes + first, s.row_bytes, std::min(s.rows - c, LANES),
                          std::min(plane - first, 16));
        }
}

template <int Bits, bool Half>
struct Uniform {
    static constexpr int32_t above = ROUNDED;
    static INLINE i32x16 of(f32x16 x, Divisor by, f32x16 base) { return uniform_code<Bits, Half>(x, by, base); }
};
struct Float8 {
    static constexpr int32_t above = 0;
    static INLINE i32x16 of(f32x16 x, Divisor by, f32x16 base) { return float8_code(x, by, base); }
};

template <class Code, int Bits>
void codes(const TensorSpec &s, const float *tile, int64_t stride, const Groups &w, uint8_t *to) {
    const bool aligned = s.plane() % LANES == 0 && s.group() % LANES == 0;
    const auto write =
        s.channel_major ? (aligned ? channel_codes<Code, Bits, true> : channel_codes<Code, Bits, false>)
        : s.groups > 1  ? (aligned ? token_codes<Code, Bits, true, false> : token_codes<Code, Bits, false, false>)
                        : (aligned ? token_codes<Code, Bits, true, true> : token_codes<Code, Bits, false, true>);
    write(s, tile, stride, w, to);
}

template <bool Half>
auto uniform_codes(int bits) {
    return bits == 8   ? codes<Uniform<8, Half>, 8>
           : bits == 4 ? codes<Uniform<4, Half>, 4>
                       : codes<Uniform<2, Half>, 2>;
}

// A tensor that stays exact is copied; it fits if it is finite.
template <int32_t D>
bool seal_exact(const TensorSpec &s, const uint8_t *data, int64_t token_bytes, int64_t ahead, uint8_t *to) {
    i32x16 bad = {};
    for (int t = 0; t < s.rows; t++, data += token_bytes, to += s.row_bytes) {
        std::memcpy(to, data, s.row_bytes);
        for (int c = 0; c < s.row; c += LANES) {
            const uint8_t *from = data + c * bytes_of(D);
            __builtin_prefetch(from + ahead);
            bad |= not_finite(load_values<D>(from, s.row - c));
        }
    }
    return !any(bad);
}

// A store that misses holds up all that follow it.
INLINE void fetch_to_write(const uint8_t *to, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(to + i, 1);
}

template <int32_t D>
bool seal_tensor(const TensorSpec &s, const BlockSpec &b, const uint8_t *data, int64_t token_bytes, int64_t ahead,
                 uint8_t *page, int64_t head, Floats &scratch) {
    uint8_t *to = s.codes_of(page, head);
    if (s.kind == EXACT) return seal_exact<D>(s, data, token_bytes, ahead, to);
    fetch_to_write(to, int64_t(s.rows) * s.row_bytes);
    fetch_to_write(page + s.stored_offset(s.scales, head), int64_t(s.groups) * s.rows * s.scale_bytes);
    if (s.kind == UNIFORM) fetch_to_write(page + s.stored_offset(s.lows, head), int64_t(s.groups) * s.rows * s.scale_bytes);
    const int64_t stride = round_up(b.head_dim, LANES), padded = round_up(s.rows, LANES);
    const int64_t values = b.block * stride, each = s.groups * padded;
    float *tile = scratch.room(values + 5 * each), *to_groups = tile + values;
    const Groups w = {to_groups, to_groups + each, to_groups + 2 * each, to_groups + 3 * each, to_groups + 4 * each};
#ifdef KVDRIFT_VNNI
    if (D != FLOAT32 && whole_words(s)) {
        word_extremes<D>(s, data, token_bytes, w);
        const bool fits = store_steps(s, page, head, w, padded);
        word_codes<D>(s, data, token_bytes, ahead, w, to);
        return fits;
    }
#endif
    if (padded != s.rows) std::fill(w.smallest, w.divisor, 0.0f);
    const Reading in = {data, token_bytes, b.block, b.head_dim, tile, stride, ahead};
    const bool finite = s.channel_major
                            ? read_channels<D>(in, s.group(), w.smallest, w.highest)
                            : read_tokens<D>(in, s.group(), w.smallest, w.highest, padded);
    const bool fits = store_steps(s, page, head, w, padded);
    const auto write = s.kind == FP8_E4M3 ? codes<Float8, 8>
                       : s.scale_bytes == 2 ? uniform_codes<true>(s.bits)
                                            : uniform_codes<false>(s.bits);
    write(s, tile, stride, w, to);
    return fits && finite;
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
    const auto seal = dtype == FLOAT32 ? seal_tensor<FLOAT32> : dtype == FLOAT16 ? seal_tensor<FLOAT16> : seal_tensor<BFLOAT16>;
    std::memset(fits, 1, blocks);
    threads = worth(threads, blocks * heads * 2 * b.block * b.head_dim, 1 << 17);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local Floats scratch;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < blocks * heads; item++) {
            const int64_t head = item / blocks, block = item % blocks;
            uint8_t *page = arena + pages[block] * b.page_bytes;
            bool ok = true;
            const uint8_t *data[3] = {};
            for (int i = 0; i < 3; i++) {
                const Strided &in = inputs[i % 2];
                const int64_t at = std::min(item + i / 2, blocks * heads - 1);
                data[i] = in.data + at % blocks * in.block + at / blocks * in.head;
            }
            for (int i = 0; i < 2; i++)
                ok &= seal(i ? b.value : b.key, b, data[i], inputs[i].token, data[i + 1] - data[i], page, head, scratch);
            if (!ok) __atomic_store_n(fits + block, uint8_t(0), __ATOMIC_RELAXED);
            if (head == 0) zero_gaps(b, page);
        }
    }
}
