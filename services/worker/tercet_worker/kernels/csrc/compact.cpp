// Makes dense bfloat16 weights compact; see compact_types.hpp.
#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#include "compact_types.hpp"
#include "linear_types.hpp"

namespace tercet {
namespace {

// More exceptions than one in so many weights cost more time than the bytes save.
constexpr std::int64_t kWeightsPerException = 1024;

constexpr int kWords = kLineBytes / 2;  // of a line

// The groups of a dense matrix: each is [step][panel][word], of the upper bytes and the lower ones.
struct DenseGroups {
    const char* weights;
    std::int32_t steps;
    std::int32_t panels;

    std::int32_t count() const { return (panels + kGroupPanels - 1) / kGroupPanels; }
    std::int32_t panels_of(std::int32_t group) const { return std::min(kGroupPanels, panels - group * kGroupPanels); }
    std::size_t bytes_of(std::int32_t group) const {
        return static_cast<std::size_t>(panels_of(group)) * static_cast<std::size_t>(steps) * kLineBytes;
    }
    const char* at(std::int32_t group) const {
        return weights + static_cast<std::int64_t>(group) * steps * kGroupPanels * kLineBytes;
    }
};

std::int64_t aligned(std::int64_t size) { return (size + kLineBytes - 1) / kLineBytes * kLineBytes; }

std::int64_t compact(const DenseGroups& dense, char* out) {
    const std::int64_t words = static_cast<std::int64_t>(dense.panels) * dense.steps * kWords;
    std::vector<std::int64_t> counts(256);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(dense.weights);
    for (std::int64_t i = 0; i < words; ++i) ++counts[bytes[2 * i + 1]];
    std::vector<std::uint8_t> order(256);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::uint8_t a, std::uint8_t b) { return counts[a] > counts[b]; });
    std::int64_t exceptions = words;
    for (int i = 0; i < kUpperBytes; ++i) exceptions -= counts[order[static_cast<std::size_t>(i)]];
    const std::int32_t groups = dense.count();
    CompactHeader header{};
    header.lines = sizeof header;
    header.firsts = header.lines + static_cast<std::int64_t>(groups) * dense.steps * kCompactBytes;
    header.exceptions = aligned(header.firsts + static_cast<std::int64_t>(groups) * 4);
    const std::int64_t size = header.exceptions + (exceptions + groups) * static_cast<std::int64_t>(sizeof(CompactException));
    if (exceptions > words / kWeightsPerException || size > 2 * words || dense.steps >= kNoStep) return 0;

    std::uint8_t codes[256];
    std::fill_n(codes, 256, kUpperBytes);
    std::copy_n(order.begin(), kUpperBytes, header.upper);
    for (int i = 0; i < kUpperBytes; ++i) codes[header.upper[i]] = static_cast<std::uint8_t>(i);
    // What is not there counts as zero.
    const std::uint8_t nothing = codes[0] < kUpperBytes ? codes[0] : 0;
    std::vector<std::int32_t> firsts(static_cast<std::size_t>(groups));
    std::vector<CompactException> list;
    list.reserve(static_cast<std::size_t>(exceptions + groups));
    std::vector<std::uint8_t> group_bytes;
    for (std::int32_t group = 0; group < groups; ++group) {
        // Copied first: `out` may lie where the matrix does, and what is written ends before what is still to be read.
        const auto* from = reinterpret_cast<const std::uint8_t*>(dense.at(group));
        group_bytes.assign(from, from + dense.bytes_of(group));
        firsts[static_cast<std::size_t>(group)] = static_cast<std::int32_t>(list.size());
        const std::int32_t panels = dense.panels_of(group);
        const std::uint8_t* word = group_bytes.data();
        char* to = out + header.lines + static_cast<std::int64_t>(group) * dense.steps * kCompactBytes;
        for (std::int32_t step = 0; step < dense.steps; ++step, to += kCompactBytes) {
            std::uint8_t lower[2][kLineBytes] = {};
            std::uint8_t upper[2][kLineBytes];
            std::memset(upper, nothing, sizeof upper);
            for (std::int32_t panel = 0; panel < panels; ++panel) {
                for (int i = 0; i < kWords; ++i, word += 2) {
                    const int at = compact_byte(i, panel % 2);
                    lower[panel / 2][at] = word[0];
                    std::uint8_t code = codes[word[1]];
                    if (code == kUpperBytes) {
                        list.push_back({static_cast<std::uint16_t>(step), static_cast<std::uint8_t>(kWords * panel + i), word[1]});
                        code = 0;
                    }
                    upper[panel / 2][at] = code;
                }
            }
            std::memcpy(to, lower, sizeof lower);
            for (int i = 0; i < kLineBytes; ++i) to[2 * kLineBytes + i] = static_cast<char>(upper[0][i] | upper[1][i] << 4);
        }
        list.push_back({kNoStep, 0, 0});
    }
    std::memcpy(out, &header, sizeof header);
    std::memcpy(out + header.firsts, firsts.data(), firsts.size() * 4);
    std::memcpy(out + header.exceptions, list.data(), list.size() * sizeof(CompactException));
    return size;
}

}  // namespace
}  // namespace tercet

extern "C" {

// Whether the kernels of this instruction set, which is available, read compact weights.
bool tercet_weights_compacts(std::int32_t isa) {
    return tercet::step_kernels(static_cast<tercet::Isa>(isa), tercet::Dtype::bfloat16)->linear_compact != nullptr;
}

// Makes a packed dense bfloat16 matrix compact. `out` is aligned to 64 bytes, and is where the matrix lies, or anywhere before that.
// Returns the bytes that were written, no more than the matrix has; or 0, with nothing touched, where the matrix stays as it is: too
// many exceptions, an odd K, few panels. Returns -1 where there is no memory.
std::int64_t tercet_weights_compact(const void* dense, std::int32_t in_features, std::int32_t panels, void* out) {
    if (in_features % 2 != 0) return 0;
    try {
        return tercet::compact({static_cast<const char*>(dense), in_features / 2, panels}, static_cast<char*>(out));
    } catch (const std::bad_alloc&) {
        return -1;
    }
}
}
