// Sixteen groups or sixteen elements at a time: what quantizers/uniform.py and quantizers/float8.py compute.
// Every operation rounds once (compiled with -ffp-contract=off), so that codes equal the definition's bit for bit.
#pragma once
#include "layout.h"
#include "simd.h"

namespace kvdrift {

constexpr int32_t INFINITE = 0x7f800000, SMALLEST_NORMAL = 0x00800000, LARGEST = (127 + 100) << 23;  // groups.py
constexpr float HUGE_DIVISOR = 1e37f;  // its reciprocal is normal still

INLINE i32x16 magnitude(f32x16 x) { return as_int(x) & 0x7fffffff; }
INLINE i32x16 not_finite(f32x16 x) { return magnitude(x) >= INFINITE; }
INLINE i32x16 too_large(f32x16 x) { return magnitude(x) > LARGEST; }  // or NaN

INLINE f32x16 to_float32(f32x16 x) { return select(magnitude(x) >= SMALLEST_NORMAL, x, f32x16{}); }

// What a group needs to turn a value into a code, in float32 but as stored.
struct Step {
    f32x16 divisor;  // huge where the scale is zero, so that every code is zero
    f32x16 base;
    i32x16 bad;  // lanes that can't be held
};

INLINE f32x16 rounded(f32x16 x, bool half) { return half ? from_half(to_half(x)) : x; }

INLINE Step uniform_step(f32x16 smallest, f32x16 highest, float levels, bool half, f32x16 &scale) {
    scale = rounded(highest / levels - smallest / levels, half);
    const f32x16 base = rounded(smallest, half) + 0.0f, zero = {};
    const i32x16 vanished = scale == zero;
    const i32x16 bad = too_large(levels * scale + base) | too_large(base);
    return {select(vanished, zero + HUGE_DIVISOR, scale), base, bad | (vanished & (highest != smallest))};
}

INLINE Step float8_step(f32x16 smallest, f32x16 highest, bool half, f32x16 &scale) {
    const f32x16 largest = max(highest, -smallest), zero = {};
    const f32x16 quotient = largest / 448.0f;
    scale = rounded(to_float32(quotient), half);
    const i32x16 vanished = scale == zero;
    const i32x16 bad = too_large(448.0f * scale);
    return {select(vanished, zero + HUGE_DIVISOR, scale), zero, bad | (vanished & (largest != zero))};
}

// Adding 1.5·2²³ rounds half to even and leaves the integer in the mantissa: the result is the code plus ROUNDED, whose
// low bytes are zero.
constexpr int32_t ROUNDED = 0x4b400000;
//
// Half: the scale is a float16, so at least 2⁻²⁴. Then a remainder is normal wherever the code isn't zero anyway, and
// `divide` gives the quotient.
template <int Bits, bool Half>
INLINE i32x16 uniform_code(f32x16 x, Divisor divisor, f32x16 base) {
    constexpr float levels = (1 << Bits) - 1;
    const f32x16 q = Half ? divide(x - base, divisor) : (x - base) / divisor.value, zero = {};
    return as_int(min(max(q, zero), zero + levels) + 12582912.0f);
}

INLINE i32x16 float8_code(f32x16 x, Divisor divisor, f32x16) {
    const f32x16 zero = {};
    const f32x16 q = min(max(x / divisor.value, zero - 448.0f), zero + 448.0f);
    const i32x16 m = magnitude(q), sign = (as_int(q) >> 24) & 0x80;
    const i32x16 normal = (m + ((7 - 127) * (1 << 23) + 0x7ffff) + ((m >> 20) & 1)) >> 20;
    const i32x16 small = as_int(as_float(m) + 16384.0f) - (141 << 23);  // 2¹⁴'s ulp is E4M3's smallest subnormal
    return select(m < (121 << 23), small, normal) | sign;
}

// words[k] holds bytes 4k … 4k + 3 of sixteen columns; to[column * stride] receives the first `bytes` of 16.
INLINE void store_columns(const i32x16 *words, uint8_t *to, int64_t stride, int columns, int bytes) {
    const auto low = [](i32x16 a, i32x16 b) {
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    };
    const auto high = [](i32x16 a, i32x16 b) {
        return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    };
    const auto pair_low = [](i32x16 a, i32x16 b) {
        return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    };
    const auto pair_high = [](i32x16 a, i32x16 b) {
        return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    };
    const i32x16 a = low(words[0], words[1]), b = low(words[2], words[3]);
    const i32x16 c = high(words[0], words[1]), d = high(words[2], words[3]);
    const i32x16 of[4] = {pair_low(a, b), pair_high(a, b), pair_low(c, d), pair_high(c, d)};  // columns j, j + 4, …
    if (columns >= LANES && bytes == 16) {
#pragma GCC unroll 16
        for (int column = 0; column < LANES; column++)
            std::memcpy(to + column * stride, (const uint8_t *)&of[column % 4] + column / 4 * 16, 16);
    } else {
        for (int column = 0; column < columns; column++)
            std::memcpy(to + column * stride, (const uint8_t *)&of[column % 4] + column / 4 * 16, bytes);
    }
}

}  // namespace kvdrift
