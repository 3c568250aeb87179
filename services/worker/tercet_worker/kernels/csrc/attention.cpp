#include "attention.hpp"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace tercet {
namespace {

constexpr std::int32_t kMaxGroupHeads = 64;
constexpr std::int32_t kMaxHeadSize = 512;

// Below this many products per layer, waking a team costs more than it saves.
constexpr double kSerialWork = 200'000;
// A task over 1 / (threads * kTasksPerThread) of a step is cut along the context, if that has more keys than kMinSplitContext.
constexpr int kTasksPerThread = 4;
constexpr std::int32_t kMinSplitContext = 1024;
// Tasks of several splits, so that these come to so many per thread: a task begins with keys that nobody has fetched ahead.
constexpr std::int32_t kPiecesPerThread = 8;

constexpr std::int32_t ceil_div(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

TercetAttentionProblem problem(Problem code, std::int64_t row = -1, std::int64_t value = 0, std::int64_t limit = 0) {
    return {static_cast<std::int32_t>(code), static_cast<std::int32_t>(row), value, limit};
}

constexpr TercetAttentionProblem kFine{0, -1, 0, 0};

const AttentionKernels* kernels_for(Isa isa, Dtype dtype) {
    switch (isa) {
#if defined(TERCET_HAVE_AMX) && defined(TERCET_HAVE_AVX512BF16) && defined(TERCET_HAVE_AVX512)
        case Isa::amx:
            return attention_kernels_amx(dtype);
#endif
#if defined(TERCET_HAVE_AVX512BF16) && defined(TERCET_HAVE_AVX512)
        case Isa::avx512bf16:
            return attention_kernels_avx512bf16(dtype);
#endif
#if defined(TERCET_HAVE_AVX512)
        case Isa::avx512:
            return attention_kernels_avx512(dtype);
#endif
#if defined(TERCET_HAVE_AVX2)
        case Isa::avx2:
            return attention_kernels_avx2(dtype);
#endif
        default:
            return attention_kernels_generic(dtype);
    }
}

Isa chosen_isa(const TercetAttentionConfig& config) {
    return config.isa < 0 ? isa_best() : static_cast<Isa>(config.isa);
}

}  // namespace

void Attention::FreeAligned::operator()(void* p) const { std::free(p); }

TercetAttentionProblem Attention::check(const TercetAttentionConfig& c) {
    const bool sound = c.kv != nullptr && c.num_layers > 0 && c.num_blocks > 0 && c.block_size > 0 &&
                       c.block_size % kTileKeys == 0 && c.run_blocks > 0 &&
                       c.query_heads > 0 && c.kv_heads > 0 && c.query_heads % c.kv_heads == 0 &&
                       c.query_heads / c.kv_heads <= kMaxGroupHeads && c.head_size > 0 && c.head_size % 16 == 0 &&
                       c.head_size <= kMaxHeadSize && (c.dtype == 0 || c.dtype == 1) && c.threads > 0 &&
                       c.scale > 0.0f && c.soft_cap >= 0.0f;
    if (!sound) return problem(Problem::geometry);
    if (!isa_available(chosen_isa(c))) return problem(Problem::isa, -1, c.isa);
    return kFine;
}

Attention::Attention(const TercetAttentionConfig& c) : kv_(static_cast<char*>(c.kv)), threads_(c.threads) {
    Geometry& g = geometry_;
    const auto dtype = static_cast<Dtype>(c.dtype);
    g.query_heads = c.query_heads;
    g.kv_heads = c.kv_heads;
    g.group_heads = c.query_heads / c.kv_heads;
    g.head_size = c.head_size;
    g.block_size = c.block_size;
    g.run_blocks = c.run_blocks;
    g.num_layers = c.num_layers;
    g.num_blocks = c.num_blocks;
    g.element_bytes = dtype == Dtype::float32 ? 4 : 2;
    g.tile_bytes = static_cast<std::int64_t>(kTileKeys) * g.head_size * g.element_bytes;
    g.half_bytes = g.tile_bytes * (g.block_size / kTileKeys);
    g.value_bytes = g.half_bytes * g.run_blocks;
    g.head_bytes = 2 * g.value_bytes;
    g.run_bytes = g.head_bytes * g.kv_heads;
    g.layer_bytes = g.run_bytes * ceil_div(g.num_blocks, g.run_blocks);
    g.scale = c.scale;
    g.soft_cap = c.soft_cap;
    kernels_ = kernels_for(chosen_isa(c), dtype);
    g.task_tokens = std::max(1, kernels_->target_rows / g.group_heads);
    g.task_rows = g.task_tokens * g.group_heads;
    windows_.assign(static_cast<std::size_t>(g.num_layers), 0);
    if (c.windows != nullptr) std::copy_n(c.windows, g.num_layers, windows_.begin());

    constexpr std::int32_t kRowUnit = 16;  // kernels may compute rows in whole tiles
    const auto rows = static_cast<std::size_t>(ceil_div(g.task_rows, kRowUnit) * kRowUnit);
    const auto width = static_cast<std::size_t>(g.head_size);
    const auto padded = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
    const std::size_t row_values = padded(rows * width * 4);
    const std::size_t row_scalars = padded(rows * 4);
    const auto tile_bytes = static_cast<std::size_t>(g.tile_bytes);
    // A page apart, so that threads never share a line or a page of it.
    const std::size_t per_thread = (3 * row_values + rows * 64 + 3 * row_scalars + 2 * tile_bytes + 4095) / 4096 * 4096;
    scratch_memory_.reset(std::aligned_alloc(4096, per_thread * static_cast<std::size_t>(threads_)));
    if (!scratch_memory_) throw std::bad_alloc();
    std::memset(scratch_memory_.get(), 0, per_thread * static_cast<std::size_t>(threads_));
    for (std::int32_t t = 0; t < threads_; ++t) {
        char* at = static_cast<char*>(scratch_memory_.get()) + per_thread * static_cast<std::size_t>(t);
        const auto take = [&at](std::size_t bytes) {
            char* p = at;
            at += bytes;
            return p;
        };
        Scratch s{};
        s.q = take(row_values);
        s.acc = reinterpret_cast<float*>(take(row_values));
        s.total = reinterpret_cast<float*>(take(row_values));
        s.lanes = reinterpret_cast<float*>(take(rows * 64));
        s.max = reinterpret_cast<float*>(take(row_scalars));
        s.total_max = reinterpret_cast<float*>(take(row_scalars));
        s.total_sum = reinterpret_cast<float*>(take(row_scalars));
        s.edge = take(2 * tile_bytes);
        scratch_.push_back(s);
    }
}

TercetAttentionProblem Attention::validate(const TercetAttentionStep& step) const {
    const Geometry& g = geometry_;
    if (step.query_start_loc[0] != 0) return problem(Problem::query_start, 0, step.query_start_loc[0], 0);
    for (std::int32_t r = 0; r < step.requests; ++r) {
        const std::int32_t begin = step.query_start_loc[r];
        const std::int32_t end = step.query_start_loc[r + 1];
        if (end <= begin) return problem(Problem::query_start, r + 1, end, begin);
        if (end > step.tokens) return problem(Problem::token_count, r + 1, end, step.tokens);
        const std::int32_t slot = step.slots[r];
        if (slot < 0 || slot >= step.max_slots) return problem(Problem::slot, r, slot, step.max_slots);
        const std::int32_t context = step.seq_lens[r];
        if (context < end - begin) return problem(Problem::context, r, context, end - begin);
        const std::int64_t capacity = static_cast<std::int64_t>(step.max_blocks) * g.block_size;
        if (context > capacity) return problem(Problem::context_blocks, r, context, capacity);
        const std::int32_t* blocks = step.block_table + slot * step.block_table_stride;
        const std::int32_t count = ceil_div(context, g.block_size);
        for (std::int32_t b = 0; b < count; ++b) {
            if (blocks[b] < 0 || blocks[b] >= g.num_blocks) return problem(Problem::block, r, blocks[b], g.num_blocks);
        }
    }
    const std::int64_t places = static_cast<std::int64_t>(g.num_blocks) * g.block_size;
    for (std::int32_t t = 0; t < step.tokens; ++t) {
        const std::int64_t place = step.slot_mapping[t];
        if (place < -1 || place >= places) return problem(Problem::slot_mapping, t, place, places);
    }
    return kFine;
}

// Of the splits of a task, one after the other.
std::size_t Attention::partial_bytes(const Task& task) const {
    return static_cast<std::size_t>(task.split_end - task.split_begin) * partial_stride(task) * sizeof(float);
}

// Values of all rows of a task in one split.
std::size_t Attention::partial_stride(const Task& task) const {
    return static_cast<std::size_t>(task.tokens * geometry_.group_heads) * static_cast<std::size_t>(kPartialHeader + geometry_.head_size);
}

void Attention::cut(const TercetAttentionStep& step, Plan& plan) {
    const Geometry& g = geometry_;
    plan.slot_mapping.assign(step.slot_mapping, step.slot_mapping + step.tokens);
    plan.tokens = step.tokens;
    plan.used_tokens = step.query_start_loc[step.requests];

    // Where blocks are is kept, and the table not referred to: it may change while the step runs. Sized first: tasks point into it.
    std::size_t num_blocks = 0;
    double keys_per_head = 0;
    for (std::int32_t r = 0; r < step.requests; ++r) {
        const double queries = step.query_start_loc[r + 1] - step.query_start_loc[r];
        num_blocks += static_cast<std::size_t>(ceil_div(step.seq_lens[r], g.block_size));
        keys_per_head += queries * (step.seq_lens[r] - (queries - 1) / 2);
    }
    plan.blocks.resize(num_blocks);
    const double work = keys_per_head * g.query_heads * g.head_size;
    plan.serial = threads_ == 1 || work < kSerialWork;
    const double most = keys_per_head * g.query_heads / (threads_ * kTasksPerThread);

    // Requests and tiles backwards: prefills come last in a batch and their last tiles are the longest, and long tasks go first.
    plan.tasks.clear();
    plan.merges.clear();
    std::size_t partial_values = 0;
    std::int64_t* kept = plan.blocks.data();
    for (std::int32_t r = step.requests - 1; r >= 0; --r) {
        const std::int32_t begin = step.query_start_loc[r];
        const std::int32_t queries = step.query_start_loc[r + 1] - begin;
        const std::int32_t context = step.seq_lens[r];
        const std::int64_t* blocks = kept;
        kept = std::transform(step.block_table + step.slots[r] * step.block_table_stride,
                              step.block_table + step.slots[r] * step.block_table_stride + ceil_div(context, g.block_size), kept,
                              [&g](std::int32_t block) { return block_offset(g, block); });
        for (std::int32_t tile = ceil_div(queries, g.task_tokens) - 1; tile >= 0; --tile) {
            Task task{};
            task.blocks = blocks;
            task.token = begin + tile * g.task_tokens;
            task.tokens = std::min(g.task_tokens, queries - tile * g.task_tokens);
            task.position = context - queries + tile * g.task_tokens;
            task.context = context;
            const std::int32_t keys = task.position + task.tokens;
            const std::int32_t splits = ceil_div(keys, kSplitKeys);
            const std::int32_t rows = task.tokens * g.group_heads;
            const bool split = !plan.serial && keys > kMinSplitContext && static_cast<double>(keys) * rows > most;
            for (task.kv_head = 0; task.kv_head < g.kv_heads; ++task.kv_head) {
                task.split_begin = 0;
                task.split_end = splits;
                if (!split) {
                    plan.tasks.push_back(task);
                    continue;
                }
                plan.merges.push_back(task);
                partial_values += static_cast<std::size_t>(splits) * partial_stride(task);
            }
        }
    }
    plan.result_bytes = 0;
    for (const Task& task : plan.tasks) {
        plan.result_bytes = std::max(plan.result_bytes, static_cast<std::size_t>(task.tokens * head_result_bytes()));
    }
    if (plan.merges.empty()) return;
    if (partials_.size() < partial_values) partials_.resize(partial_values);
    std::vector<Task> whole;
    whole.swap(plan.tasks);
    std::int32_t splits = 0;
    for (const Task& merge : plan.merges) splits += merge.split_end;
    const std::int32_t each = std::max(1, splits / (threads_ * kPiecesPerThread));
    float* partials = partials_.data();
    for (Task& merge : plan.merges) {
        merge.partials = partials;
        partials += static_cast<std::size_t>(merge.split_end) * partial_stride(merge);
        const std::int32_t pieces = ceil_div(merge.split_end, each);
        for (std::int32_t i = 0; i < pieces; ++i) {
            Task piece = merge;
            piece.split_begin = merge.split_end * i / pieces;
            piece.split_end = merge.split_end * (i + 1) / pieces;
            plan.tasks.push_back(piece);
            plan.result_bytes = std::max(plan.result_bytes, partial_bytes(piece));
        }
    }
    plan.tasks.insert(plan.tasks.end(), whole.begin(), whole.end());
}

TercetAttentionProblem Attention::plan(const TercetAttentionStep& step) {
    planned_ = 1 - running_;
    Plan& plan = plans_[planned_];
    plan.sound = false;
    const TercetAttentionProblem found = validate(step);
    if (found.code != 0) return found;
    cut(step, plan);
    plan.sound = true;
    return kFine;
}

bool Attention::ready(std::int32_t layers, std::int32_t tokens) const {
    return plans_[planned_].sound && tokens == plans_[planned_].tokens && layers <= geometry_.num_layers;
}

void Attention::complete(std::int32_t layer, LayerCall& call) const {
    call.kv = kv_ + layer * geometry_.layer_bytes;
    call.window = windows_[static_cast<std::size_t>(layer)];
}

void Attention::write(const LayerCall& call, std::int32_t begin, std::int32_t end) const {
    kernels_->write(geometry_, call, plans_[running_].slot_mapping.data(), begin, end);
}

void Attention::run_task(const LayerCall& call, std::int32_t task, std::int32_t next, std::int32_t thread) const {
    const std::vector<Task>& all = plans_[running_].tasks;
    kernels_->run(geometry_, call, all[static_cast<std::size_t>(task)], next < tasks() ? &all[static_cast<std::size_t>(next)] : nullptr,
                  scratch_[static_cast<std::size_t>(thread)]);
}

void Attention::run_task(const LayerCall& call, std::int32_t task, std::int32_t next, std::int32_t thread, char* result) const {
    const Geometry& g = geometry_;
    const std::vector<Task>& all = plans_[running_].tasks;
    Task mine = all[static_cast<std::size_t>(task)];
    LayerCall here = call;
    // The kernels count splits, tokens and heads from the first.
    const auto from_first = [result](std::int64_t bytes) {
        return reinterpret_cast<std::uintptr_t>(result) - static_cast<std::uintptr_t>(bytes);
    };
    if (mine.partials != nullptr) {
        const auto before = static_cast<std::int64_t>(partial_stride(mine) * sizeof(float)) * mine.split_begin;
        mine.partials = reinterpret_cast<float*>(from_first(before));
    } else {
        here.out_stride = head_result_bytes();
        here.out = reinterpret_cast<char*>(from_first((mine.token + mine.kv_head) * here.out_stride));
    }
    kernels_->run(g, here, mine, next < tasks() ? &all[static_cast<std::size_t>(next)] : nullptr,
                  scratch_[static_cast<std::size_t>(thread)]);
}

void Attention::keep_result(const LayerCall& call, std::int32_t task, const char* result) const {
    const Task& whole = plans_[running_].tasks[static_cast<std::size_t>(task)];
    if (whole.partials != nullptr) {
        std::memcpy(whole.partials + partial_stride(whole) * static_cast<std::size_t>(whole.split_begin), result, partial_bytes(whole));
        return;
    }
    const std::int64_t bytes = head_result_bytes();
    char* out = call.out + whole.token * call.out_stride + whole.kv_head * bytes;
    for (std::int32_t i = 0; i < whole.tokens; ++i) {
        std::memcpy(out + i * call.out_stride, result + i * bytes, static_cast<std::size_t>(bytes));
    }
}

void Attention::run_merge(const LayerCall& call, std::int32_t merge, std::int32_t thread) const {
    kernels_->merge(geometry_, call, plans_[running_].merges[static_cast<std::size_t>(merge)], scratch_[static_cast<std::size_t>(thread)]);
}

void Attention::pad(const LayerCall& call) const {
    const Geometry& g = geometry_;
    const std::int64_t row_bytes = static_cast<std::int64_t>(g.query_heads) * g.head_size * g.element_bytes;
    for (std::int32_t t = plans_[running_].used_tokens; t < plans_[running_].tokens; ++t) {
        std::memset(call.out + t * call.out_stride, 0, static_cast<std::size_t>(row_bytes));
    }
}

void Attention::run_serial(const LayerCall& call) {
    write(call, 0, plans_[running_].tokens);
    for (std::int32_t i = 0; i < tasks(); ++i) run_task(call, i, i + 1, 0);
    for (std::int32_t i = 0; i < merges(); ++i) run_merge(call, i, 0);
}

void Attention::run_parallel(const LayerCall& call) {
#pragma omp parallel num_threads(threads_)
    {
        // The runtime may give fewer threads than asked for, never more.
        const std::int64_t tokens = plans_[running_].tokens;
        const std::int64_t team = omp_get_num_threads();
        const std::int32_t me = omp_get_thread_num();
        write(call, static_cast<std::int32_t>(tokens * me / team), static_cast<std::int32_t>(tokens * (me + 1) / team));
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (std::int32_t i = 0; i < tasks(); ++i) run_task(call, i, tasks(), me);
        if (merges() > 0) {
#pragma omp for schedule(dynamic, 1)
            for (std::int32_t i = 0; i < merges(); ++i) run_merge(call, i, me);
        }
    }
}

TercetAttentionProblem Attention::forward(std::int32_t layer, LayerCall call) {
    if (layer < 0 || layer >= geometry_.num_layers) return problem(Problem::layer, -1, layer, geometry_.num_layers);
    if (!plans_[planned_].sound) return problem(Problem::no_plan);
    begin();
    complete(layer, call);
    if (plans_[running_].serial) {
        run_serial(call);
    } else {
        run_parallel(call);
    }
    pad(call);
    return kFine;
}

}  // namespace tercet

using tercet::Attention;
using tercet::Problem;

extern "C" {

// Returns the attention, to be released with tercet_attention_destroy, or null with *problem filled in.
void* tercet_attention_create(const TercetAttentionConfig* config, TercetAttentionProblem* problem) {
    *problem = Attention::check(*config);
    if (problem->code != 0) return nullptr;
    try {
        return new Attention(*config);
    } catch (const std::bad_alloc&) {
        problem->code = static_cast<std::int32_t>(Problem::memory);
        return nullptr;
    }
}

void tercet_attention_destroy(void* attention) { delete static_cast<Attention*>(attention); }

// Returns 0, or the code that *problem explains.
std::int32_t tercet_attention_plan(void* attention, const TercetAttentionStep* step, TercetAttentionProblem* problem) {
    try {
        *problem = static_cast<Attention*>(attention)->plan(*step);
    } catch (const std::bad_alloc&) {
        problem->code = static_cast<std::int32_t>(Problem::memory);
    }
    return problem->code;
}

// q and out [tokens, query_heads, head_size], k and v [tokens, kv_heads, head_size]; strides in bytes from token to token.
std::int32_t tercet_attention_forward(void* attention, std::int32_t layer, const void* q, const void* k, const void* v,
                                      void* out, std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride,
                                      std::int64_t out_stride) {
    tercet::LayerCall call{};
    call.q = static_cast<const char*>(q);
    call.k = static_cast<const char*>(k);
    call.v = static_cast<const char*>(v);
    call.out = static_cast<char*>(out);
    call.q_stride = q_stride;
    call.k_stride = k_stride;
    call.v_stride = v_stride;
    call.out_stride = out_stride;
    return static_cast<Attention*>(attention)->forward(layer, call).code;
}
}
