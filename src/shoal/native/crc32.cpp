// CRC-32 (the polynomial of zlib, gzip and PNG) by carry-less products, at memory bandwidth.
//
// A message is a polynomial over GF(2) whose first bit has the highest power; its CRC is the message times x^32, modulo P.
// Sixteen bytes S may be replaced by any S' that equals S modulo P. So the first 16 bytes of a message, times x^D modulo P,
// are added to the 16 bytes that stand D bits later, until 16 bytes are left ("folding": V. Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). Four lanes of 16 bytes are folded side by
// side, since the processor begins a product before the one before it has ended. The rest goes through a table of bytes.
//
// Bits are reflected, as in zlib: bit i of a word of n bits has the power n-1-i. The product of two such words of 64 bits,
// read as one of 128, is therefore theirs times x, and the constants hold one power less.

#include <cstdint>
#include <cstring>

#if defined(__PCLMUL__) && defined(__SSE4_1__)
#include <immintrin.h>
#define SHOAL_FOLDS 1
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320u;  // reflected, without x^32

constexpr uint32_t times_x(uint32_t value) { return (value >> 1) ^ (value & 1 ? kPolynomial : 0); }

struct Table {
    uint32_t of[256];
    constexpr Table() : of() {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; ++bit) value = times_x(value);
            of[byte] = value;
        }
    }
};

constexpr Table kTable;

inline uint32_t by_bytes(uint32_t crc, const unsigned char* bytes, int64_t size) {
    for (int64_t at = 0; at < size; ++at) crc = kTable.of[(crc ^ bytes[at]) & 255] ^ (crc >> 8);
    return crc;
}

#ifdef SHOAL_FOLDS

// x^power modulo P, as the upper half of a reflected word of 64 bits.
constexpr uint64_t power_of_x(int power) {
    uint32_t value = 0x80000000u;  // 1
    for (int at = 0; at < power; ++at) value = times_x(value);
    return static_cast<uint64_t>(value) << 32;
}

// The two factors that move 16 bytes by `distance` bits: of their first eight bytes, whose powers are 64 higher, and the others.
template <int distance>
inline __m128i factors() {
    constexpr uint64_t first = power_of_x(64 + distance - 1), others = power_of_x(distance - 1);
    return _mm_set_epi64x(static_cast<long long>(others), static_cast<long long>(first));
}

inline __m128i fold(__m128i bytes, __m128i factors, __m128i onto) {
    const __m128i first = _mm_clmulepi64_si128(bytes, factors, 0x00), others = _mm_clmulepi64_si128(bytes, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, others), onto);
}

inline __m128i read(const unsigned char* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }

uint32_t crc(uint32_t crc, const unsigned char* bytes, int64_t size) {
    if (size < 64) return by_bytes(crc, bytes, size);
    const __m128i by_four = factors<512>(), by_one = factors<128>();
    __m128i part[4];
    for (int lane = 0; lane < 4; ++lane) part[lane] = read(bytes + 16 * lane);
    part[0] = _mm_xor_si128(part[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
    int64_t at = 64;
    for (; at + 64 <= size; at += 64)
        for (int lane = 0; lane < 4; ++lane) part[lane] = fold(part[lane], by_four, read(bytes + at + 16 * lane));
    __m128i whole = part[0];
    for (int lane = 1; lane < 4; ++lane) whole = fold(whole, by_one, part[lane]);
    for (; at + 16 <= size; at += 16) whole = fold(whole, by_one, read(bytes + at));
    unsigned char rest[16];
    std::memcpy(rest, &whole, sizeof rest);
    return by_bytes(by_bytes(0, rest, sizeof rest), bytes + at, size - at);
}

#elif defined(__ARM_FEATURE_CRC32)

uint32_t crc(uint32_t crc, const unsigned char* bytes, int64_t size) {
    int64_t at = 0;
    for (; at + 8 <= size; at += 8) {
        uint64_t word;
        std::memcpy(&word, bytes + at, sizeof word);
        crc = __crc32d(crc, word);
    }
    return by_bytes(crc, bytes + at, size - at);
}

#else

uint32_t crc(uint32_t crc, const unsigned char* bytes, int64_t size) { return by_bytes(crc, bytes, size); }

#endif

}  // namespace

extern "C" int shoal_crc32_version() { return 1; }

// Whether this processor has instructions for it; zlib's tables are faster than the one here.
extern "C" int shoal_crc32_is_fast() {
#if defined(SHOAL_FOLDS) || defined(__ARM_FEATURE_CRC32)
    return 1;
#else
    return 0;
#endif
}

extern "C" uint32_t shoal_crc32(const unsigned char* bytes, int64_t size) { return ~crc(0xFFFFFFFFu, bytes, size); }
