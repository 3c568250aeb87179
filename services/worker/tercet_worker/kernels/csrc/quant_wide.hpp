// Products with quantized weights in float32 (linear_wide.hpp): one row expands them in registers, several expand a block of a group
// once, into the first-level cache. Per block of k the integers are summed up, without the 16 that quant_kernel.hpp adds to four bits,
// and scaled; a row alone as one of many, to the bit. Include only from files compiled for one instruction set.
#pragma once

#include "linear_wide.hpp"
#include "quant_kernel.hpp"

namespace tercet {
namespace {

#if defined(TERCET_WIDE)

constexpr int kQuarter = 8;  // k that four bits of each word of a line hold

// Four bits are made float32 where they stand, as the integers that they are there: times a power of two, by which the values that
// they meet are divided. That is exact (but for values below 1e-30), and takes one instruction less than to bring them to one place. The
// last of a word would be its sign; they are shifted down.
constexpr int kTopPlace = 28;

constexpr int four_bits_place(int k) { return 16 * (k % 2) + 4 * (k / 2); }

template <class Q>
TERCET_INLINE float value_factor(int k) {
    if (!Q::four_bits || four_bits_place(k) == kTopPlace) return 1.0f;
    return 1.0f / static_cast<float>(1 << four_bits_place(k));
}

// Line k of a quarter of a panel's block. `stored`: of four bits, the line of the quarter; else where the bytes are.
template <class Q, class Stored>
TERCET_INLINE F16 expanded(const Stored& stored, int k) {
    if constexpr (Q::four_bits) {
        F16 r;
        TERCET_EACH {
            const vi word = stored.part[i];
            const vi place = four_bits_place(k) == kTopPlace ? (vi)((vu)word >> kTopPlace) : word & splat_int(15 << four_bits_place(k));
            r.part[i] = (vf)_mm256_cvtepi32_ps((__m256i)place);
        }
        return r;
    } else {
        return signed_bytes(stored + kQuantOutputs * k);
    }
}

template <class Q>
TERCET_INLINE auto stored_quarter(const char* data, int quarter) {
    if constexpr (Q::four_bits) {
        return load16i(data + kLineBytes * quarter);
    } else {
        return data + kQuantOutputs * kQuarter * quarter;
    }
}

// The values of a row that a block meets.
template <class Q>
TERCET_INLINE void quant_values(const char* x, float* to) {
    widen_values(x, Q::block, to);
    if constexpr (Q::four_bits) {
        F16 factors;
        for (int i = 0; i < kPanel; ++i) reinterpret_cast<float*>(&factors)[i] = value_factor<Q>(i % kQuarter);
        for (int k = 0; k < Q::block; k += kPanel) {
            F16 values = load16(to + k);
            TERCET_EACH values.part[i] = values.part[i] * factors.part[i];
            store16(to + k, values);
        }
    }
}

// What the sums of a block are multiplied by, of one panel.
template <class Q>
struct WideScales {
    F16 scale;
    F16 offset{};

    TERCET_INLINE WideScales of(const char* data) {
        WideScales r;
        r.scale = load_scales<Q>(data + Q::data_bytes);
        if constexpr (Q::has_minimum) r.offset = load_scales<Q>(data + Q::data_bytes + Q::scale_bytes);
        return r;
    }

    // Adds a block to the sum of all before it. `values`: what the values of the row sum up to in it.
    TERCET_INLINE F16 add(const WideScales& s, const F16& total, const F16& block, float values) {
        const F16 scaled = fma16(s.scale, block, total);
        if constexpr (Q::has_minimum) return fma16(s.offset, splat16(values), scaled);
        else return scaled;
    }
};

// One row by P panels over all blocks. sums: of the blocks of the row.
template <class Q, int P>
__attribute__((noinline)) static void quant_row(const LinearCall& call, const QuantGroup& group, int blocks, const float* sums, int panel,
                                                int row) {
    F16 total[1][P] = {};
    alignas(64) float x[Q::block];
    const char* from = call.x + row * call.x_stride;
    const char* data = group.data;
    const std::int64_t passing = group.block_stride * ((kPassingBytes + group.block_stride - 1) / group.block_stride);
    for (int block = 0; block < blocks; ++block, data += group.block_stride, from += 2 * Q::block) {
        quant_values<Q>(from, x);
        F16 part[P] = {};
        // Panels in turn: what is added to one sum after the other takes as long as the additions of several sums.
#pragma GCC unroll 1
        for (int quarter = 0; quarter < Q::block / kQuarter; ++quarter) {
            const float* values = x + kQuarter * quarter;
            constexpr int kLines = (P * Q::bytes / (Q::block / kQuarter) + kLineBytes - 1) / kLineBytes;
#pragma GCC unroll 8
            for (int i = 0; i < kLines; ++i) {  // not all at a time: see quant_kernel.hpp
                __builtin_prefetch(data + passing + (quarter * kLines + i) * kLineBytes, 0, 0);
            }
            constexpr int kTurn = least(P, 2);
#pragma GCC unroll 2
            for (int turn = 0; turn < P; turn += kTurn) {
                decltype(stored_quarter<Q>(data, 0)) stored[kTurn];
                for (int p = 0; p < kTurn; ++p) stored[p] = stored_quarter<Q>(data + (turn + p) * Q::bytes, quarter);
#pragma GCC unroll 8
                for (int k = 0; k < kQuarter; ++k) {
                    const F16 value = splat16(values[k]);
#pragma GCC unroll 2
                    for (int p = 0; p < kTurn; ++p) part[turn + p] = fma16(expanded<Q>(stored[p], k), value, part[turn + p]);
                }
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const auto scales = WideScales<Q>::of(data + p * Q::bytes);
            total[0][p] = WideScales<Q>::add(scales, total[0][p], part[p], Q::has_minimum ? sums[block] : 0.0f);
        }
    }
    finish<BFloat16Linear, 1, P>(call, total, panel, row);
}

template <class Q, int R>
__attribute__((noinline)) static void quant_wide_tile(const WideScales<Q>& scales, const float (*lines)[kPanel],
                                                      const float (*x)[kWideSpan], const float* values, int values_stride,
                                                      float (*kept)[kPanel]) {
    F16 sums[R] = {};
    wide_products<R>(lines, x, Q::block, sums);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        store16(kept[r], WideScales<Q>::add(scales, load16(kept[r]), sums[r], Q::has_minimum ? values[r * values_stride] : 0.0f));
    }
}

template <class Q>
TERCET_INLINE void quant_linear_wide(const LinearCall& call, const LinearPart& part) {
    const int blocks = call.in_features / Q::block;
    alignas(64) float values[kSumsAtOnce];
    // Rows whose sums of blocks are kept.
    const int most = Q::has_minimum ? rows_at_once(blocks, kWideRows) : kWideRows;
    for (int begin = part.row_begin; begin < part.row_end; begin += most) {
        const int rows = least(most, part.row_end - begin);
        if constexpr (Q::has_minimum) {
            for (int r = 0; r < rows; ++r) sum_blocks<Q>(call.x + (begin + r) * call.x_stride, blocks, values + r * blocks);
        }
        if (rows == 1) {
            single_row(part, [&](auto panels, int panel) {
                quant_row<Q, panels>(call, quant_group<Q>(call.weights, blocks, call.panels, panel), blocks, values, panel, begin);
            });
            continue;
        }
        const LinearPart some{part.panel_begin, part.panel_end, begin, begin + rows};
        wide_groups(call, some, [&](WideSpan& span, int, int panel, int panels, int row_begin, int count) {
            const QuantGroup group = quant_group<Q>(call.weights, blocks, call.panels, panel);
            const char* data = group.data;
            for (int block = 0; block < blocks; ++block) {
                for (int r = 0; r < count; ++r) {
                    quant_values<Q>(call.x + (row_begin + r) * call.x_stride + 2 * Q::block * block, span.x[r]);
                }
                data += group.block_stride;
                WideAhead ahead(WideNext{data, group.block_stride}, panels * ((count + kWideTile - 1) / kWideTile));
                for (int p = 0; p < panels; ++p) {
                    const char* own = data - group.block_stride + p * Q::bytes;
                    for (int quarter = 0; quarter < Q::block / kQuarter; ++quarter) {
                        const auto stored = stored_quarter<Q>(own, quarter);
#pragma GCC unroll 8
                        for (int k = 0; k < kQuarter; ++k) store16(span.lines[p][kQuarter * quarter + k], expanded<Q>(stored, k));
                    }
                    const WideScales<Q> scales = WideScales<Q>::of(own);
                    wide_tiles(count, [&](int row, auto size) {
                        ahead.fetch();
                        quant_wide_tile<Q, size>(scales, span.lines[p], span.x + row, values + (row_begin - begin + row) * blocks + block,
                                                 blocks, span.sums[p] + row);
                    });
                }
            }
        });
    }
}

#endif

}  // namespace
}  // namespace tercet
