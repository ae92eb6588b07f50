// The loops in float32. Each turns codes into floats once, in registers, and feeds them to every query row.
#pragma once
#include "loops.h"

namespace kvdrift {

// A source reads one unit of a row: 16 elements of each of its planes, as plain numbers (no scale; E4M3 in 1/256ths).
template <int Bits>
struct Unsigned {
    static constexpr int planes = 8 / Bits, bytes = 16, chunks = Bits / 2;
    static INLINE void read(const uint8_t *from, f32x16 *x) {
        const i32x16 b = widen(load<u8x16>(from));
#pragma GCC unroll 4
        for (int p = 0; p < planes; p++) x[p] = Bits == 8 ? to_float(b) : small_float<Bits>(b >> (Bits * p));
    }
};
struct E4M3 {
    static constexpr int planes = 1, bytes = 16, chunks = 4;
    static INLINE void read(const uint8_t *from, f32x16 *x) { x[0] = from_e4m3(load<u8x16>(from)); }
};
struct F32 {
    static constexpr int planes = 1, bytes = 64, chunks = 4;
    static INLINE void read(const uint8_t *from, f32x16 *x) { x[0] = load<f32x16>(from); }
};
struct F16 {
    static constexpr int planes = 1, bytes = 32, chunks = 4;
    static INLINE void read(const uint8_t *from, f32x16 *x) { x[0] = from_half(load<u16x16>(from)); }
};
struct BF16 {
    static constexpr int planes = 1, bytes = 32, chunks = 4;
    static INLINE void read(const uint8_t *from, f32x16 *x) { x[0] = from_bfloat(load<u16x16>(from)); }
};

template <class S, int R, int C, bool Grouped>
INLINE void weighted_pass(const Operand &a, const float *weight, int64_t weight_row, int64_t weight_group, int rows,
                          int chunk, float *out, int64_t out_row) {
    constexpr int P = S::planes, N = C * P;
    const int plane = a.row / P, group = a.groups ? a.row / a.groups : a.row;
    const uint8_t *codes = a.codes + chunk * S::bytes;
    int element[N];
    const float *w[N];
    for (int n = 0; n < N; n++) element[n] = n % P * plane + (chunk + n / P) * LANES;
    for (int n = 0; n < N; n++) w[n] = weight + element[n] / group * weight_group;
    f32x16 acc[R][N] = {};
    for (int row = 0; row < rows; row++, codes += a.stride) {
        f32x16 x[N];
        if (a.ahead) fetch(codes + a.ahead, C * S::bytes);
#pragma GCC unroll 4
        for (int i = 0; i < C; i++) S::read(codes + i * S::bytes, x + i * P);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const f32x16 shared = broadcast(weight[r * weight_row + row]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) acc[r][n] += (Grouped ? broadcast(w[n][r * weight_row + row]) : shared) * x[n];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            float *to = out + r * out_row + element[n];
            store(to, load<f32x16>(to) + acc[r][n]);
        }
}

template <class S, int R, bool Grouped>
void weighted_rows(const Operand &a, const Factors &f, int rows, float *out, int64_t out_row) {
    float scaled[(Grouped ? LONGEST / LANES : 1) * R * LONGEST];
    const float *weight = f.x;
    int64_t weight_row = f.row, weight_group = 0;
    if (a.scale) {
        weight = scaled, weight_row = a.rows, weight_group = R * weight_row;
        for (int g = 0; g < a.groups; g++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < a.rows; i += LANES)
                    store(scaled + g * weight_group + r * weight_row + i,
                          load<f32x16>(f.x + r * f.row + i) * load<f32x16>(a.scale + g * a.rows + i));
    }
    const int chunks = a.row / (S::planes * LANES);
    int chunk = 0;
    for (; chunk + S::chunks <= chunks; chunk += S::chunks)
        weighted_pass<S, R, S::chunks, Grouped>(a, weight, weight_row, weight_group, rows, chunk, out, out_row);
    for (; chunk < chunks; chunk++)
        weighted_pass<S, R, 1, Grouped>(a, weight, weight_row, weight_group, rows, chunk, out, out_row);
}

// Four rows at a time, so more than asked for may be written.
template <class S, int R, bool Grouped>
void row_products(const Operand &a, const Factors &query, int rows, float *out, int64_t out_row) {
    constexpr int P = S::planes;
    const int plane = a.row / P, chunks = plane / LANES;
    const int group_chunks = a.groups ? a.row / a.groups / LANES : 1;
    for (int row = 0; row < rows; row += 4) {
        const uint8_t *codes[4];
        for (int i = 0; i < 4; i++) codes[i] = a.codes + (row + i < a.rows ? row + i : a.rows - 1) * a.stride;
        f32x16 acc[R][4] = {};
        if (a.ahead) fetch(codes[0] + a.ahead, 4 * a.stride);
        for (int chunk = 0; chunk < chunks; chunk++) {
            f32x16 x[4][P];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) S::read(codes[i] + chunk * S::bytes, x[i]);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                if (Grouped) {
                    const int64_t at = int64_t((p * chunks + chunk) / group_chunks) * a.rows + row;
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) {
                        x[i][p] = x[i][p] * broadcast(a.scale[at + i]);
                        if (a.low) x[i][p] += broadcast(a.low[at + i]);
                    }
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const f32x16 q = load<f32x16>(query.x + r * query.row + p * plane + chunk * LANES);
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) acc[r][i] += q * x[i][p];
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            store(out + r * out_row + row, fold4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], Sum()));
    }
}

template <class S, bool Grouped>
constexpr Loops float_loops = {
    {weighted_rows<S, 1, Grouped>, weighted_rows<S, 2, Grouped>, weighted_rows<S, 3, Grouped>, weighted_rows<S, 4, Grouped>},
    {row_products<S, 1, Grouped>, row_products<S, 2, Grouped>, row_products<S, 3, Grouped>, row_products<S, 4, Grouped>},
};

}  // namespace kvdrift
