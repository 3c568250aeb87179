#include "program.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <new>
#include <system_error>

namespace tercet {
namespace {

// From so many rows on, arithmetic is the limit, and threads take pieces as they come instead of equal shares.
constexpr std::int32_t kManyRows = 32;
// Outputs of a piece of which only the best is kept: with a hundred rows they lie in the second-level cache until they are scanned.
constexpr std::int32_t kBestGroups = 4;
constexpr std::int32_t kBestOutputs = kBestGroups * kGroupPanels * kPanel;

std::int32_t share(std::int32_t count, std::int32_t thread, std::int32_t team) {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(count) * thread / team);
}

std::int32_t ceil_div(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

std::int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Program::Program(Dtype dtype, Isa isa, std::int32_t threads)
    : kernels_(step_kernels(isa, dtype)), element_bytes_(dtype == Dtype::float32 ? 4 : 2), team_(threads) {}

ProgramProblem Program::check(const TercetCall& call) const {
    if (call.section < 0 || static_cast<std::size_t>(call.section) >= sections_.size()) return ProgramProblem::section;
    const std::size_t begin = call.section == 0 ? 0 : sections_[static_cast<std::size_t>(call.section - 1)];
    for (std::size_t i = begin; i < sections_[static_cast<std::size_t>(call.section)]; ++i) {
        const TercetOp& op = ops_[i];
        if (static_cast<OpKind>(op.kind) == OpKind::attention) {
            const auto* attention = static_cast<const Attention*>(call.attention);
            if (attention == nullptr || !attention->ready(op.layer + 1, call.rows) || attention->threads() < team_.size()) {
                return ProgramProblem::plan;
            }
        }
        if (static_cast<OpKind>(op.kind) == OpKind::embed) {
            for (std::int32_t t = 0; t < call.rows; ++t) {
                if (call.token_ids[t] < 0 || call.token_ids[t] >= op.in_features) return ProgramProblem::token_id;
            }
        }
    }
    return ProgramProblem::none;
}

ProgramProblem Program::run(const TercetCall& call) {
    const ProgramProblem found = check(call);
    if (found != ProgramProblem::none) return found;
    if (call.places != nullptr) reserve_best(call.rows);
    call_ = call;
    begin_ = call.section == 0 ? 0 : sections_[static_cast<std::size_t>(call.section - 1)];
    end_ = sections_[static_cast<std::size_t>(call.section)];
    counters_[begin_ % 3].pieces.reset();
    counters_[begin_ % 3].merges.reset();
    team_.run(&Program::enter, this);
    if (call.places != nullptr) merge_best();
    return ProgramProblem::none;
}

void Program::enter(void* self, std::int32_t thread) { static_cast<Program*>(self)->execute(thread); }

void Program::execute(std::int32_t thread) {
    std::int64_t* profile = thread == 0 ? profile_ : nullptr;
    std::int64_t before = profile != nullptr ? now() : 0;
    for (std::size_t i = begin_; i < end_; ++i) {
        TercetOp op = ops_[i];
        if (op.in == nullptr) {
            op.in = call_.in;
            op.in_stride = call_.in_stride;
        }
        if (op.out == nullptr) {
            op.out = call_.out;
            op.out_stride = call_.out_stride;
        }
        if (thread == 0) {
            counters_[(i + 1) % 3].pieces.reset();
            counters_[(i + 1) % 3].merges.reset();
        }
        run_op(op, thread, counters_[i % 3]);
        if (i + 1 < end_) team_.barrier(thread);
        if (profile != nullptr) {
            const std::int64_t after = now();
            profile[i] = after - before;
            before = after;
        }
    }
}

void Program::run_op(const TercetOp& op, std::int32_t thread, Counters& counters) {
    const std::int32_t begin = share(call_.rows, thread, team_.size());
    const std::int32_t end = share(call_.rows, thread + 1, team_.size());
    switch (static_cast<OpKind>(op.kind)) {
        case OpKind::embed:
            if (op.format != 0) {
                return kernels_->gather_quant(static_cast<WeightFormat>(op.format), static_cast<const char*>(op.weight),
                                              op.out_features, op.panels, call_.token_ids, op.scalar, static_cast<char*>(op.out),
                                              op.out_stride, begin, end);
            }
            return kernels_->gather(static_cast<const char*>(op.weight), op.out_features, op.panels, call_.token_ids, op.scalar,
                                    static_cast<char*>(op.out), op.out_stride, begin, end);
        case OpKind::angles:
            return angles(op, begin, end);
        case OpKind::norm:
            return kernels_->norm(static_cast<const char*>(op.in), op.in_stride, static_cast<const float*>(op.weight), op.scalar,
                                  op.in_features, static_cast<char*>(op.out), op.out_stride, begin, end);
        case OpKind::linear:
            return run_linear(op, thread, counters);
        case OpKind::attention:
            return run_attention(op, thread, counters);
    }
}

void Program::angles(const TercetOp& op, std::int32_t begin, std::int32_t end) const {
    const auto* frequencies = static_cast<const float*>(op.weight);
    for (std::int32_t t = begin; t < end; ++t) {
        auto* cosines = reinterpret_cast<float*>(static_cast<char*>(op.out) + t * op.out_stride);
        float* sines = cosines + op.rotary_half;
        for (std::int32_t i = 0; i < op.rotary_half; ++i) {
            const float angle = static_cast<float>(call_.positions[t]) * frequencies[i];
            cosines[i] = std::cos(angle);
            sines[i] = std::sin(angle);
        }
    }
}

void Program::multiply(const TercetOp& op, const LinearCall& call, const LinearPart& part) const {
    if (op.format == 0) return kernels_->linear(call, part);
    kernels_->linear_quant(static_cast<WeightFormat>(op.format), call, part);
}

void Program::run_linear(const TercetOp& op, std::int32_t thread, Counters& counters) {
    if (call_.places != nullptr && op.out == call_.out) return run_best(op, thread, counters);
    const LinearCall call{static_cast<const char*>(op.weight), static_cast<const float*>(op.aux),
                          static_cast<const char*>(op.in),     static_cast<char*>(op.out),
                          op.in_stride,                        op.out_stride,
                          op.in_features,                      op.out_features,
                          op.panels,                           static_cast<Epilogue>(op.epilogue)};
    if (call_.rows < kManyRows || team_.size() == 1) {
        // Pairs of panels: gate and up belong together, and two panels share the cost of spreading a value.
        const std::int32_t pairs = ceil_div(op.panels, 2);
        const LinearPart part{2 * share(pairs, thread, team_.size()),
                              std::min(op.panels, 2 * share(pairs, thread + 1, team_.size())), 0, call_.rows};
        if (part.panel_begin < part.panel_end) multiply(op, call, part);
        return;
    }
    const std::int32_t groups = ceil_div(op.panels, kGroupPanels);
    const std::int32_t blocks = ceil_div(call_.rows, kernels_->piece_rows);
    const std::int32_t unit = kernels_->row_unit;
    const std::int32_t units = ceil_div(call_.rows, unit);
    for (std::int32_t piece = counters.pieces.take(); piece < groups * blocks; piece = counters.pieces.take()) {
        const std::int32_t group = piece / blocks;
        const std::int32_t block = piece % blocks;
        multiply(op, call,
                 LinearPart{group * kGroupPanels, std::min(op.panels, (group + 1) * kGroupPanels), unit * share(units, block, blocks),
                            std::min(call_.rows, unit * share(units, block + 1, blocks))});
    }
}

void Program::reserve_best(std::int32_t rows) {
    const auto size = static_cast<std::size_t>(rows);
    found_.resize(static_cast<std::size_t>(team_.size()));
    for (Found& found : found_) {
        found.best.assign(size, BestLogit{});
        if (found.values.size() < size * kBestOutputs) found.values.resize(size * kBestOutputs);
    }
}

// A product of which only the best of each row is kept. Values are those of run_linear to the bit: the same kernels compute them, into
// a buffer that stays in a cache.
void Program::run_best(const TercetOp& op, std::int32_t thread, Counters& counters) {
    Found& found = found_[static_cast<std::size_t>(thread)];
    LinearCall call{static_cast<const char*>(op.weight), static_cast<const float*>(op.aux),
                    static_cast<const char*>(op.in),     nullptr,
                    op.in_stride,                        kBestOutputs * 4,
                    op.in_features,                      op.out_features,
                    op.panels,                           Epilogue::store_float};
    const std::int32_t unit = kernels_->row_unit;
    const std::int32_t units = ceil_div(call_.rows, unit);
    const std::int32_t blocks = call_.rows < kManyRows ? 1 : ceil_div(call_.rows, kernels_->piece_rows);
    const auto take = [&](std::int32_t piece) {
        const std::int32_t panel_begin = piece * kBestGroups * kGroupPanels;
        const std::int32_t panel_end = std::min(op.panels, panel_begin + kBestGroups * kGroupPanels);
        const std::int32_t first = panel_begin * kPanel;
        const std::int32_t count = std::min(op.out_features, panel_end * kPanel) - first;
        // The kernels count columns from the first of the matrix.
        call.y = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(found.values.data()) -
                                         static_cast<std::uintptr_t>(first) * 4);
        for (std::int32_t block = 0; block < blocks; ++block) {
            multiply(op, call,
                     LinearPart{panel_begin, panel_end, unit * share(units, block, blocks),
                                std::min(call_.rows, unit * share(units, block + 1, blocks))});
        }
        for (std::int32_t row = 0; row < call_.rows; ++row) {
            const auto at = static_cast<std::size_t>(row);
            kernels_->scan_part(found.values.data() + at * kBestOutputs, count, first, &found.best[at]);
        }
    };
    const std::int32_t pieces = ceil_div(op.panels, kBestGroups * kGroupPanels);
    if (call_.rows < kManyRows || team_.size() == 1) {
        // Weights are the limit: each thread reads one stretch of them.
        const std::int32_t end = share(pieces, thread + 1, team_.size());
        for (std::int32_t piece = share(pieces, thread, team_.size()); piece < end; ++piece) take(piece);
        return;
    }
    for (std::int32_t piece = counters.pieces.take(); piece < pieces; piece = counters.pieces.take()) take(piece);
}

void Program::merge_best() {
    for (std::int32_t row = 0; row < call_.rows; ++row) {
        const auto at = static_cast<std::size_t>(row);
        BestLogit best;
        bool finite = true;
        for (const Found& found : found_) {
            const BestLogit& other = found.best[at];
            finite = finite && other.nothing == 0.0f;
            if (other.highest > best.highest || (other.highest == best.highest && other.place < best.place)) {
                best.highest = other.highest;
                best.place = other.place;
            }
        }
        call_.highest[row] = best.highest;
        call_.places[row] = best.place;
        call_.finite[row] = finite ? 1 : 0;
    }
}

void Program::run_attention(const TercetOp& op, std::int32_t thread, Counters& counters) {
    const auto& attention = *static_cast<const Attention*>(call_.attention);
    const std::int32_t begin = share(call_.rows, thread, team_.size());
    const std::int32_t end = share(call_.rows, thread + 1, team_.size());
    const std::int64_t head_bytes = static_cast<std::int64_t>(op.head_size) * element_bytes_;
    auto* q = static_cast<char*>(const_cast<void*>(op.in));
    if (op.rotary_half > 0) {
        kernels_->rotate(q, op.in_stride, op.query_heads + op.kv_heads, op.head_size, op.rotary_half,
                         static_cast<const float*>(op.aux), begin, end);
    }
    LayerCall call{};
    call.q = q;
    call.k = q + op.query_heads * head_bytes;
    call.v = call.k + op.kv_heads * head_bytes;
    call.out = static_cast<char*>(op.out);
    call.q_stride = call.k_stride = call.v_stride = op.in_stride;
    call.out_stride = op.out_stride;
    attention.complete(op.layer, call);
    attention.write(call, begin, end);
    if (thread == 0) attention.pad(call);
    team_.barrier(thread);
    for (std::int32_t i = counters.pieces.take(); i < attention.tasks(); i = counters.pieces.take()) {
        attention.run_task(call, i, thread);
    }
    if (attention.merges() == 0) return;
    team_.barrier(thread);
    for (std::int32_t i = counters.merges.take(); i < attention.merges(); i = counters.merges.take()) {
        attention.run_merge(call, i, thread);
    }
}

}  // namespace tercet

using tercet::Dtype;
using tercet::Isa;
using tercet::Program;
using tercet::ProgramProblem;

extern "C" {

// Returns the program, to be released with tercet_program_destroy, or null with *problem filled in. Its threads are started.
void* tercet_program_create(std::int32_t dtype, std::int32_t isa, std::int32_t threads, std::int32_t* problem) {
    *problem = static_cast<std::int32_t>(ProgramProblem::none);
    if (!tercet::isa_available(static_cast<Isa>(isa))) {
        *problem = static_cast<std::int32_t>(ProgramProblem::isa);
        return nullptr;
    }
    try {
        return new Program(static_cast<Dtype>(dtype), static_cast<Isa>(isa), threads);
    } catch (const std::bad_alloc&) {
        *problem = static_cast<std::int32_t>(ProgramProblem::memory);
    } catch (const std::system_error&) {
        *problem = static_cast<std::int32_t>(ProgramProblem::memory);
    }
    return nullptr;
}

void tercet_program_destroy(void* program) { delete static_cast<Program*>(program); }

// Returns 0, or the code of a problem.
std::int32_t tercet_program_add(void* program, const TercetOp* op) {
    try {
        static_cast<Program*>(program)->add(*op);
    } catch (const std::bad_alloc&) {
        return static_cast<std::int32_t>(ProgramProblem::memory);
    }
    return 0;
}

std::int32_t tercet_program_end_section(void* program) {
    try {
        static_cast<Program*>(program)->end_section();
    } catch (const std::bad_alloc&) {
        return static_cast<std::int32_t>(ProgramProblem::memory);
    }
    return 0;
}

std::int32_t tercet_program_run(void* program, const TercetCall* call) {
    try {
        return static_cast<std::int32_t>(static_cast<Program*>(program)->run(*call));
    } catch (const std::bad_alloc&) {
        return static_cast<std::int32_t>(ProgramProblem::memory);
    }
}

// `ns` has one element per operation, and stays valid until it is replaced by another or by null.
void tercet_program_profile(void* program, std::int64_t* ns) { static_cast<Program*>(program)->profile(ns); }
}
