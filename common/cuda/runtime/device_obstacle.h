// Why a build's kernels cannot run on a machine's GPU: the rule, apart from CUDA, so that tests need no GPU.
#pragma once

#include <string>

namespace common {

// What a program learns at its start about the GPU and the build.
struct DeviceFindings {
  int driver_version = 0;      // newest CUDA version that the driver supports, 12040 for 12.4; 0: there is no driver
  int runtime_version = 0;     // CUDA version of the build
  std::string error;           // what CUDA says when it is asked for devices, unless there is none; else empty
  int num_devices = 0;         // how many the program may use
  std::string name;            // the first device's
  int compute_capability = 0;  // 90 for 9.0
  bool has_kernels = false;    // the build has kernels that run on it, or that the driver can compile for it
  std::string architectures;   // for which the build has kernels, as CMake lists them: "80;90a"
};

inline constexpr int kMinComputeCapability = 80;

// "9.0"
inline std::string format_capability(int compute_capability) {
  return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

// One line for the user, or empty: the kernels run.
inline std::string obstacle_of(const DeviceFindings& found) {
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  if (found.driver_version > 0 && found.driver_version / 1000 < found.runtime_version / 1000) {
    return "the GPU's driver is too old: it supports CUDA " + version(found.driver_version) +
           ", and this program was built with CUDA " + version(found.runtime_version);
  }
  if (found.driver_version > 0 && !found.error.empty()) {
    return "the GPU cannot be used: " + found.error;
  }
  if (found.num_devices == 0) {
    return "there is no GPU here that the kernels run on";
  }
  if (found.compute_capability < kMinComputeCapability) {
    return "the kernels need a GPU of compute capability " + format_capability(kMinComputeCapability) +
           " or newer, and " + found.name + " has " + format_capability(found.compute_capability);
  }
  if (!found.has_kernels) {
    return "the kernels were built for " + found.architectures + ", and " + found.name + " has compute capability " +
           format_capability(found.compute_capability) +
           ": build on this machine, or with CUDAARCHS=" + std::to_string(found.compute_capability) +
           (found.compute_capability >= 90 ? "a" : "");
  }
  return {};
}

}  // namespace common
