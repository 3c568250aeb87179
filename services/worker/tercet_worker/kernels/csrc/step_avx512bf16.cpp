#include "step_kernel.hpp"

namespace tercet {

const StepKernels* step_kernels_avx512bf16(Dtype dtype) { return step_kernels(dtype); }

}  // namespace tercet
