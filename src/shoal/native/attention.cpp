// Block-sparse attention in fp32, forward and backward.
//
// A strip is R vectors of query rows, one row a lane. Scores are kept transposed, scores[key][row]: the softmax then needs no
// horizontal operation, and keys and values are read in place, one element at a time, and broadcast. Three products do all the work:
//
//     score        to[key][row] = sum over d of keys[key][d] * lanes[d][row]            S = K Q^T,  dP = V dO^T
//     accumulate   to[d][row]  += sum over keys of weights[key][row] * values[key][d]   O^T += P V, dQ^T += dS K
//     scatter      to[key][d]  += sum over rows of weights[key][row] * rows[row][d]     dV += P dO,  dK += dS Q
//
// The forward pass is an online softmax (Milakov and Gimelshein, 2018) over the visited blocks of a row of blocks; the backward
// pass computes the probabilities again from the log-sum-exp (Dao et al., 2022, algorithm 4), row of blocks by row of blocks.
// A thread of backward owns whole (batch, key head) pairs. Where threads outnumber these, one pass over the rows gives dQ, and one
// over ranges of columns dK and dV, with the scores computed twice. Sums are taken in one order: bits do not depend on threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "rounding.h"

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes of a vector
constexpr int kSums = 16;
using vf = __m512;
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf all(float x) { return _mm512_set1_ps(x); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
constexpr int kSums = 8;  // of 16 registers
using vf = __m256;
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf all(float x) { return _mm256_set1_ps(x); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
#else
constexpr int W = 4;
constexpr int kSums = 8;
typedef float vf __attribute__((vector_size(16)));
inline vf load(const float* p) { vf x; std::memcpy(&x, p, sizeof x); return x; }
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline vf all(float x) { return vf{x, x, x, x}; }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
#endif

typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kHides = -65504.0f;  // an addend of this or less hides its key: HIDES of attention/call.py
constexpr int64_t kOwnMapping = int64_t{64} << 20;  // bytes from which every allocation has a mapping of its own
constexpr int64_t kUnit = 16;      // blocks are multiples of it, and so are head dims
constexpr int64_t kChunkKeys = 64; // keys whose scores are held at a time, at least: blocks of 16 go four at a time
constexpr uint32_t kGolden = 0x9E3779B9u;

inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

// Three selections of the inner loops, by mask registers where there are some. Comparisons with NaN are false.
#if defined(__AVX512F__)
inline vf at_least(vf x, vf low) { return _mm512_max_ps(low, x); }  // of NaN its second operand
inline vf zero_below(vf x, vf low, vf value) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), value); }
inline vf larger(vf x, vf top) { return _mm512_max_ps(top, x); }
#else
inline vf at_least(vf x, vf low) { return select(x < low, low, x); }
inline vf zero_below(vf x, vf low, vf value) { return select(x < low, all(0.0f), value); }
inline vf larger(vf x, vf top) { return select(x <= top, top, x); }
#endif

// Keep x in a register. The compiler would read it from memory again for each product, and a processor that multiplies two
// vectors a cycle reads two: 8 reads for 16 products leave it at its peak, 20 do not.
inline vf held(vf x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__AVX2__)
    asm("" : "+x"(x));
#endif
    return x;
}

// e^x to 2 units in the last place; 0 below -87, NaN of NaN. x is at most 0, but for rounding.
inline vf exponential(vf x) {
    const vf magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vf low = all(-87.0f);
    const vf z = at_least(x, low);
    const vf shifted = fma(z, all(1.44269504088896f), magic);
    const vf n = shifted - magic;
    vf r = fma(n, all(-0.693359375f), z);  // ln 2 in two parts
    r = fma(n, all(2.12194440e-4f), r);
    vf p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r + all(1.0f));
    const vf power = (vf)(((vi)shifted + 127) << 23);  // the low bits of `shifted` are n
    return zero_below(x, low, p * power);
}

// The natural logarithm of a positive normal number, to 2 units in the last place; NaN of NaN. The number is 2^n m with m from
// sqrt(1/2) to sqrt(2), and log m is r - r^2/2 + r^3 P(r) with r = m - 1 (the P of Cephes' logf).
inline vf logarithm(vf x) {
    const vi n = ((vi)x - 0x3F3504F3) >> 23;  // the bits of sqrt(1/2)
    const vf r = (vf)((vi)x - (n << 23)) - all(1.0f);
    const vf exponent = (vf)(n + 0x4B400000) - all(12582912.0f);  // n as a float: the low bits of 1.5 * 2^23 + n
    vf p = all(7.0376836292e-2f);
    p = fma(p, r, all(-1.1514610310e-1f));
    p = fma(p, r, all(1.1676998740e-1f));
    p = fma(p, r, all(-1.2420140846e-1f));
    p = fma(p, r, all(1.4249322787e-1f));
    p = fma(p, r, all(-1.6668057665e-1f));
    p = fma(p, r, all(2.0000714765e-1f));
    p = fma(p, r, all(-2.4999993993e-1f));
    p = fma(p, r, all(3.3333331174e-1f));
    const vf square = r * r;
    vf y = fma(exponent, all(-2.12194440e-4f), p * r * square);
    y = fma(square, all(-0.5f), y);
    return fma(exponent, all(0.693359375f), r + y) + (x - x);
}

inline uint32_t mix(uint32_t h) {  // the finalizer of MurmurHash3: a bijection of 32 bits
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ (h >> 16);
}

inline vu mix(vu h) {
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// --- The problem, as native/attention.py fills it. Strides are in elements. ---

struct Term {  // added to scores, or where 0 masks them
    const void* data;
    int64_t batch, head, row;  // strides; that of a column is 1
    int32_t dtype;             // of rounding.h, or 3: bool
    int32_t multiplies;        // 0 masks, other values do nothing
};

struct Problem {
    int64_t batches, heads, kv_heads, length, kv_length, dim, block, layout_heads;
    const int64_t* starts;   // of the rows of blocks of all layout heads, and the end
    const int32_t* columns;  // block columns, ascending in each row
    const int32_t* row_places;     // the number of each row of blocks in the whole layout, or null: its own number
    const int32_t* column_places;  // the number of each visited block's column in the whole layout, or null: its column
    int64_t first_head;            // the number of the first head in the whole layout
    const uint8_t* hidden;   // (batch, row block, column block) that no row sees; or null
    int64_t hidden_batch, hidden_row;
    Term terms[3];
    int32_t term_count, causal;
    float scale, kept;   // kept: 1 / (1 - dropout)
    uint32_t threshold;  // hashes below are dropped
    uint32_t seed[2];
    int32_t threads;
    const float *query, *key, *value;  // key and value are contiguous
    int64_t query_stride[3], output_stride[3], gradient_stride[3];
    float* output;
    float* sums;  // log-sum-exp (batch, head, row), contiguous
    const float* gradient;
    float *query_gradient, *key_gradient, *value_gradient;  // contiguous
    float* score_gradient;  // (batch, head, visited blocks, block, block) or null
    int64_t visited;        // blocks of one head
};

// One strip of one head, and where it is.
struct Place {
    int64_t batch, head, row_block, row;
    int64_t position;             // of the first row, in the whole sequence
    uint32_t key;                 // of the dropout of this (batch, head)
};

inline float element(const void* data, int32_t dtype, int64_t i) {
    switch (dtype) {
        case kFloat32: return static_cast<const float*>(data)[i];
        case kBfloat16: return float_of(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16);
        case kFloat16: return from_float16(static_cast<const uint16_t*>(data)[i]);
        default: return static_cast<const uint8_t*>(data)[i] ? 1.0f : 0.0f;
    }
}

inline float added(const Term& term, int64_t i) {
    const float value = element(term.data, term.dtype, i);
    if (term.multiplies) return value == 0.0f ? -kInfinity : 0.0f;
    return value <= kHides ? -kInfinity : value;
}

// --- The three products ---

template <int R, int D>  // D: the head dim, which makes the rows' addresses constants; 0 where it is another
void score_of(float* to, const float* keys, int64_t count, int64_t head_dim, const float* lanes) {
    constexpr int K = kSums / R;
    const int64_t dim = D ? D : head_dim;
    for (int64_t j = 0; j < count; j += K) {
        vf sums[K][R] = {};
        const float* rows = keys + j * dim;
        for (int64_t d = 0; d < dim; ++d) {
            vf lane[R];
            for (int r = 0; r < R; ++r) lane[r] = held(load(lanes + (d * R + r) * W));
#pragma GCC unroll 16
            for (int k = 0; k < K; ++k) {
                const vf one = all(rows[k * dim + d]);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sums[k][r] = fma(one, lane[r], sums[k][r]);
            }
        }
        for (int k = 0; k < K; ++k)
            for (int r = 0; r < R; ++r) store(to + ((j + k) * R + r) * W, sums[k][r]);
    }
}

template <int R>
void score(float* to, const float* keys, int64_t count, int64_t dim, const float* lanes) {
    switch (dim) {
        case 64: return score_of<R, 64>(to, keys, count, dim, lanes);
        case 128: return score_of<R, 128>(to, keys, count, dim, lanes);
        default: return score_of<R, 0>(to, keys, count, dim, lanes);
    }
}

template <int R>
void accumulate(float* to, const float* weights, const float* values, int64_t count, int64_t dim) {
    constexpr int K = kSums / R;
    for (int64_t d = 0; d < dim; d += K) {
        vf sums[K][R];
        for (int k = 0; k < K; ++k)
            for (int r = 0; r < R; ++r) sums[k][r] = load(to + ((d + k) * R + r) * W);
        for (int64_t j = 0; j < count; ++j) {
            vf lane[R];
            for (int r = 0; r < R; ++r) lane[r] = held(load(weights + (j * R + r) * W));
            const float* row = values + j * dim + d;
#pragma GCC unroll 16
            for (int k = 0; k < K; ++k) {
                const vf one = all(row[k]);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sums[k][r] = fma(one, lane[r], sums[k][r]);
            }
        }
        for (int k = 0; k < K; ++k)
            for (int r = 0; r < R; ++r) store(to + ((d + k) * R + r) * W, sums[k][r]);
    }
}

template <int R, int V>
void scatter_columns(float* to, const float* weights, const float* rows, int64_t count, int64_t dim) {
    constexpr int K = kSums / V;
    for (int64_t j = 0; j < count; j += K) {
        vf sums[K][V];
        for (int k = 0; k < K; ++k)
            for (int v = 0; v < V; ++v) sums[k][v] = load(to + (j + k) * dim + v * W);
        const float* weight = weights + j * R * W;
        for (int64_t r = 0; r < R * W; ++r) {
            vf lane[V];
            for (int v = 0; v < V; ++v) lane[v] = held(load(rows + r * dim + v * W));
#pragma GCC unroll 16
            for (int k = 0; k < K; ++k) {
                const vf one = all(weight[k * R * W + r]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sums[k][v] = fma(one, lane[v], sums[k][v]);
            }
        }
        for (int k = 0; k < K; ++k)
            for (int v = 0; v < V; ++v) store(to + (j + k) * dim + v * W, sums[k][v]);
    }
}

template <int R>
void scatter(float* to, const float* weights, const float* rows, int64_t count, int64_t dim) {
    int64_t d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) scatter_columns<R, 4>(to + d, weights, rows + d, count, dim);
    for (; d + 2 * W <= dim; d += 2 * W) scatter_columns<R, 2>(to + d, weights, rows + d, count, dim);
    for (; d < dim; d += W) scatter_columns<R, 1>(to + d, weights, rows + d, count, dim);
}

// --- Between the products ---

// to[column][row] = from[row][column]; both counts are multiples of 16.
void transpose(float* to, int64_t to_stride, const float* from, int64_t stride, int64_t rows, int64_t columns) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < columns; j += 16) {
            __m512 a[16], b[16];
            for (int n = 0; n < 16; ++n) a[n] = load(from + (i + n) * stride + j);
            for (int n = 0; n < 16; n += 2) {
                b[n] = _mm512_unpacklo_ps(a[n], a[n + 1]);
                b[n + 1] = _mm512_unpackhi_ps(a[n], a[n + 1]);
            }
            for (int n = 0; n < 16; n += 4)
                for (int half = 0; half < 2; ++half) {
                    const __m512d low = _mm512_castps_pd(b[n + half]), high = _mm512_castps_pd(b[n + half + 2]);
                    a[n + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                    a[n + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
                }
            for (int n = 0; n < 4; ++n) {  // a[4 i + n] holds of rows 4 i to 4 i + 3, in quarter q, column 4 q + n
                const __m512 p = _mm512_shuffle_f32x4(a[n], a[4 + n], 0x44), q = _mm512_shuffle_f32x4(a[n], a[4 + n], 0xEE);
                const __m512 r = _mm512_shuffle_f32x4(a[8 + n], a[12 + n], 0x44);
                const __m512 s = _mm512_shuffle_f32x4(a[8 + n], a[12 + n], 0xEE);
                store(to + (j + n) * to_stride + i, _mm512_shuffle_f32x4(p, r, 0x88));
                store(to + (j + 4 + n) * to_stride + i, _mm512_shuffle_f32x4(p, r, 0xDD));
                store(to + (j + 8 + n) * to_stride + i, _mm512_shuffle_f32x4(q, s, 0x88));
                store(to + (j + 12 + n) * to_stride + i, _mm512_shuffle_f32x4(q, s, 0xDD));
            }
        }
#else
    for (int64_t j = 0; j < columns; ++j)
        for (int64_t i = 0; i < rows; ++i) to[j * to_stride + i] = from[i * stride + j];
#endif
}

// Transpose a strip of `R * W` rows into lanes[d][row], times `factor`.
template <int R>
void pack(float* lanes, const float* rows, int64_t stride, int64_t dim, float factor) {
    transpose(lanes, R * W, rows, stride, R * W, dim);
    if (factor != 1.0f)
        for (int64_t i = 0; i < dim * R * W; i += W) store(lanes + i, load(lanes + i) * all(factor));
}

// Add to the scores of the block at column `place` what the terms say, and hide later keys from earlier rows.
template <int R>
void adjust(float* scores, const Problem& p, const Place& at, int64_t place, float* tile) {
    const int64_t rows = R * W, block = p.block, first = place * block;
    for (int32_t t = 0; t < p.term_count; ++t) {
        const Term& term = p.terms[t];
        const int64_t base = at.batch * term.batch + at.head * term.head + first;
        if (term.row == 0) {
            for (int64_t j = 0; j < block; ++j) {
                const vf value = all(added(term, base + j));
                for (int r = 0; r < R; ++r) store(scores + (j * R + r) * W, load(scores + (j * R + r) * W) + value);
            }
            continue;
        }
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < block; ++j) tile[j * rows + r] = added(term, base + (at.row + r) * term.row + j);
        for (int64_t i = 0; i < block * rows; i += W) store(scores + i, load(scores + i) + load(tile + i));
    }
    if (p.causal && first + block - 1 > at.position)
        for (int64_t j = 0; j < block; ++j)
            for (int64_t r = 0; r < rows && at.position + r < first + j; ++r) scores[j * rows + r] = -kInfinity;
}

// The keys of dropout of the rows of a strip.
template <int R>
void row_keys(vu* keys, const Place& at) {
    for (int r = 0; r < R; ++r)
        for (int lane = 0; lane < W; ++lane)
            keys[r][lane] = mix(at.key ^ mix(static_cast<uint32_t>(at.position + r * W + lane) * kGolden + 1u));
}

inline vf kept(vu key, int64_t position, uint32_t threshold, vf value) {
    const vu hash = mix(key + static_cast<uint32_t>(position) * kGolden);
    return select((vi)(hash >= threshold), value, all(0.0f));
}

inline bool is_hidden(const Problem& p, const Place& at, int64_t place) {
    return p.hidden != nullptr && p.hidden[at.batch * p.hidden_batch + at.row_block * p.hidden_row + place];
}

// Scratch memory of one thread.
struct Scratch {
    explicit Scratch(const Problem& p) {
        const int64_t rows = 4 * W, chunk = p.block > kChunkKeys ? p.block : kChunkKeys + p.block;
        const int64_t sizes[] = {p.dim * rows, p.dim * rows, p.dim * rows, p.dim * rows, p.dim * rows, chunk * rows, chunk * rows,
                                 p.block * rows};
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        memory.reset(new (std::nothrow) float[total + 16]);
        if (!memory) return;
        float* next = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63});
        float** parts[] = {&lanes, &gradient_lanes, &result, &rows_of_query, &rows_of_gradient, &scores, &products, &tile};
        for (int i = 0; i < 8; ++i) {
            *parts[i] = next;
            next += sizes[i];
        }
    }
    std::unique_ptr<float[]> memory;
    float *lanes = nullptr, *gradient_lanes = nullptr, *result = nullptr, *rows_of_query = nullptr, *rows_of_gradient = nullptr;
    float *scores = nullptr, *products = nullptr, *tile = nullptr;
};

// Collect the next visible blocks of a row, about kChunkKeys keys; return how many.
struct Chunk {
    int64_t columns[kChunkKeys / kUnit + 1];
    int64_t places[kChunkKeys / kUnit + 1];
    int64_t entries[kChunkKeys / kUnit + 1];
    int64_t count;
};

inline const int64_t* next_chunk(Chunk& chunk, const Problem& p, const Place& at, int64_t& entry, int64_t end) {
    const int64_t most = p.block >= kChunkKeys ? 1 : kChunkKeys / p.block;
    chunk.count = 0;
    for (; entry < end && chunk.count < most; ++entry) {
        const int64_t column = p.columns[entry], place = p.column_places ? p.column_places[entry] : column;
        if (is_hidden(p, at, place)) continue;
        chunk.columns[chunk.count] = column;
        chunk.places[chunk.count] = place;
        chunk.entries[chunk.count++] = entry;
    }
    return chunk.count ? chunk.columns : nullptr;
}

// The index of a head's first row of blocks among those of the layout.
inline int64_t first_row(const Problem& p, int64_t head) { return p.layout_heads == 1 ? 0 : head * (p.length / p.block); }

template <typename Float>
Float* at_row(Float* data, const int64_t* stride, const Place& at) {
    return data + at.batch * stride[0] + at.head * stride[1] + at.row * stride[2];
}

Place place(const Problem& p, int64_t batch, int64_t head, int64_t row) {
    Place at{};
    at.batch = batch;
    at.head = head;
    at.row = row;
    at.row_block = row / p.block;
    const int64_t index = first_row(p, head) + at.row_block;
    at.position = (p.row_places ? p.row_places[index] : at.row_block) * p.block + row % p.block;
    const uint32_t number = static_cast<uint32_t>(p.first_head + head) + 1u;
    at.key = mix(p.seed[0] ^ mix(p.seed[1] ^ mix(static_cast<uint32_t>(batch) * kGolden + number)));
    return at;
}

// Inlined by force: GCC takes a function of hints alone for one without effects, and drops the calls.
#define ALWAYS_INLINE inline __attribute__((always_inline))

// Hint that rows will be read, so that they come into the second cache while a strip computes.
ALWAYS_INLINE void prefetch(const float* rows, int64_t stride, int64_t count, int64_t dim) {
    for (int64_t r = 0; r < count; ++r)
        for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(rows + r * stride + d, 0, 2);
}

// Hint that the strip after `at` will read its own rows of `data`.
template <int R>
ALWAYS_INLINE void prefetch_next_rows(const Problem& p, const Place& at, const float* data, const int64_t* stride) {
    if (at.row + R * W < p.length) prefetch(at_row(data, stride, at) + R * W * stride[2], stride[2], R * W, p.dim);
}

// Hint that the next row of blocks will read the blocks of keys (and values, and their gradients) behind the last one of this
// row, whose entries end at `end`: of a window all that it has not read yet. Blocks of 16 gain a twelfth by both hints.
ALWAYS_INLINE void prefetch_next_blocks(const Problem& p, const Place& at, int64_t end, std::initializer_list<const float*> tensors) {
    const int64_t index = first_row(p, at.head) + at.row_block;
    if (at.row % p.block || (at.row_block + 1) * p.block == p.length || end == p.starts[index]) return;
    int64_t entry = p.starts[index + 2];
    while (entry > p.starts[index + 1] && p.columns[entry - 1] > p.columns[end - 1]) --entry;
    const int64_t last = std::min(p.starts[index + 2], entry + kChunkKeys / kUnit);
    for (; entry < last; ++entry)
        for (const float* tensor : tensors) prefetch(tensor + p.columns[entry] * p.block * p.dim, p.dim, p.block, p.dim);
}

template <int R>
void forward_strip(const Problem& p, const Place& at, int64_t entry, int64_t end, Scratch& s) {
    constexpr int64_t rows = R * W;
    const int64_t kv = (at.batch * p.kv_heads + at.head / (p.heads / p.kv_heads)) * p.kv_length * p.dim;
    const float *keys = p.key + kv, *values = p.value + kv;
    float* sums = p.sums + (at.batch * p.heads + at.head) * p.length + at.row;
    prefetch_next_rows<R>(p, at, p.query, p.query_stride);
    prefetch_next_blocks(p, at, end, {keys, values});
    pack<R>(s.lanes, at_row(p.query, p.query_stride, at), p.query_stride[2], p.dim, p.scale);
    std::memset(s.result, 0, p.dim * rows * sizeof(float));
    vf largest[R], total[R];
    vu keys_of_rows[R];
    for (int r = 0; r < R; ++r) {
        largest[r] = all(-kInfinity);
        total[r] = all(0.0f);
    }
    if (p.threshold) row_keys<R>(keys_of_rows, at);
    Chunk chunk;
    for (bool first = true; next_chunk(chunk, p, at, entry, end); first = false) {
        vf top[R];
        for (int r = 0; r < R; ++r) top[r] = largest[r];
        for (int64_t c = 0; c < chunk.count; ++c) {
            float* scores = s.scores + c * p.block * rows;
            score<R>(scores, keys + chunk.columns[c] * p.block * p.dim, p.block, p.dim, s.lanes);
            adjust<R>(scores, p, at, chunk.places[c], s.tile);
            for (int64_t j = 0; j < p.block; ++j)
                for (int r = 0; r < R; ++r) {
                    const vf x = load(scores + (j * R + r) * W);
                    top[r] = larger(x, top[r]);  // NaN of x wins
                }
        }
        vf base[R];
        bool moved = false;
        for (int r = 0; r < R; ++r) {
            base[r] = select(top[r] == all(-kInfinity), all(0.0f), top[r]);
            if (first) {
                largest[r] = top[r];
                continue;
            }
            const vf shrink = exponential(largest[r] - base[r]);
            total[r] *= shrink;
            largest[r] = top[r];
            const vi changed = shrink != all(1.0f);
            for (int lane = 0; lane < W; ++lane) moved |= changed[lane] != 0;
            store(s.tile + r * W, shrink);
        }
        if (moved)
            for (int64_t d = 0; d < p.dim; ++d)
                for (int r = 0; r < R; ++r) {
                    float* out = s.result + (d * R + r) * W;
                    store(out, load(out) * load(s.tile + r * W));
                }
        for (int64_t c = 0; c < chunk.count; ++c) {
            float* scores = s.scores + c * p.block * rows;
            for (int64_t j = 0; j < p.block; ++j)
                for (int r = 0; r < R; ++r) {
                    float* x = scores + (j * R + r) * W;
                    vf probability = exponential(load(x) - base[r]);
                    total[r] += probability;
                    if (p.threshold) probability = kept(keys_of_rows[r], chunk.places[c] * p.block + j, p.threshold, probability);
                    store(x, probability);
                }
            accumulate<R>(s.result, scores, values + chunk.columns[c] * p.block * p.dim, p.block, p.dim);
        }
    }
    for (int r = 0; r < R; ++r) {
        const vi empty = total[r] == all(0.0f);
        store(s.tile + r * W, select(empty, all(0.0f), all(p.kept) / total[r]));
        store(sums + r * W, select(empty, all(-kInfinity), largest[r] + logarithm(total[r])));
    }
    for (int64_t d = 0; d < p.dim; ++d)
        for (int r = 0; r < R; ++r) {
            float* out = s.result + (d * R + r) * W;
            store(out, load(out) * load(s.tile + r * W));
        }
    transpose(at_row(p.output, p.output_stride, at), p.output_stride[2], s.result, rows, p.dim, rows);
}

// What a strip of backward computes.
enum class Wanted { kAll, kRows, kColumns };  // kRows: dQ and the scores' gradient; kColumns: what it adds to dK and dV

// Visit the blocks of the row from `entry` to `end`.
template <int R>
void backward_strip(const Problem& p, const Place& at, int64_t entry, int64_t end, Wanted wanted, Scratch& s) {
    constexpr int64_t rows = R * W;
    const int64_t pair = at.batch * p.heads + at.head, group = p.heads / p.kv_heads;
    const int64_t kv = (at.batch * p.kv_heads + at.head / group) * p.kv_length * p.dim;
    const float *query = at_row(p.query, p.query_stride, at), *output = at_row(p.output, p.output_stride, at);
    const float *gradient = at_row(p.gradient, p.gradient_stride, at), *sums = p.sums + pair * p.length + at.row;
    const float *keys = p.key + kv, *values = p.value + kv;
    float *key_gradient = p.key_gradient + kv, *value_gradient = p.value_gradient + kv;
    prefetch_next_rows<R>(p, at, p.query, p.query_stride);
    prefetch_next_rows<R>(p, at, p.output, p.output_stride);
    prefetch_next_rows<R>(p, at, p.gradient, p.gradient_stride);
    prefetch_next_blocks(p, at, end, {keys, values, key_gradient, value_gradient});
    pack<R>(s.lanes, query, p.query_stride[2], p.dim, p.scale);
    pack<R>(s.gradient_lanes, gradient, p.gradient_stride[2], p.dim, 1.0f);
    std::memset(s.result, 0, p.dim * rows * sizeof(float));
    float inner[rows], base_of[rows];
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < p.dim; d += W)  // with the scale, so that dK = dS^T Q needs none
            store(s.rows_of_query + r * p.dim + d, load(query + r * p.query_stride[2] + d) * all(p.scale));
        std::memcpy(s.rows_of_gradient + r * p.dim, gradient + r * p.gradient_stride[2], p.dim * sizeof(float));
        const float* out = output + r * p.output_stride[2];
        const float* grad = s.rows_of_gradient + r * p.dim;
        vf sum = all(0.0f);
        for (int64_t d = 0; d < p.dim; d += W) sum = fma(load(out + d), load(grad + d), sum);
        float one = 0.0f;
        for (int lane = 0; lane < W; ++lane) one += sum[lane];
        inner[r] = one;
        base_of[r] = sums[r] == -kInfinity ? kInfinity : sums[r];  // a row that sees nothing has probabilities of 0
    }
    vu keys_of_rows[R];
    if (p.threshold) row_keys<R>(keys_of_rows, at);
    Chunk chunk;
    while (next_chunk(chunk, p, at, entry, end))
        for (int64_t c = 0; c < chunk.count; ++c) {
            const int64_t place = chunk.places[c], offset = chunk.columns[c] * p.block * p.dim;
            score<R>(s.scores, keys + offset, p.block, p.dim, s.lanes);
            adjust<R>(s.scores, p, at, place, s.tile);
            score<R>(s.products, values + offset, p.block, p.dim, s.gradient_lanes);
            for (int64_t j = 0; j < p.block; ++j)
                for (int r = 0; r < R; ++r) {
                    float* x = s.scores + (j * R + r) * W;
                    float* y = s.products + (j * R + r) * W;
                    const vf probability = exponential(load(x) - load(base_of + r * W));
                    vf weight = probability, product = load(y);
                    if (p.threshold) {
                        const vf factor = kept(keys_of_rows[r], place * p.block + j, p.threshold, all(p.kept));
                        weight *= factor;
                        product *= factor;
                    }
                    store(x, weight);
                    store(y, probability * (product - load(inner + r * W)));
                }
            if (p.score_gradient && wanted != Wanted::kColumns) {
                const int64_t visited = chunk.entries[c] - p.starts[first_row(p, at.head)];
                float* to = p.score_gradient + ((pair * p.visited + visited) * p.block + at.row % p.block) * p.block;
                for (int64_t r = 0; r < rows; ++r)
                    for (int64_t j = 0; j < p.block; ++j) to[r * p.block + j] = s.products[j * rows + r];
            }
            if (wanted != Wanted::kColumns) accumulate<R>(s.result, s.products, keys + offset, p.block, p.dim);
            if (wanted == Wanted::kRows) continue;
            scatter<R>(value_gradient + offset, s.scores, s.rows_of_gradient, p.block, p.dim);
            scatter<R>(key_gradient + offset, s.products, s.rows_of_query, p.block, p.dim);
        }
    if (wanted == Wanted::kColumns) return;
    for (int64_t i = 0; i < p.dim * rows; i += W) store(s.result + i, load(s.result + i) * all(p.scale));
    transpose(p.query_gradient + (pair * p.length + at.row) * p.dim, p.dim, s.result, rows, p.dim, rows);
}

// Call `run(task, scratch)` for each task, on the problem's threads, which take `at_once` tasks at a time. Return whether memory
// ran out.
template <typename Run>
int each(const Problem& p, int64_t tasks, int at_once, const Run& run) {
    int failed = 0;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
    {
        Scratch scratch(p);
        if (!scratch.memory) {
#pragma omp atomic write
            failed = 1;
        } else {
#pragma omp for schedule(dynamic, at_once)
            for (int64_t task = 0; task < tasks; ++task) run(task, scratch);
        }
    }
    return failed;
}

template <int R>
int forward(const Problem& p) {
    constexpr int64_t rows = R * W;
    const int64_t strips = p.length / rows;
    return each(p, p.batches * p.heads * strips, 8, [&](int64_t task, Scratch& scratch) {
        const int64_t pair = task / strips;
        const Place at = place(p, pair / p.heads, pair % p.heads, (task % strips) * rows);
        const int64_t index = first_row(p, at.head) + at.row_block;
        forward_strip<R>(p, at, p.starts[index], p.starts[index + 1], scratch);
    });
}

// Backward of one (batch, key head) pair, as far as it is wanted, for the columns of blocks from `first` to `last`.
template <int R>
void backward_columns(const Problem& p, int64_t pair, int64_t first, int64_t last, Wanted wanted, Scratch& scratch) {
    constexpr int64_t rows = R * W;
    const int64_t group = p.heads / p.kv_heads, begin = (pair * p.kv_length + first * p.block) * p.dim;
    for (float* gradient : {p.key_gradient, p.value_gradient})
        std::memset(gradient + begin, 0, (last - first) * p.block * p.dim * sizeof(float));
    for (int64_t head = pair % p.kv_heads * group; head < (pair % p.kv_heads + 1) * group; ++head)
        for (int64_t row = 0; row < p.length; row += rows) {
            const int64_t index = first_row(p, head) + row / p.block;
            const int32_t *columns = p.columns + p.starts[index], *end = p.columns + p.starts[index + 1];
            const int32_t *from = std::lower_bound(columns, end, first), *to = std::lower_bound(from, end, last);
            if (from == to && wanted == Wanted::kColumns) continue;
            backward_strip<R>(p, place(p, pair / p.kv_heads, head, row), from - p.columns, to - p.columns, wanted, scratch);
        }
}

template <int R>
int backward(const Problem& p) {
    constexpr int64_t rows = R * W;
    const int64_t pairs = p.batches * p.kv_heads, columns = p.kv_length / p.block, strips = p.length / rows;
    if (pairs == 0) return 0;
    if (p.threads * 5 <= pairs * 7)  // products of one pass and of two
        return each(p, pairs, 1, [&](int64_t pair, Scratch& scratch) {
            backward_columns<R>(p, pair, 0, columns, Wanted::kAll, scratch);
        });
    const int64_t ranges = std::min(columns, 4 * p.threads / pairs);
    return each(p, pairs * ranges, 1, [&](int64_t task, Scratch& scratch) {
        const int64_t range = task % ranges;
        backward_columns<R>(p, task / ranges, columns * range / ranges, columns * (range + 1) / ranges, Wanted::kColumns, scratch);
    }) || each(p, p.batches * p.heads * strips, 8, [&](int64_t task, Scratch& scratch) {
        const int64_t pair = task / strips;
        const Place at = place(p, pair / p.heads, pair % p.heads, (task % strips) * rows);
        const int64_t index = first_row(p, at.head) + at.row_block;
        backward_strip<R>(p, at, p.starts[index], p.starts[index + 1], Wanted::kRows, scratch);
    });
}

// Request huge pages for a result that no one has written yet: faults of 4 KiB took a seventh of the time of 40,960 tokens. From
// 64 MiB on glibc gives an allocation a mapping of its own, which ends with it. A system without huge pages ignores the request.
void request_huge_pages(const float* memory, int64_t floats) {
#if defined(__linux__)
    constexpr uintptr_t page = 4096;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) & ~(page - 1);
    const uintptr_t end = reinterpret_cast<uintptr_t>(memory + floats) & ~(page - 1);
    if (floats * static_cast<int64_t>(sizeof(float)) >= kOwnMapping)
        madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Vectors of rows in a strip: as many as divide the block, at most 4.
int vectors(const Problem& p) {
    const int64_t count = p.block / W;
    return count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
}

}  // namespace

extern "C" {

int shoal_attention_version() { return 3; }

// Both return 0, or 1 where memory ran out.
int shoal_attention_forward(const Problem* problem) {
    const Problem& p = *problem;
    request_huge_pages(p.output, p.batches * p.heads * p.length * p.dim);
    switch (vectors(p)) {
        case 4: return forward<4>(p);
        case 2: return forward<2>(p);
        default: return forward<1>(p);
    }
}

int shoal_attention_backward(const Problem* problem) {
    const Problem& p = *problem;
    request_huge_pages(p.query_gradient, p.batches * p.heads * p.length * p.dim);
    for (const float* each : {p.key_gradient, p.value_gradient})
        request_huge_pages(each, p.batches * p.kv_heads * p.kv_length * p.dim);
    switch (vectors(p)) {
        case 4: return backward<4>(p);
        case 2: return backward<2>(p);
        default: return backward<1>(p);
    }
}

}  // extern "C"
