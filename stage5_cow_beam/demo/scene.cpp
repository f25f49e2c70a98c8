#include "scene.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "../kv_cache_manager.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace stage5 {
namespace {

using common::counted;
using common::listed;
using common::Words;

class SharingScene : public common::Scene {
 public:
  SharingScene() {
    add_command(
        "new NAME LENGTH",
        [](const Words& words) {
          return "start " + words[0] + " with room for " + counted(common::parse_count(words[1], 1), "token");
        },
        [this](const Words& words) { return start(words[0], common::parse_count(words[1], 1)); });
    add_command(
        "append NAME COUNT",
        [](const Words& words) {
          return "append " + counted(common::parse_count(words[1], 1), "token") + " to " + words[0];
        },
        [this](const Words& words) { return append(words[0], common::parse_count(words[1], 1)); });
    add_command(
        "fork PARENT CHILD", [](const Words& words) { return "fork " + words[1] + " from " + words[0]; },
        [this](const Words& words) { return fork(words[0], words[1]); });
    add_command(
        "write NAME", [](const Words& words) { return "let " + words[0] + " write a token"; },
        [this](const Words& words) { return append(words[0], 1); });
    add_command(
        "free NAME", [](const Words& words) { return "end " + words[0]; },
        [this](const Words& words) { return free(words[0]); });
  }

  nlohmann::ordered_json state() const override {
    common::PoolState pool{.num_blocks = kNumBlocks, .block_size = kBlockSize};
    for (const SequenceId sequence : manager_.sequences()) {
      pool.running.push_back(
          {.id = sequence,
           .name = {common::sequence_name(sequence)},
           .sequences = {
               {.id = sequence, .length = manager_.length(sequence), .blocks = manager_.block_table(sequence)}}});
    }
    pool.free_blocks.assign(manager_.free_blocks().rbegin(), manager_.free_blocks().rend());
    std::int64_t num_entries = 0;  // in all tables
    for (int block = 0; block < kNumBlocks; ++block) {
      pool.reference_counts.push_back(manager_.reference_count(block));
      num_entries += manager_.reference_count(block);
    }
    pool.copies = copies_;
    const Usage usage = manager_.usage();
    pool.counters = {{"blocks owned", usage.reserved / kBlockSize},
                     {"without sharing", num_entries},
                     {"slots used", usage.used},
                     {"blocks free", static_cast<std::int64_t>(pool.free_blocks.size())},
                     {"blocks copied", num_copies_}};
    return to_json(pool);
  }

  Actions actions() const override {
    Actions result;
    SequenceId unused = 0;
    while (manager_.contains(unused)) {
      ++unused;
    }
    const std::string child = {unused < kMaxSequences ? common::sequence_name(unused) : '\0'};
    for (const SequenceId sequence : manager_.sequences()) {
      const std::string name = {common::sequence_name(sequence)};
      result.push_back({name, {"write " + name}});
      if (unused < kMaxSequences) {
        result.back().second.push_back(common::format("fork %s %s", name.c_str(), child.c_str()));
      }
      result.back().second.push_back("free " + name);
    }
    if (unused < kMaxSequences) {
      result.push_back({child, {"new " + child + " 6"}});
    }
    return result;
  }

 private:
  static constexpr int kNumBlocks = 8;
  static constexpr int kBlockSize = 4;
  static constexpr int kMaxSequences = 26;

  std::string start(const std::string& name, int num_tokens) {
    copies_.clear();
    const SequenceId sequence = common::sequence_named(manager_, name, false);
    if (!manager_.allocate(sequence, num_tokens)) {
      return refused(name, blocks_needed(num_tokens, kBlockSize));
    }
    const std::vector<int>& table = manager_.block_table(sequence);
    return counted(num_tokens, "token") + ", in blocks of " + std::to_string(kBlockSize) + ": " + name + " takes " +
           listed("block", table) + " from the top of the free list.";
  }

  std::string append(const std::string& name, int count) {
    copies_.clear();
    const SequenceId sequence = common::sequence_named(manager_, name, true);
    const int length = manager_.length(sequence);
    const std::vector<int> before = manager_.block_table(sequence);
    const int room = manager_.capacity(sequence) - length;
    const int tail = length % kBlockSize == 0 ? -1 : before[static_cast<std::size_t>(length / kBlockSize)];
    const int num_owners = tail < 0 ? 0 : manager_.reference_count(tail);
    if (!manager_.reserve(sequence, count)) {
      return refused(name, blocks_needed(std::max(count - room, 0), kBlockSize) + (num_owners > 1 ? 1 : 0));
    }
    for (const auto& [source, destination] : manager_.pending_copies()) {
      copies_.emplace_back(source, destination);
    }
    num_copies_ += static_cast<std::int64_t>(copies_.size());
    manager_.clear_pending_copies();
    const std::vector<int> slots = manager_.slots(sequence, length, count);
    manager_.commit(sequence, count);
    const std::vector<int>& table = manager_.block_table(sequence);
    const std::vector<int> taken(table.begin() + static_cast<std::ptrdiff_t>(before.size()), table.end());
    std::string said;
    if (!copies_.empty()) {
      said = "Block " + std::to_string(tail) + " has " + std::to_string(num_owners) + " owners, and " + name +
             " may not write to it: " + name + " gets a copy, block " + std::to_string(copies_.front().second) + ". ";
    } else if (tail >= 0) {
      said = name + " alone owns block " + std::to_string(tail) + ", and writes in place. ";
    }
    if (!taken.empty()) {
      said += name + " takes " + listed("block", taken) + " from the top of the free list. ";
    }
    return said + (count == 1 ? "The token goes into " : "The tokens go into ") + listed("slot", slots) + ".";
  }

  std::string fork(const std::string& parent, const std::string& child) {
    copies_.clear();
    const SequenceId of = common::sequence_named(manager_, parent, true);
    const SequenceId sequence = common::sequence_named(manager_, child, false);
    manager_.fork(of, sequence);
    const std::vector<int>& table = manager_.block_table(sequence);
    if (table.empty()) {
      return child + " begins as a copy of " + parent + ", which has no tokens yet: there is nothing to share.";
    }
    return child + " gets a copy of " + parent + "'s table, and no block: one owner more for " +
           listed("block", table) + ".";
  }

  std::string free(const std::string& name) {
    copies_.clear();
    const SequenceId sequence = common::sequence_named(manager_, name, true);
    std::vector<int> own;
    std::vector<int> shared;
    for (const int block : manager_.block_table(sequence)) {
      (manager_.reference_count(block) == 1 ? own : shared).push_back(block);
    }
    manager_.free(sequence);
    std::string said = name + " ends. ";
    if (!own.empty()) {
      said +=
          "No other sequence owns " + listed("block", own) + (own.size() == 1 ? ": it is free." : ": they are free.");
    }
    if (!shared.empty()) {
      said += (own.empty() ? "" : " ") + std::string("Other sequences still own ") + listed("block", shared) + ".";
    }
    return own.empty() && shared.empty() ? said + "It had no blocks." : said;
  }

  std::string refused(const std::string& name, int num_blocks) const {
    const auto num_free = static_cast<int>(manager_.free_blocks().size());
    return "Refused: " + name + " would need " + counted(num_blocks, "block") + ", and " +
           (num_free == 0 ? "none is" : std::to_string(num_free) + (num_free == 1 ? " is" : " are")) +
           " free. Nothing has changed.";
  }

  KvCacheManager manager_{kNumBlocks, kBlockSize};
  std::vector<std::pair<int, int>> copies_;  // of the last command
  std::int64_t num_copies_ = 0;
};

}  // namespace

std::vector<common::SceneScript> scenes() {
  return {{.name = "copy-on-write",
           .title = "Fork, write, copy",
           .first =
               "A has ten tokens in blocks 7, 1 and 3; two slots of block 3 are empty. The free blocks are 6, 5, 4, 2 "
               "and 0, and 6 is taken first.",
           .make = [] { return std::make_unique<SharingScene>(); },
           .setup = "new S 4; new T 4; new U 4; new V 4; new W 4; new X 4; new Y 4; new Z 4; free V; free T; free Z; "
                    "new A 10; append A 10; free S; free U; free W; free X; free Y",
           .commands = "fork A B; fork A C; write A; write B; write C; free A; free C; free B"}};
}

}  // namespace
