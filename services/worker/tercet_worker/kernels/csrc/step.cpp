// The choice of kernels by instruction set, and those of them that are called by themselves.
#include <omp.h>

#include "isa.hpp"
#include "linear_types.hpp"

namespace tercet {

const StepKernels* step_kernels(Isa isa, Dtype dtype) {
    switch (isa) {
#if defined(TERCET_HAVE_AMX) && defined(TERCET_HAVE_AVX512BF16) && defined(TERCET_HAVE_AVX512)
        case Isa::amx:
            return step_kernels_amx(dtype);
#endif
#if defined(TERCET_HAVE_AVX512BF16) && defined(TERCET_HAVE_AVX512)
        case Isa::avx512bf16:
            return step_kernels_avx512bf16(dtype);
#endif
#if defined(TERCET_HAVE_AVX512)
        case Isa::avx512:
            return step_kernels_avx512(dtype);
#endif
#if defined(TERCET_HAVE_AVX2)
        case Isa::avx2:
            return step_kernels_avx2(dtype);
#endif
        default:
            return step_kernels_generic(dtype);
    }
}

}  // namespace tercet

using tercet::Dtype;
using tercet::Isa;

extern "C" {

// Packs rows of a weight; see StepKernels::pack. The processor's instruction set does not matter for it.
void tercet_weights_pack(std::int32_t dtype, void* weights, std::int32_t in_features, std::int32_t panels, std::int32_t base,
                         std::int32_t pitch, std::int32_t first, std::int32_t rows, const void* source) {
    tercet::step_kernels(Isa::generic, static_cast<Dtype>(dtype))
        ->pack(static_cast<char*>(weights), in_features, panels, base, pitch, first, rows, static_cast<const char*>(source));
}

// Packs quantized rows of a weight; see StepKernels::pack_quant. `format` is one of tercet::WeightFormat, not dense.
void tercet_weights_pack_quant(std::int32_t format, void* weights, std::int32_t in_features, std::int32_t panels, std::int32_t base,
                               std::int32_t pitch, std::int32_t first, std::int32_t rows, const void* q, const void* scales,
                               const void* minima) {
    tercet::step_kernels(Isa::generic, Dtype::bfloat16)
        ->pack_quant(static_cast<tercet::WeightFormat>(format), static_cast<char*>(weights), in_features, panels, base, pitch, first,
                     rows, tercet::QuantRows{static_cast<const std::uint8_t*>(q), scales, minima});
}

// Scans rows of logits; see StepKernels::scan. `isa` is available.
void tercet_logits_scan(std::int32_t isa, std::int32_t threads, const float* logits, std::int32_t rows, std::int32_t size,
                        float* highest, std::int64_t* places, bool* finite) {
    constexpr std::int32_t kSerialRows = 4;  // fewer take less time than waking a thread
    const auto* kernels = tercet::step_kernels(static_cast<Isa>(isa), Dtype::float32);
#pragma omp parallel for num_threads(threads) if (rows > kSerialRows)
    for (std::int32_t row = 0; row < rows; ++row) {
        kernels->scan(logits + static_cast<std::int64_t>(row) * size, size, highest + row, places + row, finite + row);
    }
}
}
