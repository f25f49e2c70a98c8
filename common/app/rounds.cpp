#include "common/app/rounds.h"

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <map>

#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

// "0 to 10", "8, 9 and 11": for ascending numbers.
std::string listed(const std::vector<int>& numbers) {
  std::vector<std::string> parts;
  std::size_t first = 0;
  while (first < numbers.size()) {
    std::size_t last = first;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) {
      ++last;
    }
    if (last - first >= 2) {
      parts.push_back(format("%d to %d", numbers[first], numbers[last]));
      first = last + 1;
    } else {
      parts.push_back(std::to_string(numbers[first]));
      first += 1;
    }
  }
  std::string result;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) {
      result += i + 1 == parts.size() ? " and " : ", ";
    }
    result += parts[i];
  }
  return result;
}

void append(std::string& text, const std::string& more) { text += (text.empty() ? "" : "; ") + more; }

}  // namespace

const RoundTable::Owner* RoundTable::Step::find(int wanted) const {
  const auto found =
      std::find_if(running.begin(), running.end(), [&](const Owner& owner) { return owner.request == wanted; });
  return found == running.end() ? nullptr : &*found;
}

void RoundTable::add(Step step) {
  step.round = 1;
  if (!steps_.empty()) {
    // In the middle of a round, only requests whose turn has not come can lose their blocks.
    const Step& last = steps_.back();
    const bool begins = step.request <= last.request || step.find(last.request) == nullptr;
    step.round = last.round + (begins ? 1 : 0);
  }
  steps_.push_back(std::move(step));
}

// What happened to a request in the round after its turn `last`, in which it had no turn.
std::string RoundTable::preemption(const Step& last) const {
  const Owner& lost = *last.find(last.request);
  const auto missing = std::find_if(steps_.begin(), steps_.end(), [&](const Step& step) {
    return step.round == last.round + 1 && step.find(last.request) == nullptr;
  });
  const std::string reason = missing == steps_.end() ? "for lack of a block" : format("for %d", missing->request);
  return format("%d is preempted %s: %d tokens in %d block%s", last.request, reason.c_str(), lost.num_tokens,
                lost.num_blocks, lost.num_blocks == 1 ? "" : "s");
}

std::string RoundTable::to_string() const {
  std::map<int, std::vector<const Step*>> turns;  // by request
  for (const Step& step : steps_) {
    turns[step.request].push_back(&step);
  }
  struct Round {
    std::vector<int> admitted;
    std::vector<std::string> preempted;
    std::vector<int> ended;
    int num_running = 0;
    int free_blocks = 0;
  };
  std::map<int, Round> rounds;
  for (const Step& step : steps_) {
    rounds[step.round].num_running += 1;
    rounds[step.round].free_blocks = step.free_blocks;
  }
  for (const auto& [request, own] : turns) {
    rounds[own.front()->round].admitted.push_back(request);
    for (std::size_t i = 1; i < own.size(); ++i) {
      if (const Step& last = *own[i - 1]; own[i]->round > last.round + 1) {
        std::vector<std::string>& preempted = rounds[last.round + 1].preempted;
        preempted.insert(preempted.begin(), preemption(last));  // the latest arrival loses its blocks first
        rounds[own[i]->round].admitted.push_back(request);
      }
    }
    rounds[own.back()->round].ended.push_back(request);
  }
  Table table({"round", "what happens", "running", "free blocks"});
  for (const auto& [number, round] : rounds) {
    std::string text;
    if (!round.admitted.empty()) {
      append(text, listed(round.admitted) + (round.admitted.size() == 1 ? " is admitted" : " are admitted"));
    }
    for (const std::string& event : round.preempted) {
      append(text, event);
    }
    if (!round.ended.empty()) {
      append(text, listed(round.ended) + (round.ended.size() == 1 ? " ends" : " end"));
    }
    if (!text.empty()) {
      table.add_row(
          {std::to_string(number), text, std::to_string(round.num_running), std::to_string(round.free_blocks)});
    }
  }
  return table.to_string();
}

Command& add_rounds(
    Program& program,
    std::function<std::vector<Completion>(const Session&, std::span<const Request>, RoundTable& table)> run) {
  const auto print = [run = std::move(run)](const Session& session) {
    // A stop token is not in the text, so it would be a turn that the table does not see.
    std::vector<Request> requests = session.requests;
    for (Request& request : requests) {
      request.stop_tokens.clear();
    }
    RoundTable table;
    for (const Completion& completion : run(session, requests, table)) {
      if (!completion.error.empty()) {
        throw InputError(completion.error);
      }
    }
    std::cout << table.to_string();
  };
  return program.add_session_command(
      "rounds", "Show in which round each request is admitted, preempted and ends; texts have their full length", print,
      {.sampling = false});
}

}  // namespace common
