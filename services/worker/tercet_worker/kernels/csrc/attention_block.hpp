// One row block against one group of 64 keys: scores, online softmax in float32, weighted values.
//
// This is for tasks of many rows, which share the group: arithmetic is the limit. Few rows: attention_stream.hpp.
//
// A row block is what the registers hold: at most kMaxRows rows, whose scores for the group are summed there. Every row is
// computed the same way whatever block it lies in, so results are the same to the bit. The online softmax is that of Milakov
// and Gimelshein (arXiv:1805.02867), in base 2. Include only from files compiled for one instruction set.
#pragma once

#include <type_traits>

#include "attention_types.hpp"
#include "kv_elements.hpp"

namespace tercet {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6;      // of a row block
constexpr int kScoreTiles = 4;   // key tiles accumulated at once
constexpr int kValueLines = 4;   // 16-column parts of the output accumulated at once
#elif defined(__AVX2__)
constexpr int kMaxRows = 4;
constexpr int kScoreTiles = 1;
constexpr int kValueLines = 1;
#else
constexpr int kMaxRows = 2;
constexpr int kScoreTiles = 1;
constexpr int kValueLines = 1;
#endif
constexpr int kMaxTaskRows = 64;
constexpr float kLog2E = 1.44269504088896340736f;

struct RowBlock {
    int first;     // row of the task
    int rows;      // 1 .. kMaxRows
    int min_key;   // smallest key that a row of it sees
    int max_key;   // largest
};

// 64 keys: where their lines are. Tiles outside the context repeat one inside it, and are masked.
template <class C>
struct KeyGroup {
    int start;
    const char* k[kGroupTiles];
    const char* v[kGroupKeys / C::kStepKeys];
};

// The K tile that holds a key of a task.
TERCET_INLINE const char* key_tile(const Geometry& g, const LayerCall& call, const Task& task, int key) {
    return call.kv + task.blocks[key / g.block_size] + task.kv_head * g.head_bytes + key % g.block_size / kTileKeys * g.tile_bytes;
}

// K tiles from the one that holds `key` on.
TERCET_INLINE void tiles_from(const Geometry& g, const LayerCall& call, const Task& task, int key, int count, const char** tiles) {
    const char* head = call.kv + task.kv_head * g.head_bytes;
    const std::int64_t* block = task.blocks + key / g.block_size;
    std::int64_t offset = key % g.block_size / kTileKeys * g.tile_bytes;
    for (int t = 0; t < count; ++t) {
        tiles[t] = head + *block + offset;
        offset += g.tile_bytes;
        if (offset == g.half_bytes) {
            offset = 0;
            ++block;
        }
    }
}

struct RowLimits {
    int first_key[kMaxTaskRows];
    int last_key[kMaxTaskRows];
};

// Working memory of one row block.
struct BlockView {
    const void* q;  // [step][rows]
    float* acc;     // [rows][D]
    float* lanes;   // [rows][16]
    float* max;     // [rows]
    const int* first_key;
    const int* last_key;
};

TERCET_INLINE int smaller(int a, int b) { return a < b ? a : b; }
TERCET_INLINE int larger(int a, int b) { return a > b ? a : b; }

// Scores of one row as cap * tanh(score / cap), in base 2; `factor` is 2 * log2(e) * scale / cap.
__attribute__((noinline)) static void cap_scores(F16* s, float factor, float cap) {
    for (int t = 0; t < kGroupTiles; ++t) {
        TERCET_EACH {
            // tanh(x) = 1 - 2 / (e^(2x) + 1), within where the power is finite. Operands are ordered so that not-a-number stays.
            const vf x = min_part(splat(60.0f), max_part(splat(-60.0f), s[t].part[i] * splat(factor)));
            const vf tanh = splat(1.0f) - splat(2.0f) / (exp2_part<5>(x) + splat(1.0f));
            s[t].part[i] = tanh * splat(cap * kLog2E);
        }
    }
}

// Minus infinity where a lane's key is outside [first, last].
TERCET_INLINE F16 masked(const F16& s, int first_lane_key, int first, int last) {
    static const std::int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const I16 lanes = load16i(kLanes);
    F16 r;
    TERCET_EACH {
        const vi key = lanes.part[i] + splat_int(first_lane_key);
        const vi seen = (key >= splat_int(first)) & (key <= splat_int(last));
        r.part[i] = seen ? s.part[i] : splat(kNegInf);
    }
    return r;
}

// Adds to each row's sums the lines of a step of values, times the row's weight of it.
template <class C, int M, int ND, int kKeys>
TERCET_INLINE void add_lines(const typename C::Line (&line)[ND], const float (*weights)[kKeys], int step, F16 (&sum)[M][ND]) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
        const auto* weight = reinterpret_cast<const typename C::Step*>(weights[m]) + step;
#pragma GCC unroll 8
        for (int d = 0; d < ND; ++d) sum[m][d] = C::dot(sum[m][d], line[d], weight);
    }
}

template <class C, int M, int ND>
TERCET_INLINE void add_values(const KeyGroup<C>& group, int begin, int end, const float (*p)[kGroupKeys],
                              const float* shrink, float* acc, int head_size, int column) {
    F16 sum[M][ND];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int d = 0; d < ND; ++d) sum[m][d] = mul16(load16(acc + m * head_size + column + 16 * d), shrink[m]);
    }
    const int line_offset = column * 4;
    for (int step = begin; step < end; ++step) {
        const char* row = group.v[step] + line_offset;
        typename C::Line line[ND];
#pragma GCC unroll 8
        for (int d = 0; d < ND; ++d) line[d] = C::load(row + 64 * d);
        add_lines<C>(line, p, step, sum);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int d = 0; d < ND; ++d) store16(acc + m * head_size + column + 16 * d, sum[m][d]);
    }
}

template <class C, int M>
TERCET_INLINE void scores(const KeyGroup<C>& group, const typename C::Step* q, int steps, F16 (&s)[M][kGroupTiles]) {
#pragma GCC unroll 8
    for (int t0 = 0; t0 < kGroupTiles; t0 += kScoreTiles) {
        F16 sum[M][kScoreTiles];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
            for (int t = 0; t < kScoreTiles; ++t) sum[m][t] = F16{};
        }
        for (int step = 0; step < steps; ++step) {
            typename C::Line line[kScoreTiles];
#pragma GCC unroll 8
            for (int t = 0; t < kScoreTiles; ++t) line[t] = C::load(group.k[t0 + t] + 64 * step);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
                for (int t = 0; t < kScoreTiles; ++t) sum[m][t] = C::dot(sum[m][t], line[t], q + step * M + m);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
            for (int t = 0; t < kScoreTiles; ++t) s[m][t0 + t] = sum[m][t];
        }
    }
}

// Takes one row's scores for a group of keys into its online softmax, and stores their weights at `p`. Returns their sum per lane;
// *shrink is the power of two by which what was summed before shrinks, as its exponent.
//
// Nothing here branches on the scores: a maximum that moves is as likely as not, and a wrong guess costs more than a rescale.
// Where it did not move the rescale is by exactly 1.
template <class C>
TERCET_INLINE F16 soften(const Geometry& g, F16 (&s)[kGroupTiles], int start, bool mask, int first_key, int last_key, float* max,
                         float* shrink, void* p) {
    const float to_base2 = g.soft_cap == 0.0f ? g.scale * kLog2E : 1.0f;
    if (g.soft_cap != 0.0f) cap_scores(s, 2.0f * kLog2E * g.scale / g.soft_cap, g.soft_cap);
    if (mask) {
#pragma GCC unroll 4
        for (int t = 0; t < kGroupTiles; ++t) s[t] = masked(s[t], start + kTileKeys * t, first_key, last_key);
    }
    const float group_max = horizontal_max(max16(max16(s[0], s[1]), max16(s[2], s[3]))) * to_base2;
    const float old_max = *max;
    const float new_max = group_max > old_max ? group_max : old_max;
    const float base = new_max == kNegInf ? 0.0f : new_max;  // a row that has seen no key yet: all its weights become 0
    *max = new_max;
    *shrink = old_max - base;
    F16 weight[kGroupTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kGroupTiles; ++t) {
        weight[t] = exp2_16<C::kExpDegree>(fma16(s[t], splat16(to_base2), splat16(-base)));
        C::store_probabilities(p, t, weight[t]);
    }
    return add16(add16(weight[0], weight[1]), add16(weight[2], weight[3]));
}

// Takes one group of keys into the online softmax of one row block.
template <class C, int M>
__attribute__((noinline)) static void attend_rows(const Geometry& g, const KeyGroup<C>& group, const RowBlock& block,
                                             const BlockView& view) {
    const int head_size = g.head_size;
    F16 s[M][kGroupTiles];
    scores<C, M>(group, static_cast<const typename C::Step*>(view.q), head_size / C::kStepKeys, s);

    bool mask = false;
    for (int m = 0; m < M; ++m) {
        mask |= view.last_key[m] < group.start + kGroupKeys - 1 || view.first_key[m] > group.start;
    }

    alignas(64) float p[M][kGroupKeys];
    alignas(64) float shrink[16] = {};
    F16 sums[M];
#pragma GCC unroll 1
    for (int m = 0; m < M; ++m) {
        sums[m] = soften<C>(g, s[m], group.start, mask, view.first_key[m], view.last_key[m], view.max + m, shrink + m, p[m]);
    }
    store16(shrink, exp2_16<5>(load16(shrink)));
    for (int m = 0; m < M; ++m) {
        float* lanes = view.lanes + 16 * m;
        store16(lanes, fma16(load16(lanes), splat16(shrink[m]), sums[m]));
    }

    const int begin = larger(block.min_key - group.start, 0) / C::kStepKeys;
    const int end = (smaller(block.max_key + 1 - group.start, kGroupKeys) + C::kStepKeys - 1) / C::kStepKeys;
    int column = 0;
    for (; column + 16 * kValueLines <= head_size; column += 16 * kValueLines) {
        add_values<C, M, kValueLines>(group, begin, end, p, shrink, view.acc, head_size, column);
    }
    if constexpr (kValueLines == 4) {
        if (head_size - column == 48) add_values<C, M, 3>(group, begin, end, p, shrink, view.acc, head_size, column);
        if (head_size - column == 32) add_values<C, M, 2>(group, begin, end, p, shrink, view.acc, head_size, column);
    }
    if (head_size - column == 16) add_values<C, M, 1>(group, begin, end, p, shrink, view.acc, head_size, column);
}

// Calls what is compiled for so many rows of a block.
template <class Work>
TERCET_INLINE void with_rows(int rows, const Work& work) {
    switch (rows) {
        case 1: return work(std::integral_constant<int, 1>{});
        case 2: return work(std::integral_constant<int, 2>{});
#if defined(__AVX2__)
        case 3: return work(std::integral_constant<int, 3>{});
        case 4: return work(std::integral_constant<int, 4>{});
#endif
#if defined(__AVX512F__)
        case 5: return work(std::integral_constant<int, 5>{});
        case 6: return work(std::integral_constant<int, 6>{});
#endif
        default: __builtin_unreachable();
    }
}

}  // namespace
}  // namespace tercet
