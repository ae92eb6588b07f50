// Sixteen groups or sixteen elements at a time: what quantizers/uniform.py and quantizers/float8.py compute.
// Every operation rounds once (compiled with -ffp-contract=off), so that codes equal the definition's bit for bit.
#pragma once
#include "layout.h"
#include "simd.h"

namespace kvdrift {

constexpr int32_t INFINITE = 0x7f800000, SMALLEST_NORMAL = 0x00800000;

INLINE i32x16 magnitude(f32x16 x) { return as_int(x) & 0x7fffffff; }
INLINE i32x16 not_finite(f32x16 x) { return magnitude(x) >= INFINITE; }

// quantizers/groups.py: subnormals and negative zero become zero; NaN and infinities stay.
INLINE f32x16 to_float32(f32x16 x) { return as_float(as_int(x) & (magnitude(x) >= SMALLEST_NORMAL)); }

// What a group needs to turn a value into a code, in float32 but as stored.
struct Step {
    f32x16 divisor;  // infinite where the scale is zero, so that every code is zero
    f32x16 base;
    i32x16 bad;  // lanes that can't be held
};

INLINE f32x16 rounded(f32x16 x, bool half) { return half ? from_half(to_half(x)) : x; }

INLINE Step uniform_step(f32x16 smallest, f32x16 highest, float levels, bool half, f32x16 &scale) {
    scale = rounded(highest / levels - smallest / levels, half);
    const f32x16 base = rounded(smallest, half) + 0.0f, zero = {};
    const i32x16 vanished = scale == zero;
    const i32x16 bad = not_finite(levels * scale + base) | not_finite(scale) | not_finite(base);
    return {select(vanished, zero + INFINITY, scale), base, bad | (vanished & (highest != smallest))};
}

INLINE Step float8_step(f32x16 smallest, f32x16 highest, bool half, f32x16 &scale) {
    const f32x16 largest = max(highest, -smallest), zero = {};
    const f32x16 quotient = largest / 448.0f;
    scale = rounded(as_float(as_int(quotient) & (magnitude(quotient) >= SMALLEST_NORMAL)), half);
    const i32x16 vanished = scale == zero;
    const i32x16 bad = not_finite(448.0f * scale) | not_finite(scale);
    return {select(vanished, zero + INFINITY, scale), zero, bad | (vanished & (largest != zero))};
}

// The code in the low byte of each lane. Adding 1.5·2²³ rounds half to even and leaves the integer in the mantissa.
template <int Bits>
INLINE i32x16 uniform_code(f32x16 x, f32x16 divisor, f32x16 base) {
    constexpr float levels = (1 << Bits) - 1;
    const f32x16 q = (x - base) / divisor, zero = {};
    return as_int(min(max(q, zero), zero + levels) + 12582912.0f) & 0xff;
}

INLINE i32x16 float8_code(f32x16 x, f32x16 divisor, f32x16) {
    const f32x16 zero = {};
    const f32x16 q = min(max(x / divisor, zero - 448.0f), zero + 448.0f);
    const i32x16 m = magnitude(q), sign = (as_int(q) >> 24) & 0x80;
    const i32x16 normal = (m + ((7 - 127) * (1 << 23) + 0x7ffff) + ((m >> 20) & 1)) >> 20;
    const i32x16 small = as_int(as_float(m) + 16384.0f) - (141 << 23);  // 2¹⁴'s ulp is E4M3's smallest subnormal
    return select(m < (121 << 23), small, normal) | sign;
}

// Rows of sixteen bytes become columns: out[lane * stride + i] = in[i][lane], for the first `n` of 16 i's.
INLINE void transpose16(const u8x16 *in, uint8_t *out, int64_t stride, int lanes, int n) {
    u8x16 a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = in[i];
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                                   30, 15, 31);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) a[i] = b[i];
    }
    if (n == 16 && lanes == 16) {
#pragma GCC unroll 16
        for (int lane = 0; lane < 16; lane++) store(out + lane * stride, a[lane]);
    } else {
        for (int lane = 0; lane < lanes; lane++) std::memcpy(out + lane * stride, &a[lane], n);
    }
}

}  // namespace kvdrift
