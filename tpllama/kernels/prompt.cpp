// Attention of prompts over the paged cache, in bfloat16 on Intel's AMX: a softmax that goes on over blocks of keys
// (Milakov and Gimelshein 2018, arXiv 1805.02867), whose scores never leave the processor's cache.
//
// The query heads of a KV head are rows of one query matrix. Keys and values are packed once, into right tiles; what
// multiplies them, 32 rows at a time, are queries and then the weights of a block's keys, rounded to bfloat16.
// Blocks are counted from a sequence's first token on, so a token's bits depend neither on what is computed with it,
// nor on how its prompt was cut, nor on threads.

#include "tiles.h"

#if HAS_TILES

namespace {

constexpr Size ROWS = 32;          // of queries: token by token, each with its heads
constexpr Size BLOCK = 256;        // keys
constexpr Size SCORES = BLOCK + 16, WEIGHTS = BLOCK + 32;  // strides: powers of two share places in the cache
constexpr Size PACKED = 64 << 20;  // bytes of packed keys and values at a time
constexpr float LOG2E = 1.44269504f;

// Several tokens of each of some sequences, which look at what lies before them and at themselves.
struct Prompts {
    Size count;
    const int64_t *rows;     // of each prompt's first token in the step
    const int64_t *tokens;   // how many
    const int64_t *lengths;  // keys, the last token's own included
    const int64_t *ends;     // of each prompt's runs
    const int64_t *runs;     // the first slot and the number of slots
};

struct Heads {
    Size heads, kv_heads, dim, q_stride;
    const BFloat16 *q;              // [tokens of the step], rows of this stride
    const BFloat16 *keys, *values;  // [slots, kv_heads, dim]
    BFloat16 *out;                  // [tokens of the step, heads, dim]
    float scale;                    // of the scores
};

struct Prompt {
    Size row, tokens, length;
    const int64_t *run, *last_run;
    Size steps, width;               // of the dimension: in steps of 32, filled up to them
    Size first, last;                // KV heads that are packed
    uint8_t *packed_keys;            // [KV heads][16 keys][steps] tiles: [16 pairs of the dimension][16 keys][2]
    uint8_t *packed_values;          // [KV heads][32 keys][2 * steps] tiles: [16 pairs of keys][16 of the dimension][2]
    Size head_bytes;                 // of either
};

// The elements before the vectors of 32 tokens from a position on, negative beyond the length.
INLINE void places(const Prompt &prompt, Size position, Size stride, Size *offsets) {
    Size before = 0;
    const int64_t *run = prompt.run;
    while (run < prompt.last_run && before + run[1] <= position) before += run[1], run += 2;
    for (Size i = 0; i < 32; i++, position++) {
        if (run < prompt.last_run && before + run[1] <= position) before += run[1], run += 2;
        offsets[i] = position < prompt.length ? (run[0] + position - before) * stride : -1;
    }
}

AVX512 INLINE __m512i load32(const BFloat16 *from, Size offset, Size column, Size dim) {
    return _mm512_maskz_loadu_epi16(offset < 0 ? 0 : first32(dim - column), from + offset + column);
}

// 32 keys and values of a KV head.
AVX512 void pack(const Heads &h, const Prompt &prompt, Size head, Size block) {
    Size offsets[32];
    places(prompt, block * 32, h.kv_heads * h.dim, offsets);
    const BFloat16 *keys = h.keys + head * h.dim, *values = h.values + head * h.dim;
    const Size own = (head - prompt.first) * prompt.head_bytes + block * 2 * prompt.steps * TILE;
    auto k = reinterpret_cast<__m512i *>(prompt.packed_keys + own);
    for (Size half = 0; half < 32; half += 16)
        for (Size step = 0; step < prompt.steps; step++, k += 16) {
            __m512i rows[16];
            #pragma GCC unroll 16
            for (Size i = 0; i < 16; i++) rows[i] = load32(keys, offsets[half + i], step * 32, h.dim);
            transpose(rows);
            #pragma GCC unroll 16
            for (Size i = 0; i < 16; i++) _mm512_store_si512(k + i, rows[i]);
        }
    auto v = reinterpret_cast<__m512i *>(prompt.packed_values + own);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                         39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (Size step = 0; step < prompt.steps; step++, v += 32)
        for (Size i = 0; i < 16; i++) {
            __m512i even = load32(values, offsets[2 * i], step * 32, h.dim);
            __m512i odd = load32(values, offsets[2 * i + 1], step * 32, h.dim);
            _mm512_store_si512(v + i, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(v + 16 + i, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// 2^x for x <= 0: the nearest integer's power, times a series on [-1/2, 1/2] that is good to the last bit or two.
AVX512 INLINE __m512 exp2_of(__m512 x) {
    const float series[] = {1.5353362e-4f, 1.3398874e-3f, 9.6184370e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f};
    __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n), y = _mm512_set1_ps(series[0]);
    for (int i = 1; i < 6; i++) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(series[i]));
    return _mm512_scalef_ps(_mm512_fmadd_ps(y, r, _mm512_set1_ps(1)), n);
}

// What a thread computes with. Of each row: its largest score so far, the sum of weights relative to it, and the sums
// of weighted values.
struct Own {
    BFloat16 *queries;              // [ROWS, width]
    float *scores;                  // [ROWS, SCORES]
    BFloat16 *weights;              // [ROWS, WEIGHTS]
    float *sums;                    // [ROWS, width]
    float largest[ROWS], sum[ROWS];
    static Size bytes(Size width) { return ROWS * (width * 2 + SCORES * 4 + WEIGHTS * 2 + width * 4); }
    Own(uint8_t *memory, Size width)
        : queries(reinterpret_cast<BFloat16 *>(memory)), scores(reinterpret_cast<float *>(queries + ROWS * width)),
          weights(reinterpret_cast<BFloat16 *>(scores + ROWS * SCORES)),
          sums(reinterpret_cast<float *>(weights + ROWS * WEIGHTS)) {}
};

// sums [32 rows, stride] (+)= left [32 rows] times two right tiles of each step.
template <bool is_first>
INLINE void multiply(const BFloat16 *left, Size left_stride, const uint8_t *right, Size next, Size apart, Size steps,
                     float *sums, Size stride) {
    const Size left_bytes = left_stride * 2, bytes = stride * 4, tile_bytes = 64;
    float *lower = sums + 16 * stride;
    if (is_first) {
        TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    } else {
        TILE_LOAD(0, sums, bytes); TILE_LOAD(1, sums + 16, bytes);
        TILE_LOAD(2, lower, bytes); TILE_LOAD(3, lower + 16, bytes);
    }
    for (Size step = 0; step < steps; step++, left += 32, right += next) {
        TILE_LOAD(4, left, left_bytes);
        TILE_LOAD(6, right, tile_bytes);
        TILE_ADD(0, 4, 6);
        TILE_LOAD(7, right + apart, tile_bytes);
        TILE_ADD(1, 4, 7);
        TILE_LOAD(5, left + 16 * left_stride, left_bytes);
        TILE_ADD(2, 5, 6);
        TILE_ADD(3, 5, 7);
    }
    TILE_STORE_AT(0, sums, bytes); TILE_STORE_AT(1, sums + 16, bytes);
    TILE_STORE_AT(2, lower, bytes); TILE_STORE_AT(3, lower + 16, bytes);
}

// From a row's scores of a block, of which it sees `count`, to weights; its sums become relative to the new largest.
AVX512 INLINE void weigh(Own &own, Size row, Size count, Size keys, float scale, Size width) {
    float *scores = own.scores + row * SCORES;
    BFloat16 *weights = own.weights + row * WEIGHTS;
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    if (count <= 0) {
        for (Size k = 0; k < keys; k += 32) _mm512_storeu_si512(weights + k, _mm512_setzero_si512());
        return;
    }
    __m512 most = lowest;
    for (Size k = 0; k < count; k += 16)
        most = _mm512_max_ps(most, _mm512_mask_loadu_ps(lowest, first16(count - k), scores + k));
    const float before = own.largest[row], largest = std::max(before, _mm512_reduce_max_ps(most) * scale);
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(largest);
    __m512 sum = _mm512_setzero_ps();
    for (Size k = 0; k < keys; k += 32) {
        __m512 two[2];
        #pragma GCC unroll 2
        for (Size i = 0; i < 2; i++) {
            const Size left = count - k - 16 * i;
            const __mmask16 mask = left > 0 ? first16(left) : 0;
            two[i] = exp2_of(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + k + 16 * i), factor), shift));
            two[i] = _mm512_maskz_mov_ps(mask, two[i]);
            sum = _mm512_add_ps(sum, two[i]);
        }
        _mm512_storeu_si512(weights + k, (__m512i)_mm512_cvtne2ps_pbh(two[1], two[0]));
    }
    own.largest[row] = largest;
    const float fading = before == largest ? 1 : _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(before - largest)));
    own.sum[row] = own.sum[row] * fading + _mm512_reduce_add_ps(sum);
    if (fading == 1) return;
    for (Size c = 0; c < width; c += 16) {
        float *at = own.sums + row * width + c;
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(fading)));
    }
}

// The attention of 32 rows of a prompt with a KV head.
AVX512 void attend_rows(const Heads &h, const Prompt &prompt, Size head, Size first, Own &own) {
    const Size group = h.heads / h.kv_heads, dim = h.dim, width = prompt.width;
    const Size count = std::min(ROWS, prompt.tokens * group - first), before = prompt.length - prompt.tokens;
    auto place = [&](Size row, Size stride) {  // of a row's vector in the step
        return (prompt.row + (first + row) / group) * stride + (head * group + (first + row) % group) * dim;
    };
    for (Size row = 0; row < ROWS; row++) {
        const Size from = row < count ? place(row, h.q_stride) : 0;
        for (Size c = 0; c < width; c += 32)
            _mm512_storeu_si512(own.queries + row * width + c, load32(h.q, row < count ? from : -1, c, dim));
        own.largest[row] = -std::numeric_limits<float>::infinity(), own.sum[row] = 0;
    }
    std::memset(own.sums, 0, ROWS * width * 4);
    const Size packed = (head - prompt.first) * prompt.head_bytes;
    const uint8_t *k = prompt.packed_keys + packed, *v = prompt.packed_values + packed;
    const Size end = before + (first + count - 1) / group + 1;  // of what the last row sees
    for (Size block = 0; block < end; block += BLOCK) {
        const Size keys = std::min(up(end - block, 32), BLOCK), row_tiles = prompt.steps * TILE;
        for (Size i = 0; i < keys; i += 32)
            multiply<true>(own.queries, width, k + (block + i) / 16 * row_tiles, TILE, row_tiles, prompt.steps,
                           own.scores + i, SCORES);
        for (Size row = 0; row < ROWS; row++) {
            const Size seen = row < count ? before + (first + row) / group + 1 - block : 0;
            weigh(own, row, std::min(seen, keys), keys, h.scale * LOG2E, width);
        }
        for (Size c = 0; c < width; c += 32)
            multiply<false>(own.weights, WEIGHTS, v + block / 16 * row_tiles + c / 16 * TILE, 2 * row_tiles, TILE,
                            keys / 32, own.sums + c, width);
    }
    for (Size row = 0; row < count; row++) {
        BFloat16 *out = h.out + place(row, h.heads * dim);
        for (Size c = 0; c < dim; c++) round_to(own.sums[row * width + c] / own.sum[row], out + c);
    }
}

void attend_prompt(const Heads &h, Prompt prompt, Team &team) {
    const Size threads = team.size, blocks = (prompt.length + 31) / 32, group = h.heads / h.kv_heads;
    prompt.steps = (h.dim + 31) / 32, prompt.width = prompt.steps * 32;
    prompt.head_bytes = blocks * 2 * prompt.steps * TILE;
    const Size at_once = std::min(std::max(PACKED / (2 * prompt.head_bytes), Size(1)), h.kv_heads);
    const Size own_bytes = up(Own::bytes(prompt.width), TILE), parts = (prompt.tokens * group + ROWS - 1) / ROWS;
    uint8_t *scratch = scratch_of_thread.at_least(threads * own_bytes + at_once * 2 * prompt.head_bytes);
    prompt.packed_keys = scratch + threads * own_bytes;
    prompt.packed_values = prompt.packed_keys + at_once * prompt.head_bytes;
    for (prompt.first = 0; prompt.first < h.kv_heads; prompt.first = prompt.last) {
        prompt.last = std::min(prompt.first + at_once, h.kv_heads);
        const Size heads = prompt.last - prompt.first;
        share_out(team, heads * blocks, [&](Size i) { pack(h, prompt, prompt.first + i / blocks, i % blocks); });
        Shares shares(team, heads * parts);
        share_out(team, threads, [&](Size t) {
            configure();
            Own own(scratch + t * own_bytes, prompt.width);
            for (Size i; (i = shares.next(t)) >= 0;)
                attend_rows(h, prompt, prompt.first + i / parts, i % parts * ROWS, own);
            release();
        });
    }
}
}  // namespace

extern "C" {

// Null, or why these kernels can't run here.
const char *why_not() { return why_no_tiles(); }

struct Attend {  // `_Attend` in prompt.py
    Heads heads;
    const Prompts *prompts;
};

// The attention of prompts whose keys and values are in the cache, to their rows of `out`. Not in a team.
Size attend_prompts(const Attend &asked, Team &team) {
    const Prompts *prompts = asked.prompts;
    for (Size i = 0; i < prompts->count; i++) {
        Prompt prompt{};
        prompt.row = prompts->rows[i], prompt.tokens = prompts->tokens[i], prompt.length = prompts->lengths[i];
        prompt.run = prompts->runs + 2 * (i ? prompts->ends[i - 1] : 0);
        prompt.last_run = prompts->runs + 2 * prompts->ends[i];
        attend_prompt(asked.heads, prompt, team);
    }
    return DONE;
}
}
#else
extern "C" {
const char *why_not() { return "not an x86 processor with Linux"; }
}
#endif
