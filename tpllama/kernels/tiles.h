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
INLINE void configure() {
    Configuration all;
    asm volatile("ldtilecfg %0" ::"m"(all) : "memory");
}
INLINE void release() { asm volatile("tilerelease" ::: "memory"); }
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
