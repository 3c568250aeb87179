#include "isa.hpp"

namespace tercet {

bool isa_available(Isa isa) {
    switch (isa) {
        case Isa::generic:
            return true;
#if defined(TERCET_HAVE_AVX2)
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(TERCET_HAVE_AVX512)
        case Isa::avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
#if defined(TERCET_HAVE_AVX512BF16) && defined(TERCET_HAVE_AVX512)
        case Isa::avx512bf16:
            return isa_available(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
#endif
        default:
            return false;
    }
}

Isa isa_best() {
    constexpr Isa kFromBest[] = {Isa::avx512bf16, Isa::avx512, Isa::avx2};
    for (const Isa isa : kFromBest) {
        if (isa_available(isa)) return isa;
    }
    return Isa::generic;
}

}  // namespace tercet

extern "C" {

// Version of this C interface; raised when a signature or a struct changes.
std::int32_t tercet_abi_version() { return 2; }

std::int32_t tercet_isa_best() { return static_cast<std::int32_t>(tercet::isa_best()); }

std::int32_t tercet_isa_available(std::int32_t isa) {
    return tercet::isa_available(static_cast<tercet::Isa>(isa)) ? 1 : 0;
}
}
