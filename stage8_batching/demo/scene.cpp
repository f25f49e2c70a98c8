#include "scene.h"

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "../decoding.h"
#include "../kv_cache_manager.h"
#include "../scheduler.h"

namespace stage8 {
namespace {

using common::counted;
using common::listed;
using common::Words;

constexpr int kNumBlocks = 6;
constexpr int kBlockSize = 4;
constexpr int kTokenBudget = 8;

std::string name_of(const SequenceGroup& group) { return {common::sequence_name(group.id())}; }

// "A", "A and B", "A, B and C"
std::string listed_names(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " and " : ", ") + names[i];
  }
  return text;
}

// A request whose tokens are only counted: no two prompts begin alike, and what is drawn is the request's own token.
class CountedRequest : public ParallelSampling {
 public:
  CountedRequest(KvCacheManager& manager, SequenceIds& ids, int id, int num_prompt, int num_new)
      : ParallelSampling(manager, ids, id, request(id, num_prompt, num_new), 1), num_prompt_(num_prompt) {}

  // Does what a forward pass would do.
  void compute(const ScheduledTokens& tokens) {
    const SequenceId sequence = tokens.sequences.front();
    manager_.commit(sequence, this->tokens(sequence, manager_.length(sequence), tokens.num_tokens.front()));
    if (tokens.with_logits) {
      extend({{common::Token{id()}}, {}}, 0.0);
    }
  }

  int num_prompt() const { return num_prompt_; }

 private:
  static common::Request request(int id, int num_prompt, int num_new) {
    common::Request result;
    result.prompt.assign(static_cast<std::size_t>(num_prompt), id);
    result.max_new_tokens = num_new;
    return result;
  }

  int num_prompt_;
};

// The engine's loop without a model.
class SchedulerScene : public common::Scene {
 public:
  explicit SchedulerScene(Preemption preemption)
      : manager_(kNumBlocks, kBlockSize, hash_block, preemption == Preemption::kRecompute ? 0 : kNumBlocks),
        num_host_blocks_(manager_.num_free_host_blocks()),
        scheduler_(manager_, {.token_budget = kTokenBudget, .headroom = 0, .preemption = preemption}) {
    manager_.on_evict([this](int block) { evicted_.push_back(block); });
    add_command(
        "add NAME PROMPT NEW",
        [](const Words& words) {
          return "send " + words[0] + ": a prompt of " + counted(common::parse_count(words[1], 1), "token") + ", and " +
                 std::to_string(common::parse_count(words[2], 1)) + " to write";
        },
        [this](const Words& words) { return add(words); });
    add_command(
        // Numbered as the command `steps` does.
        "step", [this](const Words&) { return "do step " + std::to_string(num_steps_); },
        [this](const Words&) { return step(); });
    add_command(
        "stop NAME", [](const Words& words) { return "stop " + words[0]; },
        [this](const Words& words) { return stop(words[0]); });
  }

  nlohmann::ordered_json state() const override {
    common::PoolState pool{.num_blocks = kNumBlocks, .block_size = kBlockSize, .num_host_blocks = num_host_blocks_};
    for (const auto& group : scheduler_.running()) {
      pool.running.push_back(owner_of(*group));
    }
    for (const auto& group : scheduler_.waiting()) {
      pool.waiting.push_back(owner_of(*group));
    }
    pool.free_blocks.assign(manager_.free_blocks().rbegin(), manager_.free_blocks().rend());
    pool.cached.emplace();
    for (const int block : manager_.prefix_cache().evictable()) {
      pool.cached->push_back({block, ""});
    }
    for (int block = 0; block < kNumBlocks; ++block) {
      pool.reference_counts.push_back(manager_.reference_count(block));
    }
    pool.copies = copies_;
    pool.evicted = evicted_;
    pool.counters = {{"steps done", num_steps_},
                     {"tokens in the step", num_step_tokens_},
                     {"tokens computed", num_computed_},
                     {"running", static_cast<std::int64_t>(pool.running.size())},
                     {"waiting", static_cast<std::int64_t>(pool.waiting.size())},
                     {"preemptions", num_preemptions_},
                     {"blocks copied", num_copies_}};
    return to_json(pool);
  }

  Actions actions() const override {
    Actions result = {{"all", {"step"}}};
    for (const auto& group : scheduler_.running()) {
      result.push_back({name_of(*group), {"stop " + name_of(*group)}});
    }
    for (const auto& group : scheduler_.waiting()) {
      result.push_back({name_of(*group), {"stop " + name_of(*group)}});
    }
    for (int id = 0; id < 26; ++id) {
      if (!requests_.contains(id)) {
        const std::string name = {common::sequence_name(id)};
        result.push_back({name, {"add " + name + " 6 8", "add " + name + " 14 4"}});
        break;
      }
    }
    return result;
  }

 private:
  common::PoolState::Owner owner_of(const SequenceGroup& group) const {
    const auto& request = static_cast<const CountedRequest&>(group);
    common::PoolState::Owner owner{.id = group.id(),
                                   .name = name_of(group),
                                   .sequences = {},
                                   .prompt_tokens = request.num_prompt(),
                                   .max_tokens = group.max_tokens(),
                                   .was_preempted = preempted_.contains(group.id())};
    const auto computed = computed_.find(group.id());
    owner.num_computed = computed == computed_.end() ? 0 : computed->second;
    const std::vector<SequenceId> sequences = group.sequences();
    if (group.output().state == RequestState::kSwapped) {
      owner.num_host_blocks = host_blocks_.at(group.id());
    } else {
      for (const SequenceId sequence : sequences) {
        owner.sequences.push_back({sequence, manager_.length(sequence), manager_.block_table(sequence)});
      }
    }
    return owner;
  }

  void begin_command() {
    copies_.clear();
    evicted_.clear();
    computed_.clear();
    num_step_tokens_ = 0;
  }

  std::string add(const Words& words) {
    const int id = common::sequence_id(words[0]);
    const int num_prompt = common::parse_count(words[1], 1);
    const int num_new = common::parse_count(words[2], 1);
    if (requests_.contains(id)) {
      throw common::InputError("request " + words[0] + " is there already");
    }
    // As the engine does: a request that would not fit even alone is rejected when it arrives.
    if (num_prompt > kNumBlocks * kBlockSize || num_new > kNumBlocks * kBlockSize - num_prompt + 1) {
      throw common::InputError("request " + words[0] + " would not fit into " +
                               std::to_string(kNumBlocks * kBlockSize) + " slots, even alone");
    }
    begin_command();
    const auto request = std::make_shared<CountedRequest>(manager_, ids_, id, num_prompt, num_new);
    requests_[id] = request;
    scheduler_.add(request);
    return words[0] + " waits at the end of the queue. The next step looks at it.";
  }

  std::string stop(const std::string& name) {
    const auto found = requests_.find(common::sequence_id(name));
    if (found == requests_.end()) {
      throw common::InputError("there is no request " + name);
    }
    begin_command();
    end(found->first);
    return name + " ends. What it has published stays cached, the rest of its blocks is free.";
  }

  void end(int id) {
    scheduler_.remove(*requests_.at(id));
    preempted_.erase(id);
    requests_.erase(id);
  }

  std::string step() {
    begin_command();
    if (requests_.empty()) {
      return "There is nothing to do: no request runs, and none waits.";
    }
    std::map<int, int> lengths;  // of those that run, in blocks: what each takes along if it is swapped out
    for (const auto& group : scheduler_.running()) {
      lengths[group->id()] = blocks_needed(manager_.length(group->sequences().front()), kBlockSize);
    }
    const ScheduledStep scheduled = scheduler_.schedule();
    for (const auto& [group, swapped] : scheduled.preempted) {
      host_blocks_[group->id()] = lengths.at(group->id());
    }
    num_steps_ += 1;
    num_step_tokens_ = scheduled.num_tokens;
    num_computed_ += scheduled.num_tokens;
    std::string said = said_of_preempted(scheduled) + said_of_admitted(scheduled);
    note_copies();
    said += said_of_tokens(scheduled);
    std::string ended;
    for (const ScheduledGroup& group : scheduled.groups) {
      const std::vector<int> table = manager_.block_table(group.group->sequences().front());
      static_cast<CountedRequest&>(*group.group).compute(group.tokens);
      if (group.group->finished()) {
        ended += " Then " + name_of(*group.group) + " ends, and gives back " + listed("block", table) + ".";
        end(group.group->id());
      }
    }
    return said + ended;
  }

  std::string said_of_preempted(const ScheduledStep& step) {
    std::string said;
    for (const auto& [group, swapped] : step.preempted) {
      num_preemptions_ += 1;
      preempted_.insert(group->id());
      said += "A block is missing: " + name_of(*group) + ", the latest, is preempted" +
              (swapped ? ", and its blocks are copied to the host's memory. "
                       : "; its blocks are for others now, and it will be computed again. ");
    }
    return said;
  }

  std::string said_of_admitted(const ScheduledStep& step) {
    std::string said;
    for (const SequenceGroup* group : step.admitted) {
      const bool is_back = preempted_.contains(group->id());
      said += name_of(*group) + (is_back ? " is resumed" : " is admitted");
      const SequenceId sequence = group->sequences().front();
      const bool is_swapped_in = !manager_.pending_copies().empty();
      const int num_found = manager_.length(sequence);
      if (num_found > 0 && is_swapped_in) {
        said += ": its blocks come back from the host's memory, as " + listed("block", manager_.block_table(sequence));
      } else if (num_found > 0) {
        said += ": " + std::to_string(num_found) + " of its tokens are still cached";
      }
      said += ". ";
    }
    return said;
  }

  std::string said_of_tokens(const ScheduledStep& step) {
    std::vector<std::string> parts;
    for (const ScheduledGroup& group : step.groups) {
      const int count = std::accumulate(group.tokens.num_tokens.begin(), group.tokens.num_tokens.end(), 0);
      if (count > 0) {
        computed_[group.group->id()] = count;
        parts.push_back(name_of(*group.group) + " " + counted(count, "token"));
      }
    }
    std::vector<std::string> idle;
    for (const auto& group : scheduler_.running()) {
      if (!computed_.contains(group->id())) {
        idle.push_back(name_of(*group));
      }
    }
    std::string said = "Computed: " + (parts.empty() ? "nothing" : listed_names(parts)) + ", of a budget of " +
                       std::to_string(kTokenBudget) + ".";
    if (!idle.empty()) {
      said += step.is_memory_short || step.num_tokens < kTokenBudget
                  ? " For " + listed_names(idle) + " there is no block, and no later request to preempt: a pause."
                  : " Nothing of the budget is left for " + listed_names(idle) + ".";
    }
    return said;
  }

  void note_copies() {
    for (const auto& [source, destination] : manager_.pending_copies()) {
      copies_.emplace_back(source, destination);
    }
    num_copies_ += static_cast<std::int64_t>(copies_.size());
    manager_.clear_pending_copies();
  }

  KvCacheManager manager_;
  int num_host_blocks_;
  SequenceIds ids_;
  Scheduler scheduler_;
  std::map<int, std::shared_ptr<CountedRequest>> requests_;  // by id, until they end
  std::set<int> preempted_;                                  // at least once
  std::map<int, int> host_blocks_;                           // that a swapped request has
  std::map<int, int> computed_;                              // tokens in the last step, by request
  std::vector<std::pair<int, int>> copies_;                  // of the last step
  std::vector<int> evicted_;
  int num_step_tokens_ = 0;
  std::int64_t num_steps_ = 0;
  std::int64_t num_computed_ = 0;
  std::int64_t num_preemptions_ = 0;
  std::int64_t num_copies_ = 0;
};

std::string steps(int count) {
  std::string commands;
  for (int i = 0; i < count; ++i) {
    commands += "step; ";
  }
  return commands;
}

}  // namespace

std::vector<common::SceneScript> scenes() {
  const std::string first =
      "Three requests in six blocks of four slots, at most 8 tokens in a step. A and B have prompts of 6 tokens, C of "
      "4, and each is to get 8 more. ";
  const std::string requests = "add A 6 8; add B 6 8; add C 4 8";
  return {{.name = "preemption",
           .title = "Admit, preempt, resume",
           .first = first + "One that is preempted is computed again later.",
           .make = [] { return std::make_unique<SchedulerScene>(Preemption::kRecompute); },
           .setup = requests,
           .commands = steps(16)},
          {.name = "swapping",
           .title = "Preempted requests move to the host's memory",
           .first = first + "One that is preempted has its blocks copied to the host's memory.",
           .make = [] { return std::make_unique<SchedulerScene>(Preemption::kSwap); },
           .setup = requests,
           .commands = steps(15)}};
}

}  // namespace
