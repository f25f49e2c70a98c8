#include "common/cuda/model/matrix_products.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "common/cuda/runtime/device.h"

namespace common {
namespace {

void check_status(cublasStatus_t status, const char* call, int line) {
  if (status == CUBLAS_STATUS_ALLOC_FAILED) {
    throw OutOfDeviceMemory(std::string("the GPU is out of memory: ") + call);
  }
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw CudaError(std::string(__FILE__) + ":" + std::to_string(line) + ": " + call + ": " +
                    cublasLtGetStatusName(status));
  }
}
#define CUBLAS_CHECK(call) check_status((call), #call, __LINE__)

// NVIDIA's recommendation for Hopper; older GPUs need less.
constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

constexpr int kEachSize = 1024;
constexpr int kSizeStep = 64;
int shared_size(int num_tokens) {
  return num_tokens <= kEachSize ? num_tokens : (num_tokens + kSizeStep - 1) / kSizeStep * kSizeStep;
}

// The library's matrices are column-major, so ours are their transposes: it computes
// output^T [num_rows, num_tokens] = weights [num_rows, num_cols] * x^T, with `weights` given transposed.
class Description {
 public:
  Description(const MatrixProduct& product, Precision precision) {
    const cudaDataType_t precise_type = precision == Precision::kFloat32 ? CUDA_R_32F : CUDA_R_16BF;
    const cudaDataType_t type = product.is_float8 ? CUDA_R_8F_E4M3 : precise_type;
    // Pedantic: no environment variable can make it round float32 to fewer bits.
    const cublasComputeType_t compute =
        precision == Precision::kFloat32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&operation_, compute, CUDA_R_32F));
    const auto rows = static_cast<std::uint64_t>(product.num_rows);
    const auto cols = static_cast<std::uint64_t>(product.num_cols);
    const auto tokens = static_cast<std::uint64_t>(product.num_tokens);
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&weights_, type, cols, rows, product.num_cols));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&x_, type, cols, tokens, product.num_cols));
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&output_, product.float_output ? CUDA_R_32F : precise_type, rows, tokens,
                                            product.num_rows));
    if (product.is_float8) {
      // Tensor cores add up float8 in fewer bits than float32 has, so every few columns the library adds their sums to
      // others in float32. Without that, texts change more (FLOAT8.md).
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{0});
    }
  }
  ~Description() {
    (void)cublasLtMatrixLayoutDestroy(output_);
    (void)cublasLtMatrixLayoutDestroy(x_);
    (void)cublasLtMatrixLayoutDestroy(weights_);
    (void)cublasLtMatmulDescDestroy(operation_);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  // The library's first choice. Timing its candidates on weights that are not in the cache, and taking the fastest,
  // makes whole steps 1 to 13 percent slower (H200, Llama-3.2-1B and SmolLM2-135M, 32 and 128 tokens).
  cublasLtMatmulAlgo_t algorithm(cublasLtHandle_t handle) const {
    cublasLtMatmulPreference_t preference = nullptr;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                                 &kWorkspaceBytes, sizeof(kWorkspaceBytes));
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulAlgoGetHeuristic(handle, operation_, weights_, x_, output_, output_, preference, 1,
                                              &result, &found);
    }
    (void)cublasLtMatmulPreferenceDestroy(preference);
    CUBLAS_CHECK(status);
    COMMON_CHECK(found == 1 && result.state == CUBLAS_STATUS_SUCCESS, "the library can multiply these matrices");
    return result.algo;
  }

  // Whether an algorithm that was chosen for another number of tokens is one for this.
  bool takes(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) const {
    cublasLtMatmulHeuristicResult_t result{};
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle, operation_, weights_, x_, output_, output_, &algorithm, &result);
    return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kWorkspaceBytes;
  }

  cublasStatus_t run(cublasLtHandle_t handle, const MatrixProduct& product, const cublasLtMatmulAlgo_t& algorithm,
                     const DeviceMemory& workspace, cudaStream_t stream) const {
    const float one = 1.0F;
    const float beta = product.add ? 1.0F : 0.0F;
    return cublasLtMatmul(handle, operation_, &one, product.weights, weights_, product.x, x_, &beta, product.output,
                          output_, product.output, output_, &algorithm, workspace.data(), workspace.bytes(), stream);
  }

 private:
  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) const {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof(value)));
  }

  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t weights_ = nullptr;
  cublasLtMatrixLayout_t x_ = nullptr;
  cublasLtMatrixLayout_t output_ = nullptr;
};

}  // namespace

struct MatrixProducts::Impl {
  // Kept, because choosing an algorithm takes longer than many products.
  struct Plan {
    Description description;
    cublasLtMatmulAlgo_t algorithm{};

    Plan(const MatrixProduct& product, Precision precision) : description(product, precision) {}
  };
  using Key = std::tuple<int, int, int, bool, bool, bool>;

  Precision precision;
  cublasLtHandle_t handle = nullptr;
  DeviceMemory workspace{kWorkspaceBytes};
  std::map<Key, Plan> plans;
  std::set<std::array<std::uint64_t, std::size(cublasLtMatmulAlgo_t{}.data)>> loaded;  // algorithms

  explicit Impl(Precision model_precision) : precision(model_precision) { CUBLAS_CHECK(cublasLtCreate(&handle)); }
  ~Impl() { (void)cublasLtDestroy(handle); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Plan& plan(const MatrixProduct& product) {
    const Key key{product.num_rows,     product.num_cols, product.num_tokens,
                  product.float_output, product.add,      product.is_float8};
    const auto found = plans.find(key);
    if (found != plans.end()) {
      return found->second;
    }
    Plan& plan = plans.try_emplace(key, product, precision).first->second;
    try {
      MatrixProduct same_algorithm = product;
      same_algorithm.num_tokens = shared_size(product.num_tokens);
      if (same_algorithm.num_tokens != product.num_tokens) {
        plan.algorithm = this->plan(same_algorithm).algorithm;
      }
      if (same_algorithm.num_tokens == product.num_tokens || !plan.description.takes(handle, plan.algorithm)) {
        plan.algorithm = plan.description.algorithm(handle);
      }
    } catch (...) {
      plans.erase(key);
      throw;
    }
    return plan;
  }
};

std::string float8_obstacle() {
  const DeviceLimits& device = device_limits();
  if (device.compute_capability != 90) {
    return "activations in float8 need a GPU of compute capability 9.0 (H100, H200), and " + device.name + " has " +
           std::to_string(device.compute_capability / 10) + "." + std::to_string(device.compute_capability % 10);
  }
  return "";
}

MatrixProducts::MatrixProducts(Precision precision) : impl_(std::make_unique<Impl>(precision)) {}
MatrixProducts::~MatrixProducts() = default;
MatrixProducts::MatrixProducts(MatrixProducts&&) noexcept = default;
MatrixProducts& MatrixProducts::operator=(MatrixProducts&&) noexcept = default;

void MatrixProducts::prepare(const MatrixProduct& product, cudaStream_t stream) {
  const cublasLtMatmulAlgo_t& algorithm = impl_->plan(product).algorithm;
  if (product.output != nullptr && impl_->loaded.insert(std::to_array(algorithm.data)).second) {
    multiply(product, stream);
  }
}

int MatrixProducts::next_size(int num_tokens) {
  return num_tokens < kEachSize ? num_tokens + 1 : shared_size(num_tokens + 1);
}

std::size_t MatrixProducts::num_prepared() const { return impl_->plans.size(); }

void MatrixProducts::multiply(const MatrixProduct& product, cudaStream_t stream) {
  COMMON_CHECK(product.num_tokens > 0 && product.num_rows > 0 && product.num_cols > 0, "matrices have elements");
  COMMON_CHECK(product.x != nullptr && product.weights != nullptr && product.output != nullptr, "matrices are given");
  COMMON_CHECK(product.float_output || !product.add, "sums are kept in float32");
  const Impl::Plan& plan = impl_->plan(product);
  CUBLAS_CHECK(plan.description.run(impl_->handle, product, plan.algorithm, impl_->workspace, stream));
}

}  // namespace common
