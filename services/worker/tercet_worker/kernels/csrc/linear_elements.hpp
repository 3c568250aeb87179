// How one reduction step of a linear layer is loaded and multiplied, per dtype and instruction set. See linear_types.hpp.
//
// Each policy C has: Line (16 outputs of one step, ready to multiply), Spread (one row's x of a step in every lane), dot, and how
// sixteen results are loaded and stored in the dtype of the model. Include only from files compiled for one instruction set.
#pragma once

#include "vec16.hpp"

namespace tercet {
namespace {

struct Float32Linear {
    using Element = float;
    using Line = F16;
    using Spread = F16;
    static constexpr int kStepElements = 1;

    TERCET_INLINE Line load(const char* p) { return load16(p); }
    TERCET_INLINE Spread spread(const char* x) {
        float value;
        std::memcpy(&value, x, 4);
        return splat16(value);
    }
    TERCET_INLINE Spread spread_last(const char* x) { return spread(x); }
    TERCET_INLINE F16 dot(const F16& acc, const Line& line, const Spread& x) { return fma16(line, x, acc); }
    TERCET_INLINE void store(char* p, const F16& x) { store16(p, x); }
    TERCET_INLINE F16 widen(const char* p) { return load16(p); }
    TERCET_INLINE float to_float(Element x) { return x; }
    TERCET_INLINE Element from_float(float x) { return x; }
};

TERCET_INLINE I16 splat16i(std::uint32_t bits) {
    I16 r;
    TERCET_EACH r.part[i] = splat_int(static_cast<std::int32_t>(bits));
    return r;
}

TERCET_INLINE std::uint32_t pair_bits(const char* x) {
    std::uint32_t bits;
    std::memcpy(&bits, x, 4);
    return bits;
}

// The last element of an odd number: the other half of its pair counts as zero, whatever lies there.
TERCET_INLINE std::uint32_t half_pair_bits(const char* x) {
    std::uint16_t bits;
    std::memcpy(&bits, x, 2);
    return bits;
}

TERCET_INLINE F16 widen16_bf16(const char* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // Compilers make five instructions of what follows.
    F16 r;
    TERCET_EACH r.part[i] = (vf)((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i))) << 16);
    return r;
#else
    typedef std::uint16_t vh __attribute__((vector_size(kWidth * 2)));
    F16 r;
    TERCET_EACH {
        vh half;
        std::memcpy(&half, p + 2 * kWidth * i, sizeof half);
        r.part[i] = (vf)(__builtin_convertvector(half, vi) << 16);
    }
    return r;
#endif
}

#if defined(__AVX512BF16__)

struct BFloat16Linear {
    using Element = std::uint16_t;
    using Line = __m512bh;
    using Spread = __m512bh;
    static constexpr int kStepElements = 2;

    TERCET_INLINE Line load(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
    TERCET_INLINE Spread spread(const char* x) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair_bits(x))); }
    TERCET_INLINE Spread spread_last(const char* x) {
        return (__m512bh)_mm512_set1_epi32(static_cast<int>(half_pair_bits(x)));
    }
    TERCET_INLINE F16 dot(const F16& acc, const Line& line, const Spread& x) {
        return F16{{(vf)_mm512_dpbf16_ps((__m512)acc.part[0], line, x)}};
    }
    TERCET_INLINE void store(char* p, const F16& x) { store16_bf16(p, x); }
    TERCET_INLINE F16 widen(const char* p) { return widen16_bf16(p); }
    TERCET_INLINE float to_float(Element x) { return from_bf16(x); }
    TERCET_INLINE Element from_float(float x) { return to_bf16(x); }
};

#else

// Pairs widened to float32 on the way in; everything after that is float32.
struct BFloat16Linear {
    using Element = std::uint16_t;
    struct Line {
        F16 even;
        F16 odd;
    };
    using Spread = Line;
    static constexpr int kStepElements = 2;

    TERCET_INLINE Line split(const I16& bits) {
        Line line;
        TERCET_EACH {
            line.even.part[i] = (vf)(bits.part[i] << 16);
            line.odd.part[i] = (vf)(bits.part[i] & splat_int(static_cast<std::int32_t>(0xffff0000u)));
        }
        return line;
    }
    TERCET_INLINE Line load(const char* p) { return split(load16i(p)); }
    TERCET_INLINE Spread spread(const char* x) { return split(splat16i(pair_bits(x))); }
    TERCET_INLINE Spread spread_last(const char* x) { return split(splat16i(half_pair_bits(x))); }
    TERCET_INLINE F16 dot(const F16& acc, const Line& line, const Spread& x) {
        return fma16(line.odd, x.odd, fma16(line.even, x.even, acc));
    }
    TERCET_INLINE void store(char* p, const F16& x) { store16_bf16(p, x); }
    TERCET_INLINE F16 widen(const char* p) { return widen16_bf16(p); }
    TERCET_INLINE float to_float(Element x) { return from_bf16(x); }
    TERCET_INLINE Element from_float(float x) { return to_bf16(x); }
};

#endif

}  // namespace
}  // namespace tercet
