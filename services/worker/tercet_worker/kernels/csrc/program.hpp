// A model's step as a list of operations over fixed buffers, executed by a team of threads in one call.
//
// Between operations there is a barrier; within one, every thread takes a share of the rows or of the outputs. Sections are parts
// of the list that are run by themselves: the layers, and the head, which follows for the rows that sample.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "isa.hpp"
#include "linear_types.hpp"
#include "team.hpp"

extern "C" {

// One operation. Mirrored in kernels/step_abi.py; raise tercet_abi_version with it. Rows are tokens; strides are bytes from row to
// row. Which fields count depends on the kind; a null `in` or `out` stands for what the call passes.
struct TercetOp {
    std::int32_t kind;  // see tercet::OpKind
    std::int32_t epilogue;
    std::int32_t in_features;
    std::int32_t out_features;
    std::int32_t panels;
    std::int32_t layer;
    std::int32_t query_heads;
    std::int32_t kv_heads;
    std::int32_t head_size;
    std::int32_t rotary_half;
    float scalar;  // eps of a norm, scale of an embedding
    std::int32_t format;  // of the weights of a product or an embedding: tercet::WeightFormat
    const void* in;
    void* out;
    std::int64_t in_stride;
    std::int64_t out_stride;
    const void* weight;  // packed; of a norm float32; of angles float32 frequencies
    const void* aux;     // bias of a product; angles of attention
};

struct TercetCall {
    const std::int32_t* token_ids;  // [rows]
    const std::int64_t* positions;  // [rows]
    void* attention;                // an Attention with the plan of these rows, or null
    const void* in;
    void* out;
    std::int64_t in_stride;
    std::int64_t out_stride;
    std::int32_t rows;
    std::int32_t section;
    // Where `places` is given, the product that would be written to `out` is not kept: only, of each row, the highest value, the first
    // place where it stands, and whether all are finite numbers (where not, the other two mean nothing).
    float* highest;
    std::int64_t* places;
    std::uint8_t* finite;
};
}

namespace tercet {

enum class OpKind : std::int32_t {
    embed = 0,     // out float32 = scalar * rows of `weight` by token id
    angles = 1,    // out float32 [rotary_half cosines][rotary_half sines] of position * weight
    norm = 2,      // out = in / sqrt(mean(in²) + scalar) * weight; in float32, in_features columns
    linear = 3,    // out = epilogue(in · weightᵀ + aux)
    attention = 4, // in [q | k | v], rotated in place by `aux` (rotary_half > 0); out [rows, query_heads, head_size]
};

enum class ProgramProblem : std::int32_t {
    none = 0,
    isa = 1,
    memory = 2,
    section = 3,
    plan = 4,     // attention has no plan for these rows, fewer threads than the team, or fewer layers
    token_id = 5, // a token id is not below the vocabulary size
};

class Program {
  public:
    // Throws std::bad_alloc and std::system_error. The instruction set is available.
    Program(Dtype dtype, Isa isa, std::int32_t threads);

    void add(const TercetOp& op) { ops_.push_back(op); }
    // Ends the section that has been added to.
    void end_section() { sections_.push_back(ops_.size()); }

    // Throws std::bad_alloc where only the best is to be kept.
    ProgramProblem run(const TercetCall& call);

    // Nanoseconds that each operation took in the last run of its section, on the first thread; null to stop measuring.
    void profile(std::int64_t* ns) { profile_ = ns; }

    // For other work between runs.
    Team& team() { return team_; }
    const StepKernels& kernels() const { return *kernels_; }

  private:
    struct alignas(128) Counter {
        std::atomic<std::int32_t> next{0};
        std::int32_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
        void reset() { next.store(0, std::memory_order_relaxed); }
    };

    // What is taken piece by piece within one operation: pieces of a product or tasks of attention, and merges of attention.
    struct Counters {
        Counter pieces;
        Counter merges;
    };

    static void enter(void* self, std::int32_t thread);
    void execute(std::int32_t thread);
    void run_op(const TercetOp& op, std::int32_t thread, Counters& counters);
    void run_linear(const TercetOp& op, std::int32_t thread, Counters& counters);
    void run_best(const TercetOp& op, std::int32_t thread, Counters& counters);
    void multiply(const TercetOp& op, const LinearCall& call, const LinearPart& part) const;
    void reserve_best(std::int32_t rows);
    void merge_best();
    void run_attention(const TercetOp& op, std::int32_t thread, Counters& counters);
    void angles(const TercetOp& op, std::int32_t begin, std::int32_t end) const;
    ProgramProblem check(const TercetCall& call) const;

    const StepKernels* kernels_;
    std::int32_t element_bytes_;
    Team team_;
    std::vector<TercetOp> ops_;
    std::vector<std::size_t> sections_;
    // Operations use them in turn. The next one's are reset during an operation, as the barrier before it says that those of the
    // last but one are out of use.
    Counters counters_[3];
    std::int64_t* profile_ = nullptr;

    // Of a call that keeps only the best of each row: what each thread found, and where it puts the values of a piece.
    struct alignas(128) Found {
        std::vector<BestLogit> best;  // [rows]
        std::vector<float> values;    // [rows][kBestOutputs]
    };
    std::vector<Found> found_;

    // Of the running call.
    TercetCall call_{};
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
};

}  // namespace tercet
