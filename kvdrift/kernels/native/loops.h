// What attention's inner loops take and what they are: two of them a format, for one block of one head and R query rows
// at a time (R ≤ 4).
//   weighted   out[r][e] += Σ over rows of factor[r][row] · scale[group of e][row] · code[row][e]: scores from
//              channel-major keys, outputs from token-major values
//   products   out[r][row] = Σ over elements of query[r][e] · x[row][e]: scores from token-major keys. With several
//              groups a row, x is scale · code + low; else the bare code
// Whatever scale and low aren't used there is the caller's to apply. Rows are read in units of sixteen elements of a
// plane, so a row's planes must be multiples of sixteen long.
#pragma once
#include "layout.h"
#include "simd.h"

namespace kvdrift {

constexpr int ROWS = 4;       // most query rows of one pass
constexpr int LONGEST = 256;  // most rows of a block, and most elements of a row, that the loops take

// One block of one head as the loops see it. Scale and low are float32 [groups][rows]; null where there are none.
struct Operand {
    const uint8_t *codes;
    int64_t stride;  // bytes from row to row
    int rows, row, groups;
    const float *scale, *low;
    int64_t ahead;  // bytes from here to the codes that are read next, fetched meanwhile; 0 if there are none
    int unseen = 0;  // the last groups of a row, if nobody sees their elements: what comes out for them is ignored
};

// What the codes are multiplied by: R rows, and the largest magnitude of each.
struct Factors {
    const float *x;
    int64_t row;  // floats from one row to the next
    const float *most;
};

// The loops for one format, by number of query rows − 1.
struct Loops {
    // (operand, factors, rows to sum over or wanted, out, floats from one query row of it to the next)
    using Loop = void (*)(const Operand &, const Factors &, int, float *, int64_t);
    Loop weighted[ROWS];
    Loop products[ROWS];
};

// Pages lie anywhere in the arena, so the hardware can't foresee the next one.
INLINE void fetch(const uint8_t *from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

}  // namespace kvdrift
