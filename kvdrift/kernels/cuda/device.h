// What the kernels ask of the machine: number types, arithmetic that keeps subnormals, asynchronous copies, the warp's
// matrix product. No CUDA header is included, so that a bare GPU box with torch and CuPy can compile this.
// tests/cuda_on_host provides the same names for a host compiler.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#ifdef __CUDACC__

__device__ __forceinline__ float half_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ u16 float_to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// CuPy compiles with -ftz=true, under which plain operators flush subnormal results. These don't, and never fuse.
#define IEEE(NAME, OPERATION)                                                  \
    __device__ __forceinline__ float NAME(float a, float b) {                  \
        float x;                                                               \
        asm(OPERATION " %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));              \
        return x;                                                              \
    }
IEEE(add_rn, "add.rn.f32")
IEEE(sub_rn, "sub.rn.f32")
IEEE(mul_rn, "mul.rn.f32")
IEEE(div_rn, "div.rn.f32")
#undef IEEE

// Copy 16 bytes to shared memory in the background; `bytes` < 16 of them are read, the rest become zero.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes = 16) {
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` of this thread's committed groups are still under way.
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// c[16×8] += a[16×8] · b[8×8] in TF32, float32 sums. Lane 4·g + t holds a: (g, t) (g+8, t) (g, t+4) (g+8, t+4),
// b: (t, g) (t+4, g), c: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1).
__device__ __forceinline__ void matrix_product(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

#endif

struct F16 {
    u16 bits;
};
struct BF16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(F16 x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(BF16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ void store(F16& to, float x) { to.bits = float_to_half(x); }
__device__ __forceinline__ void store(BF16& to, float x) {
    const u32 bits = __float_as_uint(x);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = nan ? 0x7fc0 : static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
__device__ __forceinline__ void store(float& to, float x) { to = x; }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
// By its bits: under -ftz=true a comparison takes a subnormal for zero.
__device__ __forceinline__ bool is_zero(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0; }
