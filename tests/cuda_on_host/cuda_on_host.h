// A CUDA thread block on one host thread: a fiber a CUDA thread, switched at barriers, shuffles and matrix products.
// It checks arithmetic, indexing and the order of asynchronous copies; it sees no races inside a barrier-free stretch.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(n)
#define __launch_bounds__(...)

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) float2 {
    float x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

constexpr size_t SHARED_LIMIT = 227 * 1024, STACK = 128 * 1024;
alignas(16) static unsigned char memory[SHARED_LIMIT];  // every kernel's `extern __shared__ memory`

// -- fibers -------------------------------------------------------------------------------------------------------

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;
};
struct Copy {
    void* to;
    const void* from;
    int bytes;
};
struct Fiber {
    ucontext_t start;
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(STACK);
    bool started = false, done = false;
    std::vector<Copy> open;                 // asynchronous copies not yet committed
    std::vector<std::vector<Copy>> groups;  // and committed, but not yet waited for
};

static std::vector<Fiber> fibers;
static int current;
static Barrier block_barrier, warp_barrier[32];
static std::function<void()> body;
static jmp_buf scheduler;
static Dim3 blockIdx, blockDim, gridDim;
struct ThreadIndex {
    struct {
        operator int() const { return current; }
    } x;
};
static ThreadIndex threadIdx;

inline void run_fiber() {
    body();
    fibers[current].done = true;
    longjmp(scheduler, 1);
}

inline void switch_to_next() {
    if (!setjmp(fibers[current].place)) longjmp(scheduler, 1);
}

inline void wait_at(Barrier& barrier, int members) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == members) {
        barrier.arrived = 0;
        barrier.generation++;
        return;
    }
    while (barrier.generation == generation) switch_to_next();
}

inline void run_block(int threads) {
    if (fibers.size() < static_cast<size_t>(threads)) fibers.resize(threads);
    for (int i = 0; i < threads; i++) {
        fibers[i].started = fibers[i].done = false;
        fibers[i].open.clear();
        fibers[i].groups.clear();
    }
    std::memset(memory, 0xff, sizeof memory);  // NaN in every float format, so that reading too early shows
    volatile int left = threads;
    for (volatile int next = 0; left > 0; next = (next + 1) % threads) {
        if (fibers[next].done) continue;
        current = next;
        if (!setjmp(scheduler)) {
            Fiber& fiber = fibers[next];
            if (fiber.started) longjmp(fiber.place, 1);
            fiber.started = true;
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = fiber.stack.data();
            fiber.start.uc_stack.ss_size = STACK;
            fiber.start.uc_link = nullptr;
            makecontext(&fiber.start, run_fiber, 0);
            setcontext(&fiber.start);
        }
        if (fibers[next].done) left = left - 1;
    }
}

// -- what kernels call --------------------------------------------------------------------------------------------

inline void __syncthreads() { wait_at(block_barrier, blockDim.x); }
inline void __syncwarp() { wait_at(warp_barrier[current / 32], 32); }

struct Exchange {
    float sent[32][6];
};
static Exchange exchanges[32];

inline float read_from(float x, int lane) {
    Exchange& exchange = exchanges[current / 32];
    exchange.sent[current % 32][0] = x;
    __syncwarp();
    const float received = exchange.sent[lane & 31][0];
    __syncwarp();
    return received;
}
inline float __shfl_sync(unsigned, float x, int lane) { return read_from(x, lane); }
inline float __shfl_xor_sync(unsigned, float x, int apart) { return read_from(x, current % 32 ^ apart); }
inline bool __any_sync(unsigned, bool yes) {
    for (int apart = 1; apart < 32; apart *= 2) yes |= __shfl_xor_sync(0, yes, apart) != 0;
    return yes;
}

inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float half_to_float(uint16_t bits) {
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return x;
}
inline uint16_t float_to_half(float x) {
    const _Float16 half = x;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline float add_rn(float a, float b) { return a + b; }
inline float sub_rn(float a, float b) { return a - b; }
inline float mul_rn(float a, float b) { return a * b; }
inline float div_rn(float a, float b) { return a / b; }

// Copies land only when waited for, so that a missing wait shows; misaligned ones fault, as on the device.
inline void copy_async(void* shared, const void* global, int bytes = 16) {
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16) std::abort();
    fibers[current].open.push_back({shared, global, bytes});
}
inline void copies_commit() { fibers[current].groups.push_back(std::exchange(fibers[current].open, {})); }
template <int PENDING>
void copies_wait() {
    auto& groups = fibers[current].groups;
    while (groups.size() > PENDING) {
        for (const Copy& copy : groups.front()) {
            std::memset(copy.to, 0, 16);
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

// The tensor core's m16n8k8 on TF32: operands cut to 10 mantissa bits, float32 sums; see device.h for who holds what.
inline void matrix_product(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
    auto cut = [](float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); };
    auto& sent = exchanges[current / 32].sent;
    const int lane = current % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) sent[lane][i] = cut(a[i]);
    for (int i = 0; i < 2; i++) sent[lane][4 + i] = cut(b[i]);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row_half = i / 2, column = 2 * t + i % 2;
        for (int k = 0; k < 8; k++) {
            const float* left = sent[4 * g + k % 4];
            const float* right = sent[4 * column + k % 4];
            c[i] += left[row_half + k / 4 * 2] * right[4 + k / 4];
        }
    }
    __syncwarp();
}

// -- launching, with arguments as the driver takes them: an array of pointers ---------------------------------------

template <class... P, size_t... I>
void launch(void (*kernel)(P...), const unsigned* grid, int threads, void** args, std::index_sequence<I...>) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {static_cast<unsigned>(threads), 1, 1};
    body = [=] { kernel(*static_cast<P*>(args[I])...); };
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                run_block(threads);
            }
}
template <class... P>
void launch(void (*kernel)(P...), const unsigned* grid, int threads, void** args) {
    launch(kernel, grid, threads, args, std::index_sequence_for<P...>{});
}

#define HOST(kernel)                                                                                 \
    extern "C" void run_##kernel(const unsigned* grid, int threads, void** args) {                   \
        launch(kernel, grid, threads, args);                                                         \
    }
