// How decode attention is shared out, and what lies where in its workspace.
//
// The unit of work is a tile: 16 tokens of one kv head of one sequence, K and V. All tiles of a layer stand in one
// line, sequence by sequence, in it head by head, in it token by token; thread block c of n gets the tiles from T c / n
// to T (c + 1) / n. No share has more than one tile above the average, however ragged the batch:
//
//     heads    |--- A ---|- B -|------------- C -------------|-- D --|
//     shares   |    0    .    1    .    2    .    3    .    4    .   5   |        A, B, C and D are cut
//
// The price: a share may begin and end in the middle of a head. Such a head's partial results meet in the workspace,
// and the thread block that comes last merges them. Where heads are about equally long, there is no such price: shares
// end where heads end, if the longest then takes at most a few tiles more (choose_cutting in decode_plan.cu). Cutting a
// context is known as split-KV, and cutting one line of all work as stream-K.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../kernels/kernels.h"
#include "../kernels/page_layout.h"

namespace stage8 {

inline constexpr int kTileTokens = kTileRows;

// What one thread block does. 48 bytes, read as three 16-byte loads.
struct alignas(16) TileRange {
  int sequence;  // where it starts
  int kv_head;
  int tile;
  int num_tiles;  // how far it goes, across the ends of heads and sequences; 0: it has nothing to do
  // The thread blocks that work on the first head of this share, and the last one that works on its last head (this
  // block is the first one there, unless it is also this share's first head).
  int first_contributor;
  int last_contributor;
  int last_contributor_of_last_head;
  int context_length;  // of that first sequence: saves a thread block one dependent load before its first copy
  int table_start;     // likewise
};

// A share contributes partial results to its first head and to its last, to no other: a thread block has two places.
struct DecodeWorkspace {
  TileRange* shares;           // [num_workers]
  int* arrivals;               // [num_workers], by the first contributor of a head: how many have handed in
  float2* max_and_sum;         // [2 * num_workers, group]: largest score, sum of weights
  float* outputs;              // [2 * num_workers, group, head_dim], not yet divided by the sum
  std::int64_t* tiles_before;  // [num_sequences + 1], for the plan alone
  std::size_t bytes;
};

inline DecodeWorkspace decode_workspace(void* memory, int num_workers, int group, int head_dim, int num_sequences) {
  std::size_t bytes = 0;
  const auto take = [&](std::size_t count, std::size_t size) {
    char* begin = static_cast<char*>(memory) + bytes;
    bytes += (count * size + 255) / 256 * 256;
    return static_cast<void*>(memory == nullptr ? nullptr : begin);
  };
  const auto workers = static_cast<std::size_t>(num_workers);
  const std::size_t rows = 2 * workers * static_cast<std::size_t>(group);
  DecodeWorkspace workspace{};
  workspace.shares = static_cast<TileRange*>(take(workers, sizeof(TileRange)));
  workspace.arrivals = static_cast<int*>(take(workers, sizeof(int)));
  workspace.max_and_sum = static_cast<float2*>(take(rows, sizeof(float2)));
  workspace.outputs = static_cast<float*>(take(rows * static_cast<std::size_t>(head_dim), sizeof(float)));
  workspace.tiles_before =
      static_cast<std::int64_t*>(take(static_cast<std::size_t>(num_sequences) + 1, sizeof(std::int64_t)));
  workspace.bytes = bytes;
  return workspace;
}

COURSE_HOST_DEVICE int num_tiles_of(int context_length) { return (context_length + kTileTokens - 1) / kTileTokens; }

}  // namespace
