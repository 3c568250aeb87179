// The paged attention of one worker: geometry, the plan of the current step, and working memory per thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention_types.hpp"
#include "isa.hpp"

extern "C" {

// Mirrored in kernels/attention_abi.py; raise tercet_abi_version with it.
struct TercetAttentionConfig {
    void* kv;  // [num_layers][runs][kv_heads][K | V] of run_blocks blocks each, 64-byte aligned, not owned
    const std::int32_t* windows;  // [num_layers], 0: all keys; null: 0 everywhere
    std::int32_t num_layers;
    std::int32_t num_blocks;
    std::int32_t block_size;
    std::int32_t run_blocks;  // runs: num_blocks / run_blocks, rounded up
    std::int32_t query_heads;
    std::int32_t kv_heads;
    std::int32_t head_size;
    std::int32_t dtype;    // 0 float32, 1 bfloat16
    std::int32_t isa;      // -1: the best available
    std::int32_t threads;
    float scale;
    float soft_cap;
};

struct TercetAttentionStep {
    const std::int32_t* query_start_loc;  // [requests + 1]
    const std::int32_t* seq_lens;         // [requests]
    const std::int32_t* slots;            // [requests], rows of block_table
    const std::int32_t* block_table;      // [max_slots][block_table_stride]
    const std::int64_t* slot_mapping;     // [tokens]
    std::int64_t block_table_stride;
    std::int32_t requests;
    std::int32_t tokens;
    std::int32_t max_slots;
    std::int32_t max_blocks;
};

struct TercetAttentionProblem {
    std::int32_t code;  // see tercet::Problem
    std::int32_t row;
    std::int64_t value;
    std::int64_t limit;
};
}

namespace tercet {

// Mirrored in kernels/attention_abi.py.
enum class Problem : std::int32_t {
    none = 0,
    query_start = 1,     // query_start_loc[row] is not above its predecessor, or does not begin at 0; limit: the predecessor
    token_count = 2,     // query_start_loc ends beyond the tokens
    slot = 3,            // slots[row] is not a row of the block table
    context = 4,         // seq_lens[row] is less than its queries (limit)
    context_blocks = 5,  // seq_lens[row] is more than the block table holds (limit)
    block = 6,           // a block id of request `row` is not below limit
    slot_mapping = 7,    // slot_mapping[row] is neither -1 nor below limit
    geometry = 8,        // the configuration cannot be served
    isa = 9,             // the instruction set is not available
    memory = 10,
    layer = 11,
    no_plan = 12,
};

class Attention {
  public:
    // Throws std::bad_alloc. The configuration has passed check().
    explicit Attention(const TercetAttentionConfig& config);

    static TercetAttentionProblem check(const TercetAttentionConfig& config);

    // Validates a step, keeps what the layers need of it, and cuts it into tasks. On a problem no plan is in force.
    TercetAttentionProblem plan(const TercetAttentionStep& step);

    // Writes K and V of this step and attends, for one layer. call.kv and call.window are filled in here. Nobody runs an earlier step.
    TercetAttentionProblem forward(std::int32_t layer, LayerCall call);

    // The same in parts, for a team of threads that is there already: begin() the step that is planned; for each layer complete() a call;
    // write() all tokens; after a barrier run_task() each task, on any thread below threads(); after another run_merge() each merge.
    // pad() at any time. A step that has begun is as it was until the next one begins, also while that is planned: threads may be late.
    // When it begins, none is.
    bool ready(std::int32_t layers, std::int32_t tokens) const;
    void begin() { running_ = planned_; }
    void complete(std::int32_t layer, LayerCall& call) const;
    void write(const LayerCall& call, std::int32_t begin, std::int32_t end) const;
    // `next`: what the thread probably runs after it; not below tasks() where that is nothing.
    void run_task(const LayerCall& call, std::int32_t task, std::int32_t next, std::int32_t thread) const;
    // The same in two, so that a task may be run several times: into result_bytes() of memory, and from there to where it belongs.
    void run_task(const LayerCall& call, std::int32_t task, std::int32_t next, std::int32_t thread, char* result) const;
    void keep_result(const LayerCall& call, std::int32_t task, const char* result) const;
    std::size_t result_bytes() const { return plans_[running_].result_bytes; }
    void run_merge(const LayerCall& call, std::int32_t merge, std::int32_t thread) const;
    void pad(const LayerCall& call) const;
    std::int32_t tasks() const { return static_cast<std::int32_t>(plans_[running_].tasks.size()); }
    std::int32_t merges() const { return static_cast<std::int32_t>(plans_[running_].merges.size()); }
    std::int32_t threads() const { return threads_; }

  private:
    struct FreeAligned {
        void operator()(void* p) const;
    };

    struct Plan {
        bool sound = false;
        bool serial = true;
        std::int32_t tokens = 0;
        std::int32_t used_tokens = 0;
        std::size_t result_bytes = 0;  // of any task
        std::vector<std::int64_t> slot_mapping;
        std::vector<std::int64_t> blocks;
        std::vector<Task> tasks;
        std::vector<Task> merges;
    };

    TercetAttentionProblem validate(const TercetAttentionStep& step) const;
    void cut(const TercetAttentionStep& step, Plan& plan);
    std::size_t partial_bytes(const Task& task) const;
    std::size_t partial_stride(const Task& task) const;
    // What a query token gets from one KV head.
    std::int64_t head_result_bytes() const {
        return static_cast<std::int64_t>(geometry_.group_heads) * geometry_.head_size * geometry_.element_bytes;
    }
    void run_serial(const LayerCall& call);
    void run_parallel(const LayerCall& call);

    Geometry geometry_;
    const AttentionKernels* kernels_;
    char* kv_;
    std::vector<std::int32_t> windows_;
    std::int32_t threads_;
    std::unique_ptr<void, FreeAligned> scratch_memory_;
    std::vector<Scratch> scratch_;

    Plan plans_[2];
    std::int32_t running_ = 0;  // of the plans; the other is the one that plan() writes
    std::int32_t planned_ = 0;  // the latest
    std::vector<float> partials_;  // of the latest: nobody who is late uses them
};

}  // namespace tercet
