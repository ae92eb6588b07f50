// Running softmax in base 2: a row's state is (highest score so far, sum of weights, weighted sum of values).
#pragma once
#include "simd.h"

namespace kvdrift {

// A weight's unit is 2⁻¹³: a running sum is over at most 2¹² tokens and mustn't overflow, however large the values.
constexpr int LIGHT = 13;

// 2^(x − Less) for x ≤ 0, to about one unit in the last place; −∞ gives 0, NaN itself.
template <int Less = 0>
INLINE f32x16 exp2_negative(f32x16 x) {
    x = max(f32x16{} - float(127 - Less), x);
    const f32x16 shifted = x + 12582912.0f;  // 1.5·2²³: its low bits are x, rounded
    const f32x16 f = x - (shifted - 12582912.0f);
    f32x16 p = broadcast(1.5252734e-5f);  // Taylor: ln2^k / k!; the eighth term is below 6e-9 for |f| ≤ 1/2
    p = p * f + 1.5403531e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return p * as_float((as_int(shifted) + (127 - Less)) << 23);  // exponent −127 is zero
}

struct Running {
    float highest = -INFINITY;
    f32x16 sums = {};  // the weights' sum, spread over the lanes

    float sum() const { return fold(sums, Sum()); }
};

// Turns scores[0, padded) into weights, all at or behind `visible` into 0, and rescales what was summed before.
// Returns the largest weight.
INLINE float absorb(Running &state, float *scores, int padded, int visible, float *values, int channels) {
    f32x16 highest = f32x16{} - INFINITY;
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int t = 0; t < padded; t += LANES) {
        f32x16 s = load<f32x16>(scores + t);
        if (t + LANES > visible) s = select(lane + t < visible, s, f32x16{} - INFINITY), store(scores + t, s);
        highest = max(highest, s);
    }
    const float block_highest = fold(highest, Max());
    if (block_highest > state.highest) {
        const float shrink = exp2_negative(broadcast(state.highest - block_highest))[0];
        for (int c = 0; c < channels; c += LANES) store(values + c, load<f32x16>(values + c) * shrink);
        state.sums *= shrink, state.highest = block_highest;
    }
    const float base = state.highest == -INFINITY ? 0 : state.highest;
    f32x16 sums = state.sums;
    for (int t = 0; t < padded; t += LANES) {
        const f32x16 p = exp2_negative<LIGHT>(load<f32x16>(scores + t) - base);
        store(scores + t, p);
        sums += p;
    }
    state.sums = sums;
    return exp2_negative<LIGHT>(broadcast(block_highest - base))[0];
}

}  // namespace kvdrift
