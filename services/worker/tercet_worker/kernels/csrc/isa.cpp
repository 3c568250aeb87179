#include "isa.hpp"

#if defined(TERCET_HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tercet {
namespace {

#if defined(TERCET_HAVE_AMX)
// Whether the processor has tiles and bfloat16 products on them, and the operating system gives this process their state.
bool amx_granted() {
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    constexpr unsigned int kBf16 = 1u << 22, kTile = 1u << 24;
    if ((edx & kBf16) == 0 || (edx & kTile) == 0) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

bool isa_available(Isa isa) {
    switch (isa) {
        case Isa::generic:
            return true;
#if defined(TERCET_HAVE_AVX2)
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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
#if defined(TERCET_HAVE_AMX) && defined(TERCET_HAVE_AVX512BF16) && defined(TERCET_HAVE_AVX512)
        case Isa::amx: {
            static const bool granted = amx_granted();
            return isa_available(Isa::avx512bf16) && granted;
        }
#endif
        default:
            return false;
    }
}

Isa isa_best() {
    constexpr Isa kFromBest[] = {Isa::amx, Isa::avx512bf16, Isa::avx512, Isa::avx2};
    for (const Isa isa : kFromBest) {
        if (isa_available(isa)) return isa;
    }
    return Isa::generic;
}

}  // namespace tercet

extern "C" {

// Version of this C interface; raised when a signature or a struct changes.
std::int32_t tercet_abi_version() { return 9; }

std::int32_t tercet_isa_best() { return static_cast<std::int32_t>(tercet::isa_best()); }

std::int32_t tercet_isa_available(std::int32_t isa) {
    return tercet::isa_available(static_cast<tercet::Isa>(isa)) ? 1 : 0;
}
}
