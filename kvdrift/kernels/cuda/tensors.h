// The page of one block, from the constants that kernels/cuda.py compiles in; see kvdrift/layout.py.
#pragma once
#include "device.h"

enum Format { EXACT, UNIFORM, FP8 };

#define TENSOR(NAME, PREFIX)                                                                              \
    struct NAME {                                                                                         \
        static constexpr int FORMAT = PREFIX##_FORMAT;                                                    \
        static constexpr int BITS = PREFIX##_BITS;                                                        \
        static constexpr bool CHANNEL_MAJOR = PREFIX##_CHANNEL_MAJOR;                                     \
        static constexpr int ROWS = CHANNEL_MAJOR ? HEAD_DIM : BLOCK;                                     \
        static constexpr int ROW = CHANNEL_MAJOR ? BLOCK : HEAD_DIM;                                      \
        static constexpr int GROUPS = PREFIX##_GROUPS;                                                    \
        static constexpr int GROUP = ROW / GROUPS;                                                        \
        static constexpr int PLANES = FORMAT == EXACT ? 1 : 8 / BITS;                                     \
        static constexpr int ROW_BYTES = ROW * BITS / 8;                                                  \
        static constexpr int CODES = PREFIX##_CODES;                                                      \
        static constexpr int SCALES = PREFIX##_SCALES;                                                    \
        static constexpr int LOWS = PREFIX##_LOWS;                                                        \
        using Scale = PREFIX##_SCALE;                                                                     \
    }
TENSOR(Key, KEY);
TENSOR(Value, VALUE);
#undef TENSOR

using Input = INPUT;

// E4M3 bits as half bits: the same number times 2⁻⁸, subnormals included.
__device__ __forceinline__ u16 fp8_as_half(u32 code) { return ((code & 0x80) << 8) | ((code & 0x7f) << 7); }
