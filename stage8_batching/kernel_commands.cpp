#include "kernel_commands.h"

#include <iostream>
#include <memory>
#include <string>

#include "common/check.h"
#ifdef COURSE_CUDA
#include "bench/kernel_bench.h"
#include "common/cuda/device.h"
#endif

namespace stage8 {
namespace {

void require_gpu() {
#ifdef COURSE_CUDA
  if (!common::has_cuda_device()) {
    throw common::InputError("there is no GPU here to measure");
  }
#else
  throw common::InputError("the kernels are not built in: there was no nvcc");
#endif
}

}  // namespace

void add_kernel_bench(CLI::App& bench) {
  const auto cell = std::make_shared<std::string>();
  bench.add_option("--cell", *cell, "for --ladder and --kernels: this batch and context only, as 8x1024")
      ->each([cell](const std::string&) {});  // keeps the string as long as the option
  // CLI::Success ends the command: nothing else is measured then.
  bench.add_flag_callback(
      "--ladder",
      [cell] {
        require_gpu();
#ifdef COURSE_CUDA
        print_ladder(std::cout, {*cell});
#endif
        throw CLI::Success();
      },
      "the decode kernels of ladder/, from naive to the one in use");
  bench
      .add_option_function<std::string>(
          "--kernels",
          [cell]([[maybe_unused]] const std::string& which) {
            require_gpu();
#ifdef COURSE_CUDA
            print_kernel_speed(which, std::cout, {*cell});
#endif
            throw CLI::Success();
          },
          "the kernels in use: decode, ragged, cache or all")
      ->check(CLI::IsMember({"decode", "ragged", "cache", "all"}));
}

}  // namespace
