// Matrix products for many tokens, by cuBLASLt, with sums in float32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "common/cuda/precision.h"

namespace common {

// output = x * weights^T, or output += x * weights^T. All matrices are row-major and in device memory.
struct MatrixProduct {
  const void* x = nullptr;        // [num_tokens, num_cols], in the model's precision
  const void* weights = nullptr;  // [num_rows, num_cols], in the model's precision
  // x and weights are float8 (e4m3), and rows of both are multiples of 16 long. Their scales are left to what uses the
  // output: the library has one slow kernel that applies a scale for each row. See float8_obstacle().
  bool is_float8 = false;
  int num_tokens = 0;
  int num_rows = 0;
  int num_cols = 0;
  void* output = nullptr;     // [num_tokens, num_rows]
  bool float_output = false;  // output is float32 in either precision
  bool add = false;           // needs float_output
};

// Why the library multiplies no float8 by float8 on this GPU; empty if it does.
std::string float8_obstacle();

class MatrixProducts {
 public:
  explicit MatrixProducts(Precision precision);
  ~MatrixProducts();
  MatrixProducts(MatrixProducts&&) noexcept;
  MatrixProducts& operator=(MatrixProducts&&) noexcept;

  // Enqueues the product; may be captured in a CUDA graph. All products share one workspace, so only one stream at a
  // time may use this object. Throws CudaError.
  void multiply(const MatrixProduct& product, cudaStream_t stream);

  // The library has to choose an algorithm once for each shape of a product, and to load each algorithm's kernel, which
  // takes milliseconds: in its first multiply, or beforehand in this. Enqueues the product if its algorithm has not
  // been prepared yet, unless `output` is null.
  void prepare(const MatrixProduct& product, cudaStream_t stream);
  // Numbers of tokens above 1,024 share the algorithm of the next multiple of 64, so that few have to be prepared.
  // Returns the next number after this one that has an algorithm of its own.
  static int next_size(int num_tokens);
  std::size_t num_prepared() const;  // shapes that have an algorithm

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
