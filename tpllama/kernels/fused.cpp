// What a decoder layer computes beside its linears, in bfloat16: norms, rotary positions, keys and values to the cache,
// the attention of single tokens over it, and the gated activation.
//
// Each result is rounded where torch rounds it, so that only the order of float32 sums and the last bit of exp differ.
// A row's bits depend neither on how many rows there are nor on the threads. Plain loops are compiled for AVX-512, AVX2
// and any processor; for AVX-512 attention is written by hand.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../team.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")  // or loops with conditions stay scalar
#endif
#define INLINE inline __attribute__((always_inline))
#define FETCH(address) __builtin_prefetch(address, 0, 2)  // to the second cache, which has more in flight
#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define AVX2 __attribute__((target("avx2,fma")))
#endif

namespace {

using BFloat16 = uint16_t;  // its bits

constexpr int LANES = 16;        // floats that are computed together
constexpr Size TILE = 64;        // tokens whose scores are computed together
constexpr int QUERIES = 4;       // query heads of a KV head that are
constexpr Size FEW = 1 << 14;    // elements that are not worth calling a second thread

INLINE float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
INLINE BFloat16 rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7FC0 : BFloat16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
INLINE float as_bfloat16(float x) { return widen(rounded(x)); }

// 2^f on [-1/2, 1/2] times ln 2: coefficients of exp's series, good to the last bit or two of a float.
constexpr float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
constexpr float SERIES[] = {1.9875691e-4f, 1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666665e-1f, 5.0000001e-1f};

INLINE float exp_of(float x) {
    float limited = x < -87.0f ? -87.0f : x > 88.7f ? 88.7f : x;
    const float shifted = limited * LOG2E + 12582912.0f, n = shifted - 12582912.0f;  // the nearest integer: low bits
    const float r = limited - n * LN2_HIGH - n * LN2_LOW;
    float y = SERIES[0];
    for (int i = 1; i < 6; i++) y = y * r + SERIES[i];
    y = y * r * r + r + 1.0f;
    int32_t bits, power;
    std::memcpy(&bits, &y, 4), std::memcpy(&power, &shifted, 4);
    bits += int32_t(uint32_t(power) << 23);
    std::memcpy(&y, &bits, 4);
    y = x > 88.7228f ? std::numeric_limits<float>::infinity() : y;
    return x != x ? x : y;
}

// ---- Norms and the gated activation

struct Norm {
    Size columns;
    const BFloat16 *x, *weight;  // x [rows, columns]
    BFloat16 *delta;             // what is added to x first, and then holds the sum; or null
    BFloat16 *y;
    float eps;
};

INLINE void norm_any(const Norm &norm, Size begin, Size end) {
    const Size columns = norm.columns;
    for (Size m = begin; m < end; m++) {
        const BFloat16 *x = norm.x + m * columns;
        float lanes[LANES] = {}, sum = 0;
        if (norm.delta) {
            BFloat16 *delta = norm.delta + m * columns;
            Size k = 0;
            for (; k + LANES <= columns; k += LANES)
                for (int i = 0; i < LANES; i++) {
                    BFloat16 added = rounded(widen(x[k + i]) + widen(delta[k + i]));
                    delta[k + i] = added;
                    lanes[i] += widen(added) * widen(added);
                }
            for (int i = 0; k < columns; k++, i++) {
                delta[k] = rounded(widen(x[k]) + widen(delta[k]));
                lanes[i] += widen(delta[k]) * widen(delta[k]);
            }
            x = delta;
        } else {
            Size k = 0;
            for (; k + LANES <= columns; k += LANES)
                for (int i = 0; i < LANES; i++) lanes[i] += widen(x[k + i]) * widen(x[k + i]);
            for (int i = 0; k < columns; k++, i++) lanes[i] += widen(x[k]) * widen(x[k]);
        }
        for (float each : lanes) sum += each;
        const float factor = 1.0f / std::sqrt(sum / float(columns) + norm.eps);
        BFloat16 *y = norm.y + m * columns;
        for (Size k = 0; k < columns; k++) y[k] = rounded(widen(norm.weight[k]) * as_bfloat16(widen(x[k]) * factor));
    }
}

struct Gated {
    Size columns, gate_stride, up_stride;
    const BFloat16 *gate, *up;  // rows of these strides
    BFloat16 *y;                // [rows, columns]
};

INLINE void gated_any(const Gated &gated, Size begin, Size end) {
    for (Size m = begin; m < end; m++) {
        const BFloat16 *gate = gated.gate + m * gated.gate_stride, *up = gated.up + m * gated.up_stride;
        BFloat16 *y = gated.y + m * gated.columns;
        for (Size k = 0; k < gated.columns; k++) {
            float x = widen(gate[k]);
            y[k] = rounded(as_bfloat16(x / (1.0f + exp_of(-x))) * widen(up[k]));
        }
    }
}

struct Sum {
    Size columns;
    const BFloat16 *x;
    BFloat16 *y;
};

INLINE void add_any(const Sum &sum, Size begin, Size end) {
    for (Size i = begin * sum.columns; i < end * sum.columns; i++) sum.y[i] = rounded(widen(sum.y[i]) + widen(sum.x[i]));
}

// ---- Rotary positions, and keys and values to the cache

// What the layers of a step have in common. Tokens and texts: of one token, attention over all that lies in `runs`.
struct Step {
    Size tokens;
    const int64_t *slots;   // of each token's keys and values
    Size texts;
    const int64_t *rows;    // of each text's token in the step
    const int64_t *lengths; // keys that it looks at
    const int64_t *ends;    // of each text's runs
    const int64_t *runs;    // the first slot and the number of slots
};

struct Heads {
    Size heads, kv_heads, dim, q_stride, k_stride, v_stride;
    const Step *step;
    BFloat16 *q, *k, *v;          // rows of these strides
    const BFloat16 *cos, *sin;    // [tokens, dim], or null: q and k are turned already
    BFloat16 *keys, *values;      // [slots, kv_heads, dim], or null: k and v stay where they are
    BFloat16 *out;                // [tokens, heads, dim]; of texts alone is it written
    float scale;                  // of the scores
};

// Pairs (i, i + dim / 2) of x to y, which may be x.
INLINE void rotate(const BFloat16 *x, const BFloat16 *cos, const BFloat16 *sin, Size dim, BFloat16 *y) {
    const Size half = dim / 2;
    auto turn = [&](Size i, Size count) __attribute__((always_inline)) {
        BFloat16 first[LANES], second[LANES];
        for (Size j = 0; j < count; j++) {
            float a = widen(x[i + j]), b = widen(x[i + j + half]);
            float c = as_bfloat16(a * widen(cos[i + j])), d = as_bfloat16(-b * widen(sin[i + j]));
            float e = as_bfloat16(b * widen(cos[i + j + half])), f = as_bfloat16(a * widen(sin[i + j + half]));
            first[j] = rounded(c + d), second[j] = rounded(e + f);
        }
        std::memcpy(y + i, first, 2 * count);
        std::memcpy(y + i + half, second, 2 * count);
    };
    Size i = 0;
    for (; i + LANES <= half; i += LANES) turn(i, LANES);
    for (; i < half; i++) turn(i, 1);
}

using Rotate = void (*)(const BFloat16 *x, const BFloat16 *cos, const BFloat16 *sin, Size dim, BFloat16 *y);

INLINE void keep_any(const Heads &h, Size begin, Size end, Rotate turn = rotate) {
    const Size kv_size = h.kv_heads * h.dim;
    for (Size m = begin; m < end; m++) {
        BFloat16 *q = h.q + m * h.q_stride, *k = h.k + m * h.k_stride;
        BFloat16 *keys = h.keys ? h.keys + h.step->slots[m] * kv_size : k;
        if (h.cos) {
            const BFloat16 *cos = h.cos + m * h.dim, *sin = h.sin + m * h.dim;
            for (Size i = 0; i < h.heads; i++) turn(q + i * h.dim, cos, sin, h.dim, q + i * h.dim);
            for (Size i = 0; i < h.kv_heads; i++) turn(k + i * h.dim, cos, sin, h.dim, keys + i * h.dim);
        } else if (h.keys) {
            std::memcpy(keys, k, 2 * kv_size);
        }
        if (h.values) std::memcpy(h.values + h.step->slots[m] * kv_size, h.v + m * h.v_stride, 2 * kv_size);
    }
}

// ---- Attention of texts

// Where a text's tokens lie, in tiles by position: so the order of sums doesn't depend on the blocks.
class Slots {
public:
    Slots(const Step &step, Size text) : run(step.runs + 2 * (text ? step.ends[text - 1] : 0)), left(run[1]) {}
    // The elements before each of the next `count` tokens' in the cache.
    void next(Size count, Size stride, Size *offsets) {
        for (Size i = 0; i < count; i++) {
            if (left == 0) run += 2, left = run[1];
            offsets[i] = (run[0] + run[1] - left--) * stride;
        }
    }

private:
    const int64_t *run;
    Size left;
};

// A softmax that is under way, of so many queries at the most: its sums are relative to the largest score so far.
struct Softmax {
    float largest[QUERIES], sum[QUERIES], factor[QUERIES];
    float weights[QUERIES][TILE];
};

struct Tile {
    const BFloat16 *keys, *values;  // of the KV head
    const Size *offsets;            // of TILE tokens, the last one's again and again where there are fewer
    Size count, dim;
    const BFloat16 *next_keys, *next_values;  // what comes after this, to be fetched meanwhile
    const Size *next_offsets;
};

void pack_plain(const BFloat16 *q, int queries, Size dim, BFloat16 *packed) {
    std::memcpy(packed, q, 2 * queries * dim);
}
INLINE void tile_any(const BFloat16 *q, int queries, const Tile &tile, float scale, Softmax &s, float *sums) {
    const Size dim = tile.dim;
    for (int i = 0; i < queries; i++) {
        float largest = s.largest[i];
        for (Size t = 0; t < tile.count; t++) {
            const BFloat16 *k = tile.keys + tile.offsets[t];
            float lanes[LANES] = {}, score = 0;
            Size c = 0;
            for (; c + LANES <= dim; c += LANES)
                for (int j = 0; j < LANES; j++) lanes[j] += widen(q[i * dim + c + j]) * widen(k[c + j]);
            for (; c < dim; c++) lanes[0] += widen(q[i * dim + c]) * widen(k[c]);
            for (float each : lanes) score += each;
            s.weights[i][t] = score * scale;
            largest = std::max(largest, s.weights[i][t]);
        }
        const float factor = exp_of(s.largest[i] - largest);
        float lanes[LANES] = {}, sum = 0;
        for (Size t = tile.count; t < TILE; t++) s.weights[i][t] = largest;
        for (Size t = 0; t < TILE; t++) s.weights[i][t] = exp_of(s.weights[i][t] - largest);
        for (Size t = tile.count; t < TILE; t++) s.weights[i][t] = 0;
        for (Size t = 0; t < TILE; t += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] += s.weights[i][t + j];
        for (float each : lanes) sum += each;
        s.largest[i] = largest, s.sum[i] = s.sum[i] * factor + sum;
        for (Size c = 0; c < dim; c++) sums[i * dim + c] *= factor;
        for (Size t = 0; t < tile.count; t++) {
            const BFloat16 *v = tile.values + tile.offsets[t];
            for (Size c = 0; c < dim; c++) sums[i * dim + c] += s.weights[i][t] * widen(v[c]);
        }
    }
}
void finish_plain(const Softmax &s, const float *sums, int queries, Size dim, BFloat16 *out) {
    for (int i = 0; i < queries; i++)
        for (Size c = 0; c < dim; c++) out[i * dim + c] = rounded(sums[i * dim + c] / s.sum[i]);
}

#if defined(__x86_64__)
AVX512 INLINE __mmask32 first32(Size count) { return count >= 32 ? ~0u : (1u << count) - 1; }
AVX512 INLINE __mmask16 first16(Size count) { return count >= 16 ? 0xFFFF : count > 0 ? (1 << count) - 1 : 0; }

AVX512 INLINE __m512 exp16(__m512 x) {
    __m512 limited = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // NaN stays
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(limited, _mm512_set1_ps(LOG2E)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_HIGH), limited);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_LOW), r);
    __m512 y = _mm512_set1_ps(SERIES[0]);
    for (int i = 1; i < 6; i++) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(SERIES[i]));
    y = _mm512_add_ps(_mm512_fmadd_ps(y, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1));
    return _mm512_scalef_ps(y, n);
}

AVX512 INLINE __m512i rounded16(__m512 x) {  // the bits, in the upper halves
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
}
// Of 32 elements, the even ones and the odd ones as floats, and back.
AVX512 INLINE __m512 even16(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
AVX512 INLINE __m512 odd16(__m512i x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xFFFF0000))));
}
AVX512 INLINE __m512i rounded32(__m512 even, __m512 odd) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(rounded16(even), 16), rounded16(odd));
}

// x * cos + y * sin, whose products are rounded, too.
AVX512 INLINE __m512 turned16(__m512 x, __m512 cos, __m512 y, __m512 sin) {
    return _mm512_add_ps(odd16(rounded16(_mm512_mul_ps(x, cos))), odd16(rounded16(_mm512_mul_ps(y, sin))));
}
AVX512 INLINE __m512i turned32(__m512i x, __m512i cos, __m512i y, __m512i sin) {
    return rounded32(turned16(even16(x), even16(cos), even16(y), even16(sin)),
                     turned16(odd16(x), odd16(cos), odd16(y), odd16(sin)));
}
AVX512 void rotate_avx512(const BFloat16 *x, const BFloat16 *cos, const BFloat16 *sin, Size dim, BFloat16 *y) {
    const Size half = dim / 2;
    const __m512i sign = _mm512_set1_epi16(short(0x8000));
    for (Size i = 0; i < half; i += 32) {
        const __mmask32 mask = first32(half - i);
        auto load = [&](const BFloat16 *from) AVX512 { return _mm512_maskz_loadu_epi16(mask, from + i); };
        const __m512i a = load(x), b = load(x + half);
        _mm512_mask_storeu_epi16(y + i, mask, turned32(a, load(cos), _mm512_xor_si512(b, sign), load(sin)));
        _mm512_mask_storeu_epi16(y + i + half, mask, turned32(b, load(cos + half), a, load(sin + half)));
    }
}

// Eight elements of each query lie together, [dim / 8, QUERIES, 8]: a key's eight, four times over, meet them all.
AVX512 void pack_avx512(const BFloat16 *q, int queries, Size dim, BFloat16 *packed) {
    for (Size c = 0; c < dim; c += 8)
        for (int i = 0; i < QUERIES; i++, packed += 8) {
            __mmask8 mask = i < queries ? (1 << std::min(dim - c, Size(8))) - 1 : 0;
            _mm_storeu_si128(reinterpret_cast<__m128i *>(packed), _mm_maskz_loadu_epi16(mask, q + i * dim + c));
        }
}
// From 4 tokens' registers of 4 sums for each query, to 4 scores for each query.
AVX512 INLINE __m512 sums_of(const __m512 *a) {
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    __m512d l = _mm512_castps_pd(low), h = _mm512_castps_pd(high);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, h)), _mm512_castpd_ps(_mm512_unpackhi_pd(l, h)));
}
AVX512 INLINE void scores_avx512(const BFloat16 *q, const Tile &tile, float scale, float (*scores)[TILE]) {
    constexpr int TOKENS = 8;
    for (Size t = 0; t < tile.count; t += TOKENS) {
        const Size *offsets = tile.offsets + t, *next = tile.next_offsets + t;
        __m512 sums[TOKENS];
        #pragma GCC unroll 8
        for (int j = 0; j < TOKENS; j++) sums[j] = _mm512_setzero_ps();
        Size c = 0;
        for (; c + 8 <= tile.dim; c += 8) {
            const __m512bh queries = (__m512bh)_mm512_loadu_si512(q + c * QUERIES);
            #pragma GCC unroll 8
            for (int j = 0; j < TOKENS; j++) {
                __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i *>(tile.keys + offsets[j] + c));
                sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_broadcast_i32x4(eight), queries);
            }
        }
        if (c < tile.dim) {
            const __m512bh queries = (__m512bh)_mm512_loadu_si512(q + c * QUERIES);
            for (int j = 0; j < TOKENS; j++) {
                __m128i rest = _mm_maskz_loadu_epi16((1 << (tile.dim - c)) - 1, tile.keys + offsets[j] + c);
                sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_broadcast_i32x4(rest), queries);
            }
        }
        for (int j = 0; j < TOKENS; j++)
            for (Size c = 0; c < tile.dim; c += 32) FETCH(tile.next_keys + next[j] + c);
        #pragma GCC unroll 2
        for (int j = 0; j < TOKENS; j += 4) {
            __m512 four = _mm512_mul_ps(sums_of(sums + j), _mm512_set1_ps(scale));
            _mm_storeu_ps(scores[0] + t + j, _mm512_castps512_ps128(four));
            _mm_storeu_ps(scores[1] + t + j, _mm512_extractf32x4_ps(four, 1));
            _mm_storeu_ps(scores[2] + t + j, _mm512_extractf32x4_ps(four, 2));
            _mm_storeu_ps(scores[3] + t + j, _mm512_extractf32x4_ps(four, 3));
        }
    }
}

// From scores to weights, and the new sum of weights.
AVX512 INLINE void weigh_avx512(Softmax &s, int i, Size count) {
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 scores[TILE / 16], most = lowest, sum = _mm512_setzero_ps();
    #pragma GCC unroll 4
    for (int j = 0; j < TILE / 16; j++) {
        scores[j] = _mm512_mask_loadu_ps(lowest, first16(count - 16 * j), s.weights[i] + 16 * j);
        most = _mm512_max_ps(most, scores[j]);
    }
    const float largest = std::max(s.largest[i], _mm512_reduce_max_ps(most));
    s.factor[i] = _mm512_cvtss_f32(exp16(_mm512_set1_ps(s.largest[i] - largest)));
    #pragma GCC unroll 4
    for (int j = 0; j < TILE / 16; j++) {
        __m512 weights = exp16(_mm512_sub_ps(scores[j], _mm512_set1_ps(largest)));
        weights = _mm512_maskz_mov_ps(first16(count - 16 * j), weights);
        _mm512_storeu_ps(s.weights[i] + 16 * j, weights);
        sum = _mm512_add_ps(sum, weights);
    }
    s.largest[i] = largest;
    s.sum[i] = s.sum[i] * s.factor[i] + _mm512_reduce_add_ps(sum);
}

// Adds weighted values to sums, [Q, dim / 32, 2, 16]: of 32 elements the even ones come first.
template <int Q> AVX512 INLINE void add_values_avx512(const Softmax &s, const Tile &tile, float *sums) {
    const Size stride = (tile.dim + 31) / 32 * 32;
    for (Size c = 0; c < tile.dim; c += 32) {
        __mmask32 mask = first32(tile.dim - c);
        __m512 even[Q], odd[Q];
        #pragma GCC unroll 4
        for (int i = 0; i < Q; i++) {
            __m512 factor = _mm512_set1_ps(s.factor[i]);
            even[i] = _mm512_mul_ps(_mm512_loadu_ps(sums + i * stride + c), factor);
            odd[i] = _mm512_mul_ps(_mm512_loadu_ps(sums + i * stride + c + 16), factor);
        }
        for (Size t = 0; t < tile.count; t++) {
            __m512i v = _mm512_maskz_loadu_epi16(mask, tile.values + tile.offsets[t] + c);
            __m512 v_even = even16(v), v_odd = odd16(v);
            FETCH(tile.next_values + tile.next_offsets[t] + c);
            #pragma GCC unroll 4
            for (int i = 0; i < Q; i++) {
                __m512 weight = _mm512_set1_ps(s.weights[i][t]);
                even[i] = _mm512_fmadd_ps(weight, v_even, even[i]);
                odd[i] = _mm512_fmadd_ps(weight, v_odd, odd[i]);
            }
        }
        #pragma GCC unroll 4
        for (int i = 0; i < Q; i++) {
            _mm512_storeu_ps(sums + i * stride + c, even[i]);
            _mm512_storeu_ps(sums + i * stride + c + 16, odd[i]);
        }
    }
}

template <int Q>
AVX512 INLINE void queries_avx512(const BFloat16 *q, const Tile &tile, float scale, Softmax &s, float *sums) {
    scores_avx512(q, tile, scale, s.weights);
    for (int i = 0; i < Q; i++) weigh_avx512(s, i, tile.count);
    add_values_avx512<Q>(s, tile, sums);
}
AVX512 void tile_avx512(const BFloat16 *q, int queries, const Tile &tile, float scale, Softmax &s, float *sums) {
    if (queries == 4) queries_avx512<4>(q, tile, scale, s, sums);
    else if (queries == 3) queries_avx512<3>(q, tile, scale, s, sums);
    else if (queries == 2) queries_avx512<2>(q, tile, scale, s, sums);
    else queries_avx512<1>(q, tile, scale, s, sums);
}
AVX512 void finish_avx512(const Softmax &s, const float *sums, int queries, Size dim, BFloat16 *out) {
    const Size stride = (dim + 31) / 32 * 32;
    for (int i = 0; i < queries; i++)
        for (Size c = 0; c < dim; c += 32) {
            const __m512 sum = _mm512_set1_ps(s.sum[i]);
            __m512 even = _mm512_div_ps(_mm512_loadu_ps(sums + i * stride + c), sum);
            __m512 odd = _mm512_div_ps(_mm512_loadu_ps(sums + i * stride + c + 16), sum);
            _mm512_mask_storeu_epi16(out + i * dim + c, first32(dim - c), rounded32(even, odd));
        }
}
#endif

// How a level computes a tile, and ends; and how many sums it keeps of a query.
struct Way {
    void (*pack)(const BFloat16 *q, int queries, Size dim, BFloat16 *packed);
    void (*tile)(const BFloat16 *q, int queries, const Tile &tile, float scale, Softmax &s, float *sums);
    void (*finish)(const Softmax &s, const float *sums, int queries, Size dim, BFloat16 *out);
    Size width;
};

// The attention of one text, of KV heads first to last: all heads of a tile before the next one, as the cache has them.
// next_text: this thread's next one, or this one again.
void attend_text(const Heads &h, const Way &way, Size text, Size next_text, Size first, Size last) {
    const Size group = h.heads / h.kv_heads, parts = (group + QUERIES - 1) / QUERIES, stride = h.kv_heads * h.dim;
    const Size row = h.step->rows[text], length = h.step->lengths[text];
    const Size places = (last - first) * parts, sums_size = QUERIES * way.width;
    const Size packed_size = QUERIES * ((h.dim + 7) / 8 * 8);
    thread_local std::vector<Softmax> softmaxes;
    thread_local std::vector<float> sums;
    thread_local std::vector<BFloat16> packed;
    softmaxes.resize(places), sums.assign(places * sums_size, 0), packed.resize(places * packed_size);
    auto each_part = [&](Size kv_head, auto work) {
        for (Size part = 0; part < parts; part++) {
            const Size place = (kv_head - first) * parts + part, query = kv_head * group + part * QUERIES;
            const int queries = int(std::min(Size(QUERIES), group - part * QUERIES));
            work(query, queries, softmaxes[place], packed.data() + place * packed_size, sums.data() + place * sums_size);
        }
    };
    for (Size kv_head = first; kv_head < last; kv_head++)
        each_part(kv_head, [&](Size query, int queries, Softmax &s, BFloat16 *q, float *) {
            for (float &each : s.largest) each = -std::numeric_limits<float>::infinity();
            for (float &each : s.sum) each = 0;
            way.pack(h.q + row * h.q_stride + query * h.dim, queries, h.dim, q);
        });
    Slots slots(*h.step, text), others(*h.step, next_text);
    Size offsets[2][TILE], count = std::min(TILE, length);
    slots.next(count, stride, offsets[0]);
    for (Size base = 0, turn = 0; base < length; base += TILE, turn ^= 1) {
        const Size rest = length - base - TILE, next = std::min(TILE, rest > 0 ? rest : h.step->lengths[next_text]);
        (rest > 0 ? slots : others).next(next, stride, offsets[turn ^ 1]);
        std::fill(offsets[turn] + count, offsets[turn] + TILE, offsets[turn][count - 1]);
        std::fill(offsets[turn ^ 1] + next, offsets[turn ^ 1] + TILE, offsets[turn ^ 1][next - 1]);
        for (Size kv_head = first; kv_head < last; kv_head++) {
            const bool is_last = kv_head + 1 == last;
            const Size before = kv_head * h.dim, after = is_last ? first * h.dim : before + h.dim;
            Tile tile{h.keys + before, h.values + before, offsets[turn], count, h.dim,
                      h.keys + after, h.values + after, offsets[is_last ? turn ^ 1 : turn]};
            each_part(kv_head, [&](Size, int queries, Softmax &s, BFloat16 *q, float *own) {
                way.tile(q, queries, tile, h.scale, s, own);
            });
        }
        count = next;
    }
    for (Size kv_head = first; kv_head < last; kv_head++)
        each_part(kv_head, [&](Size query, int queries, Softmax &s, BFloat16 *, float *own) {
            way.finish(s, own, queries, h.dim, h.out + (row * h.heads + query) * h.dim);
        });
}

// ---- For each level

void norm_plain(const Norm &norm, Size begin, Size end) { norm_any(norm, begin, end); }
void gated_plain(const Gated &gated, Size begin, Size end) { gated_any(gated, begin, end); }
void add_plain(const Sum &sum, Size begin, Size end) { add_any(sum, begin, end); }
void keep_plain(const Heads &h, Size begin, Size end) { keep_any(h, begin, end); }
void tile_plain(const BFloat16 *q, int queries, const Tile &tile, float scale, Softmax &s, float *sums) {
    tile_any(q, queries, tile, scale, s, sums);
}
#if defined(__x86_64__)
AVX2 void norm_avx2(const Norm &norm, Size begin, Size end) { norm_any(norm, begin, end); }
AVX2 void gated_avx2(const Gated &gated, Size begin, Size end) { gated_any(gated, begin, end); }
AVX2 void add_avx2(const Sum &sum, Size begin, Size end) { add_any(sum, begin, end); }
AVX2 void keep_avx2(const Heads &h, Size begin, Size end) { keep_any(h, begin, end); }
AVX2 void tile_avx2(const BFloat16 *q, int queries, const Tile &tile, float scale, Softmax &s, float *sums) {
    tile_any(q, queries, tile, scale, s, sums);
}
AVX512 void gated_avx512(const Gated &gated, Size begin, Size end) { gated_any(gated, begin, end); }
AVX512 void add_avx512(const Sum &sum, Size begin, Size end) { add_any(sum, begin, end); }
AVX512 void norm_avx512(const Norm &norm, Size begin, Size end) { norm_any(norm, begin, end); }
AVX512 void keep_avx512(const Heads &h, Size begin, Size end) { keep_any(h, begin, end, rotate_avx512); }
#define AT(LEVEL, NAME) (LEVEL == 2 ? NAME##_avx512 : LEVEL == 1 ? NAME##_avx2 : NAME##_plain)
#else
#define AT(LEVEL, NAME) NAME##_plain
#endif

// Parts of neighbouring rows, more than threads; of few elements, only where threads needn't be called together for it.
template <class Work>
void share_rows(const Work &work, void (*kernel)(const Work &, Size, Size), Size rows, Size columns, Team &team) {
    const Size parts = is_together(team) ? std::min(team.size, rows) : std::min(rows, rows * columns / FEW);
    if (parts <= 1) return by_one(team, [&] { kernel(work, 0, rows); });
    share_out(team, parts, [&](Size i) { kernel(work, rows * i / parts, rows * (i + 1) / parts); });
}

}  // namespace

extern "C" {

// What this processor has: 2 for AVX-512 with BF16, 1 for AVX2, else 0.
int level() {
#if defined(__x86_64__)
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (wide && __builtin_cpu_supports("avx512bf16")) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

// What is asked of a function: `_RmsNorm`, `_Gated`, `_Add` and `_Attend` in fused.py.
struct RmsNormCall { Size level, rows; Norm norm; };
struct GatedCall { Size level, rows; Gated gated; };
struct AttendCall { Size level; Heads heads; };
struct AddCall { Size level, rows; Sum sum; };

// y = the norm of x, or of x + delta, which delta holds then.
Size rms_norm(const RmsNormCall &asked, Team &team) {
    share_rows(asked.norm, AT(asked.level, norm), asked.rows, asked.norm.columns, team);
    return DONE;
}

// y = silu(gate) * up
Size gated(const GatedCall &asked, Team &team) {
    share_rows(asked.gated, AT(asked.level, gated), asked.rows, asked.gated.columns, team);
    return DONE;
}

// Turns q where it is; k, turned, and v to the cache; then the attention of the step's texts.
Size attend(const AttendCall &asked, Team &team) {
    const Heads &h = asked.heads;
    const Step *step = h.step;
    const Size level = asked.level, kv_heads = h.kv_heads, dim = h.dim, threads = team.size;
    share_rows(h, AT(level, keep), step->tokens, (h.heads + kv_heads) * dim, team);
    if (step->texts == 0) return DONE;
    Way way{pack_plain, AT(level, tile), finish_plain, dim};
#if defined(__x86_64__)
    if (level == 2) way.pack = pack_avx512, way.finish = finish_avx512, way.width = (dim + 31) / 32 * 32;
#endif
    // Many texts are shared out whole, few by their heads.
    const Size pieces = step->texts >= 4 * threads ? 1 : std::min(threads, kv_heads);
    share_out(team, step->texts * pieces, [&](Size i) {
        const Size piece = i % pieces, text = i / pieces, next = (i + threads) / pieces;
        attend_text(h, way, text, next < step->texts ? next : text, kv_heads * piece / pieces,
                    kv_heads * (piece + 1) / pieces);
    });
    return DONE;
}

// y += x, as torch adds bfloat16.
Size add(const AddCall &asked, Team &team) {
    share_rows(asked.sum, AT(asked.level, add), asked.rows, asked.sum.columns, team);
    return DONE;
}
}
