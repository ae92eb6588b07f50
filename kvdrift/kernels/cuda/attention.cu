// Attention of a few query tokens over packed blocks and an exact tail, split over the sequence (flash-decoding). Each
// code is read from memory once and enters the tensor core for all query heads of its KV head.
#include "attend.h"

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int WARP_BYTES =
    larger(larger(Room<Key, Value, STEP>::BYTES, Room<Exact, Exact, TAIL_STEP>::BYTES), QUERIES * RECORD * 4);
constexpr int QUERY_BYTES = (QUERIES * QUERY_PITCH + Key::GROUPS * QUERIES) * 4;
constexpr float LOG2E = 1.4426950408889634f;

static_assert(QUERY_BYTES + WARPS * WARP_BYTES == SHARED_BYTES, "kernels/cuda.py reserves another size");

// Grid (splits, KV heads · query tiles, sequences). The first `packed_splits` splits share the blocks, the others the
// exact tail; within a split each warp takes every (splits · WARPS)-th step. Partials: [sequence, KV head, split, row].
extern "C" __global__ void __launch_bounds__(32 * WARPS) attention(
    const Input* query, i64 query_sequence, i64 query_head, i64 query_token, i64 query_channel, int queries,
    const u8* arena, const int* pages, const int* tokens, int blocks,
    const Input* keys, i64 key_sequence, i64 key_head, i64 key_token, i64 key_channel,
    const Input* values, i64 value_sequence, i64 value_head, i64 value_token, i64 value_channel,
    const int* exact_lengths, float scaling, int packed_splits, float* partials) {
    extern __shared__ __align__(16) u8 memory[];
    float* rows = reinterpret_cast<float*>(memory);
    float* sums = rows + QUERIES * QUERY_PITCH;
    const int tiles = gridDim.y / KV_HEADS, head = blockIdx.y / tiles, first = blockIdx.y % tiles * QUERIES;
    const i64 sequence = blockIdx.z;
    const int warp = threadIdx.x / 32;

    // Row r of a KV head is query token r / SHARE of query head head · SHARE + r % SHARE; rows beyond them are zero.
    for (int i = threadIdx.x; i < QUERIES * HEAD_DIM; i += blockDim.x) {
        const int row = first + i / HEAD_DIM, channel = i % HEAD_DIM;
        float x = 0.0f;
        if (row < queries * SHARE) {
            const i64 at = sequence * query_sequence + (head * SHARE + row % SHARE) * query_head +
                           row / SHARE * query_token + channel * query_channel;
            x = to_float(query[at]) * (scaling * LOG2E);
        }
        rows[i / HEAD_DIM * QUERY_PITCH + channel] = x;
    }
    __syncthreads();
    if (!Key::CHANNEL_MAJOR) {
        for (int i = threadIdx.x; i < Key::GROUPS * QUERIES; i += blockDim.x) {
            const float* row = rows + i % QUERIES * QUERY_PITCH + i / QUERIES * Key::GROUP;
            float sum = 0.0f;
            for (int channel = 0; channel < Key::GROUP; channel++) sum += row[channel];
            sums[i] = sum;
        }
        __syncthreads();
    }

    const Queries rows_here = {rows, sums, first, queries * SHARE};
    u8* mine = memory + QUERY_BYTES + warp * WARP_BYTES;
    const int split = blockIdx.x;
    if (split < packed_splits) {
        const Pages source = {arena, pages + sequence * blocks, tokens + sequence * blocks, blocks, head};
        attend<Key, Value>(source, rows_here, split * WARPS + warp, packed_splits * WARPS, mine);
    } else {
        const Tail source = {
            {keys + sequence * key_sequence + head * key_head, key_token, key_channel},
            {values + sequence * value_sequence + head * value_head, value_token, value_channel},
            exact_lengths[sequence], queries};
        const int tail_splits = gridDim.x - packed_splits;
        attend<Exact, Exact>(source, rows_here, (split - packed_splits) * WARPS + warp, tail_splits * WARPS, mine);
    }
    __syncthreads();

    // Merge the warps' records.
    float* out = partials + ((sequence * KV_HEADS + head) * gridDim.x + split) * tiles * QUERIES * RECORD + first * RECORD;
    for (int i = threadIdx.x; i < QUERIES * RECORD; i += blockDim.x) {
        const int end = i / RECORD * RECORD + HEAD_DIM;  // where the query keeps its highest score
        const u8* records = memory + QUERY_BYTES;
        float top = NEVER, sum = 0.0f;
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, reinterpret_cast<const float*>(records + w * WARP_BYTES)[end]);
        for (int w = 0; w < WARPS; w++) {
            const float* record = reinterpret_cast<const float*>(records + w * WARP_BYTES);
            sum += record[end] == NEVER ? 0.0f : exp2f(record[end] - top) * record[i];
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
        const float weight = record[HEAD_DIM] == NEVER ? 0.0f : exp2f(record[HEAD_DIM] - top);
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
        for (int w = 0; w < MERGERS; w++) sum += records[w * RECORD + channel], total += records[w * RECORD + HEAD_DIM + 1];
        const i64 query_head = head * SHARE + row % SHARE;
        const i64 at = ((sequence * KV_HEADS * SHARE + query_head) * queries + row / SHARE) * HEAD_DIM + channel;
        store(out[at], sum / total);
    }
}
