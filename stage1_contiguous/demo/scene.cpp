#include "scene.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "../kv_cache_manager.h"

namespace stage1 {
namespace {

using common::counted;
using common::Words;

std::string range(const Region& region) {
  return region.size == 1
             ? "slot " + std::to_string(region.first)
             : "slots " + std::to_string(region.first) + " to " + std::to_string(region.first + region.size - 1);
}

// Each slot is shown as a block of its own.
class ArenaScene : public common::Scene {
 public:
  ArenaScene() {
    add_command(
        "new NAME LENGTH",
        [](const Words& words) {
          return "start " + words[0] + " and reserve " + counted(common::parse_count(words[1], 1), "slot");
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
    common::PoolState pool{.num_blocks = kNumSlots, .block_size = 1};
    for (const SequenceId sequence : manager_.sequences()) {
      pool.running.push_back({.id = sequence,
                              .name = {common::sequence_name(sequence)},
                              .sequences = {{.id = sequence,
                                             .length = manager_.length(sequence),
                                             .blocks = manager_.slots(sequence, 0, manager_.capacity(sequence))}}});
    }
    for (const Region& hole : manager_.holes()) {
      for (int slot = hole.first; slot < hole.first + hole.size; ++slot) {
        pool.free_blocks.push_back(slot);
      }
    }
    const Usage usage = manager_.usage();
    pool.counters = {{"slots reserved", usage.reserved},
                     {"slots used", usage.used},
                     {"reserved, but empty", usage.reserved - usage.used},
                     {"slots free", usage.total - usage.reserved},
                     {"holes", static_cast<std::int64_t>(manager_.holes().size())},
                     {"largest hole", largest_hole()}};
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
        result.push_back({name, {"new " + name + " 4", "new " + name + " 8", "new " + name + " 12"}});
        break;
      }
    }
    return result;
  }

 private:
  static constexpr int kNumSlots = 32;

  int largest_hole() const {
    int largest = 0;
    for (const Region& hole : manager_.holes()) {
      largest = std::max(largest, hole.size);
    }
    return largest;
  }

  std::string start(const std::string& name, int num_tokens) {
    const SequenceId sequence = common::sequence_named(manager_, name, false);
    const std::vector<Region> holes = manager_.holes();
    if (!manager_.allocate(sequence, num_tokens)) {
      const Usage usage = manager_.usage();
      const int num_free = usage.total - usage.reserved;
      const std::string scattered =
          num_free < num_tokens ? "" : ": there is room enough, but not in one place. This is external fragmentation";
      return "Refused: " + name + " needs " + counted(num_tokens, "slot") + " side by side. " +
             std::to_string(num_free) + (num_free == 1 ? " is" : " are") + " free, at most " +
             std::to_string(largest_hole()) + " of them side by side" + scattered + ". Nothing has changed.";
    }
    const Region region = manager_.region(sequence);
    const auto too_small =
        std::count_if(holes.begin(), holes.end(), [&](const Region& hole) { return hole.first < region.first; });
    return name + " gets " + range(region) + ", in the first hole that is large enough" +
           (too_small > 0 ? ": what is free before it is too small." : ".") +
           " All of it is reserved at once, for tokens that may never come.";
  }

  std::string append(const std::string& name, int count) {
    const SequenceId sequence = common::sequence_named(manager_, name, true);
    const int length = manager_.length(sequence);
    const int room = manager_.capacity(sequence) - length;
    if (!manager_.reserve(sequence, count)) {
      return "Refused: " + name + " has " + counted(room, "slot") + " left, and never gets more. Nothing has changed.";
    }
    const int first = manager_.slots(sequence, length, 1).front();
    manager_.commit(sequence, count);
    return (count == 1 ? "The token goes into " : "The tokens go into ") + range({first, count}) + ". " +
           (count == room ? name + "'s region is full."
                          : counted(room - count, "slot") + " of " + name + "'s region stay" +
                                (room - count == 1 ? "s" : "") + " empty.");
  }

  std::string free(const std::string& name) {
    const SequenceId sequence = common::sequence_named(manager_, name, true);
    const Region region = manager_.region(sequence);
    manager_.free(sequence);
    const auto hole = std::find_if(manager_.holes().begin(), manager_.holes().end(), [&](const Region& candidate) {
      return candidate.first <= region.first && region.first < candidate.first + candidate.size;
    });
    return name + " ends, and " + range(region) + (region.size == 1 ? " is" : " are") + " free" +
           (hole->size == region.size
                ? ". Both neighbours are in use: nothing to merge with."
                : ". With what was free beside, that is one hole of " + counted(hole->size, "slot") + ".");
  }

  KvCacheManager manager_{kNumSlots};
};

}  // namespace

std::vector<common::SceneScript> scenes() {
  return {{.name = "arena",
           .title = "An arena that fragments",
           .first = "An arena of 32 slots, all of them free: one hole.",
           .make = [] { return std::make_unique<ArenaScene>(); },
           .setup = "",
           .commands =
               "new X 4; new A 12; append A 10; new B 8; append B 3; free X; new C 6; free B; new D 14; free C; "
               "new D 14; free A"}};
}

}  // namespace
