// Attention of a few query tokens over packed blocks and an exact tail, split over the sequence (flash-decoding). Each
// code is read from memory once and enters the tensor core for all query heads of its KV head.
#include "attend.h"

using Packed = Room<Key, Value, STEP>;
using Tailed = Room<Exact, Exact, TAIL_STEP>;
constexpr int WARP_BYTES = larger(larger(Packed::BYTES, Tailed::BYTES), QUERIES * RECORD * 4);
constexpr int QUERY_FLOATS = larger(Packed::QUERY_FLOATS, Tailed::QUERY_FLOATS);
constexpr int QUERY_BYTES = (QUERY_FLOATS + Key::GROUPS * QUERIES) * 4;
constexpr float LOG2E = 1.4426950408889634f;

// Warps of a thread block, such that two thread blocks at least fit a multiprocessor of compute capability 9.0.
__device__ constexpr bool small(int warps) { return QUERY_BYTES + warps * WARP_BYTES <= 96 * 1024; }
constexpr int WARPS = small(4) ? 4 : small(2) ? 2 : 1;

// What kernels/cuda.py must know to launch `attention`.
extern "C" __global__ void sizes(int* to) {
    to[0] = STEP, to[1] = TAIL_STEP, to[2] = WARPS, to[3] = QUERY_BYTES + WARPS * WARP_BYTES;
}

// Row r of a KV head is query token r / SHARE of its query head r % SHARE; rows beyond the last are zero.
struct QueryRows {
    const Input* start;
    i64 head_stride, token_stride, channel_stride;
    int first, queries;
    float factor;

    __device__ float at(int query, int channel) const {
        const int row = first + query;
        if (row >= queries * SHARE || channel < 0) return 0.0f;
        const i64 from = row % SHARE * head_stride + row / SHARE * token_stride + channel * channel_stride;
        return to_float(start[from]) * factor;
    }
};

template <class K, class R>
__device__ void load_queries(const QueryRows& rows, float* numbers, float* sums) {
    if constexpr (K::CHANNEL_MAJOR) {
        for (int i = threadIdx.x; i < QUERIES * HEAD_DIM; i += blockDim.x)
            numbers[i / HEAD_DIM * QUERY_PITCH + i % HEAD_DIM] = rows.at(i / HEAD_DIM, i % HEAD_DIM);
    } else {
        using Scores = AlongRows<typename R::Keys>;
        for (int i = threadIdx.x; i < QUERIES * Scores::COUNT; i += blockDim.x) {
            const int query = i / Scores::COUNT, index = i % Scores::COUNT;
            float* to = numbers + (query / 4 * Scores::COUNT + index) * 8 + 2 * (query % 4);
            split(to, rows.at(query, Scores::channel(index)));
        }
        for (int i = threadIdx.x / 32; i < K::GROUPS * QUERIES; i += WARPS) {
            float sum = 0.0f;
            for (int channel = threadIdx.x % 32; channel < K::GROUP; channel += 32)
                sum += rows.at(i % QUERIES, i / QUERIES * K::GROUP + channel);
            for (int apart = 1; apart < 32; apart *= 2) sum += __shfl_xor_sync(WARP, sum, apart);
            sums[i] = sum;
        }
    }
    __syncthreads();
}

// Grid (splits, KV heads · query tiles, sequences). The first `packed_splits` splits share the blocks, the others the
// exact tail; within a split each warp takes every (splits · WARPS)-th step. Partials: [sequence, KV head, split, row].
extern "C" __global__ void __launch_bounds__(32 * WARPS) attention(
    const Input* query, i64 query_sequence, i64 query_head, i64 query_token, i64 query_channel, int queries,
    const u8* arena, const int* pages, const int* tokens, int blocks,
    const Input* keys, i64 key_sequence, i64 key_head, i64 key_token, i64 key_channel,
    const Input* values, i64 value_sequence, i64 value_head, i64 value_token, i64 value_channel,
    const int* exact_lengths, float scaling, int packed_splits, float* partials) {
    extern __shared__ __align__(16) u8 memory[];
    float* numbers = reinterpret_cast<float*>(memory);
    float* sums = numbers + QUERY_FLOATS;
    const int tiles = gridDim.y / KV_HEADS, head = blockIdx.y / tiles, first = blockIdx.y % tiles * QUERIES;
    const i64 sequence = blockIdx.z;
    const int split = blockIdx.x, warp = threadIdx.x / 32;
    u8* mine = memory + QUERY_BYTES + warp * WARP_BYTES;

    const QueryRows rows = {query + sequence * query_sequence + head * SHARE * query_head, query_head, query_token,
                            query_channel, first, queries, scaling * LOG2E};
    const Queries here = {numbers, sums, first};
    if (split < packed_splits) {
        load_queries<Key, Packed>(rows, numbers, sums);
        const Pages source = {arena, pages + sequence * blocks, tokens + sequence * blocks, blocks, head};
        attend<Key, Value>(source, here, split * WARPS + warp, packed_splits * WARPS, mine);
    } else {
        load_queries<Exact, Tailed>(rows, numbers, sums);
        const int end = first + QUERIES < queries * SHARE ? first + QUERIES : queries * SHARE, last = (end - 1) / SHARE;
        const Tail source = {
            {keys + sequence * key_sequence + head * key_head, key_token, key_channel},
            {values + sequence * value_sequence + head * value_head, value_token, value_channel},
            exact_lengths[sequence] - (queries - 1 - last), last};
        const int tail_splits = gridDim.x - packed_splits;
        attend<Exact, Exact>(source, here, (split - packed_splits) * WARPS + warp, tail_splits * WARPS, mine);
    }
    __syncthreads();

    // Merge the warps' records.
    const i64 place = (sequence * KV_HEADS + head) * gridDim.x + split;
    float* out = partials + (place * tiles * QUERIES + first) * RECORD;
    for (int i = threadIdx.x; i < QUERIES * RECORD; i += blockDim.x) {
        const int end = i / RECORD * RECORD + HEAD_DIM;  // where the query keeps its highest score
        const u8* records = memory + QUERY_BYTES;
        float top = NEVER, sum = 0.0f;
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, reinterpret_cast<const float*>(records + w * WARP_BYTES)[end]);
        for (int w = 0; w < WARPS; w++) {
            const float* record = reinterpret_cast<const float*>(records + w * WARP_BYTES);
            sum += exp2f(record[end] - top) * record[i];
        }
        out[i] = i == end ? top : sum;
    }
}

constexpr int MERGERS = 8;

// Merge the splits by log-sum-exp. Grid (query token · SHARE rows, KV heads, sequences), MERGERS warps.
extern "C" __global__ void __launch_bounds__(32 * MERGERS) merge(
    const float* partials, int splits, int padded_rows, int queries, Input* out) {
    extern __shared__ __align__(16) u8 memory[];
    float* records = reinterpret_cast<float*>(memory);  // [MERGERS][RECORD]
    const int row = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 sequence = blockIdx.z, pitch = static_cast<i64>(padded_rows) * RECORD;
    const float* mine = partials + (sequence * KV_HEADS + head) * splits * pitch + row * RECORD;

    float top = NEVER;
    for (int split = lane; split < splits; split += 32) top = fmaxf(top, mine[split * pitch + HEAD_DIM]);
    for (int apart = 1; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(WARP, top, apart));
    constexpr int EACH = (RECORD + 31) / 32;
    float sums[EACH] = {};
    for (int split = warp; split < splits; split += MERGERS) {
        const float* record = mine + split * pitch;
        const float weight = exp2f(record[HEAD_DIM] - top);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + 32 * i < RECORD && lane + 32 * i != HEAD_DIM) sums[i] += weight * record[lane + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < RECORD) records[warp * RECORD + lane + 32 * i] = sums[i];
    __syncthreads();

    for (int channel = threadIdx.x; channel < HEAD_DIM; channel += blockDim.x) {
        float sum = 0.0f, total = 0.0f;
        for (int w = 0; w < MERGERS; w++) {
            sum += records[w * RECORD + channel];
            total += records[w * RECORD + HEAD_DIM + 1];
        }
        const i64 query_head = head * SHARE + row % SHARE;
        const i64 at = ((sequence * KV_HEADS * SHARE + query_head) * queries + row / SHARE) * HEAD_DIM + channel;
        store(out[at], sum / total);
    }
}
