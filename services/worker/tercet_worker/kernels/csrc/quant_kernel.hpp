// Products of bfloat16 rows with quantized weights (quant_types.hpp), and the rest that depends on how those lie.
// Include only from files compiled for one instruction set.
#pragma once

#include "linear_kernel.hpp"
#include "quant_types.hpp"

namespace tercet {
namespace {

constexpr int kSumsAtOnce = 16 * 1024;  // sums of blocks of activations that are kept at a time: 64 KiB
constexpr int kQuantPassingBytes = 2048;  // instead of kPassingBytes, at least, in whole blocks: a line takes longer to compute
constexpr int kFourBase = 16;           // what the four bits are added to, see quant_types.hpp

TERCET_INLINE float half_to_float(std::uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t magnitude = bits & 0x7fffu;
    std::uint32_t wide = (magnitude << 13) + 0x38000000u;  // the exponent's bias grows by 112
    if (magnitude >= 0x7c00u) wide += 0x38000000u;         // infinity or not a number
    float value;
    if (magnitude < 0x0400u) {  // subnormal: exact as a float
        value = static_cast<float>(magnitude) * 0x1p-24f;
        std::memcpy(&wide, &value, 4);
    }
    wide |= sign;
    std::memcpy(&value, &wide, 4);
    return value;
#endif
}

template <class Q>
TERCET_INLINE float read_scale(const char* scales, int output) {
    if constexpr (Q::wide) {
        float value;
        std::memcpy(&value, scales + 4 * output, 4);
        return value;
    } else {
        std::uint16_t bits;
        std::memcpy(&bits, scales + 2 * output, 2);
        return half_to_float(bits);
    }
}

// Sixteen scales or minima.
template <class Q>
TERCET_INLINE F16 load_scales(const char* scales) {
    if constexpr (Q::wide) {
        return load16(scales);
    } else {
#if defined(__AVX512F__)
        return F16{{(vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)))}};
#elif defined(__F16C__)
        F16 r;
        TERCET_EACH {
            r.part[i] = (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 16 * i)));
        }
        return r;
#else
        float values[16];
        for (int i = 0; i < 16; ++i) values[i] = read_scale<Q>(scales, i);
        return load16(values);
#endif
    }
}

// Step j of four in a line, as bits of pairs of the bfloat16 16 + q.
template <int j>
TERCET_INLINE I16 four_bits(const I16& line) {
    I16 r;
    TERCET_EACH {
        const vi shifted = j == 0 ? line.part[i] << 3 : line.part[i] >> (4 * (j > 0 ? j : 1) - 3);
        r.part[i] = (shifted & splat_int(0x00780078)) | splat_int(0x41804180);
    }
    return r;
}

TERCET_INLINE F16 signed_bytes(const char* p) {
#if defined(__AVX512F__)
    return F16{{(vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}};
#elif defined(__AVX2__)
    F16 r;
    TERCET_EACH {
        r.part[i] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i))));
    }
    return r;
#else
    typedef std::int8_t vb __attribute__((vector_size(kWidth)));
    F16 r;
    TERCET_EACH {
        vb bytes;
        std::memcpy(&bytes, p + kWidth * i, sizeof bytes);
        r.part[i] = __builtin_convertvector(bytes, vf);
    }
    return r;
#endif
}

// Small integers are exact in bfloat16: their floats have nothing in the lower half.
TERCET_INLINE I16 pair_of_floats(const F16& even, const F16& odd) {
    I16 r;
    TERCET_EACH r.part[i] = (vi)((vu)even.part[i] >> 16) | (vi)odd.part[i];
    return r;
}

#if defined(__AVX512BF16__)
TERCET_INLINE BFloat16Linear::Line as_line(const I16& bits) { return (__m512bh)bits.part[0]; }
#else
TERCET_INLINE BFloat16Linear::Line as_line(const I16& bits) { return BFloat16Linear::split(bits); }
#endif

// Four steps of a block from step 4 * quarter on: the lines of P panels, handed to `take(step of the block, lines)`.
template <class Q, int P, class Take>
TERCET_INLINE void expand(const char* data, int quarter, Take take) {
    I16 line[P];
    if constexpr (Q::four_bits) {
        I16 stored[P];
        for (int p = 0; p < P; ++p) stored[p] = load16i(data + p * Q::bytes + kLineBytes * quarter);
        for (int p = 0; p < P; ++p) line[p] = four_bits<0>(stored[p]);
        take(4 * quarter, line);
        for (int p = 0; p < P; ++p) line[p] = four_bits<1>(stored[p]);
        take(4 * quarter + 1, line);
        for (int p = 0; p < P; ++p) line[p] = four_bits<2>(stored[p]);
        take(4 * quarter + 2, line);
        for (int p = 0; p < P; ++p) line[p] = four_bits<3>(stored[p]);
        take(4 * quarter + 3, line);
    } else {
#pragma GCC unroll 1
        for (int step = 4 * quarter; step < 4 * quarter + 4; ++step) {
            for (int p = 0; p < P; ++p) {
                const char* pair = data + p * Q::bytes + 2 * kQuantOutputs * step;
                line[p] = pair_of_floats(signed_bytes(pair), signed_bytes(pair + kQuantOutputs));
            }
            take(step, line);
        }
    }
}

// What the sum of a block's activations is multiplied by: the minimum, less what the four bits were added to.
template <class Q>
TERCET_INLINE F16 load_offsets(const char* scales, const F16& scale) {
    const F16 minimum = load_scales<Q>(scales + Q::scale_bytes);
    if constexpr (Q::four_bits) return fma16(scale, splat16(-kFourBase), minimum);
    return minimum;
}

// Sums of the blocks of one row, in float32.
template <class Q>
TERCET_INLINE void sum_blocks(const char* x, int blocks, float* sums) {
    for (int block = 0; block < blocks; ++block, x += 2 * Q::block) {
        F16 lanes = BFloat16Linear::widen(x);
        if constexpr (Q::block == 32) lanes = add16(lanes, BFloat16Linear::widen(x + 32));
        sums[block] = horizontal_sum(lanes);
    }
}

// One tile: R rows by P panels over all blocks. sums: of the blocks of the first row, `blocks` apart.
template <class Q, int R, int P>
__attribute__((noinline)) static void quant_tile(const LinearCall& call, const char* data, std::int64_t block_stride, int blocks,
                                                 const float* sums, int panel, int row) {
    F16 total[R][P] = {};
    const char* x = call.x + row * call.x_stride;
    const std::int64_t passing = block_stride * ((kQuantPassingBytes + block_stride - 1) / block_stride);
    for (int block = 0; block < blocks; ++block, data += block_stride, x += 2 * Q::block) {
        F16 part[R][P] = {};
#pragma GCC unroll 1
        for (int quarter = 0; quarter < Q::steps / 4; ++quarter) {
            // Used once: see linear_kernel.hpp. All of a block's lines at a time would hold up the loads behind them.
            if constexpr (R == 1) {
                constexpr int kLines = (P * Q::bytes / (Q::steps / 4) + kLineBytes - 1) / kLineBytes;
#pragma GCC unroll 8
                for (int i = 0; i < kLines; ++i) {
                    __builtin_prefetch(data + passing + (quarter * kLines + i) * kLineBytes, 0, 0);
                }
            }
            expand<Q, P>(data, quarter, [&](int step, const I16(&bits)[P]) __attribute__((always_inline)) {
                typename BFloat16Linear::Line line[P];
                for (int p = 0; p < P; ++p) line[p] = as_line(bits[p]);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const auto value = BFloat16Linear::spread(x + r * call.x_stride + 4 * step);
                    for (int p = 0; p < P; ++p) part[r][p] = BFloat16Linear::dot(part[r][p], line[p], value);
                }
            });
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const char* scales = data + p * Q::bytes + Q::data_bytes;
            const F16 scale = load_scales<Q>(scales);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) total[r][p] = fma16(scale, part[r][p], total[r][p]);
            if constexpr (Q::has_minimum) {
                const F16 offset = load_offsets<Q>(scales, scale);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) total[r][p] = fma16(offset, splat16(sums[r * blocks + block]), total[r][p]);
            }
        }
    }
    finish<BFloat16Linear, R, P>(call, total, panel, row);
}

// Most rows of a tile of two panels. Four panels, which suit few rows, and one, which is rare, have tiles of their own.
#if defined(__AVX512BF16__)
constexpr int kQuantRows = 6;
#elif defined(__AVX512F__)
constexpr int kQuantRows = 4;
#else
constexpr int kQuantRows = 2;
#endif

template <class Q>
TERCET_INLINE void quant_pair(const LinearCall& call, const char* data, std::int64_t block_stride, int blocks, const float* sums,
                              int panel, int row, int rows) {
    switch (rows) {
        case 1: return quant_tile<Q, 1, 2>(call, data, block_stride, blocks, sums, panel, row);
        case 2: return quant_tile<Q, 2, 2>(call, data, block_stride, blocks, sums, panel, row);
#if defined(__AVX512F__)
        case 3: return quant_tile<Q, 3, 2>(call, data, block_stride, blocks, sums, panel, row);
        case 4: return quant_tile<Q, 4, 2>(call, data, block_stride, blocks, sums, panel, row);
#endif
#if defined(__AVX512BF16__)
        case 5: return quant_tile<Q, 5, 2>(call, data, block_stride, blocks, sums, panel, row);
        case 6: return quant_tile<Q, 6, 2>(call, data, block_stride, blocks, sums, panel, row);
#endif
        default: __builtin_unreachable();
    }
}

// Where the panels of a group lie.
struct QuantGroup {
    const char* data;
    std::int64_t block_stride;
};

template <class Q>
TERCET_INLINE QuantGroup quant_group(const char* weights, int blocks, int all_panels, int panel) {
    const int group = panel / kGroupPanels;
    const int group_panels = least(kGroupPanels, all_panels - group * kGroupPanels);
    return {weights + static_cast<std::int64_t>(group) * blocks * Q::bytes * kGroupPanels + Q::bytes * (panel % kGroupPanels),
            static_cast<std::int64_t>(Q::bytes) * group_panels};
}

// Rows of a part that are taken together: their sums are kept, and there is at least one.
TERCET_INLINE int rows_at_once(int blocks, int limit) { return least(limit, blocks >= kSumsAtOnce ? 1 : kSumsAtOnce / blocks); }

template <class Q>
TERCET_INLINE void quant_linear(const LinearCall& call, const LinearPart& part) {
    const int blocks = call.in_features / Q::block;
    alignas(64) float sums[kSumsAtOnce];
    const int most = rows_at_once(blocks, 96);
    for (int begin = part.row_begin; begin < part.row_end; begin += most) {
        const int rows = least(most, part.row_end - begin);
        if constexpr (Q::has_minimum) {
            for (int r = 0; r < rows; ++r) sum_blocks<Q>(call.x + (begin + r) * call.x_stride, blocks, sums + r * blocks);
        }
        for (int panel = part.panel_begin; panel < part.panel_end;) {
            const int group_end = least(part.panel_end, (panel / kGroupPanels + 1) * kGroupPanels);
            const int left = group_end - panel;
            const QuantGroup group = quant_group<Q>(call.weights, blocks, call.panels, panel);
            const std::int64_t stride = group.block_stride;
            int panels = left >= 2 ? 2 : 1;
            if (panels == 1) {
                for (int r = 0; r < rows; ++r) {
                    quant_tile<Q, 1, 1>(call, group.data, stride, blocks, sums + r * blocks, panel, begin + r);
                }
#if defined(__AVX512F__)
            } else if (rows == 1 && left >= 4) {
                panels = 4;
                quant_tile<Q, 1, 4>(call, group.data, stride, blocks, sums, panel, begin);
#endif
            } else {
                const int tiles = (rows + kQuantRows - 1) / kQuantRows;
                for (int tile = 0, row = 0; tile < tiles; ++tile) {
                    const int size = (rows - row + tiles - tile - 1) / (tiles - tile);
                    quant_pair<Q>(call, group.data, stride, blocks, sums + row * blocks, panel, begin + row, size);
                    row += size;
                }
            }
            panel += panels;
        }
    }
}

template <class Q>
static void quant_pack(char* weights, std::int32_t in_features, std::int32_t panels, std::int32_t base, std::int32_t pitch,
                       std::int32_t first, std::int32_t rows, const QuantRows& source) {
    const int blocks = in_features / Q::block;
    const int width = Q::wide ? 4 : 2;
    for (int row = 0; row < rows; ++row) {
        const int output = first + row;
        const int lane = output % kPanel;
        const QuantGroup group = quant_group<Q>(weights, blocks, panels, base + output / kPanel * pitch);
        const std::uint8_t* q = source.q + static_cast<std::int64_t>(row) * in_features;
        for (int block = 0; block < blocks; ++block) {
            char* to = const_cast<char*>(group.data) + block * group.block_stride;
            for (int k = 0; k < Q::block; ++k) {
                const int step = k / 2;
                const std::uint8_t value = q[block * Q::block + k];
                if constexpr (Q::four_bits) {
                    char* pair = to + kLineBytes * (step / 4) + 4 * lane + 2 * (k % 2);
                    std::uint16_t bits;
                    std::memcpy(&bits, pair, 2);
                    const int shift = 4 * (step % 4);
                    bits = static_cast<std::uint16_t>((bits & ~(0xfu << shift)) | ((value & 0xfu) << shift));
                    std::memcpy(pair, &bits, 2);
                } else {
                    std::memcpy(to + 2 * kQuantOutputs * step + kQuantOutputs * (k % 2) + lane, &value, 1);
                }
            }
            const std::int64_t at = (static_cast<std::int64_t>(row) * blocks + block) * width;
            char* scales = to + Q::data_bytes + lane * width;
            std::memcpy(scales, static_cast<const char*>(source.scales) + at, static_cast<std::size_t>(width));
            if constexpr (Q::has_minimum) {
                std::memcpy(scales + Q::scale_bytes, static_cast<const char*>(source.minima) + at, static_cast<std::size_t>(width));
            }
        }
    }
}

template <class Q>
TERCET_INLINE void quant_gather(const char* weights, std::int32_t in_features, std::int32_t panels, const std::int32_t* ids,
                                float factor, char* y, std::int64_t y_stride, std::int32_t begin, std::int32_t end) {
    const int blocks = in_features / Q::block;
    for (int t = begin; t < end; ++t) {
        const int lane = ids[t] % kPanel;
        const QuantGroup group = quant_group<Q>(weights, blocks, panels, ids[t] / kPanel);
        auto* to = reinterpret_cast<float*>(y + t * y_stride);
        for (int block = 0; block < blocks; ++block) {
            const char* from = group.data + block * group.block_stride;
            const char* scales = from + Q::data_bytes;
            const float scale = read_scale<Q>(scales, lane);
            const float minimum = Q::has_minimum ? read_scale<Q>(scales + Q::scale_bytes, lane) : 0.0f;
            for (int k = 0; k < Q::block; ++k) {
                int q;
                if constexpr (Q::four_bits) {
                    std::uint16_t bits;
                    std::memcpy(&bits, from + kLineBytes * (k / 8) + 4 * lane + 2 * (k % 2), 2);
                    q = bits >> (4 * (k / 2 % 4)) & 0xf;
                } else {
                    q = static_cast<signed char>(from[2 * kQuantOutputs * (k / 2) + kQuantOutputs * (k % 2) + lane]);
                }
                *to++ = factor * (scale * static_cast<float>(q) + minimum);
            }
        }
    }
}

}  // namespace
}  // namespace tercet

#if defined(__AMX_BF16__)
#include "quant_amx.hpp"
#endif
#include "quant_wide.hpp"

namespace tercet {
namespace {

// Calls `run` with the format's description.
template <class Run>
TERCET_INLINE void with_format(WeightFormat format, Run run) {
    switch (format) {
        case WeightFormat::four: return run(Quant<WeightFormat::four>{});
        case WeightFormat::four_wide: return run(Quant<WeightFormat::four_wide>{});
        case WeightFormat::eight: return run(Quant<WeightFormat::eight>{});
        case WeightFormat::eight_wide: return run(Quant<WeightFormat::eight_wide>{});
        default: __builtin_unreachable();
    }
}

static void linear_quant(WeightFormat format, const LinearCall& call, const LinearPart& part) {
    with_format(format, [&](auto q) {
#if defined(__AMX_BF16__)
        quant_linear_amx<decltype(q)>(call, part);
#elif defined(TERCET_WIDE)
        quant_linear_wide<decltype(q)>(call, part);
#else
        quant_linear<decltype(q)>(call, part);
#endif
    });
}

static void pack_quant(WeightFormat format, char* weights, std::int32_t in_features, std::int32_t panels, std::int32_t base,
                       std::int32_t pitch, std::int32_t first, std::int32_t rows, const QuantRows& source) {
    with_format(format,
                [&](auto q) { quant_pack<decltype(q)>(weights, in_features, panels, base, pitch, first, rows, source); });
}

static void gather_quant(WeightFormat format, const char* weights, std::int32_t in_features, std::int32_t panels,
                         const std::int32_t* ids, float factor, char* y, std::int64_t y_stride, std::int32_t begin,
                         std::int32_t end) {
    with_format(format, [&](auto q) {
        quant_gather<decltype(q)>(weights, in_features, panels, ids, factor, y, y_stride, begin, end);
    });
}

}  // namespace
}  // namespace tercet
