// What the planner, the thread loop and the per-instruction-set kernels of paged attention share. Plain data only (see isa.hpp).
//
// Shape suffixes: T tokens of the step, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, B block size.
//
// KV layout. One arena, [layer][run of blocks][kv head][K tiles | V tiles]; a tile is 16 consecutive keys of one KV head. A run is
// about so many blocks with consecutive ids as a split has keys: of a request that holds them in order, as the first comer does, a
// split reads two streams for a head, and processors fetch a stream by themselves, while they compute, far better than anything else.
//   K tile   float32 [D][16], bfloat16 [D/2][16 keys][2]: one 64-byte line meets one broadcast value (or pair) of q and adds
//            to the scores of 16 keys, with no horizontal sum.
//   V tile   float32 [16][D], bfloat16 [16/2][D][2]: one 64-byte line meets one broadcast probability (or pair) and adds to
//            16 columns of the output.
// A line is one reduction step: D (float32) or D/2 (bfloat16) steps in K, 16 or 8 in V, and V's steps are 4 * D bytes apart.
//
// Order of reduction. Keys are taken in groups of 64 and splits of 256, both counted from position 0 of the sequence. A row's
// softmax starts anew in each split and splits are merged in ascending order, whether one thread walks them or several. So a
// row's result depends on its query, its keys and nothing else: not on the batch, the chunking, or the number of threads.
#pragma once

#include <cstdint>

namespace tercet {

constexpr int kTileKeys = 16;
constexpr int kGroupTiles = 4;
constexpr int kGroupKeys = kTileKeys * kGroupTiles;
constexpr int kSplitKeys = 256;

enum class Dtype : std::int32_t { float32 = 0, bfloat16 = 1 };

// Constant over the life of a cache.
struct Geometry {
    std::int32_t query_heads;
    std::int32_t kv_heads;
    std::int32_t group_heads;  // G
    std::int32_t head_size;
    std::int32_t block_size;
    std::int32_t num_layers;
    std::int32_t num_blocks;
    std::int32_t run_blocks;   // of a run; the last one may have blocks beyond num_blocks
    std::int32_t element_bytes;
    std::int64_t tile_bytes;   // of one K or V tile
    std::int64_t half_bytes;   // K tiles, or V tiles, of one block and head
    std::int64_t value_bytes;  // from a K tile to its V tile
    std::int64_t head_bytes;   // from a head to the next
    std::int64_t run_bytes;
    std::int64_t layer_bytes;
    float scale;      // of the scores
    float soft_cap;   // 0: none; else scores become cap * tanh(score / cap)
    std::int32_t task_tokens;  // query tokens of a task
    std::int32_t task_rows;    // G * task_tokens
};

// One layer of one step.
struct LayerCall {
    char* kv;  // where this layer begins
    const char* q;
    const char* k;
    const char* v;
    char* out;
    std::int64_t q_stride;  // bytes from token to token; heads and D are contiguous
    std::int64_t k_stride;
    std::int64_t v_stride;
    std::int64_t out_stride;
    std::int32_t window;  // keys a query sees, itself included; 0: all
};

// A tile of query tokens of one request, one KV head, a range of splits.
struct Task {
    const std::int64_t* blocks;  // of the request, from position 0: where a block's K tiles of the first head are, see block_offset
    std::int32_t token;          // row of its first query in q and out
    std::int32_t tokens;
    std::int32_t position;  // absolute position of its first query
    std::int32_t context;   // keys of the request that exist once this step's are written
    std::int32_t kv_head;
    std::int32_t split_begin;
    std::int32_t split_end;
    float* partials;  // null: all splits are here, write out. Else [split][row] of partial rows, from split 0
};

// A partial row: maximum, sum, then D values from kPartialHeader on.
constexpr int kPartialHeader = 16;

// Bytes from the beginning of a layer to a block's K tiles of the first head.
inline std::int64_t block_offset(const Geometry& g, std::int32_t block) {
    return block / g.run_blocks * g.run_bytes + block % g.run_blocks * g.half_bytes;
}

// Working memory of one thread. Rows are ordered by token, then head.
struct Scratch {
    void* q;          // packed per row block as [step][row]
    float* acc;       // [row][D] of the current split
    float* total;     // [row][D] of the merged splits
    float* lanes;     // [row][16] sums of the current split, per lane
    float* max;       // [row] of the current split
    float* total_max; // [row]
    float* total_sum; // [row]
    char* edge;       // two V tiles in which what is outside the context is zeroed
};

struct AttentionKernels {
    // Writes K and V of tokens [begin, end) to the cache; slots[t] is block * B + offset, or -1: not written.
    void (*write)(const Geometry&, const LayerCall&, const std::int64_t* slots, std::int32_t begin, std::int32_t end);
    // Attends for one task. `next`: what this thread probably does afterwards, or null; where rows are few, its first keys are fetched.
    void (*run)(const Geometry&, const LayerCall&, const Task&, const Task* next, const Scratch&);
    // Merges splits [0, task.split_end) of a split task and writes out.
    void (*merge)(const Geometry&, const LayerCall&, const Task&, const Scratch&);
    // Query rows of a task, about: with one key group they fit the first-level cache at D = 64.
    std::int32_t target_rows;
};

const AttentionKernels* attention_kernels_generic(Dtype);
const AttentionKernels* attention_kernels_avx2(Dtype);
const AttentionKernels* attention_kernels_avx512(Dtype);
const AttentionKernels* attention_kernels_avx512bf16(Dtype);
const AttentionKernels* attention_kernels_amx(Dtype);

}  // namespace tercet
