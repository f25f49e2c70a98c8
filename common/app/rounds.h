// What happens to requests that take turns in static batches, round by round: the command `rounds`.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/app/cli.h"

namespace common {

// Watches an engine run. A round gives each request of the batch one token, in order of arrival.
class RoundTable {
 public:
  // To be called for each drawn token. The manager's sequences are the running requests.
  template <typename Manager>
  void add(int request, const Manager& manager) {
    Step step;
    step.request = request;
    for (const int running : manager.sequences()) {
      step.running.push_back({running, manager.length(running), static_cast<int>(manager.block_table(running).size())});
    }
    const auto usage = manager.usage();
    step.free_blocks = (usage.total - usage.reserved) / manager.block_size();
    add(std::move(step));
  }

  // A row for each round in which requests are admitted, preempted or end. Free blocks are counted when the round's
  // last token is drawn, before the requests that end free theirs.
  std::string to_string() const;

 private:
  struct Owner {
    int request = 0;
    int num_tokens = 0;
    int num_blocks = 0;
  };
  struct Step {
    int request = 0;
    std::vector<Owner> running;
    int free_blocks = 0;
    int round = 0;

    const Owner* find(int wanted) const;
  };
  void add(Step step);
  std::string preemption(const Step& last) const;

  std::vector<Step> steps_;
};

// Adds the command `rounds`. `run` serves the requests and calls table.add() for each token.
Command& add_rounds(
    Program& program,
    std::function<std::vector<Completion>(const Session&, std::span<const Request>, RoundTable& table)> run);

}  // namespace common
