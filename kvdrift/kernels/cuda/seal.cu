// Quantize and pack whole blocks into pages. Codes, scales and lows equal kvdrift/quantizers bit for bit: compile with
// --fmad=false. One thread block takes one tensor of one KV head of one block, all of it in shared memory.
#include "tensors.h"

// Odd in 4-byte words, so that a column of the tile lies in different banks.
constexpr int PITCH = HEAD_DIM + 4 / sizeof(Input);

struct Source {
    const Input* start;
    i64 token_stride, channel_stride;
};

__device__ void load_tile(Input* tile, Source x) {
    constexpr int VECTOR = 16 / sizeof(Input);
    const bool aligned =
        x.channel_stride == 1 && x.token_stride % VECTOR == 0 && reinterpret_cast<u64>(x.start) % 16 == 0;
    if (aligned) {
        constexpr int ROW = HEAD_DIM / VECTOR;
        for (int i = threadIdx.x; i < BLOCK * ROW; i += blockDim.x) {
            const int token = i / ROW, channel = i % ROW * VECTOR;
            const uint4 four = *reinterpret_cast<const uint4*>(x.start + token * x.token_stride + channel);
            u32* to = reinterpret_cast<u32*>(tile + token * PITCH + channel);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    } else {
        for (int i = threadIdx.x; i < BLOCK * HEAD_DIM; i += blockDim.x) {
            const int token = i / HEAD_DIM, channel = i % HEAD_DIM;
            tile[token * PITCH + channel] = x.start[token * x.token_stride + channel * x.channel_stride];
        }
    }
}

// float32 with subnormals read as zero and no negative zero.
__device__ __forceinline__ float normal(float x) { return (__float_as_uint(x) & 0x7f800000u) ? x : 0.0f; }

// Whether codes may stand for x: no larger than LARGEST of quantizers/groups.py, 2^100, nor NaN.
__device__ __forceinline__ bool held(float x) { return (__float_as_uint(x) & 0x7fffffffu) <= (127u + 100u) << 23; }

template <class T>
__device__ __forceinline__ float element(const Input* tile, int row, int column) {
    return normal(to_float(T::CHANNEL_MAJOR ? tile[column * PITCH + row] : tile[row * PITCH + column]));
}

// Scale and low of one group as stored; false when the group must stay exact.
template <class T>
__device__ bool fit_group(const Input* tile, int row, int group, typename T::Scale& scale, typename T::Scale& low) {
    float smallest = element<T>(tile, row, group * T::GROUP), largest = smallest;
    bool finite = true;
    for (int i = 0; i < T::GROUP; i++) {
        const float x = element<T>(tile, row, group * T::GROUP + i);
        smallest = fminf(smallest, x);
        largest = fmaxf(largest, x);
        finite &= is_finite(x);
    }
    if (T::FORMAT == FP8) {
        const float magnitude = fmaxf(-smallest, largest);
        store(scale, normal(div_rn(magnitude, 448.0f)));
        const float step = to_float(scale);
        return finite && held(mul_rn(448.0f, step)) && !(is_zero(step) && !is_zero(magnitude));
    }
    constexpr float LEVELS = (1 << T::BITS) - 1;
    store(scale, sub_rn(div_rn(largest, LEVELS), div_rn(smallest, LEVELS)));
    store(low, smallest);
    if (is_zero(to_float(low))) store(low, 0.0f);
    const float step = to_float(scale), base = to_float(low);
    return finite && held(base) && held(add_rn(mul_rn(LEVELS, step), base)) &&
           !(is_zero(step) && largest != smallest);
}

// E4M3 of a number within ±448, half to even; a negative number that rounds to zero keeps its sign.
__device__ __forceinline__ u32 to_fp8(float x) {
    const u32 sign = __float_as_uint(x) >> 24 & 0x80, bits = __float_as_uint(x) & 0x7fffffffu;
    if (bits < 0x3c800000u) return sign | static_cast<u32>(rintf(__uint_as_float(bits) * 512.0f));  // below 2⁻⁶
    return sign | (((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

template <class T>
__device__ __forceinline__ u32 encode(float x, float step, float base) {
    if (is_zero(step)) return 0;
    if (T::FORMAT == FP8) return to_fp8(fminf(fmaxf(div_rn(x, step), -448.0f), 448.0f));
    return static_cast<u32>(fminf(fmaxf(rintf(div_rn(sub_rn(x, base), step)), 0.0f), (1 << T::BITS) - 1));
}

template <class T>
__device__ bool pack(const Input* tile, u8* page, int head) {
    auto* scales = reinterpret_cast<typename T::Scale*>(page + T::SCALES) + head * T::GROUPS * T::ROWS;
    auto* lows = reinterpret_cast<typename T::Scale*>(page + T::LOWS) + head * T::GROUPS * T::ROWS;
    auto* words = reinterpret_cast<u32*>(page + T::CODES + head * T::ROWS * T::ROW_BYTES);
    bool fits = true;
    for (int i = threadIdx.x; i < T::ROWS * T::GROUPS; i += blockDim.x) {
        typename T::Scale scale, low;
        fits &= fit_group<T>(tile, i % T::ROWS, i / T::ROWS, scale, low);
        scales[i] = scale;
        if (T::FORMAT == UNIFORM) lows[i] = low;
    }
    __syncthreads();
    constexpr int ROW_WORDS = T::ROW_BYTES / 4;
    for (int i = threadIdx.x; i < T::ROWS * ROW_WORDS; i += blockDim.x) {
        const int row = i / ROW_WORDS, byte = i % ROW_WORDS * 4;
        u32 word = 0;
#pragma unroll
        for (int plane = 0; plane < T::PLANES; plane++) {
            float step = 0.0f, base = 0.0f;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int column = plane * T::ROW_BYTES + byte + k;
                if (k == 0 || T::GROUP % 4) {
                    const int at = column / T::GROUP * T::ROWS + row;
                    step = to_float(scales[at]);
                    if (T::FORMAT == UNIFORM) base = to_float(lows[at]);
                }
                word |= encode<T>(element<T>(tile, row, column), step, base) << (8 * k + T::BITS * plane);
            }
        }
        words[i] = word;
    }
    return fits;
}

template <class T>
__device__ bool keep(const Input* tile, u8* page, int head) {
    auto* to = reinterpret_cast<Input*>(page + T::CODES) + head * BLOCK * HEAD_DIM;
    bool fits = true;
    for (int i = threadIdx.x; i < BLOCK * HEAD_DIM; i += blockDim.x) {
        to[i] = tile[i / HEAD_DIM * PITCH + i % HEAD_DIM];
        fits &= is_finite(to_float(to[i]));
    }
    return fits;
}

template <class T>
__device__ void seal_tensor(Input* tile, Source x, u8* page, int head, u8* fits) {
    load_tile(tile, x);
    __syncthreads();
    bool all;
    if constexpr (T::FORMAT == EXACT) {
        all = keep<T>(tile, page, head);
    } else {
        all = pack<T>(tile, page, head);
    }
    if (!all) *fits = 0;  // every writer writes the same
}

// Grid (blocks, KV heads, 2 tensors). `fits` comes in as ones.
extern "C" __global__ void seal(
    const Input* keys, i64 key_block, i64 key_head, i64 key_token, i64 key_channel,
    const Input* values, i64 value_block, i64 value_head, i64 value_token, i64 value_channel,
    u8* arena, const int* pages, u8* fits) {
    extern __shared__ __align__(16) u8 memory[];
    Input* tile = reinterpret_cast<Input*>(memory);
    const i64 block = blockIdx.x, head = blockIdx.y;
    u8* page = arena + static_cast<i64>(pages[block]) * PAGE_BYTES;
    if (blockIdx.z == 0) {
        const Source x = {keys + block * key_block + head * key_head, key_token, key_channel};
        seal_tensor<Key>(tile, x, page, head, fits + block);
    } else {
        const Source x = {values + block * value_block + head * value_head, value_token, value_channel};
        seal_tensor<Value>(tile, x, page, head, fits + block);
        if (head == 0)
            for (int i = PAYLOAD_END + threadIdx.x; i < PAGE_BYTES; i += blockDim.x) page[i] = 0;
    }
}
