// The GPU runners of this build, on caches of a test's own.
#pragma once

#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(gpu_runner.h)
#include STAGE_HEADER(kernels/kernels.h)
#ifdef COURSE_PRODUCTION
#include STAGE_HEADER(production/production_kernels.h)
#include STAGE_HEADER(production/recording_runner.h)
#endif
// clang-format on

namespace tests {

#ifdef COURSE_PRODUCTION
inline const stage::PagedKernels& built_kernels(const stage::GpuOptions& options) {
  return options.precision == stage::Precision::kFloat32
             ? static_cast<const stage::PagedKernels&>(stage::kPlainKernels)
             : static_cast<const stage::PagedKernels&>(stage::kProductionKernels);
}
using BuiltRunnerBase = stage::RecordingRunner;
#else
inline const stage::PagedKernels& built_kernels(const stage::GpuOptions& /*options*/) { return stage::kPlainKernels; }
using BuiltRunnerBase = stage::GpuRunner;
#endif

// As make_runner() would choose it. counts: of tokens in a chunk, and from stage 8 on, of sequences.
class BuiltRunner : public BuiltRunnerBase {
 public:
  template <typename... Counts>
  BuiltRunner(const common::Llama& model, const stage::KvCacheShape& shape, const stage::GpuOptions& options,
              Counts... counts)
      : BuiltRunnerBase(model, shape, options, counts..., built_kernels(options)) {}
};

// The lesson's: every kernel launched by itself, plain ones.
class LessonRunner : public stage::GpuRunner {
 public:
  template <typename... Counts>
  LessonRunner(const common::Llama& model, const stage::KvCacheShape& shape, const stage::GpuOptions& options,
               Counts... counts)
      : GpuRunner(model, shape, options, counts..., stage::kPlainKernels) {}
};

}  // namespace tests
