// Marks functions for both host and device, in headers that need no CUDA toolkit.
#pragma once

#ifdef __CUDACC__
#define COURSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define COURSE_HOST_DEVICE inline
#endif
