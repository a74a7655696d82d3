// y = x times the transpose of w, for many rows of x (tokens), on Intel's AMX: tiles of 16 rows of 64 bytes.
//
// w is read as it lies; its outputs are the rows of left tiles, so what comes out is y's transpose. For few tokens
// tiles are loaded from w itself. For many, and where w is not in their types, a unit of it (64 outputs by 32 steps of
// 64 bytes) is unpacked beside the multiplication of the unit before. Tokens are packed once, into right tiles.
// Each sum is made in the order of k, whatever the number of tokens or threads.

#include <algorithm>
#include <cstdlib>

#include "tokens.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

enum Kind { PLAIN, INT8, FLOAT8, INT8_DYNAMIC, INT4, INT4_DYNAMIC };  // as small_m.cpp counts

constexpr Size TILE = 1024;     // bytes: 16 rows of 64
constexpr Size BLOCK = 32;      // steps of a unit
constexpr Size PANEL = 32;      // outputs that are multiplied at once
constexpr Size PANELS = 2;      // of a unit
constexpr Size STRIDE = BLOCK * 64 + 64;  // of unpacked rows: multiples of powers of two share places in the cache
constexpr Size AHEAD = 4;       // rows that are fetched ahead
constexpr Size AT_ONCE = 512;   // tokens
constexpr Size CACHED = 1 << 20;  // bytes of tokens that are read again from the cache for each panel
constexpr Size UNITS = 4;       // that share a reading of tokens that are more

struct Job {
    Size tokens, columns, outputs;
    const BFloat16 *x;         // [tokens, columns]
    const uint8_t *weight;
    Size row_bytes;            // from one output to the next
    const void *scale;         // of rows: bfloat16, for INT8_DYNAMIC float; of groups: bfloat16 [outputs, groups]
    const BFloat16 *zero;      // of groups
    Size group_shift, groups;  // a group has two to the power of it columns
    const BFloat16 *extremes;  // [2, extremes_stride] where ranks agreed on them; or none
    Size extremes_stride;
    BFloat16 *y;               // [tokens, outputs]

    Size steps, tiles;         // of columns, of tokens
    uint8_t *packed;           // tokens: [blocks of steps][tiles][steps of the block][16 of k][16 tokens], 4 bytes each
    float *token_scale;        // [tiles * 16]
};

constexpr bool is_dynamic(Kind kind) { return kind == INT8_DYNAMIC || kind == INT4_DYNAMIC; }
constexpr Size step_columns(Kind kind) { return kind == INT8_DYNAMIC ? 64 : 32; }
// So many tokens are multiplied with rows of w where they lie; more, which read them again and again, pay for a copy.
constexpr Size direct_tokens(Kind kind) { return kind == PLAIN ? 256 : kind == INT8_DYNAMIC ? 128 : 0; }

// ---- tiles

// The compiler doesn't know the instructions, so it must not move memory accesses past those that load and store.
struct alignas(64) Configuration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
INLINE void configure() {
    Configuration all;
    asm volatile("ldtilecfg %0" ::"m"(all) : "memory");
}
INLINE void release() { asm volatile("tilerelease" ::: "memory"); }
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(stride) : "memory")
#define TILE_STORE(t, to) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(Size(64)) : "memory")
#define TILE_ADD(sum, left, right)                                                                           \
    do {                                                                                                     \
        constexpr bool is_integer = kind == INT8_DYNAMIC;                                                    \
        if constexpr (is_integer) asm volatile("tdpbssd %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::);    \
        else asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::);                       \
    } while (0)

// Of four parts of a and of b.
AVX512 INLINE __m512i even(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
AVX512 INLINE __m512i odd(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xDD); }

// 16 rows of 16 words.
AVX512 INLINE void transpose(__m512i *r) {
    __m512i t[16];
    #pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    #pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    #pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = even(r[i], r[4 + i]), t[4 + i] = odd(r[i], r[4 + i]);
        t[8 + i] = even(r[8 + i], r[12 + i]), t[12 + i] = odd(r[8 + i], r[12 + i]);
    }
    #pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        r[i] = even(t[i], t[8 + i]), r[8 + i] = odd(t[i], t[8 + i]);
        r[4 + i] = even(t[4 + i], t[12 + i]), r[12 + i] = odd(t[4 + i], t[12 + i]);
    }
}

// ---- tokens

AVX512 INLINE __mmask32 first32(Size count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }
AVX512 INLINE __mmask64 first64(Size count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }

template <Kind kind> AVX512 INLINE Mapping mapping(const Job &job, Size m) {
    BFloat16 range[2];
    if (job.extremes) range[0] = job.extremes[m], range[1] = job.extremes[job.extremes_stride + m];
    else extremes_of(job.x + m * job.columns, job.columns, range, range + 1);
    Range wide{widen(range[0]), widen(range[1])};
    return kind == INT8_DYNAMIC ? symmetric<BFloat16>(wide) : asymmetric(wide);
}

AVX512 INLINE void scaled32(const BFloat16 *x, Size k, Size columns, float factor, __m512 *to) {
    __m512i words = _mm512_maskz_loadu_epi16(first32(columns - k), x + k);
    to[0] = _mm512_mul_ps(widen16(_mm512_castsi512_si256(words)), _mm512_set1_ps(factor));
    to[1] = _mm512_mul_ps(widen16(_mm512_extracti64x4_epi64(words, 1)), _mm512_set1_ps(factor));
}

// 64 bytes of a token as they are multiplied, from column k; zero beyond the last.
template <Kind kind> AVX512 INLINE __m512i token64(const BFloat16 *x, Size k, Size columns, const Mapping &q) {
    if constexpr (!is_dynamic(kind)) return _mm512_maskz_loadu_epi16(first32(columns - k), x + k);
    __m512 values[4];
    scaled32(x, k, columns, q.inverse, values);
    if constexpr (kind == INT8_DYNAMIC) {
        scaled32(x, k + 32, columns, q.inverse, values + 2);
        __m512i whole[4];
        #pragma GCC unroll 4
        for (int i = 0; i < 4; i++) whole[i] = _mm512_cvtps_epi32(values[i]);
        __m512i low = _mm512_packs_epi32(whole[0], whole[1]), high = _mm512_packs_epi32(whole[2], whole[3]);
        __m512i bytes = _mm512_packs_epi16(low, high);  // limited by saturation; fours of them out of order
        const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        return _mm512_maskz_mov_epi8(first64(columns - k), _mm512_permutexvar_epi32(order, bytes));
    } else {  // the integers less their zero point: exact in bfloat16
        const __m512i zero = _mm512_set1_epi32(q.zero);
        for (int i = 0; i < 2; i++) {
            __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(round16(values[i])), zero);
            whole = limited16(_mm512_cvtps_epi32(round16(_mm512_cvtepi32_ps(whole))));
            values[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(whole, zero));
        }
        return _mm512_maskz_mov_epi16(first32(columns - k), (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
    }
}

INLINE Size packed_stride(const Job &job) { return job.steps * 64 + 64; }  // no power of two
INLINE uint8_t *packed_at(const Job &job, Size tile, Size step) {
    Size block = step / BLOCK * BLOCK, steps = std::min(job.steps - block, BLOCK);
    return job.packed + (block * job.tiles + tile * steps + step - block) * TILE;
}

// 16 tokens as they are multiplied. Dynamic kinds quantize them into scratch first, one after another.
template <Kind kind> AVX512 void pack_tokens(const Job &job, Size tile, uint8_t *scratch) {
    const Size first = tile * 16, count = std::min(job.tokens - first, Size(16)), stride = packed_stride(job);
    const Size each = step_columns(kind);
    const BFloat16 *x = job.x + first * job.columns;
    for (Size i = 0; i < 16; i++) job.token_scale[first + i] = 1;
    if (is_dynamic(kind))
        for (Size i = 0; i < count; i++) {
            const Mapping q = mapping<kind>(job, first + i);
            job.token_scale[first + i] = q.scale;
            for (Size step = 0; step < job.steps; step++)
                _mm512_store_si512(scratch + i * stride + step * 64,
                                   token64<kind>(x + i * job.columns, step * each, job.columns, q));
        }
    for (Size step = 0; step < job.steps; step++) {
        __m512i rows[16];
        #pragma GCC unroll 16
        for (Size i = 0; i < 16; i++)
            if (i >= count) rows[i] = _mm512_setzero_si512();
            else if (is_dynamic(kind)) rows[i] = _mm512_load_si512(scratch + i * stride + step * 64);
            else rows[i] = token64<kind>(x + i * job.columns, step * each, job.columns, {});
        transpose(rows);
        auto to = reinterpret_cast<__m512i *>(packed_at(job, tile, step));
        #pragma GCC unroll 16
        for (Size i = 0; i < 16; i++) _mm512_store_si512(to + i, rows[i]);
    }
}

// ---- weights

constexpr Size UNIT_BYTES = PANELS * PANEL * STRIDE;  // unpacked
struct Unit { Size first, panels, step, steps; };  // its outputs, its columns

// Where a step of a row begins; a block of int4 holds 128 columns in 64 bytes, the first half in their low halves.
template <Kind kind> INLINE const uint8_t *source(const Job &job, Size output, Size step) {
    Size at = kind >= INT4 ? step / 4 * 64 + step % 2 * 32 : step * (kind == PLAIN || kind == INT8_DYNAMIC ? 64 : 32);
    return job.weight + output * job.row_bytes + at;
}

// Bytes of integers or of float8 as bfloat16; 256 times too small the latter.
template <Kind kind> AVX512 INLINE __m512i widen32(__m256i bytes) {
    __m512i words = _mm512_cvtepi8_epi16(bytes);
    if constexpr (kind == INT8) {
        __m512 low = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
        __m512 high = _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
        __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
        return _mm512_mask_blend_epi16(0xAAAAAAAA, lower, _mm512_castps_si512(high));
    }
    // By way of float16, whose exponents count from 8 lower.
    words = _mm512_and_si512(_mm512_slli_epi16(words, 7), _mm512_set1_epi16(short(0xBF80)));
    __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// The sixteen values of a group of int4 in bfloat16, twice.
AVX512 INLINE __m512i values_of(BFloat16 scale, BFloat16 zero) {
    const __m512 integers = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    __m512 scaled = _mm512_mul_ps(integers, _mm512_set1_ps(widen(scale)));
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(scaled, _mm512_set1_ps(widen(zero)))));
}

// Steps first to last of a row as they are multiplied, 64 bytes each. Of the last, a part may be beyond the columns.
template <Kind kind, bool is_whole>
AVX512 INLINE void unpack(const Job &job, Size output, Size first, Size last, uint8_t *to) {
    const Size columns = job.columns, shift = job.group_shift - 5, groups = output * job.groups;
    const BFloat16 *scales = static_cast<const BFloat16 *>(job.scale) + groups, *zeros = job.zero + groups;
    for (Size step = first; step < last; step++, to += 64) {
        const uint8_t *from = source<kind>(job, output, step);
        _mm_prefetch(from + AHEAD * job.row_bytes, _MM_HINT_T0);
        const Size left = columns - step * step_columns(kind);
        const __mmask32 mask = is_whole ? ~0u : first32(left);
        __m512i line;
        if constexpr (kind == INT8_DYNAMIC) line = _mm512_maskz_loadu_epi8(is_whole ? ~0ull : first64(left), from);
        else if constexpr (kind == PLAIN) line = _mm512_maskz_loadu_epi16(mask, from);
        else if constexpr (kind < INT4) line = widen32<kind>(_mm256_maskz_loadu_epi8(mask, from));
        else {  // its words choose by their lower bits; a group is whole steps
            __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
            words = _mm512_srl_epi16(words, _mm_cvtsi32_si128(step % 4 < 2 ? 0 : 4));
            line = _mm512_maskz_permutexvar_epi16(mask, words, values_of(scales[step >> shift], zeros[step >> shift]));
        }
        _mm512_store_si512(to, line);
    }
}

// A unit that is unpacked beside the multiplication of another, row by row.
template <Kind kind> struct Beside {
    const Job &job;
    Unit unit;
    uint8_t *to;  // [rows, STRIDE]
    Size row = 0, step = 0;

    AVX512 INLINE void some(Size count) {
        while (count > 0 && row < unit.panels * PANEL) {
            const Size first = unit.step + step, last = std::min(first + count, unit.step + unit.steps);
            const Size output = unit.first + row;
            uint8_t *line = to + row * STRIDE + step * 64;
            if (output >= job.outputs) std::memset(line, 0, (last - first) * 64);
            else if (last * step_columns(kind) <= job.columns) unpack<kind, true>(job, output, first, last, line);
            else unpack<kind, false>(job, output, first, last, line);
            count -= last - first, step += last - first;
            if (step == unit.steps) step = 0, row++;
        }
    }
};

// ---- sums

// 32 rows of w from a step on, as they lie or unpacked.
struct Panel { const uint8_t *rows; Size stride; };

// Where sums will go: rows of y, which are fetched in time.
struct Place { const BFloat16 *y; Size stride, rows; };

// 32 outputs of T tiles of tokens: sums += panel times tokens, sums [T][2 tiles of outputs].
template <Kind kind, int T>
AVX512 INLINE void multiply(Panel panel, const uint8_t *tokens, Size steps, uint8_t *sums, bool is_first,
                            Beside<kind> &beside, Size share, Place place) {
    const uint8_t *others = tokens + steps * TILE, *lower = panel.rows + 16 * panel.stride;
    const Size stride = 64;
    if (is_first) {
        TILE_ZERO(0); TILE_ZERO(1);
        if (T == 2) { TILE_ZERO(2); TILE_ZERO(3); }
    } else {
        TILE_LOAD(0, sums, stride); TILE_LOAD(1, sums + TILE, stride);
        if (T == 2) { TILE_LOAD(2, sums + 2 * TILE, stride); TILE_LOAD(3, sums + 3 * TILE, stride); }
    }
    for (Size step = 0; step < steps; step++) {
        TILE_LOAD(4, panel.rows + step * 64, panel.stride);
        TILE_LOAD(6, tokens + step * TILE, stride);
        TILE_ADD(0, 4, 6);
        TILE_LOAD(5, lower + step * 64, panel.stride);
        TILE_ADD(1, 5, 6);
        if (T == 2) {
            TILE_LOAD(7, others + step * TILE, stride);
            TILE_ADD(2, 4, 7);
            TILE_ADD(3, 5, 7);
        }
        if (step < place.rows) asm volatile("prefetchw %0" ::"m"(place.y[step * place.stride]));
        beside.some(share);
    }
    TILE_STORE(0, sums); TILE_STORE(1, sums + TILE);
    if (T == 2) { TILE_STORE(2, sums + 2 * TILE); TILE_STORE(3, sums + 3 * TILE); }
}

AVX512 INLINE __m512i rounded16(__m512 x) {  // bits in the upper half; smallest values stay
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
}

// Sums of a tile of tokens, [32 outputs][16 tokens], to y. is_tiny: values may be smaller than the processor's own
// rounding keeps.
template <Kind kind>
AVX512 INLINE void finish(const Job &job, Size tile, Size first, const uint8_t *sums, const float *scales,
                          bool is_tiny) {
    __m512 token_scale = _mm512_loadu_ps(job.token_scale + tile * 16);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i rows[16];
    #pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {  // two outputs of each token in a word
        __m512 two[2];
        #pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512i sum = _mm512_load_si512(sums + (2 * i + j) * 64);
            __m512 value = kind == INT8_DYNAMIC ? _mm512_cvtepi32_ps(sum) : _mm512_castsi512_ps(sum);
            if (is_dynamic(kind)) value = _mm512_mul_ps(value, token_scale);
            if (kind != PLAIN && kind < INT4) value = _mm512_mul_ps(value, _mm512_set1_ps(scales[2 * i + j]));
            two[j] = value;
        }
        __m512i low = is_tiny ? _mm512_srli_epi32(rounded16(two[0]), 16) : _mm512_setzero_si512();
        if (is_tiny) rows[i] = _mm512_mask_blend_epi16(0xAAAAAAAA, low, rounded16(two[1]));
        else rows[i] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
    }
    transpose(rows);
    __mmask32 mask = first32(job.outputs - first);
    Size count = std::min(job.tokens - tile * 16, Size(16));
    #pragma GCC unroll 16
    for (Size i = 0; i < 16; i++)
        if (i < count) _mm512_mask_storeu_epi16(job.y + (tile * 16 + i) * job.outputs + first, mask, rows[i]);
}

// The scales of a panel's outputs, and whether values are that small.
template <Kind kind> INLINE bool scales_of(const Job &job, Size first, float least_token, float *scales) {
    float least = 1;
    for (Size i = 0; i < PANEL; i++) {
        Size output = std::min(first + i, job.outputs - 1);
        scales[i] = 1;
        if (kind == INT8_DYNAMIC) scales[i] = static_cast<const float *>(job.scale)[output];
        if (kind == INT8 || kind == FLOAT8) scales[i] = widen(static_cast<const BFloat16 *>(job.scale)[output]);
        if (kind == FLOAT8) scales[i] *= 256;
        least = scales[i] >= least ? least : scales[i];
    }
    return kind == INT8_DYNAMIC && !(least * least_token >= 1.17549435e-38f);
}

// ---- a thread's part

// Units in the order in which they are multiplied: all tokens by a block of some units, then by their next block.
struct Order {
    Size last, turns, steps;  // last: of the thread's outputs; turns: units that take turns
    Size group, first, step;

    INLINE Unit take() {
        Unit unit{first, (std::max(last - first, Size(0)) + PANEL - 1) / PANEL, step, std::min(steps - step, BLOCK)};
        unit.panels = std::min(unit.panels, PANELS);
        if (!unit.panels) return {first, 0, 0, 0};
        Size end = std::min(group + turns * PANELS * PANEL, last);
        if ((first += PANELS * PANEL) >= end) {
            first = group, step += BLOCK;
            if (step >= steps) first = group = end, step = 0;
        }
        return unit;
    }
};

template <Kind kind> INLINE bool is_direct(const Job &job, const Unit &unit) {
    bool is_whole = unit.first + unit.panels * PANEL <= job.outputs && job.columns % step_columns(kind) == 0;
    return is_whole && job.tokens <= direct_tokens(kind);
}
template <Kind kind> INLINE Panel panel_of(const Job &job, const Unit &unit, Size panel, const uint8_t *unpacked) {
    if (!is_direct<kind>(job, unit)) return {unpacked + panel * PANEL * STRIDE, STRIDE};
    return {source<kind>(job, unit.first + panel * PANEL, unit.step), job.row_bytes};
}

template <Kind kind> AVX512 void units(const Job &job, Size begin, Size end, uint8_t *scratch, Size turns) {
    if (begin >= end) return;
    uint8_t *buffers[2] = {scratch, scratch + UNIT_BYTES}, *sums = scratch + 2 * UNIT_BYTES;
    const Size pairs = (job.tiles + 1) / 2;
    float least_token = 1;
    for (Size m = 0; m < job.tokens; m++) {
        float each = job.token_scale[m];
        least_token = each >= least_token ? least_token : each;  // NaN, too
    }
    Order order{end, turns, job.steps, begin, begin, 0};
    Unit unit = order.take();
    if (!is_direct<kind>(job, unit)) Beside<kind>{job, unit, buffers[0]}.some(PANELS * PANEL * BLOCK);
    while (unit.panels) {
        const Unit next = order.take();
        const bool is_last = unit.step + unit.steps == job.steps;
        Beside<kind> beside{job, is_direct<kind>(job, next) ? Unit{} : next, buffers[1]};
        const Size slots = unit.steps * pairs * unit.panels;
        const Size share = (beside.unit.panels * PANEL * beside.unit.steps + slots - 1) / slots;
        uint8_t *own = sums + (unit.first - begin) / (PANELS * PANEL) % turns * PANELS * pairs * 4 * TILE;
        float scales[PANELS][PANEL];
        bool is_tiny = false;
        for (Size p = 0; p < unit.panels; p++)
            is_tiny |= scales_of<kind>(job, unit.first + p * PANEL, least_token, scales[p]);
        for (Size pair = 0; pair < pairs; pair++)
            for (Size p = 0; p < unit.panels; p++) {
                uint8_t *to = job.steps > BLOCK ? own + (pair * PANELS + p) * 4 * TILE : own;
                const uint8_t *tokens = job.packed + (unit.step * job.tiles + pair * 2 * unit.steps) * TILE;
                const Size tile = pair * 2, first = unit.first + p * PANEL;
                const bool is_two = tile + 1 < job.tiles;
                const Panel panel = panel_of<kind>(job, unit, p, buffers[0]);
                Place place{job.y + tile * 16 * job.outputs + first, job.outputs, 0};
                if (is_last) place.rows = std::min(job.tokens - tile * 16, Size(32));
                if (is_two) multiply<kind, 2>(panel, tokens, unit.steps, to, unit.step == 0, beside, share, place);
                else multiply<kind, 1>(panel, tokens, unit.steps, to, unit.step == 0, beside, share, place);
                if (is_last) finish<kind>(job, tile, first, to, scales[p], is_tiny);
                if (is_last && is_two) finish<kind>(job, tile + 1, first, to + 2 * TILE, scales[p], is_tiny);
            }
        beside.some(PANELS * PANEL * BLOCK);
        std::swap(buffers[0], buffers[1]);
        unit = next;
    }
}

// Memory for a call, kept for the next: new pages cost as much as a part of the work.
struct Scratch {
    uint8_t *memory = nullptr;
    Size bytes = 0;
    ~Scratch() { std::free(memory); }
    uint8_t *at_least(Size wanted) {
        constexpr Size page = 2 << 20;
        if (wanted > bytes) {
            std::free(memory);
            bytes = up(wanted, page), memory = static_cast<uint8_t *>(std::aligned_alloc(page, bytes));
            madvise(memory, bytes, MADV_HUGEPAGE);
        }
        return memory;
    }
};
thread_local Scratch scratch_of_thread;

template <Kind kind> void run(Job job, int threads) {
    job.steps = (job.columns + step_columns(kind) - 1) / step_columns(kind);
    const Size all = job.tokens, parts = (all + AT_ONCE - 1) / AT_ONCE, most = up((all + parts - 1) / parts, 32);
    const Size token_bytes = most / 16 * job.steps * TILE, panels = (job.outputs + PANEL - 1) / PANEL;
    const Size turns = token_bytes <= CACHED ? 1 : UNITS;
    const Size row_bytes = is_dynamic(kind) ? up(16 * packed_stride(job), TILE) : 0;
    const Size own_bytes = std::max(2 * UNIT_BYTES + turns * PANELS * most / 16 * 2 * TILE, row_bytes);
    uint8_t *scratch = scratch_of_thread.at_least(token_bytes + threads * own_bytes + most * 4);
    job.packed = scratch + threads * own_bytes, job.token_scale = reinterpret_cast<float *>(job.packed + token_bytes);
    for (Size first = 0; first < all; first += most) {
        Job part = job;
        part.tokens = std::min(most, all - first), part.tiles = (part.tokens + 15) / 16;
        part.x += first * job.columns, part.y += first * job.outputs, part.extremes += job.extremes ? first : 0;
        #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int t = 0; t < threads; t++)
            for (Size tile = t; tile < part.tiles; tile += threads)
                pack_tokens<kind>(part, tile, scratch + t * own_bytes);
        #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int t = 0; t < threads; t++) {
            configure();
            Size begin = panels * t / threads * PANEL, end = panels * (t + 1) / threads * PANEL;
            units<kind>(part, begin, std::min(end, job.outputs), scratch + t * own_bytes, turns);
            release();
        }
    }
}
}  // namespace

extern "C" {

// Null, or why these kernels can't run here.
const char *why_not() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) + (d >> 24 & 1) + (d >> 25 & 1) < 3)
        return "this processor has no AMX";
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (!wide) return "this processor has no AVX-512 BF16";
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0 ? nullptr : "the system does not permit AMX";
}

// x [tokens, columns] and y [tokens, outputs] in bfloat16, without gaps; weight, scale, zero, group as in small_m.cpp.
void linear(int kind, Size tokens, Size columns, Size outputs, const void *x, const uint8_t *weight, const void *scale,
            const void *zero, Size group, const void *extremes, void *y, int threads) {
    Job job{};
    job.tokens = tokens, job.columns = columns, job.outputs = outputs;
    job.x = static_cast<const BFloat16 *>(x), job.weight = weight, job.scale = scale;
    job.row_bytes = kind == PLAIN ? 2 * columns : kind >= INT4 ? up(columns, 128) / 2 : columns;
    job.zero = static_cast<const BFloat16 *>(zero);
    job.group_shift = group ? __builtin_ctzll(group) : 5, job.groups = group ? columns / group : 0;
    job.extremes = static_cast<const BFloat16 *>(extremes), job.extremes_stride = tokens;
    job.y = static_cast<BFloat16 *>(y);
    if (kind == PLAIN) run<PLAIN>(job, threads);
    else if (kind == INT8) run<INT8>(job, threads);
    else if (kind == FLOAT8) run<FLOAT8>(job, threads);
    else if (kind == INT8_DYNAMIC) run<INT8_DYNAMIC>(job, threads);
    else if (kind == INT4) run<INT4>(job, threads);
    else run<INT4_DYNAMIC>(job, threads);
}
}
#else
extern "C" {
const char *why_not() { return "not an x86 processor with Linux"; }
}
#endif
