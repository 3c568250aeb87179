// Sixteen float32 lanes, whatever the register width: one zmm, two ymm or four 128-bit registers.
//
// Sixteen is the key tile of the KV layout, so kernels are written once over F16 and the width is a matter of compile flags.
// Fused multiply-add is written out (fma16), never left to contraction: results must not depend on how a template was inlined.
// Include this only from files that are compiled for one instruction set (see isa.hpp); everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define TERCET_INLINE static inline __attribute__((always_inline))

namespace tercet {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;

// Products of bfloat16 have ways of their own: see linear_wide.hpp.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define TERCET_WIDE 1
#endif

typedef float vf __attribute__((vector_size(kWidth * 4)));
typedef std::int32_t vi __attribute__((vector_size(kWidth * 4)));
typedef std::uint32_t vu __attribute__((vector_size(kWidth * 4)));

struct F16 {
    vf part[kParts];
};

struct I16 {
    vi part[kParts];
};

constexpr float kNegInf = -__builtin_huge_valf();

// x - 0 is x for every x, and the compiler turns it into a broadcast.
TERCET_INLINE vf splat(float x) { return x - vf{}; }
TERCET_INLINE vi splat_int(std::int32_t x) { return x - vi{}; }
TERCET_INLINE vu splat_bits(std::uint32_t x) { return x - vu{}; }

#define TERCET_EACH for (int i = 0; i < kParts; ++i)

TERCET_INLINE F16 splat16(float x) {
    F16 r;
    TERCET_EACH r.part[i] = splat(x);
    return r;
}

// Part by part: of a copy of all sixteen lanes compilers make a block move, which keeps its side out of the registers for good.
TERCET_INLINE F16 load16(const void* p) {
    F16 r;
    TERCET_EACH std::memcpy(&r.part[i], static_cast<const char*>(p) + sizeof(vf) * i, sizeof(vf));
    return r;
}

TERCET_INLINE void store16(void* p, const F16& a) {
    TERCET_EACH std::memcpy(static_cast<char*>(p) + sizeof(vf) * i, &a.part[i], sizeof(vf));
}

TERCET_INLINE I16 load16i(const void* p) {
    I16 r;
    TERCET_EACH std::memcpy(&r.part[i], static_cast<const char*>(p) + sizeof(vi) * i, sizeof(vi));
    return r;
}

TERCET_INLINE I16 bits16(const F16& a) {
    I16 r;
    TERCET_EACH r.part[i] = (vi)a.part[i];
    return r;
}

TERCET_INLINE vf fma_part(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The larger of a and b; b where either is not a number.
TERCET_INLINE vf max_part(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// The smaller of a and b; b where either is not a number.
TERCET_INLINE vf min_part(vf a, vf b) { return -max_part(-a, -b); }

TERCET_INLINE F16 fma16(const F16& a, const F16& b, const F16& c) {
    F16 r;
    TERCET_EACH r.part[i] = fma_part(a.part[i], b.part[i], c.part[i]);
    return r;
}

TERCET_INLINE F16 add16(const F16& a, const F16& b) {
    F16 r;
    TERCET_EACH r.part[i] = a.part[i] + b.part[i];
    return r;
}

TERCET_INLINE F16 mul16(const F16& a, float b) {
    F16 r;
    TERCET_EACH r.part[i] = a.part[i] * splat(b);
    return r;
}

TERCET_INLINE F16 max16(const F16& a, const F16& b) {
    F16 r;
    TERCET_EACH r.part[i] = max_part(a.part[i], b.part[i]);
    return r;
}

TERCET_INLINE float first_lane(const F16& a) { return a.part[0][0]; }

TERCET_INLINE float horizontal_max(const F16& a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a.part[0]);
#elif defined(__AVX2__)
    const __m256 eight = _mm256_max_ps((__m256)a.part[0], (__m256)a.part[1]);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
    vf widest = a.part[0];
    for (int i = 1; i < kParts; ++i) widest = max_part(widest, a.part[i]);
    float m = widest[0];
    for (int i = 1; i < kWidth; ++i) m = widest[i] > m ? widest[i] : m;
    return m;
#endif
}

// Sum over the lanes in a fixed order (halves, then quarters, …).
TERCET_INLINE float horizontal_sum(const F16& a) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256 eight = (__m256)(a.part[0] + a.part[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float lanes[16];
    std::memcpy(lanes, &a, sizeof lanes);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
#endif
}

// Coefficients of 2^f on [-0.5, 0.5], minimax in the relative error with constant term 1, so that 2^0 is exactly 1:
// degree 5 errs by 9e-8, degree 4 by 3e-6 (enough where the result is rounded to bfloat16).
template <int kDegree>
TERCET_INLINE vf exp2_polynomial(vf f) {
    static_assert(kDegree == 4 || kDegree == 5);
    vf p;
    if constexpr (kDegree == 5) {
        p = splat(0.001326472731307149f);
        p = fma_part(p, f, splat(0.009671512991189957f));
        p = fma_part(p, f, splat(0.05550733581185341f));
        p = fma_part(p, f, splat(0.24022242426872253f));
        p = fma_part(p, f, splat(0.6931470036506653f));
    } else {
        p = splat(0.009582852944731712f);
        p = fma_part(p, f, splat(0.055906426161527634f));
        p = fma_part(p, f, splat(0.24024099111557007f));
        p = fma_part(p, f, splat(0.6931241750717163f));
    }
    return fma_part(p, f, splat(1.0f));
}

// 2^x for x <= 126; 0 below -126 (so also for minus infinity); not-a-number stays so.
template <int kDegree>
TERCET_INLINE vf exp2_part(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which then lies in the low bits
    const vf shifted = x + magic;
    const vf n = shifted - magic;
    const vf power = (vf)(((vu)shifted << 23) + (vu)splat_int(0x3f800000));  // it wraps around where 0 is returned
    const vf value = exp2_polynomial<kDegree>(x - n) * power;
    return x < splat(-126.0f) ? vf{} : value;
}

template <int kDegree>
TERCET_INLINE F16 exp2_16(const F16& x) {
    F16 r;
    TERCET_EACH r.part[i] = exp2_part<kDegree>(x.part[i]);
    return r;
}

TERCET_INLINE float exp2_scalar(float x) { return exp2_part<5>(splat(x))[0]; }

// bfloat16 with round to nearest even; not-a-number becomes a quiet one.
TERCET_INLINE std::uint16_t to_bf16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TERCET_INLINE float from_bf16(std::uint16_t x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
    float r;
    std::memcpy(&r, &bits, 4);
    return r;
}

// Sixteen floats rounded to bfloat16 (nearest even).
TERCET_INLINE void store16_bf16(void* p, const F16& a) {
#if defined(__AVX512BF16__)
    const __m256bh packed = _mm512_cvtneps_pbh((__m512)a.part[0]);
    std::memcpy(p, &packed, 32);
#else
    typedef std::uint16_t vh __attribute__((vector_size(kWidth * 2)));
    TERCET_EACH {
        const vu bits = (vu)a.part[i];
        const vu rounded = (bits + splat_bits(0x7fffu) + ((bits >> 16) & splat_bits(1u))) >> 16;
        const vu quiet = bits >> 16 | splat_bits(0x40u);
        const vh half = __builtin_convertvector(a.part[i] == a.part[i] ? rounded : quiet, vh);
        std::memcpy(static_cast<char*>(p) + sizeof half * i, &half, sizeof half);
    }
#endif
}

}  // namespace
}  // namespace tercet
