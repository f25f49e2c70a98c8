// Communicators by NCCL, for the first GPUs of this machine.
#pragma once

#include <memory>
#include <string>

#include "common/cuda/several/communicator.h"

namespace common {

class NcclGroup {
 public:
  // Why there can be no group of `count` GPUs; empty if there can.
  static std::string unsupported(int count);

  // max_wait: seconds, for Communicator::wait and wait_quietly.
  NcclGroup(int count, double max_wait, AllReduce all_reduce = AllReduce::kNccl);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  Communicator& operator[](int rank);

  // The rank that failed first; -1: none has failed.
  int failed_rank() const;
  // For a thread that fails while it does not use its communicator.
  void fail(int rank);
  // After a failure, when all communicators are aborted: connects them again.
  void renew();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
