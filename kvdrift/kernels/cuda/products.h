// The two products of attention over a step, for the two ways in which codes can lie.
#pragma once
#include "staged.h"

// Sums over rows: codes whose rows are summed away (values over tokens; channel-major keys over channels).
//
// Adds Σ_row raw[row, out] · scale[row, group] · x[query, row] to `sums`, and this lane's share of
// Σ_row offset[row, group] · x[query, row], for query t, to `offsets`. It goes through CHUNK rows at a time: first the
// warp weighs x by the scales, in shared memory, then it multiplies.
template <class S>
struct OverRows {
    static constexpr int PAIRS = S::UNIT / 2;
    static constexpr int OUTS = S::Tensor::PLANES * S::COLUMNS * PAIRS;
    static constexpr int CHUNK = S::GROUPS * TILES > 4 ? 8 : S::ROWS % 32 ? 16 : 32;
    static constexpr int WEIGHED = S::GROUPS * TILES * CHUNK * 8;  // [group][tile][row][column of `b`]
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

    // `x` and `weighed` lie in shared memory, x with `pitch` floats a query.
    __device__ void add(const u8* stage, const float* x, int pitch, float* weighed) {
        for (int first = 0; first < S::ROWS; first += CHUNK) {
            __syncwarp();
            weigh(stage, first, x, pitch, weighed);
            __syncwarp();
#pragma unroll 2
            for (int row = 0; row < CHUNK; row += 8) multiply(stage, first + row, weighed + 8 * row);
        }
    }

    __device__ void weigh(const u8* stage, int first, const float* x, int pitch, float* weighed) {
        const Lane lane;
#pragma unroll
        for (int i = lane.g; i < CHUNK; i += 8)
#pragma unroll
            for (int group = 0; group < S::GROUPS; group++) {
                Fold by = {1.0f, 0.0f};
                if constexpr (S::FOLDED) by = fold<S>(stage, first + i, group);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const float mine = x[(lane.t + 4 * tile) * pitch + first + i];
                    split(weighed + ((group * TILES + tile) * CHUNK + i) * 8 + 2 * lane.t, mine * by.scale);
                    offsets[group][tile] += mine * by.offset;
                }
            }
    }

    __device__ void multiply(const u8* stage, int row, const float* weighed) {
        const Lane lane;
        const int near = row + lane.t, far = near + 4;
        Word words[S::COLUMNS][2];
#pragma unroll
        for (int column = 0; column < S::COLUMNS; column++) {
            words[column][0] = read<S>(stage, near, 8 * column + lane.g);
            words[column][1] = read<S>(stage, far, 8 * column + lane.g);
        }
        float b[TILES][2];
        int held = -1;  // the group that `b` is weighed for
#pragma unroll
        for (int plane = 0; plane < S::Tensor::PLANES; plane++)
#pragma unroll
            for (int column = 0; column < S::COLUMNS; column++) {
                const int group = S::group(plane, column), unit = 8 * column + lane.g;
                if (group != held) {
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        const float* from = weighed + (group * TILES + tile) * CHUNK * 8 + lane.t * 8 + lane.g;
                        b[tile][0] = from[0], b[tile][1] = from[32];
                    }
                }
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

    // Add one row to query t of one tile, by plain multiplication; for codes that need no scale.
    __device__ void add_one(const u8* stage, int row, float x, int tile) {
        static_assert(S::Tensor::FORMAT == EXACT);
        const Lane lane;
#pragma unroll
        for (int column = 0; column < S::COLUMNS; column++) {
            const Word word = read<S>(stage, row, 8 * column + lane.g);
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                float* sum = sums[column * PAIRS + pair][tile];
                sum[0] += x * raw<S>(word, 2 * pair, 0), sum[2] += x * raw<S>(word, 2 * pair + 1, 0);
            }
        }
    }

    // Multiply each query's results by the factor that its lane 8·query holds.
    __device__ void rescale(const float (&factor)[TILES]) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float mine = __shfl_sync(WARP, factor[tile], 8 * Lane().t);
#pragma unroll
            for (int out = 0; out < OUTS; out++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[out][tile][i] *= mine;
#pragma unroll
            for (int group = 0; group < S::GROUPS; group++) offsets[group][tile] *= mine;
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
                        if (unit * S::UNIT >= S::POSITIONS) continue;
                        at[0] = sum[0] + sum[1] + offset, at[1] = sum[2] + sum[3] + offset;
                    }
                }
    }

    // The sum over the lanes that share query t.
    __device__ static float offset_of(float share) {
        for (int apart = 4; apart < 32; apart *= 2) share += __shfl_xor_sync(WARP, share, apart);
        return share;
    }
};

// Sums along rows: token-major keys over channels. `queries` holds the split queries as `channel` orders them,
// [tile][index][column of `b`], and `query_sums` their sums over each group's channels, [group][query].
template <class S>
struct AlongRows {
    static constexpr int OUTS = S::ROWS / 16;
    static constexpr int COUNT = S::Tensor::PLANES * S::COLUMNS * S::UNIT * 4;

    // The channel that lane t meets in place i of a column: index = ((plane · COLUMNS + column) · UNIT + i) · 4 + t.
    __device__ static int channel(int index) {
        const int t = index % 4, i = index / 4 % S::UNIT, column = index / 4 / S::UNIT % S::COLUMNS;
        const int position = (4 * column + t) * S::UNIT + i;
        return position < S::POSITIONS ? index / 4 / S::UNIT / S::COLUMNS * S::POSITIONS + position : -1;
    }

    // Writes scores[query][token], `pitch` floats a query.
    __device__ static void scores(
        const u8* stage, const float* queries, const float* query_sums, float* scores, int pitch);
};

template <class S>
__device__ void AlongRows<S>::scores(
    const u8* stage, const float* queries, const float* query_sums, float* scores, int pitch) {
    const Lane lane;
    float sums[OUTS][TILES][4] = {}, results[OUTS][TILES][2] = {};
#pragma unroll
    for (int plane = 0; plane < S::Tensor::PLANES; plane++)
#pragma unroll 2
        for (int column = 0; column < S::COLUMNS; column++) {
            const int unit = 4 * column + lane.t;
            Word words[OUTS][2];
#pragma unroll
            for (int out = 0; out < OUTS; out++) {
                words[out][0] = read<S>(stage, 16 * out + lane.g, unit);
                words[out][1] = read<S>(stage, 16 * out + lane.g + 8, unit);
            }
#pragma unroll
            for (int i = 0; i < S::UNIT; i += 2) {
                const float* from = queries + (((plane * S::COLUMNS + column) * S::UNIT + i) * 4 + lane.t) * 8 + lane.g;
                float b[TILES][2];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    b[tile][0] = from[tile * COUNT * 8], b[tile][1] = from[tile * COUNT * 8 + 32];
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
