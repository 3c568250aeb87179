// Draws tokens from logits: from all of a row by Gumbel-max, or from those that top-k and top-p leave; see draw.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "linear_types.hpp"

extern "C" {

// Mirrored in kernels/step_abi.py; raise tercet_abi_version with it. A row to draw for, whose temperature is above 0.
struct TercetDraw {
    const float* logits;
    float highest;  // of the row
    float temperature;
    float top_p;      // 1: off
    float log_min_p;  // natural logarithm; minus infinity: off
    std::int32_t top_k;  // 0: off
    std::uint32_t key_a;  // see DrawKeys
    std::uint32_t key_b;
    std::int64_t token;  // what was drawn
};
}

namespace tercet {

inline bool truncates(const TercetDraw& draw) { return draw.top_k > 0 || draw.top_p < 1.0f; }

inline DrawRow row_of(const TercetDraw& draw) {
    return DrawRow{draw.logits, draw.highest, draw.temperature, draw.log_min_p, DrawKeys{draw.key_a, draw.key_b}};
}

// Of a choice's 64-bit seed, in halves, and the place in prompt + output of the token that is drawn.
DrawKeys draw_keys(std::uint32_t seed_low, std::uint32_t seed_high, std::uint32_t position);

// Draws from those tokens that top-k and top-p leave. `space` holds `size` candidates.
std::int64_t draw_truncated(const DrawKernels& kernels, const TercetDraw& draw, std::int32_t size, Candidate* space);

}  // namespace tercet
