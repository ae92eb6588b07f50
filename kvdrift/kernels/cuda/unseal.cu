// Decode pages to float32, [blocks, KV heads, block, head_dim], and sum their payloads. Bit for bit as
// kernels/definition.py: compile with --fmad=false.
#include "tensors.h"

template <class T>
__device__ __forceinline__ float decoded(const u8* page, int head, int token, int channel) {
    const int row = T::CHANNEL_MAJOR ? channel : token, column = T::CHANNEL_MAJOR ? token : channel;
    const u8* codes = page + T::CODES + (head * T::ROWS + row) * T::ROW_BYTES;
    if constexpr (T::FORMAT == EXACT) {
        return to_float(reinterpret_cast<const Input*>(codes)[column]);
    } else {
        const int byte = column % T::ROW_BYTES, plane = column / T::ROW_BYTES;
        const u32 code = codes[byte] >> (T::BITS * plane) & ((1 << T::BITS) - 1);
        const int at = (head * T::GROUPS + column / T::GROUP) * T::ROWS + row;
        const float scale = to_float(reinterpret_cast<const typename T::Scale*>(page + T::SCALES)[at]);
        if (T::FORMAT == FP8) return mul_rn(half_to_float(fp8_as_half(code)) * 256.0f, scale);
        const float low = to_float(reinterpret_cast<const typename T::Scale*>(page + T::LOWS)[at]);
        return add_rn(mul_rn(static_cast<float>(code), scale), low);
    }
}

// Grid (blocks, KV heads, 2 tensors).
extern "C" __global__ void unseal(const u8* arena, const int* pages, float* keys, float* values) {
    const int head = blockIdx.y;
    const u8* page = arena + static_cast<i64>(pages[blockIdx.x]) * PAGE_BYTES;
    const i64 start = (static_cast<i64>(blockIdx.x) * KV_HEADS + head) * BLOCK * HEAD_DIM;
    for (int i = threadIdx.x; i < BLOCK * HEAD_DIM; i += blockDim.x) {
        const int token = i / HEAD_DIM, channel = i % HEAD_DIM;
        if (blockIdx.z == 0) {
            keys[start + i] = decoded<Key>(page, head, token, channel);
        } else {
            values[start + i] = decoded<Value>(page, head, token, channel);
        }
    }
}
