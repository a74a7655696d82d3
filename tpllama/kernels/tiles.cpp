// y = x times the transpose of w on Intel's AMX, for any number of rows of x (tokens), with weights that were laid out
// for it when they were loaded: as right tiles, 16 rows of 4 bytes of each of 16 outputs. Tokens are left tiles, rows of
// x as they are, so that y comes out as it is wanted, and nothing is turned or unpacked on the way.
//
// Up to 32 tokens read the weights once, as fast as memory gives them. For more, a panel of weights stays in the first
// cache while tokens pass by it from the second. Each sum is made in the order of k, whatever the number of tokens or
// threads.
//
// Gated, w has the outputs of two, gate and up, and y is silu(gate) * up.

#include "tiles.h"

#if HAS_TILES

namespace {

enum Kind { PLAIN, INT8 };  // bfloat16; int8, whose tokens become int8, too

constexpr Size PANEL = 32;    // outputs that are multiplied at once: two tiles, behind each other in each step
constexpr Size STEP = 2 * TILE;  // bytes of a panel for 64 bytes of each token
constexpr Size BLOCK = 16;    // steps of a panel that are multiplied with all tokens before the next: 32 KiB
constexpr Size AHEAD = 8192;  // bytes that are fetched ahead of what is read once

struct Job {
    bool is_gated;
    Size outputs, tokens;
    Tokens x;
    const uint8_t *weight;     // [outputs / 32][steps][2][16 of k][16 outputs][4 bytes]; gated, the panels of up follow
    const float *scale;        // of outputs, for INT8
    float least_scale;
    BFloat16 *y;               // [tokens, outputs]
    bool is_large;             // y is written past the cache

    Size steps, tiles;         // of columns, of tokens
    Size first_tile, end_tile; // of those that a thread multiplies
    uint8_t *packed;           // tokens: [tiles][steps][16 tokens][64 bytes]
    float *token_scale;        // [tiles * 16]
    bool is_tiny;              // values may be smaller than the processor's own rounding keeps
};

constexpr Form form_of(Kind kind) { return kind == INT8 ? BYTES : AS_THEY_ARE; }
constexpr Size step_columns(Kind kind) { return kind == INT8 ? 64 : 32; }

// Of gate's or of the only panel at an output, or, as part 1, of up's.
INLINE Size row_of(const Job &job, Size output, Size part) { return output + part * job.outputs; }
INLINE const uint8_t *weights(const Job &job, Size output, Size part, Size step) {
    return job.weight + (row_of(job, output, part) / PANEL * job.steps + step) * STEP;
}
INLINE uint8_t *tokens(const Job &job, Size tile, Size step) { return job.packed + (tile * job.steps + step) * TILE; }

// Rows beyond the last token stay as they are: nobody looks at what comes of them.
template <Kind kind> AVX512 void pack_tokens(const Job &job, Size tile) {
    for (Size m = tile * 16; m < std::min(tile * 16 + 16, job.tokens); m++) {
        const Mapping q = mapping<form_of(kind)>(job.x, m);
        job.token_scale[m] = q.scale;
        const Size later = std::min(m + 1, job.tokens - 1);
        for (Size step = 0; step < job.steps; step++) {
            const auto next = reinterpret_cast<const char *>(job.x.x + later * job.x.columns + step * step_columns(kind));
            for (Size at = 0; at < 2 * step_columns(kind); at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
            const __m512i line = token64<form_of(kind)>(job.x, m, step * step_columns(kind), q);
            _mm512_store_si512(tokens(job, tile, step) + m % 16 * 64, line);
        }
    }
}

// ---- results

// 32 outputs of a token in float32, from `row` of w on.
struct Values { __m512 low, high; };

template <Kind kind> AVX512 INLINE Values scaled(const Job &job, __m512i low, __m512i high, Size m, Size row) {
    if (kind == PLAIN) return {_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)};
    const __m512 token_scale = _mm512_set1_ps(job.token_scale[m]);
    const Size left = (job.is_gated ? 2 : 1) * job.outputs - row;
    auto value = [&](__m512i sum, Size first) AVX512 {
        __m512 scale = load16(job.scale + row + first, first16(std::max(left - first, Size(0))));
        return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), token_scale), scale);
    };
    return {value(low, 0), value(high, 16)};
}
AVX512 INLINE __m512i as_bfloat16(const Values &x, bool is_tiny) {
    if (!is_tiny) return (__m512i)_mm512_cvtne2ps_pbh(x.high, x.low);
    __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded16(x.low), 16));
    __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded16(x.high), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
// 32 outputs of token m of y, from the values of gate, or the only ones, and of up.
AVX512 INLINE void store(const Job &job, Size m, Size output, const Values *parts) {
    __m512i y = as_bfloat16(parts[0], job.is_tiny);
    if (job.is_gated) y = gated32(y, as_bfloat16(parts[1], job.is_tiny));
    BFloat16 *to = job.y + m * job.outputs + output;
    if (job.is_large) _mm512_stream_si512(reinterpret_cast<__m512i *>(to), y);
    else _mm512_mask_storeu_epi16(to, first32(job.outputs - output), y);
}
template <Kind kind> bool is_tiny(const Job &job) {
    float least = 1;
    for (Size m = 0; m < job.tokens; m++) least = job.token_scale[m] < least ? job.token_scale[m] : least;  // but NaN
    return kind == INT8 && !(least * job.least_scale >= 1.17549435e-38f);
}

// ---- tiles

#define ADD(sum, left, right)                                               \
    do {                                                                    \
        if constexpr (kind == INT8) TILE_ADD_BYTES(sum, left, right);       \
        else TILE_ADD(sum, left, right);                                    \
    } while (0)

// Weights that are read later, to be fetched into the second cache line by line.
struct Fetch {
    const uint8_t *next, *end;
    INLINE void some(Size lines) {
        for (Size i = 0; i < lines && next < end; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
};

// sums [2 tiles of outputs][T tiles of tokens] += tokens times a panel. is_once: the panel is read once, from memory.
// meanwhile(quarter): called in each quarter of a step.
template <Kind kind, int T, bool is_once, class Meanwhile>
AVX512 INLINE void multiply(const uint8_t *panel, const uint8_t *x, Size x_stride, Size steps, uint8_t *sums,
                            bool is_first, const Meanwhile &meanwhile) {
    const Size stride = 64;
    if (is_first) {
        TILE_ZERO(0); TILE_ZERO(1);
        if (T == 2) { TILE_ZERO(2); TILE_ZERO(3); }
    } else {
        TILE_LOAD_PAST(0, sums, stride); TILE_LOAD_PAST(1, sums + TILE, stride);
        if (T == 2) { TILE_LOAD_PAST(2, sums + 2 * TILE, stride); TILE_LOAD_PAST(3, sums + 3 * TILE, stride); }
    }
    for (Size step = 0; step < steps; step++, panel += STEP, x += TILE) {
        meanwhile(0);
        TILE_LOAD(4, panel, stride);
        if constexpr (is_once) {
            TILE_LOAD(6, x, stride);
            ADD(0, 6, 4);
            meanwhile(1);
            TILE_LOAD(5, panel + TILE, stride);
            ADD(1, 6, 5);
            meanwhile(2);
            if (T == 2) TILE_LOAD(7, x + x_stride, stride);
        } else {  // all loads first: they don't wait for memory, but for tiles to be free
            TILE_LOAD_PAST(6, x, stride);
            meanwhile(1);
            TILE_LOAD(5, panel + TILE, stride);
            if (T == 2) TILE_LOAD_PAST(7, x + x_stride, stride);
            ADD(0, 6, 4);
            ADD(1, 6, 5);
            meanwhile(2);
        }
        if (T == 2) {
            ADD(2, 7, 4);
            ADD(3, 7, 5);
        }
        meanwhile(3);
    }
    TILE_STORE(0, sums); TILE_STORE(1, sums + TILE);
    if (T == 2) { TILE_STORE(2, sums + 2 * TILE); TILE_STORE(3, sums + 3 * TILE); }
}

// Results of panels, of a thread's tokens, that are made one by one while the next panels are multiplied: in a pause
// tiles would have nothing to do, and memory nothing to fetch.
template <Kind kind> struct Results {
    const Job &job;
    const uint8_t *sums = nullptr;  // [panels][parts][pairs of tiles of tokens], each as `multiply` leaves them
    Size output = 0, end = 0;        // of the panels: of the next result, of the last
    Size m = 0, due = 0, each = 0;   // next token; how much of a result is due, and becomes so in each step, of `whole`
    Size whole = 1;

    INLINE Size first() const { return job.first_tile * 16; }
    INLINE Size last() const { return std::min(job.end_tile * 16, job.tokens); }
    INLINE Size panel_size() const { return (1 + job.is_gated) * pairs() * 4 * TILE; }
    INLINE Size pairs() const { return (job.end_tile - job.first_tile + 1) / 2; }

    // From now on those of panels from one output to another, within so many steps.
    void become(const uint8_t *new_sums, Size begin, Size new_end, Size steps) {
        sums = new_sums, output = begin, end = new_end, m = first(), due = 0, whole = steps;
        each = (end - begin + PANEL - 1) / PANEL * (last() - first());
    }
    AVX512 INLINE void step() {
        for (due += each; due >= whole; due -= whole) one();
    }
    AVX512 void rest() {
        while (output < end) one();
    }
    AVX512 INLINE void one() {
        if (output >= end) return;
        const Size row = m - first();
        const uint8_t *own = sums + row / 16 * 2 * TILE + row % 16 * 64;
        Values found[2];
        for (Size part = 0; part < 1 + job.is_gated; part++, own += pairs() * 4 * TILE) {
            const __m512i low = _mm512_load_si512(own), high = _mm512_load_si512(own + TILE);
            found[part] = scaled<kind>(job, low, high, m, row_of(job, output, part));
        }
        store(job, m, output, found);
        if (++m == last()) m = first(), output += PANEL, sums += panel_size();
    }
};

// Of up to 32 tokens no more rows than are there: tiles take as long as they have rows.
INLINE void configure_for(Size tokens) {
    Configuration all;
    const uint8_t rows[2] = {uint8_t(std::min(tokens, Size(16))), uint8_t(std::max(tokens - 16, Size(1)))};
    for (int of : {0, 1, 6}) all.rows[of] = rows[0];
    for (int of : {2, 3, 7}) all.rows[of] = rows[1];
    configure(all);
}

// The panels that a thread reads once, and fetches before: of each gate's, or the only one, and up's, then the next one's.
struct Reading {
    const Job &job;
    Shares &shares;
    Size thread, output, part;
    const uint8_t *next, *end;  // what is to be fetched of a panel

    Reading(const Job &job, Shares &shares, Size thread)
        : job(job), shares(shares), thread(thread), output(0), part(job.is_gated), next(nullptr), end(nullptr) {
        go_on();
    }
    // To the next panel; output is -1 where there is none.
    void go_on() {
        if (output < 0) return;
        if (++part > job.is_gated) {
            const Size panel = shares.next(thread);
            part = 0, output = panel < 0 ? -1 : panel * PANEL;
        }
        if (output >= 0) next = weights(job, output, part, 0), end = next + job.steps * STEP;
    }
    // A quarter of a step. Lines are fetched a few at a time: many at once fill the buffers that all that the first
    // cache lacks goes through, and what is done meanwhile would wait for memory, too.
    AVX512 INLINE void fetch_some() {
        if (next == end) go_on();
        if (output < 0) return;
        for (Size i = 0; i < STEP / 4; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
        next += STEP / 4;
    }
};

// A thread's panels, of up to 32 tokens.
template <Kind kind, int T> AVX512 void read_once(const Job &job, Shares &shares, Size thread, uint8_t *sums) {
    Reading ahead(job, shares, thread);
    Results<kind> results{job};
    Size output = ahead.output, parts = 1 + job.is_gated;
    for (Size bytes = 0; bytes < std::min(AHEAD, job.steps * STEP); bytes += STEP / 4) ahead.fetch_some();
    for (Size turn = 0; output >= 0; turn ^= 1) {
        uint8_t *own = sums + turn * results.panel_size();
        for (Size part = 0; part < parts; part++) {
            auto meanwhile = [&](Size quarter) AVX512 IN_PLACE {
                ahead.fetch_some();
                if (quarter == 3) results.step();
            };
            multiply<kind, T, true>(weights(job, output, part, 0), tokens(job, 0, 0), job.steps * TILE, job.steps,
                                    own + part * 4 * TILE, true, meanwhile);
        }
        results.rest();
        results.become(own, output, std::min(output + PANEL, job.outputs), parts * job.steps);
        output = ahead.output;
    }
    results.rest();
}

// Panels from one output to another, of a thread's tokens: of some panels in turns the first block, then the next one.
template <Kind kind> AVX512 void by_blocks(const Job &job, Size begin, Size end, uint8_t *sums, Size turns) {
    const Size pairs = (job.end_tile - job.first_tile + 1) / 2, parts = 1 + job.is_gated;
    Results<kind> results{job};
    for (Size group = begin; group < end; group += turns * PANEL) {
        const Size group_end = std::min(group + turns * PANEL, end);
        uint8_t *own = sums + (group - begin) / PANEL / turns % 2 * turns * results.panel_size();
        for (Size step = 0; step < job.steps; step += BLOCK)
            for (Size output = group; output < group_end; output += PANEL)
                for (Size part = 0; part < parts; part++) {
                    const Size count = std::min(job.steps - step, BLOCK);
                    // What comes next lies behind, or is up's after gate's and gate's after up's; after the last,
                    // most likely, the next part's.
                    Size next = output, next_part = part + 1, next_step = step;
                    if (next_part == parts) next_part = 0, next += PANEL;
                    if (next >= group_end) next = group, next_step += BLOCK;
                    if (next_step >= job.steps) next = group_end, next_step = 0;
                    const Size lines = next < job.outputs ? std::min(job.steps - next_step, BLOCK) * STEP / 64 : 0;
                    const uint8_t *from = weights(job, next, next_part, next_step);
                    Fetch fetch{from, from + lines * 64};
                    const Size share = (lines + count * pairs - 1) / (count * pairs);
                    auto meanwhile = [&](Size quarter) AVX512 IN_PLACE {
                        if (quarter == 0) fetch.some(share);
                        if (quarter == 3) results.step();
                    };
                    for (Size pair = 0; pair < pairs; pair++) {
                        const Size tile = job.first_tile + pair * 2;
                        auto add = [&](auto tiles) AVX512 IN_PLACE {
                            multiply<kind, tiles.value, false>(
                                weights(job, output, part, step), tokens(job, tile, step), job.steps * TILE, count,
                                own + (((output - group) / PANEL * parts + part) * pairs + pair) * 4 * TILE, step == 0,
                                meanwhile);
                        };
                        if (tile + 1 < job.end_tile) add(std::integral_constant<int, 2>{});
                        else add(std::integral_constant<int, 1>{});
                    }
                }
        results.rest();
        results.become(own, group, group_end, (group_end - group + PANEL - 1) / PANEL * parts * job.steps * pairs);
    }
    results.rest();
}

template <Kind kind> void run(Job job, Team &team) {
    const Size threads = team.size, weights_of = 1 + job.is_gated;
    job.steps = (job.x.columns + step_columns(kind) - 1) / step_columns(kind);
    const Size all = job.tokens, rounds = (all + AT_ONCE - 1) / AT_ONCE, most = up((all + rounds - 1) / rounds, 32);
    const Size token_bytes = most / 16 * job.steps * TILE;
    const Size turns = token_bytes / token_groups(most, token_bytes, threads) <= CACHED ? 1 : 2 * UNITS;
    const Size own_bytes = 2 * turns * weights_of * most / 16 * 2 * TILE;
    uint8_t *scratch = scratch_of_thread.at_least(token_bytes + threads * own_bytes + most * 4);
    job.packed = scratch + threads * own_bytes, job.token_scale = reinterpret_cast<float *>(job.packed + token_bytes);
    for (Size first = 0; first < all; first += most) {
        Job round = job;
        round.tokens = std::min(most, all - first), round.tiles = (round.tokens + 15) / 16;
        round.x = job.x.from(first), round.y += first * job.outputs;
        const Size groups = token_groups(round.tokens, token_bytes, threads);
        pack_all(team, round.tiles, [&](Size tile) { pack_tokens<kind>(round, tile); });
        round.is_tiny = is_tiny<kind>(round);
        const bool is_once = round.tiles <= 2;
        const Parts parts(groups, threads, round.tiles, job.outputs, PANEL, std::max(turns, UNITS));
        Shares shares(team, is_once ? (job.outputs + PANEL - 1) / PANEL : parts.count());
        share_out(team, threads, [&](Size t) {
            uint8_t *sums = scratch + t * own_bytes;
            Job own = round;
            own.end_tile = round.tiles;
            if (is_once) configure_for(round.tokens);
            else configure();
            if (round.tiles == 1) read_once<kind, 1>(own, shares, t, sums);
            else if (round.tiles == 2) read_once<kind, 2>(own, shares, t, sums);
            else
                for (Size i; (i = shares.next(t)) >= 0;) {
                    const Part part = parts.at(i);
                    own.first_tile = part.first_tile, own.end_tile = part.end_tile;
                    by_blocks<kind>(own, part.begin, part.end, sums, turns);
                }
            if (job.is_large) _mm_sfence();  // before others read y
            release();
        });
    }
}

// 32 rows of w as a panel.
AVX512 void lay(const uint8_t *from, Size rows, Size row_bytes, uint8_t *to) {
    for (Size at = 0; at < row_bytes; at += 64)
        for (Size tile = 0; tile < 2; tile++, to += TILE) {
            __m512i lines[16];
            for (Size i = 0; i < 16; i++) {
                const Size row = tile * 16 + i;
                const __mmask64 mask = row < rows ? first64(row_bytes - at) : 0;
                lines[i] = _mm512_maskz_loadu_epi8(mask, from + row * row_bytes + at);
            }
            transpose(lines);
            for (Size i = 0; i < 16; i++) _mm512_store_si512(to + i * 64, lines[i]);
        }
}

// A row of w as it was before it was laid out.
AVX512 void take(const uint8_t *weight, Size row, Size steps, uint8_t *to) {
    const __m512i places =
        _mm512_setr_epi32(0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960);
    const uint8_t *from = weight + row / PANEL * steps * STEP + row % PANEL / 16 * TILE + row % 16 * 4;
    for (Size step = 0; step < steps; step++, from += STEP)
        _mm512_storeu_si512(to + step * 64, _mm512_i32gather_epi32(places, from, 1));
}
}  // namespace

extern "C" {

// Null, or why these kernels can't run here.
const char *why_not() { return why_no_tiles(); }

struct Linear {  // `_Linear` in tiles.py
    Size kind, is_gated, tokens, columns, outputs;  // gated, outputs are a multiple of 32
    const BFloat16 *x;        // [tokens, columns]
    const uint8_t *weight;    // as `lay_out` leaves it
    const float *scale;       // of outputs, for INT8
    const BFloat16 *extremes; // of tokens [2, tokens] that ranks agreed on; or null
    BFloat16 *y;              // [tokens, outputs]
    float least_scale;        // of outputs
};

Size linear(const Linear &asked, Team &team) {
    if (!asked.tokens) return DONE;
    Job job{};
    job.is_gated = asked.is_gated, job.outputs = asked.outputs, job.tokens = asked.tokens;
    job.x = {asked.x, asked.columns, asked.extremes, asked.tokens};
    job.weight = asked.weight, job.scale = asked.scale, job.least_scale = asked.least_scale, job.y = asked.y;
    job.is_large = is_large(asked.y, asked.tokens, asked.outputs);
    (asked.kind == INT8 ? run<INT8> : run<PLAIN>)(job, team);
    return DONE;
}

struct LayOut {  // `_LayOut` in tiles.py
    Size rows, row_bytes;
    const uint8_t *from;  // [rows, row_bytes]
    uint8_t *to;          // zeros up to 32 rows and 64 bytes
};

Size lay_out(const LayOut &asked, Team &team) {
    const Size panel_bytes = up(asked.row_bytes, 64) * PANEL;
    share_out(team, (asked.rows + PANEL - 1) / PANEL, [&](Size panel) {
        const Size first = panel * PANEL;
        lay(asked.from + first * asked.row_bytes, asked.rows - first, asked.row_bytes, asked.to + panel * panel_bytes);
    });
    return DONE;
}

struct TakeRows {  // `_TakeRows` in tiles.py
    Size count, steps;
    const int64_t *numbers;  // of rows [count]
    const uint8_t *weight;
    uint8_t *to;             // [count, steps, 64]
};

Size take_rows(const TakeRows &asked, Team &team) {
    share_out(team, asked.count, [&](Size i) {
        take(asked.weight, asked.numbers[i], asked.steps, asked.to + i * asked.steps * 64);
    });
    return DONE;
}
}
#else
extern "C" {
const char *why_not() { return "not an x86 processor with Linux"; }
}
#endif
