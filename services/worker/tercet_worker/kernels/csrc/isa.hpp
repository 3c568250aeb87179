// Instruction sets for which kernels are compiled, and what the running processor offers.
//
// Files named *_<isa>.cpp are compiled with that instruction set's flags (kernels/toolchain.py). Two rules keep their code from
// running where it must not: everything in them and in the headers they instantiate has internal linkage, and they use no
// standard-library templates (the linker merges those across files, and may keep the copy compiled for the newest processor).
#pragma once

#include <cstdint>

namespace tercet {

enum class Isa : std::int32_t { generic = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3, amx = 4 };

// True when this library contains kernels for `isa` and the processor and operating system can run them.
bool isa_available(Isa isa);

// The best available instruction set.
Isa isa_best();

}  // namespace tercet
