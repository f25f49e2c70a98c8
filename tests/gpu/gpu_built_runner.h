// The GPU runners of this build, on caches of a test's own.
#pragma once

#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(gpu_runner.h)
#include STAGE_HEADER(kernels/kernels.h)
// clang-format on

#ifdef COURSE_PRODUCTION
#include "common/paged/production_kernels.h"
#if STAGE_NUMBER > 7
// clang-format off
#include STAGE_HEADER(production/recording_runner.h)
// clang-format on
#endif
#endif

namespace tests {

inline const common::PagedKernels& built_kernels([[maybe_unused]] const stage::GpuOptions& options) {
#ifdef COURSE_PRODUCTION
  if (options.types.precision != common::Precision::kFloat32) {
    return common::kProductionKernels;
  }
#endif
  return stage::kPlainKernels;
}

#if STAGE_NUMBER > 7 && defined(COURSE_PRODUCTION)
using BuiltRunnerBase = stage::RecordingRunner;
#else
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

// The lesson's, with the plain kernels.
class LessonRunner : public stage::GpuRunner {
 public:
  template <typename... Counts>
  LessonRunner(const common::Llama& model, const stage::KvCacheShape& shape, const stage::GpuOptions& options,
               Counts... counts)
      : GpuRunner(model, shape, options, counts..., stage::kPlainKernels) {}
};

}  // namespace tests
