// Which GPU and which build go together, and what is said if they do not.
#include <string>

#include "common/cuda/runtime/device_obstacle.h"
#include "tests/support/catch.h"

namespace {

common::DeviceFindings an_h200() {
  return {.driver_version = 13000,
          .runtime_version = 13000,
          .error = {},
          .num_devices = 1,
          .name = "NVIDIA H200",
          .compute_capability = 90,
          .has_kernels = true,
          .architectures = "90a"};
}

}  // namespace

TEST_CASE("A build for the GPU that is there runs on it, with a driver as new as the build's CUDA or newer") {
  CHECK(common::obstacle_of(an_h200()).empty());
  common::DeviceFindings found = an_h200();
  for (const int driver : {13000, 13010, 14020}) {
    found.driver_version = driver;
    found.runtime_version = 13010;  // within a major version, an older driver will do
    CHECK(common::obstacle_of(found).empty());
  }
}

TEST_CASE("A build for another GPU says which it was built for and which is there") {
  common::DeviceFindings found = an_h200();
  found.name = "NVIDIA GeForce RTX 4090";
  found.compute_capability = 89;
  found.has_kernels = false;
  CHECK(common::obstacle_of(found) ==
        "the kernels were built for 90a, and NVIDIA GeForce RTX 4090 has compute capability 8.9: build on this "
        "machine, or with CUDAARCHS=89");
  found.compute_capability = 120;
  CHECK(common::obstacle_of(found).find("12.0: build on this machine, or with CUDAARCHS=120a") != std::string::npos);
}

TEST_CASE("A GPU that is too old is named") {
  common::DeviceFindings found = an_h200();
  found.name = "Tesla T4";
  found.compute_capability = 75;
  found.has_kernels = false;
  CHECK(common::obstacle_of(found) ==
        "the kernels need a GPU of compute capability 8.0 or newer, and Tesla T4 has 7.5");
}

TEST_CASE("A driver that is too old is not taken for a GPU that is not there") {
  common::DeviceFindings found = an_h200();
  found.driver_version = 12040;
  found.num_devices = 0;
  found.error = "CUDA driver version is insufficient for CUDA runtime version";
  CHECK(common::obstacle_of(found) ==
        "the GPU's driver is too old: it supports CUDA 12.4, and this program was built with CUDA 13.0");
  found.driver_version = 13000;
  found.error = "system not yet initialized";
  CHECK(common::obstacle_of(found) == "the GPU cannot be used: system not yet initialized");
  // Without a driver, CUDA gives the same error: there is no GPU.
  found.driver_version = 0;
  CHECK(common::obstacle_of(found) == "there is no GPU here that the kernels run on");
  // A driver that has nothing to drive, or nothing that CUDA_VISIBLE_DEVICES lets it see.
  found = an_h200();
  found.num_devices = 0;
  CHECK(common::obstacle_of(found) == "there is no GPU here that the kernels run on");
}
