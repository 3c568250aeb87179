// Noise, masses and candidates of a row; see draw_types.hpp for what each does. Include only from files compiled for one instruction
// set.
#pragma once

#include "draw_types.hpp"
#include "vec16.hpp"

namespace tercet {
namespace {

typedef double vd __attribute__((vector_size(kWidth * 8)));

TERCET_INLINE vu splat_word(std::uint32_t x) { return x - vu{}; }

// "lowbias32"; see sampling/noise.py.
TERCET_INLINE vu mix_words(vu x) {
    x ^= x >> 16;
    x *= splat_word(0x7FEB352Du);
    x ^= x >> 15;
    x *= splat_word(0x846CA68Bu);
    x ^= x >> 16;
    return x;
}

// Natural logarithm of a normal number above 0, with a relative error below 1e-7, also next to 1.
TERCET_INLINE vf log_part(vf x) {
    // x = 2^e * (1 + f) with 1 + f from sqrt(1/2) to sqrt(2); the polynomial is minimax in the relative error of the whole.
    constexpr std::int32_t kHalfRoot = 0x3f3504f3;
    const vi shifted = (vi)x - splat_int(kHalfRoot);
    const vf exponent = __builtin_convertvector(shifted >> 23, vf);
    const vf f = (vf)((shifted & splat_int(0x007fffff)) + splat_int(kHalfRoot)) - splat(1.0f);
    vf p = splat(-0.0763448178768158f);
    p = fma_part(p, f, splat(0.12761570513248444f));
    p = fma_part(p, f, splat(-0.13160185515880585f));
    p = fma_part(p, f, splat(0.14201758801937103f));
    p = fma_part(p, f, splat(-0.16623356938362122f));
    p = fma_part(p, f, splat(0.20001226663589478f));
    p = fma_part(p, f, splat(-0.2500081956386566f));
    p = fma_part(p, f, splat(0.3333333134651184f));
    p = fma_part(p, f, splat(-0.5f));
    const vf fraction = fma_part(p, f * f, f);
    // ln 2 in two parts, of which the first times any exponent is exact.
    return fma_part(exponent, splat(0.693359375f), fma_part(exponent, splat(-2.12194440e-4f), fraction));
}

// Standard Gumbel noise for token ids.
TERCET_INLINE vf gumbel_part(vu ids, const DrawKeys& keys) {
    const vu h = mix_words(mix_words(ids ^ splat_word(keys.a)) ^ splat_word(keys.b));
    const vf u = (__builtin_convertvector((vi)(h >> 9), vf) + splat(0.5f)) * splat(0x1p-23f);
    return -log_part(-log_part(u));
}

TERCET_INLINE vf exp_part(vf x) { return exp2_part<5>(x * splat(1.44269504088896340736f)); }

TERCET_INLINE vf scaled_part(const DrawRow& row, const float* logits) {
    vf x;
    std::memcpy(&x, logits, sizeof x);
    return (x - splat(row.highest)) / splat(row.temperature);
}

// Logits [at, at + kWidth) of the row, those from `end` on as minus infinity.
TERCET_INLINE vf scaled_tail(const DrawRow& row, std::int32_t at, std::int32_t end) {
    float lanes[kWidth];
    for (int i = 0; i < kWidth; ++i) lanes[i] = at + i < end ? row.logits[at + i] : kNegInf;
    return scaled_part(row, lanes);
}

TERCET_INLINE double sum_lanes(const vd& sums) {
    double sum = 0.0;
    for (int i = 0; i < kWidth; ++i) sum += sums[i];
    return sum;
}

TERCET_INLINE Candidate candidate_of(float scaled, std::int32_t id) {
    std::int32_t bits;
    std::memcpy(&bits, &scaled, 4);
    bits ^= (bits >> 31) & 0x7fffffff;  // in the order of the numbers, as an integer
    const std::uint32_t order = static_cast<std::uint32_t>(bits) ^ 0x80000000u;
    return static_cast<Candidate>(order) << 32 | ~static_cast<std::uint32_t>(id);
}

TERCET_INLINE std::int32_t id_of(Candidate candidate) {
    return static_cast<std::int32_t>(~static_cast<std::uint32_t>(candidate));
}

TERCET_INLINE float scaled_of(Candidate candidate) {
    std::int32_t bits = static_cast<std::int32_t>(static_cast<std::uint32_t>(candidate >> 32) ^ 0x80000000u);
    bits ^= (bits >> 31) & 0x7fffffff;
    float scaled;
    std::memcpy(&scaled, &bits, 4);
    return scaled;
}

static void draw_part(const DrawRow& row, std::int32_t begin, std::int32_t end, BestDraw* best) {
    vf highest = splat(kNegInf);
    vi places = splat_int(begin);
    vi lane;
    for (int i = 0; i < kWidth; ++i) lane[i] = i;
    for (std::int32_t at = begin; at < end; at += kWidth) {
        const vi ids = lane + splat_int(at);
        const vf scaled = at + kWidth <= end ? scaled_part(row, row.logits + at) : scaled_tail(row, at, end);
        const vf score = scaled + gumbel_part((vu)ids, row.keys);
        const vi better = (score > highest) & (scaled >= splat(row.log_min_p));
        highest = better ? score : highest;
        places = better ? ids : places;
    }
    for (int i = 0; i < kWidth; ++i) {
        const auto place = static_cast<std::uint64_t>(places[i]);
        if (highest[i] > best->score || (highest[i] == best->score && place < best->token)) {
            best->score = highest[i];
            best->token = place;
        }
    }
}

static double mass(const DrawRow& row, std::int32_t size) {
    vd sums{};
    std::int32_t at = 0;
    for (; at + kWidth <= size; at += kWidth) {
        sums += __builtin_convertvector(exp_part(scaled_part(row, row.logits + at)), vd);
    }
    if (at < size) sums += __builtin_convertvector(exp_part(scaled_tail(row, at, size)), vd);
    return sum_lanes(sums);
}

static std::int64_t collect(const DrawRow& row, std::int32_t size, float least, Candidate* candidates) {
    std::int64_t count = 0;
    for (std::int32_t at = 0; at < size; at += kWidth) {
        const vf scaled = at + kWidth <= size ? scaled_part(row, row.logits + at) : scaled_tail(row, at, size);
        const vi in = scaled >= splat(least);
        std::int32_t any = 0;
        for (int i = 0; i < kWidth; ++i) any |= in[i];
        if (any == 0) continue;
        const std::int32_t width = size - at < kWidth ? size - at : kWidth;
        for (std::int32_t i = 0; i < width; ++i) {
            candidates[count] = candidate_of(scaled[i], at + i);
            count += in[i] & 1;
        }
    }
    return count;
}

static double mass_of(const Candidate* candidates, std::int64_t count) {
    vd sums{};
    for (std::int64_t at = 0; at < count; at += kWidth) {
        float lanes[kWidth];
        for (int i = 0; i < kWidth; ++i) lanes[i] = at + i < count ? scaled_of(candidates[at + i]) : kNegInf;
        vf scaled;
        std::memcpy(&scaled, lanes, sizeof scaled);
        sums += __builtin_convertvector(exp_part(scaled), vd);
    }
    return sum_lanes(sums);
}

static void draw_of(const DrawRow& row, const Candidate* candidates, std::int64_t count, BestDraw* best) {
    for (std::int64_t at = 0; at < count; at += kWidth) {
        const int width = count - at < kWidth ? static_cast<int>(count - at) : kWidth;
        float lanes[kWidth];
        std::uint32_t ids[kWidth];
        for (int i = 0; i < kWidth; ++i) {
            const Candidate candidate = candidates[i < width ? at + i : at];
            lanes[i] = scaled_of(candidate);
            ids[i] = static_cast<std::uint32_t>(id_of(candidate));
        }
        vf scaled;
        vu words;
        std::memcpy(&scaled, lanes, sizeof scaled);
        std::memcpy(&words, ids, sizeof words);
        const vf score = scaled + gumbel_part(words, row.keys);
        for (int i = 0; i < width; ++i) {
            if (!(lanes[i] >= row.log_min_p)) continue;
            if (score[i] > best->score || (score[i] == best->score && candidates[at + i] > best->token)) {
                best->score = score[i];
                best->token = candidates[at + i];
            }
        }
    }
}

}  // namespace
}  // namespace tercet
