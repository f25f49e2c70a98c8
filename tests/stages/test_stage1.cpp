// Stage 1's own tests: the first-fit manager, the storage, and the engine with its static batches.
#include "tests/support/catch.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/app/compare.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "stage1/attention.h"
#include "stage1/engine.h"
#include "stage1/kv_cache.h"
#include "stage1/kv_cache_manager.h"
#include "tests/stages/engine_fixtures.h"

using common::CheckError;
using common::Completion;
using common::FinishReason;
using common::Matrix;
using common::Random;
using common::Request;
using common::Token;
using stage1::KvCache;
using stage1::KvCacheManager;
using stage1::KvCacheShape;
using stage1::Region;
using stage1::SequenceId;
using tests::contains;
using tests::is_refused_as_a_bug;
using tests::kSmallContext;
using tests::make_request;
using tests::small_model;

namespace {

// What the checks below return if all is well; a failing one then shows the text instead.
const std::string kNoProblem;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::string to_string(const Region& region) { return common::format("%d+%d", region.first, region.size); }

// "0+4 10+2": the holes, or any other regions, as first+size.
std::string to_string(const std::vector<Region>& regions) {
  std::string result;
  for (const Region& region : regions) {
    result += (result.empty() ? "" : " ") + to_string(region);
  }
  return result;
}

// All that can be asked of a manager: two equal texts mean that nothing has changed.
std::string describe(const KvCacheManager& manager) {
  std::string result = "holes " + to_string(manager.holes());
  for (const SequenceId sequence : manager.sequences()) {
    result += common::format(", %d at %s holds %d", sequence, to_string(manager.region(sequence)).c_str(),
                             manager.length(sequence));
  }
  return result;
}

// The ledger: every slot is in one hole or belongs to one sequence; holes ascend, are not empty and do not touch; and
// usage() agrees. Empty if all of this holds.
std::string check_ledger(const KvCacheManager& manager, int num_slots) {
  std::vector<int> owners(static_cast<std::size_t>(num_slots), 0);
  const auto claim = [&](const Region& region) {
    if (region.size <= 0 || region.first < 0 || region.first + region.size > num_slots) {
      return false;
    }
    for (int slot = region.first; slot < region.first + region.size; ++slot) {
      owners[static_cast<std::size_t>(slot)] += 1;
    }
    return true;
  };

  int end_of_last_hole = -1;
  for (const Region& hole : manager.holes()) {
    if (!claim(hole)) {
      return "hole " + to_string(hole) + " is empty or outside the cache";
    }
    if (hole.first <= end_of_last_hole) {
      return "hole " + to_string(hole) + " is out of order or touches the one before";
    }
    end_of_last_hole = hole.first + hole.size;
  }
  int reserved = 0;
  int used = 0;
  for (const SequenceId sequence : manager.sequences()) {
    const Region region = manager.region(sequence);
    const int length = manager.length(sequence);
    if (!claim(region)) {
      return common::format("sequence %d has a region outside the cache", sequence);
    }
    if (length < 0 || length > region.size || manager.capacity(sequence) != region.size) {
      return common::format("sequence %d holds %d tokens in %d slots", sequence, length, region.size);
    }
    reserved += region.size;
    used += length;
  }
  const auto wrong = std::find_if(owners.begin(), owners.end(), [](int count) { return count != 1; });
  if (wrong != owners.end()) {
    return common::format("slot %td is owned %d times", wrong - owners.begin(), *wrong);
  }
  const stage1::Usage usage = manager.usage();
  if (usage.total != num_slots || usage.reserved != reserved || usage.used != used) {
    return common::format("usage says %d total, %d reserved, %d used", usage.total, usage.reserved, usage.used);
  }
  return "";
}

// First fit, written as plainly as can be: an owner for every slot, and a scan from the left. It has no holes that
// could be merged wrongly.
class Oracle {
 public:
  struct Sequence {
    int first = 0;
    int size = 0;
    int length = 0;
  };

  explicit Oracle(int num_slots) : owners_(static_cast<std::size_t>(num_slots), kNobody) {}

  bool allocate(SequenceId sequence, int size) {
    int run = 0;
    for (int slot = 0; slot < static_cast<int>(owners_.size()); ++slot) {
      run = owners_[static_cast<std::size_t>(slot)] == kNobody ? run + 1 : 0;
      if (run == size) {
        sequences_[sequence] = {slot - size + 1, size, 0};
        fill(sequences_[sequence], sequence);
        return true;
      }
    }
    return false;
  }

  void free(SequenceId sequence) {
    fill(sequences_.at(sequence), kNobody);
    sequences_.erase(sequence);
  }

  int num_free() const { return static_cast<int>(std::count(owners_.begin(), owners_.end(), kNobody)); }
  std::map<SequenceId, Sequence>& sequences() { return sequences_; }

  // In the words of describe(manager).
  std::string describe() const {
    std::vector<Region> holes;
    for (int slot = 0; slot < static_cast<int>(owners_.size()); ++slot) {
      if (owners_[static_cast<std::size_t>(slot)] != kNobody) {
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
  static constexpr SequenceId kNobody = -1;

  void fill(const Sequence& sequence, SequenceId owner) {
    std::fill_n(owners_.begin() + sequence.first, sequence.size, owner);
  }

  std::vector<SequenceId> owners_;  // [num_slots]
  std::map<SequenceId, Sequence> sequences_;
};

// What a run of random operations has met; a run that met too little has shown little.
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

// ---- Storage -------------------------------------------------------------------------------------------------------

KvCacheShape small_shape() {
  KvCacheShape shape;
  shape.num_layers = 2;
  shape.num_blocks = 3;
  shape.block_size = 4;
  shape.num_heads = 6;
  shape.num_kv_heads = 2;
  shape.head_dim = 5;
  return shape;
}

// A different float for every layer, slot, kv head and dimension, and for K and V. All are small whole numbers.
float content(const KvCacheShape& shape, bool is_value, int layer, int slot, int kv_head, int d) {
  int index = is_value ? 1 : 0;
  index = index * shape.num_layers + layer;
  index = index * shape.num_slots() + slot;
  index = index * shape.num_kv_heads + kv_head;
  return static_cast<float>(index * shape.head_dim + d);
}

// The rows for these slots: [slots.size(), num_kv_heads * head_dim].
Matrix content_rows(const KvCacheShape& shape, bool is_value, int layer, std::span<const int> slots) {
  return Matrix::NullaryExpr(static_cast<Eigen::Index>(slots.size()), Eigen::Index{shape.num_kv_heads} * shape.head_dim,
                             [&](Eigen::Index row, Eigen::Index col) {
                               return content(shape, is_value, layer, slots[static_cast<std::size_t>(row)],
                                              static_cast<int>(col) / shape.head_dim,
                                              static_cast<int>(col) % shape.head_dim);
                             });
}

void write_content(KvCache& cache, std::span<const int> slots) {
  for (int layer = 0; layer < cache.shape().num_layers; ++layer) {
    cache.write(layer, slots, content_rows(cache.shape(), false, layer, slots),
                content_rows(cache.shape(), true, layer, slots));
  }
}

// K (or V) of one position of one sequence, any layer and head: a pure function, so that nothing has to be remembered.
Matrix token_rows(const KvCacheShape& shape, int sequence, int first_position, int count, int layer, bool is_value) {
  const Eigen::Index cols = Eigen::Index{shape.num_kv_heads} * shape.head_dim;
  Matrix rows(count, cols);
  for (int i = 0; i < count; ++i) {
    const std::int64_t key =
        ((std::int64_t{sequence} * 4096 + first_position + i) * 16 + layer) * 2 + (is_value ? 1 : 0);
    Random random(static_cast<std::uint64_t>(key));
    for (Eigen::Index col = 0; col < cols; ++col) {
      rows(i, col) = static_cast<float>(random.uniform());
    }
  }
  return rows;
}

// Empty if the cache holds all of the sequence's tokens in all layers and heads, bit for bit.
std::string read_back(const KvCache& cache, const KvCacheManager& manager, SequenceId sequence) {
  const KvCacheShape& shape = cache.shape();
  const int length = manager.length(sequence);
  const int first_slot = manager.region(sequence).first;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    const Matrix k = token_rows(shape, sequence, 0, length, layer, false);
    const Matrix v = token_rows(shape, sequence, 0, length, layer, true);
    for (int head = 0; head < shape.num_heads; ++head) {
      const Eigen::Index column = Eigen::Index{head / shape.num_queries_per_kv()} * shape.head_dim;
      // NaN differs from everything, so a poisoned row cannot pass as equal.
      if (cache.keys(layer, head, first_slot, length) != k.middleCols(column, shape.head_dim) ||
          cache.values(layer, head, first_slot, length) != v.middleCols(column, shape.head_dim)) {
        return common::format("sequence %d, layer %d, head %d differs", sequence, layer, head);
      }
    }
  }
  return "";
}

// Random allocations, writes and frees over one cache; every live sequence is read back now and then. A sequence that
// ends leaves NaN in all its slots, and no id is used twice.
std::string fuzz_content(std::uint64_t seed, int num_operations) {
  KvCacheShape shape = small_shape();
  shape.num_blocks = 1;
  shape.block_size = 40;
  KvCacheManager manager(shape.num_slots());
  KvCache cache(shape);
  cache.fill(kNaN);
  Random random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random.below(static_cast<std::uint64_t>(bound))); };
  int next_id = 0;
  for (int operation = 0; operation < num_operations; ++operation) {
    const std::vector<SequenceId> live = manager.sequences();
    const int choice = below(10);
    if (live.empty() || choice < 3) {
      manager.allocate(next_id++, 1 + below(12));
    } else if (choice < 8) {
      const SequenceId sequence = live[static_cast<std::size_t>(below(static_cast<int>(live.size())))];
      const int length = manager.length(sequence);
      const int count = below(manager.capacity(sequence) - length + 1);
      const std::vector<int> slots = manager.slots(sequence, length, count);
      for (int layer = 0; layer < shape.num_layers; ++layer) {
        cache.write(layer, slots, token_rows(shape, sequence, length, count, layer, false),
                    token_rows(shape, sequence, length, count, layer, true));
      }
      manager.commit(sequence, count);
    } else {
      const SequenceId sequence = live[static_cast<std::size_t>(below(static_cast<int>(live.size())))];
      const std::vector<int> slots = manager.slots(sequence, 0, manager.capacity(sequence));
      manager.free(sequence);
      const Matrix poison = Matrix::Constant(static_cast<Eigen::Index>(slots.size()),
                                             Eigen::Index{shape.num_kv_heads} * shape.head_dim, kNaN);
      for (int layer = 0; layer < shape.num_layers; ++layer) {
        cache.write(layer, slots, poison, poison);
      }
    }
    if (below(8) == 0) {
      for (const SequenceId sequence : manager.sequences()) {
        const std::string problem = read_back(cache, manager, sequence);
        if (!problem.empty()) {
          return common::format("seed %llu, operation %d: ", static_cast<unsigned long long>(seed), operation) +
                 problem;
        }
      }
    }
  }
  return "";
}

// ---- Engine --------------------------------------------------------------------------------------------------------

stage1::EngineOptions make_options(int num_slots, int chunk_size = 256) {
  stage1::EngineOptions options;
  options.num_slots = num_slots;
  options.chunk_size = chunk_size;
  return options;
}

struct Run {
  std::vector<Completion> completions;
  std::vector<int> order;  // whose token came, in the order of their coming
  std::vector<std::vector<Token>> streamed;
  std::map<std::string, double> counters;
  common::Timing timing;
  stage1::Usage usage;  // afterwards
};

// A new engine with a cache full of NaN.
Run run(const std::vector<Request>& requests, const stage1::EngineOptions& options) {
  stage1::Engine engine(small_model(), options);
  engine.cache().fill(kNaN);
  Run result;
  result.streamed.resize(requests.size());
  result.completions = engine.run(requests, [&](int request, Token token) {
    result.order.push_back(request);
    result.streamed.at(static_cast<std::size_t>(request)).push_back(token);
  });
  for (const common::Counter& counter : engine.counters()) {
    result.counters[counter.name] = counter.value;
  }
  result.timing = engine.timing();
  result.usage = engine.manager().usage();
  return result;
}

// What the request gets in an engine of its own.
std::vector<Token> tokens_alone(const Request& request) {
  return run({request}, make_options(4096)).completions[0].tokens;
}

}  // namespace

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

TEST_CASE("manager: external fragmentation refuses although enough is free, and changes nothing") {
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

TEST_CASE("manager: a sequence is as large as the cache, or one too large") {
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
  REQUIRE(manager.allocate(8, 2));
  manager.free(8);
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
  CHECK_THROWS_AS(manager.free(8), CheckError);  // freed before
  CHECK_THROWS_AS(manager.free(9), CheckError);
  CHECK_THROWS_AS(manager.length(9), CheckError);
  CHECK_THROWS_AS(manager.region(9), CheckError);
  CHECK_THROWS_AS(manager.capacity(9), CheckError);
  CHECK_THROWS_AS(KvCacheManager(0), CheckError);
  CHECK(describe(manager) == before);
  CHECK(check_ledger(manager, 20) == kNoProblem);
}

TEST_CASE("manager: an id may come back, and starts anew") {
  KvCacheManager manager(8);
  REQUIRE(manager.allocate(3, 4));
  manager.commit(3, 4);
  manager.free(3);
  CHECK_FALSE(manager.contains(3));
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

TEST_CASE("cache: one head's part of a block is dense, and the arrays are laid out as the header says") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(0.0F);
  const auto key_at = [&](int layer, int head, int slot) { return cache.keys(layer, head, slot, 1).data(); };
  const float* origin = key_at(0, 0, 0);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int head = 0; head < shape.num_heads; ++head) {
      for (int slot = 0; slot < shape.num_slots(); ++slot) {
        // [num_layers, num_blocks, num_heads, block_size, head_dim]
        const int block = layer * shape.num_blocks + slot / shape.block_size;
        const int row = (block * shape.num_heads + head) * shape.block_size + slot % shape.block_size;
        CAPTURE(layer, head, slot);
        CHECK(key_at(layer, head, slot) - origin == Eigen::Index{row} * shape.head_dim);
        CHECK(cache.values(layer, head, slot, 1).data() - cache.values(0, 0, 0, 1).data() ==
              Eigen::Index{row} * shape.head_dim);
      }
    }
  }
  CHECK(cache.keys(1, 2, 4, 4).rows() == 4);
  CHECK(cache.keys(1, 2, 4, 4).cols() == shape.head_dim);
  CHECK(cache.keys(1, 2, 4, 4).outerStride() == shape.head_dim);
}

TEST_CASE("cache: every slot, layer and head gives back what was written, K and V apart") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(kNaN);
  std::vector<int> slots(static_cast<std::size_t>(shape.num_slots()));
  std::iota(slots.begin(), slots.end(), 0);
  Random random(2);
  for (std::size_t i = slots.size(); i > 1; --i) {
    std::swap(slots[i - 1], slots[random.below(i)]);
  }
  write_content(cache, slots);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int head = 0; head < shape.num_heads; ++head) {
      for (int block = 0; block < shape.num_blocks; ++block) {
        const int first_slot = block * shape.block_size;
        const common::MatrixView k = cache.keys(layer, head, first_slot, shape.block_size);
        const common::MatrixView v = cache.values(layer, head, first_slot, shape.block_size);
        for (int row = 0; row < shape.block_size; ++row) {
          for (int d = 0; d < shape.head_dim; ++d) {
            CAPTURE(layer, head, block, row, d);
            const int kv_head = head / 3;  // 6 query heads, 2 kv heads: each is stored three times
            CHECK(k(row, d) == content(shape, false, layer, first_slot + row, kv_head, d));
            CHECK(v(row, d) == content(shape, true, layer, first_slot + row, kv_head, d));
          }
        }
      }
    }
  }
}

TEST_CASE("cache: a write touches its slots and its layer, nothing else") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(kNaN);
  const std::vector<int> slots = {5, 11, 0};
  cache.write(1, slots, content_rows(shape, false, 1, slots), content_rows(shape, true, 1, slots));
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int slot = 0; slot < shape.num_slots(); ++slot) {
      const bool written = layer == 1 && std::find(slots.begin(), slots.end(), slot) != slots.end();
      for (int head = 0; head < shape.num_heads; ++head) {
        CAPTURE(layer, slot, head);
        CHECK(cache.keys(layer, head, slot, 1).hasNaN() == !written);
        CHECK(cache.values(layer, head, slot, 1).hasNaN() == !written);
      }
    }
  }
  cache.fill(2.5F);
  CHECK((cache.keys(1, 0, 4, 4) == Matrix::Constant(4, shape.head_dim, 2.5F)));
  CHECK((cache.values(1, 5, 8, 4) == Matrix::Constant(4, shape.head_dim, 2.5F)));
}

TEST_CASE("cache: a view stays inside one block") {
  const KvCache cache(small_shape());  // 3 blocks of 4
  CHECK_NOTHROW(cache.keys(0, 0, 4, 4));
  CHECK_NOTHROW(cache.keys(0, 0, 11, 1));
  CHECK_THROWS_AS(cache.keys(0, 0, 0, 5), CheckError);
  CHECK_THROWS_AS(cache.keys(0, 0, 3, 2), CheckError);
  CHECK_THROWS_AS(cache.values(0, 0, 7, 2), CheckError);
  CHECK_THROWS_AS(cache.values(0, 0, 12, 1), CheckError);
  CHECK_THROWS_AS(cache.keys(0, 0, -1, 1), CheckError);
  CHECK_THROWS_AS(cache.keys(0, 0, 0, -1), CheckError);
}

TEST_CASE("cache: wrong shapes and slots are noticed") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  const Matrix right = Matrix::Zero(2, 10);  // two tokens, 2 kv heads of 5
  const std::vector<int> slots = {1, 2};
  CHECK_NOTHROW(cache.write(0, slots, right, right));
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(2, 30), right), CheckError);  // all query heads
  CHECK_THROWS_AS(cache.write(0, slots, right, Matrix::Zero(2, 30)), CheckError);
  CHECK_THROWS_AS(cache.write(0, slots, Matrix::Zero(3, 10), Matrix::Zero(3, 10)), CheckError);
  CHECK_THROWS_AS(cache.write(0, slots, right, Matrix::Zero(1, 10)), CheckError);
  CHECK_THROWS_AS(cache.write(0, std::vector<int>{1, 12}, right, right), CheckError);
  CHECK_THROWS_AS(cache.write(0, std::vector<int>{-1, 1}, right, right), CheckError);

  KvCacheShape uneven = shape;
  uneven.num_kv_heads = 4;
  CHECK_THROWS_AS(KvCache(uneven), CheckError);
  KvCacheShape empty = shape;
  empty.num_blocks = 0;
  CHECK_THROWS_AS(KvCache(empty), CheckError);
}

TEST_CASE("cache: bytes of a slot, by hand") {
  // K and V, 2 layers, 6 heads of 5 floats of 4 bytes: the copies for query heads count.
  CHECK(small_shape().bytes_per_slot() == std::int64_t{2} * 2 * 6 * 5 * 4);
  CHECK(small_shape().num_slots() == 12);
  CHECK(small_shape().num_queries_per_kv() == 3);
}

TEST_CASE("cache: what sequences hold survives any order of writes and frees") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CHECK(fuzz_content(seed, 3000) == kNoProblem);
  }
}

TEST_CASE("attention: wrong shapes are noticed") {
  const KvCacheShape shape = small_shape();
  KvCache cache(shape);
  cache.fill(1.0F);
  CHECK_NOTHROW(stage1::attention(cache, 0, Matrix::Zero(2, 30), 0, 4));
  CHECK_THROWS_AS(stage1::attention(cache, 0, Matrix::Zero(2, 10), 0, 4), CheckError);  // kv heads' width
  CHECK_THROWS_AS(stage1::attention(cache, 0, Matrix::Zero(5, 30), 0, 4), CheckError);  // more queries than tokens
  CHECK_THROWS_AS(stage1::attention(cache, 0, Matrix::Zero(2, 30), 2, 4), CheckError);  // leaves the block
}

TEST_CASE("engine: what can never be served is rejected with the reason, and the others are served") {
  const std::vector<Request> requests = {make_request(4, 5),  make_request(0, 5),   make_request(4, 0),
                                         make_request(4, -1), make_request(30, 19), make_request(30, 3),
                                         make_request(3, 6)};
  const Run result = run(requests, make_options(32));
  REQUIRE(result.completions.size() == requests.size());
  const std::array<std::vector<std::string>, 7> reasons = {{{},
                                                            {"empty"},
                                                            {"no new tokens"},
                                                            {"no new tokens"},
                                                            {"30", "19", "48", "context"},
                                                            {"33 slots", "32", "cache"},
                                                            {}}};
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Completion& completion = result.completions[i];
    CAPTURE(i, completion.error);
    const bool rejected = !reasons[i].empty();
    CHECK((completion.finish_reason == FinishReason::kRejected) == rejected);
    CHECK(completion.error.empty() == !rejected);
    for (const std::string& part : reasons[i]) {
      CHECK(contains(completion.error, part));
    }
    CHECK(completion.error.find('\n') == std::string::npos);
    CHECK(completion.tokens == (rejected ? std::vector<Token>{} : tokens_alone(requests[i])));
    CHECK(result.streamed[i] == completion.tokens);
  }
  CHECK(result.usage.reserved == 0);
}

TEST_CASE("engine: the largest requests that fit") {
  const Run whole_context =
      run({make_request(kSmallContext - 1, 1), make_request(1, kSmallContext - 1)}, make_options(4096));
  CHECK(whole_context.completions[0].tokens.size() == 1);
  CHECK(whole_context.completions[1].tokens.size() == kSmallContext - 1);
  CHECK(run({make_request(kSmallContext, 1)}, make_options(4096)).completions[0].finish_reason ==
        FinishReason::kRejected);

  const Run whole_cache = run({make_request(6, 4)}, make_options(10));
  CHECK(whole_cache.completions[0].tokens == tokens_alone(make_request(6, 4)));
  CHECK(run({make_request(6, 4)}, make_options(9)).completions[0].finish_reason == FinishReason::kRejected);
  // A sum that does not fit an int is refused like any other.
  CHECK(run({make_request(6, std::numeric_limits<int>::max())}, make_options(10)).completions[0].finish_reason ==
        FinishReason::kRejected);
}

TEST_CASE("engine: no requests, or only rejected ones") {
  CHECK(run({}, make_options(10)).completions.empty());
  const Run result = run({make_request(0, 1)}, make_options(10));
  CHECK(result.counters.at("forward_passes") == 0);
  CHECK(result.counters.at("slots_reserved") == 0);
}

TEST_CASE("engine: the next batch starts when the whole batch before it is done") {
  // 20 slots: requests 0 and 1 take 8 + 12. Request 0 is done early, and its slots stay unused until 1 is done too.
  const std::vector<Request> requests = {make_request(5, 3, 0), make_request(4, 8, 1), make_request(6, 2, 2),
                                         make_request(2, 4, 3)};
  const Run result = run(requests, make_options(20));
  CHECK(result.order == std::vector<int>{0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 2, 3, 2, 3, 3, 3});
  CHECK(result.counters.at("most_requests_at_once") == 2);
  const Run roomy = run(requests, make_options(4096));
  CHECK(roomy.counters.at("most_requests_at_once") == 4);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    CHECK(result.completions[i].tokens == roomy.completions[i].tokens);
    CHECK(result.completions[i].tokens == tokens_alone(requests[i]));
    CHECK(result.completions[i].finish_reason == FinishReason::kLength);
    CHECK(static_cast<int>(result.completions[i].tokens.size()) == requests[i].max_new_tokens);
  }
}

TEST_CASE("engine: nobody overtakes") {
  // Request 2 would fit beside 0, but 1 is before it and does not.
  const std::vector<Request> requests = {make_request(4, 4, 0), make_request(6, 4, 1), make_request(1, 1, 2)};
  CHECK(run(requests, make_options(12)).order == std::vector<int>{0, 0, 0, 0, 1, 2, 1, 1, 1});
}

TEST_CASE("engine: a stop token ends the text, is not part of it, and is not handed out") {
  Request request = make_request(5, 12);
  const std::vector<Token> all = tokens_alone(request);
  REQUIRE(all.size() == 12);
  for (const std::size_t step : {std::size_t{0}, std::size_t{3}, std::size_t{11}}) {
    CAPTURE(step);
    request.stop_tokens = {60, all[step]};
    const auto end = std::find_first_of(all.begin(), all.end(), request.stop_tokens.begin(), request.stop_tokens.end());
    const std::vector<Token> expected(all.begin(), end);
    const Run result = run({request, make_request(3, 4)}, make_options(64));
    CHECK(result.completions[0].tokens == expected);
    CHECK(result.completions[0].finish_reason == FinishReason::kStop);
    CHECK(result.completions[0].error.empty());
    CHECK(result.streamed[0] == expected);
    CHECK(result.completions[1].tokens == tokens_alone(make_request(3, 4)));
    CHECK(result.usage.reserved == 0);
  }
}

TEST_CASE("engine: counters of one request, by hand") {
  // Prompt 5 in chunks of 2, 3 new tokens. The last token drawn is never computed, so its slot stays empty.
  //   tokens of a pass    2  2  1 | 1 | 1      a round draws one token: three passes, then one, then one
  //   length after it     2  4  5 | 6 | 7      sum over the passes 24, over the rounds 18
  const Run result = run({make_request(5, 3)}, make_options(30, 2));
  CHECK(result.counters.at("most_requests_at_once") == 1);
  CHECK(result.counters.at("requests_held") == 1);
  CHECK(result.counters.at("forward_passes") == 5);
  CHECK(result.counters.at("slots_total") == 30);
  CHECK(result.counters.at("slots_reserved") == 8);
  CHECK(result.counters.at("slots_used") == 6);
  const double bytes_per_token = 2.0 * 2 * 4 * 8 * 4;  // K and V, layers, heads, head_dim, bytes
  CHECK(result.counters.at("kv_bytes_per_token") == bytes_per_token);
  CHECK(result.counters.at("kv_bytes_read") == 24 * bytes_per_token);
  CHECK(result.timing.prefill_tokens == 5);
  CHECK(result.timing.decode_tokens == 2);
}

TEST_CASE("engine: counters of two requests side by side, by hand") {
  // Request 0: prompt 5 of 8 slots, three rounds. Request 1: prompt 2 of 3 slots, done after the first round.
  const Run result = run({make_request(5, 3), make_request(2, 1)}, make_options(30));
  CHECK(result.counters.at("most_requests_at_once") == 2);
  CHECK(result.counters.at("forward_passes") == 4);
  CHECK(result.counters.at("requests_held") == 4.0 / 3);    // 2, 1, 1
  CHECK(result.counters.at("slots_reserved") == 27.0 / 3);  // 8 + 3, 8, 8
  CHECK(result.counters.at("slots_used") == 20.0 / 3);      // 5 + 2, 6, 7
  const double bytes_per_token = result.counters.at("kv_bytes_per_token");
  CHECK(result.counters.at("kv_bytes_read") == 20 * bytes_per_token);
  CHECK(result.timing.prefill_tokens == 7);
  CHECK(result.timing.decode_tokens == 2);
}

TEST_CASE("engine: reserving the whole context") {
  stage1::EngineOptions options = make_options(2 * kSmallContext + 5);
  options.reserve_context = true;
  const std::vector<Request> requests = {make_request(5, 3, 0), make_request(4, 2, 1), make_request(3, 3, 2)};
  const Run result = run(requests, options);
  // Three would need 18 slots; each takes 48, so the third waits for the others.
  CHECK(result.order == std::vector<int>{0, 1, 0, 1, 0, 2, 2, 2});
  CHECK(result.counters.at("most_requests_at_once") == 2);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CHECK(result.completions[i].tokens == tokens_alone(requests[i]));
  }
  CHECK(run({make_request(5, 3)}, options).counters.at("slots_reserved") == kSmallContext);

  options.num_slots = kSmallContext - 1;
  const Run rejected = run({make_request(5, 3)}, options);
  CHECK(rejected.completions[0].finish_reason == FinishReason::kRejected);
  CHECK(contains(rejected.completions[0].error, "48 slots"));
}

TEST_CASE("engine: a request draws by its own seed, whatever runs beside it") {
  std::vector<Request> requests;
  for (int i = 0; i < 3; ++i) {
    Request request = make_request(4, 20);
    request.sampling.temperature = 1.5F;
    request.sampling.seed = i == 2 ? 8 : 7;
    requests.push_back(request);
  }
  const Run result = run(requests, make_options(4096));
  CHECK(result.completions[0].tokens == result.completions[1].tokens);
  CHECK(result.completions[0].tokens != result.completions[2].tokens);
  CHECK(result.completions[2].tokens == tokens_alone(requests[2]));
}

TEST_CASE("engine: append computes the same logits in any chunks, and refuses without a trace") {
  const Request request = make_request(11, 1);
  std::optional<Matrix> expected;
  for (const int chunk_size : {256, 1, 4, 11}) {
    CAPTURE(chunk_size);
    stage1::Engine engine(small_model(), make_options(20, chunk_size));
    engine.cache().fill(kNaN);
    REQUIRE(engine.manager().allocate(0, 12));
    const std::optional<Matrix> logits = engine.append(0, request.prompt);
    REQUIRE(logits.has_value());
    CHECK(logits->rows() == 1);
    REQUIRE(logits->cols() == 61);
    CHECK(engine.manager().length(0) == 11);
    expected = expected.has_value() ? expected : logits;
    // Logits of this model have size 1; two layers of float32 sums of up to 48 terms keep five digits and more.
    const auto as_span = [](const Matrix& row) { return std::span(row.data(), static_cast<std::size_t>(row.cols())); };
    CHECK(common::compare(as_span(*logits), as_span(*expected), {1e-5, 1e-5}) == kNoProblem);

    const std::string before = describe(engine.manager());
    CHECK_FALSE(engine.append(0, std::vector<Token>{1, 2}).has_value());  // one slot is left
    CHECK(describe(engine.manager()) == before);
    CHECK(engine.append(0, std::vector<Token>{1}).has_value());
  }
}

TEST_CASE("engine: misuse is noticed") {
  CHECK_THROWS_AS(stage1::Engine(small_model(), make_options(10, 0)), CheckError);
  CHECK_THROWS_AS(stage1::Engine(small_model(), make_options(0)), CheckError);
  stage1::Engine engine(small_model(), make_options(10));
  REQUIRE(engine.manager().allocate(0, 5));
  CHECK_THROWS_AS(engine.append(0, {}), CheckError);
  CHECK_THROWS_AS(engine.append(1, std::vector<Token>{1}), CheckError);
}
