// A runner on the CPU that reads shared blocks once.
#pragma once

#include "../../cpu_runner.h"
#include "../shared_reading/shared_reading.h"

namespace stage8 {

class SharedReadingCpuRunner : public CpuRunner, public SharedReading {
 public:
  using CpuRunner::CpuRunner;

  StepId enqueue(const RaggedBatch& batch) override;

 protected:
  common::Matrix forward(const RaggedBatch& batch) override;
};

}  // namespace
