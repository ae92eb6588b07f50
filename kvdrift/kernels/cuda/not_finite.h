// NaN and Inf in the exact tail. The tensor core gives NaN for more than it should: it multiplies what a query doesn't
// see by zero, and halves of split numbers that may be zero, or NaN if the number is infinite. So what isn't finite is
// found and multiplied as it is, one number at a time; what is finite takes none of these paths.
#pragma once
#include "products.h"

// Scores [query][token] that aren't finite, once more. An infinite key may score −∞, which softmax makes a zero.
template <class S>
__device__ void score_again(const u8* stage, const float* queries, float* scores, int pitch) {
    constexpr int COUNT = AlongRows<S>::COUNT;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < QUERIES * S::ROWS; i += 32) {
        const int query = i / S::ROWS, token = i % S::ROWS;
        float& score = scores[query * pitch + token];
        if (is_finite(score)) continue;
        const Input* key = reinterpret_cast<const Input*>(stage) + token * HEAD_DIM;
        score = 0.0f;
#pragma unroll 1
        for (int index = 0; index < COUNT; index++) {
            const int channel = AlongRows<S>::channel(index);
            if (channel < 0) continue;
            const float* parts = queries + (query / 4 * COUNT + index) * 8 + 2 * (query % 4);
            score += (parts[0] + parts[1]) * to_float(key[channel]);
        }
    }
}

// If a value of tokens [first, end) isn't finite, add these tokens to the queries that see them, `visible(query)` of
// the step's tokens each, and leave zeros in their place.
template <class S, class Visible>
__device__ void add_apart(
    OverRows<S>& result, u8* stage, int first, int end, const float* weights, int pitch, Visible visible) {
    Input* numbers = reinterpret_cast<Input*>(stage);
    bool finite = true;
    for (int i = first * HEAD_DIM + threadIdx.x % 32; i < end * HEAD_DIM; i += 32)
        finite &= is_finite(to_float(numbers[i]));
    if (!__any_sync(WARP, !finite)) return;
    const Lane lane;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int query = lane.t + 4 * tile, seen = visible(query);
#pragma unroll 1
        for (int token = first; token < end && token < seen; token++)
            result.add_one(stage, token, weights[query * pitch + token], tile);
    }
    __syncwarp();
    for (int i = first * HEAD_DIM + threadIdx.x % 32; i < end * HEAD_DIM; i += 32) numbers[i] = Input{};
}
