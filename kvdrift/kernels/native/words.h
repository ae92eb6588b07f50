// Sealing float16 and bfloat16 thirty-two at a time, for uniform codes with float16 scales: the extremes of a group are
// found on the values' own words, and codes leave the registers as bytes, so that no float32 is ever stored.
// Intrinsics throughout, since it is about which word lies where; other CPUs and shapes take the tile's way.
#pragma once
#include "encode.h"

namespace kvdrift {

// What a group holds, and what its codes are made with: float32 [groups][rows, padded to whole lanes].
struct Groups {
    float *smallest, *highest, *divisor, *reciprocal, *base;
};

#ifdef KVDRIFT_VNNI

constexpr int WORDS = 2 * LANES, MOST_PIECES = 32;  // in a vector; vectors of the longest row

// Whether groups, planes and stores are whole vectors.
inline bool whole_words(const TensorSpec &s) {
    const int plane = s.plane(), group = s.group();
    if (s.kind != UNIFORM || s.scale_bytes != 2) return false;
    if (s.channel_major) return s.rows % WORDS == 0 && plane % 16 == 0 && group % 16 == 0;
    if (s.row > MOST_PIECES * WORDS) return false;
    return s.rows % 16 == 0 && group % WORDS == 0 && (plane == WORDS || plane % (2 * WORDS) == 0);
}

INLINE __m512i load_words(const uint8_t *from) { return _mm512_loadu_si512(from); }

// Sixteen values of a group's extremes in float32, as `load_values` gives them.
template <int32_t D>
INLINE f32x16 extreme(__m256i words) {
    return D == FLOAT16 ? from_half((u16x16)words) + 0.0f : from_bfloat_flushed((u16x16)words);
}

// A sign and a magnitude, as words that compare like the values; its own inverse. NaN lies beyond the infinities, so a
// group's extremes tell of it.
INLINE __m512i ordered(__m512i x) {
    return _mm512_ternarylogic_epi32(x, _mm512_srai_epi16(x, 15), _mm512_set1_epi16(0x7fff), 0x78);  // x ^ (y & z)
}

// Extremes of per-channel groups, N · 32 channels from c on. Words are compared as they are: as signed words positive
// values are ordered and above negative ones, as unsigned words negative ones are ordered, reversed, and above.
template <int32_t D, int N>
INLINE void channel_extremes(const TensorSpec &s, const uint8_t *from, int64_t token_bytes, int c, const Groups &w) {
    const int group = s.group();
    from += 2 * c;
    for (int g = 0; g < s.groups; g++) {
        __m512i most[N], least[N], negative[N];
        for (int n = 0; n < N; n++) most[n] = least[n] = negative[n] = load_words(from + 64 * n);
        for (int t = 0; t < group; t++, from += token_bytes)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const __m512i x = load_words(from + 64 * n);
                most[n] = _mm512_max_epi16(most[n], x);
                least[n] = _mm512_min_epi16(least[n], x);
                negative[n] = _mm512_max_epu16(negative[n], x);
            }
        for (int n = 0; n < N; n++) {
            const __m512i hi = _mm512_mask_mov_epi16(most[n], _mm512_movepi16_mask(most[n]), least[n]);
            const __m512i lo = _mm512_mask_mov_epi16(least[n], _mm512_movepi16_mask(negative[n]), negative[n]);
            const int64_t at = int64_t(g) * s.rows + c + n * WORDS;
            store(&w.smallest[at], extreme<D>(_mm512_castsi512_si256(lo)));
            store(&w.smallest[at + LANES], extreme<D>(_mm512_extracti64x4_epi64(lo, 1)));
            store(&w.highest[at], extreme<D>(_mm512_castsi512_si256(hi)));
            store(&w.highest[at + LANES], extreme<D>(_mm512_extracti64x4_epi64(hi, 1)));
        }
    }
}

// Folds two vectors into one: of each, what the two halves of every 128 bits hold, word by word …
INLINE __m512i fold_words(__m512i a, __m512i b) {
    return _mm512_max_epi16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
}
// The largest value of one token's group, and the complement of the smallest, in turn.
INLINE __m512i token_extremes(const uint8_t *from, int group) {
    __m512i hi = ordered(load_words(from)), lo = hi;
    for (int e = WORDS; e < group; e += WORDS) {
        const __m512i x = ordered(load_words(from + 2 * e));
        hi = _mm512_max_epi16(hi, x), lo = _mm512_min_epi16(lo, x);
    }
    return fold_words(hi, _mm512_ternarylogic_epi32(lo, lo, lo, 0x55));
}
// Four tokens: in every 128 bits, a part of each one's highest and each one's smallest, in that order.
INLINE __m512i four_extremes(const uint8_t *from, int64_t token_bytes, int group) {
    const auto of = [=](int t) { return token_extremes(from + t * token_bytes, group); };
    return fold_words(fold_words(of(0), of(2)), fold_words(of(1), of(3)));
}

// Extremes of per-token groups.
template <int32_t D, int Group>  // 0 where it isn't known ahead
void tokens_extremes(const TensorSpec &s, const uint8_t *from, int64_t token_bytes, const Groups &w) {
    const auto halves = [](__m512i a, __m512i b) {
        return _mm512_max_epi16(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
    };
    const int group = Group ? Group : s.group();
    for (int g = 0; g < s.groups; g++)
        for (int t = 0; t < s.rows; t += 16) {
            const uint8_t *at = from + t * token_bytes + 2 * g * group;
            const auto four = [=](int i) { return four_extremes(at + 4 * i * token_bytes, token_bytes, group); };
            const __m512i a = halves(four(0), four(1)), b = halves(four(2), four(3));
            __m512i x = _mm512_max_epi16(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
            x = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x);
            x = _mm512_mask_ternarylogic_epi32(x, 0xff00, x, x, 0x55);
            x = ordered(x);
            const int64_t to = int64_t(g) * s.rows + t;
            store(&w.highest[to], extreme<D>(_mm512_castsi512_si256(x)));
            store(&w.smallest[to], extreme<D>(_mm512_extracti64x4_epi64(x, 1)));
        }
}

// Thirty-two values as two float32 vectors: even and odd ones of bfloat16, lower and upper ones of float16. Subnormal
// bfloat16 may stay: beside a scale of at least 2⁻²⁴ they are as good as the zero that they stand for.
template <int32_t D>
INLINE void split(const uint8_t *from, f32x16 *x) {
    if (D == FLOAT16) {
        x[0] = from_half(load<u16x16>(from)), x[1] = from_half(load<u16x16>(from + 32));
    } else {
        const __m512i words = load_words(from);
        x[0] = (f32x16)_mm512_slli_epi32(words, 16);
        x[1] = (f32x16)_mm512_and_si512(words, _mm512_set1_epi32(0xffff0000));
    }
}
// Which of the thirty-two values word i of `code_words` is about.
template <int32_t D>
constexpr int value_of(int i) {
    const int half = i % 8 / 4, in = i / 8 * 4 + i % 4;
    return D == FLOAT16 ? LANES * half + in : 2 * in + half;
}

struct Steps {  // of the two vectors that `split` makes
    f32x16 base[2];
    Divisor divisor[2];
};
INLINE Steps same_steps(const Groups &w, int64_t at) {
    const f32x16 base = broadcast(w.base[at]);
    const Divisor divisor = {broadcast(w.divisor[at]), broadcast(w.reciprocal[at])};
    return {{base, base}, {divisor, divisor}};
}
template <int32_t D>
INLINE Steps steps_along(const Groups &w, int64_t at) {
    const auto half = [at](const float *x, int i) {
        if (D == FLOAT16) return load<f32x16>(x + at + LANES * i);
        const f32x16 a = load<f32x16>(x + at), b = load<f32x16>(x + at + LANES);
        return i ? __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
                 : __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    };
    return {{half(w.base, 0), half(w.base, 1)},
            {{half(w.divisor, 0), half(w.reciprocal, 0)}, {half(w.divisor, 1), half(w.reciprocal, 1)}}};
}

// Thirty-two codes, a word each. Rounding before clamping gives the same, and packing clamps at zero for nothing.
template <int Bits, int32_t D>
INLINE __m512i code_words(const uint8_t *from, int64_t ahead, const Steps &s) {
    f32x16 x[2];
    __builtin_prefetch(from + ahead);
    split<D>(from, x);
    const auto rounded = [&](int i) { return _mm512_cvtps_epi32((__m512)divide(x[i] - s.base[i], s.divisor[i])); };
    return _mm512_min_epu16(_mm512_packus_epi32(rounded(0), rounded(1)), _mm512_set1_epi16((1 << Bits) - 1));
}

struct Bytes {
    uint8_t of[64];
};

// Per-token codes, 64 bytes at a time: two pieces of one row, or of two rows of 32 bytes.
template <int Bits, int32_t D, bool OneGroup>
INLINE void token_words(const TensorSpec &s, const uint8_t *from, int64_t token_bytes, int64_t ahead, const Groups &w, uint8_t *to) {
    constexpr int P = 8 / Bits;
    constexpr auto order = [] {
        Bytes b{};
        for (int i = 0; i < WORDS; i++) b.of[value_of<D>(i)] = 2 * i, b.of[WORDS + value_of<D>(i)] = 64 + 2 * i;
        return b;
    }();
    const __m512i bytes = load_words(order.of);
    const int plane = s.plane(), group = s.group(), tokens = plane == WORDS ? 2 : 1;
    int64_t group_of[MOST_PIECES] = {};
    for (int e = 0; !OneGroup && e < s.row; e += WORDS) group_of[e / WORDS] = int64_t(e / group) * s.rows;
    for (int t = 0; t < s.rows; t += tokens)
        for (int i = 0; i < plane; i += 2 * WORDS, to += 64) {
            const auto piece = [&](int t, int i) {
                const Steps only = same_steps(w, t);
                __m512i x = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) {
                    const int e = p * plane + i;
                    const Steps steps = OneGroup ? only : same_steps(w, group_of[e / WORDS] + t);
                    const __m512i codes = code_words<Bits, D>(from + t * token_bytes + 2 * e, ahead, steps);
                    x = _mm512_or_si512(x, _mm512_slli_epi16(codes, Bits * p));
                }
                return x;
            };
            const __m512i a = piece(t, i), b = tokens == 2 ? piece(t + 1, i) : piece(t, i + WORDS);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi8(a, bytes, b));
        }
}

// words[j] holds bytes 2j and 2j + 1 of 32 rows; to[row * stride] receives 16.
INLINE void store_rows(const __m512i *words, uint8_t *to, int64_t stride) {
    __m512i twos[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        twos[i] = _mm512_unpacklo_epi16(words[2 * i], words[2 * i + 1]);
        twos[4 + i] = _mm512_unpackhi_epi16(words[2 * i], words[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        fours[2 * i] = _mm512_unpacklo_epi32(twos[2 * i], twos[2 * i + 1]);
        fours[2 * i + 1] = _mm512_unpackhi_epi32(twos[2 * i], twos[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // fours[4h + k] and fours[4h + k + 2] are the halves of rows 4h + 2k … of every eight
        const __m512i a = fours[i / 2 * 4 + i % 2], b = fours[i / 2 * 4 + i % 2 + 2];
        const __m512i rows[2] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)};
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            uint8_t *row = to + (2 * i + k) * stride;
            _mm_storeu_si128((__m128i *)row, _mm512_castsi512_si128(rows[k]));
            _mm_storeu_si128((__m128i *)(row + 8 * stride), _mm512_extracti32x4_epi32(rows[k], 1));
            _mm_storeu_si128((__m128i *)(row + 16 * stride), _mm512_extracti32x4_epi32(rows[k], 2));
            _mm_storeu_si128((__m128i *)(row + 24 * stride), _mm512_extracti32x4_epi32(rows[k], 3));
        }
    }
}

// Per-channel codes, 16 bytes of 32 channels at a time.
template <int Bits, int32_t D, bool OneGroup>
INLINE void channel_words(const TensorSpec &s, const uint8_t *from, int64_t token_bytes, int64_t ahead, const Groups &w, uint8_t *to) {
    constexpr int P = 8 / Bits;
    constexpr auto order = [] {
        Bytes b{};
        for (int i = 0; i < WORDS; i++) b.of[2 * value_of<D>(i)] = 2 * i, b.of[2 * value_of<D>(i) + 1] = 64 + 2 * i;
        return b;
    }();
    const __m512i bytes = load_words(order.of);
    const int plane = s.plane(), group = s.group();
    for (int c = 0; c < s.rows; c += WORDS) {
        Steps steps[P];
        if (OneGroup) steps[0] = steps_along<D>(w, c);
        for (int first = 0; first < plane; first += 16) {
            for (int p = 0; !OneGroup && p < P; p++)
                steps[p] = steps_along<D>(w, int64_t((p * plane + first) / group) * s.rows + c);
            __m512i words[8];
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                __m512i x[2];
#pragma GCC unroll 2
                for (int k = 0; k < 2; k++) {
                    x[k] = _mm512_setzero_si512();
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) {
                        const int64_t t = p * plane + first + 2 * j + k;
                        const __m512i codes =
                            code_words<Bits, D>(from + t * token_bytes + 2 * c, ahead, steps[OneGroup ? 0 : p]);
                        x[k] = _mm512_or_si512(x[k], _mm512_slli_epi16(codes, Bits * p));
                    }
                }
                words[j] = _mm512_permutex2var_epi8(x[0], bytes, x[1]);
            }
            store_rows(words, to + c * s.row_bytes + first, s.row_bytes);
        }
    }
}

template <int32_t D>
void word_extremes(const TensorSpec &s, const uint8_t *from, int64_t token_bytes, const Groups &w) {
    if (!s.channel_major)
        return (s.group() == 64    ? tokens_extremes<D, 64>
                : s.group() == 128 ? tokens_extremes<D, 128>
                                   : tokens_extremes<D, 0>)(s, from, token_bytes, w);
    int c = 0;
    for (; c + 2 * WORDS <= s.rows; c += 2 * WORDS) channel_extremes<D, 2>(s, from, token_bytes, c, w);
    for (; c < s.rows; c += WORDS) channel_extremes<D, 1>(s, from, token_bytes, c, w);
}

template <int Bits, int32_t D>
void code_bytes(const TensorSpec &s, const uint8_t *from, int64_t token_bytes, int64_t ahead, const Groups &w, uint8_t *to) {
    const auto write = s.channel_major ? (s.groups > 1 ? channel_words<Bits, D, false> : channel_words<Bits, D, true>)
                                       : (s.groups > 1 ? token_words<Bits, D, false> : token_words<Bits, D, true>);
    write(s, from, token_bytes, ahead, w, to);
}

template <int32_t D>
void word_codes(const TensorSpec &s, const uint8_t *from, int64_t token_bytes, int64_t ahead, const Groups &w, uint8_t *to) {
    const auto write = s.bits == 8 ? code_bytes<8, D> : s.bits == 4 ? code_bytes<4, D> : code_bytes<2, D>;
    write(s, from, token_bytes, ahead, w, to);
}

#endif

}  // namespace kvdrift
