// Drawing tokens from logits: what is drawn from, and what the kernels of an instruction set do for it. See draw.hpp.
#pragma once

#include <cstdint>

namespace tercet {

// What (seed, position) of a row contribute to its random numbers; see sampling/noise.py.
struct DrawKeys {
    std::uint32_t a;
    std::uint32_t b;
};

// A row to draw for. `scaled` in what follows is (logit - highest) / temperature, at most 0.
struct DrawRow {
    const float* logits;
    float highest;  // of the row
    float temperature;
    float log_min_p;  // natural logarithm; minus infinity: off
    DrawKeys keys;
};

// The best of some tokens: the highest sum of a scaled logit and its noise.
struct BestDraw {
    float score = -__builtin_huge_valf();
    std::uint64_t token = 0;  // an id, or a candidate
};

// A candidate holds a scaled logit and an id: the greater number is the higher logit, or of equal ones the lower id.
using Candidate = std::uint64_t;

struct DrawKernels {
    // Goes on over logits [begin, end) of the row; of equal scores the first is kept. Parts come in ascending order.
    void (*draw_part)(const DrawRow& row, std::int32_t begin, std::int32_t end, BestDraw* best);
    // Sum of the exponentials of all scaled logits.
    double (*mass)(const DrawRow& row, std::int32_t size);
    // Writes the candidates whose scaled logit is at least `least`, in ascending order of their ids, and returns their number.
    std::int64_t (*collect)(const DrawRow& row, std::int32_t size, float least, Candidate* candidates);
    // Sum of the exponentials of candidates' scaled logits.
    double (*mass_of)(const Candidate* candidates, std::int64_t count);
    // The best of candidates; of equal scores the greatest candidate.
    void (*draw_of)(const DrawRow& row, const Candidate* candidates, std::int64_t count, BestDraw* best);
};

}  // namespace tercet
