// From block tables one after the other to a table of them.
#pragma once

#include <cuda_runtime_api.h>

namespace stage7 {

// tables: device, [num_sequences, max_blocks]. Row i becomes flat[starts[i]] … flat[starts[i + 1] - 1]; what is behind
// that in the row stays. flat, starts: device; starts has num_sequences + 1 elements. A copy by the copy engine would
// do the same, at more than a microsecond a row (H200).
void spread_tables(const int* flat, const int* starts, int num_sequences, int max_blocks, int* tables,
                   cudaStream_t stream);

}  // namespace
