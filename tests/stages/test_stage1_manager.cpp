// Stage 1's manager: first fit over one arena of slots.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "stage1/kv_cache_manager.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage1_ledger.h"

using common::CheckError;
using common::Random;
using stage1::KvCacheManager;
using stage1::Region;
using stage1::SequenceId;
using tests::check_ledger;
using tests::describe;
using tests::is_refused_as_a_bug;
using tests::to_string;

namespace {

const std::string kNoProblem;

// First fit, written as plainly as can be: an owner for every slot, and a scan from the left. It has no holes that
// could be merged wrongly.
class Oracle {
 public:
  struct Sequence {
    int first = 0;
    int size = 0;
    int length = 0;
  };

  explicit Oracle(int num_slots) : owners_(static_cast<std::size_t>(num_slots), kUnowned) {}

  bool allocate(SequenceId sequence, int size) {
    int run = 0;
    for (int slot = 0; slot < static_cast<int>(owners_.size()); ++slot) {
      run = owners_[static_cast<std::size_t>(slot)] == kUnowned ? run + 1 : 0;
      if (run == size) {
        sequences_[sequence] = {slot - size + 1, size, 0};
        fill(sequences_[sequence], sequence);
        return true;
      }
    }
    return false;
  }

  void free(SequenceId sequence) {
    fill(sequences_.at(sequence), kUnowned);
    sequences_.erase(sequence);
  }

  int num_free() const { return static_cast<int>(std::count(owners_.begin(), owners_.end(), kUnowned)); }
  std::map<SequenceId, Sequence>& sequences() { return sequences_; }

  // In the words of describe(manager).
  std::string describe() const {
    std::vector<Region> holes;
    for (int slot = 0; slot < static_cast<int>(owners_.size()); ++slot) {
      if (owners_[static_cast<std::size_t>(slot)] != kUnowned) {
        continue;
      }
      if (holes.empty() || holes.back().first + holes.back().size != slot) {
        holes.push_back({slot, 0});
      }
      holes.back().size += 1;
    }
    std::string result = "holes " + to_string(holes);
    for (const auto& [id, sequence] : sequences_) {
      result += common::format(", %d at %d+%d holds %d", id, sequence.first, sequence.size, sequence.length);
    }
    return result;
  }

 private:
  static constexpr SequenceId kUnowned = -1;

  void fill(const Sequence& sequence, SequenceId owner) {
    std::fill_n(owners_.begin() + sequence.first, sequence.size, owner);
  }

  std::vector<SequenceId> owners_;  // [num_slots]
  std::map<SequenceId, Sequence> sequences_;
};

// The cases that a run of random operations has reached; a run with few cases proves little.
struct FuzzCounts {
  int allocated = 0;
  int refused = 0;
  int refused_by_fragmentation = 0;  // enough slots were free, but not side by side
};

// One random operation on both. Empty if both answered alike.
std::string fuzz_step(KvCacheManager& manager, Oracle& oracle, int num_slots, Random& random, FuzzCounts& counts) {
  const auto below = [&](int bound) { return static_cast<int>(random.below(static_cast<std::uint64_t>(bound))); };
  const SequenceId sequence = below(8);
  const auto found = oracle.sequences().find(sequence);
  if (found == oracle.sequences().end()) {
    const int size = 1 + below(below(4) == 0 ? num_slots + 1 : num_slots / 4 + 1);
    const int num_free = oracle.num_free();
    const bool expected = oracle.allocate(sequence, size);
    counts.allocated += expected ? 1 : 0;
    counts.refused += expected ? 0 : 1;
    counts.refused_by_fragmentation += !expected && size <= num_free ? 1 : 0;
    return manager.allocate(sequence, size) == expected ? "" : common::format("allocate(%d, %d)", sequence, size);
  }
  Oracle::Sequence& owner = found->second;
  const int room = owner.size - owner.length;
  switch (below(5)) {
    case 0: {
      oracle.free(sequence);
      manager.free(sequence);
      return "";
    }
    case 1: {
      const int count = below(owner.size + 2);
      return manager.reserve(sequence, count) == (count <= room) ? ""
                                                                 : common::format("reserve(%d, %d)", sequence, count);
    }
    case 2: {
      const int count = below(room + 1);
      owner.length += count;
      manager.commit(sequence, count);
      return "";
    }
    case 3: {
      const int first = below(owner.size + 1);
      const int count = below(owner.size - first + 1);
      std::vector<int> expected(static_cast<std::size_t>(count));
      std::iota(expected.begin(), expected.end(), owner.first + first);
      return manager.slots(sequence, first, count) == expected
                 ? ""
                 : common::format("slots(%d, %d, %d)", sequence, first, count);
    }
    default: {
      // A misuse has to be noticed, and (as the caller checks) must leave no trace.
      const bool noticed = is_refused_as_a_bug([&] { manager.commit(sequence, room + 1); }) &&
                           is_refused_as_a_bug([&] { manager.allocate(sequence, 1); }) &&
                           is_refused_as_a_bug([&] { manager.free(sequence + 100); });
      return noticed ? "" : common::format("misuse of sequence %d", sequence);
    }
  }
}

// Empty if the manager behaved like the oracle all the way, and its ledger was right after every operation.
std::string fuzz_manager(int num_slots, std::uint64_t seed, int num_operations, FuzzCounts& counts) {
  KvCacheManager manager(num_slots);
  Oracle oracle(num_slots);
  Random random(seed);
  for (int operation = 0; operation < num_operations; ++operation) {
    std::string problem = fuzz_step(manager, oracle, num_slots, random, counts);
    if (problem.empty()) {
      problem = check_ledger(manager, num_slots);
    }
    // The texts cost far more than the ledger, so they are compared now and then, and at the end.
    if (problem.empty() && (operation % 16 == 0 || operation == num_operations - 1) &&
        describe(manager) != oracle.describe()) {
      problem = describe(manager) + "; expected " + oracle.describe();
    }
    if (!problem.empty()) {
      return common::format("%d slots, seed %llu, operation %d: ", num_slots, static_cast<unsigned long long>(seed),
                            operation) +
             problem;
    }
  }
  return "";
}

}  // namespace

TEST_CASE("manager: sequences lie side by side until no hole is large enough") {
  KvCacheManager manager(12);
  REQUIRE(manager.allocate(0, 4));
  CHECK(to_string(manager.region(0)) == "0+4");
  CHECK(to_string(manager.holes()) == "4+8");
  const std::string before = describe(manager);
  CHECK_FALSE(manager.allocate(1, 9));
  CHECK(describe(manager) == before);
  REQUIRE(manager.allocate(1, 3));
  CHECK(to_string(manager.region(1)) == "4+3");
  CHECK(to_string(manager.holes()) == "7+5");
  CAPTURE(to_string(manager.holes()));
  REQUIRE(manager.allocate(2, 5));  // as large as the hole, which disappears
  CHECK(to_string(manager.region(2)) == "7+5");
  CHECK(to_string(manager.holes()).empty());
  CHECK_FALSE(manager.allocate(3, 1));
  CHECK(check_ledger(manager, 12) == kNoProblem);
}

TEST_CASE("manager: a sequence takes the first hole that is large enough, and its left end") {
  KvCacheManager manager(20);
  REQUIRE(manager.allocate(0, 4));
  REQUIRE(manager.allocate(1, 3));
  REQUIRE(manager.allocate(2, 6));
  REQUIRE(manager.allocate(3, 2));
  manager.free(0);
  manager.free(2);
  REQUIRE(to_string(manager.holes()) == "0+4 7+6 15+5");

  REQUIRE(manager.allocate(4, 5));  // 0+4 is too small, 15+5 would fit exactly but comes later
  CHECK(to_string(manager.region(4)) == "7+5");
  REQUIRE(manager.allocate(5, 4));  // fills a hole to its end: it disappears
  CHECK(to_string(manager.region(5)) == "0+4");
  CHECK(to_string(manager.holes()) == "12+1 15+5");
  CHECK(check_ledger(manager, 20) == kNoProblem);
}

TEST_CASE("manager: what is freed joins the holes beside it") {
  // Five regions of 2 slots; which of them are holes when the middle one is freed?
  struct Neighbours {
    std::vector<SequenceId> freed_before;
    std::string holes_after;
  };
  const std::vector<Neighbours> cases = {
      {{}, "4+2"}, {{1}, "2+4"}, {{3}, "4+4"}, {{1, 3}, "2+6"}, {{0, 4}, "0+2 4+2 8+2"}, {{0, 1, 3, 4}, "0+10"}};
  for (const Neighbours& neighbours : cases) {
    KvCacheManager manager(10);
    for (SequenceId sequence = 0; sequence < 5; ++sequence) {
      REQUIRE(manager.allocate(sequence, 2));
    }
    REQUIRE(manager.holes().empty());
    for (const SequenceId sequence : neighbours.freed_before) {
      manager.free(sequence);
    }
    manager.free(2);
    CHECK(to_string(manager.holes()) == neighbours.holes_after);
    CHECK(check_ledger(manager, 10) == kNoProblem);
  }
}

TEST_CASE("manager: external fragmentation makes it refuse although enough is free, and nothing changes") {
  KvCacheManager manager(24);
  for (SequenceId sequence = 0; sequence < 4; ++sequence) {
    REQUIRE(manager.allocate(sequence, 6));
  }
  manager.free(0);
  manager.free(2);
  const std::string before = describe(manager);
  const stage1::Usage usage = manager.usage();
  REQUIRE(usage.total - usage.reserved == 12);
  CHECK(to_string(manager.holes()) == "0+6 12+6");
  CHECK_FALSE(manager.allocate(4, 7));
  CHECK(describe(manager) == before);
  CHECK_FALSE(manager.contains(4));
  CHECK(manager.allocate(4, 6));

  manager.free(1);  // slots 6 to 17 are free now, side by side
  CHECK(to_string(manager.holes()) == "6+12");
  CHECK(manager.allocate(5, 12));
  CHECK(check_ledger(manager, 24) == kNoProblem);
}

TEST_CASE("manager: a sequence as large as the cache fits, and one slot more does not") {
  KvCacheManager manager(5);
  CHECK_FALSE(manager.allocate(0, 6));
  CHECK_FALSE(manager.allocate(0, std::numeric_limits<int>::max()));
  CHECK(describe(manager) == "holes 0+5");
  CHECK(manager.allocate(0, 5));
  CHECK(manager.holes().empty());
  CHECK_FALSE(manager.allocate(1, 1));
  manager.free(0);
  CHECK(describe(manager) == "holes 0+5");
}

TEST_CASE("manager: reserve, commit and slots stay inside what was reserved") {
  KvCacheManager manager(20);
  REQUIRE(manager.allocate(0, 3));
  REQUIRE(manager.allocate(1, 6));
  CHECK(manager.length(1) == 0);
  CHECK(manager.capacity(1) == 6);
  CHECK(manager.reserve(1, 6));
  CHECK_FALSE(manager.reserve(1, 7));
  CHECK(manager.length(1) == 0);  // reserving is not yet having

  manager.commit(1, 4);
  CHECK(manager.length(1) == 4);
  CHECK(manager.reserve(1, 2));
  CHECK_FALSE(manager.reserve(1, 3));
  CHECK_FALSE(manager.reserve(1, std::numeric_limits<int>::max()));
  CHECK(manager.slots(1, 4, 2) == std::vector<int>{7, 8});
  CHECK(manager.slots(1, 0, 6) == std::vector<int>{3, 4, 5, 6, 7, 8});
  CHECK(manager.slots(1, 6, 0).empty());
  CHECK(manager.usage().used == 4);
  CHECK(manager.usage().reserved == 9);
  manager.commit(1, 2);
  CHECK(manager.reserve(1, 0));
  CHECK_FALSE(manager.reserve(1, 1));
}

TEST_CASE("manager: misuse is noticed and changes nothing") {
  KvCacheManager manager(20);
  REQUIRE(manager.allocate(7, 6));
  manager.commit(7, 4);
  const std::string before = describe(manager);

  CHECK_THROWS_AS(manager.allocate(7, 1), CheckError);  // live already
  CHECK_THROWS_AS(manager.allocate(9, 0), CheckError);
  CHECK_THROWS_AS(manager.allocate(9, -3), CheckError);
  CHECK_THROWS_AS(manager.reserve(7, -1), CheckError);
  CHECK_THROWS_AS(manager.reserve(9, 1), CheckError);
  CHECK_THROWS_AS(manager.commit(7, 3), CheckError);  // two are left
  CHECK_THROWS_AS(manager.commit(7, -1), CheckError);
  CHECK_THROWS_AS(manager.commit(9, 1), CheckError);
  CHECK_THROWS_AS(manager.slots(7, -1, 2), CheckError);
  CHECK_THROWS_AS(manager.slots(7, 5, 2), CheckError);
  CHECK_THROWS_AS(manager.slots(7, 0, -1), CheckError);
  CHECK_THROWS_AS(manager.slots(7, 7, 0), CheckError);
  CHECK_THROWS_AS(manager.slots(9, 0, 1), CheckError);
  CHECK_THROWS_AS(manager.length(9), CheckError);
  CHECK_THROWS_AS(manager.region(9), CheckError);
  CHECK_THROWS_AS(manager.capacity(9), CheckError);
  CHECK_THROWS_AS(KvCacheManager(0), CheckError);
  CHECK(describe(manager) == before);
  CHECK(check_ledger(manager, 20) == kNoProblem);
}

TEST_CASE("manager: an id can be used again, for a sequence that starts empty") {
  KvCacheManager manager(8);
  REQUIRE(manager.allocate(3, 4));
  manager.commit(3, 4);
  manager.free(3);
  CHECK_FALSE(manager.contains(3));
  CHECK_THROWS_AS(manager.free(3), CheckError);  // it has been freed
  REQUIRE(manager.allocate(3, 8));
  CHECK(manager.contains(3));
  CHECK(manager.length(3) == 0);
  CHECK(manager.sequences() == std::vector<SequenceId>{3});
}

TEST_CASE("manager: 240,000 random operations agree with a slot-by-slot oracle") {
  FuzzCounts counts;
  for (const int num_slots : {1, 7, 24, 61}) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      CHECK(fuzz_manager(num_slots, seed, 20000, counts) == kNoProblem);
    }
  }
  CHECK(counts.allocated > 10000);
  CHECK(counts.refused > 10000);
  CHECK(counts.refused_by_fragmentation > 1000);
}
