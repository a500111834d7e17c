// Fused optimizer steps of a flat slice: one pass over memory.
//
// For each element the kernel reads the gradient in 16 or 32 bits, multiplies it by `factor` (the clip coefficient over the
// loss scale), updates the fp32 master and moments in place, and writes the new weight in its own dtype. Every byte moves
// once; intermediate values stay in registers, or in a block that stays in the L1 cache.
//
// Elements are independent, except for the sums of squares of LAMB and the variance floor of 1-bit Adam. Multiplications
// and additions are fused only where the code says so (-ffp-contract=off). So the bits do not depend on the number of
// threads or on SIMD widths; nor, those two aside, on how the slice is cut into calls.

#include <cmath>
#include <cstdint>
#include <vector>

#include "rounding.h"

namespace {

constexpr int64_t kBlock = 1024;            // elements converted at a time: 4 KiB of L1
constexpr int64_t kLanes = 8;               // partial sums in fp64: a vector of AVX-512, two of AVX2
constexpr int64_t kMinPerThread = 1 << 15;  // elements below which another thread costs more than it saves

enum Rule { kAdam = 0, kAdamW = 1, kSgd = 2, kNesterov = 3, kAdagrad = 4, kLion = 5, kOneBitAdam = 6 };

// --- The update rules. `c` holds the constants of the step, `g` the gradient times the factor. ---

inline float first_moment(float m, float g, float into) { return m + into * (g - m); }

inline float second_moment(float v, float g, float keep, float into) { return keep * v + into * g * g; }

// c: 1 - beta1, beta2, 1 - beta2, step size, 1 / sqrt(bias correction 2), eps, decay
void adam(int64_t n, float* __restrict w, float* __restrict m, float* __restrict v, const float* __restrict g,
          const float* c, bool decoupled) {
    const float into_m = c[0], keep_v = c[1], into_v = c[2], size = c[3], root = c[4], eps = c[5], decay = c[6];
    for (int64_t i = 0; i < n; ++i) {
        float weight = decoupled ? w[i] * (1.0f - decay) : w[i];
        float gradient = decoupled ? g[i] : g[i] + decay * weight;
        float first = first_moment(m[i], gradient, into_m);
        float second = second_moment(v[i], gradient, keep_v, into_v);
        m[i] = first;
        v[i] = second;
        w[i] = weight - size * first / (std::sqrt(second) * root + eps);
    }
}

// Update the moments by a gradient that was reduced with 1-bit compression: `a` is the uncompressed one of its `addends`
// (optim/onebit.py). Null: all are uncompressed.
void update_moments(int64_t n, float* __restrict m, float* __restrict v, const float* __restrict g, const float* __restrict a,
          float addends, float into_m, float keep_v, float into_v) {
    if (a == nullptr) {
        for (int64_t i = 0; i < n; ++i) {
            m[i] = first_moment(m[i], g[i], into_m);
            v[i] = second_moment(v[i], g[i], keep_v, into_v);
        }
        return;
    }
    const float mean = 1.0f - 1.0f / addends;
    for (int64_t i = 0; i < n; ++i) {
        const float first = first_moment(m[i], g[i], into_m);
        m[i] = first;
        v[i] = keep_v * v[i] + into_v * (addends * a[i] * a[i] + mean * first * first);
    }
}

// The variance floor of a block: a fraction of its mean variance.
float variance_floor(int64_t n, const float* v, float fraction) {
    if (fraction == 0.0f) return 0.0f;
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += v[i + lane];
    for (int64_t lane = 0; i + lane < n; ++lane) lanes[lane] += v[i + lane];
    float sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    return fraction * sum / static_cast<float>(n);
}

inline float clamp_min(float value, float floor) { return value < floor ? floor : value; }  // NaN stays NaN

// AdamW by such gradients.
// c: those of AdamW, look-ahead (weight of the gradient in the momentum used by the update), addends of a gradient,
// fraction of the variance floor, and the factor on the squared gradient that initializes a variance of zero
void one_bit_adam(int64_t n, float* __restrict w, float* __restrict m, float* __restrict v, const float* __restrict g,
                  const float* a, const float* c) {
    const float size = c[3], root = c[4], eps = c[5], decay = c[6], look_ahead = c[7], initial = c[10];
    update_moments(n, m, v, g, a, c[8], c[0], c[1], c[2]);
    if (initial != 0.0f)
        for (int64_t i = 0; i < n; ++i) v[i] = v[i] == 0.0f ? initial * g[i] * g[i] : v[i];
    const float floor = variance_floor(n, v, c[9]);
    for (int64_t i = 0; i < n; ++i)
        w[i] = w[i] * (1.0f - decay)
             - size * first_moment(m[i], g[i], look_ahead) / (std::sqrt(clamp_min(v[i], floor)) * root + eps);
}

// SGD and Adagrad fuse a multiplication with an addition where torch's kernels do: SGD gives torch's bits, Adagrad nearly
// all of them.

// c: lr, momentum, 1 - dampening (1 at the first step, when the momentum is the gradient), decay
void sgd(int64_t n, float* __restrict w, float* __restrict m, const float* __restrict g, const float* c, bool nesterov) {
    const float lr = c[0], momentum = c[1], into = c[2], decay = c[3];
    if (m == nullptr) {
        for (int64_t i = 0; i < n; ++i) w[i] = __builtin_fmaf(__builtin_fmaf(w[i], decay, g[i]), -lr, w[i]);
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        float gradient = __builtin_fmaf(w[i], decay, g[i]);
        float mean = __builtin_fmaf(gradient, into, momentum * m[i]);
        m[i] = mean;
        w[i] = __builtin_fmaf(nesterov ? __builtin_fmaf(mean, momentum, gradient) : mean, -lr, w[i]);
    }
}

// c: lr of this step, eps, decay
void adagrad(int64_t n, float* __restrict w, float* __restrict sum, const float* __restrict g, const float* c) {
    const float lr = c[0], eps = c[1], decay = c[2];
    for (int64_t i = 0; i < n; ++i) {
        float gradient = __builtin_fmaf(w[i], decay, g[i]);
        float total = __builtin_fmaf(gradient, gradient, sum[i]);
        sum[i] = total;
        w[i] = w[i] + -lr * gradient / (std::sqrt(total) + eps);
    }
}

// c: lr, 1 - beta1, 1 - beta2, lr * decay
void lion(int64_t n, float* __restrict w, float* __restrict m, const float* __restrict g, const float* c) {
    const float lr = c[0], into_update = c[1], into_m = c[2], decay = c[3];
    for (int64_t i = 0; i < n; ++i) {
        float update = m[i] + into_update * (g[i] - m[i]);
        float sign = static_cast<float>((update > 0.0f) - (update < 0.0f));
        w[i] = w[i] * (1.0f - decay) - lr * sign;
        m[i] = m[i] + into_m * (g[i] - m[i]);
    }
}

// LAMB in two passes.
// c: 1 - beta1, beta2, 1 - beta2, bias corrections of the two moments, eps under the root, eps beside it, decay,
// look-ahead, and the fraction of the variance floor

inline float lamb_update(float w, float m, float v, const float* c) {
    return m * c[3] / (std::sqrt(v * c[4] + c[5]) + c[6]) + c[7] * w;
}

// Update the moments, and write the update to `u`, without look-ahead.
void lamb_advance(int64_t n, const float* __restrict w, float* __restrict m, float* __restrict v,
                  const float* __restrict g, const float* a, float addends, float* __restrict u, const float* c) {
    if (a == nullptr && c[9] == 0.0f) {  // one loop: the roots are computed while loads are under way
        const float k[8] = {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
        for (int64_t i = 0; i < n; ++i) {
            const float first = first_moment(m[i], g[i], k[0]), second = second_moment(v[i], g[i], k[1], k[2]);
            m[i] = first;
            v[i] = second;
            u[i] = lamb_update(w[i], first, second, k);
        }
        return;
    }
    update_moments(n, m, v, g, a, addends, c[0], c[1], c[2]);
    const float constants[8] = {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]}, floor = variance_floor(n, v, c[9]);
    for (int64_t i = 0; i < n; ++i) u[i] = lamb_update(w[i], m[i], clamp_min(v[i], floor), constants);
}

// `g` is the gradient that `lamb_advance` had; it is read only with look-ahead.
void lamb_apply(int64_t n, float* __restrict w, const float* __restrict m, const float* __restrict v,
                const float* __restrict g, const float* c, float length) {
    const float constants[8] = {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
    const float look_ahead = c[8], floor = variance_floor(n, v, c[9]);
    if (look_ahead == 0.0f) {
        for (int64_t i = 0; i < n; ++i) w[i] -= length * lamb_update(w[i], m[i], clamp_min(v[i], floor), constants);
        return;
    }
    for (int64_t i = 0; i < n; ++i)
        w[i] -= length * lamb_update(w[i], first_moment(m[i], g[i], look_ahead), clamp_min(v[i], floor), constants);
}

// The sum of squares: exact products, summed per lane, then over the lanes in order.
double squares(int64_t n, const float* x) {
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            double value = x[i + lane];
            lanes[lane] += value * value;
        }
    double sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
    return sum;
}

// A block of one stretch of a slice.
struct Block {
    int64_t stretch, start, count;
};

// Cut each stretch into blocks; stretch i ends at ends[i].
std::vector<Block> blocks_of(int64_t stretches, const int64_t* ends) {
    std::vector<Block> blocks;
    int64_t start = 0;
    for (int64_t stretch = 0; stretch < stretches; ++stretch)
        for (; start < ends[stretch]; start += blocks.back().count) {
            const int64_t left = ends[stretch] - start;
            blocks.push_back({stretch, start, left < kBlock ? left : kBlock});
        }
    return blocks;
}

bool run_parallel(int threads, const std::vector<Block>& blocks) {
    return threads > 1 && static_cast<int64_t>(blocks.size()) * kBlock >= 2 * kMinPerThread;
}

// Return `count` elements of the gradient from `start` on, in fp32 and times `factor`: in place, or in `converted`.
const float* scaled(float* converted, const void* g, int g_dtype, int64_t start, int64_t count, float factor) {
    if (g_dtype == kFloat32 && factor == 1.0f) return static_cast<const float*>(g) + start;
    widen(converted, g, g_dtype, start, count, factor);
    return converted;
}

void step_block(int rule, int64_t n, float* w, float* a, float* b, const float* g, const float* addend, const float* c) {
    switch (rule) {
        case kAdam: return adam(n, w, a, b, g, c, false);
        case kAdamW: return adam(n, w, a, b, g, c, true);
        case kSgd: return sgd(n, w, a, g, c, false);
        case kNesterov: return sgd(n, w, a, g, c, true);
        case kAdagrad: return adagrad(n, w, a, g, c);
        case kLion: return lion(n, w, a, g, c);
        case kOneBitAdam: return one_bit_adam(n, w, a, b, g, addend, c);
    }
}

}  // namespace

extern "C" {

// The version of the arguments; the caller checks it before any call.
int shoal_step_version() { return 5; }

// Step `n` elements of the master `w` with moments `a` and `b` (null where the rule has fewer), the gradient `g` of
// dtype `g_dtype` and the rule's constants `c`. `out`, of dtype `out_dtype`, receives the new weights (kNone: they are not
// written). `addend`, of the dtype of `g` or null, is the uncompressed addend that 1-bit rules need.
void shoal_step(int rule, int64_t n, float* w, float* a, float* b, const void* g, const void* addend, int g_dtype,
                float factor, void* out, int out_dtype, const float* c, int threads) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    const bool parallel = threads > 1 && n >= 2 * kMinPerThread;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t start = block * kBlock;
        const int64_t count = n - start < kBlock ? n - start : kBlock;
        float converted[kBlock], exact[kBlock];
        const float* gradient = scaled(converted, g, g_dtype, start, count, factor);
        if (addend != nullptr) widen(exact, addend, g_dtype, start, count, factor);
        step_block(rule, count, w + start, a == nullptr ? nullptr : a + start, b == nullptr ? nullptr : b + start,
                   gradient, addend == nullptr ? nullptr : exact, c);
        if (out_dtype != kNone) narrow(out, out_dtype, w + start, start, count);
    }
}

// LAMB's first pass over a slice of `stretches` consecutive stretches, one for each parameter: update the moments `m` and
// `v`, and write to `sums` each stretch's sums of squares of weight and update, whose bits do not depend on the number of
// threads. `addend`, if not null, is the uncompressed one of the gradient's `addends`.
void shoal_lamb_measure(int64_t stretches, const int64_t* ends, const float* w, float* m, float* v, const void* g,
                        const void* addend, float addends, int g_dtype, float factor, const float* c, double* sums,
                        int threads) {
    const std::vector<Block> blocks = blocks_of(stretches, ends);
    std::vector<double> squared(2 * blocks.size());
#pragma omp parallel for num_threads(threads) schedule(static) if (run_parallel(threads, blocks))
    for (int64_t at = 0; at < static_cast<int64_t>(blocks.size()); ++at) {
        const int64_t start = blocks[at].start, count = blocks[at].count;
        float converted[kBlock], exact[kBlock], update[kBlock];
        const float* gradient = scaled(converted, g, g_dtype, start, count, factor);
        if (addend != nullptr) widen(exact, addend, g_dtype, start, count, factor);
        lamb_advance(count, w + start, m + start, v + start, gradient, addend == nullptr ? nullptr : exact, addends,
                     update, c);
        squared[2 * at] = squares(count, w + start);
        squared[2 * at + 1] = squares(count, update);
    }
    for (int64_t i = 0; i < 2 * stretches; ++i) sums[i] = 0;
    for (size_t at = 0; at < blocks.size(); ++at) {
        sums[2 * blocks[at].stretch] += squared[2 * at];
        sums[2 * blocks[at].stretch + 1] += squared[2 * at + 1];
    }
}

// The second pass: subtract lengths[i] times the update from stretch i. `g` is null, or as in the first pass.
void shoal_lamb_apply(int64_t stretches, const int64_t* ends, float* w, const float* m, const float* v, const void* g,
                      int g_dtype, float factor, void* out, int out_dtype, const float* c, const float* lengths,
                      int threads) {
    const std::vector<Block> blocks = blocks_of(stretches, ends);
#pragma omp parallel for num_threads(threads) schedule(static) if (run_parallel(threads, blocks))
    for (int64_t at = 0; at < static_cast<int64_t>(blocks.size()); ++at) {
        const int64_t start = blocks[at].start, count = blocks[at].count;
        float converted[kBlock];
        const float* gradient = g == nullptr ? nullptr : scaled(converted, g, g_dtype, start, count, factor);
        lamb_apply(count, w + start, m + start, v + start, gradient, c, lengths[blocks[at].stretch]);
        if (out_dtype != kNone) narrow(out, out_dtype, w + start, start, count);
    }
}

}  // extern "C"
