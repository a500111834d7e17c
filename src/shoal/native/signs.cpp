// A flat vector as one bit an element and one scale a block, in one pass over memory.
//
// A block is read once: its magnitudes are added while it comes, and by the time that its scale is known it lies in the L1
// cache, where its signs and its rest are made. Blocks know nothing of each other, and within one the order of the sum is
// part of the format (signs/plain.py): the bits are the same however many threads work.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "rounding.h"

namespace {

constexpr int64_t kBlock = 2048;  // elements that share a scale
constexpr int64_t kGrain = 16;    // elements whose signs are one word; vectors are whole grains
constexpr int64_t kAhead = 2 * kBlock;
constexpr int64_t kHeader = 4;    // bytes of a scale
constexpr int64_t kAlignment = 16;
constexpr int64_t kWorthAThread = 1 << 15;  // elements below which a thread costs more than it brings

inline int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

// --- A grain in registers: its signs (bit j: whether element j >= 0), and a number with the signs that bits say. ---

#if defined(__AVX512F__)
using Grain = __m512;
inline Grain load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Grain grain) { _mm512_storeu_ps(x, grain); }
inline Grain sum(Grain a, Grain b) { return _mm512_add_ps(a, b); }
inline Grain less(Grain a, Grain b) { return _mm512_sub_ps(a, b); }
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
inline Grain sum(Grain a, Grain b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Grain less(Grain a, Grain b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
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
inline Grain sum(Grain a, const Grain& b) {
    for (int j = 0; j < kGrain; ++j) a.at[j] += b.at[j];
    return a;
}
inline Grain less(Grain a, const Grain& b) {
    for (int j = 0; j < kGrain; ++j) a.at[j] -= b.at[j];
    return a;
}
inline Grain magnitude(Grain x) {
    for (int j = 0; j < kGrain; ++j) x.at[j] = std::fabs(x.at[j]);
    return x;
}
inline uint16_t signs_of(const Grain& x) {
    unsigned found = 0;
    for (int j = 0; j < kGrain; ++j) found |= static_cast<unsigned>(x.at[j] >= 0.0f) << j;
    return static_cast<uint16_t>(found);
}
inline Grain signed_by(float step, uint16_t signs) {
    Grain grain;
    for (int j = 0; j < kGrain; ++j) grain.at[j] = float_of(bits_of(step) ^ (~unsigned{signs} >> j << 31));
    return grain;
}
#endif

// --- A block. ---

// The sum of the grains at x, x + width, x + 2 width, ... of a block: folded in the middle, and its halves added. All of it
// happens in registers, of which it takes eight.
template <int64_t width>
inline Grain folded(const float* x) {
    if constexpr (width == kBlock)
        return magnitude(load(x));
    else
        return sum(folded<2 * width>(x), folded<2 * width>(x + width));
}

// The mean magnitude of `count` elements, zeros behind them to the end of a block; NaN where they have no finite sum.
float scale_of(const float* x, int64_t count) {
    alignas(64) float sums[kGrain];
    store(sums, folded<kGrain>(x));
    for (int64_t width = kGrain / 2; width > 0; width /= 2)
        for (int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
    return std::isfinite(sums[0]) ? sums[0] / static_cast<float>(count) : float_of(0x7FC00000u);
}

// Ask the L2 cache for the line of an element that will be needed: a block is too short for the processor to see by itself
// where reading goes on, and twice as slow without. Further ahead, or in L1, it is slower again.
inline void ask_for(const float* x) { __builtin_prefetch(x, 0, 2); }

// Write the scale and the signs of the block that begins at element `start`, which is `x`. Its rest goes to `rest`, which
// may be `x` (null: nowhere). The block `ahead` is asked for meanwhile (null: none).
void encode(const float* x, float* rest, const float* ahead, int64_t start, int64_t count, int64_t n, uint8_t* packed) {
    const float scale = scale_of(x, count);
    std::memcpy(packed + start / kBlock * kHeader, &scale, sizeof scale);
    uint8_t* to = packed + blocks_of(n) * kHeader + start / 8;
    const bool finite = std::isfinite(scale);
    for (int64_t i = 0; i < count; i += kGrain) {
        if (ahead != nullptr) ask_for(ahead + i);
        const Grain grain = load(x + i);
        const uint16_t signs = signs_of(grain);
        std::memcpy(to + i / 8, &signs, sizeof signs);
        if (rest != nullptr && finite) store(rest + i, less(grain, signed_by(scale, signs)));
    }
    if (rest != nullptr && !finite) std::memset(rest, 0, count * sizeof(float));
}

void clear_padding(uint8_t* packed, int64_t n) {
    const int64_t used = blocks_of(n) * kHeader + n / 8;
    std::memset(packed + used, 0, (kAlignment - used % kAlignment) % kAlignment);
}

void pack_block(void* values, int dtype, int64_t start, int64_t count, int64_t n, uint8_t* packed) {
    alignas(64) float whole[kBlock];
    if (dtype == kFloat32 && count == kBlock) {
        float* x = static_cast<float*>(values) + start;
        encode(x, x, start + kAhead + kBlock <= n ? x + kAhead : nullptr, start, count, n, packed);
        return;
    }
    widen(whole, values, dtype, start, count, 1.0f);
    std::memset(whole + count, 0, (kBlock - count) * sizeof(float));
    encode(whole, whole, nullptr, start, count, n, packed);
    narrow(values, dtype, whole, start, count);
}

void pack_difference(const float* master, const void* weight, int dtype, int64_t start, int64_t count, int64_t n,
                     uint8_t* packed) {
    alignas(64) float whole[kBlock];
    const float* right = whole;
    if (dtype == kFloat32)
        right = static_cast<const float*>(weight) + start;
    else
        widen(whole, weight, dtype, start, count, 1.0f);
    const bool more = start + kAhead + kBlock <= n;
    for (int64_t i = 0; i < count; i += kGrain) {
        if (more) ask_for(master + start + kAhead + i);
        if (more && right != whole) ask_for(right + kAhead + i);
        store(whole + i, less(load(master + start + i), load(right + i)));
    }
    std::memset(whole + count, 0, (kBlock - count) * sizeof(float));
    encode(whole, nullptr, nullptr, start, count, n, packed);
}

void unpack_block(const uint8_t* packed, int64_t start, int64_t count, int64_t n, void* target, int dtype, float factor,
                  bool accumulate) {
    alignas(64) float whole[kBlock];
    float* x = dtype == kFloat32 ? static_cast<float*>(target) + start : whole;
    if (accumulate && dtype != kFloat32) widen(whole, target, dtype, start, count, 1.0f);
    float step;
    std::memcpy(&step, packed + start / kBlock * kHeader, sizeof step);
    step *= factor;
    const uint8_t* from = packed + blocks_of(n) * kHeader + start / 8;
    const bool more = dtype == kFloat32 && start + kAhead + kBlock <= n;
    for (int64_t i = 0; i < count; i += kGrain) {
        if (more) ask_for(x + kAhead + i);
        uint16_t signs;
        std::memcpy(&signs, from + i / 8, sizeof signs);
        const Grain sent = signed_by(step, signs);
        store(x + i, accumulate ? sum(load(x + i), sent) : sent);
    }
    if (dtype != kFloat32) narrow(target, dtype, whole, start, count);
}

template <typename Work>
void each_block(int64_t n, int threads, Work work) {
    const int64_t blocks = blocks_of(n);
    const bool parallel = threads > 1 && n >= 2 * kWorthAThread;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t start = block * kBlock;
        work(start, n - start < kBlock ? n - start : kBlock);
    }
}

}  // namespace

extern "C" {

// Which layout of arguments and bytes this library has; the caller asks before it calls.
int shoal_signs_version() { return 1; }

// Pack `n` elements of `dtype`, and leave the rest in their place.
void shoal_signs_pack(int64_t n, void* values, int dtype, uint8_t* packed, int threads) {
    clear_padding(packed, n);
    each_block(n, threads, [=](int64_t start, int64_t count) { pack_block(values, dtype, start, count, n, packed); });
}

// Pack `n` elements of `master - weight`.
void shoal_signs_difference(int64_t n, const float* master, const void* weight, int dtype, uint8_t* packed, int threads) {
    clear_padding(packed, n);
    each_block(n, threads, [=](int64_t start, int64_t count) {
        pack_difference(master, weight, dtype, start, count, n, packed);
    });
}

// Write, or add, `factor` times what was packed to the `n` elements of `target`.
void shoal_signs_unpack(int64_t n, const uint8_t* packed, void* target, int dtype, float factor, int accumulate,
                        int threads) {
    each_block(n, threads, [=](int64_t start, int64_t count) {
        unpack_block(packed, start, count, n, target, dtype, factor, accumulate != 0);
    });
}

}  // extern "C"
