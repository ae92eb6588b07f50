// The loops for integer codes on a CPU with VNNI, whose instruction adds four products of bytes to each 32-bit lane.
// Codes are used as they are. The float32 factor becomes a fixed-point number of three signed bytes ("digits"), 24 bits
// relative to the largest of its kind, and each digit is summed by itself, exactly.
#pragma once
#include <algorithm>
#include <type_traits>

#include "loops.h"

#ifdef KVDRIFT_VNNI
namespace kvdrift {

constexpr int DIGITS = 3;
constexpr float FIXED_ONE = 0x7f0000;  // the largest factor: 127 in the highest digit

// A source is a width of codes: 16 bytes of a row hold 16 elements of each of its planes.
template <int Bits>
struct Codes {
    static constexpr int bits = Bits, planes = 8 / Bits;
    static INLINE i32x16 plane(i32x16 bytes, int p) {
        return Bits == 8 ? bytes : (bytes >> (Bits * p)) & (0x01010101 * ((1 << Bits) - 1));
    }
};

INLINE i32x16 dot(i32x16 sum, i32x16 codes, i32x16 digits) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)digits);
}

INLINE i32x16 spread(const uint8_t *from) {
    int32_t x;
    std::memcpy(&x, from, 4);
    return x - (i32x16){};
}

INLINE f32x16 value_of(const i32x16 *sums) {
    return to_float(sums[2]) * 65536.0f + (to_float(sums[1]) * 256.0f + to_float(sums[0]));
}

INLINE __m128i bytes16(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }

INLINE __m512i four_rows(const uint8_t *from, int64_t stride) {
    __m512i x = _mm512_castsi128_si512(bytes16(from));
    x = _mm512_mask_broadcast_i32x4(x, 0x00f0, bytes16(from + stride));
    x = _mm512_mask_broadcast_i32x4(x, 0x0f00, bytes16(from + 2 * stride));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, bytes16(from + 3 * stride));
}

// Lane i holds byte i of four rows.
INLINE i32x16 interleaved(const uint8_t *from, int64_t stride) {
    alignas(64) static constexpr uint8_t order[64] = {
        0, 16, 32, 48, 1, 17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
        8, 24, 40, 56, 9, 25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
    return (i32x16)_mm512_permutexvar_epi8(_mm512_load_si512(order), four_rows(from, stride));
}

// x[j]'s lane i holds bytes 4j … 4j + 3 of row i, of sixteen rows.
INLINE void transposed(const uint8_t *from, int64_t stride, i32x16 *x) {
    __m512i z[4];
    for (int k = 0; k < 4; k++) z[k] = four_rows(from + k * stride, 4 * stride);
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
    const __m512i c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    x[0] = (i32x16)_mm512_unpacklo_epi64(a, b), x[1] = (i32x16)_mm512_unpackhi_epi64(a, b);
    x[2] = (i32x16)_mm512_unpacklo_epi64(c, d), x[3] = (i32x16)_mm512_unpackhi_epi64(c, d);
}

// What the lowest digit counts, if nothing is larger than `most`; never so small that its reciprocal overflows.
INLINE float unit_of(float most) { return std::max(most, 1e-30f) / FIXED_ONE; }

// Whole numbers as digits: sixteen of them, as [element / 4][digit][element % 4] and a byte unused.
INLINE void store_digits(f32x16 x, uint8_t *to) {
    const __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const i32x16 bytes = ((i32x16)_mm512_cvtps_epi32((__m512)x) + 0x808080) ^ 0x808080;  // each from −128 to 127
    store(to, _mm512_shuffle_epi8((__m512i)bytes, by_digit));
}

// C units of sixteen bytes, `Planes` of their planes from `first` on: sums of R query rows.
template <class S, int R, int C, int Planes, bool Grouped>
INLINE void weighted_pass(const Operand &a, const uint8_t *digits, int64_t digits_row, int64_t digits_group,
                          const float *unit, int rows, int chunk, int first, float *out, int64_t out_row) {
    constexpr int N = C * Planes;
    const int plane = a.row / S::planes, group = a.groups ? a.row / a.groups : a.row;
    const uint8_t *codes = a.codes + chunk * 16;
    int element[N], of[N];
    for (int n = 0; n < N; n++) {
        element[n] = (first + n % Planes) * plane + (chunk + n / Planes) * LANES;
        of[n] = Grouped ? element[n] / group : 0;
    }
    i32x16 acc[R][N][DIGITS] = {};
    for (int row = 0; row < rows; row += 4, codes += 4 * a.stride, digits += 16) {
        i32x16 x[N];
        if (chunk + first == 0) fetch(codes + a.ahead, 4 * a.stride);
#pragma GCC unroll 4
        for (int i = 0; i < C; i++) {
            const i32x16 bytes = interleaved(codes + i * 16, a.stride);
#pragma GCC unroll 4
            for (int p = 0; p < Planes; p++) x[i * Planes + p] = S::plane(bytes, first + p);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int k = 0; k < DIGITS; k++)
                    acc[r][n][k] = dot(acc[r][n][k], x[n], spread(digits + of[n] * digits_group + r * digits_row + 4 * k));
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            float *to = out + r * out_row + element[n];
            store(to, load<f32x16>(to) + value_of(acc[r][n]) * unit[r]);
        }
}

template <class S, int R, bool Grouped>
void weighted_digits(const Operand &a, const Factors &f, int rows, float *out, int64_t out_row) {
    alignas(64) uint8_t digits[(Grouped ? LONGEST / LANES : 1) * R * LONGEST * 4];
    const int64_t digits_row = 4 * a.rows, digits_group = R * digits_row;
    const int groups = Grouped ? a.groups : 1;
    f32x16 largest = {};  // of the scales that count: what nobody sees mustn't make the digits coarse
    for (int g = 0; g < groups - a.unseen; g++) {
        const float *scale = a.scale + g * a.rows;
        int i = 0;
        for (; i + LANES <= rows; i += LANES) largest = max(largest, load<f32x16>(scale + i));
        for (; i < rows; i++) largest = max(largest, broadcast(scale[i]));
    }
    const float most = fold(largest, Max());
    float unit[R], per_unit[R];
    for (int r = 0; r < R; r++) unit[r] = unit_of(most * f.most[r]), per_unit[r] = 1 / unit[r];
    for (int g = 0; g < groups; g++)  // multiplied in this order it overflows out of sight alone: NaN becomes zero digits
        for (int i = 0; i < a.rows; i += LANES) {
            const f32x16 scale = load<f32x16>(a.scale + g * a.rows + i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                store_digits(load<f32x16>(f.x + r * f.row + i) * scale * per_unit[r], digits + g * digits_group + r * digits_row + 4 * i);
        }
    constexpr int N = R == 1 ? 4 : 2;  // R · N · DIGITS sums fit in the registers and keep the multipliers busy
    constexpr int Planes = S::planes < N ? S::planes : N, C = N / Planes;
    const auto pass = [&](auto c, int chunk, int first) {
        weighted_pass<S, R, decltype(c)::value, Planes, Grouped>(a, digits, digits_row, digits_group, unit, rows, chunk,
                                                                 first, out, out_row);
    };
    const int chunks = a.row / (S::planes * LANES);
    for (int first = 0; first < S::planes; first += Planes) {
        int chunk = 0;
        for (; chunk + C <= chunks; chunk += C) pass(std::integral_constant<int, C>(), chunk, first);
        for (; chunk < chunks; chunk++) pass(std::integral_constant<int, 1>(), chunk, first);
    }
}

template <class S, int R, bool Grouped>
void digit_products(const Operand &a, const Factors &query, int rows, float *out, int64_t out_row) {
    constexpr int N = R > 2 ? 1 : 2, P = Grouped ? 1 : S::planes;  // runs of sixteen rows; planes read at once
    const int plane = a.row / S::planes, groups = Grouped ? a.groups : 1, group = a.row / groups;
    alignas(64) uint8_t digits[R * LONGEST * 4];
    float unit[R], sum[R * LONGEST / LANES];
    for (int r = 0; r < R; r++) unit[r] = unit_of(query.most[r]);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < a.row; i += LANES)
            store_digits(load<f32x16>(query.x + r * query.row + i) * (1 / unit[r]), digits + r * 4 * a.row + 4 * i);
    for (int r = 0; Grouped && r < R; r++)
        for (int g = 0; g < groups; g++) {
            f32x16 x = {};
            for (int i = 0; i < group; i += LANES) x += load<f32x16>(query.x + r * query.row + g * group + i);
            sum[r * groups + g] = fold(x, Sum());
        }
    for (int row = 0; row < rows; row += N * LANES) {
        f32x16 total[R][N] = {};
        const uint8_t *codes = a.codes + row * a.stride;
        fetch(codes + a.ahead, N * LANES * a.stride);
        for (int g = 0; g < groups; g++) {
            i32x16 acc[R][N][DIGITS] = {};
            for (int e = g * group; e < (Grouped ? (g + 1) * group : plane); e += LANES) {
                const int first = Grouped ? e / plane : 0, at = e - first * plane;
                i32x16 x[N][4];
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) transposed(codes + n * LANES * a.stride + at, a.stride, x[n]);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) {
                        const uint8_t *of = digits + 4 * (p * plane + e + 4 * j);
#pragma GCC unroll 4
                        for (int n = 0; n < N; n++) {
                            const i32x16 code = S::plane(x[n][j], first + p);
#pragma GCC unroll 4
                            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                                for (int k = 0; k < DIGITS; k++)
                                    acc[r][n][k] = dot(acc[r][n][k], code, spread(of + r * 4 * a.row + 4 * k));
                        }
                    }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) {
                    const f32x16 x = value_of(acc[r][n]) * unit[r];
                    const int64_t stored = int64_t(g) * a.rows + row + n * LANES;
                    if (Grouped)
                        total[r][n] += x * load<f32x16>(a.scale + stored) + sum[r * groups + g] * load<f32x16>(a.low + stored);
                    else
                        total[r][n] = x;
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) store(out + r * out_row + row + n * LANES, total[r][n]);
    }
}

template <int Bits, bool Grouped>
constexpr Loops digit_loops = {
    {weighted_digits<Codes<Bits>, 1, Grouped>, weighted_digits<Codes<Bits>, 2, Grouped>, weighted_digits<Codes<Bits>, 3, Grouped>,
     weighted_digits<Codes<Bits>, 4, Grouped>},
    {digit_products<Codes<Bits>, 1, Grouped>, digit_products<Codes<Bits>, 2, Grouped>, digit_products<Codes<Bits>, 3, Grouped>,
     digit_products<Codes<Bits>, 4, Grouped>},
};

}  // namespace kvdrift
#endif
