// How decode attention's work is shared out, and what lies where in its workspace.
//
// The unit of work is a tile: K and V of 16 tokens of one kv head of one sequence. All T tiles of a layer stand in one
// line: sequence by sequence, within a sequence head by head, within a head token by token, from the window on if there
// is one. Thread block c of n gets the tiles from T c / n to T (c + 1) / n. No share is more than one tile above the
// average, however ragged the batch:
//
//     heads    |--- A ---|- B -|------------- C -------------|-- D --|
//     shares   |    0    .    1    .    2    .    3    .    4    .   5   |        A, B, C and D are cut
//
// The price: a share may begin and end in the middle of a head. Partial results of such a head are collected in the
// workspace, and the thread block that finishes last merges them. If heads are about equally long, this price is not
// paid: shares end where heads end, as long as the longest share then has only a few tiles more (choose_cutting in
// decode_plan.cu). If there are at least as many such heads as warps, a warp has whole heads to itself, and nothing is
// merged at all. Cutting a context is known as split-KV, and cutting one line of all work as stream-K.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/paged/page_layout.h"
#include "common/paged/paged_kernels.h"

namespace common {

inline constexpr int kTileTokens = kTileRows;

// The share of one thread block. 48 bytes, read as three 16-byte loads.
struct alignas(16) TileRange {
  int sequence;  // where the share starts
  int kv_head;
  int tile;       // counted from the sequence's first token
  int num_tiles;  // how far it goes, across the ends of heads and sequences; 0: there is nothing to do
  // The first and the last thread block that work on this share's first head, and the last one that works on its last
  // head (this block is the first one there, unless that head is also this share's first head).
  int first_contributor;
  int last_contributor;
  int last_contributor_of_last_head;
  int context_length;  // the first sequence's: saves a thread block one dependent load before its first copy
  int table_start;     // the first sequence's, for the same reason
  // The number of heads if the share consists of whole heads and each of the block's warps has some to itself, every
  // num_warps-th; else 0.
  int heads_of_warps;
};

// A share contributes partial results to its first and to its last head only: a thread block has two places.
struct DecodeWorkspace {
  TileRange* shares;           // [num_workers]
  int* arrivals;               // [num_workers], at a head's first contributor: how many have stored their part
  float2* max_and_sum;         // [2 * num_workers, group]: largest score, sum of weights
  float* outputs;              // [2 * num_workers, group, head_dim], not yet divided by the sum
  std::int64_t* tiles_before;  // [num_sequences + 1], used by the plan only
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

// Tiles that lie wholly in front of the window of a context's last token are not read: the first that is, and how many
// are.
COURSE_HOST_DEVICE int first_tile_of(const BatchArrays& batch, int context_length) {
  return batch.num_hidden(context_length) / kTileTokens;
}
COURSE_HOST_DEVICE int num_tiles_read_of(const BatchArrays& batch, int context_length) {
  return num_tiles_of(context_length) - first_tile_of(batch, context_length);
}

}  // namespace common
