// Products with compact weights in float32 (linear_wide.hpp): those of dense weights, to the bit. One row unpacks them in registers,
// several unpack some steps of a group once. Include only from files compiled for one instruction set.
#pragma once

#include "compact_types.hpp"
#include "linear_wide.hpp"

namespace tercet {
namespace {

#if defined(TERCET_WIDE)

// Unpacks steps of a group in ascending order.
class CompactSteps {
public:
    CompactSteps(const char* weights, std::int32_t in_features, int group)
        : group_(compact_group(weights, in_features, group)),
          lines_(group_.lines),
          next_(group_.exceptions),
          table_(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights)))) {}

    const char* lines() const { return lines_; }

    // The lines of the next step.
    __attribute__((always_inline)) void unpack(I16 (&bits)[kGroupPanels]) {
        const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 2
        for (int i = 0; i < kParts; ++i) {
            const __m256i codes = load(2 * kLineBytes + 32 * i);
            unpack_pair(load(32 * i), _mm256_and_si256(codes, low), bits[0].part[i], bits[1].part[i]);
            unpack_pair(load(kLineBytes + 32 * i), _mm256_and_si256(_mm256_srli_epi16(codes, 4), low), bits[2].part[i], bits[3].part[i]);
        }
        if (__builtin_expect(step_ == next_->step, 0)) mend(bits);
        ++step_;
        lines_ += kCompactBytes;
    }

private:
    __attribute__((always_inline)) __m256i load(int at) const {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines_ + at));
    }

    __attribute__((always_inline)) void unpack_pair(__m256i lower, __m256i codes, vi& even, vi& odd) const {
        const __m256i upper = _mm256_shuffle_epi8(table_, codes);
        even = (vi)_mm256_unpacklo_epi8(lower, upper);
        odd = (vi)_mm256_unpackhi_epi8(lower, upper);
    }

    // Puts the exceptions of a step into its lines.
    void mend(I16 (&bits)[kGroupPanels]) {
        alignas(64) char whole[kExpandedBytes];
        std::memcpy(whole, bits, sizeof whole);
        for (; next_->step == step_; ++next_) whole[2 * next_->place + 1] = static_cast<char>(next_->upper);
        std::memcpy(bits, whole, sizeof whole);
    }

    CompactGroup group_;
    const char* lines_;
    const CompactException* next_;
    __m256i table_;
    int step_ = 0;
};

// One row by P panels of a group, from panel `first` of it on.
template <int P>
__attribute__((noinline)) static void compact_row(const LinearCall& call, int group, int first, int row) {
    using C = BFloat16Linear;
    CompactSteps source(call.weights, call.in_features, group);
    F16 sums[1][P] = {};
    const char* x = call.x + row * call.x_stride;
    for (int step = 0; step < call.in_features / 2; ++step, x += 4) {
#pragma GCC unroll 3
        for (int at = 0; at < kCompactBytes; at += kLineBytes) __builtin_prefetch(source.lines() + kPassingBytes + at, 0, 0);
        I16 bits[kGroupPanels];
        source.unpack(bits);
        const C::Spread value = C::spread(x);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[0][p] = C::dot(sums[0][p], C::split(bits[P == kGroupPanels ? p : first + p]), value);
    }
    finish<C, 1, P>(call, sums, group * kGroupPanels + first, row);
}

static void linear_compact_wide(const LinearCall& call, const LinearPart& part) {
    if (part.row_end - part.row_begin == 1) {
        single_row(part, [&](auto panels, int panel) {
            compact_row<panels>(call, panel / kGroupPanels, panel % kGroupPanels, part.row_begin);
        });
        return;
    }
    wide_groups(call, part, [&](WideSpan& span, int group, int panel, int panels, int row_begin, int rows) {
        CompactSteps source(call.weights, call.in_features, group);
        const int first = panel % kGroupPanels;
        add_spans(call, span, panels, row_begin, rows, [&](int count) {
            for (int step = 0; step < count; ++step) {
                I16 bits[kGroupPanels];
                source.unpack(bits);
#pragma GCC unroll 4
                for (int p = 0; p < kGroupPanels; ++p) {
                    if (p >= first && p < first + panels) widen_pair(bits[p], span, p - first, step);
                }
            }
            return WideNext{source.lines(), static_cast<std::int64_t>(count) * kCompactBytes};
        });
    });
}

#endif

}  // namespace
}  // namespace tercet
