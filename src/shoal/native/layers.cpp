// Passes of transformer layers over fp32 matrices (rows, columns): one read and one write of each element.
//
// Dropout is by a counter: element (row, column) is dropped if its hash of (seed, row, column) is below the threshold. The
// hash is that of shoal/attention/dropout.py for batch 0 and head 0. The loops have no dependence between elements, and the
// compiler vectorizes them for the processor that it builds for.

#include <cmath>
#include <cstdint>

namespace {

constexpr uint32_t kGolden = 0x9E3779B9u;
constexpr int64_t kMinPerThread = 1 << 15;  // elements below which another thread costs more than it saves

inline uint32_t mix(uint32_t h) {  // the finalizer of MurmurHash3: a bijection of 32 bits
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

inline int threads_for(int64_t elements, int threads) {
    const int64_t useful = elements / kMinPerThread;
    return useful < 1 ? 1 : (useful < threads ? static_cast<int>(useful) : threads);
}

template <bool kResidual>
inline void drop_row(const float* x, const float* residual, float* y, int64_t columns, uint32_t key, uint32_t threshold,
                     float kept) {
    for (int64_t column = 0; column < columns; ++column) {
        const uint32_t hash = mix(key + static_cast<uint32_t>(column) * kGolden);
        const float value = hash >= threshold ? x[column] * kept : 0.0f;
        y[column] = kResidual ? value + residual[column] : value;
    }
}

constexpr int64_t kLanes = 16;  // partial sums of a row, so that its reduction is vectorized; their order is fixed

template <class Term>
inline float sum_row(int64_t columns, Term term) {
    float lanes[kLanes] = {};
    int64_t column = 0;
    for (; column + kLanes <= columns; column += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(column + lane);
    }
    for (; column < columns; ++column) lanes[column % kLanes] += term(column);
    float sum = 0.0f;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    return sum;
}

}  // namespace

extern "C" {

int shoal_layers_version() { return 2; }

// y = x rate gain, rate = 1 / sqrt(mean(x^2) + eps); `rates` has one of each row.
void shoal_layers_rms_norm(const float* x, const float* gain, float* y, float* rates, int64_t rows, int64_t columns,
                           float eps, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * columns, threads)) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + row * columns;
        float* to = y + row * columns;
        const float squares = sum_row(columns, [=](int64_t column) { return from[column] * from[column]; });
        const float rate = 1.0f / std::sqrt(squares / static_cast<float>(columns) + eps);
        rates[row] = rate;
        for (int64_t column = 0; column < columns; ++column) to[column] = from[column] * rate * gain[column];
    }
}

// The gradient of x, and that of the gain in `parts` (parts, columns), zeros: each part sums a stretch of rows in order.
void shoal_layers_rms_norm_backward(const float* gradient, const float* x, const float* gain, const float* rates,
                                    float* of_x, float* of_gain, int64_t rows, int64_t columns, int64_t parts) {
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
        float* sums = of_gain + part * columns;
        for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
            const float *g = gradient + row * columns, *from = x + row * columns;
            float* to = of_x + row * columns;
            const float rate = rates[row];
            const float dot = sum_row(columns, [=](int64_t column) { return g[column] * gain[column] * from[column]; });
            const float along = dot * rate * rate * rate / static_cast<float>(columns);
            for (int64_t column = 0; column < columns; ++column) {
                to[column] = g[column] * gain[column] * rate - from[column] * along;
                sums[column] += g[column] * from[column] * rate;
            }
        }
    }
}

// Rotate pairs (i, i + half) of each row by the angle of its position, row % length; `sign` -1 rotates back.
void shoal_layers_rotary(const float* x, const float* cosines, const float* sines, float* y, int64_t rows, int64_t length,
                         int64_t half, float sign, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * half * 2, threads)) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *low = x + row * half * 2, *high = low + half;
        const float *c = cosines + row % length * half, *s = sines + row % length * half;
        float *to_low = y + row * half * 2, *to_high = to_low + half;
        for (int64_t i = 0; i < half; ++i) {
            to_low[i] = low[i] * c[i] - high[i] * (s[i] * sign);
            to_high[i] = high[i] * c[i] + low[i] * (s[i] * sign);
        }
    }
}

// y = dropout(x) [+ residual]; `residual` may be null, and `y` may be `x`.
void shoal_layers_dropout_add(const float* x, const float* residual, float* y, int64_t rows, int64_t columns, uint32_t low,
                              uint32_t high, uint32_t threshold, float kept, int threads) {
    const uint32_t stream = mix(low ^ mix(high ^ mix(1u)));
#pragma omp parallel for num_threads(threads_for(rows * columns, threads)) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const uint32_t key = mix(stream ^ mix(static_cast<uint32_t>(row) * kGolden + 1u));
        const int64_t start = row * columns;
        if (residual) {
            drop_row<true>(x + start, residual + start, y + start, columns, key, threshold, kept);
        } else {
            drop_row<false>(x + start, nullptr, y + start, columns, key, threshold, kept);
        }
    }
}

}  // extern "C"
