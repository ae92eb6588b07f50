// decode_attention: work is split by (sequence, KV head, run of blocks); each piece keeps a running softmax, and the
// pieces of a row are merged by their log-sum-exp. No decoded tile leaves the core's cache.
#include <algorithm>
#include <vector>

#include "attention_kernels.h"
#include "softmax.h"

namespace kvdrift {
namespace {

constexpr int EXACT_BLOCK = 64;   // exact tokens are taken in blocks too
constexpr int LONGEST_RUN = 32;   // blocks of one running sum: float32 error stays that of a short sum at any length

struct Call {
    const BlockSpec *spec;
    const uint8_t *arena;
    const int32_t *pages, *tokens, *exact_lengths;
    const uint8_t *query, *exact_keys, *exact_values;
    uint8_t *out;
    int64_t sequences, query_heads, queries, blocks;
    int64_t query_strides[3], key_strides[3], value_strides[3];  // bytes: sequence, head, token
    int64_t page_stride, token_stride;                           // elements from one sequence to the next
    int32_t dtype, threads;
    float scaling;
};

// How one tensor's blocks are read: by the loops for their format, or decoded into a tile first.
struct Reader {
    const Kernels *kernels;
    bool decoded, grouped;
};

template <class S>
const Kernels *kernels(bool grouped) {
    return grouped ? &kernels_of<S, true> : &kernels_of<S, false>;
}

const Kernels *exact_kernels(int32_t dtype) {
    return dtype == FLOAT32 ? &kernels_of<F32, false> : dtype == FLOAT16 ? &kernels_of<F16, false> : &kernels_of<BF16, false>;
}

Reader reader(const TensorSpec &s, int32_t dtype) {
    const Reader decoded = {&kernels_of<F32, false>, true, false};
    if (s.rows % (s.kind == EXACT ? 1 : LANES) || s.plane() % LANES) return decoded;
    if (s.kind == EXACT) return {exact_kernels(dtype), false, false};
    const bool grouped = s.groups > 1;
    if (grouped && s.group() % LANES) return decoded;
    const Kernels *loops = s.kind == FP8_E4M3 ? kernels<E4M3>(grouped)
                           : s.bits == 8      ? kernels<U8>(grouped)
                           : s.bits == 4      ? kernels<U4>(grouped)
                                              : kernels<U2>(grouped);
    return {loops, false, grouped};
}

INLINE void widen_stored(const uint8_t *from, int32_t bytes, int64_t n, float unit, float *to) {
    for (int64_t i = 0; i < n; i += LANES)
        store(to + i, (bytes == 4 ? load<f32x16>(from + 4 * i) : from_half(load<u16x16>(from + 2 * i))) * unit);
}

struct Side {  // one tensor of the block at hand
    Operand operand;
    const Kernels *kernels;
    bool channel_major, grouped;
};

// Opens blocks; owns the float32 copies of their scales, and tiles for what has no loops of its own.
struct Opener {
    std::vector<float> tile, scales;

    Side packed(const TensorSpec &s, const Reader &r, const Call &call, const uint8_t *page, const uint8_t *next,
                int64_t head) {
        if (r.decoded) return decoded(s, call, page, head, call.spec->block);
        const int64_t n = int64_t(s.groups) * s.rows;
        scales.resize(2 * n);
        const bool has_low = s.kind == UNIFORM;
        const float unit = s.kind == FP8_E4M3 ? E4M3_UNIT : 1.0f;
        widen_stored(page + s.stored_offset(s.scales, head), s.scale_bytes, n, unit, scales.data());
        if (has_low) widen_stored(page + s.stored_offset(s.lows, head), s.scale_bytes, n, 1.0f, scales.data() + n);
        for (int64_t i = 0; i < n * s.scale_bytes; i += 64) {
            __builtin_prefetch(next + s.stored_offset(s.scales, head) + i);
            __builtin_prefetch(next + s.stored_offset(s.lows, head) + i);
        }
        return {{s.codes_of(page, head), s.row_bytes, s.rows, s.row, s.groups, n ? scales.data() : nullptr,
                 has_low ? scales.data() + n : nullptr, next - page},
                r.kernels,
                bool(s.channel_major),
                r.grouped};
    }

    Side exact(const Call &call, const uint8_t *from, int64_t token_bytes, int tokens) {
        const int d = call.spec->head_dim;
        if (d % LANES == 0) return {{from, token_bytes, tokens, d, 0, nullptr, nullptr, 0}, exact_kernels(call.dtype), false, false};
        const TensorSpec s = {EXACT, 0, 0, 0, tokens, d, 0, int32_t(token_bytes), 0, 0, 0, 0};
        return decoded(s, call, from, 0, tokens);
    }

    Side decoded(const TensorSpec &s, const Call &call, const uint8_t *page, int64_t head, int tokens) {
        const int stride = round_up(call.spec->head_dim, LANES);
        tile.resize(int64_t(tokens) * stride);
        decode_block(s, page, head, call.dtype, tile.data(), stride);
        const auto *codes = reinterpret_cast<const uint8_t *>(tile.data());
        return {{codes, 4 * stride, tokens, stride, 0, nullptr, nullptr, 0}, &kernels_of<F32, false>, false, false};
    }
};

struct Worker {  // what a thread reuses from one piece of work to the next
    Opener key, value;
    std::vector<float> query, query_sum, scores, weights;
};

// weights[group][r][i] = x[r][i] · scale[group][i]; low(group, r, Σ x[r][i] · low[group][i]).
template <class Low>
INLINE void scale_weights(const Operand &a, const float *x, int64_t x_row, int rows, int n, float *weights, int64_t stride,
                          Low low) {
    for (int g = 0; g < a.groups; g++)
        for (int r = 0; r < rows; r++) {
            f32x16 sum = {};
            for (int i = 0; i < n; i += LANES) {
                const f32x16 v = load<f32x16>(x + r * x_row + i);
                store(weights + (g * rows + r) * stride + i, v * load<f32x16>(a.scale + g * n + i));
                if (a.low) sum += v * load<f32x16>(a.low + g * n + i);
            }
            if (a.low) low(g, r, fold(sum, Sum()));
        }
}

INLINE void fill(float *to, int n, float x) {
    for (int i = 0; i < n; i += LANES) store(to + i, broadcast(x));
}

INLINE void score(const Side &k, const float *query, const float *query_sum, int rows, int tokens, int stride, int d,
                  Worker &w) {
    const Operand &a = k.operand;
    float *scores = w.scores.data();
    if (k.channel_major) {
        const int group = a.row / a.groups;
        scale_weights(a, query, d, rows, a.rows, w.weights.data(), a.rows,
                      [&](int g, int r, float x) { fill(scores + r * stride + g * group, group, x); });
        k.kernels->weighted[rows - 1](a, w.weights.data(), a.rows, int64_t(rows) * a.rows, a.rows, scores, stride);
        return;
    }
    k.kernels->products[rows - 1](a, query, d, tokens, scores, stride);
    if (!a.scale || k.grouped) return;
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < a.rows; t += LANES) {
            f32x16 s = load<f32x16>(scores + r * stride + t) * load<f32x16>(a.scale + t);
            if (a.low) s += query_sum[r] * load<f32x16>(a.low + t);
            store(scores + r * stride + t, s);
        }
}

INLINE void combine(const Side &v, int rows, int tokens, int stride, float *values, int d, Worker &w) {
    const Operand &a = v.operand;
    if (!a.scale) return v.kernels->weighted[rows - 1](a, w.scores.data(), stride, 0, tokens, values, d);
    const int group = a.row / a.groups;
    scale_weights(a, w.scores.data(), stride, rows, a.rows, w.weights.data(), a.rows, [&](int g, int r, float x) {
        float *to = values + r * d + g * group;
        for (int i = 0; i < group; i += LANES) store(to + i, load<f32x16>(to + i) + x);
    });
    v.kernels->weighted[rows - 1](a, w.weights.data(), a.rows, int64_t(rows) * a.rows, tokens, values, d);
}

// All query rows of one KV head against one block. visible(row) is how many of its tokens that row sees.
template <class Visible>
void attend(const Side &k, const Side &v, int total_rows, int d, Visible visible, Running *state, float *values, Worker &w) {
    const int tokens_padded = round_up(k.channel_major ? k.operand.row : k.operand.rows, LANES);
    for (int first = 0; first < total_rows; first += ROWS) {
        const int rows = std::min(ROWS, total_rows - first);
        int tokens = 0;
        for (int r = 0; r < rows; r++) tokens = std::max(tokens, visible(first + r));
        if (tokens <= 0) continue;
        score(k, &w.query[int64_t(first) * d], &w.query_sum[first], rows, tokens, tokens_padded, d, w);
        float *to = values + int64_t(first) * d;
        for (int r = 0; r < rows; r++)
            absorb(state[first + r], &w.scores[r * tokens_padded], tokens_padded, visible(first + r), to + r * d, d);
        combine(v, rows, tokens, tokens_padded, to, d, w);
    }
}

// Query rows in float32, scaled for a base-2 softmax and padded with zeros: row = query · share + head.
void load_queries(const Call &call, int64_t sequence, int64_t kv_head, int share, int d, Worker &w) {
    const float factor = call.scaling * 1.4426950408889634f;
    const TensorSpec s = {EXACT, 0, 0, 0, 1, call.spec->head_dim, 0, 0, 0, 0, 0, 0};
    for (int64_t row = 0; row < share * call.queries; row++) {
        const uint8_t *from = call.query + sequence * call.query_strides[0] +
                              (kv_head * share + row % share) * call.query_strides[1] +
                              row / share * call.query_strides[2];
        float *to = &w.query[row * d];
        decode_block(s, from, 0, call.dtype, to, d);
        f32x16 sum = {};
        for (int c = 0; c < d; c += LANES) {
            const f32x16 q = load<f32x16>(to + c) * factor;
            store(to + c, q);
            sum += q;
        }
        w.query_sum[row] = fold(sum, Sum());
    }
}

struct Split {
    int share, d;
    int64_t rows, run, runs;  // query rows of a KV head; blocks of a run; runs of a sequence

    explicit Split(const Call &call) {
        share = call.query_heads / call.spec->kv_heads;
        d = round_up(call.spec->head_dim, LANES);
        rows = share * call.queries;
        int64_t longest = 0;
        for (int64_t s = 0; s < call.sequences; s++) longest = std::max<int64_t>(longest, call.exact_lengths[s]);
        const int64_t all = std::max<int64_t>(1, call.blocks + (longest + EXACT_BLOCK - 1) / EXACT_BLOCK);
        const int64_t pieces = 8 * call.threads;  // enough to even out the threads
        run = std::clamp<int64_t>(all * call.sequences * call.spec->kv_heads / pieces, 1, LONGEST_RUN);
        runs = (all + run - 1) / run;
    }
};

void run_piece(const Call &call, const Split &split, const Reader &keys, const Reader &values, int64_t piece,
               Running *state, float *sums) {
    static thread_local Worker w;
    const BlockSpec &b = *call.spec;
    const int64_t run = piece % split.runs, head = piece / split.runs % b.kv_heads, s = piece / split.runs / b.kv_heads;
    const int widest = std::max<int>(round_up(b.block, LANES), EXACT_BLOCK);
    const int groups = std::max({b.key.groups, b.value.groups, 1});
    w.query.resize(split.rows * split.d), w.query_sum.resize(split.rows), w.scores.resize(ROWS * widest);
    w.weights.resize(int64_t(groups) * ROWS * std::max(widest, split.d));
    load_queries(call, s, head, split.share, split.d, w);

    const int64_t exact = call.exact_lengths[s];
    for (int64_t block = run * split.run; block < (run + 1) * split.run; block++) {
        if (block < call.blocks) {
            const int tokens = call.tokens[s * call.token_stride + block];
            if (tokens <= 0) continue;
            const uint8_t *page = call.arena + call.pages[s * call.page_stride + block] * b.page_bytes;
            const bool last = block + 1 == std::min((run + 1) * split.run, call.blocks);
            const uint8_t *next = last ? page : call.arena + call.pages[s * call.page_stride + block + 1] * b.page_bytes;
            const Side k = w.key.packed(b.key, keys, call, page, next, head);
            const Side v = w.value.packed(b.value, values, call, page, next, head);
            attend(k, v, split.rows, split.d, [tokens](int) { return tokens; }, state, sums, w);
            continue;
        }
        const int64_t start = (block - call.blocks) * EXACT_BLOCK, left = exact - start;
        if (left <= 0) break;
        const int tokens = std::min<int64_t>(left, EXACT_BLOCK);
        const int64_t *ks = call.key_strides, *vs = call.value_strides;
        const Side k = w.key.exact(call, call.exact_keys + s * ks[0] + head * ks[1] + start * ks[2], ks[2], tokens);
        const Side v = w.value.exact(call, call.exact_values + s * vs[0] + head * vs[1] + start * vs[2], vs[2], tokens);
        const auto visible = [&](int row) {
            return int(std::clamp<int64_t>(left - (call.queries - 1 - row / split.share), 0, tokens));
        };
        attend(k, v, split.rows, split.d, visible, state, sums, w);
    }
}

void store_row(const double *x, int n, int32_t dtype, uint8_t *to) {
    for (int c = 0; c < n; c += LANES) {
        f32x16 v = {};
        const int count = std::min(n - c, LANES);
        for (int i = 0; i < count; i++) v[i] = float(x[c + i]);
        u16x16 h = {};
        if (dtype == FLOAT16) h = to_half(v);
        if (dtype == BFLOAT16) h = to_bfloat(v);
        std::memcpy(to + c * bytes_of(dtype), dtype == FLOAT32 ? (void *)&v : (void *)&h, count * bytes_of(dtype));
    }
}

// The runs of one query row into its output.
void merge(const Call &call, const Split &split, int64_t item, const Running *states, const float *sums) {
    const int64_t row = item % split.rows, head = item / split.rows % call.spec->kv_heads;
    const int64_t s = item / split.rows / call.spec->kv_heads, first = item / split.rows * split.runs;
    float highest = -INFINITY;
    for (int64_t i = 0; i < split.runs; i++) highest = std::max(highest, states[(first + i) * split.rows + row].highest);
    std::vector<double> out(split.d, 0.0);
    double total = 0;
    for (int64_t i = 0; i < split.runs; i++) {
        const int64_t at = (first + i) * split.rows + row;
        if (states[at].highest == -INFINITY) continue;
        const double weight = std::exp2(double(states[at].highest) - highest);
        total += weight * states[at].sum();
        for (int c = 0; c < split.d; c++) out[c] += weight * sums[at * split.d + c];
    }
    for (double &x : out) x /= total;
    const int64_t query = row / split.share, query_head = head * split.share + row % split.share;
    const int64_t to = ((s * call.query_heads + query_head) * call.queries + query) * call.spec->head_dim;
    store_row(out.data(), call.spec->head_dim, call.dtype, call.out + to * bytes_of(call.dtype));
}

}  // namespace
}  // namespace kvdrift

using namespace kvdrift;

extern "C" void kvdrift_decode_attention(const Call *request) {
    const Call &call = *request;
    const Split split(call);
    const Reader keys = reader(call.spec->key, call.dtype), values = reader(call.spec->value, call.dtype);
    const int64_t heads = call.sequences * call.spec->kv_heads, pieces = heads * split.runs;
    std::vector<Running> states(pieces * split.rows);
    std::vector<float> sums(pieces * split.rows * split.d, 0.0f);
#pragma omp parallel num_threads(call.threads) if (pieces > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t piece = 0; piece < pieces; piece++)
            run_piece(call, split, keys, values, piece, &states[piece * split.rows],
                      &sums[piece * split.rows * split.d]);
#pragma omp for
        for (int64_t item = 0; item < heads * split.rows; item++) merge(call, split, item, states.data(), sums.data());
    }
}
