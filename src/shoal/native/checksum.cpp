// A checksum of memory, as fast as memory.
//
// The memory is 64-bit words dealt to lanes. Each lane keeps the sum of its words and the sum of those sums (Fletcher),
// so that what it says depends on where a word stands; in the end the lanes, the bytes that fill no row, and the length
// are mixed. It finds accidents, not attacks, and lives as long as the process: no file holds it.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLanes = 16;  // 64-bit words a row: two vectors of AVX-512, four of AVX2

inline uint64_t mixed(uint64_t found, uint64_t value) {
    found = (found ^ value) * 0x9E3779B97F4A7C15u;  // odd, so that nothing is lost; golden ratio * 2^64
    return found ^ (found >> 29);
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
    uint64_t found = static_cast<uint64_t>(size);
    for (int64_t lane = 0; lane < kLanes; ++lane) found = mixed(mixed(found, sum[lane]), sums[lane]);
    for (int64_t at = rows * 8 * kLanes; at < size; ++at) found = mixed(found, bytes[at]);
    return found;
}
