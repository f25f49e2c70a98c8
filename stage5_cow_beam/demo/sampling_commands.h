// What sharing saves, in words and pictures: the commands `sample` and `beam`, and the summary of `demo`.
#pragma once

#include <span>
#include <string>

#include "../decoding.h"
#include "../engine.h"
#include "../kv_cache_manager.h"
#include "common/app/cli.h"
#include "common/app/shell.h"

namespace stage5 {

// The blocks that the live sequences own, and the number that they would own without sharing.
struct SharingFigures {
  int blocks = 0;
  int separate_blocks = 0;
  int slots = 0;  // that hold a token
  int separate_slots = 0;
};
SharingFigures sharing_figures(const KvCacheManager& manager);

// "blocks 8, separate caches 20: 60.0 % saved; slots ..."
std::string sharing_summary(const KvCacheManager& manager);

// The shell's commands `fork` and `write`; `write` says in words which copy it causes.
void add_sharing_commands(common::Shell& shell, KvCacheManager& manager);
void print_copies(std::ostream& output, std::span<const BlockCopy> copies);

struct DecodingOptions {
  EngineOptions engine;
  int num_samples = 4;
  BeamOptions beam;
  bool trace = false;  // a line for each step: copies, owners of each block, and where each branch comes from
};

// `sample`: several texts drawn from each prompt, at temperature 0.8 if none is given. `beam`: the likeliest texts that
// a beam of that width finds. Both print what sharing saves, prompt by prompt. `options` must live as long as
// `program`.
common::Command& add_sample_command(common::Program& program, DecodingOptions& options);
common::Command& add_beam_command(common::Program& program, DecodingOptions& options);

}  // namespace
