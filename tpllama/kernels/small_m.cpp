// y = x times the transpose of w, for few rows of x: what a step of decoding computes. Then all time goes into reading
// w once, so each kernel takes w as it lies in memory, row by row, and does little enough for each byte to keep up.
//
// Each row of x is summed in an order that does not depend on how many rows there are.
// Two implementations: AVX-512 (VNNI, BF16) by hand, and plain loops, compiled for AVX2 and for any processor.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#define INLINE inline __attribute__((always_inline))
#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,f16c,fma")))
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define AVX2
#endif

namespace {

using Size = std::ptrdiff_t;
struct BFloat16 { uint16_t bits; };
using Float16 = _Float16;
enum Type { FLOAT32, BFLOAT16, FLOAT16 };
enum Kind { PLAIN, INT8, FLOAT8, INT8_DYNAMIC, INT4, INT4_DYNAMIC };

constexpr int TILE = 4;      // outputs, and rows of x, that are summed at once
constexpr int AHEAD = 4096;  // bytes that are fetched ahead
constexpr int BLOCK = 128;   // columns of int4: 64 bytes, k in the low half of byte k, k + 64 in the high half

struct Job {
    Kind kind;
    Type type;                // of x and y
    Size rows, columns, outputs, first;
    const void *x;            // as the kernel reads it, [rows, x_stride]
    Size x_stride;
    const uint8_t *weight;    // [outputs, columns], rows without a gap
    const void *scale;        // of rows: float, or of the model's type; of groups: bfloat16 [outputs, groups]
    const BFloat16 *zero;     // of groups
    Size group, groups;
    const float *token_scale; // of dynamic kinds
    const int32_t *token_shift;
    const float *group_sums;  // of x, [rows, sums_stride], zero after the groups
    Size sums_stride;
    void *y;                  // [rows, outputs]
};

INLINE float widen(float x) { return x; }
INLINE float widen(Float16 x) { return float(x); }
INLINE float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

INLINE void round_to(float x, float *to) { *to = x; }
INLINE void round_to(float x, Float16 *to) { *to = Float16(x); }
INLINE void round_to(float x, BFloat16 *to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

INLINE void store(const Job &job, Size row, Size output, float value) {
    Size place = row * job.outputs + output;
    if (job.type == BFLOAT16) round_to(value, static_cast<BFloat16 *>(job.y) + place);
    else if (job.type == FLOAT16) round_to(value, static_cast<Float16 *>(job.y) + place);
    else round_to(value, static_cast<float *>(job.y) + place);
}

INLINE float row_scale(const Job &job, Size output) {
    if (job.kind == PLAIN) return 1;
    if (job.kind == INT8_DYNAMIC) return static_cast<const float *>(job.scale)[output];
    return widen(static_cast<const BFloat16 *>(job.scale)[output]);
}

INLINE Size up(Size count, Size multiple) { return (count + multiple - 1) / multiple * multiple; }

// ---- tokens to int8, as torchao does it

INLINE int32_t nearest(float x) { return int32_t(__builtin_lrintf(x)); }  // ties to even
INLINE int32_t limited(int32_t x) { return std::min(std::max(x, -128), 127); }

// Bits of floats as integers of the same order, and back. NaN of either sign is beyond infinity, so none is overlooked.
template <class Int> INLINE Int ordered(Int bits) { return bits ^ (bits >> (8 * sizeof(Int) - 1) & Int(~(Int(1) << (8 * sizeof(Int) - 1)))); }

// A token's maximum, and minus its minimum.
template <class T, class Int> INLINE void extremes_of(const T *x, Size columns, T *high, T *minus_low) {
    Int largest = std::numeric_limits<Int>::min(), smallest = std::numeric_limits<Int>::max();
    for (Size k = 0; k < columns; k++) {
        Int bits;
        std::memcpy(&bits, x + k, sizeof bits);
        largest = std::max(largest, ordered(bits));
        smallest = std::min(smallest, ordered(bits));
    }
    largest = ordered(largest), smallest = ordered(smallest) ^ Int(Int(1) << (8 * sizeof(Int) - 1));
    std::memcpy(high, &largest, sizeof largest);
    std::memcpy(minus_low, &smallest, sizeof smallest);
}

template <class T> INLINE float rounded(float x) {
    T to;
    round_to(x, &to);
    return widen(to);
}
INLINE float larger(float a, float b) { return a != a || a > b ? a : b; }  // NaN stays

struct Tokens {
    Type type;
    const void *x;         // [rows, columns]
    Size rows, columns;
    const void *extremes;  // [2, rows] of x's type, where ranks had to agree on them; or none
    int8_t *q;             // [rows, stride]
    Size stride;
    float *scale;
    int32_t *shift;        // what the kernel has to add, or to take from each integer
    int level;
};

// q of x, and their sum: x / scale, rounded and limited; the asymmetric ones in x's type, and unsigned as 8da4w's kernel
// wants them.
template <class T> INLINE int32_t quantize_plain(const T *x, Size columns, float inverse, int32_t zero, bool is_symmetric, int8_t *q) {
    int32_t sum = 0;
    for (Size k = 0; k < columns; k++) {
        float scaled = widen(x[k]) * inverse;
        int32_t value = is_symmetric ? nearest(scaled) : nearest(rounded<T>(float(nearest(rounded<T>(scaled)) + zero)));
        value = limited(value), sum += value;
        q[k] = int8_t(is_symmetric ? value : value + 128);
    }
    return sum;
}
#if defined(__x86_64__)
AVX512 INLINE __m512 round16(float, __m512 x) { return x; }
AVX512 INLINE __m512 round16(Float16, __m512 x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, 0)); }
AVX512 INLINE __m512 widen16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
AVX512 INLINE __m512 round16(BFloat16, __m512 x) { return widen16((__m256i)_mm512_cvtneps_pbh(x)); }
AVX512 INLINE __m512 load16(const float *x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
AVX512 INLINE __m512 load16(const Float16 *x, __mmask16 mask) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x)); }
AVX512 INLINE __m512 load16(const BFloat16 *x, __mmask16 mask) { return widen16(_mm256_maskz_loadu_epi16(mask, x)); }

template <class T> AVX512 int32_t quantize_avx512(const T *x, Size columns, float inverse, int32_t zero, bool is_symmetric, int8_t *q) {
    const __m512i low = _mm512_set1_epi32(-128), high = _mm512_set1_epi32(127), offset = _mm512_set1_epi32(is_symmetric ? 0 : 128);
    __m512i sum = _mm512_setzero_si512();
    for (Size k = 0; k < columns; k += 16) {
        __mmask16 mask = columns - k >= 16 ? 0xFFFF : (1 << (columns - k)) - 1;
        __m512 scaled = _mm512_mul_ps(load16(x + k, mask), _mm512_set1_ps(inverse));
        __m512i value = _mm512_cvtps_epi32(is_symmetric ? scaled : round16(T{}, scaled));
        if (!is_symmetric) {
            value = _mm512_add_epi32(value, _mm512_set1_epi32(zero));
            value = _mm512_cvtps_epi32(round16(T{}, _mm512_cvtepi32_ps(value)));
        }
        value = _mm512_maskz_min_epi32(mask, _mm512_max_epi32(value, low), high);
        sum = _mm512_add_epi32(sum, value);
        _mm_mask_storeu_epi8(q + k, mask, _mm512_cvtepi32_epi8(_mm512_add_epi32(value, offset)));
    }
    return _mm512_reduce_add_epi32(sum);
}
#endif

template <class T> INLINE int32_t quantize_values(const Tokens &t, Size m, float inverse, int32_t zero, bool is_symmetric) {
    auto x = static_cast<const T *>(t.x) + m * t.columns;
    int8_t *q = t.q + m * t.stride;
    std::memset(q + t.columns, 0, t.stride - t.columns);
#if defined(__x86_64__)
    if (t.level == 2) return quantize_avx512(x, t.columns, inverse, zero, is_symmetric, q);
#endif
    return quantize_plain(x, t.columns, inverse, zero, is_symmetric, q);
}

// Symmetric, for int8dq: the larger side of a token's range fills half of the 256 integers. It divides in x's type.
template <class T> INLINE void quantize_symmetric(const Tokens &t, Size m, float high, float minus_low) {
    float scale = larger(rounded<T>(larger(larger(high, minus_low), 0) / 127.5f), 1.1920928955078125e-07f);
    t.scale[m] = scale;
    t.shift[m] = -128 * quantize_values<T>(t, m, 1.0f / scale, 0, true);  // the kernel reads weights as unsigned, so 128 too large
}

// Asymmetric, for 8da4w: the range, with zero, fills the 256 integers. Each operation is rounded to x's type.
template <class T> INLINE void quantize_asymmetric(const Tokens &t, Size m, float high, float minus_low) {
    minus_low = larger(minus_low, 0);
    float smallest = t.type == FLOAT16 ? 6.103515625e-05f : 1.17549435e-38f;  // of normal numbers
    float scale = larger(rounded<T>(rounded<T>(larger(high, 0) + minus_low) / 255.0f), smallest);
    int32_t zero = limited(nearest(rounded<T>(minus_low / scale)) - 128);
    t.scale[m] = scale, t.shift[m] = zero + 128;
    quantize_values<T>(t, m, rounded<T>(1.0f / scale), zero, false);
}

template <class T, class Int> INLINE void quantize_rows(const Tokens &t, bool is_symmetric) {
    for (Size m = 0; m < t.rows; m++) {
        T range[2];
        if (t.extremes) for (int i = 0; i < 2; i++) range[i] = static_cast<const T *>(t.extremes)[i * t.rows + m];
        else extremes_of<T, Int>(static_cast<const T *>(t.x) + m * t.columns, t.columns, range, range + 1);
        if (is_symmetric) quantize_symmetric<T>(t, m, widen(range[0]), widen(range[1]));
        else quantize_asymmetric<T>(t, m, widen(range[0]), widen(range[1]));
    }
}
INLINE void quantize_any(const Tokens &t, bool is_symmetric) {
    if (t.type == BFLOAT16) quantize_rows<BFloat16, int16_t>(t, is_symmetric);
    else if (t.type == FLOAT16) quantize_rows<Float16, int16_t>(t, is_symmetric);
    else quantize_rows<float, int32_t>(t, is_symmetric);
}
// Sums of x over each group; padding has none.
template <class Value> INLINE void add_groups(const Job &job, Value value, float *sums) {
    for (Size m = 0; m < job.rows; m++)
        for (Size g = 0; g < job.sums_stride; g++) {
            float lanes[8] = {}, sum = 0;
            for (Size k = g * job.group; g < job.groups && k < (g + 1) * job.group; k += 8)
                for (Size i = 0; i < 8; i++) lanes[i] += value(m, k + i);
            for (float each : lanes) sum += each;
            sums[m * job.sums_stride + g] = sum;
        }
}

// x as the kernel of a kind reads it.
INLINE void prepare_any(const Job &job, const Tokens &t, float *sums) {
    if (job.kind != INT4) quantize_any(t, job.kind == INT8_DYNAMIC);
    if (job.kind == INT4_DYNAMIC)
        add_groups(job, [&](Size m, Size k) { return float(int(uint8_t(t.q[m * t.stride + k])) - t.shift[m]); }, sums);
    if (job.kind != INT4) return;
    auto x = static_cast<const BFloat16 *>(t.x);
    for (Size m = 0; m < job.rows; m++)
        for (Size k = 0; k < t.stride; k += 64) {  // even and odd elements apart, as the words of a block have them
            BFloat16 part[64] = {};
            std::memcpy(part, x + m * t.columns + k, 2 * std::max(std::min(t.columns - k, Size(64)), Size(0)));
            auto to = reinterpret_cast<BFloat16 *>(t.q) + m * t.stride + k;
            for (int i = 0; i < 32; i++) to[i] = part[2 * i], to[i + 32] = part[2 * i + 1];
        }
    add_groups(job, [&](Size m, Size k) { return widen(x[m * t.columns + k]); }, sums);
}

template <class T, class Int> INLINE void extremes_rows(const void *x, Size rows, Size columns, void *to) {
    T *high = static_cast<T *>(to);
    for (Size m = 0; m < rows; m++)
        extremes_of<T, Int>(static_cast<const T *>(x) + m * columns, columns, high + m, high + rows + m);
}
INLINE void extremes_any(Type type, const void *x, Size rows, Size columns, void *to) {
    if (type == BFLOAT16) extremes_rows<BFloat16, int16_t>(x, rows, columns, to);
    else if (type == FLOAT16) extremes_rows<Float16, int16_t>(x, rows, columns, to);
    else extremes_rows<float, int32_t>(x, rows, columns, to);
}

// ---- plain loops

INLINE float float8(uint8_t w) {  // e4m3fn without NaN
    int exponent = w >> 3 & 15, mantissa = w & 7;
    float value = exponent ? (8 + mantissa) * float(1 << exponent) / 1024 : mantissa / 512.0f;
    return w & 128 ? -value : value;
}

template <Kind kind> INLINE float weight_at(const Job &job, Size output, Size k) {
    if (kind == PLAIN) return widen(reinterpret_cast<const BFloat16 *>(job.weight)[output * job.columns + k]);
    uint8_t byte = job.weight[output * job.columns + k];
    return kind == FLOAT8 ? float8(byte) : float(int8_t(byte));
}

template <Kind kind> INLINE void plain_floats(const Job &job, Size begin, Size end) {
    constexpr Size lanes = 16;
    for (Size n = begin; n < end; n++)
        for (Size m = 0; m < job.rows; m++) {
            auto x = static_cast<const BFloat16 *>(job.x) + m * job.x_stride;
            float sums[lanes] = {}, sum = 0;
            Size k = 0;
            for (; k + lanes <= job.columns; k += lanes)
                for (Size i = 0; i < lanes; i++) sums[i] += weight_at<kind>(job, n, k + i) * widen(x[k + i]);
            for (; k < job.columns; k++) sum += weight_at<kind>(job, n, k) * widen(x[k]);
            for (float each : sums) sum += each;
            store(job, m, n, sum * row_scale(job, n));
        }
}

INLINE void plain_integers(const Job &job, Size begin, Size end) {
    for (Size n = begin; n < end; n++)
        for (Size m = 0; m < job.rows; m++) {
            auto x = static_cast<const int8_t *>(job.x) + m * job.x_stride;
            auto w = reinterpret_cast<const int8_t *>(job.weight) + n * job.columns;
            int32_t sum = 0;
            for (Size k = 0; k < job.columns; k++) sum += int32_t(w[k]) * x[k];
            store(job, m, n, float(sum) * job.token_scale[m] * row_scale(job, n));
        }
}

INLINE void plain_any(const Job &job, Size begin, Size end) {
    if (job.kind == PLAIN) plain_floats<PLAIN>(job, begin, end);
    else if (job.kind == INT8) plain_floats<INT8>(job, begin, end);
    else if (job.kind == FLOAT8) plain_floats<FLOAT8>(job, begin, end);
    else plain_integers(job, begin, end);
}

void plain(const Job &job, Size begin, Size end) { plain_any(job, begin, end); }
void prepare_plain(const Job &job, const Tokens &tokens, float *sums) { prepare_any(job, tokens, sums); }
void extremes_plain(Type type, const void *x, Size rows, Size columns, void *to) { extremes_any(type, x, rows, columns, to); }
AVX2 void plain_avx2(const Job &job, Size begin, Size end) { plain_any(job, begin, end); }
AVX2 void prepare_avx2(const Job &job, const Tokens &tokens, float *sums) { prepare_any(job, tokens, sums); }
AVX2 void extremes_avx2(Type type, const void *x, Size rows, Size columns, void *to) { extremes_any(type, x, rows, columns, to); }

// ---- AVX-512

#if defined(__x86_64__)
AVX512 void prepare_avx512(const Job &job, const Tokens &tokens, float *sums) { prepare_any(job, tokens, sums); }

// The first `count` of 32 or 64 elements; memory after them is not touched.
AVX512 INLINE __mmask32 first32(Size count) { return count >= 32 ? ~0u : (1u << count) - 1; }
AVX512 INLINE __mmask64 first64(Size count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

// Sums of the lanes of four registers.
AVX512 INLINE __m128i sums_of(const __m512i *a) {
    __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
AVX512 INLINE __m128 sums_of(const __m512 *a) {
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512d l = _mm512_castps_pd(low), h = _mm512_castps_pd(high);
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, h)), _mm512_castpd_ps(_mm512_unpackhi_pd(l, h)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// 32 weights as bfloat16, exactly.
template <Kind kind> AVX512 INLINE __m512bh load32(const uint8_t *w, Size k, __mmask32 mask) {
    if constexpr (kind == PLAIN) return (__m512bh)_mm512_maskz_loadu_epi16(mask, w + 2 * k);
    __m256i bytes = _mm256_maskz_loadu_epi8(mask, w + k);
    if constexpr (kind == INT8) {
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
        return _mm512_cvtne2ps_pbh(high, low);
    } else {  // by way of float16, whose exponents count from 8 lower
        __m512i wide = _mm512_cvtepi8_epi16(bytes);
        wide = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(short(0xBF80)));
        __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(wide));
        __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(wide, 1));
        return _mm512_cvtne2ps_pbh(high, low);
    }
}

// Rows of four outputs; the last ones again where there are fewer.
AVX512 INLINE void four_rows(const Job &job, Size n, Size row_bytes, const uint8_t **w) {
    for (int r = 0; r < TILE; r++) w[r] = job.weight + std::min(n + r, job.outputs - 1) * row_bytes;
}
AVX512 INLINE __m128 scales_of_four(const Job &job, Size n, __mmask8 mask) {
    if (job.kind == INT8_DYNAMIC) return _mm_maskz_loadu_ps(mask, static_cast<const float *>(job.scale) + n);
    __m128i halves = _mm_maskz_loadu_epi16(mask, static_cast<const BFloat16 *>(job.scale) + n);
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
}
// Rounds as `store` does; the processor's own instruction for bfloat16 would make zeros of the smallest values.
AVX512 INLINE void store_four(const Job &job, Size m, Size n, __mmask8 mask, __m128 values) {
    Size place = m * job.outputs + n;
    if (job.type == FLOAT32) return _mm_mask_storeu_ps(static_cast<float *>(job.y) + place, mask, values);
    __m128i bits = _mm_castps_si128(values);
    if (job.type == FLOAT16) bits = _mm_cvtps_ph(values, 0);
    else {
        __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
        __m128i rounded = _mm_srli_epi32(_mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7FFF)), odd), 16);
        __mmask8 is_nan = _mm_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        bits = _mm_cvtepi32_epi16(_mm_mask_mov_epi32(rounded, is_nan, _mm_set1_epi32(0x7FC0)));
    }
    _mm_mask_storeu_epi16(static_cast<uint16_t *>(job.y) + place, mask, bits);
}

// One step of k for four outputs and M tokens.
template <Kind kind, int M>
AVX512 INLINE void add32(const uint8_t *const *w, const BFloat16 *x, Size stride, Size k, __mmask32 mask, __m512 (*sums)[TILE]) {
    __m512bh xs[M];
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++) xs[i] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + i * stride + k);
    #pragma GCC unroll 4
    for (int r = 0; r < TILE; r++) {
        __m512bh ws = load32<kind>(w[r], k, mask);
        #pragma GCC unroll 4
        for (int i = 0; i < M; i++) sums[i][r] = _mm512_dpbf16_ps(sums[i][r], ws, xs[i]);
    }
}

template <Kind kind, int M> AVX512 INLINE void floats_tile(const Job &job, Size m, Size n, Size end) {
    constexpr Size bytes = kind == PLAIN ? 2 : 1;
    const uint8_t *w[TILE];
    four_rows(job, n, job.columns * bytes, w);
    Size ahead = TILE * job.columns * bytes;  // the same place of the next tile
    auto x = static_cast<const BFloat16 *>(job.x) + m * job.x_stride;
    __m512 sums[M][TILE];
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++)
        #pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) sums[i][r] = _mm512_setzero_ps();
    Size k = 0;
    for (; k + 32 <= job.columns; k += 32) {
        if (bytes == 2 || k % 64 == 0)
            #pragma GCC unroll 4
            for (int r = 0; r < TILE; r++) __builtin_prefetch(w[0] + ahead + TILE * k * bytes + 64 * r);
        add32<kind, M>(w, x, job.x_stride, k, ~0u, sums);
    }
    if (k < job.columns) add32<kind, M>(w, x, job.x_stride, k, first32(job.columns - k), sums);
    __mmask8 mask = (1 << std::min(end - n, Size(TILE))) - 1;
    __m128 scale = kind == PLAIN ? _mm_set1_ps(1) : scales_of_four(job, n, mask);
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++) {
        __m128 sum = sums_of(sums[i]);
        if (kind == FLOAT8) sum = _mm_mul_ps(sum, _mm_set1_ps(256));
        store_four(job, m + i, n, mask, _mm_mul_ps(sum, scale));
    }
}

template <int M>
AVX512 INLINE void add64(const int8_t *const *w, const int8_t *x, Size stride, Size k, __mmask64 mask, __m512i (*sums)[TILE]) {
    __m512i xs[M];
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++) xs[i] = _mm512_load_si512(x + i * stride + k);
    #pragma GCC unroll 4
    for (int r = 0; r < TILE; r++) {  // the instruction multiplies unsigned by signed
        __m512i ws = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, w[r] + k), _mm512_set1_epi8(-128));
        #pragma GCC unroll 4
        for (int i = 0; i < M; i++) sums[i][r] = _mm512_dpbusd_epi32(sums[i][r], ws, xs[i]);
    }
}

template <Kind, int M> AVX512 INLINE void integers_tile(const Job &job, Size m, Size n, Size end) {
    const uint8_t *w[TILE];
    four_rows(job, n, job.columns, w);
    auto ws = reinterpret_cast<const int8_t *const *>(w);
    auto x = static_cast<const int8_t *>(job.x) + m * job.x_stride;
    Size ahead = TILE * job.columns;
    __m512i sums[M][TILE];
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++)
        #pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) sums[i][r] = _mm512_setzero_si512();
    Size k = 0;
    for (; k + 64 <= job.columns; k += 64) {
        #pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) __builtin_prefetch(w[0] + ahead + TILE * k + 64 * r);
        add64<M>(ws, x, job.x_stride, k, ~0ull, sums);
    }
    if (k < job.columns) add64<M>(ws, x, job.x_stride, k, first64(job.columns - k), sums);
    __mmask8 mask = (1 << std::min(end - n, Size(TILE))) - 1;
    __m128 scale = scales_of_four(job, n, mask);
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++) {
        __m128 sum = _mm_cvtepi32_ps(_mm_add_epi32(sums_of(sums[i]), _mm_set1_epi32(job.token_shift[m + i])));
        store_four(job, m + i, n, mask, _mm_mul_ps(_mm_mul_ps(sum, _mm_set1_ps(job.token_scale[m + i])), scale));
    }
}

// The scales of the groups of half a block: a lane has columns of one group only.
struct HalfScales { __m512 low, high; };
template <bool is_whole> AVX512 INLINE HalfScales half_scales(const BFloat16 *scales, Size k, int shift, Size groups) {
    if (is_whole) {
        __m512 one = _mm512_set1_ps(widen(scales[std::min(k >> shift, groups - 1)]));
        return {one, one};
    }
    Size first = k >> shift;
    int64_t bits = 0;
    if (first + 4 <= groups) std::memcpy(&bits, scales + first, 8);
    else for (Size i = groups - 1; i >= first; i--) bits = bits << 16 | scales[i].bits;
    __m512i four = _mm512_set1_epi64(bits);
    __m512i lanes = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, 0), next = lanes;  // which of the four, in 32 bits
    if (shift == 5) lanes = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1 << 16), 1), next = _mm512_add_epi32(lanes, _mm512_set1_epi32(2 << 16));
    if (shift == 6) next = _mm512_set1_epi32(1 << 16);
    constexpr __mmask32 upper = 0xAAAAAAAA;  // a bfloat16 is the upper half of a float
    return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, lanes, four)),
            _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, next, four))};
}

AVX512 INLINE __m512 add_zeros(const Job &job, Size m, Size n, __m512 total) {
    for (Size g = 0; g < job.groups; g += 16) {
        __mmask16 mask = job.groups - g >= 16 ? 0xFFFF : (1 << (job.groups - g)) - 1;
        __m256i zeros = _mm256_maskz_loadu_epi16(mask, job.zero + n * job.groups + g);
        __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(zeros), 16));
        total = _mm512_fmadd_ps(wide, _mm512_loadu_ps(job.group_sums + m * job.sums_stride + g), total);
    }
    return total;
}

// One block of a weight, unpacked.
template <Kind> struct Block;
template <> struct Block<INT4> {  // by values in bfloat16
    using X = __m512bh;
    using Sum = __m512;
    __m512bh w[4];
    AVX512 INLINE explicit Block(__m512i words) {
        const __m512i values = _mm512_set_epi16(  // 7 to -8 in bfloat16, twice, as five bits choose
            0x40E0, 0x40C0, 0x40A0, 0x4080, 0x4040, 0x4000, 0x3F80, 0, -0x4080, -0x4000, -0x3FC0, -0x3F80, -0x3F60,
            -0x3F40, -0x3F20, -0x3F00, 0x40E0, 0x40C0, 0x40A0, 0x4080, 0x4040, 0x4000, 0x3F80, 0, -0x4080, -0x4000,
            -0x3FC0, -0x3F80, -0x3F60, -0x3F40, -0x3F20, -0x3F00);
        w[0] = (__m512bh)_mm512_permutexvar_epi16(words, values);
        w[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), values);
        w[2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), values);
        w[3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), values);
    }
    AVX512 static INLINE Sum zero() { return _mm512_setzero_ps(); }
    AVX512 INLINE Sum low(Sum sum, const X *x) const { return _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum, w[0], x[0]), w[1], x[1]); }
    AVX512 INLINE Sum high(Sum sum, const X *x) const { return _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum, w[2], x[2]), w[3], x[3]); }
    AVX512 static INLINE __m512 as_float(Sum sum) { return sum; }
};
template <> struct Block<INT4_DYNAMIC> {  // by integers
    using X = __m512i;
    using Sum = __m512i;
    __m512i w[2];
    AVX512 INLINE explicit Block(__m512i bytes) {
        const __m512i nibble = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
        w[0] = _mm512_sub_epi8(_mm512_and_si512(bytes, nibble), eight);
        w[1] = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble), eight);
    }
    AVX512 static INLINE Sum zero() { return _mm512_setzero_si512(); }
    AVX512 INLINE Sum low(Sum sum, const X *x) const { return _mm512_dpbusd_epi32(sum, x[0], w[0]); }
    AVX512 INLINE Sum high(Sum sum, const X *x) const { return _mm512_dpbusd_epi32(sum, x[1], w[1]); }
    AVX512 static INLINE __m512 as_float(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

// R outputs of M tokens. is_whole: a group has at least a block, so that its halves need only one sum.
// x of the dynamic kind is unsigned here, too large by a token's shift, so that times the weights' sum is taken off.
template <Kind kind, int M, int R, bool is_whole>
AVX512 INLINE void groups_rows(const Job &job, Size m, Size n, int r, __m512 (*sums)[TILE]) {
    using B = Block<kind>;
    constexpr int own = kind == INT4_DYNAMIC;  // the weights' own sums, by ones for x
    const __m512i ones[2] = {_mm512_set1_epi8(1), _mm512_set1_epi8(1)};
    const int shift = __builtin_ctzll(job.group);  // a power of two
    const Size stride = job.x_stride, row_bytes = stride / 2;
    auto x = static_cast<const typename B::X *>(job.x) + m * stride / (sizeof(typename B::X) / (own ? 1 : 2));
    const uint8_t *w[R];
    const BFloat16 *scales[R];
    __m512 total[M + own][R], other[M + own][R];
    #pragma GCC unroll 9
    for (int i = 0; i < M + own; i++)
        #pragma GCC unroll 4
        for (int j = 0; j < R; j++) total[i][j] = other[i][j] = _mm512_setzero_ps();
    for (int j = 0; j < R; j++) {
        Size output = std::min(n + r + j, job.outputs - 1);
        w[j] = job.weight + output * row_bytes;
        scales[j] = static_cast<const BFloat16 *>(job.scale) + output * job.groups;
    }
    for (Size k = 0; k < stride; k += BLOCK) {
        auto block_x = x + k / (sizeof(typename B::X) / (own ? 1 : 2));
        #pragma GCC unroll 4
        for (int j = 0; j < R; j++) {
            __builtin_prefetch(w[0] + R * row_bytes + R * k / 2 + 64 * j + (R == 1 ? AHEAD : 0));
            B block(_mm512_loadu_si512(w[j] + k / 2));
            HalfScales scale = half_scales<is_whole>(scales[j], k, shift, job.groups);
            #pragma GCC unroll 9
            for (int i = 0; i < M + own; i++) {
                auto part = i == M ? (const typename B::X *)ones : block_x + i * (stride / (sizeof(typename B::X) / (own ? 1 : 2)));
                auto low = block.low(B::zero(), part), high = block.high(is_whole ? low : B::zero(), part);
                total[i][j] = _mm512_fmadd_ps(B::as_float(high), scale.high, total[i][j]);
                if (!is_whole) other[i][j] = _mm512_fmadd_ps(B::as_float(low), scale.low, other[i][j]);
            }
        }
    }
    #pragma GCC unroll 4
    for (int j = 0; j < R; j++)
        #pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            __m512 sum = _mm512_add_ps(total[i][j], other[i][j]);
            if (own) {
                __m512 weights = _mm512_add_ps(total[M + own - 1][j], other[M + own - 1][j]);
                sum = _mm512_fnmadd_ps(weights, _mm512_set1_ps(float(job.token_shift[m + i])), sum);
            }
            sums[i][r + j] = add_zeros(job, m + i, std::min(n + r + j, job.outputs - 1), sum);
        }
}

template <Kind kind, int M> AVX512 INLINE void groups_tile(const Job &job, Size m, Size n, Size end) {
    constexpr int R = M < 3 ? TILE / M : 1;
    __m512 sums[M][TILE];
    if (m == 0)  // what belongs to the groups of the next outputs
        for (Size byte = 0; byte < TILE * job.groups * 2; byte += 64) {
            Size ahead = (n + TILE) * job.groups * 2 + byte;
            __builtin_prefetch(static_cast<const uint8_t *>(job.scale) + ahead);
            __builtin_prefetch(reinterpret_cast<const uint8_t *>(job.zero) + ahead);
        }
    for (int r = 0; r < TILE; r += R)
        if (job.group >= BLOCK) groups_rows<kind, M, R, true>(job, m, n, r, sums);
        else groups_rows<kind, M, R, false>(job, m, n, r, sums);
    __mmask8 mask = (1 << std::min(end - n, Size(TILE))) - 1;
    for (int i = 0; i < M; i++) {
        __m128 sum = sums_of(sums[i]);
        if (kind == INT4_DYNAMIC) sum = _mm_mul_ps(sum, _mm_set1_ps(job.token_scale[m + i]));
        store_four(job, m + i, n, mask, sum);
    }
}

// All tokens of four outputs before the next four, so that weights are read from memory once. Int4 is dear to unpack,
// and so done for more tokens at once.
#define TILES(TILE_OF, KIND)                                                                \
    for (Size n = begin; n < end; n += TILE)                                                \
        for (Size m = 0, count; m < job.rows; m += count) {                                 \
            count = std::min(job.rows - m, Size(KIND >= INT4 ? 8 : 4));                     \
            if (count == 8) TILE_OF<KIND, KIND >= INT4 ? 8 : 4>(job, m, n, end);            \
            else if (count >= 4) TILE_OF<KIND, 4>(job, m, n, end), count = 4;               \
            else if (count == 3) TILE_OF<KIND, 3>(job, m, n, end);                          \
            else if (count == 2) TILE_OF<KIND, 2>(job, m, n, end);                          \
            else TILE_OF<KIND, 1>(job, m, n, end);                                          \
        }
// Outputs as bfloat16, for the library to multiply with many tokens: int4 with its scales and zeros, others without.
AVX512 void widen_int4(const Job &job, Size begin, Size end) {
    auto scales = static_cast<const BFloat16 *>(job.scale);
    for (Size n = begin; n < end; n++)
        for (Size k = 0; k < job.columns; k += 32) {
            auto w = job.weight + (n * job.x_stride + k / BLOCK * BLOCK) / 2 + k % 64;
            auto to = static_cast<BFloat16 *>(job.y) + (n - job.first) * job.columns + k;
            float scale = widen(scales[n * job.groups + k / job.group]), zero = widen(job.zero[n * job.groups + k / job.group]);
            int shift = k % BLOCK < 64 ? 0 : 4;
            for (int i = 0; i < 32; i++) round_to(float((w[i] >> shift & 15) - 8) * scale + zero, to + i);
        }
}
template <Kind kind> AVX512 INLINE void widen_bytes(const Job &job, Size begin, Size end) {
    const __m512 factor = _mm512_set1_ps(kind == FLOAT8 ? 256 : 1);
    for (Size n = begin; n < end; n++)
        for (Size k = 0; k < job.columns; k += 32) {
            __mmask32 mask = first32(job.columns - k);
            __m512i wide = (__m512i)load32<kind>(job.weight + n * job.columns, k, mask);
            if (kind == FLOAT8) {
                __m512 low = widen16(_mm512_castsi512_si256(wide)), high = widen16(_mm512_extracti64x4_epi64(wide, 1));
                wide = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, factor), _mm512_mul_ps(low, factor));
            }
            _mm512_mask_storeu_epi16(static_cast<BFloat16 *>(job.y) + (n - job.first) * job.columns + k, mask, wide);
        }
}
AVX512 void widen_avx512(const Job &job, Size begin, Size end) {
    if (job.kind == INT8) widen_bytes<INT8>(job, begin, end);
    else if (job.kind == FLOAT8) widen_bytes<FLOAT8>(job, begin, end);
    else widen_int4(job, begin, end);
}
AVX512 void plain_avx512(const Job &job, Size begin, Size end) { TILES(floats_tile, PLAIN) }
AVX512 void int8_avx512(const Job &job, Size begin, Size end) { TILES(floats_tile, INT8) }
AVX512 void float8_avx512(const Job &job, Size begin, Size end) { TILES(floats_tile, FLOAT8) }
AVX512 void int8_dynamic_avx512(const Job &job, Size begin, Size end) { TILES(integers_tile, INT8_DYNAMIC) }
AVX512 void int4_avx512(const Job &job, Size begin, Size end) { TILES(groups_tile, INT4) }
AVX512 void int4_dynamic_avx512(const Job &job, Size begin, Size end) { TILES(groups_tile, INT4_DYNAMIC) }
#endif

using Kernel = void (*)(const Job &, Size, Size);

Kernel kernel_of(Kind kind, int level) {
#if defined(__x86_64__)
    constexpr Kernel by_hand[] = {plain_avx512, int8_avx512, float8_avx512, int8_dynamic_avx512, int4_avx512, int4_dynamic_avx512};
    if (level == 2) return by_hand[kind];
    if (level == 1) return plain_avx2;
#endif
    return plain;
}

void prepare(const Job &job, const Tokens &tokens, float *sums, int level) {
#if defined(__x86_64__)
    if (level == 2) return prepare_avx512(job, tokens, sums);
    if (level == 1) return prepare_avx2(job, tokens, sums);
#endif
    prepare_plain(job, tokens, sums);
}

// Gives each thread neighbouring outputs.
void run(const Job &job, Kernel kernel, int threads) {
    Size tiles = (job.outputs - job.first + TILE - 1) / TILE;
    if (threads <= 1) return kernel(job, job.first, job.outputs);
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
        Size begin = tiles * t / threads * TILE, end = tiles * (t + 1) / threads * TILE;
        kernel(job, job.first + begin, std::min(job.first + end, job.outputs));
    }
}

struct Free { void operator()(void *memory) const { std::free(memory); } };
}  // namespace

extern "C" {

// What this processor has: 2 for AVX-512 with VNNI and BF16, 1 for AVX2, else 0.
int level() {
#if defined(__x86_64__)
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (wide && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

// Of each row of x [rows, columns]: its maximum, and minus its minimum, [2, rows] in its type.
void extremes(int level, int type, Size rows, Size columns, const void *x, void *to) {
#if defined(__x86_64__)
    if (level) return extremes_avx2(Type(type), x, rows, columns, to);
#endif
    extremes_plain(Type(type), x, rows, columns, to);
}

// x [rows, columns] and y [rows, outputs] without gaps; range: the extremes of x that ranks agreed on, or null.
// scale, zero, group: of the weight; what a kind doesn't have is null or 0.
void linear(int kind, int level, int type, Size rows, Size columns, Size outputs, const void *x, const uint8_t *weight,
            const void *scale, const void *zero, Size group, const void *range, void *y, int threads) {
    Job job{};
    job.kind = Kind(kind), job.type = Type(type), job.rows = rows, job.columns = columns, job.outputs = outputs;
    job.x = x, job.x_stride = columns, job.weight = weight, job.scale = scale, job.y = y;
    job.zero = static_cast<const BFloat16 *>(zero), job.group = group, job.groups = group ? columns / group : 0;
    std::unique_ptr<uint8_t, Free> scratch;
    if (kind >= INT8_DYNAMIC) {
        Size stride = up(columns, BLOCK), sums_stride = up(job.groups, 16);
        Size parts[] = {rows * stride * (kind == INT4 ? 2 : 1), up(rows * 4, 64), up(rows * 4, 64), rows * sums_stride * 4};
        scratch.reset(static_cast<uint8_t *>(std::aligned_alloc(64, parts[0] + parts[1] + parts[2] + parts[3])));
        uint8_t *at[] = {scratch.get(), at[0] + parts[0], at[1] + parts[1], at[2] + parts[2]};
        auto scales = reinterpret_cast<float *>(at[1]), sums = reinterpret_cast<float *>(at[3]);
        auto shifts = reinterpret_cast<int32_t *>(at[2]);
        Tokens tokens{Type(type), x, rows, columns, range, reinterpret_cast<int8_t *>(at[0]), stride, scales, shifts, level};
        job.x = at[0], job.x_stride = stride, job.token_scale = scales, job.token_shift = shifts;
        job.group_sums = sums, job.sums_stride = sums_stride;
        prepare(job, tokens, sums, level);
    }
    run(job, kernel_of(Kind(kind), level), threads);
}

// Outputs first to last of a weight as bfloat16, to [last - first, columns]. For level 2.
void widen_rows(int kind, Size first, Size last, Size columns, const uint8_t *weight, const void *scale, const void *zero,
                Size group, void *to, int threads) {
    Job job{};
    job.kind = Kind(kind), job.first = first, job.outputs = last, job.columns = columns, job.weight = weight;
    job.x_stride = up(columns, BLOCK), job.scale = scale, job.zero = static_cast<const BFloat16 *>(zero);
    job.group = group, job.groups = group ? columns / group : 0, job.y = to;
#if defined(__x86_64__)
    run(job, widen_avx512, threads);
#endif
}
}
