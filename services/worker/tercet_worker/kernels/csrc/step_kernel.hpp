// What a step needs beside attention and products: packing, embedding rows, norms, rotations, the best logit, draws. See linear_types.hpp for
// what each does. Include only from files compiled for one instruction set.
#pragma once

#include "compact_kernel.hpp"
#include "compact_wide.hpp"
#include "draw_kernel.hpp"
#include "linear_kernel.hpp"
#include "linear_wide.hpp"
#if defined(__AMX_BF16__)
#include "linear_amx.hpp"
#endif
#include "quant_kernel.hpp"

namespace tercet {
namespace {

// Address of element k of output `column` in a packed matrix.
template <class C>
TERCET_INLINE std::int64_t packed_offset(int steps, int panels, int panel, int lane, int k) {
    const int group = panel / kGroupPanels;
    const int group_panels = least(kGroupPanels, panels - group * kGroupPanels);
    const std::int64_t line = static_cast<std::int64_t>(group) * steps * kGroupPanels +
                              static_cast<std::int64_t>(k / C::kStepElements) * group_panels + panel % kGroupPanels;
    return line * kLineBytes + lane * 4 + k % C::kStepElements * static_cast<int>(sizeof(typename C::Element));
}

template <class C>
static void pack(char* weights, std::int32_t in_features, std::int32_t panels, std::int32_t base, std::int32_t pitch,
                 std::int32_t first, std::int32_t rows, const char* source) {
    using Element = typename C::Element;
    const int steps = (in_features + C::kStepElements - 1) / C::kStepElements;
    const int whole = in_features / C::kStepElements;
    for (int row = 0; row < rows; ++row) {
        const int output = first + row;
        const int panel = base + output / kPanel * pitch;
        const int group_panels = least(kGroupPanels, panels - panel / kGroupPanels * kGroupPanels);
        char* to = weights + packed_offset<C>(steps, panels, panel, output % kPanel, 0);
        const char* from = source + static_cast<std::int64_t>(row) * in_features * static_cast<int>(sizeof(Element));
        for (int step = 0; step < whole; ++step) {
            std::memcpy(to, from + 4 * step, 4);
            to += kLineBytes * group_panels;
        }
        if (whole < steps) std::memcpy(to, from + 4 * whole, sizeof(Element));
    }
}

template <class C>
static void gather(const char* weights, std::int32_t in_features, std::int32_t panels, const std::int32_t* ids, float scale,
                   char* y, std::int64_t y_stride, std::int32_t begin, std::int32_t end) {
    using Element = typename C::Element;
    const int steps = (in_features + C::kStepElements - 1) / C::kStepElements;
    for (int t = begin; t < end; ++t) {
        const int panel = ids[t] / kPanel;
        const int group_panels = least(kGroupPanels, panels - panel / kGroupPanels * kGroupPanels);
        const char* from = weights + packed_offset<C>(steps, panels, panel, ids[t] % kPanel, 0);
        auto* to = reinterpret_cast<float*>(y + t * y_stride);
        for (int k = 0; k < in_features; ++k) {
            Element value;
            std::memcpy(&value, from + k / C::kStepElements * static_cast<std::int64_t>(kLineBytes * group_panels) +
                                    k % C::kStepElements * static_cast<int>(sizeof(Element)),
                        sizeof value);
            to[k] = scale * C::to_float(value);
        }
    }
}

template <class C>
static void norm(const char* x, std::int64_t x_stride, const float* weight, float eps, std::int32_t size, char* y,
                 std::int64_t y_stride, std::int32_t begin, std::int32_t end) {
    const int whole = size / kPanel * kPanel;
    for (int t = begin; t < end; ++t) {
        const auto* from = reinterpret_cast<const float*>(x + t * x_stride);
        char* to = y + t * y_stride;
        F16 lanes[4] = {};
        int i = 0;
        for (; i + 4 * kPanel <= whole; i += 4 * kPanel) {
            for (int part = 0; part < 4; ++part) {
                const F16 value = load16(from + i + part * kPanel);
                lanes[part] = fma16(value, value, lanes[part]);
            }
        }
        for (; i < whole; i += kPanel) {
            const F16 value = load16(from + i);
            lanes[0] = fma16(value, value, lanes[0]);
        }
        float sum = horizontal_sum(add16(add16(lanes[0], lanes[1]), add16(lanes[2], lanes[3])));
        for (; i < size; ++i) sum += from[i] * from[i];
        const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
        for (i = 0; i < whole; i += kPanel) {
            const F16 w = load16(weight + i);
            F16 value = mul16(load16(from + i), factor);
            for (int part = 0; part < kParts; ++part) value.part[part] = value.part[part] * w.part[part];
            C::store(to + i * static_cast<int>(sizeof(typename C::Element)), value);
        }
        for (; i < size; ++i) {
            reinterpret_cast<typename C::Element*>(to)[i] = C::from_float(from[i] * factor * weight[i]);
        }
    }
}

template <class C>
static void rotate(char* x, std::int64_t x_stride, std::int32_t heads, std::int32_t head_size, std::int32_t half,
                   const float* angles, std::int32_t begin, std::int32_t end) {
    using Element = typename C::Element;
    const int whole = half / kPanel * kPanel;
    for (int t = begin; t < end; ++t) {
        const float* cosines = angles + static_cast<std::int64_t>(t) * 2 * half;
        const float* sines = cosines + half;
        auto* head = reinterpret_cast<Element*>(x + t * x_stride);
        for (int h = 0; h < heads; ++h, head += head_size) {
            int i = 0;
            for (; i < whole; i += kPanel) {
                auto* low = reinterpret_cast<char*>(head + i);
                auto* high = reinterpret_cast<char*>(head + half + i);
                const F16 first = C::widen(low), second = C::widen(high);
                const F16 cosine = load16(cosines + i), sine = load16(sines + i);
                F16 turned_first, turned_second;
                for (int part = 0; part < kParts; ++part) {
                    turned_first.part[part] = first.part[part] * cosine.part[part] - second.part[part] * sine.part[part];
                    turned_second.part[part] = second.part[part] * cosine.part[part] + first.part[part] * sine.part[part];
                }
                C::store(low, turned_first);
                C::store(high, turned_second);
            }
            for (; i < half; ++i) {
                const float first = C::to_float(head[i]), second = C::to_float(head[half + i]);
                head[i] = C::from_float(first * cosines[i] - second * sines[i]);
                head[half + i] = C::from_float(second * cosines[i] + first * sines[i]);
            }
        }
    }
}

static void scan(const float* logits, std::int32_t size, float* highest, std::int64_t* place, bool* finite) {
    constexpr int kBlock = 1024;  // the first block with the highest value is searched again, for its place
    float best = kNegInf;
    int best_block = 0;
    F16 nothing{};  // x - x is 0 for a finite x, and not a number for others
    float rest = 0.0f;
    for (int begin = 0; begin < size; begin += kBlock) {
        const int end = least(size, begin + kBlock);
        F16 lanes[4] = {splat16(kNegInf), splat16(kNegInf), splat16(kNegInf), splat16(kNegInf)};
        int i = begin;
        for (; i + 4 * kPanel <= end; i += 4 * kPanel) {
            for (int part = 0; part < 4; ++part) {
                const F16 x = load16(logits + i + part * kPanel);
                lanes[part] = max16(lanes[part], x);
                for (int p = 0; p < kParts; ++p) nothing.part[p] += x.part[p] - x.part[p];
            }
        }
        float block_best = horizontal_max(max16(max16(lanes[0], lanes[1]), max16(lanes[2], lanes[3])));
        for (; i < end; ++i) {
            block_best = logits[i] > block_best ? logits[i] : block_best;
            rest += logits[i] - logits[i];
        }
        if (block_best > best) {
            best = block_best;
            best_block = begin;
        }
    }
    *highest = best;
    *finite = horizontal_sum(nothing) + rest == 0.0f;
    *place = best_block;
    for (int i = best_block; i < least(size, best_block + kBlock); ++i) {
        if (logits[i] == best) {
            *place = i;
            return;
        }
    }
}

static void scan_part(const float* logits, std::int32_t size, std::int64_t first, BestLogit* best) {
    F16 lanes[2] = {splat16(kNegInf), splat16(kNegInf)};
    F16 nothing{};
    int i = 0;
    for (; i + 2 * kPanel <= size; i += 2 * kPanel) {
        for (int part = 0; part < 2; ++part) {
            const F16 x = load16(logits + i + part * kPanel);
            lanes[part] = max16(lanes[part], x);
            for (int p = 0; p < kParts; ++p) nothing.part[p] += x.part[p] - x.part[p];
        }
    }
    float highest = horizontal_max(max16(lanes[0], lanes[1]));
    float rest = horizontal_sum(nothing);
    for (; i < size; ++i) {
        highest = logits[i] > highest ? logits[i] : highest;
        rest += logits[i] - logits[i];
    }
    best->nothing += rest;
    if (!(highest > best->highest)) return;
    best->highest = highest;
    for (i = 0; i < size; ++i) {
        if (logits[i] == highest) {
            best->place = first + i;
            return;
        }
    }
}

static void linear_bfloat16(const LinearCall& call, const LinearPart& part) {
#if defined(TERCET_WIDE)
    if (part.row_end - part.row_begin > 1) return linear_wide(call, part);
#endif
    linear<BFloat16Linear>(call, part);
}

#if defined(TERCET_WIDE)
constexpr std::int32_t kPieceRows = kWideRows;
#else
constexpr std::int32_t kPieceRows = 48;
#endif

TERCET_INLINE const StepKernels* step_kernels(Dtype dtype) {
    constexpr DrawKernels kDraw{draw_part, mass, collect, mass_of, draw_of};
    static const StepKernels kFloat32{
        linear<Float32Linear>, pack<Float32Linear>, gather<Float32Linear>, norm<Float32Linear>, rotate<Float32Linear>, scan, scan_part,
        nullptr,               nullptr,             nullptr,               nullptr,             nullptr,               1,    48,
        kDraw};
    static const StepKernels kBFloat16{
#if defined(__AMX_BF16__)
        linear_amx, pack<BFloat16Linear>, gather<BFloat16Linear>, norm<BFloat16Linear>, rotate<BFloat16Linear>, scan, scan_part,
        linear_quant, pack_quant, gather_quant, nullptr, nullptr, 32, 64, kDraw};
#else
        linear_bfloat16, pack<BFloat16Linear>, gather<BFloat16Linear>, norm<BFloat16Linear>, rotate<BFloat16Linear>, scan, scan_part,
        linear_quant, pack_quant, gather_quant,
#if defined(__AVX512BW__)
        linear_compact, gather_compact,
#elif defined(TERCET_WIDE)
        linear_compact_wide, gather_compact,
#else
        nullptr, nullptr,
#endif
        1, kPieceRows, kDraw};
#endif
    return dtype == Dtype::float32 ? &kFloat32 : &kBFloat16;
}

}  // namespace
}  // namespace tercet
