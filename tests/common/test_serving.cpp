// What common/serving computes without an engine.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/serving/arrivals.h"
#include "common/serving/distribution.h"
#include "common/serving/pool_snapshot.h"
#include "common/serving/prometheus.h"
#include "common/serving/report.h"
#include "tests/support/catch.h"

using common::Arrival;
using common::chat_arrivals;
using common::check_rate;
using common::Distribution;
using common::Keep;
using common::offline_arrivals;
using common::poisson_times;
using common::read_arrivals;
using common::Spread;
using common::spread_of;

TEST_CASE("spread: the median and the 99th percentile of a hundred values") {
  std::vector<double> values;
  for (int i = 100; i > 0; --i) {
    values.push_back(i);
  }
  const Spread spread = spread_of(values);
  CHECK(spread.mean == 50.5);
  CHECK(spread.median == 50.0);
  CHECK(spread.p99 == 99.0);
  CHECK(spread_of({7.0}).p99 == 7.0);
  CHECK(spread_of({}).mean == 0.0);
}

TEST_CASE("arrivals: a file is read, and its mistakes are named by line") {
  std::istringstream good("# seconds prompt output\n0 5 3\n\n0.25 1 1  # the second\n");
  const std::vector<Arrival> arrivals = read_arrivals(good, "trace");
  REQUIRE(arrivals.size() == 2);
  CHECK(arrivals[1].time == 0.25);
  CHECK(arrivals[0].prompt_tokens == 5);
  CHECK(arrivals[0].output_tokens == 3);
  for (const char* text :
       {"0 5", "0 0 3", "0 5 3 1", "1 5 3\n0 5 3", "-1 5 3", "nan 5 3", "", "x 1 1", "1e300 5 3", "inf 5 3"}) {
    std::istringstream bad(text);
    CAPTURE(text);
    CHECK_THROWS_AS(read_arrivals(bad, "trace"), common::InputError);
  }
}

TEST_CASE("arrivals: Poisson times have the rate, and chat-shaped lengths the published means") {
  const std::vector<double> times = poisson_times(20000, 50.0, 1);
  CHECK(std::is_sorted(times.begin(), times.end()));
  CHECK(std::abs(times.back() - 400.0) < 12.0);  // four standard deviations
  CHECK(poisson_times(3, 0.0, 1) == std::vector<double>{0.0, 0.0, 0.0});
  for (const double rate : {std::nan(""), -1.0, 1e-308, 1e300, std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_AS(check_rate(rate), common::InputError);
  }
  CHECK_NOTHROW(check_rate(0.0));
  CHECK(std::isfinite(poisson_times(1 << 20, 1e-6, 1).back()));
  double prompts = 0.0;
  double replies = 0.0;
  const std::vector<Arrival> arrivals = chat_arrivals(20000, 0.0, 1 << 20, 1);
  for (const Arrival& arrival : arrivals) {
    prompts += arrival.prompt_tokens / 20000.0;
    replies += arrival.output_tokens / 20000.0;
  }
  CHECK(std::abs(prompts - 161.31) < 7.0);  // the mean of 20,000 with a standard deviation of 1.3 times the mean
  CHECK(std::abs(replies - 337.99) < 14.0);
  for (const Arrival& arrival : chat_arrivals(1000, 0.0, 1024, 2)) {
    REQUIRE((arrival.prompt_tokens >= 1 && arrival.output_tokens >= 1));
    REQUIRE(arrival.prompt_tokens + arrival.output_tokens <= 1024);
  }
}

TEST_CASE("arrivals: the offline workload has 256 requests with lengths from 100 to 1,024") {
  const std::vector<Arrival> arrivals = offline_arrivals(1);
  REQUIRE(arrivals.size() == 256);
  double sum = 0.0;
  for (const Arrival& arrival : arrivals) {
    CHECK(arrival.time == 0.0);
    for (const int length : {arrival.prompt_tokens, arrival.output_tokens}) {
      CHECK((length >= 100 && length <= 1024));
      sum += length;
    }
  }
  CHECK(std::abs(sum / 512 - 562.0) < 40.0);  // three standard errors are 35
  CHECK(offline_arrivals(1)[7].prompt_tokens == arrivals[7].prompt_tokens);
  CHECK(offline_arrivals(2)[7].prompt_tokens != arrivals[7].prompt_tokens);
}

TEST_CASE("distribution: a value on a bound counts below it, and values are kept where they are asked for") {
  const std::vector<double> bounds = {1.0, 2.0, 4.0};
  Distribution counted(Keep::kCounts, bounds);
  Distribution kept(Keep::kValues, bounds);
  for (const double value : {0.5, 1.0, 1.5, 2.0, 4.5}) {
    counted.add(value);
    kept.add(value);
  }
  CHECK(std::vector<std::int64_t>(counted.counts().begin(), counted.counts().end()) ==
        std::vector<std::int64_t>{2, 2, 0});
  CHECK(counted.count() == 5);
  CHECK(counted.sum() == 9.5);
  CHECK(kept.spread().median == 1.5);
  CHECK_THROWS_AS(counted.spread(), common::CheckError);
}

TEST_CASE("blocks: each has its first owner, how many requests and tables have it, and its tokens") {
  // Request 4 has two samples that share block 0; request 2 shares block 0 with both.
  const std::vector<int> first = {0, 1};
  const std::vector<int> second = {0, 3};
  const std::vector<int> third = {0, 5, 6};
  common::PoolSnapshot pool{.num_blocks = 8, .block_size = 4};
  pool.running.push_back({.id = 4, .sequences = {{first, 6}, {second, 5}}});
  pool.running.push_back({.id = 2, .sequences = {{third, 7}}});
  pool.cached_blocks = {7};
  const std::vector<common::BlockState> blocks = common::block_states(pool, 8);
  REQUIRE(blocks.size() == 8);
  CHECK((blocks[0].owner == 2 && blocks[0].num_owners == 2 && blocks[0].num_tables == 3 && blocks[0].num_tokens == 4));
  CHECK((blocks[1].owner == 4 && blocks[1].num_owners == 1 && blocks[1].num_tables == 1 && blocks[1].num_tokens == 2));
  CHECK((blocks[3].owner == 4 && blocks[3].num_tokens == 1));
  CHECK((blocks[5].owner == 2 && blocks[5].num_tokens == 3));
  CHECK((blocks[6].owner == 2 && blocks[6].num_tokens == 0));  // reserved, and no token in it yet
  CHECK((blocks[2].num_tables == 0 && blocks[2].num_owners == 0 && !blocks[2].is_cached));
  CHECK((blocks[7].is_cached && blocks[7].num_tables == 0 && blocks[7].num_tokens == 4));
  CHECK(common::block_states(pool, 2).size() == 2);  // and no block beyond is written to
}

TEST_CASE("tally: /metrics and the report count the same requests and steps") {
  common::Tally tally(Keep::kValues);
  common::StepReport step;
  step.end = 0.5;
  step.num_tokens = 7;
  step.num_queries = {4, 3};
  step.is_chunk = {false, false};
  step.served = {0, 1};
  step.num_served = {4, 3};
  step.swapped_out = {2};
  step.usage = {.total = 16, .reserved = 8, .used = 7, .cached = 0};
  tally.add(step);
  tally.add({.completions = {{{1, 2, 3}, common::FinishReason::kLength, ""}},
             .finish_reason = common::FinishReason::kLength,
             .error = "",
             .prompt_tokens = 4,
             .arrival = 0.0,
             .admission = 0.125,
             .token_times = {0.25, 0.5},
             .end = 0.5});
  common::RequestResult rejected;
  rejected.prompt_tokens = 99;
  tally.add(rejected);
  CHECK(tally.num_finished() == 1);
  CHECK(tally.output_tokens_per_second() == 6.0);
  CHECK(tally.queue_seconds.spread().mean == 0.125);
  CHECK(tally.between_tokens_seconds.spread().mean == 0.25);
  common::ServerState state{.tally = tally, .status = {}, .sizes = {16, 4, 8}};
  state.status.slots = step.usage;
  const std::string text = common::metrics_text(state, "a \"model\"");
  for (const char* const line :
       {"vllm:prompt_tokens_total{model_name=\"a \\\"model\\\"\"} 4\n", "vllm:generation_tokens_total{model_name=",
        "course:requests_rejected_total{model_name=\"a \\\"model\\\"\"} 1\n", "num_gpu_blocks=\"4\"} 1\n",
        "vllm:kv_cache_usage_perc{model_name=\"a \\\"model\\\"\"} 0.5\n",
        "vllm:num_preemptions_total{model_name=\"a \\\"model\\\"\"} 1\n",
        "vllm:iteration_tokens_total_bucket{model_name=\"a \\\"model\\\"\",le=\"8\"} 1\n"}) {
    CAPTURE(text, line);
    CHECK(text.find(line) != std::string::npos);
  }
}

TEST_CASE("report: reading weights, K and V at full speed is a share of the time of the steps that decode") {
  common::Tally tally;
  tally.decode_steps = 2;
  tally.decode_reads = 10;
  tally.decode_seconds = 0.5;
  CHECK(common::roofline_share(tally, common::ReadLimit{1000, 100, 12000.0}) == 0.5);
  CHECK(common::roofline_share(tally, std::nullopt) == 0.0);
  CHECK(common::roofline_share(common::Tally(), common::ReadLimit{1000, 100, 12000.0}) == 0.0);
}
