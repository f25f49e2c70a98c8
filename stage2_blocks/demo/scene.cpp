#include "scene.h"

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "../kv_cache_manager.h"
#include "common/base/check.h"

namespace stage2 {
namespace {

using common::counted;
using common::listed;
using common::Words;

class BlockScene : public common::Scene {
 public:
  BlockScene() {
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
    const Usage usage = manager_.usage();
    pool.counters = {{"slots reserved", usage.reserved},
                     {"slots used", usage.used},
                     {"reserved, but empty", usage.reserved - usage.used},
                     {"blocks free", static_cast<std::int64_t>(pool.free_blocks.size())}};
    return to_json(pool);
  }

  Actions actions() const override {
    Actions result;
    for (const SequenceId sequence : manager_.sequences()) {
      const std::string name = {common::sequence_name(sequence)};
      result.push_back({name, {"append " + name + " 1", "append " + name + " 4", "free " + name}});
    }
    for (SequenceId sequence = 0; sequence < 26; ++sequence) {
      if (!manager_.contains(sequence)) {
        const std::string name = {common::sequence_name(sequence)};
        result.push_back({name, {"new " + name + " 6"}});
        break;
      }
    }
    return result;
  }

 private:
  static constexpr int kNumBlocks = 8;
  static constexpr int kBlockSize = 4;

  std::string start(const std::string& name, int num_tokens) {
    const SequenceId sequence = common::sequence_named(manager_, name, false);
    if (!manager_.allocate(sequence, num_tokens)) {
      return refused(name, blocks_needed(num_tokens, kBlockSize));
    }
    const std::vector<int>& table = manager_.block_table(sequence);
    return counted(num_tokens, "token") + ", in blocks of " + std::to_string(kBlockSize) + ": " + name + " takes " +
           listed("block", table) + " from the top of the free list.";
  }

  std::string append(const std::string& name, int count) {
    const SequenceId sequence = common::sequence_named(manager_, name, true);
    const int length = manager_.length(sequence);
    const std::vector<int> before = manager_.block_table(sequence);
    const int room = manager_.capacity(sequence) - length;
    if (!manager_.reserve(sequence, count)) {
      return refused(name, blocks_needed(count - room, kBlockSize));
    }
    const std::vector<int> slots = manager_.slots(sequence, length, count);
    manager_.commit(sequence, count);
    const std::string written =
        (count == 1 ? "The token goes" : "The tokens go") + std::string(" into ") + listed("slot", slots) + ".";
    const std::vector<int>& table = manager_.block_table(sequence);
    const std::vector<int> taken(table.begin() + static_cast<std::ptrdiff_t>(before.size()), table.end());
    if (taken.empty()) {
      const int block = table[static_cast<std::size_t>(length / kBlockSize)];
      return "There is room in block " + std::to_string(block) + ". " + written;
    }
    const std::string full =
        room == 0 ? "Block " + std::to_string(before.back()) + " is full"
                  : "After " + counted(room, "token") + " block " + std::to_string(before.back()) + " is full";
    return full + ": " + name + " takes " + listed("block", taken) + " from the top of the free list. " + written;
  }

  std::string free(const std::string& name) {
    const SequenceId sequence = common::sequence_named(manager_, name, true);
    const std::vector<int> table = manager_.block_table(sequence);
    manager_.free(sequence);
    return name + " ends: " + listed("block", table) + (table.size() == 1 ? " goes" : " go") + " to the free list, " +
           std::to_string(table.front()) + " on top.";
  }

  std::string refused(const std::string& name, int num_blocks) const {
    const auto num_free = static_cast<int>(manager_.free_blocks().size());
    return "Refused: " + name + " would need " + counted(num_blocks, "block") + ", and " +
           (num_free == 0 ? "none is" : std::to_string(num_free) + (num_free == 1 ? " is" : " are")) +
           " free. Nothing has changed.";
  }

  KvCacheManager manager_{kNumBlocks, kBlockSize};
};

}  // namespace

std::vector<common::SceneScript> scenes() {
  return {
      {.name = "block-table",
       .title = "A block table grows",
       .first = "Eight blocks of four slots. Other requests hold five of them; blocks 3, 1 and 7 have come back to the "
                "free list in this order, so that 7 is on top.",
       .make = [] { return std::make_unique<BlockScene>(); },
       .setup = "new X 4; append X 4; new Y 4; new Z 4; append Z 3; new P 4; new Q 12; append Q 12; new T 4; free P; "
                "free Y; free T",
       .commands =
           "new A 1; append A 3; append A 1; append A 1; append A 5; append A 3; free Q; append A 1; new B 6; free A"}};
}

}  // namespace
