// Intel's AMX: eight tiles of 16 rows of 64 bytes, and what is put into them.

#pragma once
#include <algorithm>
#include <cstdlib>

#include "tokens.h"

#if defined(__x86_64__) && defined(__linux__)
#define HAS_TILES 1
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr Size TILE = 1024;  // bytes: 16 rows of 64

// The compiler doesn't know the instructions, so it must not move memory accesses past those that load and store.
struct alignas(64) Configuration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
INLINE void configure(const Configuration &all = {}) {
    asm volatile("ldtilecfg %0" ::"m"(all) : "memory");
}
INLINE void release() { asm volatile("tilerelease" ::: "memory"); }
#define TILE_LOAD_PAST(t, from, stride) /* the first cache, which keeps what it has */ \
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(from), "r"(stride) : "memory")
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(stride) : "memory")
#define TILE_STORE_AT(t, to, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(Size(stride)) : "memory")
#define TILE_STORE(t, to) TILE_STORE_AT(t, to, 64)
#define TILE_ADD(sum, left, right) asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)
#define TILE_ADD_BYTES(sum, left, right) asm volatile("tdpbssd %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)

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

AVX512 INLINE __mmask32 first32(Size count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }
AVX512 INLINE __mmask64 first64(Size count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }

// The odd ones of 32 numbers, and the even ones.
AVX512 INLINE __m512 upper16(__m512i x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xFFFF0000))));
}
AVX512 INLINE __m512 lower16(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }

// ---- tokens, as they are multiplied

constexpr Size AT_ONCE = 512;          // tokens
constexpr Size TOKENS_OF_GROUP = 192;  // of threads, at the least
constexpr Size CACHED = 1 << 20;       // bytes of tokens that are read again from the cache for each panel
constexpr Size UNITS = 4;              // that share a reading of tokens that are more
constexpr Size PARTS_OF_THREAD = 4;    // at the least: see `Parts`

// Among how many groups of threads tokens are shared out, where a core's cache doesn't hold them all; within a group
// outputs are. Each group reads all weights.
inline Size token_groups(Size tokens, Size token_bytes, Size threads) {
    if (token_bytes <= CACHED) return 1;
    Size groups = std::min(threads, tokens / TOKENS_OF_GROUP);
    while (groups > 1 && threads % groups) groups--;
    return std::max(groups, Size(1));
}

struct Tokens {
    const BFloat16 *x;         // [tokens, columns]
    Size columns;
    const BFloat16 *extremes;  // [2, extremes_stride] where ranks agreed on them; or none
    Size extremes_stride;

    Tokens from(Size first) const {
        return {x + first * columns, columns, extremes ? extremes + first : nullptr, extremes_stride};
    }
};
enum Form { AS_THEY_ARE, BYTES, INTEGERS };  // bfloat16, int8 (symmetric), or int8 (asymmetric) in bfloat16

template <Form form> AVX512 INLINE Mapping mapping(const Tokens &tokens, Size m) {
    if (form == AS_THEY_ARE) return {1, 1, 0};
    BFloat16 range[2];
    if (tokens.extremes) range[0] = tokens.extremes[m], range[1] = tokens.extremes[tokens.extremes_stride + m];
    else extremes_of(tokens.x + m * tokens.columns, tokens.columns, range, range + 1);
    Range wide{widen(range[0]), widen(range[1])};
    return form == BYTES ? symmetric<BFloat16>(wide) : asymmetric(wide);
}

// 32 of a row's columns, of which `left` are there: the even ones and the odd ones times a factor.
struct Pair { __m512 even, odd; };
AVX512 INLINE Pair scaled32(const BFloat16 *x, Size left, float factor) {
    const __m512i words = _mm512_maskz_loadu_epi16(first32(left), x);
    return {_mm512_mul_ps(lower16(words), _mm512_set1_ps(factor)), _mm512_mul_ps(upper16(words), _mm512_set1_ps(factor))};
}

// 64 bytes of token m, from column k on; zero beyond the last.
template <Form form> AVX512 INLINE __m512i token64(const Tokens &tokens, Size m, Size k, const Mapping &q) {
    const BFloat16 *x = tokens.x + m * tokens.columns + k;
    const Size left = tokens.columns - k;
    if constexpr (form == AS_THEY_ARE) return _mm512_maskz_loadu_epi16(first32(left), x);
    if constexpr (form == BYTES) {
        auto words = [&](Pair values) AVX512 IN_PLACE {  // in each quarter four even ones, then the odd ones beside them
            return _mm512_packs_epi32(_mm512_cvtps_epi32(values.even), _mm512_cvtps_epi32(values.odd));
        };
        const __m512i low = words(scaled32(x, left, q.inverse)), high = words(scaled32(x + 32, left - 32, q.inverse));
        const __m512i in_quarters = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
        __m512i bytes = _mm512_shuffle_epi8(_mm512_packs_epi16(low, high), in_quarters);  // limited by saturation
        bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes);
        return _mm512_maskz_mov_epi8(first64(left), bytes);
    } else {  // the integers less their zero point: exact in bfloat16
        const Pair values = scaled32(x, left, q.inverse);
        const __m512i zero = _mm512_set1_epi32(q.zero);
        auto integers = [&](__m512 value) AVX512 IN_PLACE {
            __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(round16(value)), zero);
            whole = limited16(_mm512_cvtps_epi32(round16(_mm512_cvtepi32_ps(whole))));
            return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(whole, zero)));  // no more than 16 bits
        };
        const __m512i even = _mm512_srli_epi32(integers(values.even), 16);
        return _mm512_maskz_mov_epi16(first32(left), _mm512_or_si512(even, integers(values.odd)));
    }
}

// Every tile of tokens by `pack`. Together, each thread has its own.
template <class Pack> void pack_all(Team &team, Size tiles, const Pack &pack) {
    if (!is_together(team)) return share_out(team, tiles, pack);
    for (Size tile = 0; tile < tiles; tile++) pack(tile);
}

// What threads multiply one after another: some pairs of tiles of tokens by some panels of outputs. In their order a
// thread's share is of one group's tokens, as far as threads take their own.
struct Part { Size first_tile, end_tile, begin, end; };
struct Parts {
    Size groups, tiles, outputs, size;  // size: outputs of a part

    // Panels of a part: several, but enough parts for threads to end together.
    Parts(Size groups, Size threads, Size tiles, Size outputs, Size panel, Size most_panels)
        : groups(groups), tiles(tiles), outputs(outputs) {
        const Size wanted = PARTS_OF_THREAD * (threads / groups);
        size = std::clamp(outputs / panel / wanted, Size(1), most_panels) * panel;
    }
    Size of_group() const { return (outputs + size - 1) / size; }
    Size count() const { return groups * of_group(); }
    Part at(Size i) const {
        const Size group = i / of_group(), begin = i % of_group() * size, pairs = (tiles + 1) / 2;
        return {pairs * group / groups * 2, std::min(pairs * (group + 1) / groups * 2, tiles),
                begin, std::min(begin + size, outputs)};
    }
};

// ---- results

// Whether y is written past the cache, in whole lines. Otherwise each line would be read before it is written, far from
// the last one, and in the way of all that tiles are loaded from: 512 tokens of 3,072 outputs took half as long again.
inline bool is_large(const BFloat16 *y, Size tokens, Size outputs) {
    return reinterpret_cast<uintptr_t>(y) % 64 == 0 && outputs % 32 == 0 && tokens * outputs * 2 >= 512 << 10;
}

AVX512 INLINE __m512i rounded16(__m512 x) {  // bits in the upper half; smallest values stay
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
}

// silu(x) in bfloat16, bit for bit as fused.cpp computes it: see its exp_of.
AVX512 INLINE __m512 silu16(__m512 x) {
    const float series[] = {1.9875691e-4f, 1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666665e-1f, 5.0000001e-1f};
    auto set = [](float value) AVX512 { return _mm512_set1_ps(value); };
    __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), x);
    __m512 limited = _mm512_min_ps(set(88.7f), _mm512_max_ps(set(-87), minus));  // NaN stays
    __m512 shifted = _mm512_add_ps(_mm512_mul_ps(limited, set(1.44269504f)), set(12582912));
    __m512 n = _mm512_sub_ps(shifted, set(12582912));
    __m512 r = _mm512_sub_ps(limited, _mm512_mul_ps(n, set(0.693359375f)));
    r = _mm512_sub_ps(r, _mm512_mul_ps(n, set(-2.12194440e-4f)));
    __m512 y = set(series[0]);
    for (int i = 1; i < 6; i++) y = _mm512_add_ps(_mm512_mul_ps(y, r), set(series[i]));
    y = _mm512_add_ps(_mm512_add_ps(_mm512_mul_ps(_mm512_mul_ps(y, r), r), r), set(1));
    __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    y = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), power));
    const __mmask16 is_over = _mm512_cmp_ps_mask(minus, set(88.7228f), _CMP_GT_OQ);
    y = _mm512_mask_mov_ps(_mm512_add_ps(set(1), y), is_over, set(std::numeric_limits<float>::infinity()));
    return _mm512_castsi512_ps(rounded16(_mm512_div_ps(x, y)));
}
// The same for 2^-125 <= |x| <= 80: a shorter series and a quotient less near, which for each of these x round to the
// same bits (a test compares all). Rounded to 8 bits as Veltkamp splits numbers (Dekker 1971).
AVX512 INLINE __m512 usual_silu16(__m512 x) {
    const float series[] = {9.57038533e-3f, 5.58941327e-2f, 2.40239918e-1f, 6.93119407e-1f, 1};
    auto set = [](float value) AVX512 IN_PLACE { return _mm512_set1_ps(value); };
    const __m512 shifted = _mm512_fmadd_ps(x, set(-1.44269504f), set(12582912));
    const __m512 r = _mm512_fmsub_ps(x, set(-1.44269504f), _mm512_sub_ps(shifted, set(12582912)));
    __m512 y = set(series[0]);
    for (int i = 1; i < 5; i++) y = _mm512_fmadd_ps(y, r, set(series[i]));
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    y = _mm512_add_ps(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), power)), set(1));
    const __m512 inverse = _mm512_rcp14_ps(y), near = _mm512_mul_ps(x, inverse);
    const __m512 quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(near, y, x), inverse, near);
    const __m512 large = _mm512_mul_ps(quotient, set((1 << 16) + 1));
    return _mm512_sub_ps(large, _mm512_sub_ps(large, quotient));
}
AVX512 __attribute__((noinline)) inline __m512i any_gated32(__m512i gate, __m512i up) {
    __m512 even = lower16(gate), odd = upper16(gate);
    even = _mm512_mul_ps(upper16(_mm512_castps_si512(silu16(even))), lower16(up));
    odd = _mm512_mul_ps(upper16(_mm512_castps_si512(silu16(odd))), upper16(up));
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(rounded16(even), 16), rounded16(odd));
}
// silu(gate) * up of 32 numbers.
AVX512 INLINE __m512i gated32(__m512i gate, __m512i up) {
    const __m512 even = _mm512_mul_ps(usual_silu16(lower16(gate)), lower16(up));
    const __m512 odd = _mm512_mul_ps(usual_silu16(upper16(gate)), upper16(up));
    constexpr short least = 0x0100, most = 0x42A0;  // 2^-125, 80
    const __m512i size = _mm512_sub_epi16(_mm512_and_si512(gate, _mm512_set1_epi16(0x7FFF)), _mm512_set1_epi16(least));
    const __mmask32 is_far = _mm512_cmpgt_epu16_mask(size, _mm512_set1_epi16(most - least));  // or 0
    constexpr int tiny_or_nan = 0xA1;
    const __mmask16 is_odd = _mm512_fpclass_ps_mask(even, tiny_or_nan) | _mm512_fpclass_ps_mask(odd, tiny_or_nan);
    if (__builtin_expect(is_far | is_odd, 0)) return any_gated32(gate, up);
    const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
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

// Null, or why these instructions can't run here. Asks the system for them, for the whole process.
inline const char *why_no_tiles() {
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
}  // namespace
#endif
