// The engine's loop on a thread of its own. Other threads hand requests over and wait for their tokens; none of them
// touches the engine, the scheduler or the cache.
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
  int max_queue = 512;  // requests that wait, in the inbox or in the engine's queue
  bool paused = false;  // begin without computing, until run() or step()
};

// A token of the ticket's request `index`.
struct TokenEvent {
  int index = 0;
  int sample = 0;
  Token token = 0;
  std::optional<TokenLogprobs> logprobs;  // if the request wants them
};

// What there is to show, on the engine's thread.
struct EngineNews {
  const ServedEngine* engine = nullptr;  // null: it has failed
  const Tally* tally = nullptr;
  const StepReport* report = nullptr;  // of the step that has just ended, if it was one
  std::int64_t num_generated = 0;      // tokens of all samples, since the beginning
  bool is_paused = false;
  bool is_still = false;  // no step follows at once
  std::string failure = {};
};

class EngineThread;

// What a thread holds that waits for its requests: one for each prompt. Its end cancels those that have not ended.
class Ticket {
 public:
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // The tokens since the last call, in order. Waits for something to happen, at most this long.
  std::vector<TokenEvent> wait(std::chrono::milliseconds timeout);
  // Whether the engine has seen all of the requests: those that it rejected have ended. Waits for it, at most this
  // long.
  bool is_submitted(std::chrono::milliseconds timeout) const;
  bool has_ended() const;  // all of them
  std::size_t size() const;
  bool has_ended(std::size_t index) const;
  // Of a request that has ended.
  const RequestResult& result(std::size_t index) const;
  int id(std::size_t index) const;  // the engine's; -1: not submitted

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
  // Throws what making the engine throws. on_change: called on the engine's thread after each step, and after anything
  // else that changes what is shown.
  EngineThread(MakeEngine make_engine, const EngineThreadOptions& options,
               std::function<void(const EngineNews&)> on_change = nullptr);
  // Cancels what has not ended.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  enum class Refusal { kNone, kQueueFull, kDraining, kFailed };
  // Hands the requests over, all or none. Null: refused, with the reason in `refusal`.
  std::unique_ptr<Ticket> submit(std::vector<ServedRequest> requests, Refusal& refusal);

  void pause();
  void run();
  void step();  // one step, and then pause
  bool is_paused() const { return is_paused_; }
  // Ends all requests and makes the engine anew. Returns once that is done. Throws InputError, and keeps the sizes
  // before, if they are not possible. If those have become impossible too, there is no engine until a restart succeeds,
  // and failure() says so.
  void restart(const PoolSizes& sizes);
  PoolSizes sizes() const;

  // Refuses new requests from now on; drained() says when the last one has ended.
  void drain();
  bool is_draining() const { return is_draining_; }
  bool drained() const;
  // Why there is no engine, and no request is taken; empty: there is one.
  std::string failure() const;

  // Calls on_change, for a client that has just begun to watch.
  void refresh() {
    post([] {});
  }
  ServerState state() const;
  // The longest text that one request can have, prompt included: the model's context, or the whole cache.
  int max_context() const { return max_context_; }

 private:
  friend class Ticket;
  class Messenger;
  class Sink;
  // Whose request it is.
  struct Client {
    std::shared_ptr<Ticket::State> ticket;
    int index = 0;
  };
  void loop();
  bool advance();
  void restart_engine();
  void take_inbox();
  void submit_all(const std::shared_ptr<Ticket::State>& state, const std::vector<ServedRequest>& requests,
                  double handed_over);
  void cancel(const std::shared_ptr<Ticket::State>& state);
  void end_all(const std::string& error);
  void fail(const std::string& reason);
  void refuse(const Client& client, const std::string& error);
  void refuse_from(std::size_t first, const std::shared_ptr<Ticket::State>& state, const std::string& error);
  void hand_over(const Client& client, RequestResult result);
  void count(const StepReport* report = nullptr);
  void show(const StepReport* report = nullptr);
  void post(std::function<void()> command);

  MakeEngine make_engine_;
  EngineThreadOptions options_;
  std::function<void(const EngineNews&)> on_change_;

  // Touched by the engine's thread alone.
  std::unique_ptr<ServedEngine> engine_;   // null: it has failed
  std::optional<PoolSizes> wanted_sizes_;  // by a restart
  std::map<int, Client> clients_;          // of the requests that have not ended, by id
  int next_id_ = 0;
  std::string end_error_;  // why requests are being ended that have no error of their own
  std::int64_t num_generated_ = 0;
  int steps_to_run_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> inbox_;
  int num_live_ = 0;  // that have not ended, those in the inbox included
  bool is_stopping_ = false;
  std::string failure_;
  ServerState state_;
  std::atomic<bool> is_paused_ = false;
  std::atomic<bool> is_draining_ = false;
  std::atomic<int> max_context_ = 0;
  std::unique_ptr<Messenger> messenger_;
  std::thread thread_;
};

}  // namespace common
