// The tokens that top-k and top-p leave, without sorting the vocabulary: candidates above a bound that is lowered until they suffice,
// of which selection finds the border.
#include "draw.hpp"

#include <omp.h>

#include <algorithm>
#include <functional>
#include <new>

#include "isa.hpp"

namespace tercet {
namespace {

// See sampling/noise.py.
std::uint32_t mix(std::uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x;
}

// Bounds that are tried one after another, as natural logarithms of a token's weight relative to the best one's.
constexpr float kBounds[] = {-6.0f, -12.0f, -__builtin_huge_valf()};
constexpr std::int64_t kFew = 64;  // are sorted rather than divided further

// How many of the best candidates have less than `wanted` before them, the heaviest first; they come first then.
std::int64_t nucleus(const DrawKernels& kernels, Candidate* candidates, std::int64_t count, double wanted) {
    std::int64_t begin = 0, end = count;  // the border lies here; what is before `begin` is in
    double before = 0.0;
    while (end - begin > kFew) {
        // The middle of three, put last, so that what is better than it moves to the front.
        Candidate* middle = candidates + begin + (end - begin) / 2;
        Candidate* last = candidates + end - 1;
        if (*middle < candidates[begin]) std::swap(*middle, candidates[begin]);
        if (*last < candidates[begin]) std::swap(*last, candidates[begin]);
        if (*middle < *last) std::swap(*middle, *last);
        const Candidate pivot = *last;
        Candidate* border = std::partition(candidates + begin, last, [pivot](Candidate each) { return each > pivot; });
        std::swap(*border, *last);
        const double better = kernels.mass_of(candidates + begin, border - candidates - begin);
        if (before + better >= wanted) {
            end = border - candidates;
            continue;
        }
        before += better + kernels.mass_of(border, 1);
        begin = border - candidates + 1;
        if (before >= wanted) return begin;
    }
    std::sort(candidates + begin, candidates + end, std::greater<>());
    for (; begin < end && before < wanted; ++begin) before += kernels.mass_of(candidates + begin, 1);
    return begin;
}

}  // namespace

DrawKeys draw_keys(std::uint32_t seed_low, std::uint32_t seed_high, std::uint32_t position) {
    return DrawKeys{mix(mix(seed_low) ^ position), mix(mix(seed_high ^ 0x85A308D3u) + position * 0x9E3779B9u)};
}

std::int64_t draw_truncated(const DrawKernels& kernels, const TercetDraw& draw, std::int32_t size, Candidate* space) {
    const DrawRow row = row_of(draw);
    const std::int64_t most = draw.top_k > 0 ? std::min(draw.top_k, size) : size;
    double wanted = draw.top_p;
    if (draw.top_k == 0) wanted *= kernels.mass(row, size);
    std::int64_t count = 0;
    for (const float bound : kBounds) {
        count = kernels.collect(row, size, bound, space);
        if (draw.top_k > 0 ? count >= most : kernels.mass_of(space, count) >= wanted) break;
    }
    if (draw.top_k > 0) {
        if (count > most) std::nth_element(space, space + most, space + count, std::greater<>());
        count = std::min(count, most);
        wanted *= kernels.mass_of(space, count);
    }
    if (draw.top_p < 1.0f) count = std::max<std::int64_t>(nucleus(kernels, space, count, wanted), std::min<std::int64_t>(count, 1));
    BestDraw best;
    kernels.draw_of(row, space, count, &best);
    // No candidate is 0; there is none where logits are not numbers.
    return best.token == 0 ? 0 : static_cast<std::int32_t>(~static_cast<std::uint32_t>(best.token));
}

}  // namespace tercet

extern "C" {

// Draws a token for every row, of `size` logits each. Returns false, with nothing drawn, where there is no memory. `isa` is available.
bool tercet_logits_draw(std::int32_t isa, std::int32_t threads, TercetDraw* draws, std::int32_t rows, std::int32_t size) {
    const tercet::DrawKernels& kernels =
        tercet::step_kernels(static_cast<tercet::Isa>(isa), tercet::Dtype::float32)->draw;
    const std::int32_t team = std::max(1, std::min(threads, rows));
    std::vector<tercet::Candidate> space;
    try {
        if (std::any_of(draws, draws + rows, tercet::truncates)) {
            space.resize(static_cast<std::size_t>(team) * static_cast<std::size_t>(size));
        }
    } catch (const std::bad_alloc&) {
        return false;
    }
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1)
    for (std::int32_t i = 0; i < rows; ++i) {
        TercetDraw& draw = draws[i];
        if (tercet::truncates(draw)) {
            tercet::Candidate* own = space.data() + static_cast<std::size_t>(omp_get_thread_num()) * static_cast<std::size_t>(size);
            draw.token = tercet::draw_truncated(kernels, draw, size, own);
        } else {
            tercet::BestDraw best;
            kernels.draw_part(tercet::row_of(draw), 0, size, &best);
            draw.token = static_cast<std::int64_t>(best.token);
        }
    }
    return true;
}
}
