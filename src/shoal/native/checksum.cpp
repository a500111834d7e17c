// A checksum at memory bandwidth.
//
// The block is read as 64-bit words dealt to lanes. Each lane keeps the sum of its words and the sum of those sums
// (Fletcher), so that the result depends on the position of a word; then the lanes, the bytes of an incomplete row, and the
// length are mixed. It detects accidents, not attacks. It is valid within the process only: no file stores it.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLanes = 16;  // 64-bit words a row: two vectors of AVX-512, four of AVX2

inline uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;  // golden ratio * 2^64; odd, so the product is a bijection
    return hash ^ (hash >> 29);
}

}  // namespace

extern "C" int shoal_checksum_version() { return 1; }

extern "C" uint64_t shoal_checksum(const unsigned char* bytes, int64_t size) {
    uint64_t sum[kLanes] = {}, sums[kLanes] = {};
    const int64_t rows = size / (8 * kLanes);
    for (int64_t row = 0; row < rows; ++row) {
        uint64_t words[kLanes];
        std::memcpy(words, bytes + row * 8 * kLanes, sizeof words);
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            sum[lane] += words[lane];
            sums[lane] += sum[lane];
        }
    }
    uint64_t hash = static_cast<uint64_t>(size);
    for (int64_t lane = 0; lane < kLanes; ++lane) hash = mix(mix(hash, sum[lane]), sums[lane]);
    for (int64_t at = rows * 8 * kLanes; at < size; ++at) hash = mix(hash, bytes[at]);
    return hash;
}
