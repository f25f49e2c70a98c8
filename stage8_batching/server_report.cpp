// What the server says about its steps.
#include <algorithm>

#include "server.h"

namespace stage8 {

void Server::report_plan(const Step& step) {
  report_.token_budget = options_.token_budget;
  report_.num_tokens = step.num_tokens;
  int num_sequences = 0;
  int longest = 0;
  for (const Share& share : step.shares) {
    report_.served.push_back(id_of(share.group));
    report_.num_served.push_back(0);
    for (const int count : share.work.num_tokens) {
      report_.num_served.back() += count;
      longest = std::max(longest, count);
      num_sequences += 1;
    }
  }
  report_.padded_tokens = num_sequences * longest;
  for (const Group* group : step.admitted) {
    Entry& admitted = entry(id_of(group));
    report_.admitted.push_back(id_of(group));
    if (admitted.outcome.admission < 0.0) {
      admitted.outcome.admission = report_.begin;
    }
  }
  for (const auto& [group, swapped] : step.preempted) {
    (swapped ? report_.swapped_out : report_.thrown_out).push_back(id_of(group));
    entry(id_of(group)).outcome.preemptions += 1;
  }
}

void Server::add_up() {
  const double seconds = report_.scheduling_seconds + report_.computing_seconds;
  for (const int count : report_.num_served) {
    timing_.add(static_cast<std::size_t>(count), seconds * count / report_.num_tokens);
  }
  totals_.steps += report_.num_tokens > 0 ? 1 : 0;
  totals_.tokens += report_.num_tokens;
  totals_.padded_tokens += report_.padded_tokens;
  totals_.slots_reserved += report_.usage.reserved;
  totals_.slots_used += report_.usage.used;
  totals_.running += report_.num_running;
  totals_.swapped_out += static_cast<std::int64_t>(report_.swapped_out.size());
  totals_.thrown_out += static_cast<std::int64_t>(report_.thrown_out.size());
  totals_.most_running = std::max(totals_.most_running, report_.num_running);
}

std::vector<common::Counter> Server::counters() const {
  std::vector<common::Counter> counters = engine_.counters();
  const auto steps = static_cast<double>(std::max<std::int64_t>(totals_.steps, 1));
  const auto set = [&](const char* name, double value) {
    const auto found = std::find_if(counters.begin(), counters.end(),
                                    [&](const common::Counter& counter) { return counter.name == name; });
    if (found == counters.end()) {
      counters.push_back({name, value});
    } else {
      found->value = value;
    }
  };
  set("most_requests_at_once", totals_.most_running);
  set("requests_held", static_cast<double>(totals_.running) / steps);
  set("slots_reserved", static_cast<double>(totals_.slots_reserved) / steps);
  set("slots_used", static_cast<double>(totals_.slots_used) / steps);
  set("preemptions", static_cast<double>(totals_.swapped_out + totals_.thrown_out));
  set("swapped_out", static_cast<double>(totals_.swapped_out));
  set("steps", static_cast<double>(totals_.steps));
  set("tokens_computed", static_cast<double>(totals_.tokens));
  set("padded_tokens", static_cast<double>(totals_.padded_tokens));
  return counters;
}

}  // namespace
