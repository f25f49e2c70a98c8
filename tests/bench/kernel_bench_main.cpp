// build/kernel_bench: the kernels by themselves, beside what the GPU's memory allows.
#include <CLI/CLI.hpp>
#include <iostream>
#include <string>

#include "common/base/check.h"
#include "tests/bench/kernel_bench.h"

int main(int argc, char** argv) {
  CLI::App app("Measures the kernels of stages 7 and 8 on this machine's GPU.", "kernel_bench");
  std::string which;
  app.add_option("kernels", which,
                 "decode, ragged, cache, chunks (after a cached prefix), mixed (decodes beside a chunk), shared "
                 "(prefixes of decodes), windows (of a model's layers), float8 "
                 "(beside bfloat16), sampling (of tokens), products (of a layer), ladder (from naive to the one in "
                 "use), or all of the first three")
      ->required()
      ->check(CLI::IsMember({"decode", "ragged", "cache", "chunks", "mixed", "shared", "windows", "float8", "sampling",
                             "products", "ladder", "all"}));
  stage7::KernelBenchOptions options;
  app.add_option("--cell", options.cell, "for decode and ladder: this batch and context only, as 8x1024");
  CLI11_PARSE(app, argc, argv);
  try {
    if (which == "ladder") {
      stage7::print_ladder(std::cout, options);
    } else {
      stage7::print_kernel_speed(which, std::cout, options);
    }
    return 0;
  } catch (const common::InputError& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
