// How one reduction step is loaded and multiplied, per KV dtype and instruction set. See attention_types.hpp for the layout.
//
// Each policy C has: Line (16 columns of one step, ready to multiply), Step (the broadcast side of one step: a q value or pair, a
// probability or pair), kStepKeys (keys of one V step), dot(acc, Line, Step), pack (dtype of the model -> Step), and stores.
// Include only from files compiled for one instruction set.
#pragma once

#include "vec16.hpp"

namespace tercet {
namespace {

struct Float32Kv {
    using Element = float;
    using Line = F16;
    using Step = float;
    static constexpr int kStepKeys = 1;
    static constexpr int kExpDegree = 5;

    TERCET_INLINE Line load(const char* p) { return load16(p); }
    TERCET_INLINE F16 dot(const F16& acc, const Line& line, const Step* s) { return fma16(line, splat16(*s), acc); }
    TERCET_INLINE void pack(Step* to, const char* row, int step) { std::memcpy(to, row + 4 * step, 4); }
    // Sixteen probabilities of one row, keys 16 * tile and up.
    TERCET_INLINE void store_probabilities(void* row, int tile, const F16& p) {
        store16(static_cast<float*>(row) + 16 * tile, p);
    }
    TERCET_INLINE void store_out(char* row, int column, const F16& x) { store16(row + 4 * column, x); }
};

#if defined(__AVX512BF16__)

// Pairs multiplied by vdpbf16ps. Probabilities are rounded to bfloat16, as on GPUs.
struct BFloat16Kv {
    using Element = std::uint16_t;
    using Line = __m512bh;
    using Step = std::uint32_t;
    static constexpr int kStepKeys = 2;
    static constexpr int kExpDegree = 4;

    TERCET_INLINE Line load(const char* p) {
        __m512i line = _mm512_loadu_si512(p);
        asm("" : "+v"(line));  // else compilers load it again for every row that meets it
        return (__m512bh)line;
    }
    TERCET_INLINE F16 dot(const F16& acc, const Line& line, const Step* s) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(*s));
        return F16{{(vf)_mm512_dpbf16_ps((__m512)acc.part[0], line, pair)}};
    }
    TERCET_INLINE void pack(Step* to, const char* row, int step) { std::memcpy(to, row + 4 * step, 4); }
    TERCET_INLINE void store_probabilities(void* row, int tile, const F16& p) {
        store16_bf16(static_cast<std::uint16_t*>(row) + 16 * tile, p);
    }
    TERCET_INLINE void store_out(char* row, int column, const F16& x) { store16_bf16(row + 2 * column, x); }
};

#else

// Pairs widened to float32 on the way in; everything after that is float32.
struct BFloat16Kv {
    using Element = std::uint16_t;
    struct Line {
        F16 even;
        F16 odd;
    };
    struct Step {
        float even;
        float odd;
    };
    static constexpr int kStepKeys = 2;
    static constexpr int kExpDegree = 5;

    TERCET_INLINE Line load(const char* p) {
        const I16 bits = load16i(p);
        Line line;
        TERCET_EACH {
            line.even.part[i] = (vf)(bits.part[i] << 16);
            line.odd.part[i] = (vf)(bits.part[i] & splat_int(static_cast<std::int32_t>(0xffff0000u)));
        }
        return line;
    }
    TERCET_INLINE F16 dot(const F16& acc, const Line& line, const Step* s) {
        return fma16(line.odd, splat16(s->odd), fma16(line.even, splat16(s->even), acc));
    }
    TERCET_INLINE void pack(Step* to, const char* row, int step) {
        std::uint16_t pair[2];
        std::memcpy(pair, row + 4 * step, 4);
        *to = Step{from_bf16(pair[0]), from_bf16(pair[1])};
    }
    TERCET_INLINE void store_probabilities(void* row, int tile, const F16& p) {
        store16(static_cast<float*>(row) + 16 * tile, p);
    }
    TERCET_INLINE void store_out(char* row, int column, const F16& x) { store16_bf16(row + 2 * column, x); }
};

#endif

}  // namespace
}  // namespace tercet
