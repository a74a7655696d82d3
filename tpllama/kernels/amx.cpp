// y = x times the transpose of w, for many rows of x (tokens), on Intel's AMX: tiles of 16 rows of 64 bytes.
//
// w is read as small_m.cpp has it; its outputs are the rows of left tiles, so what comes out is y's transpose. bfloat16
// for few tokens is read from where it lies; else a unit of w (64 outputs by 32 steps of 64 bytes) is unpacked into
// tiles that lie behind each other. Tokens are packed once, into right tiles.
// Each sum is made in the order of k, whatever the number of tokens or threads.
//
// Gated, w has the outputs of two, gate and up, and y is silu(gate) * up: half as much to write, and nothing to read.

#include "tiles.h"

#if HAS_TILES

namespace {

enum Kind { PLAIN, INT8, FLOAT8, INT8_DYNAMIC, INT4, INT4_DYNAMIC };  // as small_m.cpp counts; not INT8_DYNAMIC

constexpr Size BLOCK = 32;      // steps of a unit
constexpr Size PANEL = 32;      // outputs that are multiplied at once
constexpr Size PANELS = 2;      // of a unit
constexpr Size ROW_STEPS = 4;   // steps of a row that are unpacked at once: a line of int4

struct Job {
    Size tokens, columns, outputs;
    Tokens x;
    const uint8_t *weight;
    Size row_bytes;            // from one output to the next
    const BFloat16 *scale;     // of rows, or of groups [outputs, groups]
    const BFloat16 *zero;      // of groups, or null
    Size group_shift, groups;  // a group has two to the power of it columns
    bool is_gated;             // rows outputs to 2 * outputs of w are those of up
    BFloat16 *y;               // [tokens, outputs]
    bool is_large;             // y is written past the cache

    Size steps, tiles;         // of columns, of tokens
    Size first_tile, end_tile; // of those that a thread multiplies
    uint8_t *packed;           // tokens: [blocks of steps][tiles][steps of the block][16 of k][16 tokens], 4 bytes each
    float *token_scale;        // [tiles * 16]
};

constexpr Size STEP = 32;  // columns
constexpr Form form_of(Kind kind) { return kind == INT4_DYNAMIC ? INTEGERS : AS_THEY_ARE; }
// So many tokens are multiplied with rows of w where they lie; more, which read them again and again, pay for a copy.
constexpr Size direct_tokens(Kind kind) { return kind == PLAIN ? 32 : 0; }

// ---- tokens

INLINE uint8_t *packed_at(const Job &job, Size tile, Size step) {
    Size block = step / BLOCK * BLOCK, steps = std::min(job.steps - block, BLOCK);
    return job.packed + (block * job.tiles + tile * steps + step - block) * TILE;
}

// 16 tokens as they are multiplied.
template <Kind kind> AVX512 void pack_tokens(const Job &job, Size tile) {
    const Size first = tile * 16, count = std::min(job.tokens - first, Size(16));
    Mapping mappings[16];
    for (Size i = 0; i < 16; i++) {
        mappings[i] = i < count ? mapping<form_of(kind)>(job.x, first + i) : Mapping{1, 1, 0};
        job.token_scale[first + i] = mappings[i].scale;
    }
    for (Size step = 0; step < job.steps; step++) {
        __m512i rows[16];
        #pragma GCC unroll 16
        for (Size i = 0; i < 16; i++)
            if (i < count) rows[i] = token64<form_of(kind)>(job.x, first + i, step * STEP, mappings[i]);
            else rows[i] = _mm512_setzero_si512();
        transpose(rows);
        auto to = reinterpret_cast<__m512i *>(packed_at(job, tile, step));
        #pragma GCC unroll 16
        for (Size i = 0; i < 16; i++) _mm512_store_si512(to + i, rows[i]);
    }
}

// ---- weights

constexpr Size PANEL_BYTES = PANEL * BLOCK * 64;  // unpacked: [steps][2 tiles]
struct Unit { Size first, panels, step, steps; };  // its outputs, its columns; gated, panels of gate and of up

// Of a panel of a unit: its first output, and where that lies in w.
INLINE Size output_of(const Job &job, const Unit &unit, Size panel) {
    return unit.first + (job.is_gated ? 0 : panel * PANEL);
}
INLINE Size row_of(const Job &job, const Unit &unit, Size panel) {
    return unit.first + panel * (job.is_gated ? job.outputs : PANEL);
}

// Where a step of a row begins; a block of int4 holds 128 columns in 64 bytes, the first half in their low halves.
template <Kind kind> INLINE const uint8_t *source(const Job &job, Size row, Size step) {
    Size at = kind >= INT4 ? step / 4 * 64 + step % 2 * 32 : step * (kind == PLAIN ? 64 : 32);
    return job.weight + row * job.row_bytes + at;
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
AVX512 INLINE __m512i values_of(const Job &job, Size group) {
    const __m512 integers = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    const float zero = job.zero ? widen(job.zero[group]) : 0;
    __m512 values = _mm512_mul_ps(integers, _mm512_set1_ps(widen(job.scale[group])));
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(values, _mm512_set1_ps(zero))));
}

// Steps first to last of a row as they are multiplied, to their tiles. Of the last, a part may be beyond the columns.
template <Kind kind, bool is_whole>
AVX512 INLINE void unpack(const Job &job, Size row, Size first, Size last, uint8_t *to) {
    const Size columns = job.columns, shift = job.group_shift - 5;
    Size group = -1;
    __m512i values{};
    for (Size step = first; step < last; step++, to += 2 * TILE) {
        const uint8_t *from = source<kind>(job, row, step);
        const Size left = columns - step * STEP;
        const __mmask32 mask = is_whole ? ~0u : first32(left);
        __m512i line;
        if constexpr (kind == PLAIN) line = _mm512_maskz_loadu_epi16(mask, from);
        else if constexpr (kind < INT4) line = widen32<kind>(_mm256_maskz_loadu_epi8(mask, from));
        else {  // its words choose by their lower bits; a group is whole steps
            __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
            words = _mm512_srl_epi16(words, _mm_cvtsi32_si128(step % 4 < 2 ? 0 : 4));
            if (group != step >> shift) group = step >> shift, values = values_of(job, row * job.groups + group);
            line = _mm512_maskz_permutexvar_epi16(mask, words, values);
        }
        _mm512_store_si512(to, line);
    }
}

// The 128 columns of a whole block of int4.
AVX512 INLINE void unpack_block(const Job &job, Size row, Size step, const uint8_t *from, uint8_t *to) {
    const Size shift = job.group_shift - 5, group = row * job.groups;
    const __m512i bytes = _mm512_loadu_si512(from);
    const __m512i words[2] = {_mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes)),
                              _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(bytes, 1))};
    __m512i values = values_of(job, group + (step >> shift));
    #pragma GCC unroll 4
    for (Size i = 0; i < 4; i++) {
        if (i > 0 && i >> shift << shift == i) values = values_of(job, group + ((step + i) >> shift));
        const __m512i chosen = i < 2 ? words[i] : _mm512_srli_epi16(words[i - 2], 4);
        _mm512_store_si512(to + i * 2 * TILE, _mm512_permutexvar_epi16(chosen, values));
    }
}

// A unit, panel by panel.
template <Kind kind> AVX512 void unpack_unit(const Job &job, const Unit &unit, uint8_t *to) {
    const Size end = unit.step + unit.steps;
    for (Size panel = 0; panel < unit.panels; panel++, to += PANEL_BYTES)
        for (Size step = unit.step; step < end; step += ROW_STEPS)
            for (Size row = 0; row < PANEL; row++) {
                const Size last = std::min(step + ROW_STEPS, end), from = row_of(job, unit, panel) + row;
                uint8_t *line = to + (step - unit.step) * 2 * TILE + row * 64;
                if (output_of(job, unit, panel) + row >= job.outputs)
                    for (Size i = step; i < last; i++, line += 2 * TILE) std::memset(line, 0, 64);
                else if (kind >= INT4 && last - step == ROW_STEPS)
                    unpack_block(job, from, step, source<kind>(job, from, step), line);
                else if (last * STEP <= job.columns) unpack<kind, true>(job, from, step, last, line);
                else unpack<kind, false>(job, from, step, last, line);
            }
}

// Fetches the next unit's weights into the second cache, a few lines at a time.
struct Fetch {
    const uint8_t *row;
    Size row_bytes, lines, rows;  // rows: of a panel
    const uint8_t *other;         // the panel that follows, or null
    Size share;                   // lines of each step
    Size line = 0, at = 0;

    INLINE void some() {
        Size count = share;
        for (; count > 0 && row; count--) {
            _mm_prefetch(row + line * 64, _MM_HINT_T1);
            if (++line < lines) continue;
            line = 0, row += row_bytes;
            if (++at == rows) at = 0, row = other, other = nullptr;
        }
    }
};

// ---- sums

// 32 rows of w from a step on, as they lie or unpacked.
struct Panel { const uint8_t *rows, *lower; Size stride, next; };

// 32 outputs of T tiles of tokens: sums += panel times tokens, sums [T][2 tiles of outputs].
template <int T>
AVX512 INLINE void multiply(Panel panel, const uint8_t *tokens, Size steps, uint8_t *sums, bool is_first, Fetch &fetch) {
    const Size stride = 64;
    const uint8_t *others = tokens + steps * TILE;
    if (is_first) {
        TILE_ZERO(0); TILE_ZERO(1);
        if (T == 2) { TILE_ZERO(2); TILE_ZERO(3); }
    } else {
        TILE_LOAD_PAST(0, sums, stride); TILE_LOAD_PAST(1, sums + TILE, stride);
        if (T == 2) { TILE_LOAD_PAST(2, sums + 2 * TILE, stride); TILE_LOAD_PAST(3, sums + 3 * TILE, stride); }
    }
    for (Size step = 0; step < steps; step++) {
        TILE_LOAD(4, panel.rows + step * panel.next, panel.stride);
        TILE_LOAD_PAST(6, tokens + step * TILE, stride);
        TILE_LOAD(5, panel.lower + step * panel.next, panel.stride);
        if (T == 2) TILE_LOAD_PAST(7, others + step * TILE, stride);
        TILE_ADD(0, 4, 6);
        TILE_ADD(1, 5, 6);
        if (T == 2) {
            TILE_ADD(2, 4, 7);
            TILE_ADD(3, 5, 7);
        }
        fetch.some();
    }
    TILE_STORE(0, sums); TILE_STORE(1, sums + TILE);
    if (T == 2) { TILE_STORE(2, sums + 2 * TILE); TILE_STORE(3, sums + 3 * TILE); }
}

// Sums of a tile of tokens, [32 outputs][16 tokens], as rows of y.
template <Kind kind>
AVX512 INLINE void rows_of(const Job &job, Size tile, const uint8_t *sums, const float *scales, __m512i *rows) {
    __m512 token_scale = _mm512_loadu_ps(job.token_scale + tile * 16);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    #pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {  // two outputs of each token in a word
        __m512 two[2];
        #pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512 value = _mm512_load_ps(sums + (2 * i + j) * 64);
            if (form_of(kind) != AS_THEY_ARE) value = _mm512_mul_ps(value, token_scale);
            if (kind != PLAIN && kind < INT4) value = _mm512_mul_ps(value, _mm512_set1_ps(scales[2 * i + j]));
            two[j] = value;
        }
        rows[i] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
    }
    transpose(rows);
}

// To 32 outputs of y.
AVX512 INLINE void store(const Job &job, Size tile, Size first, const __m512i *rows) {
    const __mmask32 mask = first32(job.outputs - first);
    const Size count = std::min(job.tokens - tile * 16, Size(16));
    for (Size i = 0; i < count; i++) {
        BFloat16 *y = job.y + (tile * 16 + i) * job.outputs + first;
        if (job.is_large) _mm512_stream_si512(reinterpret_cast<__m512i *>(y), rows[i]);
        else _mm512_mask_storeu_epi16(y, mask, rows[i]);
    }
}

// The scales of a panel's outputs.
template <Kind kind> INLINE void scales_of(const Job &job, Size output, Size row, float *scales) {
    for (Size i = 0; i < PANEL; i++) {
        Size at = row + std::min(i, job.outputs - 1 - output);
        scales[i] = 1;
        if (kind == INT8 || kind == FLOAT8) scales[i] = widen(job.scale[at]);
        if (kind == FLOAT8) scales[i] *= 256;
    }
}

// ---- a thread's part

// Units in the order in which they are multiplied: all tokens by a block of some units, then by their next block.
struct Order {
    Size last, turns, steps, size;  // last: of the thread's outputs; turns: units that take turns; size: of one
    bool is_gated;
    Size group, first, step;

    INLINE Unit take() {
        if (first >= last) return {first, 0, 0, 0};
        const Size panels = is_gated ? PANELS : std::min((last - first + PANEL - 1) / PANEL, PANELS);
        const Unit unit{first, panels, step, std::min(steps - step, BLOCK)};
        Size end = std::min(group + turns * size, last);
        if ((first += size) >= end) {
            first = group, step += BLOCK;
            if (step >= steps) first = group = end, step = 0;
        }
        return unit;
    }
};

template <Kind kind> INLINE bool is_direct(const Job &job, const Unit &unit) {
    const Size last = output_of(job, unit, unit.panels - 1) + PANEL;
    bool is_whole = last <= job.outputs && job.columns % STEP == 0;
    return is_whole && job.tokens <= direct_tokens(kind);
}
template <Kind kind> INLINE Panel panel_of(const Job &job, const Unit &unit, Size panel, const uint8_t *unpacked) {
    const uint8_t *rows = unpacked + panel * PANEL_BYTES, *own = source<kind>(job, row_of(job, unit, panel), unit.step);
    if (is_direct<kind>(job, unit)) return {own, own + 16 * job.row_bytes, job.row_bytes, 64};
    return {rows, rows + TILE, 64, 2 * TILE};
}

template <Kind kind> INLINE Fetch fetch_of(const Job &job, const Unit &unit) {
    if (!unit.panels) return {};
    const uint8_t *from = source<kind>(job, unit.first, unit.step);
    const Size bytes = source<kind>(job, unit.first, unit.step + unit.steps) - from;
    const Size rows = std::min(PANEL, job.outputs - output_of(job, unit, unit.panels - 1));
    const uint8_t *other = unit.panels > 1 ? source<kind>(job, row_of(job, unit, 1), unit.step) : nullptr;
    return {from, job.row_bytes, (bytes + 63) / 64, rows, other};
}

template <Kind kind> AVX512 void units(const Job &job, Size begin, Size end, uint8_t *scratch, Size turns) {
    if (begin >= end) return;
    uint8_t *unpacked = scratch, *sums = scratch + PANELS * PANEL_BYTES;
    const Size pairs = (job.end_tile - job.first_tile + 1) / 2;
    const Size size = job.is_gated ? PANEL : PANELS * PANEL;
    Order order{end, turns, job.steps, size, job.is_gated, begin, begin, 0};
    Unit unit = order.take();
    while (unit.panels) {
        const Unit next = order.take();
        const bool is_last = unit.step + unit.steps == job.steps;
        if (!is_direct<kind>(job, unit)) unpack_unit<kind>(job, unit, unpacked);
        Fetch fetch = fetch_of<kind>(job, next);
        const Size slots = unit.steps * pairs * unit.panels;
        fetch.share = (PANELS * fetch.rows * fetch.lines + slots - 1) / slots;
        uint8_t *own = sums + (unit.first - begin) / size % turns * PANELS * pairs * 4 * TILE;
        float scales[PANELS][PANEL];
        for (Size p = 0; p < unit.panels; p++)
            scales_of<kind>(job, output_of(job, unit, p), row_of(job, unit, p), scales[p]);
        auto sums_at = [&](Size pair, Size panel) { return own + (pair * PANELS + panel) * 4 * TILE; };
        for (Size pair = 0; pair < pairs; pair++)
            for (Size p = 0; p < unit.panels; p++) {
                const Size tile = job.first_tile + pair * 2;
                const uint8_t *tokens = packed_at(job, tile, unit.step);
                const Panel panel = panel_of<kind>(job, unit, p, unpacked);
                auto add = tile + 1 < job.end_tile ? multiply<2> : multiply<1>;
                add(panel, tokens, unit.steps, sums_at(pair, p), unit.step == 0, fetch);
            }
        // Not between multiplications, which would have to end before it and begin after it.
        for (Size tile = job.first_tile; is_last && tile < job.end_tile; tile++) {
            __m512i rows[PANELS][16];
            const Size at = tile - job.first_tile;
            for (Size p = 0; p < unit.panels; p++) {
                rows_of<kind>(job, tile, sums_at(at / 2, p) + at % 2 * 2 * TILE, scales[p], rows[p]);
                if (!job.is_gated) store(job, tile, output_of(job, unit, p), rows[p]);
            }
            if (!job.is_gated) continue;
            const Size count = std::min(job.tokens - tile * 16, Size(16));
            for (Size i = 0; i < count; i++) rows[0][i] = gated32(rows[0][i], rows[1][i]);
            store(job, tile, unit.first, rows[0]);
        }
        unit = next;
    }
    if (job.is_large) _mm_sfence();  // before others read y
}

template <Kind kind> void run(Job job, Team &team) {
    const Size threads = team.size;
    job.steps = (job.columns + STEP - 1) / STEP;
    const Size all = job.tokens, rounds = (all + AT_ONCE - 1) / AT_ONCE, most = up((all + rounds - 1) / rounds, 32);
    const Size token_bytes = most / 16 * job.steps * TILE;
    const Size turns = token_bytes / token_groups(most, token_bytes, threads) <= CACHED ? 1 : UNITS;
    const Size own_bytes = PANELS * PANEL_BYTES + turns * PANELS * most / 16 * 2 * TILE;
    uint8_t *scratch = scratch_of_thread.at_least(token_bytes + threads * own_bytes + most * 4);
    job.packed = scratch + threads * own_bytes, job.token_scale = reinterpret_cast<float *>(job.packed + token_bytes);
    for (Size first = 0; first < all; first += most) {
        Job part = job;
        part.tokens = std::min(most, all - first), part.tiles = (part.tokens + 15) / 16;
        part.x = job.x.from(first), part.y += first * job.outputs;
        pack_all(team, part.tiles, [&](Size tile) { pack_tokens<kind>(part, tile); });
        const Parts parts(token_groups(part.tokens, token_bytes, threads), threads, part.tiles, job.outputs, PANEL,
                          std::max(turns, UNITS) * PANELS);
        Shares shares(team, parts.count());
        share_out(team, threads, [&](Size t) {
            configure();
            for (Size i; (i = shares.next(t)) >= 0;) {
                const Part each = parts.at(i);
                Job own = part;
                own.first_tile = each.first_tile, own.end_tile = each.end_tile;
                units<kind>(own, each.begin, each.end, scratch + t * own_bytes, turns);
            }
            release();
        });
    }
}
}  // namespace

extern "C" {

// Null, or why these kernels can't run here.
const char *why_not() { return why_no_tiles(); }

struct Linear {  // `_Linear` in amx.py
    Size kind, is_gated, tokens, columns, outputs, group;
    const BFloat16 *x;        // [tokens, columns]
    const uint8_t *weight;    // it, scale, zero and group as in small_m.cpp
    const BFloat16 *scale, *zero, *extremes;
    BFloat16 *y;              // [tokens, outputs]
};

// Gated, the weight has 2 * outputs rows.
Size linear(const Linear &asked, Team &team) {
    if (!asked.tokens) return DONE;
    Job job{};
    const Size columns = asked.columns, group = asked.group;
    job.is_gated = asked.is_gated, job.tokens = asked.tokens, job.columns = columns, job.outputs = asked.outputs;
    job.x = {asked.x, columns, asked.extremes, asked.tokens};
    job.weight = asked.weight, job.scale = asked.scale, job.zero = asked.zero, job.y = asked.y;
    job.row_bytes = asked.kind == PLAIN ? 2 * columns : asked.kind >= INT4 ? up(columns, 128) / 2 : columns;
    job.group_shift = group ? __builtin_ctzll(group) : 5, job.groups = group ? columns / group : 0;
    job.is_large = is_large(job.y, job.tokens, job.outputs);
    if (asked.kind == PLAIN) run<PLAIN>(job, team);
    else if (asked.kind == INT8) run<INT8>(job, team);
    else if (asked.kind == FLOAT8) run<FLOAT8>(job, team);
    else if (asked.kind == INT4) run<INT4>(job, team);
    else run<INT4_DYNAMIC>(job, team);
    return DONE;
}
}
#else
extern "C" {
const char *why_not() { return "not an x86 processor with Linux"; }
}
#endif
