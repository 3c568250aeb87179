// Paged attention of one task over key tiles, without gathering; and the write of keys and values into the tiles.
//
// Layout and order of reduction: attention_types.hpp. Splits merge as in Flash-Decoding.
// Include only from files compiled for one instruction set.
#pragma once

#include "attention_stream.hpp"

namespace tercet {
namespace {

// The first key that a task's first query sees.
TERCET_INLINE int first_seen(const LayerCall& call, const Task& task) {
    return call.window > 0 ? larger(task.position - call.window + 1, 0) : 0;
}

// The K tiles that a task reads from `key` on, kAheadTiles of them; where it has fewer, the last of them again.
TERCET_INLINE void tiles_ahead(const Geometry& g, const LayerCall& call, const Task& task, int key, const char** tiles) {
    const int count = smaller((task.context - key + kTileKeys - 1) / kTileKeys, kAheadTiles);
    tiles_from(g, call, task, key, count, tiles);
    for (int t = count; t < kAheadTiles; ++t) tiles[t] = tiles[count - 1];
}

// Finds the K tiles of keys [start, start + 64), of which [first, context) exist.
TERCET_INLINE void locate_keys(const Geometry& g, const LayerCall& call, const Task& task, int start, int first,
                               const char* (&tiles)[kGroupTiles]) {
    const int tile_first = larger(first - start, 0) / kTileKeys;
    const int tile_last = (smaller(task.context - start, kGroupKeys) - 1) / kTileKeys;
    for (int t = 0; t < kGroupTiles; ++t) {
        const int key = start + kTileKeys * smaller(larger(t, tile_first), tile_last);
        tiles[t] = key_tile(g, call, task, key);
    }
}

// Finds the lines of keys [start, start + 64), of which [first, context) exist. A V step that pairs an existing key with one that
// does not is copied with the other's half zeroed: what lies there may be anything, and 0 * NaN is NaN.
template <class C>
TERCET_INLINE void locate(const Geometry& g, const LayerCall& call, const Task& task, int start, int first, char* edge,
                          KeyGroup<C>& group) {
    constexpr int kTileSteps = kTileKeys / C::kStepKeys;
    const int step_bytes = 4 * g.head_size;
    group.start = start;
    locate_keys(g, call, task, start, first, group.k);
    for (int t = 0; t < kGroupTiles; ++t) {
        const char* values = group.k[t] + g.value_bytes;
        for (int step = 0; step < kTileSteps; ++step) group.v[t * kTileSteps + step] = values + step * step_bytes;
    }
    if constexpr (C::kStepKeys == 2) {
        const int last = task.context - 1 - start;
        if (last < kGroupKeys && last % 2 == 0) {
            const auto* from = reinterpret_cast<const std::uint16_t*>(group.v[last / 2]);
            auto* to = reinterpret_cast<std::uint16_t*>(edge);
            for (int i = 0; i < 2 * g.head_size; i += 2) {
                to[i] = from[i];
                to[i + 1] = 0;
            }
            group.v[last / 2] = edge;
        }
        if (first > start && first % 2 == 1) {
            const auto* from = reinterpret_cast<const std::uint16_t*>(group.v[(first - start) / 2]);
            auto* to = reinterpret_cast<std::uint16_t*>(edge + step_bytes);
            for (int i = 0; i < 2 * g.head_size; i += 2) {
                to[i] = 0;
                to[i + 1] = from[i + 1];
            }
            group.v[(first - start) / 2] = edge + step_bytes;
        }
    }
}

// Merges a split's row into the row's total so far. A row that saw no key in a split leaves no trace; the first one that did is
// taken over as it is.
TERCET_INLINE void merge_row(float* total_max, float* total_sum, float* total, float max, float sum, const float* acc,
                             int head_size) {
    if (max == kNegInf && sum == 0.0f) return;
    if (*total_max == kNegInf && *total_sum == 0.0f) {
        *total_max = max;
        *total_sum = sum;
        std::memcpy(total, acc, static_cast<std::size_t>(head_size) * 4);
        return;
    }
    const float new_max = max > *total_max ? max : *total_max;
    const float keep = exp2_scalar(*total_max - new_max);
    const float take = exp2_scalar(max - new_max);
    *total_max = new_max;
    *total_sum = *total_sum * keep + sum * take;
    for (int d = 0; d < head_size; d += 16) {
        store16(total + d, fma16(load16(acc + d), splat16(take), mul16(load16(total + d), keep)));
    }
}

template <class C>
TERCET_INLINE void write_out(const Geometry& g, const LayerCall& call, const Task& task, const float* acc, const float* sums) {
    const int head_size = g.head_size;
    const int element = static_cast<int>(sizeof(typename C::Element));
    for (int i = 0, row = 0; i < task.tokens; ++i) {
        char* out = call.out + static_cast<std::int64_t>(task.token + i) * call.out_stride +
                    static_cast<std::int64_t>(task.kv_head) * g.group_heads * head_size * element;
        for (int h = 0; h < g.group_heads; ++h, ++row, out += head_size * element) {
            const float inverse = 1.0f / sums[row];
            for (int d = 0; d < head_size; d += 16) C::store_out(out, d, mul16(load16(acc + row * head_size + d), inverse));
        }
    }
}

TERCET_INLINE void set_limits(const Geometry& g, const LayerCall& call, const Task& task, int rows, RowLimits& limits) {
    for (int r = 0; r < rows; ++r) {
        limits.last_key[r] = task.position + r / g.group_heads;
        limits.first_key[r] = call.window > 0 ? larger(limits.last_key[r] - call.window + 1, 0) : 0;
    }
}

// Where the elements of a task's row begin in q.
template <class C>
TERCET_INLINE const char* query_row(const Geometry& g, const LayerCall& call, const Task& task, int row) {
    return call.q + static_cast<std::int64_t>(task.token + row / g.group_heads) * call.q_stride +
           (static_cast<std::int64_t>(task.kv_head) * g.group_heads + row % g.group_heads) * g.head_size *
               static_cast<int>(sizeof(typename C::Element));
}

TERCET_INLINE void begin_task(const Scratch& scratch, int rows) {
    for (int r = 0; r < rows; ++r) {
        scratch.total_max[r] = kNegInf;
        scratch.total_sum[r] = 0.0f;
    }
}

TERCET_INLINE void begin_split(const Scratch& scratch, int rows, int head_size) {
    for (int r = 0; r < rows; ++r) scratch.max[r] = kNegInf;
    std::memset(scratch.lanes, 0, static_cast<std::size_t>(rows) * 64);
    std::memset(scratch.acc, 0, static_cast<std::size_t>(rows) * head_size * 4);
}

// Keeps a split's rows where they are merged; `several`: the task has other splits.
TERCET_INLINE void end_split(const Geometry& g, const Task& task, const Scratch& scratch, int split, int rows, bool several) {
    const int head_size = g.head_size;
    for (int r = 0; r < rows; ++r) {
        const float sum = horizontal_sum(load16(scratch.lanes + 16 * r));
        const float* acc = scratch.acc + r * head_size;
        if (task.partials != nullptr) {
            float* partial = task.partials + (static_cast<std::int64_t>(split) * rows + r) * (kPartialHeader + head_size);
            partial[0] = scratch.max[r];
            partial[1] = sum;
            std::memcpy(partial + kPartialHeader, acc, static_cast<std::size_t>(head_size) * 4);
        } else if (several) {
            merge_row(scratch.total_max + r, scratch.total_sum + r, scratch.total + r * head_size, scratch.max[r], sum, acc, head_size);
        } else {
            scratch.total_sum[r] = sum;
        }
    }
}

template <class C>
static void run(const Geometry& g, const LayerCall& call, const Task& task, const Task* next, const Scratch& scratch) {
    const int head_size = g.head_size;
    const int steps = head_size / C::kStepKeys;
    const int rows = task.tokens * g.group_heads;

    RowLimits limits;
    RowBlock blocks[kMaxTaskRows];
    set_limits(g, call, task, rows, limits);
    const int count = (rows + kMaxRows - 1) / kMaxRows;
    for (int b = 0, first = 0; b < count; ++b) {
        const int size = (rows - first + count - b - 1) / (count - b);
        blocks[b] = RowBlock{first, size, limits.first_key[first], limits.last_key[first + size - 1]};
        auto* packed = static_cast<typename C::Step*>(scratch.q) + first * steps;
        for (int m = 0; m < size; ++m) {
            const char* q = query_row<C>(g, call, task, first + m);
            for (int step = 0; step < steps; ++step) C::pack(packed + step * size + m, q, step);
        }
        first += size;
    }

    const int first_key = limits.first_key[0];
    const int last_key = limits.last_key[rows - 1];
    const bool several = task.split_end - task.split_begin > 1;
    begin_task(scratch, rows);
    if (rows <= kStreamRows) {
        SplitValues<C> values;
        const int last_tile = last_key / kTileKeys * kTileKeys;
        const char* ahead[kAheadTiles];
        for (int split = task.split_begin; split < task.split_end; ++split) {
            begin_split(scratch, rows, head_size);
            const int end = (split + 1) * kSplitKeys;
            if (end > first_key && split * kSplitKeys <= last_key) {
                const bool more = split + 1 < task.split_end && end <= last_key;
                const Task& after = more || next == nullptr ? task : *next;
                const int key = more ? end : next == nullptr ? last_tile : larger(next->split_begin * kSplitKeys, first_seen(call, *next));
                tiles_ahead(g, call, after, smaller(key, after.context - 1), ahead);
                attend_split<C>(g, call, task, split, limits, blocks, count, ahead, scratch, values);
            }
            end_split(g, task, scratch, split, rows, several);
        }
    } else {
        KeyGroup<C> group;
        for (int split = task.split_begin; split < task.split_end; ++split) {
            begin_split(scratch, rows, head_size);
            const int begin = larger(split * kSplitKeys, first_key / kGroupKeys * kGroupKeys);
            const int end = smaller((split + 1) * kSplitKeys, last_key + 1);
            for (int start = begin; start < end; start += kGroupKeys) {
                locate<C>(g, call, task, start, first_key, scratch.edge, group);
                for (int b = 0; b < count; ++b) {
                    const RowBlock& block = blocks[b];
                    if (block.max_key < start || block.min_key >= start + kGroupKeys) continue;
                    const int first = block.first;
                    const BlockView view{static_cast<const typename C::Step*>(scratch.q) + first * steps,
                                         scratch.acc + first * head_size,
                                         scratch.lanes + first * 16,
                                         scratch.max + first,
                                         limits.first_key + first,
                                         limits.last_key + first};
                    with_rows(block.rows, [&](auto m) { attend_rows<C, m>(g, group, block, view); });
                }
            }
            end_split(g, task, scratch, split, rows, several);
        }
    }
    if (task.partials == nullptr) write_out<C>(g, call, task, several ? scratch.total : scratch.acc, scratch.total_sum);
}

template <class C>
static void merge(const Geometry& g, const LayerCall& call, const Task& task, const Scratch& scratch) {
    const int head_size = g.head_size;
    const int rows = task.tokens * g.group_heads;
    for (int r = 0; r < rows; ++r) {
        scratch.total_max[r] = kNegInf;
        scratch.total_sum[r] = 0.0f;
        for (int split = 0; split < task.split_end; ++split) {
            const float* partial = task.partials + (static_cast<std::int64_t>(split) * rows + r) * (kPartialHeader + head_size);
            merge_row(scratch.total_max + r, scratch.total_sum + r, scratch.total + r * head_size, partial[0], partial[1],
                      partial + kPartialHeader, head_size);
        }
    }
    write_out<C>(g, call, task, scratch.total, scratch.total_sum);
}

template <class C>
static void write(const Geometry& g, const LayerCall& call, const std::int64_t* slots, std::int32_t begin, std::int32_t end) {
    using Element = typename C::Element;
    constexpr int kPair = 4 / static_cast<int>(sizeof(Element));  // elements of one reduction step: 1 or 2
    const int head_size = g.head_size;
    for (std::int32_t t = begin; t < end; ++t) {
        const std::int64_t slot = slots[t];
        if (slot < 0) continue;
        const auto block = static_cast<std::int32_t>(slot / g.block_size);
        const auto offset = static_cast<int>(slot % g.block_size);
        const int lane = offset % kTileKeys;
        char* place = call.kv + block_offset(g, block) + offset / kTileKeys * g.tile_bytes;
        for (int head = 0; head < g.kv_heads; ++head) {
            char* tile = place + head * g.head_bytes;
            const std::int64_t from = static_cast<std::int64_t>(head) * head_size * static_cast<int>(sizeof(Element));
            const char* key = call.k + t * call.k_stride + from;
            for (int step = 0; step < head_size / kPair; ++step) std::memcpy(tile + 64 * step + 4 * lane, key + 4 * step, 4);
            const auto* value = reinterpret_cast<const Element*>(call.v + t * call.v_stride + from);
            auto* line = reinterpret_cast<Element*>(tile + g.value_bytes) + (lane / kPair) * kPair * head_size + lane % kPair;
            for (int d = 0; d < head_size; ++d) line[d * kPair] = value[d];
        }
    }
}

}  // namespace
}  // namespace tercet

#if defined(__AMX_BF16__)
#include "attention_amx.hpp"
#endif

namespace tercet {
namespace {

TERCET_INLINE const AttentionKernels* attention_kernels(Dtype dtype) {
    static const AttentionKernels kFloat32{write<Float32Kv>, run<Float32Kv>, merge<Float32Kv>, 36};
#if defined(__AMX_BF16__)
    static const AttentionKernels kBFloat16{write<BFloat16Kv>, run_amx, merge<BFloat16Kv>, 48};
#else
    static const AttentionKernels kBFloat16{write<BFloat16Kv>, run<BFloat16Kv>, merge<BFloat16Kv>, 36};
#endif
    return dtype == Dtype::float32 ? &kFloat32 : &kBFloat16;
}

}  // namespace
}  // namespace tercet
