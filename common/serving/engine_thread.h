// The engine's loop on a thread of its own. Other threads submit requests and wait for their tokens; only the engine's
// thread uses the engine, the scheduler and the cache.
//
//   HTTP threads    submit ──► inbox ───────────────────► engine thread: take the inbox, run one step, hand out tokens
//                   wait   ◄── ticket ◄── messenger ◄────
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/serving/prometheus.h"
#include "common/serving/served_engine.h"
#include "common/serving/tally.h"

namespace common {

struct EngineThreadOptions {
  int max_queue = 512;  // max requests that wait, in the inbox or in the engine's queue
  bool paused = false;  // compute no step until run() or step()
};

// A token of the ticket's request `index`.
struct TokenEvent {
  int index = 0;
  int sample = 0;
  Token token = 0;
  std::optional<TokenLogprobs> logprobs;  // if the request asks for them
};

// A change to show, reported on the engine's thread.
struct EngineNews {
  const ServedEngine* engine = nullptr;  // null: it has failed
  int pool = 0;                          // counted from 0: each restart makes another
  const Tally* tally = nullptr;
  const StepReport* report = nullptr;  // the step that has just ended; null: the change was no step
  std::int64_t num_generated = 0;      // tokens of all samples, since the beginning
  int num_slots_at_start = 0;
  bool is_resized = false;  // whether a restart has asked for sizes
  bool is_paused = false;
  bool is_draining = false;
  bool is_still = false;  // whether no step follows at once
  std::string failure = {};
};

class EngineThread;

// Held by a client's thread while it waits for its requests, one for each prompt. The destructor cancels requests that
// have not ended.
class Ticket {
 public:
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // Waits for news, at most `timeout`, and returns the tokens since the last call, in order.
  std::vector<TokenEvent> wait(std::chrono::milliseconds timeout);
  // Whether the engine has received all of the requests: rejected ones have ended. Waits for that, at most `timeout`.
  bool is_submitted(std::chrono::milliseconds timeout) const;
  // Whether there is a token or an end to return for wait(). Waits for that, at most `timeout`.
  bool has_news(std::chrono::milliseconds timeout) const;
  bool has_ended() const;  // whether all requests have ended
  std::size_t size() const;
  bool has_ended(std::size_t index) const;
  // The result of a request that has ended.
  const RequestResult& result(std::size_t index) const;
  int id(std::size_t index) const;  // the engine's id; -1: not submitted

 private:
  friend class EngineThread;
  struct State;
  Ticket(EngineThread& engine_thread, std::shared_ptr<State> state)
      : engine_thread_(engine_thread), state_(std::move(state)) {}

  EngineThread& engine_thread_;
  std::shared_ptr<State> state_;
};

class EngineThread {
 public:
  // Throws what make_engine throws. on_change: called on the engine's thread after each step, and after every other
  // change that the page shows.
  EngineThread(MakeEngine make_engine, const EngineThreadOptions& options,
               std::function<void(const EngineNews&)> on_change = nullptr);
  // Cancels requests that have not ended.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  enum class Refusal { kNone, kQueueFull, kDraining, kFailed };
  // Submits all of the requests or none. Null: they are refused, with the reason in `refusal`.
  std::unique_ptr<Ticket> submit(std::vector<GenerationRequest> requests, Refusal& refusal);

  void pause();
  void run();
  void step();  // one step, and then pause
  bool is_paused() const { return is_paused_; }
  // Ends all requests, makes a new engine, and then returns. Without sizes, they are those of the start. lasts:
  // restore() does not undo it. If these sizes are not possible, keeps the old sizes and throws InputError. If the old
  // sizes have become impossible too, there is no engine until there is memory for it or a restart succeeds, and
  // failure() says so. Also throws what ends the engine meanwhile, such as bad_alloc.
  void restart(const std::optional<PoolSizes>& sizes, bool lasts = true);
  // Undoes what clients have changed: steps are computed again, unless the start was paused, and if there is no
  // request, the pool is made as it was at the start or after the latest restart that lasts. False: there is one.
  bool restore();
  PoolSizes sizes() const;

  // From now on, the server only says that it will drain: requests can be sent elsewhere before they are
  // refused.
  void announce_drain() { is_drain_announced_ = true; }
  bool is_drain_announced() const { return is_drain_announced_; }
  // Refuses new requests from now on; drained() says whether the last one has ended, and on_change has been called for
  // it.
  void drain();
  bool is_draining() const { return is_draining_; }
  bool drained() const;
  // Ends all requests that have come, with this error. Returns at once; drained() says when it is done.
  void end_requests(const std::string& error);
  // Why there is no engine, so that requests are refused; empty: there is one. If memory was missing, another engine is
  // made as soon as it is there again.
  std::string failure() const;

  // Calls on_change, for a client that has just begun to watch.
  void refresh() {
    post([] {});
  }
  ServerState state() const;
  // The longest text that one request can have, prompt included: the model's context, or the whole cache.
  int max_context() const { return max_context_; }
  // In one step.
  int max_sequences() const { return max_sequences_; }
  int max_drafts() const { return max_drafts_; }
  int max_queue() const { return options_.max_queue; }

 private:
  friend class Ticket;
  class Messenger;
  class Sink;
  // The ticket of a request, and its index there.
  struct Client {
    std::shared_ptr<Ticket::State> ticket;
    int index = 0;
    Counted counted = Counted::kTexts;
    int prompt_tokens = 0;  // with what is forced
  };
  void loop();
  bool advance();
  void restart_engine();
  void restart_engine(const std::optional<PoolSizes>& sizes);
  void empty_inbox();
  void submit_all(const std::shared_ptr<Ticket::State>& state, const std::vector<GenerationRequest>& requests,
                  double handed_over);
  void cancel_abandoned();
  void end_all(const std::string& error);
  void fail(const std::string& reason);
  void recover();
  void refuse(const Client& client, const std::string& error);
  void refuse_arriving(const std::string& error);
  void hand_over(const Client& client, RequestResult result);
  void count(const StepReport* report = nullptr);
  void show(const StepReport* report = nullptr);
  void report_change(const StepReport* report);
  void post(std::function<void()> command);
  // For a client that has gone. Allocates no memory, because a destructor calls it.
  void abandon(Ticket::State& state) noexcept;

  MakeEngine make_engine_;
  EngineThreadOptions options_;
  std::function<void(const EngineNews&)> on_change_;

  // Used by the engine's thread only.
  std::unique_ptr<ServedEngine> engine_;   // null: it has failed
  std::optional<PoolSizes> wanted_sizes_;  // a restart's
  std::optional<PoolSizes> lasting_sizes_;
  std::map<int, Client> clients_;  // by id, for requests that have not ended
  Client arriving_;                // the first of its ticket's requests that clients_ does not know yet
  int next_id_ = 0;
  int num_ended_ = 0;  // requests that num_live_ still counts, until their ends are shown
  int num_pools_ = 0;
  int num_slots_at_start_ = 0;
  std::string end_error_;  // the error of requests that are ended without an error of their own
  std::int64_t num_generated_ = 0;
  std::vector<double> between_tokens_;  // seconds that the state does not have yet
  int steps_to_run_ = 0;
  bool is_recovering_ = false;  // until an engine is made

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> inbox_;
  int num_live_ = 0;            // requests that have not ended, including those in the inbox
  bool has_abandoned_ = false;  // whether there are requests whose clients have gone
  bool is_stopping_ = false;
  std::string failure_;
  ServerState state_;
  std::atomic<bool> is_paused_ = false;
  std::atomic<bool> is_drain_announced_ = false;
  std::atomic<bool> is_draining_ = false;
  std::atomic<int> max_context_ = 0;
  std::atomic<int> max_sequences_ = 0;
  std::atomic<int> max_drafts_ = 0;
  std::unique_ptr<Messenger> messenger_;
  std::thread thread_;
};

}  // namespace common
