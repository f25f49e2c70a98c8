// `bench --ladder` and `bench --kernels`: the kernels by themselves, beside what the GPU's memory allows.
#pragma once

#include "common/cli.h"

namespace stage8 {

// Adds the two to the command `bench`. Without a GPU, or without kernels in this build, they say so and fail.
void add_kernel_bench(CLI::App& bench);

}  // namespace
