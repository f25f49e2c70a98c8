// What the fuzzers share: options, seeds, counts of what occurred, and the report of a failure.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/text.h"

namespace tests {

// An oracle found something wrong.
class FuzzFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How often each event occurred; a run in which one of them never did has shown little.
class FuzzCounts {
 public:
  explicit FuzzCounts(const std::vector<std::string_view>& names) {
    for (const std::string_view name : names) {
      counts_.emplace_back(name, 0);
    }
  }

  void add(std::string_view name, long long times = 1) {
    const auto found =
        std::find_if(counts_.begin(), counts_.end(), [&](const auto& entry) { return entry.first == name; });
    if (found == counts_.end()) {
      throw std::logic_error("no count has the name " + std::string(name));
    }
    found->second += times;
  }
  long long smallest() const {
    return std::min_element(counts_.begin(), counts_.end(),
                            [](const auto& left, const auto& right) { return left.second < right.second; })
        ->second;
  }
  // "17 allocated, 4 refused"
  std::string to_string() const {
    std::string result;
    for (const auto& [name, count] : counts_) {
      result += (result.empty() ? "" : ", ") + std::to_string(count) + " " + std::string(name);
    }
    return result;
  }

 private:
  std::vector<std::pair<std::string_view, long long>> counts_;
};

struct FuzzPlan {
  std::string unit;             // "operations" or "cases": what --operations or FUZZ_OPERATIONS counts
  long long default_units = 0;  // in a run without options
  int units_per_seed = 1;
  long long rarest = 100;  // each event has to occur once in this many units, in a run of more than min_seeds
  long long min_seeds = 10;
};

// The option, or else the environment variable, or else the default.
inline long long fuzz_setting(const std::vector<std::string>& arguments, const std::string& name, long long fallback) {
  const auto found = std::find(arguments.begin(), arguments.end(), "--" + name);
  if (found != arguments.end() && std::next(found) != arguments.end()) {
    return std::stoll(*std::next(found));
  }
  std::string variable = "FUZZ_" + name;
  std::transform(variable.begin(), variable.end(), variable.begin(), [](char letter) {
    return letter >= 'a' && letter <= 'z' ? static_cast<char>(letter - 'a' + 'A') : letter;
  });
  const char* value = std::getenv(variable.c_str());
  return value != nullptr ? std::stoll(value) : fallback;
}

// Runs one seed after another until there are enough units or, with --seconds, until the time is up. run_seed(seed,
// counts) throws if an oracle disagrees. Returns the exit status.
template <typename RunSeed>
int run_fuzz(const std::vector<std::string>& arguments, const FuzzPlan& plan, FuzzCounts counts,
             const RunSeed& run_seed) {
  try {
    const long long num_units = fuzz_setting(arguments, plan.unit, plan.default_units);
    const auto first_seed = static_cast<std::uint64_t>(fuzz_setting(arguments, "seed", 1));
    long long num_seeds = (num_units + plan.units_per_seed - 1) / plan.units_per_seed;
    const long long seconds = fuzz_setting(arguments, "seconds", 0);
    const auto begin = std::chrono::steady_clock::now();
    std::uint64_t end_seed = first_seed + static_cast<std::uint64_t>(num_seeds);
    for (std::uint64_t seed = first_seed; seconds > 0 || seed < end_seed; ++seed) {
      if (seconds > 0 && std::chrono::steady_clock::now() - begin > std::chrono::seconds(seconds)) {
        end_seed = seed;
        break;
      }
      try {
        run_seed(seed, counts);
      } catch (const std::exception& error) {
        std::cout << common::format("fuzz failed with --%s %d --seed %llu: ", plan.unit.c_str(), plan.units_per_seed,
                                    static_cast<unsigned long long>(seed))
                  << error.what() << std::endl;
        return 1;
      }
    }
    num_seeds = static_cast<long long>(end_seed - first_seed);
    std::cout << common::format("fuzz: %lld %s, seeds %llu to %llu: ", num_seeds * plan.units_per_seed,
                                plan.unit.c_str(), static_cast<unsigned long long>(first_seed),
                                static_cast<unsigned long long>(end_seed - 1))
              << counts.to_string() << std::endl;
    if (num_seeds > plan.min_seeds && counts.smallest() * plan.rarest < num_seeds * plan.units_per_seed) {
      std::cout << "fuzz failed: something hardly ever came up" << std::endl;
      return 1;
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}

}  // namespace tests
