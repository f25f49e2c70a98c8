// What the prefix cache saves, in numbers: the command `prefix`, and the shell's `prompt` and `reset`.
#pragma once

#include "../engine.h"
#include "../kv_cache_manager.h"
#include "common/app/cli.h"
#include "common/app/shell.h"

namespace stage6 {

struct ReuseOptions {
  EngineOptions engine{.num_slots = 8192};
  int num_users = 8;
  int prefix_tokens = 512;  // in the prompt that all users have in common
  int user_tokens = 32;     // in each user's own part
  int num_turns = 4;        // in the conversation
};

// `prefix`: time and memory with and without the cache, for many users of one long prompt, for a conversation, and for
// prompts that have nothing in common. `options` must live as long as `program`.
common::Command& add_prefix_command(common::Program& program, ReuseOptions& options);

// `prompt NAME TEXT`: a sequence whose tokens are the characters of TEXT. Only tokens that are not cached are computed.
// `reset`.
void add_prefix_commands(common::Shell& shell, KvCacheManager& manager);

}  // namespace
