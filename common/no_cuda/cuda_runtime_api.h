// As much of CUDA's header as kernels.h needs, so that what is no kernel can be compiled without the toolkit.
#pragma once

using cudaStream_t = struct CUstream_st*;  // NOLINT(readability-identifier-naming): CUDA's name
