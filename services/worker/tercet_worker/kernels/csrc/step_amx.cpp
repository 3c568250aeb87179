#include "step_kernel.hpp"

namespace tercet {

const StepKernels* step_kernels_amx(Dtype dtype) { return step_kernels(dtype); }

}  // namespace tercet
