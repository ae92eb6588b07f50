// One warp attends to its steps, one after another: online softmax in base 2 (arXiv:2205.14135), float32 throughout.
// While it works on a step's keys the step's values are on their way, and the reverse.
#pragma once
#include "not_finite.h"

// Tokens that a warp takes at once: a whole block when keys are channel-major, else what keeps a step small, since
// several steps must be under way on each multiprocessor.
constexpr int TOKEN_BYTES = Key::ROW_BYTES + Value::ROW_BYTES;
constexpr int SMALL_STEP = 64 * TOKEN_BYTES <= 8192 ? 64 : 32 * TOKEN_BYTES <= 8192 ? 32 : 16;
constexpr int STEP = Key::CHANNEL_MAJOR || BLOCK < SMALL_STEP ? BLOCK : SMALL_STEP;
constexpr int TAIL_STEP = HEAD_DIM * sizeof(Input) <= 128 ? 32 : 16;

constexpr float NEVER = -3.0e38f;  // the score of what a query does not see
constexpr float LIGHT = 1.0f / (1 << 24);  // a weight's unit, so that no sum of millions of values overflows
constexpr int QUERY_PITCH = HEAD_DIM + 4;  // so that neighbouring queries lie in different banks

struct Queries {
    // Times scaling · log2(e): [QUERIES][QUERY_PITCH] for channel-major keys, else as AlongRows has it.
    const float* numbers;
    const float* sums;  // [key groups][QUERIES], over each group's channels
    int first;          // of the KV head's (query token, query head) rows, the first one here
};

// Blocks of one sequence and KV head.
struct Pages {
    static constexpr int STEPS = BLOCK / STEP;
    static constexpr int TOKENS = STEP;
    static constexpr bool FINITE = true;  // what isn't is never packed
    const u8* arena;
    const int *pages, *tokens;
    int blocks, head;

    struct Step {
        const u8* page;
        int first, tokens;
    };

    __device__ int steps() const { return blocks * STEPS; }
    __device__ Step at(int index) const {
        const int block = index / STEPS, first = index % STEPS * STEP;
        const int left = tokens[block] - first;
        return {arena + static_cast<i64>(pages[block]) * PAGE_BYTES, first, left < STEP ? left : STEP};
    }
    __device__ int visible(Step step, int) const { return step.tokens; }
    template <class S>
    __device__ void stage_keys(u8* stage, Step step) const { stage_page<S>(stage, step.page, head, step.first); }
    template <class S>
    __device__ void stage_values(u8* stage, Step step) const { stage_page<S>(stage, step.page, head, step.first); }
};

// The exact buffer of one sequence and KV head, as far as one of the queries here sees it.
struct Buffer {
    const Input* start;
    i64 token_stride, channel_stride;
};

struct Tail {
    static constexpr int TOKENS = TAIL_STEP;
    static constexpr bool FINITE = false;
    Buffer keys, values;
    int length, last;  // the last query token here sees `length` tokens, the one before it a token less

    struct Step {
        int first, tokens;
    };

    __device__ int steps() const { return (length + TAIL_STEP - 1) / TAIL_STEP; }
    __device__ Step at(int index) const {
        const int first = index * TAIL_STEP, left = length - first;
        return {first, left < TAIL_STEP ? left : TAIL_STEP};
    }
    // Row r is query token r / SHARE.
    __device__ int visible(Step step, int row) const {
        const int left = length - (last - row / SHARE) - step.first;
        return left < step.tokens ? left : step.tokens;
    }
    template <class S>
    __device__ void stage_keys(u8* stage, Step step) const { stage_rows(stage, keys, step); }
    template <class S>
    __device__ void stage_values(u8* stage, Step step) const { stage_rows(stage, values, step); }

    // Rows beyond the sequence's length become zero, whatever the buffer holds there.
    __device__ static void stage_rows(u8* stage, Buffer from, Step step) {
        constexpr int VECTOR = 16 / sizeof(Input), ROW = HEAD_DIM / VECTOR;
        Input* to = reinterpret_cast<Input*>(stage);
        const bool aligned =
            from.channel_stride == 1 && from.token_stride % VECTOR == 0 && reinterpret_cast<u64>(from.start) % 16 == 0;
        if (aligned) {
            for (int i = threadIdx.x % 32; i < TAIL_STEP * ROW; i += 32) {
                const int token = i / ROW, inside = token < step.tokens;
                const i64 at = inside ? (step.first + token) * from.token_stride + i % ROW * VECTOR : 0;
                copy_async(to + i * VECTOR, from.start + at, inside ? 16 : 0);
            }
        } else {
            for (int i = threadIdx.x % 32; i < TAIL_STEP * HEAD_DIM; i += 32) {
                const i64 token = i / HEAD_DIM, channel = i % HEAD_DIM;
                const Input* at = from.start + (step.first + token) * from.token_stride + channel * from.channel_stride;
                to[i] = token < step.tokens ? *at : Input{};
            }
        }
    }
};

// The running softmax. Lanes 8·q to 8·q+7 hold query q's highest score, and each a share of its total.
struct Softmax {
    float top[TILES], total[TILES];

    __device__ void clear() {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) top[tile] = NEVER, total[tile] = 0.0f;
    }

    // Turn scores of a step into weights, in place; `factor` is what earlier sums must be multiplied by.
    template <class Source>
    __device__ void take(
        const Source& source, typename Source::Step step, int first_row, float* scores, int pitch,
        float (&factor)[TILES]) {
        constexpr int EACH = Source::TOKENS / 8;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int query = lane / 8 + 4 * tile, visible = source.visible(step, first_row + query);
            float* mine = scores + query * pitch + lane % 8;
            float score[EACH], highest = top[tile];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                score[i] = lane % 8 + 8 * i < visible ? mine[8 * i] : NEVER;
                highest = fmaxf(highest, score[i]);
            }
            for (int apart = 1; apart < 8; apart *= 2) highest = fmaxf(highest, __shfl_xor_sync(WARP, highest, apart));
            const float base = highest == NEVER ? 0.0f : highest;
            factor[tile] = exp2f(top[tile] - base);
            top[tile] = highest;
            total[tile] *= factor[tile];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const float weight = LIGHT * exp2f(score[i] - base);
                total[tile] += weight;
                mine[8 * i] = weight;
            }
        }
    }
};

template <class K, int TOKENS>
using KeyStage = Staged<K, TOKENS, K::CHANNEL_MAJOR ? 8 : 4>;
template <class V, int TOKENS>
using ValueStage = Staged<V, TOKENS, 8>;

template <class S>
__device__ void score(const u8* stage, const Queries& queries, float* scores, int pitch, float* weighed) {
    if constexpr (S::Tensor::CHANNEL_MAJOR) {
        OverRows<S> product;
        product.clear();
        product.add(stage, queries.numbers, QUERY_PITCH, weighed);
        product.write(scores, pitch);
    } else {
        AlongRows<S>::scores(stage, queries.numbers, queries.sums, scores, pitch);
    }
}

// A warp's shared memory while it attends, and the partial result it leaves there: [QUERIES][RECORD].
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int RECORD = HEAD_DIM + 2;  // a query's sums, its highest score, its total

template <class K, class V, int TOKENS>
struct Room {
    using Keys = KeyStage<K, TOKENS>;
    using Values = ValueStage<V, TOKENS>;
    static constexpr int PITCH = TOKENS + 4;
    static constexpr int SCORES = Keys::BYTES + Values::BYTES;
    static constexpr int WEIGHED = SCORES + QUERIES * PITCH * 4;
    static constexpr int BYTES =
        WEIGHED + 4 * larger(OverRows<Values>::WEIGHED, K::CHANNEL_MAJOR ? OverRows<Keys>::WEIGHED : 0);
    static constexpr int QUERY_FLOATS = K::CHANNEL_MAJOR ? QUERIES * QUERY_PITCH : AlongRows<Keys>::COUNT * 8 * TILES;
};

template <class K, class V, class Source>
__device__ void attend(const Source& source, const Queries& queries, int begin, int stride, u8* memory) {
    using R = Room<K, V, Source::TOKENS>;
    u8 *keys = memory, *values = memory + R::Keys::BYTES;
    float* scores = reinterpret_cast<float*>(memory + R::SCORES);
    float* weighed = reinterpret_cast<float*>(memory + R::WEIGHED);
    const int end = source.steps();
    Softmax softmax;
    softmax.clear();
    OverRows<typename R::Values> result;
    result.clear();

    typename Source::Step step = {}, next = {};
    if (begin < end) {
        next = source.at(begin);
        if (next.tokens > 0) source.template stage_keys<typename R::Keys>(keys, next);
        copies_commit();
        if (next.tokens > 0) source.template stage_values<typename R::Values>(values, next);
        copies_commit();
    }
    for (int index = begin; index < end; index += stride) {
        step = next;
        next = {};
        if (index + stride < end) next = source.at(index + stride);
        float factor[TILES];

        copies_wait<1>();  // the keys are here
        __syncwarp();
        if (step.tokens > 0) score<typename R::Keys>(keys, queries, scores, R::PITCH, weighed);
        __syncwarp();
        if constexpr (!Source::FINITE) {
            if (step.tokens > 0) score_again<typename R::Keys>(keys, queries.numbers, scores, R::PITCH);
            __syncwarp();
        }
        if (next.tokens > 0) source.template stage_keys<typename R::Keys>(keys, next);
        copies_commit();
        if (step.tokens > 0) softmax.take(source, step, queries.first, scores, R::PITCH, factor);

        copies_wait<1>();  // the values are here
        __syncwarp();
        if (step.tokens > 0) {
            bool moved = false;
            for (int tile = 0; tile < TILES; tile++) moved |= factor[tile] != 1.0f;
            if (__any_sync(WARP, moved)) result.rescale(factor);
            if constexpr (!Source::FINITE) {
                const auto visible = [&](int query) { return source.visible(step, queries.first + query); };
                const int common = visible(0) > 0 ? visible(0) : 0;  // the first query sees the fewest
                if (common < step.tokens)
                    add_apart(result, values, common, step.tokens, scores, R::PITCH, visible);
            }
            result.add(values, scores, R::PITCH, weighed);
        }
        __syncwarp();
        if (next.tokens > 0) source.template stage_values<typename R::Values>(values, next);
        copies_commit();
    }
    copies_wait<0>();

    float* record = reinterpret_cast<float*>(memory);
    const int lane = threadIdx.x % 32;
    result.write(record, RECORD);
    for (int tile = 0; tile < TILES; tile++) {
        float total = softmax.total[tile];
        for (int apart = 1; apart < 8; apart *= 2) total += __shfl_xor_sync(WARP, total, apart);
        float* mine = record + (lane / 8 + 4 * tile) * RECORD + HEAD_DIM;
        if (lane % 8 == 0) mine[0] = softmax.top[tile], mine[1] = total;
    }
}
