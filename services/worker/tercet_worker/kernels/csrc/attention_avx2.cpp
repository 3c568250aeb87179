#include "attention_kernel.hpp"

namespace tercet {

const AttentionKernels* attention_kernels_avx2(Dtype dtype) { return attention_kernels(dtype); }

}  // namespace tercet
