// One warp's share of a block in shared memory ("a step": some tokens of one KV head), and how it feeds the tensor core.
//
// The product is c[outs × queries] += a[outs × sums] · b[sums × queries], in TF32. `a` holds *codes*: a uniform code
// goes in as 2^bits + code, a float whose top mantissa bits are the code, which costs a shift and a mask and no
// conversion. Scales go into `b` (or onto the sums), and offset = low − 2^bits · scale makes up for the rest. Each
// number of `b` is split into two TF32 numbers in neighbouring columns, so that a product is about as good as float32
// and a tile has 4 queries.
#pragma once
#include "tensors.h"

constexpr int QUERIES = 4 * TILES;
constexpr u32 WARP = 0xffffffffu;

struct Lane {
    int g, t;
    __device__ Lane() : g(threadIdx.x % 32 / 4), t(threadIdx.x % 4) {}
};

// A token of the exact buffer: rows of the model's dtype.
struct Exact {
    static constexpr int FORMAT = EXACT, BITS = 8 * sizeof(Input), GROUPS = 1, PLANES = 1;
    static constexpr bool CHANNEL_MAJOR = false;
    static constexpr int ROW = HEAD_DIM, GROUP = HEAD_DIM, ROW_BYTES = HEAD_DIM * sizeof(Input);
    using Scale = float;
};

// `LANES` lanes of the warp lie along a row, each taking UNIT neighbouring positions (bytes of codes, or numbers).
template <class T, int TOKENS, int LANES>
struct Staged {
    using Tensor = T;
    static constexpr int ROWS = T::CHANNEL_MAJOR ? HEAD_DIM : TOKENS;
    static constexpr int POSITIONS = T::ROW / T::PLANES;

    // Whether each run of LANES · unit positions lies in one group, so that a scale is the same for a whole tile.
    __device__ static constexpr bool folds(int unit) {
        for (int plane = 0; plane < T::PLANES; plane++)
            for (int first = 0; first < POSITIONS; first += LANES * unit) {
                const int last = (first + LANES * unit < POSITIONS ? first + LANES * unit : POSITIONS) - 1;
                if ((plane * POSITIONS + first) / T::GROUP != (plane * POSITIONS + last) / T::GROUP) return false;
            }
        return true;
    }

    static constexpr int UNIT = T::FORMAT != EXACT && POSITIONS % (4 * LANES) == 0 && folds(4) ? 4 : 2;
    static constexpr bool FOLDED = T::FORMAT != EXACT && folds(UNIT);
    static constexpr bool DECODES = T::FORMAT != EXACT && !FOLDED;  // groups too small: scales go into `a`
    static constexpr int GROUPS = FOLDED ? T::GROUPS : 1;
    static constexpr int COLUMNS = (POSITIONS + LANES * UNIT - 1) / (LANES * UNIT);
    static constexpr int WORD_BYTES = UNIT * (T::FORMAT == EXACT ? static_cast<int>(sizeof(Input)) : 1);
    static constexpr bool SPLIT = DECODES || (T::FORMAT == EXACT && sizeof(Input) == 4);  // `a` isn't exact in TF32

    static constexpr int CODE_BYTES = ROWS * T::ROW_BYTES;
    static constexpr int GROUP_BYTES = ROWS * static_cast<int>(sizeof(typename T::Scale));
    static constexpr int SCALE_BYTES = T::FORMAT == EXACT ? 0 : T::GROUPS * GROUP_BYTES;
    static constexpr int BYTES = CODE_BYTES + SCALE_BYTES * (T::FORMAT == UNIFORM ? 2 : 1);

    __device__ static constexpr int group(int plane, int column) {
        return FOLDED ? (plane * POSITIONS + column * LANES * UNIT) / T::GROUP : 0;
    }
};

__device__ __forceinline__ void copy_warp(u8* to, const u8* from, int bytes) {
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 32 * 16) copy_async(to + i, from + i);
}

// Bring rows [first, first + ROWS) of one head of a page.
template <class S>
__device__ void stage_page(u8* stage, const u8* page, int head, int first) {
    using T = typename S::Tensor;
    constexpr int SIZE = sizeof(typename T::Scale);
    copy_warp(stage, page + T::CODES + (head * T::ROWS + first) * T::ROW_BYTES, S::CODE_BYTES);
    if constexpr (T::FORMAT != EXACT) {
        for (int group = 0; group < T::GROUPS; group++) {
            const int at = ((head * T::GROUPS + group) * T::ROWS + first) * SIZE;
            u8* to = stage + S::CODE_BYTES + group * S::GROUP_BYTES;
            copy_warp(to, page + T::SCALES + at, S::GROUP_BYTES);
            if constexpr (T::FORMAT == UNIFORM) copy_warp(to + S::SCALE_BYTES, page + T::LOWS + at, S::GROUP_BYTES);
        }
    }
}

struct Word {
    u32 bits[2];
};

// A lane's UNIT positions; zero beyond the row.
template <class S>
__device__ __forceinline__ Word read(const u8* stage, int row, int unit) {
    Word word = {{0, 0}};
    if (S::POSITIONS % S::UNIT == 0 && unit * S::UNIT >= S::POSITIONS) return word;
    const u8* at = stage + row * S::Tensor::ROW_BYTES + unit * S::WORD_BYTES;
    if constexpr (S::WORD_BYTES == 2) {
        word.bits[0] = *reinterpret_cast<const u16*>(at);
    } else {
        word.bits[0] = reinterpret_cast<const u32*>(at)[0];
        if constexpr (S::WORD_BYTES == 8) word.bits[1] = reinterpret_cast<const u32*>(at)[1];
    }
    return word;
}

// What goes into `a`: the number itself, E4M3 · 2⁻⁸, or 2^bits + code.
template <class S>
__device__ __forceinline__ float raw(Word word, int position, int plane) {
    using T = typename S::Tensor;
    if constexpr (T::FORMAT == EXACT) {
        if constexpr (sizeof(Input) == 4) {
            return __uint_as_float(word.bits[position]);
        } else {
            return to_float(Input{static_cast<u16>(word.bits[0] >> (16 * position))});
        }
    } else if constexpr (T::FORMAT == FP8) {
        return half_to_float(fp8_as_half(word.bits[0] >> (8 * position)));
    } else {
        constexpr int TO = 23 - T::BITS;
        const int from = 8 * position + T::BITS * plane;
        const u32 code = from < TO ? word.bits[0] << (TO - from) : word.bits[0] >> (from - TO);
        return __uint_as_float((code & (((1u << T::BITS) - 1) << TO)) | (127u + T::BITS) << 23);
    }
}

struct Fold {
    float scale, offset;  // decoded = scale · raw + offset
};

template <class S>
__device__ __forceinline__ Fold fold(const u8* stage, int row, int group) {
    using T = typename S::Tensor;
    if constexpr (T::FORMAT == EXACT) {
        return {1.0f, 0.0f};
    } else {
        const auto* scales = reinterpret_cast<const typename T::Scale*>(stage + S::CODE_BYTES) + group * S::ROWS + row;
        const float scale = to_float(*scales);
        if constexpr (T::FORMAT == FP8) return {256.0f * scale, 0.0f};
        return {scale, to_float(scales[T::GROUPS * S::ROWS]) - (1 << T::BITS) * scale};
    }
}

// An element of `a`: raw, or decoded where groups are too small to fold.
template <class S>
__device__ __forceinline__ float operand(const u8* stage, int row, int unit, Word word, int position, int plane) {
    const float x = raw<S>(word, position, plane);
    if constexpr (!S::DECODES) return x;
    const int column = plane * S::POSITIONS + unit * S::UNIT + position;
    if (column >= S::Tensor::ROW) return 0.0f;
    const Fold by = fold<S>(stage, row, column / S::Tensor::GROUP);
    return by.scale * x + by.offset;
}

// x cut to TF32: the same number to 11 bits, so that x − upper(x) is exact.
__device__ __forceinline__ float upper(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// Write x as the two parts that `b` holds in neighbouring columns.
__device__ __forceinline__ void split(float* to, float x) {
    const float high = upper(x);
    *reinterpret_cast<float2*>(to) = {high, upper(x - high)};
}

template <class S>
__device__ __forceinline__ void accumulate(float (&sums)[TILES][4], const float (&a)[4], const float (&b)[TILES][2]) {
    if constexpr (S::SPLIT) {
        const float high[4] = {upper(a[0]), upper(a[1]), upper(a[2]), upper(a[3])};
        const float low[4] = {a[0] - high[0], a[1] - high[1], a[2] - high[2], a[3] - high[3]};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            matrix_product(sums[tile], high, b[tile]);
            matrix_product(sums[tile], low, b[tile]);
        }
    } else {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) matrix_product(sums[tile], a, b[tile]);
    }
}
