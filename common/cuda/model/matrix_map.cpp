#include "common/cuda/model/matrix_map.h"

#include "common/base/check.h"
#include "common/cuda/runtime/device.h"

namespace common {
namespace {

constexpr int kRowBytes = 128;  // of a panel (kPanelRowBytes in ptx.cuh)

}  // namespace

CUtensorMap matrix_map(const void* matrix, int rows, int cols, int box_rows, bool is_float8) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    COMMON_CHECK(found == cudaDriverEntryPointSuccess, "the driver knows tensor maps");
    return reinterpret_cast<Encode>(function);
  }();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const int element_bytes = is_float8 ? 1 : 2;
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(cols) * static_cast<cuuint64_t>(element_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kRowBytes / element_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUtensorMapDataType type = is_float8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(&map, type, 2, const_cast<void*>(matrix), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  COMMON_CHECK(result == CUDA_SUCCESS, "a matrix of whole pieces of 16 bytes has a tensor map");
  return map;
}

}  // namespace common
