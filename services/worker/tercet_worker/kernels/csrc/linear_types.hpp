// Linear layers over packed weights: what the program, the C interface and the per-instruction-set kernels share. Plain data only
// (see isa.hpp).
//
// Layout of a packed matrix W [N, K]. A line is 64 bytes: sixteen outputs at one reduction step, [16] float32 of one k, or [16][2]
// bfloat16 of k and k + 1. A panel is 16 outputs. Four panels form a group (the last group has what is left), and a group is
// stored [step][panel][line]: whatever takes a group reads memory strictly in order, which runs at 1.2 times the speed of reading
// four panels side by side. Padding (an odd K, outputs beyond N) is zero.
//
// Order of reduction. Every output is one float32 accumulator, to which the steps are added in ascending order. Blocking over K
// stores and reloads it, which changes nothing. (On AMX, steps are added in blocks: linear_amx.hpp.) So a row's result depends on that row and the weights: not on the batch, the
// place in it, or the number of threads.
#pragma once

#include <cstdint>

#include "attention_types.hpp"
#include "draw_types.hpp"
#include "isa.hpp"
#include "quant_types.hpp"

namespace tercet {

constexpr int kPanel = 16;         // outputs of a panel
constexpr int kGroupPanels = 4;    // panels of a full group
constexpr int kLineBytes = 64;

// What becomes of a product. y is in the dtype of the model unless said otherwise.
enum class Epilogue : std::int32_t {
    store = 0,
    store_float = 1,   // y float32
    add = 2,           // y float32, added to
    gated_silu = 3,    // panels alternate between gate and up: y = silu(gate) * up, half as many outputs
};

// One product y = x Wᵀ + b for all rows. Pointers are not owned.
struct LinearCall {
    const char* weights;  // packed, 64-byte aligned
    const float* bias;    // [16 * panels] in the order of the panels, or null
    const char* x;        // rows of K elements in the dtype of the model
    char* y;
    std::int64_t x_stride;  // bytes from row to row
    std::int64_t y_stride;
    std::int32_t in_features;   // K
    std::int32_t out_features;  // columns of y
    std::int32_t panels;
    Epilogue epilogue;
};

// A rectangle of y: panels [panel_begin, panel_end) for rows [row_begin, row_end). With gated_silu panel bounds are even.
struct LinearPart {
    std::int32_t panel_begin;
    std::int32_t panel_end;
    std::int32_t row_begin;
    std::int32_t row_end;
};

// The best logit of a row so far.
struct BestLogit {
    float highest = -__builtin_huge_valf();
    float nothing = 0.0f;  // 0 while all logits were finite, then not a number
    std::int64_t place = 0;
};

struct StepKernels {
    void (*linear)(const LinearCall&, const LinearPart&);
    // Writes `rows` contiguous rows of K elements, of which the first is output `first` of a part, into a packed matrix of
    // `panels` panels. Panel i of the part is panel base + i * pitch of the matrix.
    void (*pack)(char* weights, std::int32_t in_features, std::int32_t panels, std::int32_t base, std::int32_t pitch,
                 std::int32_t first, std::int32_t rows, const char* source);
    // y[t] = scale * W[ids[t]] in float32, for t in [begin, end), W packed. Ids are in range.
    void (*gather)(const char* weights, std::int32_t in_features, std::int32_t panels, const std::int32_t* ids, float scale,
                   char* y, std::int64_t y_stride, std::int32_t begin, std::int32_t end);
    // y = x / sqrt(mean(x²) + eps) * w for rows [begin, end); x and w float32.
    void (*norm)(const char* x, std::int64_t x_stride, const float* weight, float eps, std::int32_t size, char* y,
                 std::int64_t y_stride, std::int32_t begin, std::int32_t end);
    // Rotates `heads` heads of each token in [begin, end) in place: element i with element i + half. angles: per token `half`
    // cosines, then `half` sines.
    void (*rotate)(char* x, std::int64_t x_stride, std::int32_t heads, std::int32_t head_size, std::int32_t half,
                   const float* angles, std::int32_t begin, std::int32_t end);
    // Of one row of logits: the highest, the first place where it stands, and whether all are finite numbers. Where they are not,
    // the other two mean nothing.
    void (*scan)(const float* logits, std::int32_t size, float* highest, std::int64_t* place, bool* finite);
    // Goes on with such a scan over a part of the row, of which the first logit is number `first`. Parts come in ascending order.
    void (*scan_part)(const float* logits, std::int32_t size, std::int64_t first, BestLogit* best);
    // The same three for quantized weights; null with float32. pack writes whole blocks.
    void (*linear_quant)(WeightFormat, const LinearCall&, const LinearPart&);
    void (*pack_quant)(WeightFormat, char* weights, std::int32_t in_features, std::int32_t panels, std::int32_t base,
                       std::int32_t pitch, std::int32_t first, std::int32_t rows, const QuantRows& source);
    void (*gather_quant)(WeightFormat, const char* weights, std::int32_t in_features, std::int32_t panels,
                         const std::int32_t* ids, float scale, char* y, std::int64_t y_stride, std::int32_t begin,
                         std::int32_t end);
    // The same two for compact weights; null where the instruction set reads none.
    void (*linear_compact)(const LinearCall&, const LinearPart&);
    void (*gather_compact)(const char* weights, std::int32_t in_features, const std::int32_t* ids, float scale, char* y,
                           std::int64_t y_stride, std::int32_t begin, std::int32_t end);
    // How many rows of a product are best taken together, and how many of them a thread takes at a time with one group of panels:
    // the cost of a group's first pass is spread over these.
    std::int32_t row_unit;
    std::int32_t piece_rows;
    DrawKernels draw;
};

// The kernels for an instruction set that is available.
const StepKernels* step_kernels(Isa, Dtype);

const StepKernels* step_kernels_generic(Dtype);
const StepKernels* step_kernels_avx2(Dtype);
const StepKernels* step_kernels_avx512(Dtype);
const StepKernels* step_kernels_avx512bf16(Dtype);
const StepKernels* step_kernels_amx(Dtype);

}  // namespace tercet
