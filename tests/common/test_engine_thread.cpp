// The thread between clients and an engine when something fails: every client is told, whatever throws and wherever
// memory runs out. The engine is a fake one that computes nothing.
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/serving/engine_thread.h"
#include "common/serving/pool_view.h"
#include "tests/support/catch.h"
#include "tests/support/failing_allocations.h"

namespace {

enum class Thread { kMessenger, kClient, kEngine };
thread_local Thread this_thread = Thread::kMessenger;  // a thread that says nothing about itself

// Which allocations fail, counted in one thread.
std::atomic<bool> is_armed = false;
std::atomic<Thread> failing_thread = Thread::kEngine;
std::atomic<int> until_failure = 0;
std::atomic<int> failures_left = 0;
std::atomic<bool> has_run_out = false;

}  // namespace

bool tests::allocation_fails() {
  if (!is_armed || this_thread != failing_thread) {
    return false;
  }
  if (until_failure > 0) {
    until_failure -= 1;
    return false;
  }
  if (failures_left == 0) {
    return false;
  }
  failures_left -= 1;
  has_run_out = true;
  return true;
}

namespace {

using common::EngineThread;
using Refusal = common::EngineThread::Refusal;

constexpr common::PoolSizes kSizes = {64, 4, 64};
constexpr int kNumTokens = 3;
constexpr std::chrono::seconds kPatience{10};

void fail_allocations(Thread thread, int first, int count) {
  failing_thread = thread;
  until_failure = first;
  failures_left = count;
  has_run_out = false;
  is_armed = true;
}

enum class Call { kNone, kSubmit, kStatus, kCancel, kStep, kOnChange };

// In which call something throws, once.
struct Script {
  std::atomic<Call> throws_in = Call::kNone;
  std::atomic<int> calls_before = 0;  // that do not throw
  // Where an engine is made: what there is no memory for, if anything.
  enum class Missing { kNothing, kEngine, kHostMemory };
  std::atomic<Missing> missing = Missing::kNothing;

  void made() const {
    if (missing == Missing::kEngine) {
      throw std::bad_alloc();
    }
    if (missing == Missing::kHostMemory) {
      throw common::InputError("not enough memory for --host-slots 128");
    }
  }

  void called(Call call) {
    if (throws_in == call && calls_before-- == 0) {
      throws_in = Call::kNone;
      throw std::runtime_error("broken");
    }
  }
};

// Each request gets the tokens 0, 1 and 2, one a step.
class FakeEngine : public common::ServedEngine {
 public:
  explicit FakeEngine(Script& script) : script_(script) {}

  common::EngineDescription description() const override { return {.sizes = kSizes, .context_length = 64}; }
  common::EngineStatus status() const override {
    script_.called(Call::kStatus);
    common::EngineStatus status;
    status.num_waiting = static_cast<int>(clients_.size());
    status.slots.total = kSizes.num_slots;
    return status;
  }
  common::PoolSnapshot pool() const override { return {}; }
  common::Clock& clock() override { return clock_; }
  int submit(const common::GenerationRequest&, double, std::unique_ptr<common::RequestSink> sink) override {
    script_.called(Call::kSubmit);
    const int id = num_requests_;
    clients_[id].sink = std::move(sink);
    num_requests_ += 1;
    return id;
  }
  int reject(const std::string&, double, std::unique_ptr<common::RequestSink>) override { return -1; }
  void cancel(int id, common::FinishReason reason) override {
    script_.called(Call::kCancel);
    end(id, reason);
  }
  bool step() override {
    script_.called(Call::kStep);
    std::vector<int> ended;
    for (auto& [id, client] : clients_) {
      client.sink->on_token(id, 0, client.num_tokens, nullptr);
      client.num_tokens += 1;
      if (client.num_tokens == kNumTokens) {
        ended.push_back(id);
      }
    }
    for (const int id : ended) {
      end(id, common::FinishReason::kLength);
    }
    return true;
  }
  bool is_idle() const override { return clients_.empty(); }
  const common::StepReport& last_step() const override { return report_; }
  std::vector<common::Counter> counters() const override { return {}; }
  std::optional<common::ReadLimit> measure_read_limit() override { return std::nullopt; }

 private:
  struct Client {
    std::unique_ptr<common::RequestSink> sink;
    int num_tokens = 0;
  };

  void end(int id, common::FinishReason reason) {
    common::RequestResult result;
    result.finish_reason = reason;
    const auto client = clients_.find(id);
    client->second.sink->on_end(id, std::move(result));
    clients_.erase(client);
  }

  Script& script_;
  common::VirtualClock clock_;
  common::StepReport report_;
  std::map<int, Client> clients_;
  int num_requests_ = 0;
};

struct Fixture {
  explicit Fixture(bool is_paused = false)
      : engine(
            [this](const common::EngineDemand&) {
              this_thread = this_thread == Thread::kClient ? Thread::kClient : Thread::kEngine;
              script.made();
              return std::make_unique<FakeEngine>(script);
            },
            {.paused = is_paused},
            [this](const common::EngineNews& news) {
              {
                const std::lock_guard lock(mutex);
                has_engine = news.engine != nullptr;
                shown_failure = news.failure;
              }
              if (has_engine) {
                script.called(Call::kOnChange);
              }
              if (news.report != nullptr) {
                drained_before_shown = drained_before_shown || engine.drained();
              }
            }) {
    engine.restart(kSizes);  // in the engine's thread, which is known from here on
  }
  std::unique_ptr<common::Ticket> submit(int num_requests) {
    Refusal refusal = Refusal::kNone;
    return engine.submit(std::vector<common::GenerationRequest>(static_cast<std::size_t>(num_requests)), refusal);
  }
  // What the page shows: no engine, and why.
  std::string failure_on_the_page() {
    const std::lock_guard lock(mutex);
    return has_engine ? "" : shown_failure;
  }

  Script script;
  std::mutex mutex;
  bool has_engine = false;
  std::string shown_failure;
  std::atomic<bool> drained_before_shown = false;  // whether a last end was told before the page heard of it
  EngineThread engine;
};

struct ClientThread {
  ClientThread() { this_thread = Thread::kClient; }
};
const ClientThread client_thread;  // of the tests

using Texts = std::vector<std::vector<common::Token>>;

// Waits until all of the ticket's requests have ended, and returns the tokens of each. Empty if they do not end.
Texts tokens_of(common::Ticket& ticket) {
  Texts tokens(ticket.size());
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!ticket.has_ended()) {
    for (const common::TokenEvent& event : ticket.wait(std::chrono::milliseconds(100))) {
      tokens.at(static_cast<std::size_t>(event.index)).push_back(event.token);
    }
    if (std::chrono::steady_clock::now() > deadline) {
      return {};
    }
  }
  return tokens;
}

const std::vector<common::Token> kAllTokens = {0, 1, 2};

}  // namespace

TEST_CASE("engine thread: wherever memory runs out in it, every request is answered, and nothing is counted on") {
  for (const int num_failures : {1, 2, 5}) {
    Fixture fixture;
    bool goes_on = true;
    for (int first = 0; goes_on; ++first) {
      CAPTURE(num_failures, first);
      fail_allocations(Thread::kEngine, first, num_failures);
      const auto ticket = fixture.submit(3);
      REQUIRE(ticket != nullptr);
      const auto tokens = tokens_of(*ticket);
      is_armed = false;
      REQUIRE(tokens.size() == 3);
      fixture.engine.restart(kSizes);  // after everything that the thread still had to do
      for (std::size_t i = 0; i < ticket->size(); ++i) {
        const std::string& error = ticket->result(i).error;
        CHECK((error == "out of memory" || (error.empty() && tokens[i] == kAllTokens)));
      }
      CHECK(ticket->is_submitted(std::chrono::milliseconds(0)));
      CHECK(fixture.engine.drained());
      CHECK(fixture.engine.state().num_waiting() == 0);
      const auto next = fixture.submit(1);
      REQUIRE(next != nullptr);
      CHECK(tokens_of(*next) == Texts{kAllTokens});
      goes_on = has_run_out;
    }
  }
}

TEST_CASE("engine thread: a client for whom there is no memory is not counted as one that waits") {
  Fixture fixture;
  bool goes_on = true;
  for (int first = 0; goes_on; ++first) {
    CAPTURE(first);
    std::vector<common::GenerationRequest> requests(2);
    Refusal refusal = Refusal::kNone;
    fail_allocations(Thread::kClient, first, 1);
    try {
      const auto ticket = fixture.engine.submit(std::move(requests), refusal);
      is_armed = false;
      CHECK(tokens_of(*ticket) == Texts{kAllTokens, kAllTokens});
    } catch (const std::bad_alloc&) {
      is_armed = false;
    }
    fixture.engine.restart(kSizes);
    CHECK(fixture.engine.drained());
    CHECK(fixture.engine.state().num_waiting() == 0);
    goes_on = has_run_out;
  }
}

TEST_CASE("engine thread: a client without memory can leave, and its requests end") {
  Fixture fixture(true);
  auto ticket = fixture.submit(2);
  REQUIRE(ticket != nullptr);
  fail_allocations(Thread::kClient, 0, 1 << 20);
  ticket.reset();
  is_armed = false;
  fixture.engine.restart(kSizes);  // after everything that the thread still had to do
  CHECK(fixture.engine.drained());
  // A client that leaves takes no other client's requests along.
  fixture.engine.pause();
  ticket = fixture.submit(1);
  const auto other = fixture.submit(1);
  ticket.reset();
  fixture.engine.run();
  CHECK(tokens_of(*other) == Texts{kAllTokens});
  CHECK(fixture.engine.drained());
}

TEST_CASE("engine thread: the page hears of the last end before the server may end") {
  Fixture fixture;
  const auto ticket = fixture.submit(2);
  CHECK(tokens_of(*ticket) == Texts{kAllTokens, kAllTokens});
  fixture.engine.restart(kSizes);  // after everything that the thread still had to do
  CHECK(fixture.engine.drained());
  CHECK_FALSE(fixture.drained_before_shown);
}

TEST_CASE("engine thread: wherever memory runs out in a restart, its caller hears of it") {
  // Of two failures, the second may occur while the first is handled.
  const int num_failures = GENERATE(1, 2);
  Fixture fixture;
  bool goes_on = true;
  int num_answers = 0;
  for (int first = 0; goes_on; ++first) {
    CAPTURE(num_failures, first);
    fixture.engine.pause();
    const auto ticket = fixture.submit(2);
    REQUIRE(ticket != nullptr);
    REQUIRE(ticket->is_submitted(kPatience));
    fail_allocations(Thread::kEngine, first, num_failures);
    std::string answer;
    try {
      fixture.engine.restart(kSizes);
    } catch (const common::InputError&) {
      answer = "the pool";
    } catch (const std::bad_alloc&) {
      answer = "the memory";
    } catch (const std::exception& error) {
      answer = error.what();
    }
    is_armed = false;
    CHECK((answer.empty() || answer == "the pool" || answer == "the memory"));
    num_answers += answer == "the memory" ? 1 : 0;
    goes_on = has_run_out;
    fixture.engine.run();
    tokens_of(*ticket);
    CHECK(ticket->has_ended());
    fixture.engine.restart(kSizes);
    const auto next = fixture.submit(1);
    REQUIRE(next != nullptr);
    CHECK(tokens_of(*next) == Texts{kAllTokens});
  }
  CHECK(num_answers > 0);
}

TEST_CASE("engine thread: as long as there is no memory for an engine, all are answered, and then there is one") {
  const Script::Missing missing = GENERATE(Script::Missing::kEngine, Script::Missing::kHostMemory);
  CAPTURE(static_cast<int>(missing));
  const bool is_restart = GENERATE(false, true);  // what ends the engine before
  CAPTURE(is_restart);
  Fixture fixture;
  fixture.script.missing = missing;
  const auto is_refused = [&](const common::PoolSizes& sizes) {
    try {
      fixture.engine.restart(sizes);
    } catch (const common::InputError&) {
      return true;
    }
    return false;
  };
  if (is_restart) {
    CHECK(is_refused(kSizes));
  } else {
    fail_allocations(Thread::kEngine, 0, 1);
    const auto ticket = fixture.submit(1);
    REQUIRE(tokens_of(*ticket).size() == 1);
    is_armed = false;
  }
  auto answer = std::async(std::launch::async, is_refused, kSizes);
  const bool is_answered = answer.wait_for(kPatience) == std::future_status::ready;
  CHECK(is_answered);
  CHECK_FALSE(fixture.engine.failure().empty());
  fixture.script.missing = Script::Missing::kNothing;
  CHECK((answer.get() || !is_answered));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!fixture.engine.failure().empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto next = fixture.submit(1);
  REQUIRE(next != nullptr);
  CHECK(tokens_of(*next) == Texts{kAllTokens});
}

TEST_CASE("engine thread: the messenger has no memory for a token, and delivers it later") {
  for (int first = 0; first < 4; ++first) {
    Fixture fixture;
    fail_allocations(Thread::kMessenger, first, 2);
    const auto ticket = fixture.submit(2);
    const auto tokens = tokens_of(*ticket);
    is_armed = false;
    CAPTURE(first);
    CHECK(tokens == Texts{kAllTokens, kAllTokens});
    CHECK((has_run_out || first > 0));
    CHECK(fixture.engine.failure().empty());
  }
}

TEST_CASE("engine thread: whatever throws in it, all clients get one error, and the page shows it") {
  for (const Call call : {Call::kSubmit, Call::kStatus, Call::kCancel, Call::kStep, Call::kOnChange}) {
    CAPTURE(static_cast<int>(call));
    Fixture fixture(true);
    const auto before = fixture.submit(2);
    auto cancelled = fixture.submit(1);
    REQUIRE(cancelled->is_submitted(kPatience));
    fixture.script.calls_before = call == Call::kSubmit ? 1 : 0;  // the second of three requests
    fixture.script.throws_in = call;
    std::unique_ptr<common::Ticket> after;
    if (call == Call::kSubmit) {
      after = fixture.submit(3);
      REQUIRE(after != nullptr);
    } else if (call == Call::kCancel) {
      cancelled.reset();
    } else if (call == Call::kStep) {
      fixture.engine.run();
    } else {
      fixture.engine.refresh();
    }
    for (common::Ticket* const ticket : {before.get(), cancelled.get(), after.get()}) {
      if (ticket != nullptr) {
        REQUIRE(tokens_of(*ticket).size() == ticket->size());
        for (std::size_t i = 0; i < ticket->size(); ++i) {
          CHECK(ticket->result(i).error == "broken");
        }
        CHECK(ticket->is_submitted(std::chrono::milliseconds(0)));
      }
    }
    std::string shown;  // before anything else is sent: the page is drawn again after each command
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (shown.empty() && std::chrono::steady_clock::now() < deadline) {
      shown = fixture.failure_on_the_page();
    }
    REQUIRE(shown == "broken");
    Refusal refusal = Refusal::kNone;
    CHECK(fixture.engine.submit({{}}, refusal) == nullptr);
    CHECK(refusal == Refusal::kFailed);
    CHECK(fixture.engine.failure() == "broken");
    CHECK(fixture.engine.state().num_waiting() == 0);
    fixture.engine.restart(kSizes);
    CHECK(fixture.engine.drained());
    fixture.engine.run();
    CHECK(fixture.failure_on_the_page().empty());
    CHECK(tokens_of(*fixture.submit(1)) == Texts{kAllTokens});
  }
}

TEST_CASE("pool view: a record that there is no memory to keep does not displace those that are kept") {
  common::PoolView view(nullptr);
  common::PoolView::Watcher watcher(view);
  const auto update = [&](const std::string& failure) {
    view.update({.engine = nullptr, .is_still = true, .failure = failure});
  };
  const std::string large(1 << 20, 'x');
  constexpr int kTimes = 12;  // more than all records may have together
  int num_failures = 0;
  for (int record = 0; record < kTimes; ++record) {  // not every one needs memory for its place in the list
    bool goes_on = true;
    for (int first = 0; goes_on; ++first) {
      for (int time = 0; time < kTimes && goes_on; ++time) {
        fail_allocations(Thread::kClient, first, 1);
        try {
          update(large);
        } catch (const std::bad_alloc&) {
          num_failures += 1;
        }
        is_armed = false;
        goes_on = has_run_out;
      }
    }
  }
  CHECK(num_failures > kTimes);
  while (!watcher.read(std::chrono::milliseconds(0)).empty()) {
  }
  update("one");
  update("two");
  CHECK(watcher.read(std::chrono::milliseconds(0)).size() == 2);
}
