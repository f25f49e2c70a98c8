// Runs the Llama forward pass on the GPU once, with attention computed on the host: nothing here depends on a stage.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "common/cuda/model/cuda_llama.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "common/model/llama.h"

namespace tests {

using common::CudaAttentionCall;
using common::CudaAttentionFn;
using common::CudaLlama;
using common::DeviceArray;
using common::LlamaConfig;
using common::Matrix;
using common::Precision;

inline std::vector<int> random_numbers(common::Random& random, int count, int below) {
  std::vector<int> numbers(static_cast<std::size_t>(count));
  std::generate(numbers.begin(), numbers.end(),
                [&] { return static_cast<int>(random.below(static_cast<std::uint64_t>(below))); });
  return numbers;
}

inline Matrix download_rows(const void* source, Eigen::Index rows, Eigen::Index cols, std::int64_t row_stride,
                            Precision precision) {
  const auto size = static_cast<std::size_t>(common::bytes_of(precision));
  const std::size_t row_bytes = static_cast<std::size_t>(cols) * size;
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows) * row_bytes);
  CUDA_CHECK(cudaMemcpy2D(bytes.data(), row_bytes, source, static_cast<std::size_t>(row_stride) * size, row_bytes,
                          static_cast<std::size_t>(rows), cudaMemcpyDeviceToHost));
  Matrix matrix(rows, cols);
  for (Eigen::Index i = 0; i < matrix.size(); ++i) {
    if (precision == Precision::kFloat32) {
      std::memcpy(matrix.data() + i, &bytes[static_cast<std::size_t>(i) * size], size);
    } else {
      __nv_bfloat16 value;
      std::memcpy(&value, &bytes[static_cast<std::size_t>(i) * size], size);
      matrix.data()[i] = __bfloat162float(value);
    }
  }
  return matrix;
}

inline void upload_matrix(const Matrix& matrix, void* destination, Precision precision) {
  const auto size = static_cast<std::size_t>(common::bytes_of(precision));
  std::vector<std::byte> bytes(static_cast<std::size_t>(matrix.size()) * size);
  for (Eigen::Index i = 0; i < matrix.size(); ++i) {
    const __nv_bfloat16 rounded = __float2bfloat16_rn(matrix.data()[i]);
    std::memcpy(&bytes[static_cast<std::size_t>(i) * size],
                precision == Precision::kFloat32 ? static_cast<const void*>(matrix.data() + i) : &rounded, size);
  }
  CUDA_CHECK(cudaMemcpy(destination, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaDeviceSynchronize());  // the model's stream does not wait for the last bytes
}

inline CudaAttentionFn on_host(const CudaLlama& model, const common::AttentionFn& attention) {
  return [&model, attention](const CudaAttentionCall& call) {
    CUDA_CHECK(cudaStreamSynchronize(call.stream));
    const LlamaConfig& config = model.config();
    const Eigen::Index q_cols = Eigen::Index{config.num_heads} * config.head_dim;
    const Eigen::Index kv_cols = Eigen::Index{config.num_kv_heads} * config.head_dim;
    const auto rows = [&](const void* source, Eigen::Index cols, std::int64_t stride) {
      return download_rows(source, call.num_tokens, cols, stride, model.precision());
    };
    upload_matrix(attention(call.layer, rows(call.q, q_cols, q_cols), rows(call.k, kv_cols, call.kv_row_stride),
                            rows(call.v, kv_cols, call.kv_row_stride)),
                  call.output, model.precision());
  };
}

// Copies q. May be captured in a graph.
inline void copy_queries(const CudaAttentionCall& call, const CudaLlama& model) {
  const int columns = model.config().num_heads * model.config().head_dim;
  const auto bytes = static_cast<std::size_t>(call.num_tokens) *
                     static_cast<std::size_t>(columns * common::bytes_of(model.precision()));
  CUDA_CHECK(cudaMemcpyAsync(call.output, call.q, bytes, cudaMemcpyDeviceToDevice, call.stream));
}

// Logits of all tokens, or of the given rows of the forward pass. Their memory is poisoned before.
inline Matrix gpu_logits(CudaLlama& model, std::span<const int> tokens, std::span<const int> positions,
                         const CudaAttentionFn& attention, std::vector<int> rows = {}) {
  const common::Stream stream;
  const DeviceArray<int> device_tokens{tokens};
  const DeviceArray<int> device_positions{positions};
  if (rows.empty()) {
    rows.resize(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
  }
  const DeviceArray<int> device_rows(rows);
  Matrix logits(static_cast<Eigen::Index>(rows.size()), model.config().vocab_size);
  const DeviceArray<float> device_logits(static_cast<std::size_t>(logits.size()));
  CUDA_CHECK(cudaMemset(device_logits.data(), 0xFF, device_logits.size() * sizeof(float)));
  CUDA_CHECK(cudaDeviceSynchronize());
  model.forward(device_tokens.data(), device_positions.data(), static_cast<int>(tokens.size()), attention,
                stream.get());
  model.logits(device_rows.data(), static_cast<int>(rows.size()), device_logits.data(), stream.get());
  const std::vector<float> values = device_logits.download();
  std::copy(values.begin(), values.end(), logits.data());
  return logits;
}

}  // namespace tests
