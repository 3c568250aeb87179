// A decode step in one call: every scheduled row computes one token. From the worker's tables to the tokens drawn, without the
// interpreter in between, which after a step finds none of its code in a cache.
#include "decode.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace tercet {
namespace {

// Where there are few rows to draw for, each is cut: whoever comes first takes a part.
constexpr std::int32_t kPartsPerThread = 4;

// Whether the step is one that this file executes, and sound. What is not is left to the caller, which can say why.
bool plain(const TercetDecodeTables& t, const TercetDecodePlan& plan, std::uint8_t* marks) {
    bool sound = true;
    std::int32_t marked = 0;
    for (; sound && marked < plan.rows; ++marked) {
        const std::int32_t slot = plan.slots[marked];
        if (slot < 0 || slot >= t.slots || marks[slot] != 0) break;
        marks[slot] = 1;
        const std::int32_t computed = plan.computed[marked];
        const std::int32_t end = computed + 1;
        const std::int32_t begin_block = plan.block_offsets[marked], end_block = plan.block_offsets[marked + 1];
        const std::int64_t held = static_cast<std::int64_t>(t.blocks[slot]) + end_block - begin_block;
        sound = t.occupied[slot] != 0 && plan.num_tokens[marked] == 1 && plan.samples[marked] != 0 && t.asks[slot] == 0 &&
                computed >= 0 && t.computed[slot] == computed && t.known[slot] == end && end < t.max_model_len &&
                held <= t.max_blocks && held * t.block_size >= end;
        for (std::int32_t i = begin_block; sound && i < end_block; ++i) {
            sound = plan.block_ids[i] >= 0 && plan.block_ids[i] < t.num_blocks;
        }
    }
    const bool all = sound && marked == plan.rows;
    for (std::int32_t row = 0; row < marked; ++row) marks[plan.slots[row]] = 0;
    return all;
}

}  // namespace

Decoder::Decoder(const TercetDecodeTables& tables) : tables_(tables), marks_(static_cast<std::size_t>(tables.slots), 0) {
    const auto slots = static_cast<std::size_t>(tables.slots);
    token_ids_.resize(slots);
    positions_.resize(slots);
    starts_.resize(slots + 1);
    lengths_.resize(slots);
    mapping_.resize(slots);
    for (std::size_t i = 0; i <= slots; ++i) starts_[i] = static_cast<std::int32_t>(i);
}

Decoder::~Decoder() { static_cast<Program*>(tables_.program)->settle(); }

DecodeOutcome Decoder::run(const TercetDecodePlan& plan) {
    const TercetDecodeTables& t = tables_;
    static_cast<Program*>(t.program)->settle();
    if (plan.rows < 1 || plan.rows > t.slots || plan.rows > t.max_rows || !plain(t, plan, marks_.data())) {
        return DecodeOutcome::not_plain;
    }
    for (std::int32_t row = 0; row < plan.rows; ++row) {
        const std::int64_t slot = plan.slots[row];
        std::int32_t* table = t.block_tables + slot * t.max_blocks;
        for (std::int32_t i = plan.block_offsets[row]; i < plan.block_offsets[row + 1]; ++i) {
            table[t.blocks[slot]++] = plan.block_ids[i];
        }
        const std::int32_t position = plan.computed[row];
        const auto at = static_cast<std::size_t>(row);
        token_ids_[at] = t.tokens[slot * t.max_model_len + position];
        positions_[at] = position;
        lengths_[at] = position + 1;
        const std::int64_t place = static_cast<std::int64_t>(table[position / t.block_size]) * t.block_size + position % t.block_size;
        mapping_[at] = position < t.cached[slot] ? -1 : place;
    }
    auto& attention = *static_cast<Attention*>(t.attention);
    auto& program = *static_cast<Program*>(t.program);
    const TercetAttentionStep step{starts_.data(), lengths_.data(), plan.slots,     t.block_tables, mapping_.data(),
                                   t.max_blocks,   plan.rows,       plan.rows,      t.slots,        t.max_blocks};
    if (attention.plan(step).code != 0) return DecodeOutcome::refused;
    TercetCall layers{};
    layers.token_ids = token_ids_.data();
    layers.positions = positions_.data();
    layers.attention = t.attention;
    layers.rows = plan.rows;
    layers.section = 0;
    const Choice how = choice(plan);
    TercetCall head{};
    head.in = t.hidden;
    head.in_stride = t.hidden_stride;
    head.out = t.logits;
    head.out_stride = static_cast<std::int64_t>(t.vocab_size) * 4;
    head.rows = plan.rows;
    head.section = 1;
    if (how == Choice::best) {
        head.highest = plan.highest;
        head.places = plan.places;
        head.finite = plan.finite;
    }
    if (how == Choice::draw) prepare(plan);
    if (program.run(layers, head, how == Choice::draw ? this : nullptr) != ProgramProblem::none) return DecodeOutcome::refused;
    if (how == Choice::other) return DecodeOutcome::computed;
    if (how == Choice::draw) choose(plan);
    for (std::int32_t row = 0; row < plan.rows; ++row) {
        const std::int64_t slot = plan.slots[row];
        const std::int32_t end = plan.computed[row] + 1;
        plan.drawn[row] = plan.finite[row] != 0 ? static_cast<std::int32_t>(plan.places[row]) : 0;
        t.tokens[slot * t.max_model_len + end] = plan.drawn[row];
        t.computed[slot] = end;
        ++t.known[slot];
    }
    return DecodeOutcome::drawn;
}

Decoder::Choice Decoder::choice(const TercetDecodePlan& plan) const {
    const TercetDecodeTables& t = tables_;
    Choice how = Choice::best;
    for (std::int32_t row = 0; row < plan.rows; ++row) {
        const std::int32_t* sampling = t.sampling + static_cast<std::int64_t>(plan.slots[row]) * t.sampling_stride;
        const std::int32_t asks = sampling[t.column_asks];
        if ((asks != 0 && asks != t.draws) || plan.computed[row] + 1 < sampling[t.column_min_len]) return Choice::other;
        if (asks != 0) how = Choice::draw;
    }
    return how;
}

// What is drawn for each row of the plan, and how rows are cut.
void Decoder::prepare(const TercetDecodePlan& plan) {
    const TercetDecodeTables& t = tables_;
    const std::int32_t threads = static_cast<Program*>(t.program)->threads();
    rows_ = plan.rows;
    parts_ = std::max(1, kPartsPerThread * threads / rows_);
    draws_.resize(static_cast<std::size_t>(rows_));
    scans_.assign(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(parts_), BestLogit{});
    drawn_.assign(scans_.size(), BestDraw{});
    bool truncated = false;
    for (std::int32_t row = 0; row < rows_; ++row) {
        const std::int32_t* sampling = t.sampling + static_cast<std::int64_t>(plan.slots[row]) * t.sampling_stride;
        const auto real = [sampling](std::int32_t column) {
            float value;
            std::memcpy(&value, sampling + column, sizeof value);
            return value;
        };
        TercetDraw& draw = draws_[static_cast<std::size_t>(row)];
        draw.logits = t.logits + static_cast<std::int64_t>(row) * t.vocab_size;
        draw.temperature = sampling[t.column_asks] != 0 ? real(t.column_temperature) : 0.0f;
        draw.top_p = real(t.column_top_p);
        draw.log_min_p = real(t.column_log_min_p);
        draw.top_k = sampling[t.column_top_k];
        const DrawKeys keys = draw_keys(static_cast<std::uint32_t>(sampling[t.column_seed_low]),
                                        static_cast<std::uint32_t>(sampling[t.column_seed_high]),
                                        static_cast<std::uint32_t>(plan.computed[row] + 1));
        draw.key_a = keys.a;
        draw.key_b = keys.b;
        truncated = truncated || (draw.temperature > 0.0f && truncates(draw));
    }
    if (truncated && space_.empty()) {
        std::vector<std::vector<Candidate>> space(static_cast<std::size_t>(threads));
        for (auto& each : space) each.resize(static_cast<std::size_t>(t.vocab_size));
        space_ = std::move(space);
    }
}

// The tokens that were found: `places` and `finite` of the plan.
void Decoder::choose(const TercetDecodePlan& plan) const {
    for (std::int32_t row = 0; row < rows_; ++row) {
        const BestLogit best = best_of(row);
        plan.finite[row] = best.nothing == 0.0f ? 1 : 0;
        const TercetDraw& draw = draws_[static_cast<std::size_t>(row)];
        plan.places[row] = draw.temperature > 0.0f ? draw.token : best.place;
        if (draw.temperature <= 0.0f || truncates(draw)) continue;
        BestDraw chosen;
        for (std::int32_t part = 0; part < parts_; ++part) {  // in ascending order: the first of equals stays
            const BestDraw& other = drawn_[static_cast<std::size_t>(row * parts_ + part)];
            if (other.score > chosen.score) chosen = other;
        }
        plan.places[row] = static_cast<std::int64_t>(chosen.token);
    }
}

BestLogit Decoder::best_of(std::int32_t row) const {
    BestLogit best;
    for (std::int32_t part = 0; part < parts_; ++part) {
        const BestLogit& other = scans_[static_cast<std::size_t>(row * parts_ + part)];
        best.nothing += other.nothing;
        if (!(other.highest > best.highest)) continue;
        best.highest = other.highest;
        best.place = other.place;
    }
    return best;
}

// In the logits that the head has left.
void Decoder::run(Stages& stages, Stages::Walk& walk) {
    const StepKernels& kernels = static_cast<Program*>(tables_.program)->kernels();
    const std::int32_t size = tables_.vocab_size;
    const std::int32_t pieces = rows_ * parts_;
    const std::int32_t most = stages.most();
    const std::int32_t each = (pieces + most - 1) / most;
    const std::int32_t units = (pieces + each - 1) / each;
    const auto border = [this, size](std::int32_t part) {
        const std::int64_t panels = (size + kPanel - 1) / kPanel;
        return std::min(size, static_cast<std::int32_t>(panels * part / parts_) * kPanel);
    };
    const auto over_pieces = [&](const auto& work) {
        stages.once(walk, units, [&](std::int32_t unit) {
            for (std::int32_t i = unit * each; i < std::min(pieces, (unit + 1) * each); ++i) work(i);
        });
    };
    over_pieces([&](std::int32_t piece) {
        const std::int32_t begin = border(piece % parts_);
        kernels.scan_part(draws_[static_cast<std::size_t>(piece / parts_)].logits + begin, border(piece % parts_ + 1) - begin, begin,
                          &scans_[static_cast<std::size_t>(piece)]);
    });
    over_pieces([&](std::int32_t piece) {
        const std::int32_t part = piece % parts_;
        TercetDraw& draw = draws_[static_cast<std::size_t>(piece / parts_)];
        if (draw.temperature <= 0.0f || (part > 0 && truncates(draw))) return;
        TercetDraw own = draw;
        own.highest = best_of(piece / parts_).highest;
        if (truncates(own)) {
            draw.token = draw_truncated(kernels.draw, own, size, space_[static_cast<std::size_t>(walk.thread)].data());
        } else {
            kernels.draw.draw_part(row_of(own), border(part), border(part + 1), &drawn_[static_cast<std::size_t>(piece)]);
        }
    });
}

}  // namespace tercet

extern "C" {

// Returns the decoder, to be released with tercet_decoder_destroy, or null where there is no memory. What the tables point to
// outlives it.
void* tercet_decoder_create(const TercetDecodeTables* tables) {
    try {
        return new tercet::Decoder(*tables);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void tercet_decoder_destroy(void* decoder) { delete static_cast<tercet::Decoder*>(decoder); }

// Returns a tercet::DecodeOutcome.
std::int32_t tercet_decoder_run(void* decoder, const TercetDecodePlan* plan) {
    try {
        return static_cast<std::int32_t>(static_cast<tercet::Decoder*>(decoder)->run(*plan));
    } catch (const std::bad_alloc&) {
        return static_cast<std::int32_t>(tercet::DecodeOutcome::refused);
    }
}
}
