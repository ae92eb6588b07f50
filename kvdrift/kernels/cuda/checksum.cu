// The checksum of each page's payload, as kernels/definition.py defines it. One thread block a page; no format matters.
#include "device.h"

constexpr int THREADS = 256;

extern "C" __global__ void checksum(const u8* arena, i64 page_bytes, int header_bytes, const int* pages, i64* sums) {
    extern __shared__ __align__(16) u8 memory[];
    u32 *plain = reinterpret_cast<u32*>(memory), *weighted = plain + THREADS;
    const u8* page = arena + static_cast<i64>(pages[blockIdx.x]) * page_bytes;
    const uint4* payload = reinterpret_cast<const uint4*>(page + header_bytes);
    u32 sum = 0, ordered = 0;
    for (u32 i = threadIdx.x; i < (page_bytes - header_bytes) / 16; i += THREADS) {
        const uint4 w = payload[i];
        sum += w.x + w.y + w.z + w.w;
        ordered += (4 * i + 1) * w.x + (4 * i + 2) * w.y + (4 * i + 3) * w.z + (4 * i + 4) * w.w;
    }
    plain[threadIdx.x] = sum, weighted[threadIdx.x] = ordered;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            plain[threadIdx.x] += plain[threadIdx.x + half];
            weighted[threadIdx.x] += weighted[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = static_cast<i64>(static_cast<u64>(weighted[0]) << 32 | plain[0]);
}
