// Shared blocks that are read once: what the CPU's runner reads, and that no text changes by it. SHARED_READING.md's
// invariants by number.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/model/generation.h"
#include "common/serving/prometheus.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/catch.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/cpu/shared_attention.h)
#include STAGE_HEADER(production/shared_reading/shared_reading.h)
#include STAGE_HEADER(serve/engine_adapter.h)
// clang-format on

namespace {

const std::string kNoProblem;

stage::SharedReading& sharing(stage::Engine& engine) { return dynamic_cast<stage::SharedReading&>(engine.runner()); }

// A client that wants nothing.
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
      served->submit(samples(3, 9, 3), 0.0, std::make_unique<Dropped>());
      while (served->step()) {
        num_read += served->last_step().num_read;
      }
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
