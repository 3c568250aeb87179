#include "attention_kernel.hpp"

namespace tercet {

const AttentionKernels* attention_kernels_amx(Dtype dtype) { return attention_kernels(dtype); }

}  // namespace tercet
