// A cache in which a token is a single number, driven as an engine drives it, so that a test can tell at a glance what
// a sequence finds in its slots. For stages 5 and later, which share blocks.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/tensor.h"
#include "common/model/generation.h"
#include "tests/support/catch.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

namespace tests {

using Numbers = std::vector<float>;

// A cache whose tokens are single numbers above zero: K is the number, V its negative.
class NumberPool {
 public:
  NumberPool(int num_blocks, int block_size, int num_host_blocks = 0)
      : num_blocks_(num_blocks),
        manager_(make_manager(num_blocks, block_size, num_host_blocks)),
        cache_(cache_shape({1, 1, 1, 1}, num_blocks, block_size, num_host_blocks)) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
  }

  stage::KvCacheManager& manager() { return manager_; }
  std::string ledger(bool has_windows = false) const {
    return check_ledger(manager_, num_blocks_, manager_.block_size(), has_windows);
  }
  int num_free() const { return static_cast<int>(manager_.free_blocks().size()); }

  // A sequence of these numbers.
  void start(int sequence, const Numbers& numbers) {
    REQUIRE(manager_.allocate(sequence, static_cast<int>(numbers.size())));
    write(sequence, numbers);
  }

#if STAGE_NUMBER >= 6
  // A sequence of these tokens; each is its own number. Only tokens that are not in the prefix cache are written.
  void start_text(int sequence, const std::vector<common::Token>& tokens) {
    REQUIRE(manager_.allocate(sequence, tokens));
    const auto missing = std::span(tokens).subspan(static_cast<std::size_t>(manager_.length(sequence)));
    write_rows(sequence, {missing.begin(), missing.end()});
    manager_.commit(sequence, missing);
  }
#endif

  bool append(int sequence, const Numbers& numbers) {
    if (!manager_.reserve(sequence, static_cast<int>(numbers.size()))) {
      return false;
    }
    execute_copies();
    write(sequence, numbers);
    return true;
  }

  void execute_copies() { execute(take_copies(manager_)); }
  void execute(const std::vector<stage::BlockCopy>& copies) { cache_.copy_blocks(copies); }

  // Writes into reserved slots, after all copies were carried out.
  void write(int sequence, const Numbers& numbers) {
    write_rows(sequence, numbers);
    manager_.commit(sequence, static_cast<int>(numbers.size()));
  }

  // What the sequence finds in its slots. A V that does not belong to its K is returned as -1.
  Numbers read(int sequence) const {
    Numbers result;
    for (const int slot : manager_.slots(sequence, 0, manager_.length(sequence))) {
      const float k = cache_.keys(0, 0, slot, 1)(0, 0);
      result.push_back(cache_.values(0, 0, slot, 1)(0, 0) == -k ? k : -1.0F);
    }
    return result;
  }

  // Every float of the cache, 0 for NaN.
  Numbers all() const {
    Numbers result;
    for (int slot = 0; slot < manager_.usage().total; ++slot) {
      for (const float value : {cache_.keys(0, 0, slot, 1)(0, 0), cache_.values(0, 0, slot, 1)(0, 0)}) {
        result.push_back(std::isnan(value) ? 0.0F : value);
      }
    }
    return result;
  }

 private:
  void write_rows(int sequence, const Numbers& numbers) {
    const auto count = static_cast<int>(numbers.size());
    const std::string no_problem;
    REQUIRE(check_writable(manager_, sequence, count) == no_problem);
    const common::Matrix k = common::MatrixView(numbers.data(), count, 1);
    cache_.write(0, manager_.slots(sequence, manager_.length(sequence), count), k, -k);
  }

  int num_blocks_;
  stage::KvCacheManager manager_;
  stage::KvCache cache_;
};

// first, first + 1, …
inline Numbers count_from(int first, int count) {
  Numbers result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), static_cast<float>(first));
  return result;
}

inline Numbers joined(Numbers left, const Numbers& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

inline std::vector<std::pair<int, int>> pairs(const std::vector<stage::BlockCopy>& copies) {
  std::vector<std::pair<int, int>> result;
  result.reserve(copies.size());
  for (const stage::BlockCopy& copy : copies) {
    result.emplace_back(copy.source, copy.destination);
  }
  return result;
}
using Copies = std::vector<std::pair<int, int>>;

}  // namespace tests
