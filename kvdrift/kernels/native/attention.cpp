// decode_attention: work is split by (sequence, KV head, run of blocks); each piece keeps a running softmax, and the
// pieces of a row are merged by their log-sum-exp. No decoded tile leaves the core's cache.
#include <algorithm>
#include <vector>

#include "block.h"

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

struct Worker {  // what a thread reuses from one piece of work to the next
    Opener key, value;
    Floats query, scores, most, sum;
};

// Query rows in float32, scaled for a base-2 softmax and padded with zeros: row = query · share + head.
void load_queries(const Call &call, int64_t sequence, int64_t kv_head, int share, int d, float *query,
                  float *most, float *sum) {
    const float factor = call.scaling * 1.4426950408889634f;
    const TensorSpec s = {EXACT, 0, 0, 0, 1, call.spec->head_dim, 0, 0, 0, 0, 0, 0};
    for (int64_t row = 0; row < share * call.queries; row++) {
        const uint8_t *from = call.query + sequence * call.query_strides[0] +
                              (kv_head * share + row % share) * call.query_strides[1] +
                              row / share * call.query_strides[2];
        float *to = query + row * d;
        decode_block(s, from, 0, call.dtype, to, d);
        f32x16 largest = {}, total = {};
        for (int c = 0; c < d; c += LANES) {
            const f32x16 q = load<f32x16>(to + c) * factor;
            store(to + c, q);
            largest = max(largest, max(q, -q));
            total += q;
        }
        most[row] = fold(largest, Max()), sum[row] = fold(total, Sum());
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
    float *query = w.query.room(split.rows * split.d), *most = w.most.room(split.rows), *sum = w.sum.room(split.rows);
    float *scores = w.scores.room(ROWS * std::max<int>(round_up(b.block, LANES), EXACT_BLOCK));
    load_queries(call, s, head, split.share, split.d, query, most, sum);
    const Rows rows = {split.rows, split.d, query, most, sum, state, sums, scores};

    const int64_t exact = call.exact_lengths[s], end = (run + 1) * split.run;
    const auto page_of = [&](int64_t block) {
        return call.arena + call.pages[s * call.page_stride + block] * b.page_bytes;
    };
    for (int64_t block = run * split.run; block < std::min(end, call.blocks); block++) {
        const int tokens = call.tokens[s * call.token_stride + block];
        if (tokens <= 0) continue;
        const uint8_t *page = page_of(block), *next = block + 1 < std::min(end, call.blocks) ? page_of(block + 1) : page;
        const Side k = w.key.packed(b, b.key, keys, call.dtype, page, next, head);
        const Side v = w.value.packed(b, b.value, values, call.dtype, page, next, head);
        attend(k, v, rows, [tokens](int64_t) { return tokens; });
    }
    for (int64_t block = std::max(run * split.run, call.blocks); block < end; block++) {
        const int64_t start = (block - call.blocks) * EXACT_BLOCK, left = exact - start;
        if (left <= 0) break;
        const int tokens = std::min<int64_t>(left, EXACT_BLOCK);
        const int64_t *ks = call.key_strides, *vs = call.value_strides;
        const Side k = w.key.exact(b, call.dtype, call.exact_keys + s * ks[0] + head * ks[1] + start * ks[2], ks[2], tokens);
        const Side v = w.value.exact(b, call.dtype, call.exact_values + s * vs[0] + head * vs[1] + start * vs[2], vs[2], tokens);
        attend(k, v, rows, [&](int64_t row) {
            return int(std::clamp<int64_t>(left - (call.queries - 1 - row / split.share), 0, tokens));
        });
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
    Floats room;
    float *sums = room.room(pieces * split.rows * split.d);  // new room is zero
#pragma omp parallel num_threads(call.threads) if (pieces > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t piece = 0; piece < pieces; piece++)
            run_piece(call, split, keys, values, piece, &states[piece * split.rows],
                      sums + piece * split.rows * split.d);
#pragma omp for
        for (int64_t item = 0; item < heads * split.rows; item++) merge(call, split, item, states.data(), sums);
    }
}
