// One optimizer step in one pass over memory.
//
// Each element of a flat slice: its gradient is read in 16 or 32 bits and multiplied by `factor` (one over the loss scale,
// times the clip coefficient), the fp32 master and moments change in place, and the new weight is written in 16 bits if
// the weights rest so. A byte moves once; what is computed is computed in registers and in a block that stays in the L1
// cache.
//
// Every element steps by itself and, but for LAMB's measure and the bound of 1-bit Adam, no sum runs over elements. No
// multiplication is fused with an addition but where it says so (-ffp-contract=off). So the result has the same bits however
// the slice is cut: into threads or vectors, and but for those two into calls.

#include <cmath>
#include <cstdint>
#include <vector>

#include "rounding.h"

namespace {

constexpr int64_t kBlock = 1024;          // elements converted at a time: 4 KiB of L1
constexpr int64_t kLanes = 8;             // partial sums in fp64: a vector of AVX-512, two of AVX2
constexpr int64_t kWorthAThread = 1 << 15;  // elements below which a thread costs more than it brings

enum Rule { kAdam = 0, kAdamW = 1, kSgd = 2, kNesterov = 3, kAdagrad = 4, kLion = 5, kOneBitAdam = 6 };

// --- The rules. `c` holds what is the same for all elements, `g` the gradient times the factor. ---

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

// The moments take a gradient that came as signs in part: one of its `addends`, `a`, is exact (onebit.py). Null: all are.
void take(int64_t n, float* __restrict m, float* __restrict v, const float* __restrict g, const float* __restrict a,
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

// What a variance of this block counts as at least: a fraction of their mean.
float least_of(int64_t n, const float* v, float fraction) {
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

inline float at_least(float least, float value) { return value < least ? least : value; }  // what is no number stays so

// AdamW by such gradients.
// c: those of AdamW, how far the momentum takes the gradient once more, the addends of a gradient, the fraction, and what
// part of its gradient's square a variance is that is nothing yet
void one_bit_adam(int64_t n, float* __restrict w, float* __restrict m, float* __restrict v, const float* __restrict g,
                  const float* a, const float* c) {
    const float size = c[3], root = c[4], eps = c[5], decay = c[6], again = c[7], fresh = c[10];
    take(n, m, v, g, a, c[8], c[0], c[1], c[2]);
    if (fresh != 0.0f)
        for (int64_t i = 0; i < n; ++i) v[i] = v[i] == 0.0f ? fresh * g[i] * g[i] : v[i];
    const float least = least_of(n, v, c[9]);
    for (int64_t i = 0; i < n; ++i)
        w[i] = w[i] * (1.0f - decay)
             - size * first_moment(m[i], g[i], again) / (std::sqrt(at_least(least, v[i])) * root + eps);
}

// These two round where torch's do, which adds a multiple in one rounding: SGD's bits are torch's, and nearly all of
// Adagrad's.

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

// LAMB in two sweeps.
// c: 1 - beta1, beta2, 1 - beta2, corrections of the two moments, eps under the root, eps beside it, decay, how far the
// momentum takes the gradient once more, and the fraction of its block's mean that a variance counts as at least

inline float lamb_update(float w, float m, float v, const float* c) {
    return m * c[3] / (std::sqrt(v * c[4] + c[5]) + c[6]) + c[7] * w;
}

// The moments take the gradient, and u the update, which the weights will make but for what the momentum takes once more.
void lamb_advance(int64_t n, const float* __restrict w, float* __restrict m, float* __restrict v,
                  const float* __restrict g, const float* a, float addends, float* __restrict u, const float* c) {
    if (a == nullptr && c[9] == 0.0f) {  // in one go: the roots are taken while memory is waited for
        const float k[8] = {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
        for (int64_t i = 0; i < n; ++i) {
            const float first = first_moment(m[i], g[i], k[0]), second = second_moment(v[i], g[i], k[1], k[2]);
            m[i] = first;
            v[i] = second;
            u[i] = lamb_update(w[i], first, second, k);
        }
        return;
    }
    take(n, m, v, g, a, addends, c[0], c[1], c[2]);
    const float constants[8] = {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]}, least = least_of(n, v, c[9]);
    for (int64_t i = 0; i < n; ++i) u[i] = lamb_update(w[i], m[i], at_least(least, v[i]), constants);
}

// `g` is the gradient that `lamb_advance` had; it is not read where the momentum does not take it once more.
void lamb_apply(int64_t n, float* __restrict w, const float* __restrict m, const float* __restrict v,
                const float* __restrict g, const float* c, float length) {
    const float constants[8] = {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]};
    const float again = c[8], least = least_of(n, v, c[9]);
    if (again == 0.0f) {
        for (int64_t i = 0; i < n; ++i) w[i] -= length * lamb_update(w[i], m[i], at_least(least, v[i]), constants);
        return;
    }
    for (int64_t i = 0; i < n; ++i)
        w[i] -= length * lamb_update(w[i], first_moment(m[i], g[i], again), at_least(least, v[i]), constants);
}

// The sum of squares: exact products, added in lanes and the lanes in order.
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

// Cut the stretches, of which each ends where `ends` says, into blocks that begin anew with each.
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

bool worth(int threads, const std::vector<Block>& blocks) {
    return threads > 1 && static_cast<int64_t>(blocks.size()) * kBlock >= 2 * kWorthAThread;
}

// Return `count` elements of the gradient from `start` on, in fp32 and times `factor`: where they are, or `converted`.
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

// Which layout of arguments this library has; the caller asks before it calls.
int shoal_step_version() { return 5; }

// Step `n` elements of the master `w` with moments `a` and `b` (null where the rule has fewer), the gradient `g` of
// dtype `g_dtype` and the rule's constants `c`. `out`, of dtype `out_dtype`, receives the new weights (kNone: nobody).
// `addend`, of the dtype of `g` or null, is what some rules want of the gradient beside it.
void shoal_step(int rule, int64_t n, float* w, float* a, float* b, const void* g, const void* addend, int g_dtype,
                float factor, void* out, int out_dtype, const float* c, int threads) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    const bool parallel = threads > 1 && n >= 2 * kWorthAThread;
#pragma omp parallel for num_threads(threads) schedule(static) if (parallel)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t start = block * kBlock;
        const int64_t count = n - start < kBlock ? n - start : kBlock;
        float converted[kBlock], beside[kBlock];
        const float* gradient = scaled(converted, g, g_dtype, start, count, factor);
        if (addend != nullptr) widen(beside, addend, g_dtype, start, count, factor);
        step_block(rule, count, w + start, a == nullptr ? nullptr : a + start, b == nullptr ? nullptr : b + start,
                   gradient, addend == nullptr ? nullptr : beside, c);
        if (out_dtype != kNone) narrow(out, out_dtype, w + start, start, count);
    }
}

// LAMB's first sweep over a slice that is so many stretches, the last of which ends the slice: the moments `m` and `v` take
// the gradient, of whose `addends` one, `addend`, may be exact, and `sums` receives for each stretch the sums of squares of
// the weight and of the update, which do not depend on the number of threads.
void shoal_lamb_measure(int64_t stretches, const int64_t* ends, const float* w, float* m, float* v, const void* g,
                        const void* addend, float addends, int g_dtype, float factor, const float* c, double* sums,
                        int threads) {
    const std::vector<Block> blocks = blocks_of(stretches, ends);
    std::vector<double> found(2 * blocks.size());
#pragma omp parallel for num_threads(threads) schedule(static) if (worth(threads, blocks))
    for (int64_t at = 0; at < static_cast<int64_t>(blocks.size()); ++at) {
        const int64_t start = blocks[at].start, count = blocks[at].count;
        float converted[kBlock], beside[kBlock], update[kBlock];
        const float* gradient = scaled(converted, g, g_dtype, start, count, factor);
        if (addend != nullptr) widen(beside, addend, g_dtype, start, count, factor);
        lamb_advance(count, w + start, m + start, v + start, gradient, addend == nullptr ? nullptr : beside, addends,
                     update, c);
        found[2 * at] = squares(count, w + start);
        found[2 * at + 1] = squares(count, update);
    }
    for (int64_t i = 0; i < 2 * stretches; ++i) sums[i] = 0;
    for (size_t at = 0; at < blocks.size(); ++at) {
        sums[2 * blocks[at].stretch] += found[2 * at];
        sums[2 * blocks[at].stretch + 1] += found[2 * at + 1];
    }
}

// The second sweep: each stretch changes by its own multiple, of `lengths`, of the update. `g` is null or as the first sweep
// had it.
void shoal_lamb_apply(int64_t stretches, const int64_t* ends, float* w, const float* m, const float* v, const void* g,
                      int g_dtype, float factor, void* out, int out_dtype, const float* c, const float* lengths,
                      int threads) {
    const std::vector<Block> blocks = blocks_of(stretches, ends);
#pragma omp parallel for num_threads(threads) schedule(static) if (worth(threads, blocks))
    for (int64_t at = 0; at < static_cast<int64_t>(blocks.size()); ++at) {
        const int64_t start = blocks[at].start, count = blocks[at].count;
        float converted[kBlock];
        const float* gradient = g == nullptr ? nullptr : scaled(converted, g, g_dtype, start, count, factor);
        lamb_apply(count, w + start, m + start, v + start, gradient, c, lengths[blocks[at].stretch]);
        if (out_dtype != kNone) narrow(out, out_dtype, w + start, start, count);
    }
}

}  // extern "C"
