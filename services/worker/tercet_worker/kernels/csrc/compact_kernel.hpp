// Products of bfloat16 rows with compact weights (compact_types.hpp): those of dense weights, to the bit.
//
// With one tile of rows, lines are unpacked in registers on their way to it. With several, those of some steps of a group are
// unpacked once, into the first-level cache, and then are dense weights for all tiles.
// Include only from files compiled for one instruction set.
#pragma once

#include "compact_types.hpp"
#include "linear_kernel.hpp"

namespace tercet {
namespace {

#if defined(__AVX512BW__)

constexpr int kPairSteps = 288;  // of two panels, unpacked at once: 36 KiB of the first-level cache
constexpr int kManySteps = 512;  // the same with many tiles
constexpr int kCompactBlockBytes = kManySteps * 2 * kLineBytes;
constexpr int kExceptionsAhead = 16;

#if defined(__AVX512BF16__)
TERCET_INLINE BFloat16Linear::Line line_of(__m512i bits) { return (__m512bh)bits; }
#else
TERCET_INLINE BFloat16Linear::Line line_of(__m512i bits) { return BFloat16Linear::split(I16{{(vi)bits}}); }
#endif

TERCET_INLINE __m512i upper_table(const char* weights) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights)));
}

// The lines of two panels of a step: the first two, or with kPair = 1 the others.
template <int kPair>
TERCET_INLINE void unpack_pair(const char* lines, __m512i table, __m512i& even, __m512i& odd) {
    const __m512i lower = _mm512_loadu_si512(lines + kLineBytes * kPair);
    __m512i codes = _mm512_loadu_si512(lines + 2 * kLineBytes);
    if constexpr (kPair == 1) codes = _mm512_srli_epi16(codes, 4);
    const __m512i upper = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
    even = _mm512_unpacklo_epi8(lower, upper);
    odd = _mm512_unpackhi_epi8(lower, upper);
}

// Four panels, or two of which `kFirst` is the first.
template <int P, int kFirst>
TERCET_INLINE void unpack(const char* lines, __m512i table, __m512i (&bits)[P]) {
    if constexpr (P == 4) {
        unpack_pair<0>(lines, table, bits[0], bits[1]);
        unpack_pair<1>(lines, table, bits[2], bits[3]);
    } else {
        unpack_pair<kFirst / 2>(lines, table, bits[0], bits[1]);
    }
}

// Puts the exceptions of a step, of which `next` is the first, into its lines. Returns the first of a later step.
template <int P, int kFirst>
TERCET_INLINE const CompactException* mend(const CompactException* next, __m512i (&bits)[P]) {
    alignas(64) char whole[kExpandedBytes];
    for (int p = 0; p < P; ++p) _mm512_store_si512(whole + kLineBytes * (kFirst + p), bits[p]);
    const std::uint16_t step = next->step;
    for (; next->step == step; ++next) whole[2 * next->place + 1] = static_cast<char>(next->upper);
    for (int p = 0; p < P; ++p) bits[p] = _mm512_load_si512(whole + kLineBytes * (kFirst + p));
    return next;
}

// A tile over some steps of a group.
struct CompactJob {
    const char* lines;             // of its first step
    const CompactException* next;  // the first that is not before it
    char* expanded;                // where the lines of a pair of panels are left, or were
    const char* ahead;             // fetched into the second-level cache
    int ahead_stride;              // bytes per step
    int panel;
    int row;
    int first_step;
    int steps;
    float* kept;  // [R][P][16] sums between blocks of steps
    bool first;
    bool last;
};

// Where the lines of a tile are: they pass from memory, all at once; they are unpacked for others, too; or they were.
enum class Lines { passing, leave, left };

// One tile of R rows by P panels of a group, from panel kFirst of it on. Lines that other tiles need are left for them: to unpack them
// takes other units of the processor than to multiply, so that costs little beside it. Returns the first exception behind its steps.
template <int R, int P, int kFirst, Lines kLines>
__attribute__((noinline)) static const CompactException* compact_tile(const LinearCall& call, const CompactJob& job) {
    using C = BFloat16Linear;
    const __m512i table = upper_table(call.weights);
    const char* lines = job.lines;
    const char* x = call.x + job.row * call.x_stride + static_cast<std::int64_t>(job.first_step) * 4;
    const char* ahead = job.ahead;
    char* expanded = job.expanded;
    const CompactException* next = job.next;
    if constexpr (kLines != Lines::left) __builtin_prefetch(next + kExceptionsAhead);
    F16 sums[R][P];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = job.first ? F16{} : load16(job.kept + (r * P + p) * kPanel);
    }
    const int last = job.first_step + job.steps;
    for (int step = job.first_step; step < last; ++step) {
        __m512i bits[P];
        if constexpr (kLines == Lines::left) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) bits[p] = _mm512_load_si512(expanded + kLineBytes * p);
        } else {
            unpack<P, kFirst>(lines, table, bits);
            if (__builtin_expect(step == next->step, 0)) next = mend<P, kFirst>(next, bits);
        }
        if constexpr (kLines == Lines::leave) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) _mm512_store_si512(expanded + kLineBytes * p, bits[p]);
        }
        if constexpr (P == 4) {
            // Used once: see linear_kernel.hpp.
#pragma GCC unroll 3
            for (int at = 0; at < kCompactBytes; at += kLineBytes) __builtin_prefetch(lines + kPassingBytes + at, 0, 0);
        } else {
            __builtin_prefetch(ahead, 0, 2);
            if constexpr (kLines == Lines::passing) __builtin_prefetch(ahead + kLineBytes, 0, 2);
            ahead += job.ahead_stride;
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const typename C::Spread value = C::spread(x + r * call.x_stride);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sums[r][p] = C::dot(sums[r][p], line_of(bits[p]), value);
        }
        lines += kCompactBytes;
        if constexpr (kLines != Lines::passing) expanded += kLineBytes * P;
        x += 4;
    }
    if (job.last) {
        finish<C, R, P>(call, sums, job.panel, job.row);
        return next;
    }
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) store16(job.kept + (r * P + p) * kPanel, sums[r][p]);
    }
    return next;
}

template <int P, int kFirst, Lines kLines>
TERCET_INLINE const CompactException* compact_rows(const LinearCall& call, const CompactJob& job, int rows) {
    constexpr int kMost = kTileRows<BFloat16Linear> * kTilePanels / P;
    switch (rows) {
        case 1: return compact_tile<1, P, kFirst, kLines>(call, job);
        case 2: return compact_tile<2, P, kFirst, kLines>(call, job);
        case 3: return compact_tile<3, P, kFirst, kLines>(call, job);
        case 4: return compact_tile<4, P, kFirst, kLines>(call, job);
#define TERCET_ROWS(R) \
    case R:            \
        if constexpr (R <= kMost) return compact_tile<R, P, kFirst, kLines>(call, job); \
        break;
        TERCET_ROWS(5)
        TERCET_ROWS(6)
        TERCET_ROWS(7)
        TERCET_ROWS(8)
        TERCET_ROWS(9)
        TERCET_ROWS(10)
        TERCET_ROWS(11)
        TERCET_ROWS(12)
#undef TERCET_ROWS
        default: break;
    }
    __builtin_unreachable();
}

// Steps [first, first + count) of a group as dense lines. `next`: the first exception that is not before them. Returns the same for
// what follows.
static const CompactException* expand_steps(const char* weights, const CompactGroup& group, int first, int count,
                                            const CompactException* next, char* out) {
    const __m512i table = upper_table(weights);
    const char* lines = group.lines + static_cast<std::int64_t>(first) * kCompactBytes;
    for (int step = first; step < first + count; ++step, lines += kCompactBytes, out += kExpandedBytes) {
        __m512i bits[4];
        unpack<4, 0>(lines, table, bits);
        if (next->step == step) next = mend<4, 0>(next, bits);
        for (int p = 0; p < 4; ++p) _mm512_store_si512(out + kLineBytes * p, bits[p]);
    }
    return next;
}

// One or two pairs of panels of a group for rows [row_begin, row_begin + rows), `block_steps` at a time. Meanwhile the lines of the next
// steps are fetched, spread evenly, as memory gives no more at a time: those of this group, and then of the next, which lies behind it.
static void compact_pairs(const LinearCall& call, const CompactGroup& group, int panel, int pairs, int row_begin, int rows,
                          int block_steps, float* kept, char* expanded) {
    constexpr int kMost = kTileRows<BFloat16Linear> * kTilePanels / 2;
    const int steps = call.in_features / 2;
    const int tiles = (rows + kMost - 1) / kMost;
    const CompactException* next[2] = {group.exceptions, group.exceptions};
    CompactJob job{};
    job.expanded = expanded;
    job.ahead_stride = kCompactBytes / (pairs * tiles);
    for (job.first_step = 0; job.first_step < steps; job.first_step += block_steps) {
        job.steps = least(block_steps, steps - job.first_step);
        job.first = job.first_step == 0;
        job.last = job.first_step + job.steps == steps;
        job.lines = group.lines + static_cast<std::int64_t>(job.first_step) * kCompactBytes;
        job.ahead = job.lines + static_cast<std::int64_t>(job.steps) * kCompactBytes;
        for (int pair = 0; pair < pairs; ++pair) {
            job.panel = panel + 2 * pair;
            job.next = next[pair];
            job.row = row_begin;
            const bool second = job.panel % kGroupPanels != 0;
            for (int tile = 0; tile < tiles; ++tile) {
                const int size = (row_begin + rows - job.row + tiles - tile - 1) / (tiles - tile);
                job.kept = kept + (job.row - row_begin) * 2 * pairs * kPanel + 2 * pair * size * kPanel;
                const CompactException* reached = nullptr;
                if (tile > 0) {
                    compact_rows<2, 0, Lines::left>(call, job, size);
                } else if (tiles == 1) {
                    reached = second ? compact_rows<2, 2, Lines::passing>(call, job, size)
                                     : compact_rows<2, 0, Lines::passing>(call, job, size);
                } else {
                    reached = second ? compact_rows<2, 2, Lines::leave>(call, job, size)
                                     : compact_rows<2, 0, Lines::leave>(call, job, size);
                }
                if (tile == 0) next[pair] = reached;
                job.ahead += job.steps * job.ahead_stride;
                job.row += size;
            }
        }
    }
}

// The last panel of a matrix where their number is odd: with as many steps unpacked at once as there is room for.
static void compact_odd(const LinearCall& call, const CompactGroup& group, int panel, int row_begin, int rows, float* kept,
                        char* expanded) {
    using C = BFloat16Linear;
    constexpr int kSteps = kCompactBlockBytes / kExpandedBytes;
    const int steps = call.in_features / 2;
    const int tiles = (rows + kTileRows<C> - 1) / kTileRows<C>;
    const CompactException* next = group.exceptions;
    TileJob job{};
    job.panel = panel;
    job.weights.lines = expanded + kLineBytes * (panel % kGroupPanels);
    job.weights.line_stride = kExpandedBytes;
    for (job.first_step = 0; job.first_step < steps; job.first_step += kSteps) {
        job.steps = least(kSteps, steps - job.first_step);
        job.first = job.first_step == 0;
        job.last = job.first_step + job.steps == steps;
        next = expand_steps(call.weights, group, job.first_step, job.steps, next, expanded);
        job.row = row_begin;
        for (int tile = 0; tile < tiles; ++tile) {
            const int size = (row_begin + rows - job.row + tiles - tile - 1) / (tiles - tile);
            job.kept = kept + (job.row - row_begin) * kPanel;
            run_tile_rows<C, 1>(call, job, size, 0);
            job.row += size;
        }
    }
}

static void linear_compact(const LinearCall& call, const LinearPart& part) {
    using C = BFloat16Linear;
    constexpr int kPairRows = kTileRows<C> * kTilePanels / 2;
    const int steps = call.in_features / 2;
    alignas(64) float kept[kBlockRows * kGroupPanels * kPanel];
    alignas(64) char expanded[kCompactBlockBytes];
    for (int row_begin = part.row_begin; row_begin < part.row_end;) {
        const int rows = least(part.row_end - row_begin, kBlockRows);
        const int most = rows <= kFewTiles * kPairRows ? kPairSteps : kManySteps;
        const int blocks = (steps + most - 1) / most;
        const int block_steps = (steps + blocks - 1) / blocks;
        for (int panel = part.panel_begin; panel < part.panel_end;) {
            const CompactGroup group = compact_group(call.weights, call.in_features, panel / kGroupPanels);
            const int left = least(part.panel_end, (panel / kGroupPanels + 1) * kGroupPanels) - panel;
            if (left == kGroupPanels && rows <= kTileRows<C>) {
                CompactJob job{};
                job.lines = group.lines;
                job.next = group.exceptions;
                job.panel = panel;
                job.row = row_begin;
                job.steps = steps;
                job.first = job.last = true;
                compact_rows<4, 0, Lines::passing>(call, job, rows);
            } else {
                const int pairs = left / 2;
                if (pairs > 0) compact_pairs(call, group, panel, pairs, row_begin, rows, block_steps, kept, expanded);
                if (left % 2 != 0) compact_odd(call, group, panel + 2 * pairs, row_begin, rows, kept, expanded);
            }
            panel += left;
        }
        row_begin += rows;
    }
}

#endif

#if defined(__AVX512BW__) || defined(TERCET_WIDE)

static void gather_compact(const char* weights, std::int32_t in_features, const std::int32_t* ids, float scale, char* y,
                           std::int64_t y_stride, std::int32_t begin, std::int32_t end) {
    const auto& header = *reinterpret_cast<const CompactHeader*>(weights);
    for (int t = begin; t < end; ++t) {
        const int panel = ids[t] / kPanel % kGroupPanels;
        const int lane = ids[t] % kPanel;
        const CompactGroup group = compact_group(weights, in_features, ids[t] / (kPanel * kGroupPanels));
        auto* to = reinterpret_cast<float*>(y + t * y_stride);
        const char* lines = group.lines;
        for (int k = 0; k < in_features; ++k) {
            const int at = compact_byte(2 * lane + k % 2, panel % 2);
            const auto lower = static_cast<std::uint8_t>(lines[kLineBytes * (panel / 2) + at]);
            const auto codes = static_cast<std::uint8_t>(lines[2 * kLineBytes + at]);
            const std::uint8_t upper = header.upper[panel / 2 == 0 ? codes & 15 : codes >> 4];
            to[k] = scale * from_bf16(static_cast<std::uint16_t>(upper << 8 | lower));
            if (k % 2 == 1) lines += kCompactBytes;
        }
        for (const CompactException* each = group.exceptions; each->step != kNoStep; ++each) {
            if (each->place / 2 != panel * kPanel + lane) continue;
            const int at = compact_byte(each->place % 32, panel % 2);
            const char* line = group.lines + static_cast<std::int64_t>(each->step) * kCompactBytes + kLineBytes * (panel / 2);
            to[2 * each->step + each->place % 2] =
                scale * from_bf16(static_cast<std::uint16_t>(each->upper << 8 | static_cast<std::uint8_t>(line[at])));
        }
    }
}

#endif

}  // namespace
}  // namespace tercet
