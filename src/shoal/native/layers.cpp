// Passes of transformer layers over fp32 matrices (rows, columns): one read and one write of each element.
//
// Dropout is by a counter: element (row, column) is dropped if its hash of (seed, row, column) is below the threshold. The
// hash is that of shoal/attention/dropout.py for batch 0 and head 0. The loops have no dependence between elements, and the
// compiler vectorizes them for the processor that it builds for.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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

// e^x of x <= 0 to 2 units in the last place; 0 below -87, NaN of NaN (the polynomial of Cephes' expf).
inline float exponential(float x) {
    const float z = x < -87.0f ? -87.0f : x;
    const float shifted = z * 1.44269504088896f + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float n = shifted - 12582912.0f;
    const float r = z - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;  // the low bits of `shifted` are n
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

inline float sigmoid(float x) {
    const float small = exponential(-std::fabs(x));
    const float share = 1.0f / (1.0f + small);
    return x < 0.0f ? small * share : share;
}

struct Gelu {  // of one element
    float share;  // value / x
    float slope;  // the derivative
};

// x Phi(x): Phi by formula 7.1.26 of Abramowitz and Stegun, whose error is below 7.5e-8.
struct ExactGelu {
    Gelu operator()(float x) const {
        const float decay = exponential(-0.5f * x * x);
        const float t = 1.0f / (1.0f + 0.3275911f * 0.70710678118f * std::fabs(x));
        float tail = 1.061405429f;
        tail = tail * t - 1.453152027f;
        tail = tail * t + 1.421413741f;
        tail = tail * t - 0.284496736f;
        tail = tail * t + 0.254829592f;
        tail = 0.5f * tail * t * decay;
        const float share = x < 0.0f ? tail : 1.0f - tail;
        return {share, share + x * decay * 0.39894228040f};
    }
};

// x (1 + tanh(z)) / 2 = x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
struct TanhGelu {
    Gelu operator()(float x) const {
        const float square = x * x;
        const float share = sigmoid(1.5957691216f * x * (1.0f + 0.044715f * square));
        return {share, share + x * share * (1.0f - share) * 1.5957691216f * (1.0f + 0.134145f * square)};
    }
};

template <class Form>
void bias_gelu(const float* __restrict x, const float* __restrict bias, float* __restrict y, int64_t rows, int64_t columns,
               int threads, Form form) {
#pragma omp parallel for num_threads(threads_for(rows * columns, threads)) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float* __restrict from = x + row * columns;
        float* __restrict to = y + row * columns;
        for (int64_t column = 0; column < columns; ++column) {
            const float value = from[column] + bias[column];
            to[column] = value * form(value).share;
        }
    }
}

template <class Form>
void bias_gelu_backward(const float* __restrict gradient, const float* __restrict x, const float* __restrict bias,
                        float* __restrict of_x, float* __restrict of_bias, int64_t rows, int64_t columns, int64_t parts,
                        Form form) {
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
        float* __restrict sums = of_bias + part * columns;
        for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
            const float *__restrict given = gradient + row * columns, *__restrict from = x + row * columns;
            float* __restrict to = of_x + row * columns;
            for (int64_t column = 0; column < columns; ++column) {
                const float value = given[column] * form(from[column] + bias[column]).slope;
                to[column] = value;
                sums[column] += value;
            }
        }
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

inline float largest_of(const float* row, int64_t columns) {
    float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = -INFINITY;
    int64_t column = 0;
    for (; column + kLanes <= columns; column += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const float value = row[column + lane];
            lanes[lane] = value > lanes[lane] ? value : lanes[lane];
        }
    }
    float largest = -INFINITY;
    for (int64_t lane = 0; lane < kLanes; ++lane) largest = std::max(largest, lanes[lane]);
    for (; column < columns; ++column) largest = std::max(largest, row[column]);
    return largest;
}

}  // namespace

extern "C" {

int shoal_layers_version() { return 3; }

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

// y = silu(gate) up.
void shoal_layers_swiglu(const float* __restrict gate, const float* __restrict up, float* __restrict y, int64_t elements,
                         int threads) {
#pragma omp parallel for num_threads(threads_for(elements, threads)) schedule(static)
    for (int64_t i = 0; i < elements; ++i) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

void shoal_layers_swiglu_backward(const float* __restrict gradient, const float* __restrict gate,
                                  const float* __restrict up, float* __restrict of_gate, float* __restrict of_up,
                                  int64_t elements, int threads) {
#pragma omp parallel for num_threads(threads_for(elements, threads)) schedule(static)
    for (int64_t i = 0; i < elements; ++i) {
        const float share = sigmoid(gate[i]);
        of_up[i] = gradient[i] * gate[i] * share;
        of_gate[i] = gradient[i] * up[i] * share * (1.0f + gate[i] * (1.0f - share));
    }
}

// y = gelu(x + bias), exact or by tanh.
void shoal_layers_bias_gelu(const float* x, const float* bias, float* y, int64_t rows, int64_t columns, int tanh,
                            int threads) {
    if (tanh) {
        bias_gelu(x, bias, y, rows, columns, threads, TanhGelu());
    } else {
        bias_gelu(x, bias, y, rows, columns, threads, ExactGelu());
    }
}

// The gradient of x, and that of the bias in `of_bias` (parts, columns), zeros.
void shoal_layers_bias_gelu_backward(const float* gradient, const float* x, const float* bias, float* of_x, float* of_bias,
                                     int64_t rows, int64_t columns, int64_t parts, int tanh) {
    if (tanh) {
        bias_gelu_backward(gradient, x, bias, of_x, of_bias, rows, columns, parts, TanhGelu());
    } else {
        bias_gelu_backward(gradient, x, bias, of_x, of_bias, rows, columns, parts, ExactGelu());
    }
}

// h = dropout(x + bias) + residual, y = norm(h) gain + shift; `bias` may be null. h is written to `sums`, which may be y.
void shoal_layers_dropout_add_norm(const float* x, const float* bias, const float* residual, const float* gain,
                                   const float* shift, float* sums, float* y, float* means, float* rates, int64_t rows,
                                   int64_t columns, float eps, uint32_t low, uint32_t high, uint32_t threshold, float kept,
                                   int threads) {
    const uint32_t stream = mix(low ^ mix(high ^ mix(1u)));
    const float each = 1.0f / static_cast<float>(columns);
#pragma omp parallel for num_threads(threads_for(rows * columns, threads)) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t start = row * columns;
        const float *from = x + start, *other = residual + start;
        float *h = sums + start, *to = y + start;
        if (bias) {
            for (int64_t column = 0; column < columns; ++column) h[column] = from[column] + bias[column];
            from = h;
        }
        if (threshold) {
            const uint32_t key = mix(stream ^ mix(static_cast<uint32_t>(row) * kGolden + 1u));
            drop_row<true>(from, other, h, columns, key, threshold, kept);
        } else {
            for (int64_t column = 0; column < columns; ++column) h[column] = from[column] + other[column];
        }
        const float mean = sum_row(columns, [=](int64_t column) { return h[column]; }) * each;
        const float square = sum_row(columns, [=](int64_t column) { return (h[column] - mean) * (h[column] - mean); });
        const float rate = 1.0f / std::sqrt(square * each + eps);
        means[row] = mean;
        rates[row] = rate;
        for (int64_t column = 0; column < columns; ++column) {
            to[column] = (h[column] - mean) * rate * gain[column] + shift[column];
        }
    }
}

// The gradient of the residual, from that of y and, if not null, that of h; and of x, but where nothing is dropped: there
// `of_x` is null, and the two are one. `kept_rows` are those of h; or of y, with `means` null: then h follows from y.
// `partial` (parts, 3, columns), zeros, gets the gradients of gain, shift and bias.
void shoal_layers_dropout_add_norm_backward(const float* of_y, const float* of_h, const float* kept_rows, const float* means,
                                            const float* rates, const float* gain, const float* shift, float* of_residual,
                                            float* of_x, float* partial, int64_t rows, int64_t columns, uint32_t low,
                                            uint32_t high, uint32_t threshold, float kept, int64_t parts) {
    const uint32_t stream = mix(low ^ mix(high ^ mix(1u)));
    const float each = 1.0f / static_cast<float>(columns);
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
        float* __restrict of_gain = partial + part * 3 * columns;
        float* __restrict of_shift = of_gain + columns;
        float* __restrict of_bias = of_shift + columns;
        std::vector<float> scratch(static_cast<size_t>(columns));
        float* __restrict unit = scratch.data();  // the normalized row
        for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
            const int64_t start = row * columns;
            const float *__restrict g = of_y + start, *__restrict held = kept_rows + start;
            float* __restrict to = of_residual + start;
            const float rate = rates[row];
            if (means) {
                const float mean = means[row];
                for (int64_t column = 0; column < columns; ++column) unit[column] = (held[column] - mean) * rate;
            } else {
                for (int64_t column = 0; column < columns; ++column) {
                    unit[column] = (held[column] - shift[column]) / gain[column];
                }
            }
            const float along = each * sum_row(columns, [=](int64_t column) { return g[column] * gain[column]; });
            const float across = each * sum_row(columns, [=](int64_t column) {
                return g[column] * gain[column] * unit[column];
            });
            for (int64_t column = 0; column < columns; ++column) {
                of_gain[column] += g[column] * unit[column];
                of_shift[column] += g[column];
            }
            for (int64_t column = 0; column < columns; ++column) {
                to[column] = (g[column] * gain[column] - along - unit[column] * across) * rate;
            }
            if (of_h) {
                for (int64_t column = 0; column < columns; ++column) to[column] += of_h[start + column];
            }
            const float* __restrict kept_part = to;
            if (of_x) {
                const uint32_t key = mix(stream ^ mix(static_cast<uint32_t>(row) * kGolden + 1u));
                drop_row<false>(to, nullptr, of_x + start, columns, key, threshold, kept);
                kept_part = of_x + start;
            }
            for (int64_t column = 0; column < columns; ++column) of_bias[column] += kept_part[column];
        }
    }
}

// The cross entropy of each row of logits, and its logsumexp; 0 where the target is negative. With `scales`, one of each
// row, the logits are replaced by the gradient: a row is read and written once.
//   loss = z - (1 - smoothing) logits[target] - smoothing mean(logits) + z_loss z^2,   z = logsumexp(logits)
void shoal_layers_cross_entropy(float* logits, const int64_t* targets, const float* scales, float* losses, float* sums,
                                int64_t rows, int64_t columns, float smoothing, float z_loss, int threads) {
    const float each = smoothing / static_cast<float>(columns);
#pragma omp parallel for num_threads(threads_for(rows * columns, threads)) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        float* values = logits + row * columns;
        const int64_t target = targets[row];
        if (target < 0) {
            losses[row] = sums[row] = 0.0f;
            if (scales) std::fill(values, values + columns, 0.0f);
            continue;
        }
        const float own = values[target];
        const float mean = smoothing > 0.0f ? sum_row(columns, [=](int64_t column) { return values[column]; }) * each : 0.0f;
        const float largest = largest_of(values, columns);
        float total;
        if (scales) {
            for (int64_t column = 0; column < columns; ++column) values[column] = exponential(values[column] - largest);
            total = sum_row(columns, [=](int64_t column) { return values[column]; });
        } else {
            total = sum_row(columns, [=](int64_t column) { return exponential(values[column] - largest); });
        }
        const float z = largest + std::log(total);
        sums[row] = z;
        losses[row] = z - (1.0f - smoothing) * own - mean + z_loss * z * z;
        if (!scales) continue;
        const float factor = scales[row] * (1.0f + 2.0f * z_loss * z) / total, less = scales[row] * each;
        for (int64_t column = 0; column < columns; ++column) values[column] = values[column] * factor - less;
        values[target] -= scales[row] * (1.0f - smoothing);
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
