// 1-bit packing of a flat vector: one sign bit an element and one scale a block, in one pass over memory.
//
// A block is read from memory once: the first loop sums its magnitudes; then its scale is known and the block is in the L1
// cache, where the second loop computes signs and residual. Blocks are independent, and the order of the sum within a block
// is part of the format (onebit/reference.py), so that the bits do not depend on the number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "rounding.h"

namespace {

constexpr int64_t kBlock = 2048;  // elements that share a scale
constexpr int64_t kGrain = 16;    // elements whose signs fill a 16-bit word; the length of a vector is a multiple of it
constexpr int64_t kPrefetch = 2 * kBlock;  // elements between the one in use and the one prefetched
constexpr int64_t kScaleBytes = 4;
constexpr int64_t kAlignment = 16;
constexpr int64_t kMinPerThread = 1 << 15;  // elements below which another thread costs more than it saves

inline int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

// --- A grain in registers: its signs (bit j: element j >= 0), and +-step by sign bits. ---

#if defined(__AVX512F__)
using Grain = __m512;
inline Grain load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Grain grain) { _mm512_storeu_ps(x, grain); }
inline Grain add(Grain a, Grain b) { return _mm512_add_ps(a, b); }
inline Grain subtract(Grain a, Grain b) { return _mm512_sub_ps(a, b); }
inline Grain magnitude(Grain x) { return _mm512_abs_ps(x); }
inline uint16_t signs_of(Grain x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ); }
inline Grain signed_by(float step, uint16_t signs) {
    return _mm512_mask_blend_ps(signs, _mm512_set1_ps(-step), _mm512_set1_ps(step));
}
#elif defined(__AVX2__)
struct Grain {
    __m256 low, high;
};
inline Grain load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline void store(float* x, Grain grain) {
    _mm256_storeu_ps(x, grain.low);
    _mm256_storeu_ps(x + 8, grain.high);
}
inline Grain add(Grain a, Grain b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Grain subtract(Grain a, Grain b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Grain magnitude(Grain x) { return {magnitude(x.low), magnitude(x.high)}; }
inline int signs_of(__m256 x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ)); }
inline uint16_t signs_of(Grain x) { return static_cast<uint16_t>(signs_of(x.low) | signs_of(x.high) << 8); }
inline __m256 signed_by(float step, int signs) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(signs), bits), bits);
    return _mm256_blendv_ps(_mm256_set1_ps(-step), _mm256_set1_ps(step), _mm256_castsi256_ps(set));
}
inline Grain signed_by(float step, uint16_t signs) { return {signed_by(step, int{signs}), signed_by(step, signs >> 8)}; }
#else
struct Grain {
    float at[kGrain];
};
inline Grain load(const float* x) {
    Grain grain;
    std::memcpy(grain.at, x, sizeof grain.at);
    return grain;
}
inline void store(float* x, const Grain& grain) { std::memcpy(x, grain.at, sizeof grain.at); }
inline Grain add(Grain a, const Grain& b) {
    for (int j = 0; j < kGrain; ++j) a.at[j] += b.at[j];
    return a;
}
inline Grain subtract(Grain a, const Grain& b) {
    for (int j = 0; j < kGrain; ++j) a.at[j] -= b.at[j];
    return a;
}
inline Grain magnitude(Grain x) {
    for (int j = 0; j < kGrain; ++j) x.at[j] = std::fabs(x.at[j]);
    return x;
}
inline uint16_t signs_of(const Grain& x) {
    unsigned bits = 0;
    for (int j = 0; j < kGrain; ++j) bits |= static_cast<unsigned>(x.at[j] >= 0.0f) << j;
    return static_cast<uint16_t>(bits);
}
inline Grain signed_by(float step, uint16_t signs) {
    Grain grain;
    for (int j = 0; j < kGrain; ++j) grain.at[j] = float_of(bits_of(step) ^ (~unsigned{signs} >> j << 31));
    return grain;
}
#endif

// --- A block. ---

// The sum of the magnitudes of the grains at x, x + width, x + 2 width, ... of a block: folded in the middle, its halves
// added. It needs eight registers and no memory.
template <int64_t width>
inline Grain folded(const float* x) {
    if constexpr (width == kBlock)
        return magnitude(load(x));
    else
        return add(folded<2 * width>(x), folded<2 * width>(x + width));
}

// The mean magnitude of `count` elements, followed by zeros to the end of the block; NaN if their sum is not finite.
float scale_of(const float* x, int64_t count) {
    alignas(64) float sums[kGrain];
    store(sums, folded<kGrain>(x));
    for (int64_t width = kGrain / 2; width > 0; width /= 2)
        for (int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
    return std::isfinite(sums[0]) ? sums[0] / static_cast<float>(count) : float_of(0x7FC00000u);
}

// Prefetch the line of an element into the L2 cache. A block is too short for the hardware prefetcher: without this,
// packing takes twice as long. Prefetching farther ahead, or into L1, is slower too.
inline void prefetch(const float* x) { __builtin_prefetch(x, 0, 2); }

// Write the scale and the signs of the block `x`, which begins at element `start`. The residual goes to `residual`, which
// may be `x` (null: nowhere). Meanwhile prefetch the block `next` (null: none).
void encode(const float* x, float* residual, const float* next, int64_t start, int64_t count, int64_t n, uint8_t* packed) {
    const float scale = scale_of(x, count);
    std::memcpy(packed + start / kBlock * kScaleBytes, &scale, sizeof scale);
    uint8_t* to = packed + blocks_of(n) * kScaleBytes + start / 8;
    const bool finite = std::isfinite(scale);
    for (int64_t i = 0; i < count; i += kGrain) {
        if (next != nullptr) prefetch(next + i);
        const Grain grain = load(x + i);
        const uint16_t signs = signs_of(grain);
        std::memcpy(to + i / 8, &signs, sizeof signs);
        if (residual != nullptr && finite) store(residual + i, subtract(grain, signed_by(scale, signs)));
    }
    if (residual != nullptr && !finite) std::memset(residual, 0, count * sizeof(float));
}

void clear_padding(uint8_t* packed, int64_t n) {
    const int64_t used = blocks_of(n) * kScaleBytes + n / 8;
    std::memset(packed + used, 0, (kAlignment - used % kAlignment) % kAlignment);
}

void pack_block(void* values, int dtype, int64_t start, int64_t count, int64_t n, uint8_t* packed) {
    alignas(64) float buffer[kBlock];
    if (dtype == kFloat32 && count == kBlock) {
        float* x = static_cast<float*>(values) + start;
        encode(x, x, start + kPrefetch + kBlock <= n ? x + kPrefetch : nullptr, start, count, n, packed);
        return;
    }
    widen(buffer, values, dtype, start, count, 1.0f);
    std::memset(buffer + count, 0, (kBlock - count) * sizeof(float));
    encode(buffer, buffer, nullptr, start, count, n, packed);
    narrow(values, dtype, buffer, start, count);
}

void pack_difference(const float* master, const void* weight, int dtype, int64_t start, int64_t count, int64_t n,
                     uint8_t* packed) {
    alignas(64) float buffer[kBlock];
    const float* right = buffer;
    if (dtype == kFloat32)
        right = static_cast<const float*>(weight) + start;
    else
        widen(buffer, weight, dtype, start, count, 1.0f);
    const bool prefetching = start + kPrefetch + kBlock <= n;
    for (int64_t i = 0; i < count; i += kGrain) {
        if (prefetching) prefetch(master + start + kPrefetch + i);
        if (prefetching && right != buffer) prefetch(right + kPrefetch + i);
        store(buffer + i, subtract(load(master + start + i), load(right + i)));
    }
    std::memset(buffer + count, 0, (kBlock - count) * sizeof(float));
    encode(buffer, nullptr, nullptr, start, count, n, packed);
}

void unpack_block(const uint8_t* packed, int64_t start, int64_t count, int64_t n, void* target, int dtype, float factor,
                  bool accumulate) {
    alignas(64) float buffer[kBlock];
    float* x = dtype == kFloat32 ? static_cast<float*>(target) + start : buffer;
    if (accumulate && dtype != kFloat32) widen(buffer, target, dtype, start, count, 1.0f);
    float step;
    std::memcpy(&step, packed + start / kBlock * kScaleBytes, sizeof step);
    step *= factor;
    const uint8_t* from = packed + blocks_of(n) * kScaleBytes + start / 8;
    const bool prefetching = dtype == kFloat32 && start + kPrefetch + kBlock <= n;
    for (int64_t i = 0; i < count; i += kGrain) {
        if (prefetching) prefetch(x + kPrefetch + i);
        uint16_t signs;
        std::memcpy(&signs, from + i / 8, sizeof signs);
        const Grain decoded = signed_by(step, signs);
        store(x + i, accumulate ? add(load(x + i), decoded) : decoded);
    }
    if (dtype != kFloat32) narrow(target, dtype, buffer, start, count);
}

template <typename Work>
void each_block(int64_t n, int threads, Work work) {
    const int64_t blocks = blocks_of(n);
    const bool parallel = threads > 1 && n >= 2 * kMinPerThread;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t start = block * kBlock;
        work(start, n - start < kBlock ? n - start : kBlock);
    }
}

}  // namespace

extern "C" {

// The version of arguments and format; the caller checks it before any call.
int shoal_onebit_version() { return 1; }

// Pack `n` elements of `dtype`, and replace them by the residual.
void shoal_onebit_pack(int64_t n, void* values, int dtype, uint8_t* packed, int threads) {
    clear_padding(packed, n);
    each_block(n, threads, [=](int64_t start, int64_t count) { pack_block(values, dtype, start, count, n, packed); });
}

// Pack `n` elements of `master - weight`.
void shoal_onebit_difference(int64_t n, const float* master, const void* weight, int dtype, uint8_t* packed, int threads) {
    clear_padding(packed, n);
    each_block(n, threads, [=](int64_t start, int64_t count) {
        pack_difference(master, weight, dtype, start, count, n, packed);
    });
}

// Write `factor` times the decoded vector to the `n` elements of `target`, or add it.
void shoal_onebit_unpack(int64_t n, const uint8_t* packed, void* target, int dtype, float factor, int accumulate,
                        int threads) {
    each_block(n, threads, [=](int64_t start, int64_t count) {
        unpack_block(packed, start, count, n, target, dtype, factor, accumulate != 0);
    });
}

}  // extern "C"
