// Passes of transformer layers over fp32 matrices (rows, columns): one read and one write of each element.
//
// Dropout is by a counter: element (row, column) is dropped if its hash of (seed, row, column) is below the threshold. The
// hash is that of shoal/attention/dropout.py for batch 0 and head 0. The loops have no dependence between elements, and the
// compiler vectorizes them for the processor that it builds for.

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

}  // namespace

extern "C" {

int shoal_layers_version() { return 1; }

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
