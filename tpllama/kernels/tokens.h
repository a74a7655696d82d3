// Number types, and rows of x as the kernels read them: quantized as torchao does it, or split into bytes.

#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../team.h"

#define INLINE inline __attribute__((always_inline))
#define IN_PLACE __attribute__((always_inline))  // of lambdas
#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma")))
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define AVX2
#endif

namespace {

struct BFloat16 { uint16_t bits; };
using Float16 = _Float16;
enum Type { FLOAT32, BFLOAT16, FLOAT16 };

INLINE Size up(Size count, Size multiple) { return (count + multiple - 1) / multiple * multiple; }

template <class To, class From> INLINE To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// ---- numbers

INLINE float widen(float x) { return x; }
INLINE float widen(Float16 x) { return float(x); }
INLINE float widen(BFloat16 x) { return same_bits<float>(uint32_t(x.bits) << 16); }

INLINE void round_to(float x, float *to) { *to = x; }
INLINE void round_to(float x, Float16 *to) { *to = Float16(x); }
INLINE void round_to(float x, BFloat16 *to) {
    auto bits = same_bits<uint32_t>(x);
    to->bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
template <class T> INLINE float rounded(float x) {
    T to;
    round_to(x, &to);
    return widen(to);
}

INLINE int32_t nearest(float x) { return int32_t(__builtin_lrintf(x)); }  // ties to even
INLINE int32_t limited(int32_t x) { return std::min(std::max(x, -128), 127); }
INLINE float larger(float a, float b) { return a != a || a > b ? a : b; }  // NaN stays

// ---- a row's range

// Bits of floats as integers of the same order, and back. NaN of either sign is beyond infinity: none is overlooked.
template <class Int> INLINE Int ordered(Int bits) {
    return bits ^ (bits >> (8 * sizeof(Int) - 1) & std::numeric_limits<Int>::max());
}

// A row's maximum, and minus its minimum.
template <class T> INLINE void extremes_of(const T *x, Size columns, T *high, T *minus_low) {
    using Int = std::conditional_t<sizeof(T) == 4, int32_t, int16_t>;
    constexpr Int lowest = std::numeric_limits<Int>::min();
    Int largest = lowest, smallest = std::numeric_limits<Int>::max();
    for (Size k = 0; k < columns; k++) {
        Int each = ordered(same_bits<Int>(x[k]));
        largest = std::max(largest, each), smallest = std::min(smallest, each);
    }
    *high = same_bits<T>(ordered(largest)), *minus_low = same_bits<T>(Int(ordered(smallest) ^ lowest));
}

template <class T> INLINE void extremes_of_rows(const void *x, Size rows, Size columns, void *to) {
    auto high = static_cast<T *>(to);
    for (Size m = 0; m < rows; m++)
        extremes_of(static_cast<const T *>(x) + m * columns, columns, high + m, high + rows + m);
}
INLINE void extremes_any(Type type, const void *x, Size rows, Size columns, void *to) {
    if (type == BFLOAT16) extremes_of_rows<BFloat16>(x, rows, columns, to);
    else if (type == FLOAT16) extremes_of_rows<Float16>(x, rows, columns, to);
    else extremes_of_rows<float>(x, rows, columns, to);
}

// ---- a row as bytes: x is scale * (q - zero)

struct Range { float high, minus_low; };
struct Mapping { float scale, inverse; int32_t zero; };

// Symmetric, for int8dq: the larger side of the range fills half of the 256 integers. It divides in x's type.
template <class T> INLINE Mapping symmetric(Range x) {
    float largest = larger(larger(x.high, x.minus_low), 0);
    float scale = larger(rounded<T>(largest / 127.5f), std::numeric_limits<float>::epsilon());
    return {scale, 1 / scale, 0};
}

// Asymmetric, for 8da4w: the range, with zero, fills the 256 integers. Each operation is rounded to x's type.
INLINE Mapping asymmetric(Range x) {
    using T = BFloat16;
    float minus_low = larger(x.minus_low, 0), width = rounded<T>(larger(x.high, 0) + minus_low);
    float scale = larger(rounded<T>(width / 255), std::numeric_limits<float>::min());
    return {scale, rounded<T>(1 / scale), limited(nearest(rounded<T>(minus_low / scale)) - 128)};
}

// For weights alone in integers: 127 * 65536 steps to the largest value, so that x keeps what float32 keeps beside it.
INLINE Mapping fine(Range x) {
    constexpr float steps = 127 << 16;
    float largest = larger(larger(x.high, x.minus_low), 1e-30f);
    if (!(largest <= std::numeric_limits<float>::max())) largest = std::numeric_limits<float>::quiet_NaN();
    return {largest / steps, steps / largest, 0};
}

template <class T> INLINE void quantize_plain(const T *x, Size columns, const Mapping &to, int8_t *q) {
    for (Size k = 0; k < columns; k++) q[k] = int8_t(limited(nearest(widen(x[k]) * to.inverse)));
}

#if defined(__x86_64__)
AVX512 INLINE __m512 widen16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
AVX512 INLINE __m512 load16(const float *x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
AVX512 INLINE __m512 load16(const Float16 *x, __mmask16 mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x));
}
AVX512 INLINE __m512 load16(const BFloat16 *x, __mmask16 mask) {
    return widen16(_mm256_maskz_loadu_epi16(mask, x));
}
AVX512 INLINE __m512 round16(__m512 x) { return widen16((__m256i)_mm512_cvtneps_pbh(x)); }
AVX512 INLINE __mmask16 first16(Size count) { return count >= 16 ? 0xFFFF : (1 << count) - 1; }
AVX512 INLINE __m512i limited16(__m512i x) {
    return _mm512_min_epi32(_mm512_max_epi32(x, _mm512_set1_epi32(-128)), _mm512_set1_epi32(127));
}
#endif
}  // namespace
