// The two inner loops of attention over one block of one head, for R query rows at a time (R ≤ 4). Each turns codes into
// floats once, in registers, and feeds them to every query row:
//   weighted_rows   Σ over rows of weight · row: scores from channel-major keys, outputs from token-major values
//   row_products    query · row: scores from token-major keys
// Rows are read in units of sixteen elements a plane, so a row's planes must be multiples of sixteen long.
#pragma once
#include "layout.h"
#include "simd.h"

namespace kvdrift {

constexpr int ROWS = 4;  // most query rows of one pass

// A source reads one unit of a row: 16 elements of each of its planes, as plain numbers (no scale; E4M3 in 1/256ths).
struct U8 {
    static constexpr int planes = 1, bytes = 16, chunks = 4;
    static INLINE void read(const uint8_t *from, f32x16 *x) { x[0] = to_float(widen(load<u8x16>(from))); }
};
struct U4 {
    static constexpr int planes = 2, bytes = 16, chunks = 2;
    static INLINE void read(const uint8_t *from, f32x16 *x) {
        const i32x16 b = widen(load<u8x16>(from));
        x[0] = small_float<4>(b), x[1] = small_float<4>(b >> 4);
    }
};
struct U2 {
    static constexpr int planes = 4, bytes = 16, chunks = 1;
    static INLINE void read(const uint8_t *from, f32x16 *x) {
        const i32x16 b = widen(load<u8x16>(from));
        x[0] = small_float<2>(b), x[1] = small_float<2>(b >> 2), x[2] = small_float<2>(b >> 4);
        x[3] = small_float<2>(b >> 6);
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

// One block of one head as the loops see it. Scale and low are float32 [groups][rows]; null where there are none.
struct Operand {
    const uint8_t *codes;
    int64_t stride;  // bytes from row to row
    int rows, row, groups;
    const float *scale, *low;
    int64_t ahead;  // bytes from here to the codes that are read next, fetched meanwhile; 0 if there are none
};

// The pages of a sequence lie anywhere in the arena, so the hardware can't foresee the next one.
template <int Bytes>
INLINE void fetch(const uint8_t *from) {
#pragma GCC unroll 4
    for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(from + i);
}

// out[r * out_row + e] += Σ over rows of weight[group of e][r][row] · code[row][e], for the first `rows` rows.
// The caller has multiplied the scales into the weights, and adds what the lows contribute.
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
        fetch<C * S::bytes>(codes + a.ahead);
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
void weighted_rows(const Operand &a, const float *weight, int64_t weight_row, int64_t weight_group, int rows, float *out,
                   int64_t out_row) {
    const int chunks = a.row / (S::planes * LANES);
    int chunk = 0;
    for (; chunk + S::chunks <= chunks; chunk += S::chunks)
        weighted_pass<S, R, S::chunks, Grouped>(a, weight, weight_row, weight_group, rows, chunk, out, out_row);
    for (; chunk < chunks; chunk++)
        weighted_pass<S, R, 1, Grouped>(a, weight, weight_row, weight_group, rows, chunk, out, out_row);
}

// out[r * out_row + row] = Σ over elements of query[r][e] · x[row][e], for `rows` rows rounded up to four.
// Grouped: x = scale · code + low. Else x is the bare code, and the caller applies the one scale and low a row has.
template <class S, int R, bool Grouped>
void row_products(const Operand &a, const float *query, int64_t query_row, int rows, float *out, int64_t out_row) {
    constexpr int P = S::planes;
    const int plane = a.row / P, chunks = plane / LANES;
    const int group_chunks = a.groups ? a.row / a.groups / LANES : 1;
    for (int row = 0; row < rows; row += 4) {
        const uint8_t *codes[4];
        for (int i = 0; i < 4; i++) codes[i] = a.codes + (row + i < a.rows ? row + i : a.rows - 1) * a.stride;
        for (int i = 0; i < 4; i++)
            for (int byte = 0; byte < chunks * S::bytes; byte += 64) __builtin_prefetch(codes[i] + byte + a.ahead);
        f32x16 acc[R][4] = {};
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
                    const f32x16 q = load<f32x16>(query + r * query_row + p * plane + chunk * LANES);
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

// The loops for one format, by number of query rows − 1.
struct Kernels {
    using Weighted = void (*)(const Operand &, const float *, int64_t, int64_t, int, float *, int64_t);
    using Products = void (*)(const Operand &, const float *, int64_t, int, float *, int64_t);
    Weighted weighted[ROWS];
    Products products[ROWS];
};

template <class S, bool Grouped>
constexpr Kernels kernels_of = {
    {weighted_rows<S, 1, Grouped>, weighted_rows<S, 2, Grouped>, weighted_rows<S, 3, Grouped>, weighted_rows<S, 4, Grouped>},
    {row_products<S, 1, Grouped>, row_products<S, 2, Grouped>, row_products<S, 3, Grouped>, row_products<S, 4, Grouped>},
};

}  // namespace kvdrift
