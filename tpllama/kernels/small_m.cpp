// y = x times the transpose of w, for few rows of x: what a step of decoding computes. Then all time goes into reading
// w once. So each thread reads its outputs' weights as they lie in memory, one after another, has lines fetched well
// ahead, and does little enough for each to keep up.
//
// Weights in integers meet x in integers, too: an int8 or int24 of each value, as one to three signed bytes, so that
// one instruction (VNNI's vpdpbusd) takes 64 products of weights as they lie there, and sums are exact.
// Each row of x is summed in an order that does not depend on how many rows there are.
// Two implementations: AVX-512 (VNNI, BF16) by hand, and plain loops, compiled for AVX2 and for any processor.

#include <cstdlib>
#include <memory>

#include "tokens.h"

namespace {

enum Kind { PLAIN, INT8, FLOAT8, INT8_DYNAMIC, INT4, INT4_DYNAMIC };

constexpr int TILE = 4;      // outputs whose sums are stored at once, and most rows of x that are summed at once
constexpr int AHEAD = 4096;  // bytes that are fetched ahead
constexpr int BLOCK = 128;   // columns of int4: 64 bytes, k in the low half of byte k, k + 64 in the high half

struct Job {
    Kind kind;
    Type type;             // of x and y
    Size rows, columns, outputs, first;
    const void *x;         // as the kernel reads it: [rows, x_stride], or integers' bytes [rows, blocks, digits, BLOCK]
    Size x_stride;
    const uint8_t *weight; // [outputs, columns], rows without a gap
    const void *scale;     // of rows: float, or bfloat16; of groups: bfloat16 [outputs, groups]
    const BFloat16 *zero;  // of groups, or null
    Size group, groups;
    const float *x_scale;  // of integers
    const int32_t *shift;  // [rows, digits], what offset weights add to sums
    const float *sums;     // of x over groups [rows, sums_stride], zero after the groups
    Size sums_stride;
    void *y;               // [rows, outputs]
};

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

// x as kernels read it, before they do.
struct Prepared {
    const void *x;         // [rows, columns]
    const void *extremes;  // [2, rows] of x's type, where ranks had to agree on them; or none
    void *to;
    float *scale;
    int32_t *shift;
    float *sums;
};

template <class T> INLINE Range range_of(const Job &job, const Prepared &x, Size m) {
    T range[2];
    if (x.extremes) for (int i : {0, 1}) range[i] = static_cast<const T *>(x.extremes)[i * job.rows + m];
    else extremes_of(static_cast<const T *>(x.x) + m * job.columns, job.columns, range, range + 1);
    return {widen(range[0]), widen(range[1])};
}

// ---- plain loops: weights in bfloat16 and int8

template <class T> INLINE void prepare_plain(const Job &job, const Prepared &x) {
    for (Size m = 0; m < job.rows; m++) {
        Mapping mapping = symmetric<T>(range_of<T>(job, x, m));
        x.scale[m] = mapping.scale;
        auto q = static_cast<int8_t *>(x.to) + m * job.x_stride;
        quantize_plain(static_cast<const T *>(x.x) + m * job.columns, job.columns, mapping, q);
    }
}

template <Kind kind> INLINE void plain_floats(const Job &job, Size begin, Size end) {
    constexpr Size lanes = 16;
    auto weights = reinterpret_cast<const BFloat16 *>(job.weight);
    auto weight_at = [&](Size k) { return kind == PLAIN ? widen(weights[k]) : float(int8_t(job.weight[k])); };
    for (Size n = begin; n < end; n++)
        for (Size m = 0; m < job.rows; m++) {
            auto x = static_cast<const BFloat16 *>(job.x) + m * job.x_stride;
            float sums[lanes] = {}, sum = 0;
            Size k = 0, row = n * job.columns;
            for (; k + lanes <= job.columns; k += lanes)
                for (Size i = 0; i < lanes; i++) sums[i] += weight_at(row + k + i) * widen(x[k + i]);
            for (; k < job.columns; k++) sum += weight_at(row + k) * widen(x[k]);
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
            store(job, m, n, float(sum) * job.x_scale[m] * row_scale(job, n));
        }
}

INLINE void prepare_any(const Job &job, const Prepared &x) {
    if (job.type == BFLOAT16) prepare_plain<BFloat16>(job, x);
    else if (job.type == FLOAT16) prepare_plain<Float16>(job, x);
    else prepare_plain<float>(job, x);
}
INLINE void plain_any(const Job &job, Size begin, Size end) {
    if (job.kind == PLAIN) plain_floats<PLAIN>(job, begin, end);
    else if (job.kind == INT8) plain_floats<INT8>(job, begin, end);
    else plain_integers(job, begin, end);
}

void plain(const Job &job, Size begin, Size end) { plain_any(job, begin, end); }
void prepare_plain(const Job &job, const Prepared &x) { prepare_any(job, x); }
void extremes_plain(Type type, const void *x, Size rows, Size columns, void *to) {
    extremes_any(type, x, rows, columns, to);
}
AVX2 void plain_avx2(const Job &job, Size begin, Size end) { plain_any(job, begin, end); }
AVX2 void prepare_avx2(const Job &job, const Prepared &x) { prepare_any(job, x); }
AVX2 void extremes_avx2(Type type, const void *x, Size rows, Size columns, void *to) {
    extremes_any(type, x, rows, columns, to);
}

// ---- AVX-512

#if defined(__x86_64__)
// The first `count` of 32 or 64 elements; memory after them is not touched.
AVX512 INLINE __mmask32 first32(Size count) { return count >= 32 ? ~0u : (1u << count) - 1; }
AVX512 INLINE __mmask64 first64(Size count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

// Into the second cache, as far ahead as the first is too small for. For the first rows of x; others find it there.
AVX512 INLINE void fetch(const void *line, Size ahead) {
    __builtin_prefetch(static_cast<const char *>(line) + ahead, 0, 2);
}

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

AVX512 INLINE __m128 scales_of_four(const Job &job, Size n, __mmask8 mask) {
    if (job.kind == PLAIN) return _mm_set1_ps(1);
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

// ---- AVX-512: x

constexpr int digits_of(Kind kind) {
    return kind == INT8_DYNAMIC ? 1 : kind == INT4_DYNAMIC ? 2 : kind == INT8 || kind == INT4 ? 3 : 0;
}
constexpr bool has_groups(Kind kind) { return kind >= INT4; }

template <Kind kind, class T> INLINE Mapping mapping_of(Range range) {
    return kind == INT8_DYNAMIC ? symmetric<T>(range) : kind == INT4_DYNAMIC ? asymmetric(range) : fine(range);
}
template <Kind kind> AVX512 INLINE __m512i integers16(__m512 x, const Mapping &to) {
    x = _mm512_mul_ps(x, _mm512_set1_ps(to.inverse));
    if (kind == INT8_DYNAMIC) return limited16(_mm512_cvtps_epi32(x));
    if (kind != INT4_DYNAMIC) return _mm512_cvtps_epi32(x);
    __m512i zero = _mm512_set1_epi32(to.zero), shifted = _mm512_add_epi32(_mm512_cvtps_epi32(round16(x)), zero);
    return _mm512_sub_epi32(limited16(_mm512_cvtps_epi32(round16(_mm512_cvtepi32_ps(shifted)))), zero);
}

// A row of x as integers, each in signed bytes of 1, 256 and 65536.
template <Kind kind, class T> AVX512 INLINE void integers_of_row(const Job &job, const Prepared &x, Size m) {
    constexpr int D = digits_of(kind);
    auto from = static_cast<const T *>(x.x) + m * job.columns;
    auto to = static_cast<int8_t *>(x.to) + m * D * job.x_stride;
    const Mapping mapping = mapping_of<kind, T>(range_of<T>(job, x, m));
    const __m512i carries = _mm512_set1_epi32(0x808080), ones = _mm512_set1_epi8(1);
    __m512 sum = _mm512_setzero_ps();
    x.scale[m] = mapping.scale;
    for (Size k = 0; k < job.x_stride; k += 16) {
        __mmask16 mask = first16(std::max(job.columns - k, Size(0)));
        __m512i values = _mm512_maskz_mov_epi32(mask, integers16<kind>(load16(from + k, mask), mapping));
        __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(values, carries), carries);
        for (int d = 0; d < D; d++) {
            __m128i digits = _mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, 8 * d));
            _mm_store_si128(reinterpret_cast<__m128i *>(to + (k / BLOCK * D + d) * BLOCK + k % BLOCK), digits);
        }
        if (!has_groups(kind)) continue;
        sum = _mm512_add_ps(sum, _mm512_cvtepi32_ps(values));
        if ((k + 16) % job.group) continue;
        x.sums[m * job.sums_stride + k / job.group] = _mm512_reduce_add_ps(sum) * mapping.scale;
        sum = _mm512_setzero_ps();
    }
    if (has_groups(kind)) return;
    for (int d = 0; d < D; d++) {
        __m512i total = _mm512_setzero_si512();
        for (const int8_t *at = to + d * BLOCK; at < to + D * job.x_stride; at += D * BLOCK)
            for (int half : {0, 64}) total = _mm512_dpbusd_epi32(total, ones, _mm512_load_si512(at + half));
        x.shift[m * D + d] = -128 * _mm512_reduce_add_epi32(total);
    }
}

template <Kind kind> AVX512 INLINE void integers_of(const Job &job, const Prepared &x) {
    for (Size m = 0; m < job.rows; m++)
        if (kind == INT8_DYNAMIC && job.type == FLOAT32) integers_of_row<kind, float>(job, x, m);
        else if (kind == INT8_DYNAMIC && job.type == FLOAT16) integers_of_row<kind, Float16>(job, x, m);
        else integers_of_row<kind, BFloat16>(job, x, m);
}

AVX512 void prepare_avx512(const Job &job, const Prepared &x) {
    if (job.kind == INT8) integers_of<INT8>(job, x);
    else if (job.kind == INT8_DYNAMIC) integers_of<INT8_DYNAMIC>(job, x);
    else if (job.kind == INT4) integers_of<INT4>(job, x);
    else if (job.kind == INT4_DYNAMIC) integers_of<INT4_DYNAMIC>(job, x);
    else for (Size m = 0; m < job.rows; m++)  // FLOAT8
        for (Size k = 0; k < job.x_stride; k += 16) {
            __mmask16 mask = first16(std::max(job.columns - k, Size(0)));
            __m512 values = load16(static_cast<const BFloat16 *>(x.x) + m * job.columns + k, mask);
            _mm512_store_ps(static_cast<float *>(x.to) + m * job.x_stride + k, values);
        }
}

// ---- AVX-512: floats

// Adds the products of 64 bytes of a row's weights.
template <int M> AVX512 INLINE
void add_plain(const Job &job, Size m, const uint8_t *w, Size k, __mmask32 mask, __m512 *sums) {
    auto x = static_cast<const BFloat16 *>(job.x) + m * job.x_stride + k;
    __m512bh weights = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + 2 * k);
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++, x += job.x_stride)
        sums[i] = _mm512_dpbf16_ps(sums[i], weights, (__m512bh)_mm512_maskz_loadu_epi16(mask, x));
}

// 32 of float8 (e4m3fn, no NaN) at their places in float16, whose exponents count from 8 lower.
AVX512 INLINE __m512i as_float16(__m256i bytes) {
    return _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7), _mm512_set1_epi16(short(0xBF80)));
}
template <int M> AVX512 INLINE
void add_float8(const Job &job, Size m, const uint8_t *w, Size k, __mmask32 mask, __m512 *sums) {
    auto x = static_cast<const float *>(job.x) + m * job.x_stride + k;
    __m512i halves = as_float16(_mm256_maskz_loadu_epi8(mask, w + k));
    __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    #pragma GCC unroll 4
    for (int i = 0; i < M; i++, x += job.x_stride)
        sums[i] = _mm512_fmadd_ps(high, _mm512_load_ps(x + 16), _mm512_fmadd_ps(low, _mm512_load_ps(x), sums[i]));
}

template <Kind kind, int M> AVX512 INLINE void floats_tile(const Job &job, Size m, Size n, Size end) {
    const Size row_bytes = job.columns * (kind == PLAIN ? 2 : 1), ahead = m ? 0 : AHEAD;
    __m512 sums[M][TILE] = {};
    for (int r = 0; r < std::min(end - n, Size(TILE)); r++) {
        const uint8_t *w = job.weight + (n + r) * row_bytes;
        __m512 even[M] = {}, odd[M] = {};
        auto add = [&](Size k, __mmask32 mask, __m512 *to) AVX512 {
            if (kind == PLAIN) add_plain<M>(job, m, w, k, mask, to);
            else add_float8<M>(job, m, w, k, mask, to);
        };
        Size k = 0;
        for (; k + 64 <= job.columns; k += 64) {
            fetch(w + k * (kind == PLAIN ? 2 : 1), ahead);
            if (kind == PLAIN) fetch(w + 2 * k + 64, ahead);
            add(k, ~0u, even), add(k + 32, ~0u, odd);
        }
        if (k < job.columns) add(k, first32(job.columns - k), even);
        if (k + 32 < job.columns) add(k + 32, first32(job.columns - k - 32), odd);
        for (int i = 0; i < M; i++) sums[i][r] = _mm512_add_ps(even[i], odd[i]);
    }
    __mmask8 mask = (1 << std::min(end - n, Size(TILE))) - 1;
    __m128 scale = _mm_mul_ps(scales_of_four(job, n, mask), _mm_set1_ps(kind == FLOAT8 ? 256 : 1));
    for (int i = 0; i < M; i++) store_four(job, m + i, n, mask, _mm_mul_ps(sums_of(sums[i]), scale));
}

// ---- AVX-512: int8

template <Kind kind, int M> AVX512 INLINE void int8_tile(const Job &job, Size m, Size n, Size end) {
    constexpr int D = digits_of(kind);
    const Size stride = job.x_stride, ahead = m ? 0 : AHEAD;
    auto x = static_cast<const int8_t *>(job.x) + m * D * stride;
    __m512i sums[M][D][TILE] = {};
    for (int r = 0; r < std::min(end - n, Size(TILE)); r++) {
        const uint8_t *w = job.weight + (n + r) * job.columns;
        __m512i even[M][D] = {}, odd[M][D] = {};
        auto add = [&](Size k, __m512i weights, __m512i (*to)[D]) AVX512 {  // the instruction takes unsigned by signed
            weights = _mm512_xor_si512(weights, _mm512_set1_epi8(-128));
            auto digits = x + k / BLOCK * BLOCK * D + k % BLOCK;
            #pragma GCC unroll 4
            for (int i = 0; i < M; i++)
                #pragma GCC unroll 3
                for (int d = 0; d < D; d++) {
                    __m512i values = _mm512_load_si512(digits + i * D * stride + d * BLOCK);
                    to[i][d] = _mm512_dpbusd_epi32(to[i][d], weights, values);
                }
        };
        Size k = 0;
        for (; k + 128 <= job.columns; k += 128) {
            fetch(w + k, ahead), add(k, _mm512_loadu_si512(w + k), even);
            fetch(w + k + 64, ahead), add(k + 64, _mm512_loadu_si512(w + k + 64), odd);
        }
        for (; k < job.columns; k += 64) add(k, _mm512_maskz_loadu_epi8(first64(job.columns - k), w + k), even);
        for (int i = 0; i < M; i++)
            for (int d = 0; d < D; d++) sums[i][d][r] = _mm512_add_epi32(even[i][d], odd[i][d]);
    }
    __mmask8 mask = (1 << std::min(end - n, Size(TILE))) - 1;
    __m128 scale = scales_of_four(job, n, mask);
    for (int i = 0; i < M; i++) {
        __m128 total = _mm_setzero_ps();
        for (int d = D - 1; d >= 0; d--) {
            __m128i sum = _mm_add_epi32(sums_of(sums[i][d]), _mm_set1_epi32(job.shift[(m + i) * D + d]));
            total = _mm_fmadd_ps(total, _mm_set1_ps(256), _mm_cvtepi32_ps(sum));
        }
        store_four(job, m + i, n, mask, _mm_mul_ps(_mm_mul_ps(total, _mm_set1_ps(job.x_scale[m + i])), scale));
    }
}

// ---- AVX-512: int4

// The scales of the groups of half a block: a lane has columns of one group only.
struct HalfScales { __m512 low, high; };
template <bool is_whole> AVX512 INLINE HalfScales half_scales(const BFloat16 *scales, Size k, int shift, Size groups) {
    constexpr __mmask32 upper = 0xAAAAAAAA;  // a bfloat16 is the upper half of a float
    if (is_whole) {
        __m512 one = _mm512_castsi512_ps(_mm512_maskz_set1_epi16(upper, scales[k >> shift].bits));
        return {one, one};
    }
    Size first = k >> shift;
    int64_t bits = 0;
    if (first + 4 <= groups) std::memcpy(&bits, scales + first, 8);
    else for (Size i = groups - 1; i >= first; i--) bits = bits << 16 | scales[i].bits;
    const __m512i of32 = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1 << 16), 1);
    __m512i four = _mm512_set1_epi64(bits), lanes = shift == 5 ? of32 : _mm512_setzero_si512();  // which of the four
    __m512i next = _mm512_add_epi32(lanes, _mm512_set1_epi32((shift == 5 ? 2 : 1) << 16));
    return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, lanes, four)),
            _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, next, four))};
}

// Lanes of a block's products with integers of D bytes, or of half a block's.
template <int D> AVX512 INLINE __m512i products(const __m512i *w, int halves, const int8_t *x) {
    __m512i sum = _mm512_setzero_si512();
    #pragma GCC unroll 3
    for (int d = D - 1; d >= 0; d--) {
        __m512i part = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[0], _mm512_load_si512(x + d * BLOCK));
        if (halves == 2) part = _mm512_dpbusd_epi32(part, w[1], _mm512_load_si512(x + d * BLOCK + 64));
        sum = d == D - 1 ? part : _mm512_add_epi32(_mm512_slli_epi32(sum, 8), part);
    }
    return sum;
}

// One output of M rows of x: lanes of sums, of weights that are 8 too large. is_whole: a group has at least a block.
template <int D, int M, bool is_whole>
AVX512 INLINE void int4_row(const Job &job, Size m, Size n, Size ahead, __m512 *sums) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const Size stride = job.x_stride;
    const int shift = __builtin_ctzll(job.group);  // a power of two
    auto w = job.weight + n * stride / 2;
    auto scales = static_cast<const BFloat16 *>(job.scale) + n * job.groups;
    auto x = static_cast<const int8_t *>(job.x) + m * D * stride;
    for (Size k = 0; k < stride; k += BLOCK, w += BLOCK / 2, x += D * BLOCK) {
        fetch(w, ahead);
        __m512i bytes = _mm512_loadu_si512(w);
        __m512i half[] = {_mm512_and_si512(bytes, nibble), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble)};
        HalfScales scale = half_scales<is_whole>(scales, k, shift, job.groups);
        #pragma GCC unroll 4
        for (int i = 0; i < M; i++) {
            auto at = x + i * D * stride;
            __m512 low = _mm512_cvtepi32_ps(products<D>(half, is_whole ? 2 : 1, at));
            sums[i] = _mm512_fmadd_ps(low, scale.low, sums[i]);
            if (is_whole) continue;
            __m512 high = _mm512_cvtepi32_ps(products<D>(half + 1, 1, at + 64));
            sums[i] = _mm512_fmadd_ps(high, scale.high, sums[i]);
        }
    }
}

// Adds what zeros are worth, and takes off the 8 that weights are too large by.
template <int M> AVX512 INLINE void add_zeros(const Job &job, Size m, Size n, __m512 *sums) {
    const BFloat16 *scales = static_cast<const BFloat16 *>(job.scale) + n * job.groups;
    for (Size g = 0; g < job.groups; g += 16) {
        __mmask16 mask = first16(job.groups - g);
        __m512 zeros = job.zero ? load16(job.zero + n * job.groups + g, mask) : _mm512_setzero_ps();
        zeros = _mm512_fnmadd_ps(load16(scales + g, mask), _mm512_set1_ps(8), zeros);
        #pragma GCC unroll 4
        for (int i = 0; i < M; i++)
            sums[i] = _mm512_fmadd_ps(zeros, _mm512_loadu_ps(job.sums + (m + i) * job.sums_stride + g), sums[i]);
    }
}

template <Kind kind, int M> AVX512 INLINE void int4_tile(const Job &job, Size m, Size n, Size end) {
    constexpr int D = digits_of(kind);
    const Size ahead = m ? 0 : AHEAD;
    __m512 sums[M][TILE] = {};
    for (int r = 0; r < std::min(end - n, Size(TILE)); r++) {
        __m512 sum[M] = {};
        if (job.group >= BLOCK) int4_row<D, M, true>(job, m, n + r, ahead, sum);
        else int4_row<D, M, false>(job, m, n + r, ahead, sum);
        for (int i = 0; i < M; i++) sum[i] = _mm512_mul_ps(sum[i], _mm512_set1_ps(job.x_scale[m + i]));
        add_zeros<M>(job, m, n + r, sum);
        for (int i = 0; i < M; i++) sums[i][r] = sum[i];
    }
    __mmask8 mask = (1 << std::min(end - n, Size(TILE))) - 1;
    for (int i = 0; i < M; i++) store_four(job, m + i, n, mask, sums_of(sums[i]));
}

// All rows of x on four outputs before the next four, so that weights are read from memory once.
#define TILES(TILE_OF, KIND)                                             \
    for (Size n = begin; n < end; n += TILE)                             \
        for (Size m = 0; m < job.rows; m += TILE)                        \
            switch (job.rows - m) {                                      \
                case 1: TILE_OF<KIND, 1>(job, m, n, end); break;         \
                case 2: TILE_OF<KIND, 2>(job, m, n, end); break;         \
                case 3: TILE_OF<KIND, 3>(job, m, n, end); break;         \
                default: TILE_OF<KIND, 4>(job, m, n, end);               \
            }
AVX512 void plain_avx512(const Job &job, Size begin, Size end) { TILES(floats_tile, PLAIN) }
AVX512 void float8_avx512(const Job &job, Size begin, Size end) { TILES(floats_tile, FLOAT8) }
AVX512 void int8_avx512(const Job &job, Size begin, Size end) { TILES(int8_tile, INT8) }
AVX512 void int8_dynamic_avx512(const Job &job, Size begin, Size end) { TILES(int8_tile, INT8_DYNAMIC) }
AVX512 void int4_avx512(const Job &job, Size begin, Size end) { TILES(int4_tile, INT4) }
AVX512 void int4_dynamic_avx512(const Job &job, Size begin, Size end) { TILES(int4_tile, INT4_DYNAMIC) }

// ---- AVX-512: outputs as bfloat16, for the library to multiply with many rows

AVX512 void widen_int4(const Job &job, Size begin, Size end) {  // with scales and zeros
    auto scales = static_cast<const BFloat16 *>(job.scale);
    for (Size n = begin; n < end; n++)
        for (Size k = 0; k < job.columns; k += 32) {
            auto w = job.weight + (n * job.x_stride + k / BLOCK * BLOCK) / 2 + k % 64;
            auto to = static_cast<BFloat16 *>(job.y) + (n - job.first) * job.columns + k;
            Size group = n * job.groups + k / job.group;
            float scale = widen(scales[group]), zero = job.zero ? widen(job.zero[group]) : 0;
            int shift = k % BLOCK < 64 ? 0 : 4;
            for (int i = 0; i < 32; i++) round_to(float((w[i] >> shift & 15) - 8) * scale + zero, to + i);
        }
}
template <Kind kind> AVX512 INLINE void widen_bytes(const Job &job, Size begin, Size end) {  // without their scales
    for (Size n = begin; n < end; n++)
        for (Size k = 0; k < job.columns; k += 32) {
            __mmask32 mask = first32(job.columns - k);
            __m256i bytes = _mm256_maskz_loadu_epi8(mask, job.weight + n * job.columns + k);
            __m512 low, high;
            if (kind == FLOAT8) {
                __m512i halves = as_float16(bytes);
                low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_set1_ps(256));
                high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), _mm512_set1_ps(256));
            } else {
                low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
                high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
            }
            auto to = static_cast<BFloat16 *>(job.y) + (n - job.first) * job.columns + k;
            _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
}
AVX512 void widen_avx512(const Job &job, Size begin, Size end) {
    if (job.kind == INT8) widen_bytes<INT8>(job, begin, end);
    else if (job.kind == FLOAT8) widen_bytes<FLOAT8>(job, begin, end);
    else widen_int4(job, begin, end);
}
#endif

// ---- the choice

using Kernel = void (*)(const Job &, Size, Size);
using Prepare = void (*)(const Job &, const Prepared &);
struct Kernels { Kernel linear; Prepare prepare; int digits; };  // digits: 0 where x stays as it is

Kernels kernels_of(Kind kind, int level) {
    int digits = kind == INT8_DYNAMIC;
#if defined(__x86_64__)
    constexpr Kernel by_hand[] = {plain_avx512,        int8_avx512, float8_avx512,
                                  int8_dynamic_avx512, int4_avx512, int4_dynamic_avx512};
    if (level == 2) return {by_hand[kind], prepare_avx512, kind == FLOAT8 ? int(sizeof(float)) : digits_of(kind)};
    if (level == 1) return {plain_avx2, prepare_avx2, digits};
#endif
    return {plain, prepare_plain, digits};
}

// Gives each thread neighbouring outputs.
void run(const Job &job, Kernel kernel, Team &team) {
    const Size tiles = (job.outputs - job.first + TILE - 1) / TILE, threads = team.size;
    share_out(team, threads, [&](Size t) {
        Size begin = tiles * t / threads * TILE, end = tiles * (t + 1) / threads * TILE;
        kernel(job, job.first + begin, std::min(job.first + end, job.outputs));
    });
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

struct Extremes {  // `_Extremes` in small_m.py
    Size level, type, rows, columns;
    const void *x;  // [rows, columns]
    void *to;       // [2, rows] in its type
};

// Of each row of x: its maximum, and minus its minimum.
Size extremes(const Extremes &asked, Team &team) {
    auto kernel = extremes_plain;
#if defined(__x86_64__)
    if (asked.level) kernel = extremes_avx2;
#endif
    by_one(team, [&] { kernel(Type(asked.type), asked.x, asked.rows, asked.columns, asked.to); });
    return DONE;
}

struct Linear {  // `_Linear` in small_m.py; what a kind doesn't have is null or 0
    Size kind, level, type, rows, columns, outputs, group;
    const void *x;            // [rows, columns]
    const uint8_t *weight;
    const void *scale;
    const BFloat16 *zero;
    const void *range;        // the extremes of x that ranks agreed on, or null
    void *y;                  // [rows, outputs]
};

Size linear(const Linear &asked, Team &team) {
    const Kernels kernels = kernels_of(Kind(asked.kind), asked.level);
    const Size rows = asked.rows, columns = asked.columns;
    Job job{};
    job.kind = Kind(asked.kind), job.type = Type(asked.type), job.rows = rows, job.columns = columns;
    job.outputs = asked.outputs, job.x = asked.x, job.x_stride = columns, job.weight = asked.weight;
    job.scale = asked.scale, job.zero = asked.zero, job.y = asked.y;
    job.group = asked.group, job.groups = asked.group ? columns / asked.group : 0;
    std::unique_ptr<uint8_t, Free> scratch;
    if (int digits = kernels.digits) {
        job.x_stride = up(columns, BLOCK), job.sums_stride = up(job.groups, 16);
        Size parts[] = {
            rows * digits * job.x_stride, up(rows * 4, 64), up(rows * digits * 4, 64), rows * job.sums_stride * 4};
        scratch.reset(static_cast<uint8_t *>(std::aligned_alloc(64, parts[0] + parts[1] + parts[2] + parts[3])));
        uint8_t *at[] = {scratch.get(), at[0] + parts[0], at[1] + parts[1], at[2] + parts[2]};
        auto scales = reinterpret_cast<float *>(at[1]), sums = reinterpret_cast<float *>(at[3]);
        auto shifts = reinterpret_cast<int32_t *>(at[2]);
        std::memset(sums, 0, parts[3]);
        job.x = at[0], job.x_scale = scales, job.shift = shifts, job.sums = sums;
        kernels.prepare(job, {asked.x, asked.range, at[0], scales, shifts, sums});
    }
    run(job, kernels.linear, team);
    return DONE;
}

struct Widen {  // `_Widen` in small_m.py
    Size kind, first, last, columns, group;
    const uint8_t *weight;
    const void *scale;
    const BFloat16 *zero;
    void *to;  // [last - first, columns]
};

// Outputs first to last of a weight as bfloat16. For level 2.
Size widen_rows(const Widen &asked, Team &team) {
    Job job{};
    job.kind = Kind(asked.kind), job.first = asked.first, job.outputs = asked.last, job.columns = asked.columns;
    job.x_stride = up(asked.columns, BLOCK), job.weight = asked.weight, job.scale = asked.scale, job.zero = asked.zero;
    job.group = asked.group, job.groups = asked.group ? asked.columns / asked.group : 0, job.y = asked.to;
#if defined(__x86_64__)
    run(job, widen_avx512, team);
#endif
    return DONE;
}
}
