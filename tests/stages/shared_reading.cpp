// Shared blocks that are read once: what the CPU's runner reads, and that no text changes by it. SHARED_READING.md's
// invariants by number.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/math/sampling.h"
#include "common/model/generation.h"
#include "common/serving/pool_view.h"
#include "common/serving/prometheus.h"
#include "common/serving/tally.h"
#include "tests/stages/late_runner.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/cpu/shared_attention.h)
#include STAGE_HEADER(production/shared_reading/shared_reading.h)
#include STAGE_HEADER(serve/engine_adapter.h)
// clang-format on

namespace {

const std::string kNoProblem;

stage::SharedReading& sharing(stage::Engine& engine) { return dynamic_cast<stage::SharedReading&>(engine.runner()); }

// A client that uses nothing.
class Dropped : public common::RequestSink {
 public:
  void on_token(int, int, common::Token, const common::TokenLogprobs*) override {}
  void on_end(int, common::RequestResult) override {}
};

// The results of requests that are served together, step by step.
struct Served {
  std::vector<std::vector<common::Completion>> completions;
  common::SharedReadingFigures figures;
};

Served serve(const std::vector<stage::GenerationRequest>& requests, bool shares,
             const tests::ServingOptions& options = {}) {
  tests::Serving serving(options);
  sharing(serving.engine).share(shares);
  serving.submit_all(requests);
  REQUIRE(serving.run() == kNoProblem);
  Served result{{}, sharing(serving.engine).figures()};
  for (int id = 0; id < static_cast<int>(requests.size()); ++id) {
    REQUIRE(serving.engine.output(id).error.empty());
    result.completions.push_back(serving.engine.output(id).completions);
  }
  return result;
}

// Empty if all tokens and all their log-probabilities are equal, bit by bit.
std::string difference(const Served& left, const Served& right) {
  for (std::size_t id = 0; id < left.completions.size(); ++id) {
    for (std::size_t i = 0; i < left.completions[id].size(); ++i) {
      const common::Completion& actual = left.completions[id][i];
      const common::Completion& expected = right.completions[id].at(i);
      if (std::string found = tests::first_difference(actual.tokens, expected.tokens); !found.empty()) {
        return found;
      }
      for (std::size_t k = 0; k < actual.logprobs.size(); ++k) {
        if (actual.logprobs[k].drawn.logprob != expected.logprobs.at(k).drawn.logprob) {
          return "the log-probability of token " + std::to_string(k) + " differs";
        }
      }
    }
  }
  return "";
}

// What differs between attention together and apart of five sequences with the same two blocks, in groups of three and
// two, and as many tokens of their own as `own` says, of which the last ones are the step's. Six heads on two kv heads,
// and vectors that are no multiple of a processor's.
std::string difference_of_attention(const std::vector<int>& own, const std::vector<int>& num_new) {
  constexpr int kBlockSize = 4;
  constexpr int kShared = 2 * kBlockSize;
  stage::KvCache cache({1, 24, kBlockSize, 6, 2, 5});
  cache.fill(std::numeric_limits<float>::quiet_NaN());
  common::Random random(3);
  const auto random_matrix = [&](int rows, int cols) {
    common::Matrix matrix(rows, cols);
    std::generate_n(matrix.data(), matrix.size(), [&] { return static_cast<float>(random.normal()); });
    return matrix;
  };
  const auto write = [&](int block, int count) {
    std::vector<int> slots;
    for (int slot = 0; slot < count; ++slot) {
      slots.push_back(block * kBlockSize + slot);
    }
    cache.write(0, slots, random_matrix(count, 10), random_matrix(count, 10));
  };
  const std::vector<int> shared = {7, 1};
  write(7, kBlockSize);
  write(1, kBlockSize);
  stage::RaggedBatch batch;
  int block = 8;
  for (std::size_t i = 0; i < own.size(); ++i) {
    batch.block_tables.insert(batch.block_tables.end(), shared.begin(), shared.end());
    for (int first = 0; first < own[i]; first += kBlockSize, ++block) {
      write(block, std::min(kBlockSize, own[i] - first));
      batch.block_tables.push_back(block);
    }
    batch.query_starts.push_back(batch.query_starts.back() + num_new[i]);
    batch.context_lengths.push_back(kShared + own[i]);
    batch.table_starts.push_back(static_cast<int>(batch.block_tables.size()));
  }
  const common::Matrix q = random_matrix(batch.query_starts.back(), 6 * 5);
  const std::vector<common::SharedPrefix> groups = {{{0, 2, 3}, 2}, {{1, 4}, 2}};
  const common::Matrix together = attention(cache, 0, q, batch, groups);
  const common::Matrix apart = attention(cache, 0, q, batch);
  return tests::compare_bits({together.data(), static_cast<std::size_t>(together.size())},
                             {apart.data(), static_cast<std::size_t>(apart.size())});
}

// A GPU's order of events on a CPU: a step is computed when it is waited for.
class CountingRunner : public tests::LateRunner {
 public:
  using LateRunner::LateRunner;

  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    num_enqueued_ += 1;
    return LateRunner::enqueue(batch);
  }
  int num_enqueued() const { return num_enqueued_; }

 private:
  int num_enqueued_ = 0;
};

stage::GenerationRequest samples(int num_samples, int num_tokens, int max_new_tokens, int salt = 0) {
  stage::GenerationRequest request{.request = tests::make_request(num_tokens, max_new_tokens, salt)};
  request.num_samples = num_samples;
  request.request.sampling.temperature = 0.9F;
  request.request.num_logprobs = 1;
  return request;
}

}  // namespace

TEST_CASE("shared reading: the page's table, by hand (invariant 1)") {
  // Two samples, one query head. The scores of A's and of B's query are the two columns of a key, in units of ln 2.
  const stage::KvCacheShape shape{1, 8, 4, 1, 1, 2};
  stage::KvCache cache(shape);
  cache.fill(std::numeric_limits<float>::quiet_NaN());
  const float unit = std::log(2.0F);
  const auto write = [&](int block, const std::vector<float>& of_a, const std::vector<float>& of_b, int position) {
    std::vector<int> slots;
    common::Matrix keys(static_cast<Eigen::Index>(of_a.size()), 2);
    common::Matrix values(keys.rows(), 2);
    for (Eigen::Index i = 0; i < keys.rows(); ++i) {
      slots.push_back(block * 4 + static_cast<int>(i));
      keys.row(i) << unit * of_a[static_cast<std::size_t>(i)], unit * of_b[static_cast<std::size_t>(i)];
      values.row(i).setConstant(static_cast<float>(position + i));
    }
    cache.write(0, slots, keys, values);
  };
  write(7, {1, 0, 2, 1}, {0, 2, 1, 0}, 0);
  write(1, {3, 1, 0, 2}, {1, 0, 3, 1}, 4);
  write(3, {2, 4}, {9, 9}, 8);
  write(5, {9, 9}, {1, 2}, 8);
  stage::RaggedBatch batch;
  batch.query_starts = {0, 1, 2};
  batch.context_lengths = {10, 10};
  batch.block_tables = {7, 1, 3, 7, 1, 5};
  batch.table_starts = {0, 3, 6};
  const common::Matrix q = std::sqrt(2.0F) * common::Matrix::Identity(2, 2);
  const std::vector<common::SharedPrefix> groups = {{{0, 1}, 2}};
  const common::Matrix output = attention(cache, 0, q, batch, groups);
  CHECK(std::abs(output(0, 0) - 267.0 / 44.0) < 1e-5);
  CHECK(std::abs(output(1, 0) - 138.0 / 27.0) < 1e-5);
  const bool is_equal = output == attention(cache, 0, q, batch);
  CHECK(is_equal);
}

TEST_CASE("shared reading: queries that see shared blocks alone") {
  // The token of each sequence is the last one of the shared blocks: nothing is left to go on with.
  CHECK(difference_of_attention({0, 0, 0, 0, 0}, {1, 1, 1, 1, 1}) == kNoProblem);
}

TEST_CASE("shared reading: each sequence goes on with blocks of its own (invariant 1)") {
  CHECK(difference_of_attention({1, 1, 1, 1, 1}, {1, 1, 1, 1, 1}) == kNoProblem);
  CHECK(difference_of_attention({1, 4, 5, 9, 2}, {1, 1, 1, 1, 1}) == kNoProblem);
  CHECK(difference_of_attention({1, 4, 5, 9, 12}, {1, 2, 5, 3, 9}) == kNoProblem);
}

TEST_CASE("shared reading: samples read the full blocks of their prompt once") {
  // 9 tokens in blocks of 4: two blocks are full, and each sample copies the third one.
  const Served served = serve({samples(3, 9, 3)}, true);
  CHECK(served.figures.steps == 2);
  CHECK(served.figures.blocks_read == 2 * 2);
  CHECK(served.figures.blocks_saved == 2 * 2 * 2);
}

TEST_CASE("shared reading: a block is shared only once it is full") {
  const Served served = serve({samples(2, 3, 3)}, true);  // the samples' own tokens fill each one's first block
  CHECK(served.figures.steps == 0);
  CHECK(served.figures.blocks_saved == 0);
}

TEST_CASE("shared reading: switched off, and alone, nothing is shared") {
  CHECK(serve({samples(3, 9, 3)}, false).figures.steps == 0);
  CHECK(serve({samples(1, 9, 3)}, true).figures.steps == 0);
}

TEST_CASE("shared reading: prompts that begin with the same blocks read them once (invariant 1)") {
  // The second and third request find the first one's blocks in the prefix cache.
  std::vector<stage::GenerationRequest> requests = {samples(1, 9, 6), samples(1, 9, 6), samples(1, 9, 6)};
  requests[1].request.prompt.back() = 1;
  requests[2].request.prompt.back() = 2;
  stage::SchedulerOptions scheduler{.headroom = 0};
  scheduler.token_budget = 9;  // one prompt in the first step
  const Served together = serve(requests, true, {.scheduler = scheduler});
  CHECK(together.figures.steps > 0);
  CHECK(together.figures.blocks_saved > together.figures.steps);
  CHECK(difference(together, serve(requests, false, {.scheduler = scheduler})) == kNoProblem);
}

TEST_CASE("shared reading: no bit of a result changes (invariant 1)") {
  stage::GenerationRequest beams{.request = tests::make_request(9, 8, 2)};
  beams.num_samples = 4;
  beams.length_penalty = 1.0;
  const std::vector<stage::GenerationRequest> requests = {samples(5, 17, 9), beams, samples(2, 17, 9),
                                                          samples(1, 20, 5)};
  for (const int num_blocks : {64, 24}) {  // the second pool is too small for all
    for (const bool run_ahead : {false, true}) {
      CAPTURE(num_blocks, run_ahead);
      tests::ServingOptions options{.num_blocks = num_blocks};
      options.scheduler.run_ahead = run_ahead;
      options.scheduler.token_budget = 12;
      const Served together = serve(requests, true, options);
      CHECK(together.figures.blocks_saved > 0);
      CHECK(difference(together, serve(requests, false, options)) == kNoProblem);
    }
  }
}

TEST_CASE("shared reading: two steps that share different blocks are in flight at once (invariant 1)") {
  // Three texts with one beginning and three with another, which are cached. They end one by one, and so what the steps
  // share changes. (A request with several samples does not run ahead, and none with log-probabilities does.)
  std::vector<stage::GenerationRequest> requests;
  for (int i = 0; i < 8; ++i) {
    const int beginning = i < 2 ? i : i / 5;
    requests.push_back(samples(1, beginning == 0 ? 9 : 17, i < 2 ? 1 : 5 + i * 5 % 13, beginning));
    requests.back().request.num_logprobs = 0;
    requests.back().request.prompt.back() = i;
  }
  const std::span<const stage::GenerationRequest> all = requests;
  std::vector<Served> served;
  std::vector<std::vector<float>> caches;  // of each run, all K and V: they tell more than a few drawn tokens
  int num_pairs = 0;                       // of steps in flight that share other blocks
  for (const bool shares : {false, true}) {
    CountingRunner* runner = nullptr;
    stage::CpuRunner* cpu = nullptr;
    tests::ServingOptions options;
    options.scheduler.run_ahead = true;
    options.wrap = [&](std::unique_ptr<stage::Runner> inner) {
      cpu = &dynamic_cast<stage::CpuRunner&>(*inner);
      auto counting = std::make_unique<CountingRunner>(std::move(inner));
      runner = counting.get();
      return counting;
    };
    tests::Serving serving(options);
    auto& reading = dynamic_cast<stage::SharedReading&>(*cpu);
    reading.share(shares);
    cpu->kv_cache().fill(0.0F);
    std::vector<std::vector<int>> blocks;  // that each step has read once
    std::vector<bool> was_ahead;           // for each step, whether the next one was enqueued before it was computed
    std::int64_t num_steps = 0;
    const auto note_last = [&] {
      const std::int64_t steps = reading.figures().steps;
      const std::span<const int> last = steps > num_steps ? reading.blocks() : std::span<const int>();
      blocks.emplace_back(last.begin(), last.end());
      num_steps = steps;
    };
    runner->on_compute([&](std::uint64_t step) {
      if (step > 1) {
        note_last();
      }
      was_ahead.push_back(runner->num_enqueued() > static_cast<int>(step));
    });
    for (const auto part : {all.first(2), all.subspan(2)}) {
      for (const stage::GenerationRequest& request : part) {
        serving.submit(request);
      }
      REQUIRE(serving.run() == kNoProblem);
    }
    note_last();
    REQUIRE(blocks.size() == was_ahead.size());
    for (std::size_t i = 0; i + 1 < blocks.size(); ++i) {
      num_pairs += was_ahead[i] && !blocks[i].empty() && !blocks[i + 1].empty() && blocks[i] != blocks[i + 1] ? 1 : 0;
    }
    Served& result = served.emplace_back();
    for (int id = 0; id < static_cast<int>(requests.size()); ++id) {
      REQUIRE(serving.engine.output(id).error.empty());
      result.completions.push_back(serving.engine.output(id).completions);
    }
    std::vector<float>& numbers = caches.emplace_back();
    const stage::KvCacheShape& shape = cpu->kv_cache().shape();
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
        for (int slot = 0; slot < shape.num_slots(); slot += shape.block_size) {
          for (const common::Matrix& part :
               {common::Matrix(cpu->kv_cache().keys(layer, kv_head, slot, shape.block_size)),
                common::Matrix(cpu->kv_cache().values(layer, kv_head, slot, shape.block_size))}) {
            numbers.insert(numbers.end(), part.data(), part.data() + part.size());
          }
        }
      }
    }
  }
  CHECK(difference(served[1], served[0]) == kNoProblem);
  CHECK(tests::compare_bits(caches[1], caches[0]) == kNoProblem);
  CHECK(num_pairs > 0);
}

TEST_CASE("shared reading: a step that fails has read nothing") {
  tests::Serving serving({});
  int num_calls = 0;
  bool fails = false;
  tests::cpu_runner(serving.engine).on_layer([&](int layer) {
    num_calls += 1;
    if (fails && layer == 1) {
      throw std::runtime_error("no such layer");
    }
  });
  serving.submit(samples(3, 9, 4));
  REQUIRE(serving.engine.step());
  REQUIRE(serving.engine.step());
  const common::SharedReadingFigures& figures = sharing(serving.engine).figures();
  REQUIRE(figures.steps == 1);
  CHECK(num_calls == 4);
  fails = true;
  try {
    serving.engine.step();
  } catch (const std::runtime_error&) {
  }
  CHECK(num_calls == 6);
  CHECK(figures.steps == 1);
  CHECK(figures.blocks_saved == 4);
}

TEST_CASE("shared reading: a server's figures, and the bytes that its counters have") {
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  options.num_slots = 96;
  options.block_size = 4;
  for (const int host_cache_bytes : {0, 1 << 16}) {  // a second tier puts a runner around the one that reads
    std::int64_t bytes_apart = 0;
    for (const bool shares : {false, true}) {
      CAPTURE(host_cache_bytes, shares);
      const auto served = stage::make_served_engine(tests::small_model(), options, {.virtual_clock = true},
                                                    {.host_cache_bytes = host_cache_bytes, .shared_reading = shares});
      std::int64_t num_read = 0;
      std::vector<std::vector<int>> tables;  // of the first sample, after each step
      std::vector<common::StepReport> steps;
      common::PoolView view(nullptr);
      common::PoolView::Watcher watcher(view);
      const common::Tally tally;
      served->submit(samples(3, 9, 3), 0.0, std::make_unique<Dropped>());
      while (served->step()) {
        num_read += served->last_step().num_read;
        steps.push_back(served->last_step());
        const common::PoolSnapshot pool = served->pool();
        const bool is_running = !pool.running.empty() && !pool.running[0].sequences.empty();
        const std::span<const int> table =
            is_running ? pool.running[0].sequences[0].block_table : std::span<const int>();
        tables.emplace_back(table.begin(), table.end());
        view.update({.engine = served.get(), .tally = &tally, .report = &served->last_step(), .is_still = true});
        const auto record = nlohmann::json::parse(watcher.read(std::chrono::milliseconds(0)).back());
        const auto shared = record["happened"].value("shared", nlohmann::json::array());
        if (shares && steps.size() > 1) {
          CHECK(shared == nlohmann::json::array({steps.back().shared_blocks, 4}));
        } else {
          CHECK(shared.empty());
        }
      }
      REQUIRE(steps.size() == 3);
      CHECK(steps[0].shared_blocks.empty());  // the prompt's step
      CHECK(steps[0].num_reads_saved == 0);
      REQUIRE(tables[1].size() > 2);
      // The two full blocks of the prompt, for three samples.
      CHECK(steps[1].shared_blocks == (shares ? std::vector<int>{tables[1][0], tables[1][1]} : std::vector<int>{}));
      CHECK(steps[1].num_reads_saved == (shares ? 4 : 0));
      CHECK(steps[2].shared_blocks == steps[1].shared_blocks);
      constexpr std::int64_t kBytesPerToken = 256;
      const auto counters = served->counters();
      const auto bytes_read = static_cast<std::int64_t>(common::counter(counters, "kv_bytes_read"));
      CHECK(bytes_read == num_read * kBytesPerToken);
      bytes_apart = shares ? bytes_apart : bytes_read;
      CHECK(bytes_apart - bytes_read == (shares ? 2 * 2 * 2 * 4 * kBytesPerToken : 0));
      common::ServerState state;
      state.status = served->status();
      CHECK(state.status.shared_reading.steps == (shares ? 2 : 0));
      const std::string text = common::metrics_text(state, "small");
      CHECK((text.find("course:shared_block_reads_saved_total{model_name=\"small\"} 8\n") != std::string::npos) ==
            shares);
    }
  }
}
