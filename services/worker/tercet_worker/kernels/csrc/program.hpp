// A model's step as a list of operations over fixed buffers, executed by a team of threads in one call.
//
// Every operation is one stage or several (stages.hpp), of which threads take rows, outputs or tasks. Products and attention of few
// rows, which are most of the time of a decode step, can be done again: a thread that loses its processor, which the rest of the system needs,
// too, does not hold up the step. Sections are parts of the list that are run by themselves: the layers, and the head, which follows
// for the rows that sample.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "isa.hpp"
#include "linear_types.hpp"
#include "stages.hpp"
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
    ~Program() { settle(); }  // threads may look at what is destroyed before the team
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // Returns whether the instruction set reads such weights.
    bool add(const TercetOp& op);
    // Ends the section that has been added to.
    void end_section() { sections_.push_back(ops_.size()); }

    // Throws std::bad_alloc.
    ProgramProblem run(const TercetCall& call);

    // What every thread does after the calls of a run.
    struct Tail {
        virtual void run(Stages& stages, Stages::Walk& walk) = 0;

      protected:
        ~Tail() = default;
    };

    // Two calls, and then `tail` unless it is null, as one job of the team. A thread that was away may still be about to leave when it
    // returns: what the calls point to, and what the tail reads, stays as it is until settle(), or the next run.
    ProgramProblem run(const TercetCall& layers, const TercetCall& head, Tail* tail);
    void settle() { team_.settle(); }

    // Nanoseconds that each operation took in the last run of its section, on the first thread; null to stop measuring.
    void profile(std::int64_t* ns) { profile_ = ns; }

    std::int32_t threads() const { return team_.size(); }
    const StepKernels& kernels() const { return *kernels_; }

  private:
    // Of one thread: outputs of a unit, on their way to where the others look.
    struct alignas(128) Own {
        std::vector<float> values;
        std::vector<BestLogit> best;  // [rows]
    };

    // A call of the job that runs.
    struct Part {
        TercetCall call;
        std::size_t begin;  // operations
        std::size_t end;
        std::int32_t tasks;  // of attention
        std::int32_t merges;
    };

    ProgramProblem check(const TercetCall& call) const;
    void begin(const TercetCall& call);
    void start();
    void merge_best(const Part& part) const;

    static void enter(void* self, std::int32_t thread);
    void execute(std::int32_t thread);
    void run_op(const Part& part, const TercetOp& op, Stages::Walk& walk);
    void run_linear(const Part& part, const TercetOp& op, Stages::Walk& walk);
    void run_few_rows(const Part& part, const TercetOp& op, const LinearCall& call, Stages::Walk& walk);
    void run_best(const Part& part, const TercetOp& op, Stages::Walk& walk);
    void run_attention(const Part& part, const TercetOp& op, Stages::Walk& walk);
    std::int32_t task_stretch(std::int32_t tasks) const;
    void multiply(const TercetOp& op, const LinearCall& call, const LinearPart& part) const;
    void angles(const TercetCall& call, const TercetOp& op, std::int32_t begin, std::int32_t end) const;
    template <class Work>
    void over_rows(std::int32_t rows, Stages::Walk& walk, const Work& work);
    template <class Work>
    void in_stretches(std::int32_t pieces, std::int32_t most, Stages::Walk& walk, const Work& work);

    // Of a product with few rows: units of one thread, and the panels of a unit.
    std::int32_t few_row_units(const TercetOp& op) const;
    LinearPart few_row_part(const TercetOp& op, std::int32_t each, std::int32_t unit, std::int32_t rows) const;
    // Of a product of which only the best is kept: units of all threads.
    std::int32_t best_units(std::int32_t rows, std::int32_t panels) const;

    const StepKernels* kernels_;
    std::int32_t element_bytes_;
    Team team_;
    std::vector<TercetOp> ops_;
    std::vector<std::size_t> sections_;
    Stages stages_;
    std::int64_t* profile_ = nullptr;
    std::vector<Own> own_;         // [threads]
    std::size_t widest_ = 0;       // outputs of a unit of a product with few rows
    std::vector<BestLogit> best_;  // [units][rows] of a call that keeps only the best of each row

    // Of the job.
    Part parts_[2]{};
    std::int32_t num_parts_ = 0;
    Tail* tail_ = nullptr;
};

}  // namespace tercet
