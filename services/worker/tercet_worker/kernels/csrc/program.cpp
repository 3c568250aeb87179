#include "program.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <system_error>

namespace tercet {
namespace {

// From so many rows on, arithmetic is the limit, and a unit is a few rows by a group of panels.
constexpr std::int32_t kManyRows = 32;
// Of compact weights a piece has so many rows, even where kernels ask for fewer: it unpacks the group.
constexpr std::int32_t kCompactPieceRows = 96;
// With fewer, memory is: each thread reads one stretch of the weights, cut into units that take some 10 microseconds to read. As much
// time is lost where a thread loses its processor.
constexpr std::int64_t kUnitWeights = 192 * 1024;
// Outputs of a piece of which only the best is kept: with a hundred rows they lie in the second-level cache until they are scanned.
constexpr std::int32_t kBestGroups = 4;
constexpr std::int32_t kBestUnits = 16;  // of a thread, with many rows
constexpr std::int32_t kRowUnits = 4;    // of a thread, with many rows: norms and the like
constexpr std::int32_t kBestOutputs = kBestGroups * kGroupPanels * kPanel;

std::int32_t share(std::int32_t count, std::int32_t thread, std::int32_t team) {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(count) * thread / team);
}

std::int32_t ceil_div(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

}  // namespace

Program::Program(Dtype dtype, Isa isa, std::int32_t threads)
    : kernels_(step_kernels(isa, dtype)),
      element_bytes_(dtype == Dtype::float32 ? 4 : 2),
      team_(threads),
      stages_(team_),
      own_(static_cast<std::size_t>(threads)) {}

bool Program::add(const TercetOp& op) {
    if (static_cast<WeightFormat>(op.format) == WeightFormat::compact && kernels_->linear_compact == nullptr) return false;
    team_.settle();
    ops_.push_back(op);
    if (static_cast<OpKind>(op.kind) != OpKind::linear) return true;
    const std::int32_t each = few_row_units(op);
    for (std::int32_t unit = 0; unit < each * team_.size(); ++unit) {
        const LinearPart part = few_row_part(op, each, unit, 0);
        widest_ = std::max(widest_, static_cast<std::size_t>(std::max(0, part.panel_end - part.panel_begin) * kPanel));
    }
    return true;
}

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
    team_.settle();
    num_parts_ = 0;
    tail_ = nullptr;
    begin(call);
    start();
    team_.settle();
    return ProgramProblem::none;
}

ProgramProblem Program::run(const TercetCall& layers, const TercetCall& head, Tail* tail) {
    for (const TercetCall* call : {&layers, &head}) {
        const ProgramProblem found = check(*call);
        if (found != ProgramProblem::none) return found;
    }
    team_.settle();
    num_parts_ = 0;
    tail_ = tail;
    begin(layers);
    begin(head);
    start();
    return ProgramProblem::none;
}

// Adds a call to the job. No thread is in one.
void Program::begin(const TercetCall& call) {
    Part& part = parts_[num_parts_++];
    part.call = call;
    part.begin = call.section == 0 ? 0 : sections_[static_cast<std::size_t>(call.section - 1)];
    part.end = sections_[static_cast<std::size_t>(call.section)];
    auto* attention = static_cast<Attention*>(call.attention);
    if (attention != nullptr) attention->begin();
    part.tasks = attention != nullptr ? attention->tasks() : 0;
    part.merges = attention != nullptr ? attention->merges() : 0;
    const auto rows = static_cast<std::size_t>(call.rows);
    std::size_t values = call.rows < kManyRows ? rows * widest_ : 0;
    if (attention != nullptr && call.rows < kManyRows) {
        const std::size_t bytes = static_cast<std::size_t>(task_stretch(part.tasks)) * attention->result_bytes();
        values = std::max(values, (bytes + sizeof(float) - 1) / sizeof(float));
    }
    if (call.places != nullptr) values = std::max(values, rows * kBestOutputs);
    for (Own& own : own_) {
        if (own.values.size() < values) own.values.resize(values);
        if (call.places != nullptr && own.best.size() < rows) own.best.resize(rows);
    }
    if (call.places == nullptr) return;
    const std::size_t best = rows * static_cast<std::size_t>(best_units(call.rows, ops_[part.end - 1].panels));
    if (best_.size() < best) best_.resize(best);
}

void Program::start() {
    stages_.reset();
    team_.start(&Program::enter, this);
    for (std::int32_t i = 0; i < num_parts_; ++i) {
        if (parts_[i].call.places != nullptr) merge_best(parts_[i]);
    }
}

void Program::enter(void* self, std::int32_t thread) { static_cast<Program*>(self)->execute(thread); }

void Program::execute(std::int32_t thread) {
    Stages::Walk walk{thread};
    std::int64_t* profile = thread == 0 ? profile_ : nullptr;
    std::int64_t before = profile != nullptr ? Team::now() : 0;
    for (std::int32_t number = 0; number < num_parts_; ++number) {
        const Part& part = parts_[number];
        for (std::size_t i = part.begin; i < part.end; ++i) {
            TercetOp op = ops_[i];
            if (op.in == nullptr) {
                op.in = part.call.in;
                op.in_stride = part.call.in_stride;
            }
            if (op.out == nullptr) {
                op.out = part.call.out;
                op.out_stride = part.call.out_stride;
            }
            run_op(part, op, walk);
            if (profile != nullptr) {
                const std::int64_t after = Team::now();
                profile[i] = after - before;
                before = after;
            }
        }
    }
    if (tail_ != nullptr) tail_->run(stages_, walk);
}

template <class Work>
void Program::over_rows(std::int32_t rows, Stages::Walk& walk, const Work& work) {
    if (rows >= kManyRows) return in_stretches(rows, kRowUnits, walk, work);
    const std::int32_t units = std::min(rows, team_.size());
    stages_.once(walk, units, [&](std::int32_t unit) { work(share(rows, unit, units), share(rows, unit + 1, units)); });
}

void Program::run_op(const Part& part, const TercetOp& op, Stages::Walk& walk) {
    switch (static_cast<OpKind>(op.kind)) {
        case OpKind::embed:
            return over_rows(part.call.rows, walk, [&](std::int32_t begin, std::int32_t end) {
                const auto format = static_cast<WeightFormat>(op.format);
                const auto* weights = static_cast<const char*>(op.weight);
                auto* out = static_cast<char*>(op.out);
                if (format == WeightFormat::dense) {
                    kernels_->gather(weights, op.out_features, op.panels, part.call.token_ids, op.scalar, out, op.out_stride, begin, end);
                } else if (format == WeightFormat::compact) {
                    kernels_->gather_compact(weights, op.out_features, part.call.token_ids, op.scalar, out, op.out_stride, begin, end);
                } else {
                    kernels_->gather_quant(format, weights, op.out_features, op.panels, part.call.token_ids, op.scalar, out,
                                           op.out_stride, begin, end);
                }
            });
        case OpKind::angles:
            return over_rows(part.call.rows, walk, [&](std::int32_t begin, std::int32_t end) { angles(part.call, op, begin, end); });
        case OpKind::norm:
            return over_rows(part.call.rows, walk, [&](std::int32_t begin, std::int32_t end) {
                kernels_->norm(static_cast<const char*>(op.in), op.in_stride, static_cast<const float*>(op.weight), op.scalar,
                               op.in_features, static_cast<char*>(op.out), op.out_stride, begin, end);
            });
        case OpKind::linear:
            return run_linear(part, op, walk);
        case OpKind::attention:
            return run_attention(part, op, walk);
    }
}

void Program::angles(const TercetCall& call, const TercetOp& op, std::int32_t begin, std::int32_t end) const {
    const auto* frequencies = static_cast<const float*>(op.weight);
    for (std::int32_t t = begin; t < end; ++t) {
        auto* cosines = reinterpret_cast<float*>(static_cast<char*>(op.out) + t * op.out_stride);
        float* sines = cosines + op.rotary_half;
        for (std::int32_t i = 0; i < op.rotary_half; ++i) {
            const float angle = static_cast<float>(call.positions[t]) * frequencies[i];
            cosines[i] = std::cos(angle);
            sines[i] = std::sin(angle);
        }
    }
}

void Program::multiply(const TercetOp& op, const LinearCall& call, const LinearPart& part) const {
    const auto format = static_cast<WeightFormat>(op.format);
    if (format == WeightFormat::dense) return kernels_->linear(call, part);
    if (format == WeightFormat::compact) return kernels_->linear_compact(call, part);
    kernels_->linear_quant(format, call, part);
}

void Program::run_linear(const Part& part, const TercetOp& op, Stages::Walk& walk) {
    if (part.call.places != nullptr && op.out == part.call.out) return run_best(part, op, walk);
    const std::int32_t rows = part.call.rows;
    const LinearCall call{static_cast<const char*>(op.weight), static_cast<const float*>(op.aux),
                          static_cast<const char*>(op.in),     static_cast<char*>(op.out),
                          op.in_stride,                        op.out_stride,
                          op.in_features,                      op.out_features,
                          op.panels,                           static_cast<Epilogue>(op.epilogue)};
    if (team_.size() == 1) return multiply(op, call, LinearPart{0, op.panels, 0, rows});
    if (rows < kManyRows) return run_few_rows(part, op, call, walk);
    const bool compact = static_cast<WeightFormat>(op.format) == WeightFormat::compact;
    const std::int32_t blocks = ceil_div(rows, compact ? kCompactPieceRows : kernels_->piece_rows);
    const std::int32_t pieces = ceil_div(op.panels, kGroupPanels) * blocks;
    const std::int32_t unit_rows = kernels_->row_unit;
    const std::int32_t row_units = ceil_div(rows, unit_rows);
    // A thread has rows of its own, as far as there are as many blocks of them: what it reads it has written itself. Processors that
    // share no cache are slow to tell each other; weights are read by all of them, but ahead of their use.
    const std::int32_t groups = pieces / blocks;
    in_stretches(pieces, Stages::kMost, walk, [&](std::int32_t begin, std::int32_t end) {
        for (std::int32_t piece = begin; piece < end; ++piece) {
            const std::int32_t block = piece / groups;
            const std::int32_t group = piece % groups;
            multiply(op, call,
                     LinearPart{group * kGroupPanels, std::min(op.panels, (group + 1) * kGroupPanels),
                                unit_rows * share(row_units, block, blocks),
                                std::min(rows, unit_rows * share(row_units, block + 1, blocks))});
        }
    });
}

// Each thread has one stretch of the pieces, in `most` units or fewer.
template <class Work>
void Program::in_stretches(std::int32_t pieces, std::int32_t most, Stages::Walk& walk, const Work& work) {
    const std::int32_t each = std::min(most, ceil_div(pieces, team_.size()));
    const std::int32_t units = each * team_.size();
    stages_.once(walk, units, [&](std::int32_t unit) {
        const std::int32_t at = stages_.owner(unit) * each + stages_.place(unit);
        const std::int32_t begin = share(pieces, at, units);
        const std::int32_t end = share(pieces, at + 1, units);
        if (begin < end) work(begin, end);
    });
}

std::int32_t Program::few_row_units(const TercetOp& op) const {
    const std::int64_t weights = static_cast<std::int64_t>(op.panels) * kPanel * op.in_features / team_.size();
    const std::int32_t most = std::min(Stages::kMost, ceil_div(op.panels, kGroupPanels * team_.size()));
    return static_cast<std::int32_t>(std::clamp<std::int64_t>((weights + kUnitWeights / 2) / kUnitWeights, 1, std::max(1, most)));
}

// Panels come in pairs: gate and up belong together, and two panels share the cost of spreading a value. Within a thread's stretch,
// units begin at whole groups.
LinearPart Program::few_row_part(const TercetOp& op, std::int32_t each, std::int32_t unit, std::int32_t rows) const {
    const std::int32_t pairs = ceil_div(op.panels, 2);
    const std::int32_t begin = share(pairs, stages_.owner(unit), team_.size());
    const std::int32_t end = share(pairs, stages_.owner(unit) + 1, team_.size());
    const auto border = [&](std::int32_t place) {
        if (place == 0) return begin;
        if (place == each) return end;
        constexpr std::int32_t kGroupPairs = kGroupPanels / 2;
        return std::max(begin, (begin + share(end - begin, place, each)) / kGroupPairs * kGroupPairs);
    };
    const std::int32_t place = stages_.place(unit);
    return LinearPart{2 * border(place), std::min(op.panels, 2 * border(place + 1)), 0, rows};
}

void Program::run_few_rows(const Part& part, const TercetOp& op, const LinearCall& call, Stages::Walk& walk) {
    const std::int32_t rows = part.call.rows;
    const std::int32_t each = few_row_units(op);
    const auto epilogue = static_cast<Epilogue>(op.epilogue);
    const std::int32_t outputs = epilogue == Epilogue::gated_silu ? kPanel / 2 : kPanel;  // of a panel
    const std::int64_t bytes = epilogue == Epilogue::store_float || epilogue == Epilogue::add ? 4 : element_bytes_;
    char* own = reinterpret_cast<char*>(own_[static_cast<std::size_t>(walk.thread)].values.data());
    LinearCall mine = call;
    mine.y_stride = static_cast<std::int64_t>(widest_) * 4;
    const auto each_row = [&](const LinearPart& panels, const auto& copy) {
        const std::int64_t first = static_cast<std::int64_t>(panels.panel_begin) * outputs;
        const std::int64_t count = std::min<std::int64_t>(op.out_features, static_cast<std::int64_t>(panels.panel_end) * outputs) - first;
        if (count <= 0) return;
        for (std::int32_t row = 0; row < rows; ++row) {
            copy(own + row * mine.y_stride, call.y + row * call.y_stride + first * bytes, static_cast<std::size_t>(count * bytes));
        }
    };
    stages_.again(
        walk, each * team_.size(),
        [&](std::int32_t unit) {
            const LinearPart panels = few_row_part(op, each, unit, rows);
            if (panels.panel_begin >= panels.panel_end) return;
            if (epilogue == Epilogue::add) {
                each_row(panels, [](char* here, const char* there, std::size_t size) { std::memcpy(here, there, size); });
            }
            // The kernels count columns from the first of the matrix.
            mine.y = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(own) -
                                             static_cast<std::uintptr_t>(panels.panel_begin * outputs * bytes));
            multiply(op, mine, panels);
        },
        [&](std::int32_t unit) {
            each_row(few_row_part(op, each, unit, rows),
                     [](const char* here, char* there, std::size_t size) { std::memcpy(there, here, size); });
        });
}

std::int32_t Program::best_units(std::int32_t rows, std::int32_t panels) const {
    const std::int32_t pieces = ceil_div(panels, kBestGroups * kGroupPanels);
    return team_.size() * std::min(rows < kManyRows ? Stages::kMost : kBestUnits, ceil_div(pieces, team_.size()));
}

// A product of which only the best of each row is kept. Values are those of run_linear to the bit: the same kernels compute them, into
// a buffer that stays in a cache.
void Program::run_best(const Part& part, const TercetOp& op, Stages::Walk& walk) {
    const std::int32_t rows = part.call.rows;
    Own& own = own_[static_cast<std::size_t>(walk.thread)];
    LinearCall call{static_cast<const char*>(op.weight), static_cast<const float*>(op.aux),
                    static_cast<const char*>(op.in),     nullptr,
                    op.in_stride,                        kBestOutputs * 4,
                    op.in_features,                      op.out_features,
                    op.panels,                           Epilogue::store_float};
    const std::int32_t row_unit = kernels_->row_unit;
    const std::int32_t row_units = ceil_div(rows, row_unit);
    const std::int32_t blocks = rows < kManyRows ? 1 : ceil_div(rows, kernels_->piece_rows);
    const std::int32_t pieces = ceil_div(op.panels, kBestGroups * kGroupPanels);
    const std::int32_t units = best_units(rows, op.panels);
    const auto take = [&](std::int32_t piece) {
        const std::int32_t panel_begin = piece * kBestGroups * kGroupPanels;
        const std::int32_t panel_end = std::min(op.panels, panel_begin + kBestGroups * kGroupPanels);
        const std::int32_t first = panel_begin * kPanel;
        const std::int32_t count = std::min(op.out_features, panel_end * kPanel) - first;
        // The kernels count columns from the first of the matrix.
        call.y = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(own.values.data()) -
                                         static_cast<std::uintptr_t>(first) * 4);
        for (std::int32_t block = 0; block < blocks; ++block) {
            multiply(op, call,
                     LinearPart{panel_begin, panel_end, row_unit * share(row_units, block, blocks),
                                std::min(rows, row_unit * share(row_units, block + 1, blocks))});
        }
        for (std::int32_t row = 0; row < rows; ++row) {
            const auto at = static_cast<std::size_t>(row);
            kernels_->scan_part(own.values.data() + at * kBestOutputs, count, first, &own.best[at]);
        }
    };
    stages_.again(
        walk, units,
        [&](std::int32_t unit) {
            const std::int32_t at = stages_.owner(unit) * (units / team_.size()) + stages_.place(unit);
            std::fill_n(own.best.begin(), rows, BestLogit{});
            for (std::int32_t piece = share(pieces, at, units); piece < share(pieces, at + 1, units); ++piece) take(piece);
        },
        [&](std::int32_t unit) {
            std::copy_n(own.best.begin(), rows, best_.begin() + static_cast<std::ptrdiff_t>(unit) * rows);
        });
}

void Program::merge_best(const Part& part) const {
    const TercetCall& call = part.call;
    const std::int32_t units = best_units(call.rows, ops_[part.end - 1].panels);
    for (std::int32_t row = 0; row < call.rows; ++row) {
        const auto at = static_cast<std::size_t>(row);
        BestLogit best;
        bool finite = true;
        for (std::int32_t unit = 0; unit < units; ++unit) {
            const BestLogit& other = best_[static_cast<std::size_t>(unit * call.rows) + at];
            finite = finite && other.nothing == 0.0f;
            if (other.highest > best.highest || (other.highest == best.highest && other.place < best.place)) {
                best.highest = other.highest;
                best.place = other.place;
            }
        }
        call.highest[row] = best.highest;
        call.places[row] = best.place;
        call.finite[row] = finite ? 1 : 0;
    }
}

// Tasks of attention in a unit.
std::int32_t Program::task_stretch(std::int32_t tasks) const {
    return std::max(1, ceil_div(tasks, stages_.most()));
}

void Program::run_attention(const Part& part, const TercetOp& op, Stages::Walk& walk) {
    const auto& attention = *static_cast<const Attention*>(part.call.attention);
    const std::int64_t head_bytes = static_cast<std::int64_t>(op.head_size) * element_bytes_;
    auto* q = static_cast<char*>(const_cast<void*>(op.in));
    LayerCall call{};
    call.q = q;
    call.k = q + op.query_heads * head_bytes;
    call.v = call.k + op.kv_heads * head_bytes;
    call.out = static_cast<char*>(op.out);
    call.q_stride = call.k_stride = call.v_stride = op.in_stride;
    call.out_stride = op.out_stride;
    attention.complete(op.layer, call);
    over_rows(part.call.rows, walk, [&](std::int32_t begin, std::int32_t end) {
        if (op.rotary_half > 0) {
            kernels_->rotate(q, op.in_stride, op.query_heads + op.kv_heads, op.head_size, op.rotary_half,
                             static_cast<const float*>(op.aux), begin, end);
        }
        attention.write(call, begin, end);
        if (begin == 0) attention.pad(call);
    });
    // The first come first, as they are the longest.
    const auto in_order = [&](std::int32_t count, const auto& work) {
        const std::int32_t each = task_stretch(count);
        stages_.once(walk, ceil_div(count, each), [&](std::int32_t unit) {
            for (std::int32_t i = unit * each; i < std::min(count, (unit + 1) * each); ++i) work(i);
        });
    };
    if (part.call.rows < kManyRows && team_.size() > 1) {
        const std::size_t bytes = attention.result_bytes();
        const std::int32_t each = task_stretch(part.tasks);
        char* own = reinterpret_cast<char*>(own_[static_cast<std::size_t>(walk.thread)].values.data());
        const auto each_task = [&](std::int32_t unit, const auto& work) {
            char* result = own;
            for (std::int32_t i = unit * each; i < std::min(part.tasks, (unit + 1) * each); ++i, result += bytes) work(i, result);
        };
        stages_.again(
            walk, ceil_div(part.tasks, each),
            [&](std::int32_t unit) {
                each_task(unit, [&](std::int32_t task, char* result) {
                    attention.run_task(call, task, task + team_.size(), walk.thread, result);
                });
            },
            [&](std::int32_t unit) {
                each_task(unit, [&](std::int32_t task, const char* result) { attention.keep_result(call, task, result); });
            });
    } else {
        in_order(part.tasks, [&](std::int32_t task) { attention.run_task(call, task, task + team_.size(), walk.thread); });
    }
    if (part.merges > 0) in_order(part.merges, [&](std::int32_t merge) { attention.run_merge(call, merge, walk.thread); });
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
        if (!static_cast<Program*>(program)->add(*op)) return static_cast<std::int32_t>(ProgramProblem::isa);
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
