#include "common/cuda/several/nccl_group.h"

#ifdef COURSE_NCCL
#include <nccl.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/runtime/device.h"

namespace common {

#ifdef COURSE_NCCL

namespace {

void check_nccl(ncclResult_t result, const char* call, int line) {
  if (result != ncclSuccess) {
    throw CudaError(std::string(__FILE__) + ":" + std::to_string(line) + ": " + call + ": " +
                    ncclGetErrorString(result));
  }
}
// Has the hook of CUDA_CHECK, so that tests can make these calls fail too.
#define NCCL_CHECK(call)                 \
  do {                                   \
    if (device_call_hook != nullptr) {   \
      device_call_hook(#call);           \
    }                                    \
    check_nccl((call), #call, __LINE__); \
  } while (false)

// Restores the thread's current device at its end.
class CurrentDevice {
 public:
  CurrentDevice() { CUDA_CHECK(cudaGetDevice(&device_)); }
  ~CurrentDevice() { (void)cudaSetDevice(device_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int device_ = 0;
};

// What the communicators of a group share.
struct Shared {
  Shared(int gpus, double seconds, AllReduce kind) : count(gpus), max_wait(seconds), all_reduce(kind) {}

  int count;
  std::chrono::duration<double> max_wait;
  AllReduce all_reduce;
  std::mutex mutex;
  std::condition_variable changed;
  int failed_rank = -1;
  std::atomic<bool> has_failed = false;
  // exchange()'s numbers, by rank. No GPU can begin the next exchange before all have left this one's wait.
  std::vector<std::int64_t> numbers = std::vector<std::int64_t>(static_cast<std::size_t>(count));
  int num_given = 0;
  std::vector<std::int64_t> answer;
  int num_answers = 0;

  void fail(int rank) {
    const std::lock_guard lock(mutex);
    if (failed_rank < 0) {
      failed_rank = rank;
    }
    has_failed = true;
    changed.notify_all();
  }
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(Shared& shared, int rank) : shared_(shared), rank_(rank) {}
  ~NcclCommunicator() override {
    if (comm_ != nullptr) {
      (void)ncclCommDestroy(comm_);
    }
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  void begin(ncclComm_t comm) { comm_ = comm; }

  Shard shard() const override { return {rank_, shared_.count}; }
  AllReduce all_reduce() const override { return shared_.all_reduce; }

  void sum(void* values, std::size_t count, Precision type, cudaStream_t stream) override {
    NCCL_CHECK(ncclAllReduce(values, values, count, type == Precision::kFloat32 ? ncclFloat32 : ncclBfloat16, ncclSum,
                             usable(), stream));
  }
  void max(unsigned long long* values, std::size_t count, cudaStream_t stream) override {
    NCCL_CHECK(ncclAllReduce(values, values, count, ncclUint64, ncclMax, usable(), stream));
  }
  void gather(const float* own, std::size_t count, float* all, cudaStream_t stream) override {
    NCCL_CHECK(ncclAllGather(own, all, count, ncclFloat32, usable(), stream));
  }

  std::vector<std::int64_t> exchange(std::int64_t own) override {
    std::unique_lock lock(shared_.mutex);
    shared_.numbers[static_cast<std::size_t>(rank_)] = own;
    shared_.num_given += 1;
    if (shared_.num_given == shared_.count) {
      shared_.num_given = 0;
      shared_.num_answers += 1;
      shared_.answer = shared_.numbers;
      shared_.changed.notify_all();
      return shared_.answer;
    }
    const int before = shared_.num_answers;
    shared_.changed.wait(lock, [&] { return shared_.num_answers != before || shared_.has_failed; });
    if (shared_.num_answers == before) {
      throw_other_failed();
    }
    return shared_.answer;
  }

  void wait(const std::function<bool()>& is_done) override {
    const auto start = std::chrono::steady_clock::now();
    while (!is_done()) {
      if (shared_.has_failed) {
        throw_other_failed();
      }
      ncclResult_t state = ncclSuccess;
      if (ncclCommGetAsyncError(usable(), &state) != ncclSuccess || state != ncclSuccess) {
        shared_.fail(rank_);
        check_nccl(state, "a step of several GPUs", __LINE__);
      }
      if (std::chrono::steady_clock::now() - start > shared_.max_wait) {
        shared_.fail(rank_);
        throw CudaError(format("the GPUs have not finished a step after %g seconds", shared_.max_wait.count()));
      }
      std::this_thread::yield();
    }
  }

  bool wait_quietly(const std::function<bool()>& is_done) noexcept override {
    const auto start = std::chrono::steady_clock::now();
    try {
      while (!is_done()) {
        if (std::chrono::steady_clock::now() - start > shared_.max_wait) {
          return false;
        }
        std::this_thread::yield();
      }
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  void fail() noexcept override { shared_.fail(rank_); }
  void abort() noexcept override {
    shared_.fail(rank_);
    if (comm_ != nullptr) {
      (void)ncclCommAbort(std::exchange(comm_, nullptr));
    }
  }

 private:
  [[noreturn]] static void throw_other_failed() { throw CudaError("another GPU has failed"); }
  ncclComm_t usable() const {
    if (comm_ == nullptr || shared_.has_failed) {
      throw_other_failed();
    }
    return comm_;
  }

  Shared& shared_;
  int rank_;
  ncclComm_t comm_ = nullptr;
};

}  // namespace

struct NcclGroup::Impl {
  Shared shared;
  std::vector<std::unique_ptr<NcclCommunicator>> communicators;

  Impl(int count, double max_wait, AllReduce all_reduce) : shared(count, max_wait, all_reduce) {
    for (int rank = 0; rank < count; ++rank) {
      communicators.push_back(std::make_unique<NcclCommunicator>(shared, rank));
    }
    begin();
  }

  void begin() {
    const CurrentDevice current;
    std::vector<int> devices(communicators.size());
    std::iota(devices.begin(), devices.end(), 0);
    std::vector<ncclComm_t> comms(devices.size());
    NCCL_CHECK(ncclCommInitAll(comms.data(), shared.count, devices.data()));
    for (std::size_t i = 0; i < comms.size(); ++i) {
      communicators[i]->begin(comms[i]);
    }
    // NCCL connects the GPUs at the first use, all together, and differently for few and for many bytes. A thread that
    // waits for a connection could not learn that another one has failed, so the connections are made here.
    constexpr std::size_t kMany = std::size_t{1} << 20;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<DeviceArray<float>> values;
    for (const int device : devices) {
      CUDA_CHECK(cudaSetDevice(device));
      streams.push_back(std::make_unique<Stream>());
      values.emplace_back((devices.size() + 1) * kMany);
    }
    for (const std::size_t count : {std::size_t{1}, kMany / 16, kMany}) {
      NCCL_CHECK(ncclGroupStart());
      // ncclGroupEnd reports the errors of these calls.
      for (std::size_t i = 0; i < comms.size(); ++i) {
        float* const own = values[i].data();
        (void)ncclAllReduce(own, own, count, ncclFloat32, ncclSum, comms[i], streams[i]->get());
        (void)ncclAllGather(own, own + kMany, count, ncclFloat32, comms[i], streams[i]->get());
      }
      NCCL_CHECK(ncclGroupEnd());
    }
    for (std::size_t i = 0; i < streams.size(); ++i) {
      CUDA_CHECK(cudaSetDevice(devices[i]));
      streams[i]->synchronize();
    }
  }
};

std::string NcclGroup::unsupported(int count) {
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess) {
    (void)cudaGetLastError();
    num_devices = 0;
  }
  if (num_devices < count) {
    return format("--tensor-parallel %d needs %d GPUs, and there %s %d", count, count, num_devices == 1 ? "is" : "are",
                  num_devices);
  }
  if (!has_cuda_device()) {
    return device_obstacle();
  }
  // All GPUs have equal parts of the model and of the cache, and must choose the same plans.
  const auto properties = [](int device) {
    cudaDeviceProp found{};
    CUDA_CHECK(cudaGetDeviceProperties(&found, device));
    return std::tuple(found.major, found.minor, found.multiProcessorCount, found.sharedMemPerBlockOptin);
  };
  for (int device = 1; device < count; ++device) {
    if (properties(device) != properties(0)) {
      return format("--tensor-parallel %d needs GPUs of one kind, and GPU %d differs from GPU 0", count, device);
    }
  }
  return "";
}

NcclGroup::NcclGroup(int count, double max_wait, AllReduce all_reduce)
    : impl_(std::make_unique<Impl>(count, max_wait, all_reduce)) {}
NcclGroup::~NcclGroup() = default;

Communicator& NcclGroup::operator[](int rank) { return *impl_->communicators.at(static_cast<std::size_t>(rank)); }

int NcclGroup::failed_rank() const {
  const std::lock_guard lock(impl_->shared.mutex);
  return impl_->shared.failed_rank;
}

void NcclGroup::fail(int rank) { impl_->shared.fail(rank); }

void NcclGroup::renew() {
  {
    const std::lock_guard lock(impl_->shared.mutex);
    impl_->shared.failed_rank = -1;
    impl_->shared.has_failed = false;
    impl_->shared.num_given = 0;
  }
  try {
    impl_->begin();
  } catch (...) {
    for (const auto& communicator : impl_->communicators) {
      communicator->abort();
    }
    throw;
  }
}

#else

struct NcclGroup::Impl {};

std::string NcclGroup::unsupported(int) {
  return "--tensor-parallel needs NCCL: nccl.h and libnccl were not there when this program was configured";
}

NcclGroup::NcclGroup(int, double, AllReduce) { throw InputError(unsupported(0)); }
NcclGroup::~NcclGroup() = default;
Communicator& NcclGroup::operator[](int) { throw InputError(unsupported(0)); }
int NcclGroup::failed_rank() const { return impl_ == nullptr ? -1 : 0; }
void NcclGroup::fail(int) {}
void NcclGroup::renew() {}

#endif

}  // namespace common
