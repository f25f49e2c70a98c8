// What common/serving computes without an engine.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/serving/arrivals.h"
#include "common/serving/distribution.h"
#include "common/serving/plot.h"
#include "common/serving/pool_snapshot.h"
#include "common/serving/prometheus.h"
#include "common/serving/report.h"
#include "common/serving/trace.h"
#include "common/serving/view.h"
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
  rejected.finish_reason = common::FinishReason::kRejected;
  rejected.prompt_tokens = 99;
  tally.add(rejected);
  common::RequestResult other;
  for (const auto& [reason, count] :
       {std::pair(common::FinishReason::kStop, 2), std::pair(common::FinishReason::kCancelled, 3),
        std::pair(common::FinishReason::kFailed, 4)}) {
    other.finish_reason = reason;
    for (int i = 0; i < count; ++i) {
      tally.add(other);
    }
  }
  CHECK(tally.num_finished() == 3);
  CHECK(tally.output_tokens_per_second() == 6.0);
  CHECK(tally.queue_seconds.spread().mean == 0.125);
  CHECK(tally.between_tokens_seconds.spread().mean == 0.25);
  common::ServerState state{.tally = tally, .status = {}, .sizes = {16, 4, 8}};
  state.status.slots = step.usage;
  const std::string text = common::metrics_text(state, "a \"model\"");
  for (const char* const line :
       {"vllm:prompt_tokens_total{model_name=\"a \\\"model\\\"\"} 4\n", "vllm:generation_tokens_total{model_name=",
        "course:requests_rejected_total{model_name=\"a \\\"model\\\"\"} 1\n", "finished_reason=\"length\"} 1\n",
        "finished_reason=\"stop\"} 2\n", "finished_reason=\"abort\"} 3\n",
        "course:requests_failed_total{model_name=\"a \\\"model\\\"\"} 4\n", "num_gpu_blocks=\"4\"} 1\n",
        "vllm:kv_cache_usage_perc{model_name=\"a \\\"model\\\"\"} 0.5\n",
        "vllm:num_preemptions_total{model_name=\"a \\\"model\\\"\"} 1\n",
        "vllm:iteration_tokens_total_bucket{model_name=\"a \\\"model\\\"\",le=\"8\"} 1\n"}) {
    CAPTURE(text, line);
    CHECK(text.find(line) != std::string::npos);
  }
}

TEST_CASE("tally: drafts are no tokens of the reply until they are accepted, and no prompt's either") {
  common::Tally tally;
  common::StepReport step;
  step.num_tokens = 6;  // one text with three drafts, and one with one
  step.num_queries = {4, 2};
  step.num_drafts = {3, 1};
  step.num_accepted = 2;
  step.num_read = 20;
  step.bytes_saved = 256;
  step.is_chunk = {false, false};
  step.usage = {16, 12, 11, 0};
  step.scheduling_seconds = 0.25;
  step.computing_seconds = 0.5;
  step.end = 0.75;
  tally.add(step);
  tally.add(step);  // only the second of two such steps in a row is known to decode from its beginning to its end
  CHECK(tally.decode_tokens == 4);
  CHECK(tally.steps.tokens == 12);
  CHECK(tally.steps.timing.prefill_tokens == 0);
  CHECK(tally.steps.timing.decode_tokens == 8);
  CHECK(tally.steps.timing.decode_seconds == 1.5);
  const std::vector<common::Counter> counters = common::counters_of(tally.steps);
  CHECK(common::counter(counters, "drafts") == 8.0);
  CHECK(common::counter(counters, "drafts_accepted") == 4.0);
  CHECK(common::counter(counters, "tokens_a_step_with_drafts") == 2.0);
  CHECK(tally.steps.num_read == 40);
  CHECK(common::counter(counters, "kv_bytes_shared") == 512.0);
  const common::ServerState state{.tally = tally, .status = {}, .sizes = {16, 4, 8}};
  const std::string text = common::metrics_text(state, "m");
  CHECK(text.find("vllm:spec_decode_num_draft_tokens_total{model_name=\"m\"} 8\n") != std::string::npos);
  CHECK(text.find("vllm:spec_decode_num_accepted_tokens_total{model_name=\"m\"} 4\n") != std::string::npos);
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

namespace {

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// An engine that shows a pool and computes nothing.
class ShownEngine : public common::ServedEngine {
 public:
  common::PoolSnapshot shown;

  common::EngineDescription description() const override { return {}; }
  common::EngineStatus status() const override { return {}; }
  common::PoolSnapshot pool() const override { return shown; }
  common::Clock& clock() override { return clock_; }
  int submit(const common::GenerationRequest&, double, std::unique_ptr<common::RequestSink>) override { return 0; }
  int reject(const std::string&, double, std::unique_ptr<common::RequestSink>) override { return 0; }
  void cancel(int, common::FinishReason) override {}
  bool step() override { return false; }
  bool is_idle() const override { return true; }
  const common::StepReport& last_step() const override { return report_; }
  std::vector<common::Counter> counters() const override { return {}; }
  std::optional<common::ReadLimit> measure_read_limit() override { return std::nullopt; }

 private:
  common::VirtualClock clock_;
  common::StepReport report_;
};

// The lines of the live view's frame, without escape sequences.
std::vector<std::string> frame_of(const ShownEngine& engine, const std::vector<std::string>& texts, int columns,
                                  int rows) {
  std::ostringstream output;
  const auto view = common::make_view(common::ViewKind::kLive, output, [&] {
    return common::TerminalSize{columns, rows};
  });
  for (std::size_t id = 0; id < texts.size(); ++id) {
    view->on_text(static_cast<int>(id), 0, texts[id]);
  }
  output.str("");
  view->on_step(engine, engine.last_step());
  std::vector<std::string> lines;
  std::istringstream frame(output.str().substr(3));
  for (std::string line; std::getline(frame, line);) {
    lines.push_back(line.substr(0, line.find('\033')));
  }
  return lines;
}

}  // namespace

TEST_CASE("trace: after each step the file is JSON, and a lane has its name before its first event") {
  const auto path = std::filesystem::temp_directory_path() / "course_trace.json";
  common::TraceWriter trace(path.string());
  std::size_t num_events = 0;
  const auto check = [&] {
    nlohmann::json events = nlohmann::json::parse(content_of(path));
    CHECK(events.size() > num_events);
    num_events = events.size();
    return events;
  };
  CHECK(check().front()["args"]["name"] == "steps");
  for (int step = 0; step < 3; ++step) {
    common::StepReport report;
    report.index = step;
    report.begin = step;
    report.end = step + 0.25;
    report.served = {step, step + 1};
    report.num_served = {1, 1};
    report.admitted = {step + 1};
    trace.add(report);
    check();
  }
  std::vector<common::RequestResult> results(6);
  results[1].admission = 0.5;
  trace.finish(results);
  std::vector<bool> is_named(8);
  for (const nlohmann::json& event : check()) {
    const std::size_t lane = event["tid"];
    if (event["ph"] == "M") {
      CHECK_FALSE(is_named.at(lane));
      is_named.at(lane) = true;
    }
    CHECK(is_named.at(lane));
    if (event["ph"] == "X" && event["name"] != "waits") {
      CHECK(event["dur"] == 250000.0);  // in microseconds, like all times
    }
  }
  CHECK(std::count(is_named.begin(), is_named.end(), true) == 7);  // the steps, and all six requests
  std::filesystem::remove(path);
}

TEST_CASE("plot: the axes end with a label, and an axis without a unit has none") {
  const common::Chart chart{"slots, % of the cache", "seconds", "", 100.0, {{"one", {{0.0, 10.0}, {23.4, 50.0}}}}};
  const std::string svg = common::draw_charts({chart}, "title", "description");
  CHECK(svg.find(">25</text>") != std::string::npos);
  CHECK(svg.find(">30</text>") == std::string::npos);
  CHECK(svg.find(">100</text>") != std::string::npos);
  CHECK(svg.find("></text>") == std::string::npos);
}

TEST_CASE("view: the live view uses the terminal's width and height, and cuts no number") {
  ShownEngine engine;
  engine.shown.num_blocks = 1000;
  engine.shown.block_size = 16;
  std::vector<std::string> texts;
  for (int id = 0; id < 4; ++id) {
    engine.shown.running.push_back({.id = id, .texts = {{}}});
    texts.emplace_back(2000, static_cast<char>('a' + id));
  }
  for (int id = 100; id < 160; ++id) {
    engine.shown.waiting.push_back({.id = id});
  }
  for (const auto& [columns, rows] : {std::pair(80, 24), std::pair(200, 50), std::pair(120, 30)}) {
    CAPTURE(columns, rows);
    const std::vector<std::string> lines = frame_of(engine, texts, columns, rows);
    REQUIRE(lines.size() <= static_cast<std::size_t>(rows));
    CHECK(lines.size() + 4 > static_cast<std::size_t>(rows));  // less than a line for each text is left over
    const std::string& queue = lines.at(1);
    CHECK(queue.starts_with("queue  60 waiting: 100 101 "));
    CHECK(queue.ends_with(" more"));
    CHECK(queue.size() <= static_cast<std::size_t>(columns));
    CHECK(queue.size() + 4 > static_cast<std::size_t>(columns));
    const std::size_t listed = static_cast<std::size_t>(std::count(queue.begin(), queue.end(), ' ')) - 6;
    CHECK(queue.find("and " + std::to_string(60 - listed) + " more") != std::string::npos);
    CHECK(lines.at(3).starts_with("A    0  \"aaa"));
    CHECK(lines.at(3).size() + 2 > static_cast<std::size_t>(columns));
    const auto map =
        std::find_if(lines.begin(), lines.end(), [](const std::string& line) { return line.starts_with("   0  "); });
    REQUIRE(map != lines.end());
    CHECK(map->size() + 10 > static_cast<std::size_t>(columns));
  }
  engine.shown.waiting.resize(3);
  CHECK(frame_of(engine, texts, 80, 24).at(1) == "queue  3 waiting: 100 101 102");
  // Two columns each: cut by columns, not by characters.
  engine.shown.num_blocks = 16;
  const std::vector<std::string> wide = frame_of(engine, {"王王王王王王王王王王王王王王王王王王王王"}, 31, 24);
  CHECK(wide.at(3) == "A    0  \"王王王王王王王王王王");
  CHECK(wide.at(4) == "         王王王王王王王王王王\"");
}
