// Sixteen lanes, written with the compiler's vector extensions: one AVX-512 register where there is one, several
// narrower registers elsewhere. Intrinsics appear here and in words.h and digit_loops.h, where the compiler would not find
// the instruction itself.
// -DKVDRIFT_PORTABLE leaves them out and -DKVDRIFT_NO_VNNI what needs VNNI and VBMI, so that one machine can test all.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(KVDRIFT_PORTABLE)
#define KVDRIFT_AVX512 1
#include <immintrin.h>
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && !defined(KVDRIFT_NO_VNNI)
#define KVDRIFT_VNNI 1
#endif
#endif

namespace kvdrift {

constexpr int LANES = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

#define INLINE inline __attribute__((always_inline))

template <class V>
INLINE V load(const void *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V>
INLINE void store(void *to, V v) {
    std::memcpy(to, &v, sizeof v);
}
// Room for float32s that begins on a cache line, reused from one use to the next: vectors that straddle two lines take
// twice as long.
class Floats {
    struct alignas(64) Line {
        float x[LANES];
    };
    std::vector<Line> lines;

   public:
    float *room(int64_t n) {
        if (n > int64_t(lines.size()) * LANES) lines.resize((n + LANES - 1) / LANES);
        return lines.data()->x;
    }
};

INLINE f32x16 gather(const float *from, const int32_t *at) {
#ifdef KVDRIFT_AVX512
    return (f32x16)_mm512_i32gather_ps(_mm512_loadu_si512(at), from, 4);
#else
    f32x16 x;
    for (int i = 0; i < LANES; i++) x[i] = from[at[i]];
    return x;
#endif
}
INLINE f32x16 broadcast(float x) { return x - (f32x16){}; }
INLINE i32x16 as_int(f32x16 x) { return (i32x16)x; }
INLINE f32x16 as_float(i32x16 x) { return (f32x16)x; }

INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }
INLINE i32x16 select(i32x16 mask, i32x16 yes, i32x16 no) { return mask ? yes : no; }

// The second operand where either is NaN.
INLINE f32x16 min(f32x16 a, f32x16 b) {
#ifdef KVDRIFT_AVX512
    return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}
INLINE f32x16 max(f32x16 a, f32x16 b) {
#ifdef KVDRIFT_AVX512
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

INLINE i32x16 widen(u8x16 x) {
#ifdef KVDRIFT_AVX512
    return (i32x16)_mm512_cvtepu8_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, i32x16);
#endif
}
INLINE i32x16 widen(u16x16 x) {
#ifdef KVDRIFT_AVX512
    return (i32x16)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, i32x16);
#endif
}
INLINE u8x16 low_bytes(i32x16 x) {
#ifdef KVDRIFT_AVX512
    return (u8x16)_mm512_cvtepi32_epi8((__m512i)x);
#else
    return __builtin_convertvector(x & 0xff, u8x16);
#endif
}
INLINE f32x16 to_float(i32x16 x) { return __builtin_convertvector(x, f32x16); }

INLINE f32x16 from_half(u16x16 h) {
#ifdef KVDRIFT_AVX512
    return (f32x16)_mm512_cvtph_ps((__m256i)h);
#else
    const i32x16 bits = widen(h), magnitude = (bits & 0x7fff) << 13;
    const f32x16 finite = as_float(magnitude) * 0x1p112f;  // moves the exponent's bias; exact, subnormals included
    const i32x16 x = select(magnitude >= 0x0f800000, magnitude | 0x7f800000, as_int(finite));
    return as_float(x | (bits & 0x8000) << 16);
#endif
}

// Round half to even; a value beyond the range becomes infinite.
INLINE u16x16 to_half(f32x16 x) {
#ifdef KVDRIFT_AVX512
    return (u16x16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const i32x16 bits = as_int(x), magnitude = bits & 0x7fffffff;
    i32x16 normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
    normal = select(normal > 0x7c00, i32x16{} + 0x7c00, normal);
    const i32x16 small = as_int(as_float(magnitude) + 0.5f) - 0x3f000000;  // 0.5's ulp is half's smallest subnormal
    i32x16 h = select(magnitude < 0x38800000, small, normal);
    h = select(magnitude > 0x7f800000, i32x16{} + 0x7e00, h);
    return __builtin_convertvector(h | ((bits >> 16) & 0x8000), u16x16);
#endif
}

INLINE f32x16 from_bfloat(u16x16 x) { return as_float(widen(x) << 16); }

// Subnormals and negative zero become zero.
INLINE f32x16 from_bfloat_flushed(u16x16 x) {
#ifdef KVDRIFT_AVX512
    const __mmask16 normal = _mm256_test_epi16_mask((__m256i)x, _mm256_set1_epi16(0x7f80));
    return (f32x16)_mm512_slli_epi32(_mm512_maskz_cvtepu16_epi32(normal, (__m256i)x), 16);
#else
    return from_bfloat((x & 0x7f80) != 0 ? x : u16x16{});
#endif
}

// sum + 0 · x: what isn't finite leaves NaN.
INLINE f32x16 plus_zero_times(f32x16 sum, f32x16 x) {
#ifdef KVDRIFT_AVX512
    return (f32x16)_mm512_fmadd_ps((__m512)x, _mm512_setzero_ps(), (__m512)sum);
#else
    return sum + x * 0.0f;
#endif
}

// a / b, correctly rounded, from b's own reciprocal: one Newton step on the quotient, whose remainder an FMA tells
// exactly (Markstein, IBM J. Res. Dev. 34(1), 1990). Right where b, its reciprocal and the remainder are normal.
struct Divisor {
    f32x16 value, reciprocal;
};
INLINE f32x16 divide(f32x16 a, Divisor b) {
#ifdef KVDRIFT_AVX512
    const __m512 q = (__m512)(a * b.reciprocal);
    const __m512 remainder = _mm512_fnmadd_ps(q, (__m512)b.value, (__m512)a);
    return (f32x16)_mm512_fmadd_ps(remainder, (__m512)b.reciprocal, q);
#else
    return a / b.value;
#endif
}

// Round half to even; NaN stays NaN.
INLINE u16x16 to_bfloat(f32x16 x) {
    const i32x16 bits = as_int(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const i32x16 high = select((bits & 0x7fffffff) > 0x7f800000, bits | 0x00400000, rounded) >> 16;
    return __builtin_convertvector(high & 0xffff, u16x16);
}

// E4M3's fields, moved into a half, are 2⁻⁸ of its value; exact, subnormals included.
constexpr float E4M3_UNIT = 256.0f;
INLINE f32x16 from_e4m3(u8x16 x) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    typedef int16_t i16x16 __attribute__((vector_size(32)));
    return from_half((u16x16)(__builtin_convertvector((i8x16)x, i16x16) << 7) & 0xbfff);
}

// The low `Bits` (at most 4) bits of each lane, whatever is above them.
template <int Bits>
INLINE f32x16 small_float(i32x16 x) {
#ifdef KVDRIFT_AVX512
    constexpr int m = (1 << Bits) - 1;
    const f32x16 table = {0,     1,     2 & m,  3 & m,  4 & m,  5 & m,  6 & m,  7 & m,
                          8 & m, 9 & m, 10 & m, 11 & m, 12 & m, 13 & m, 14 & m, 15 & m};
    return (f32x16)_mm512_permutexvar_ps((__m512i)x, (__m512)table);
#else
    return to_float(x & ((1 << Bits) - 1));
#endif
}

// Four vectors' lanes folded at once, by halves: a third of the price of one after the other.
typedef float f32x4 __attribute__((vector_size(16)));
template <class Op>
INLINE f32x4 fold4(f32x16 a, f32x16 b, f32x16 c, f32x16 d, Op op) {
    const f32x16 ab = op(__builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
                         __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
    const f32x16 cd = op(__builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
                         __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
    f32x16 x = op(__builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                  __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    return __builtin_shufflevector(x, x, 0, 1, 2, 3);
}
struct Sum {
    INLINE f32x16 operator()(f32x16 a, f32x16 b) const { return a + b; }
};
struct Min {
    INLINE f32x16 operator()(f32x16 a, f32x16 b) const { return min(a, b); }
};
struct Max {
    INLINE f32x16 operator()(f32x16 a, f32x16 b) const { return max(a, b); }
};
template <class Op>
INLINE float fold(f32x16 x, Op op) {
    return fold4(x, x, x, x, op)[0];
}
INLINE bool any(i32x16 mask) {
#ifdef KVDRIFT_AVX512
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all |= mask[i];
    return all != 0;
#endif
}

}  // namespace kvdrift
