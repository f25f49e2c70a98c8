// A position in a ring of places in shared memory that some threads fill and others empty.
#pragma once

namespace common {

template <int kPlaces>
struct RingPosition {
  int place = 0;
  int parity = 0;  // of the number of finished rounds: the phase of the place's barriers (ptx.cuh, wait_barrier)
  __device__ __forceinline__ void advance() {
    if (++place == kPlaces) {
      place = 0;
      parity ^= 1;
    }
  }
};

}  // namespace common
