// Dense bfloat16 weights in three quarters of their bytes, to the bit. Plain data only (see isa.hpp).
//
// Signs and exponents of a matrix say little: the upper byte of a weight (its sign and all but one bit of the exponent) is one of
// sixteen, for all but some in ten thousand weights. So a weight is its lower byte, and four bits that say which of the sixteen.
// The others are exceptions: whatever their four bits say, their upper byte stands in a list.
//
// Groups of four panels come one after another, as with dense weights (linear_types.hpp); the last is filled up with zeros. A step of
// a group is 192 bytes: lower bytes of its first two panels, lower bytes of the other two, and the four bits of all, those of the
// first two in the lower halves. Within each 64 bytes, byte 16 i + j belongs to word 8 i + j of the even panel, and byte
// 16 i + 8 + j to that word of the odd one: so two registers of bytes unpack into the lines of two panels. K is even.
#pragma once

#include <cstdint>

namespace tercet {

constexpr int kCompactBytes = 192;   // of a step of a group
constexpr int kUpperBytes = 16;      // of a matrix
constexpr int kExpandedBytes = 256;  // of the lines of a step

struct CompactException {
    std::uint16_t step;  // ascending within a group; the last of every group is kNoStep
    std::uint8_t place;  // 32 * panel of the group + word of its line
    std::uint8_t upper;
};

constexpr std::uint16_t kNoStep = 0xffff;  // K is below twice that

// What a compact matrix begins with. Offsets are bytes from here.
struct alignas(64) CompactHeader {
    std::uint8_t upper[kUpperBytes];
    std::int64_t lines;       // [groups][steps] of kCompactBytes
    std::int64_t firsts;      // [groups] int32: the group's first exception
    std::int64_t exceptions;  // CompactException
};

struct CompactGroup {
    const char* lines;
    const CompactException* exceptions;
};

static inline CompactGroup compact_group(const char* weights, std::int32_t in_features, int group) {
    const auto& header = *reinterpret_cast<const CompactHeader*>(weights);
    const std::int32_t first = reinterpret_cast<const std::int32_t*>(weights + header.firsts)[group];
    return {weights + header.lines + static_cast<std::int64_t>(group) * (in_features / 2) * kCompactBytes,
            reinterpret_cast<const CompactException*>(weights + header.exceptions) + first};
}

// The byte of a pair of panels in which word `word` of its even or odd panel lies.
static constexpr int compact_byte(int word, int odd) { return word / 8 * 16 + 8 * odd + word % 8; }

}  // namespace tercet
