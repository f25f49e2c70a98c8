// What a kernel asks of memory, counted while the executor runs it: exactly, whatever order the threads run in. The
// course's figures are counted in kernels that g++ compiled.
//
// The kernels' files are compiled with -fsanitize=thread and linked without its runtime: the compiler then calls a
// function at each access, with its address, and these functions are ours. They are called from the place in the
// program where the access is, which stands for the instruction. If several lanes of a warp make an access there, each
// for the n-th time since all lanes last met, that is one request, as on a GPU.
//
// Memory moves in sectors of 32 bytes. A request for global memory takes as many sectors as its lanes touch. Shared
// memory has 32 banks of 4 bytes, and each gives one word at a time: a request takes as many passes ("wavefronts" in
// Nsight Compute) as the busiest bank has different words. Lanes that ask for 8 bytes are served 16 at a time, for 16
// bytes 8 at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace common::executor {

// Requests are a warp's, bytes are what its lanes asked for.
struct Requests {
  std::int64_t requests = 0;
  std::int64_t bytes = 0;
  std::int64_t units = 0;  // sectors of global memory, or passes through shared memory
  std::int64_t ideal = 0;  // the fewest units that hold the bytes, request by request
};

struct Counts {
  Requests global_loads;
  Requests global_stores;
  Requests shared_loads;
  Requests shared_stores;
  std::int64_t distinct_bytes =
      0;                      // global memory that was read, each sector once: what caches without end would fetch
  std::int64_t shuffles = 0;  // per warp, like the counters below except barriers
  std::int64_t votes = 0;
  std::int64_t matrix_loads = 0;     // ldmatrix
  std::int64_t matrix_products = 0;  // mma
  std::int64_t async_copies = 0;     // cp.async: of 16 bytes, a lane's
  std::int64_t bulk_copies = 0;      // of the copy engine
  std::int64_t bulk_bytes = 0;
  std::int64_t barriers = 0;  // of a block

  std::int64_t bank_conflicts() const {
    return shared_loads.units - shared_loads.ideal + shared_stores.units - shared_stores.ideal;
  }
};

// Whether the kernels were compiled so that accesses can be counted. Not so under a sanitizer.
bool can_count();

// A load from global memory as a warp makes it: a request, or a copy that one lane orders from the copy engine.
struct WarpLoad {
  struct OfLane {
    int lane;
    std::uintptr_t address;
    int bytes;
  };
  int grid = 0;   // counted from 0 as they run
  int block = 0;  // of the grid
  int warp = 0;   // of the block
  bool is_bulk = false;
  std::vector<OfLane> lanes;  // that take part
};

// What the grids that `work` runs ask of memory. `see`, if given, is called with each load; a warp's loads come in the
// order in which its lowest lane makes them.
Counts count(const std::function<void()>& work, const std::function<void(const WarpLoad&)>& see = {});

}  // namespace common::executor
