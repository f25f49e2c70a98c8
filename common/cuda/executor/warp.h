// What the lanes of a warp do together, with values of any type. combine() runs once, when all have come.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/cuda/executor/executor.h"

namespace common::executor {

// Kinds of instructions, as they are counted.
enum class Instruction { kShuffle, kVote, kMatrixLoad, kMatrixProduct };
void note_instruction(Instruction instruction);
// A lane gives ldmatrix a row of 16 bytes.
void note_shared_rows(const void* row);

inline void synchronize_warp(unsigned mask) {
  meet_warp(mask, "__syncwarp", nullptr, [](OfLanes) {});
}

// The value x of lane `source`, which must be in the mask.
template <typename T>
T shuffle(unsigned mask, const T& x, int source) {
  static_assert(sizeof(T) <= 16);
  struct Own {
    unsigned char given[16];
    unsigned char taken[16];
    int source;
  } own{};
  std::memcpy(own.given, &x, sizeof(T));
  own.source = source;
  meet_warp(mask, "a shuffle", &own, [](OfLanes of_lanes) {
    note_instruction(Instruction::kShuffle);
    for (void* lane : of_lanes) {
      if (lane != nullptr) {
        Own& to = *static_cast<Own*>(lane);
        const void* from = of_lanes[to.source];
        // A lane that takes no part has no value that could be relied upon.
        if (from == nullptr) {
          std::memset(to.taken, 0xFF, sizeof(to.taken));
        } else {
          std::memcpy(to.taken, static_cast<const Own*>(from)->given, sizeof(to.taken));
        }
      }
    }
  });
  T result;
  std::memcpy(&result, own.taken, sizeof(T));
  return result;
}

// A bit for each lane of the mask that votes.
inline unsigned ballot(unsigned mask, bool vote) {
  struct Own {
    unsigned bits;
    bool vote;
  } own{0, vote};
  meet_warp(mask, "a vote", &own, [](OfLanes of_lanes) {
    note_instruction(Instruction::kVote);
    unsigned bits = 0;
    for (int i = 0; i < kWarpThreads; ++i) {
      const auto* of_lane = static_cast<const Own*>(of_lanes[i]);
      if (of_lane != nullptr && of_lane->vote) {
        bits |= 1U << i;
      }
    }
    for (void* lane : of_lanes) {
      if (lane != nullptr) {
        static_cast<Own*>(lane)->bits = bits;
      }
    }
  });
  return own.bits;
}

}  // namespace common::executor
