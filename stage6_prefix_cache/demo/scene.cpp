#include "scene.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "../kv_cache_manager.h"
#include "common/base/tensor.h"
#include "common/base/text.h"

namespace stage6 {
namespace {

using common::counted;
using common::listed;
using common::Words;

// A token is a character.
class PrefixScene : public common::Scene {
 public:
  PrefixScene() {
    add_command(
        "prompt NAME TEXT", [](const Words& words) { return "start " + words[0] + " with the prompt " + words[1]; },
        [this](const Words& words) { return prompt(words[0], words[1]); });
    add_command(
        "new NAME LENGTH",
        [](const Words& words) {
          return "start " + words[0] + " with room for " + counted(common::parse_count(words[1], 1), "other token");
        },
        [this](const Words& words) { return start(words[0], common::parse_count(words[1], 1)); });
    add_command(
        "free NAME", [](const Words& words) { return "end " + words[0]; },
        [this](const Words& words) { return free(words[0]); });
  }

  nlohmann::ordered_json state() const override {
    common::PoolState pool{.num_blocks = kNumBlocks, .block_size = kBlockSize};
    for (const SequenceId sequence : manager_.sequences()) {
      pool.running.push_back({.id = sequence,
                              .name = {common::sequence_name(sequence)},
                              .sequences = {{.id = sequence,
                                             .length = manager_.length(sequence),
                                             .blocks = manager_.block_table(sequence),
                                             .text = texts_.contains(sequence) ? texts_.at(sequence) : ""}}});
    }
    pool.free_blocks.assign(manager_.free_blocks().rbegin(), manager_.free_blocks().rend());
    pool.cached.emplace();
    for (const int block : manager_.prefix_cache().evictable()) {
      pool.cached->push_back({block, block_texts_.at(block)});
    }
    for (int block = 0; block < kNumBlocks; ++block) {
      pool.reference_counts.push_back(manager_.reference_count(block));
    }
    pool.evicted = evicted_;
    const Usage usage = manager_.usage();
    const PrefixStatistics& statistics = manager_.prefix_cache().statistics();
    pool.counters = {{"blocks owned", usage.reserved / kBlockSize},
                     {"cached", usage.cached / kBlockSize},
                     {"free", static_cast<std::int64_t>(pool.free_blocks.size())},
                     {"tokens found", statistics.tokens_saved},
                     {"tokens computed", num_computed_},
                     {"evictions", statistics.evictions}};
    return to_json(pool);
  }

  Actions actions() const override {
    Actions result;
    for (const SequenceId sequence : manager_.sequences()) {
      const std::string name = {common::sequence_name(sequence)};
      result.push_back({name, {"free " + name}});
    }
    SequenceId unused = 0;
    while (manager_.contains(unused)) {
      ++unused;
    }
    const std::string name = {common::sequence_name(unused)};
    result.push_back({name,
                      {"prompt " + name + " once_upon_", "prompt " + name + " once_upon_a_hill",
                       "prompt " + name + " once_a_fox_met", "new " + name + " 8"}});
    return result;
  }

 private:
  static constexpr int kNumBlocks = 8;
  static constexpr int kBlockSize = 4;

  // Published blocks that hold the beginning of these tokens; the last token is always computed.
  std::vector<int> found(std::span<const common::Token> tokens) const {
    return manager_.prefix_cache().find(tokens.first(tokens.size() - 1), 0);
  }

  // Cached blocks that were taken for other tokens: the first in the order of eviction that are no hits.
  void note_evicted(const std::vector<int>& cached, const std::vector<int>& hits, std::int64_t evictions_before) {
    evicted_.clear();
    const std::int64_t count = manager_.prefix_cache().statistics().evictions - evictions_before;
    for (const int block : cached) {
      const bool is_hit = std::find(hits.begin(), hits.end(), block) != hits.end();
      if (!is_hit && static_cast<std::int64_t>(evicted_.size()) < count) {
        evicted_.push_back(block);
      }
    }
  }

  std::vector<int> evictable() const {
    return {manager_.prefix_cache().evictable().begin(), manager_.prefix_cache().evictable().end()};
  }

  std::string said_of_evicted() const {
    return evicted_.empty() ? ""
                            : " No block was free any more: " + listed("block", evicted_) +
                                  (evicted_.size() == 1 ? " is" : " are") + " evicted, cached for the longest time.";
  }

  std::string prompt(const std::string& name, const std::string& text) {
    const SequenceId sequence = common::sequence_named(manager_, name, false);
    const std::vector<common::Token> tokens(text.begin(), text.end());
    const std::vector<int> hits = found(tokens);
    const std::vector<int> cached = evictable();
    const std::int64_t evictions = manager_.prefix_cache().statistics().evictions;
    const auto count = static_cast<int>(tokens.size());
    const int num_found = static_cast<int>(hits.size()) * kBlockSize;
    evicted_.clear();
    if (!manager_.allocate(sequence, tokens)) {
      return refused(name, hits, blocks_needed(count - num_found, kBlockSize));
    }
    note_evicted(cached, hits, evictions);
    const std::vector<int> table = manager_.block_table(sequence);
    manager_.commit(sequence, std::span(tokens).subspan(static_cast<std::size_t>(num_found)));
    num_computed_ += count - num_found;
    texts_[sequence] = text;
    std::vector<int> published;
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (manager_.prefix_cache().contains(table[i])) {
        block_texts_[table[i]] = text.substr(i * kBlockSize, kBlockSize);
        if (i >= hits.size()) {
          published.push_back(table[i]);
        }
      }
    }
    const std::vector<int> computed(table.begin() + static_cast<std::ptrdiff_t>(hits.size()), table.end());
    std::string said = hits.empty() ? "Nothing of it is found."
                                    : std::to_string(num_found) + " of " + counted(count, "token") + " are found, in " +
                                          listed("block", hits) + ", and are not computed.";
    said +=
        " " + name + " computes " + counted(count - num_found, "token") + " into " + listed("block", computed) + ".";
    said += published.empty() ? " None of them is full: nothing is published."
                              : " Full, and therefore published: " + listed(published) + ".";
    return said + said_of_evicted();
  }

  std::string start(const std::string& name, int num_tokens) {
    const SequenceId sequence = common::sequence_named(manager_, name, false);
    const std::vector<int> cached = evictable();
    const std::int64_t evictions = manager_.prefix_cache().statistics().evictions;
    evicted_.clear();
    if (!manager_.allocate(sequence, num_tokens)) {
      return refused(name, {}, blocks_needed(num_tokens, kBlockSize));
    }
    note_evicted(cached, {}, evictions);
    texts_.erase(sequence);
    return name + " takes " + listed("block", manager_.block_table(sequence)) + ": free ones first." +
           said_of_evicted();
  }

  std::string free(const std::string& name) {
    const SequenceId sequence = common::sequence_named(manager_, name, true);
    std::vector<int> table = manager_.block_table(sequence);
    std::reverse(table.begin(), table.end());  // as free() takes the blocks back
    manager_.free(sequence);
    evicted_.clear();
    std::vector<int> kept;
    std::vector<int> freed;
    std::vector<int> shared;
    for (const int block : table) {
      const bool is_owned = manager_.reference_count(block) > 0;
      (is_owned ? shared : manager_.prefix_cache().contains(block) ? kept : freed).push_back(block);
    }
    std::string said = name + " ends, from the end of its table.";
    if (!freed.empty()) {
      said += " No text is published for " + listed("block", freed) + ": free.";
    }
    if (!kept.empty()) {
      said +=
          " " + listed(kept) + (kept.size() == 1 ? " stays" : " stay") + " cached, the deepest to be evicted first.";
    }
    if (!shared.empty()) {
      said += std::string(" ") + listed(shared) + (shared.size() == 1 ? " has" : " have") + " other owners.";
    }
    return said;
  }

  std::string refused(const std::string& name, const std::vector<int>& hits, int num_blocks) const {
    const auto is_evictable = [&](int block) { return manager_.reference_count(block) == 0; };
    const auto num_available =
        static_cast<int>(manager_.free_blocks().size() + manager_.prefix_cache().evictable().size()) -
        static_cast<int>(std::count_if(hits.begin(), hits.end(), is_evictable));
    return "Refused: " +
           (hits.empty() ? "" : listed("block", hits) + (hits.size() == 1 ? " is" : " are") + " found, but ") + name +
           " needs " + counted(num_blocks, "block") + (hits.empty() ? "" : " more") + ", and " +
           (num_available == 0 ? "none is" : std::to_string(num_available) + (num_available == 1 ? " is" : " are")) +
           " available" + (hits.empty() ? "" : " beside them") + ". Nothing has changed.";
  }

  KvCacheManager manager_{kNumBlocks, kBlockSize};
  std::map<SequenceId, std::string> texts_;
  std::map<int, std::string> block_texts_;  // of published blocks
  std::vector<int> evicted_;                // by the last command
  std::int64_t num_computed_ = 0;
};

}  // namespace

std::vector<common::SceneScript> scenes() {
  return {{.name = "prefix-cache",
           .title = "Hit and evict",
           .first = "Eight free blocks of four slots, 7 first, then 1 and 3. A token is a character.",
           .make = [] { return std::make_unique<PrefixScene>(); },
           .setup = "new S 4; new T 4; new U 4; new V 4; new W 4; new X 4; new Y 4; new Z 4; free S; free U; free W; "
                    "free X; free Y; free V; free T; free Z",
           .commands =
               "prompt A once_upon_; free A; prompt B once_upon_; prompt C once_upon_a_hill; free B; free C; new D 20; "
               "prompt E once_upon_a_hill; free D; prompt E once_upon_a_hill"}};
}

}  // namespace
