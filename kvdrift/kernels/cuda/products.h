// The two products of attention over a step, for the two ways in which codes can lie.
#pragma once
#include "staged.h"

// Sums over rows: codes whose rows are summed away (values over tokens; channel-major keys over channels).
//
// Adds Σ_row raw[row, out] · scale[row, group] · x[query, row] to `sums`, and this lane's share of
// Σ_row offset[row, group] · x[query, row] to `offsets`. `x` lies in shared memory, `pitch` floats a query.
template <class S>
struct OverRows {
    static constexpr int PAIRS = S::UNIT / 2;
    static constexpr int OUTS = S::Tensor::PLANES * S::COLUMNS * PAIRS;
    float sums[OUTS][TILES][4];
    float offsets[S::GROUPS][TILES];

    __device__ void clear() {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int out = 0; out < OUTS; out++)
                sums[out][tile][0] = sums[out][tile][1] = sums[out][tile][2] = sums[out][tile][3] = 0.0f;
#pragma unroll
            for (int group = 0; group < S::GROUPS; group++) offsets[group][tile] = 0.0f;
        }
    }

    __device__ void add(const u8* stage, const float* x, int pitch) {
        const Lane lane;
        x += lane.g / 2 * pitch + lane.t;
#pragma unroll 2
        for (int row = 0; row < S::ROWS; row += 8) {
            const int near = row + lane.t, far = near + 4;
            Word words[S::COLUMNS][2];
#pragma unroll
            for (int column = 0; column < S::COLUMNS; column++) {
                words[column][0] = read<S>(stage, near, 8 * column + lane.g);
                words[column][1] = read<S>(stage, far, 8 * column + lane.g);
            }
            float b[TILES][2];
            int held = -1;  // the group that `b` is scaled for
#pragma unroll
            for (int plane = 0; plane < S::Tensor::PLANES; plane++)
#pragma unroll
                for (int column = 0; column < S::COLUMNS; column++) {
                    const int group = S::group(plane, column), unit = 8 * column + lane.g;
                    if (group != held) scale_by(stage, near, far, group, x + row, pitch, b);
                    held = group;
#pragma unroll
                    for (int pair = 0; pair < PAIRS; pair++) {
                        const float a[4] = {operand<S>(stage, near, unit, words[column][0], 2 * pair, plane),
                                            operand<S>(stage, near, unit, words[column][0], 2 * pair + 1, plane),
                                            operand<S>(stage, far, unit, words[column][1], 2 * pair, plane),
                                            operand<S>(stage, far, unit, words[column][1], 2 * pair + 1, plane)};
                        accumulate<S>(sums[(plane * S::COLUMNS + column) * PAIRS + pair], a, b);
                    }
                }
        }
    }

    __device__ void scale_by(const u8* stage, int near, int far, int group, const float* x, int pitch, float (&b)[TILES][2]) {
        const Lane lane;
        Fold first = {1.0f, 0.0f}, second = {1.0f, 0.0f};
        if constexpr (S::FOLDED) first = fold<S>(stage, near, group), second = fold<S>(stage, far, group);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float x0 = x[4 * tile * pitch], x1 = x[4 * tile * pitch + 4];
            b[tile][0] = part(x0 * first.scale, lane);
            b[tile][1] = part(x1 * second.scale, lane);
            if constexpr (S::FOLDED) offsets[group][tile] += x0 * first.offset + x1 * second.offset;
        }
    }

    // Multiply query g/2's offsets and query t's sums by a factor that lane 8·query holds.
    __device__ void rescale(const float (&factor)[TILES]) {
        const Lane lane;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float mine = __shfl_sync(WARP, factor[tile], 8 * lane.t);
            const float other = __shfl_sync(WARP, factor[tile], 8 * (lane.g / 2));
#pragma unroll
            for (int out = 0; out < OUTS; out++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[out][tile][i] *= mine;
#pragma unroll
            for (int group = 0; group < S::GROUPS; group++) offsets[group][tile] *= other;
        }
    }

    // Write results to shared memory, `pitch` floats a query.
    __device__ void write(float* to, int pitch) {
        const Lane lane;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int plane = 0; plane < S::Tensor::PLANES; plane++)
#pragma unroll
                for (int column = 0; column < S::COLUMNS; column++) {
                    float offset = 0.0f;
                    if constexpr (S::FOLDED) offset = offset_of(offsets[S::group(plane, column)][tile]);
                    const int unit = 8 * column + lane.g;
#pragma unroll
                    for (int pair = 0; pair < PAIRS; pair++) {
                        const float* sum = sums[(plane * S::COLUMNS + column) * PAIRS + pair][tile];
                        float* at = to + (lane.t + 4 * tile) * pitch + plane * S::POSITIONS + unit * S::UNIT + 2 * pair;
                        if (unit * S::UNIT < S::POSITIONS) at[0] = sum[0] + sum[1] + offset, at[1] = sum[2] + sum[3] + offset;
                    }
                }
    }

    // Lanes hold shares of query g/2; each wants the sum for query t, whose lanes start at 8·t.
    __device__ static float offset_of(float share) {
        share += __shfl_xor_sync(WARP, share, 1);
        share += __shfl_xor_sync(WARP, share, 2);
        return __shfl_sync(WARP, share, 8 * Lane().t);
    }
};

// Sums along rows: token-major keys over channels. Writes scores[query][token], `pitch` floats a query.
template <class S>
__device__ void along_rows(const u8* stage, const float* query, int query_pitch, const float* query_sums, float* scores, int pitch) {
    constexpr int OUTS = S::ROWS / 16;
    const Lane lane;
    float sums[OUTS][TILES][4] = {}, results[OUTS][TILES][2] = {};
#pragma unroll
    for (int plane = 0; plane < S::Tensor::PLANES; plane++)
#pragma unroll 2
        for (int column = 0; column < S::COLUMNS; column++) {
            const int unit = 4 * column + lane.t, channel = plane * S::POSITIONS + unit * S::UNIT;
            const bool inside = unit * S::UNIT < S::POSITIONS;
            Word words[OUTS][2];
#pragma unroll
            for (int out = 0; out < OUTS; out++) {
                words[out][0] = read<S>(stage, 16 * out + lane.g, unit);
                words[out][1] = read<S>(stage, 16 * out + lane.g + 8, unit);
            }
#pragma unroll
            for (int i = 0; i < S::UNIT; i += 2) {
                float b[TILES][2];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const float* q = query + (lane.g / 2 + 4 * tile) * query_pitch + channel + i;
                    b[tile][0] = inside ? part(q[0], lane) : 0.0f;
                    b[tile][1] = inside ? part(q[1], lane) : 0.0f;
                }
#pragma unroll
                for (int out = 0; out < OUTS; out++) {
                    const int token = 16 * out + lane.g;
                    const float a[4] = {operand<S>(stage, token, unit, words[out][0], i, plane),
                                        operand<S>(stage, token + 8, unit, words[out][1], i, plane),
                                        operand<S>(stage, token, unit, words[out][0], i + 1, plane),
                                        operand<S>(stage, token + 8, unit, words[out][1], i + 1, plane)};
                    accumulate<S>(sums[out], a, b);
                }
            }
            const int group = S::group(plane, column);
            const bool last_column = column + 1 == S::COLUMNS, last = last_column && plane + 1 == S::Tensor::PLANES;
            const int next = last ? -1 : last_column ? S::group(plane + 1, 0) : S::group(plane, column + 1);
            if (next == group) continue;
#pragma unroll
            for (int out = 0; out < OUTS; out++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    Fold by = {1.0f, 0.0f};
                    if constexpr (S::FOLDED) by = fold<S>(stage, 16 * out + lane.g + 8 * half, group);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        float* sum = sums[out][tile] + 2 * half;
                        const float q = S::FOLDED ? query_sums[group * QUERIES + lane.t + 4 * tile] : 0.0f;
                        results[out][tile][half] += by.scale * (sum[0] + sum[1]) + by.offset * q;
                        sum[0] = sum[1] = 0.0f;
                    }
                }
        }
#pragma unroll
    for (int out = 0; out < OUTS; out++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            float* at = scores + (lane.t + 4 * tile) * pitch + 16 * out + lane.g;
            at[0] = results[out][tile][0], at[8] = results[out][tile][1];
        }
}
