// Conversions between fp32 and 16-bit floats: round to nearest, ties to even; NaN stays NaN.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

enum Dtype { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kNone = 3 };

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint16_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline float from_float16(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    uint32_t rest = static_cast<uint32_t>(half & 0x7FFFu) << 13;
    uint32_t exponent = rest & 0x0F800000u;
    if (exponent == 0x0F800000u) return float_of(sign | (rest + 0x70000000u));  // infinity, NaN
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(half & 0x3FFu) * 0x1p-24f));
    return float_of(sign | (rest + 0x38000000u));
}

inline uint16_t to_float16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds beyond the largest
    if (rest < 0x38800000u) {                                               // subnormal: the addition rounds
        float shifted = float_of(rest) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3F000000u));
    }
    uint32_t rounded = rest + 0xFFFu + ((rest >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Convert `count` elements of `from`, from `start` on, to fp32, times `factor`.
inline void widen(float* to, const void* from, int dtype, int64_t start, int64_t count, float factor) {
    if (dtype == kFloat32) {
        const float* source = static_cast<const float*>(from) + start;
        for (int64_t i = 0; i < count; ++i) to[i] = source[i] * factor;
        return;
    }
    const uint16_t* source = static_cast<const uint16_t*>(from) + start;
    if (dtype == kBfloat16) {
        for (int64_t i = 0; i < count; ++i) to[i] = float_of(static_cast<uint32_t>(source[i]) << 16) * factor;
        return;
    }
    int64_t i = 0;
#if defined(__F16C__)
    const __m256 scale = _mm256_set1_ps(factor);
    for (; i + 8 <= count; i += 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
        _mm256_storeu_ps(to + i, _mm256_mul_ps(wide, scale));
    }
#endif
    for (; i < count; ++i) to[i] = from_float16(source[i]) * factor;
}

// Convert `count` fp32 elements, and write them to `to` from element `start` on.
inline void narrow(void* to, int dtype, const float* from, int64_t start, int64_t count) {
    if (dtype == kFloat32) {
        std::memcpy(static_cast<float*>(to) + start, from, count * sizeof(float));
        return;
    }
    uint16_t* target = static_cast<uint16_t*>(to) + start;
    if (dtype == kBfloat16) {
        for (int64_t i = 0; i < count; ++i) target[i] = to_bfloat16(from[i]);
        return;
    }
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), half);
    }
#endif
    for (; i < count; ++i) target[i] = to_float16(from[i]);
}

}  // namespace
