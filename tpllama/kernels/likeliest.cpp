// The place of each row's largest number.

#include "tokens.h"

namespace {

constexpr Size BLOCK = 2048;  // numbers whose largest is found before its place, which is sought in one block alone

struct Likeliest {  // `_Likeliest` in likeliest.py
    Size rows, columns;
    const BFloat16 *x;  // [rows, columns]
    float *value;       // [rows]
    int64_t *column;    // [rows]
};

// The first of the largest; where there is a NaN, it and any column.
INLINE void likeliest_any(const Likeliest &asked, Size row) {
    const BFloat16 *x = asked.x + row * asked.columns;
    float best = -std::numeric_limits<float>::infinity();
    Size at = 0;
    bool is_nan = false;
    for (Size begin = 0; begin < asked.columns; begin += BLOCK) {
        BFloat16 high, minus_low;
        extremes_of(x + begin, std::min(BLOCK, asked.columns - begin), &high, &minus_low);
        is_nan |= widen(high) != widen(high) || widen(minus_low) != widen(minus_low);
        if (widen(high) > best) best = widen(high), at = begin;
    }
    while (!is_nan && widen(x[at]) != best) at++;
    asked.value[row] = is_nan ? std::numeric_limits<float>::quiet_NaN() : best;
    asked.column[row] = at;
}

void likeliest_plain(const Likeliest &asked, Size row) { likeliest_any(asked, row); }
#if defined(__x86_64__)
AVX2 void likeliest_avx2(const Likeliest &asked, Size row) { likeliest_any(asked, row); }
#endif
}  // namespace

extern "C" {

Size likeliest(const Likeliest &asked, Team &team) {
    auto find = likeliest_plain;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) find = likeliest_avx2;
#endif
    share_out(team, asked.rows, [&](Size row) { find(asked, row); });
    return DONE;
}
}
