#include "common/cuda/runtime/timing.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>

#include "common/base/text.h"
#include "common/cuda/runtime/read_memory.h"

namespace common {
namespace {

// The driver's release, which the CUDA runtime does not report, from the library that nvidia-smi uses too.
std::string driver_release() {
  std::string release = "unknown";
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library == nullptr) {
    return release;
  }
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto ask = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(library, "nvmlSystemGetDriverVersion"));
  const auto shutdown = reinterpret_cast<int (*)()>(dlsym(library, "nvmlShutdown"));
  if (init != nullptr && ask != nullptr && shutdown != nullptr && init() == 0) {
    char text[81] = {};
    if (ask(text, sizeof text - 1) == 0) {
      release = text;
    }
    shutdown();
  }
  dlclose(library);
  return release;
}

}  // namespace

double microseconds_per_call(const Stream& stream, int num_calls, const std::function<void(int)>& call, double budget) {
  const Graph graph(stream, [&] {
    for (int i = 0; i < num_calls; ++i) {
      call(i);
    }
  });
  Event first;
  Event last;
  const auto replay = [&] {
    first.record(stream);
    graph.launch(stream);
    last.record(stream);
    return Event::microseconds(first, last);
  };
  // The first replay loads the graph, and both warm up the clocks. Slow kernels need only one.
  constexpr double kSlow = 50e3;
  if (replay() < kSlow) {
    replay();
  }
  std::vector<double> times;
  double spent = 0.0;
  while (times.size() < 3 || (times.size() < 60 && spent < budget)) {
    times.push_back(replay());
    spent += times.back();
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] / num_calls;
}

double read_ceiling(const Stream& stream, const void* memory, std::size_t bytes) {
  const double microseconds = microseconds_per_call(stream, 1, [&](int) { read_memory(stream, memory, bytes); });
  return static_cast<double>(bytes) / microseconds / 1e3;
}

std::string machine_line(double ceiling) {
  int runtime = 0;
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  return device_limits().name + ", driver " + driver_release() +
         format(", CUDA %d.%d, read ceiling ", runtime / 1000, runtime % 1000 / 10) +
         format_count(std::lround(ceiling)) + " GB/s";
}

std::string format_microseconds(double microseconds) {
  if (microseconds < 100.0) {
    return format(microseconds < 10.0 ? "%.2f" : "%.1f", microseconds);
  }
  return format_count(std::lround(microseconds));
}

}  // namespace
