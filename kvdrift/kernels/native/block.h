// Attention of all query rows of one KV head to one block: packed, exact, or decoded into a tile where no loop fits it.
#pragma once
#include <algorithm>

#include "digit_loops.h"
#include "float_loops.h"
#include "softmax.h"

namespace kvdrift {

// How one tensor's blocks are read: by the loops for their format, or decoded into a tile first.
struct Reader {
    const Loops *loops;
    bool decoded, grouped;
};

template <int Bits>
const Loops *code_loops(bool grouped) {
#ifdef KVDRIFT_VNNI
    return grouped ? &digit_loops<Bits, true> : &digit_loops<Bits, false>;
#else
    return grouped ? &float_loops<Unsigned<Bits>, true> : &float_loops<Unsigned<Bits>, false>;
#endif
}

inline const Loops *exact_loops(int32_t dtype) {
    return dtype == FLOAT32   ? &float_loops<F32, false>
           : dtype == FLOAT16 ? &float_loops<F16, false>
                              : &float_loops<BF16, false>;
}

inline Reader reader(const TensorSpec &s, int32_t dtype) {
    const Reader decoded = {&float_loops<F32, false>, true, false};
    if (std::max(s.rows, s.row) > LONGEST || s.plane() % LANES) return decoded;
    if (s.kind == EXACT) return {exact_loops(dtype), false, false};
    const bool grouped = s.groups > 1;
    if (s.rows % LANES || (grouped && s.group() % LANES)) return decoded;
    if (s.kind == FP8_E4M3) return {grouped ? &float_loops<E4M3, true> : &float_loops<E4M3, false>, false, grouped};
    return {s.bits == 8   ? code_loops<8>(grouped)
            : s.bits == 4 ? code_loops<4>(grouped)
                          : code_loops<2>(grouped),
            false, grouped};
}

struct Side {  // one tensor of the block at hand
    Operand operand;
    const Loops *loops;
    bool channel_major, grouped;
};

// Opens blocks; owns the float32 copies of their scales, and tiles for what has no loops of its own.
struct Opener {
    Floats tile, stored;

    // `next` is the page that will be read after this one.
    Side packed(const BlockSpec &b, const TensorSpec &s, const Reader &r, int32_t dtype, const uint8_t *page,
                const uint8_t *next, int64_t head) {
        if (r.decoded) return decoded(b, s, dtype, page, head, b.block);
        const int64_t n = int64_t(s.groups) * s.rows;
        const bool has_low = s.kind == UNIFORM;
        float *scales = stored.room(2 * n + LANES), *lows = scales + round_up(n, LANES);
        widen(page + s.stored_offset(s.scales, head), s.scale_bytes, n, s.kind == FP8_E4M3 ? E4M3_UNIT : 1.0f, scales);
        if (has_low) widen(page + s.stored_offset(s.lows, head), s.scale_bytes, n, 1.0f, lows);
        fetch(next + s.stored_offset(s.scales, head), n * s.scale_bytes);
        if (has_low) fetch(next + s.stored_offset(s.lows, head), n * s.scale_bytes);
        return {{s.codes_of(page, head), s.row_bytes, s.rows, s.row, s.groups, n ? scales : nullptr,
                 has_low ? lows : nullptr, next - page},
                r.loops,
                bool(s.channel_major),
                r.grouped};
    }

    Side exact(const BlockSpec &b, int32_t dtype, const uint8_t *from, int64_t token_bytes, int tokens) {
        const int d = b.head_dim;
        if (d % LANES == 0) return {{from, token_bytes, tokens, d, 0, nullptr, nullptr, 0}, exact_loops(dtype), false, false};
        const TensorSpec s = {EXACT, 0, 0, 0, tokens, d, 0, int32_t(token_bytes), 0, 0, 0, 0};
        return decoded(b, s, dtype, from, 0, tokens);
    }

   private:
    Side decoded(const BlockSpec &b, const TensorSpec &s, int32_t dtype, const uint8_t *page, int64_t head, int tokens) {
        const int stride = round_up(b.head_dim, LANES);
        float *to = tile.room(int64_t(tokens) * stride);
        decode_block(s, page, head, dtype, to, stride);
        const auto *values = reinterpret_cast<const uint8_t *>(to);
        return {{values, 4 * stride, tokens, stride, 0, nullptr, nullptr, 0}, &float_loops<F32, false>, false, false};
    }

    static INLINE void widen(const uint8_t *from, int32_t bytes, int64_t n, float unit, float *to) {
        for (int64_t i = 0; i < n; i += LANES)
            store(to + i, (bytes == 4 ? load<f32x16>(from + 4 * i) : from_half(load<u16x16>(from + 2 * i))) * unit);
    }
};

// The query rows of one KV head, and what attention made of them so far.
struct Rows {
    int64_t count;
    int d;                    // channels, padded to whole lanes
    const float *query;       // [count][d], scaled for a base-2 softmax
    const float *most, *sum;  // of each row: its largest magnitude, its sum
    Running *state;           // [count]
    float *values;            // [count][d]
    float *scores;            // [ROWS][tokens of a block], for use within
};

// low[g][r] = Σ x[r][i] · low[g][i]
template <int R>
INLINE void low_products(const Operand &a, const Factors &f, float *low) {
    for (int g = 0; g < a.groups; g++) {
        f32x16 sum[ROWS] = {};
        for (int i = 0; i < a.rows; i += LANES)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sum[r] += load<f32x16>(a.low + g * a.rows + i) * load<f32x16>(f.x + r * f.row + i);
        store(low + g * ROWS, fold4(sum[0], sum[1], sum[2], sum[3], Sum()));
    }
}

template <int R>
INLINE void score(const Side &k, const Factors &query, const float *sum, int tokens, float *scores, int stride) {
    Operand a = k.operand;
    if (k.channel_major) {
        float low[LONGEST / LANES * ROWS];
        const int group = a.row / a.groups;
        a.unseen = (a.row - tokens) / group;
        low_products<R>(a, query, low);
        for (int g = 0; g < a.groups; g++)
            for (int r = 0; r < R; r++)
                for (int i = g * group; i < (g + 1) * group; i += LANES)
                    store(scores + r * stride + i, broadcast(low[g * ROWS + r]));
        return k.loops->weighted[R - 1](a, query, a.rows, scores, stride);
    }
    k.loops->products[R - 1](a, query, tokens, scores, stride);
    if (!a.scale || k.grouped) return;
    for (int r = 0; r < R; r++)
        for (int t = 0; t < a.rows; t += LANES) {
            f32x16 s = load<f32x16>(scores + r * stride + t) * load<f32x16>(a.scale + t);
            if (a.low) s += sum[r] * load<f32x16>(a.low + t);
            store(scores + r * stride + t, s);
        }
}

template <int R>
INLINE void combine(const Side &v, const Factors &weights, int tokens, float *values, int d) {
    const Operand &a = v.operand;
    v.loops->weighted[R - 1](a, weights, tokens, values, d);
    if (!a.low) return;
    float low[LONGEST / LANES * ROWS];
    const int group = a.row / a.groups;
    low_products<R>(a, weights, low);
    for (int g = 0; g < a.groups; g++)
        for (int r = 0; r < R; r++) {
            float *to = values + r * d + g * group;
            for (int i = 0; i < group; i += LANES) store(to + i, load<f32x16>(to + i) + low[g * ROWS + r]);
        }
}

// R query rows from `first` on, all of which see the block's first `tokens`.
template <int R>
void attend_rows(const Side &k, const Side &v, const Rows &q, int64_t first, int tokens) {
    const int stride = round_up(k.channel_major ? k.operand.row : k.operand.rows, LANES);
    float *values = q.values + first * q.d, most[R];
    score<R>(k, {q.query + first * q.d, q.d, q.most + first}, q.sum + first, tokens, q.scores, stride);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        most[r] = absorb(q.state[first + r], q.scores + r * stride, stride, tokens, values + r * q.d, q.d);
    combine<R>(v, {q.scores, stride, most}, tokens, values, q.d);
}

// visible(row) is how many of the block's tokens that row sees. Rows that differ in it don't share a pass: a weight of
// zero would still make NaN of an infinite value.
template <class Visible>
void attend(const Side &k, const Side &v, const Rows &q, Visible visible) {
    constexpr void (*passes[ROWS])(const Side &, const Side &, const Rows &, int64_t, int) = {
        attend_rows<1>, attend_rows<2>, attend_rows<3>, attend_rows<4>};
    for (int64_t first = 0, next; first < q.count; first = next) {
        const int tokens = visible(first);
        for (next = first + 1; next < q.count && next - first < ROWS && visible(next) == tokens;) next++;
        if (tokens > 0) passes[next - first - 1](k, v, q, first, tokens);
    }
}

}  // namespace kvdrift
