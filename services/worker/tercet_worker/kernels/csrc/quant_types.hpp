// Quantized weights: how they lie in memory. Plain data only (see isa.hpp).
//
// A block is 16 or 32 k of the sixteen outputs of a panel: their integers q, then a scale d per output, then (in most formats) a
// minimum m per output; a weight is d * q + m, exactly. As with dense weights four panels form a group, stored [block][panel], so that
// whatever takes a group reads memory strictly in order. K is a multiple of the block.
//
//   four bits   line l (64 bytes) has steps 4l to 4l + 3 of the block, [16 outputs][2 k] of sixteen bits each, step 4l + j in bits
//               4j to 4j + 3. Shifted into the mantissa of 16.0 they are the bfloat16 16 + q, ready to be multiplied. Where float32 is
//               multiplied, they are made floats where they stand (quant_wide.hpp).
//   eight bits  each step has [16] signed bytes of the even k, then [16] of the odd ones.
//
// Products are summed per block in float32 over bfloat16 activations, and scaled once per block: nothing is rounded but the
// activations, as with dense weights.
#pragma once

#include <cstdint>

namespace tercet {

enum class WeightFormat : std::int32_t {
    dense = 0,
    four = 1,        // blocks of 32, float16 scales and minima
    four_wide = 2,   // blocks of 32, float32 scales and minima
    eight = 3,       // blocks of 32, float16 scales
    eight_wide = 4,  // blocks of 16, float32 scales and minima
    compact = 5,     // no blocks: bfloat16 as in compact_types.hpp
};

constexpr int kQuantOutputs = 16;

template <WeightFormat kFormat>
struct Quant {
    static constexpr WeightFormat format = kFormat;
    static constexpr bool four_bits = kFormat == WeightFormat::four || kFormat == WeightFormat::four_wide;
    static constexpr bool wide = kFormat == WeightFormat::four_wide || kFormat == WeightFormat::eight_wide;
    static constexpr bool has_minimum = kFormat != WeightFormat::eight;
    static constexpr int block = kFormat == WeightFormat::eight_wide ? 16 : 32;  // k
    static constexpr int steps = block / 2;
    static constexpr int data_bytes = kQuantOutputs * block / (four_bits ? 2 : 1);
    static constexpr int scale_bytes = kQuantOutputs * (wide ? 4 : 2);
    static constexpr int bytes = data_bytes + scale_bytes * (has_minimum ? 2 : 1);
};

// The integers, scales and minima of rows of a matrix, as they are packed.
struct QuantRows {
    const std::uint8_t* q;  // [rows][K]; four bits: 0 to 15, eight bits: signed
    const void* scales;     // [rows][K / block] float16 or float32
    const void* minima;     // the same; null where the format has none
};

}  // namespace tercet
