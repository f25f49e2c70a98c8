// Production kernels that read a step's shared prefixes once: ProductionKernels with a plan of shared_plan.h.
#pragma once

#include <memory>

#include "common/paged/production_kernels.h"
#include "common/paged/shared_plan.h"

namespace common {

class SharingKernels final : public ProductionKernels {
 public:
  // From now on, plan() and attend() are for steps that have this plan, on the device, with the places of
  // shared_arrays() for the step's number of sequences. nullptr: every sequence reads alone, as it does in layers with
  // a window. Chunks always do: the plan has prefixes of decodes alone. The plan's tables and lengths are the step's.
  // As all that a step reads, the plan may be written anew between two launches of a captured graph.
  void read_together(const void* plan) { plan_ = plan; }

  std::size_t workspace_bytes(const PageShape& shape, const StepArrays& largest) const override;
  void plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> workspace,
            cudaStream_t stream) const override;
  void attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
              std::span<std::byte> workspace, cudaStream_t stream) const override;

 private:
  bool reads_together(const StepArrays& step) const;

  const void* plan_ = nullptr;
};

// These kernels in the form that reads together; nullptr if there is none for such pages, or the kernels are others.
std::unique_ptr<SharingKernels> sharing_kernels(const PagedKernels& kernels, const PageShape& shape);

}  // namespace common
