#include "common/serving/engine_thread.h"

#include <algorithm>
#include <exception>
#include <future>
#include <iterator>
#include <new>
#include <utility>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/message.h"
#include "common/base/text.h"

namespace common {

struct Ticket::State {
  struct Entry {
    int id = -1;
    bool has_ended = false;
    RequestResult result;
  };
  mutable std::mutex mutex;
  std::condition_variable news;
  std::vector<TokenEvent> tokens;
  std::vector<Entry> entries;
  std::size_t num_submitted = 0;
  std::size_t num_ended = 0;
  std::size_t num_ended_told = 0;  // when wait() returned last
  std::atomic<bool> is_abandoned = false;
};

namespace {

std::string message_of_thrown(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return message_of(error);
  }
}

bool is_bad_alloc(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

// Delivers news to tickets, in order, on a thread of its own: waking a client's thread takes microseconds, and a step
// may have tokens for hundreds of clients.
class EngineThread::Messenger {
 public:
  Messenger() : thread_([this] { run(); }) {}
  // Delivers all news that were sent.
  ~Messenger() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // On the engine's thread. `change` is applied to the ticket under its lock.
  void add(std::shared_ptr<Ticket::State> ticket, std::function<void(Ticket::State&)> change) {
    added_.push_back({std::move(ticket), std::move(change)});
  }
  void send() {
    if (added_.empty()) {
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      sent_.insert(sent_.end(), std::make_move_iterator(added_.begin()), std::make_move_iterator(added_.end()));
    }
    added_.clear();
    wake_.notify_one();
  }

 private:
  struct Message {
    std::shared_ptr<Ticket::State> ticket;
    std::function<void(Ticket::State&)> change;
  };

  void run() {
    std::vector<Message> messages;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return !sent_.empty() || is_ending_; });
      if (sent_.empty()) {
        return;
      }
      messages.swap(sent_);
      lock.unlock();
      for (auto message = messages.cbegin(); message != messages.cend();) {
        try {
          deliver(message, messages.cend());
        } catch (const std::bad_alloc&) {  // a change that throws has changed nothing: it is made again
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
      }
      messages.clear();
      lock.lock();
    }
  }

  // Delivers consecutive messages for one ticket, and wakes it once. `message` advances to the next ticket's.
  static void deliver(std::vector<Message>::const_iterator& message, std::vector<Message>::const_iterator end) {
    Ticket::State& state = *message->ticket;
    {
      const std::lock_guard lock(state.mutex);
      for (; message != end && message->ticket.get() == &state; ++message) {
        message->change(state);
      }
    }
    state.news.notify_all();
  }

  std::vector<Message> added_;  // used by the engine's thread only

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Message> sent_;
  bool is_ending_ = false;
  std::thread thread_;
};

Ticket::~Ticket() {
  if (!has_ended()) {
    engine_thread_.abandon(*state_);
  }
}

std::vector<TokenEvent> Ticket::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  state_->news.wait_for(lock, timeout, [&] {
    return state_->entries.empty() || !state_->tokens.empty() || state_->num_ended != state_->num_ended_told;
  });
  state_->num_ended_told = state_->num_ended;
  return std::exchange(state_->tokens, {});
}

bool Ticket::is_submitted(std::chrono::milliseconds timeout) const {
  std::unique_lock lock(state_->mutex);
  return state_->news.wait_for(lock, timeout, [&] { return state_->num_submitted == state_->entries.size(); });
}

bool Ticket::has_news(std::chrono::milliseconds timeout) const {
  std::unique_lock lock(state_->mutex);
  return state_->news.wait_for(
      lock, timeout, [&] { return state_->entries.empty() || !state_->tokens.empty() || state_->num_ended > 0; });
}

bool Ticket::has_ended() const {
  const std::lock_guard lock(state_->mutex);
  return state_->num_ended == state_->entries.size() && state_->tokens.empty();
}

std::size_t Ticket::size() const { return state_->entries.size(); }

bool Ticket::has_ended(std::size_t index) const {
  const std::lock_guard lock(state_->mutex);
  return state_->entries.at(index).has_ended;
}

const RequestResult& Ticket::result(std::size_t index) const {
  const std::lock_guard lock(state_->mutex);
  COMMON_CHECK(state_->entries.at(index).has_ended, "the request is being served");
  return state_->entries[index].result;
}

int Ticket::id(std::size_t index) const {
  const std::lock_guard lock(state_->mutex);
  return state_->entries.at(index).id;
}

// Sends a request's tokens and its end to its ticket.
class EngineThread::Sink : public RequestSink {
 public:
  explicit Sink(EngineThread& engine_thread) : engine_thread_(engine_thread) {}

  void on_token(int id, int sample, Token token, const TokenLogprobs* logprobs) override {
    const Client& client = engine_thread_.clients_.at(id);
    if (client.counted == Counted::kTexts) {
      count_token(static_cast<std::size_t>(sample));
    }
    TokenEvent event{client.index, sample, token, std::nullopt};
    if (logprobs != nullptr) {
      event.logprobs = *logprobs;
    }
    engine_thread_.messenger_->add(client.ticket, [event = std::move(event)](Ticket::State& ticket) mutable {
      ticket.tokens.push_back(std::move(event));
    });
  }
  void on_end(int id, RequestResult result) override {
    if (result.error.empty()) {
      result.error = engine_thread_.end_error_;
    }
    const Client& client = engine_thread_.clients_.at(id);
    if (client.counted != Counted::kTexts) {
      result.prompt_tokens = client.prompt_tokens;
      result.token_times.clear();
      for (Completion& completion : result.completions) {
        completion.tokens.clear();
      }
    }
    if (last_tokens_.empty()) {  // a beam search: its tokens come now
      for (const Completion& completion : result.completions) {
        engine_thread_.num_generated_ += static_cast<std::int64_t>(completion.tokens.size());
      }
    }
    engine_thread_.hand_over(client, std::move(result));
    engine_thread_.clients_.erase(id);
  }

 private:
  void count_token(std::size_t sample) {
    const double now = engine_thread_.engine_->clock().now();
    last_tokens_.resize(std::max(last_tokens_.size(), sample + 1));
    if (last_tokens_[sample].has_value()) {
      engine_thread_.between_tokens_.push_back(now - *last_tokens_[sample]);
    }
    last_tokens_[sample] = now;
    engine_thread_.num_generated_ += 1;
  }

  EngineThread& engine_thread_;
  std::vector<std::optional<double>> last_tokens_;  // by sample: when its last token came
};

EngineThread::EngineThread(MakeEngine make_engine, const EngineThreadOptions& options,
                           std::function<void(const EngineNews&)> on_change)
    : make_engine_(std::move(make_engine)),
      options_(options),
      on_change_(std::move(on_change)),
      is_paused_(options.paused),
      messenger_(std::make_unique<Messenger>()) {
  restart_engine();
  thread_ = std::thread([this] { loop(); });
}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

std::unique_ptr<Ticket> EngineThread::submit(std::vector<GenerationRequest> requests, Refusal& refusal) {
  auto state = std::make_shared<Ticket::State>();
  const auto count = static_cast<int>(requests.size());
  state->entries.resize(requests.size());
  // Made first: without memory for it, a request would be submitted for which no client waits.
  std::unique_ptr<Ticket> ticket(new Ticket(*this, state));
  {
    const std::lock_guard lock(mutex_);
    refusal = !failure_.empty()                                   ? Refusal::kFailed
              : is_draining_                                      ? Refusal::kDraining
              : state_.num_waiting() + count > options_.max_queue ? Refusal::kQueueFull
                                                                  : Refusal::kNone;
    if (refusal != Refusal::kNone) {
      return nullptr;
    }
    inbox_.emplace_back([this, state, requests = std::move(requests), handed_over = now_seconds()]() {
      submit_all(state, requests, handed_over);
    });
    state_.num_posted += count;  // counted only now: there may be no memory for the line above
    num_live_ += count;
  }
  wake_.notify_all();
  return ticket;
}

void EngineThread::pause() {
  is_paused_ = true;
  post([this] { steps_to_run_ = 0; });
}

void EngineThread::run() {
  is_paused_ = false;
  post([] {});
}

void EngineThread::step() {
  is_paused_ = true;
  post([this] { steps_to_run_ += 1; });
}

void EngineThread::restart(const std::optional<PoolSizes>& sizes, bool lasts) {
  const auto done = std::make_shared<std::promise<void>>();
  std::future<void> result = done->get_future();
  post([this, sizes, lasts, done] {
    try {
      restart_engine(sizes);
      lasting_sizes_ = lasts ? sizes : lasting_sizes_;
    } catch (const InputError&) {
      done->set_exception(std::current_exception());
      return;
    } catch (...) {  // the loop fails the engine, and the caller has to get it too
      done->set_exception(std::current_exception());
      throw;
    }
    done->set_value();
  });
  result.get();
}

bool EngineThread::restore() {
  is_paused_ = options_.paused;
  const auto done = std::make_shared<std::promise<bool>>();
  std::future<bool> result = done->get_future();
  post([this, done] {
    const bool is_free = clients_.empty();  // requests that come from now on find the new pool
    try {
      if (is_free && wanted_sizes_ != lasting_sizes_) {
        restart_engine(lasting_sizes_);
      }
    } catch (const InputError&) {  // the pool stays, or there is none and failure() says so
    } catch (...) {
      done->set_value(true);
      throw;
    }
    done->set_value(is_free);
  });
  return result.get();
}

void EngineThread::restart_engine(const std::optional<PoolSizes>& sizes) {
  const std::optional<PoolSizes> before = wanted_sizes_;
  end_all("the pool was made anew");
  wanted_sizes_ = sizes;
  std::string problem;
  try {
    restart_engine();
    return;
  } catch (const std::exception& error) {
    problem = "this pool can't be made: " + message_of(error);
  }
  wanted_sizes_ = before;
  try {
    restart_engine();
  } catch (const std::exception& error) {
    problem += "; nor can the one before be made again: " + message_of(error);
    fail("there is no pool: " + message_of(error));
    is_recovering_ = true;
  }
  throw InputError(problem);
}

PoolSizes EngineThread::sizes() const {
  const std::lock_guard lock(mutex_);
  return state_.sizes;
}

void EngineThread::drain() {
  announce_drain();
  is_draining_ = true;
  run();
}

bool EngineThread::drained() const {
  const std::lock_guard lock(mutex_);
  return num_live_ == 0;
}

void EngineThread::end_requests(const std::string& error) {
  post([this, error] { end_all(error); });
}

std::string EngineThread::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

ServerState EngineThread::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

void EngineThread::post(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    inbox_.push_back(std::move(command));
  }
  wake_.notify_all();
}

void EngineThread::abandon(Ticket::State& state) noexcept {
  {
    const std::lock_guard lock(mutex_);
    state.is_abandoned = true;
    has_abandoned_ = true;
  }
  wake_.notify_all();
}

void EngineThread::restart_engine() {
  engine_.reset();  // first: there may be no memory for two
  engine_ = make_engine_({.sizes = wanted_sizes_});
  is_recovering_ = false;
  const EngineDescription engine = engine_->description();
  max_context_ =
      engine.exceeds_cache ? engine.context_length : std::min(engine.context_length, engine_->status().slots.total);
  max_sequences_ = engine.max_sequences;
  max_drafts_ = engine.max_drafts;
  {
    const std::lock_guard lock(mutex_);
    failure_.clear();
    state_.sizes = engine.sizes;
  }
  num_slots_at_start_ = wanted_sizes_.has_value() ? num_slots_at_start_ : engine.sizes.num_slots;
  next_id_ = 0;
  num_pools_ += 1;
  count();
  show();
}

void EngineThread::loop() {
  bool goes_on = true;
  std::exception_ptr failure;
  while (goes_on) {
    try {
      if (failure != nullptr) {
        fail(message_of_thrown(failure));
        is_recovering_ = is_recovering_ || is_bad_alloc(failure);
        failure = nullptr;
      }
      goes_on = advance();
    } catch (const std::exception&) {  // not one request's error: for that, the engine fails the request
      // This allocates no memory. A fail() that has thrown is called again, with the first reason.
      failure = failure != nullptr ? failure : std::current_exception();
    }
  }
}

// Empties the inbox, then computes one step, makes an engine or waits. False: the thread has to end.
bool EngineThread::advance() {
  empty_inbox();
  bool is_stopping = false;
  {
    const std::lock_guard lock(mutex_);
    is_stopping = is_stopping_ && inbox_.empty();
  }
  if (is_stopping) {
    end_all("the server has ended");
    return false;
  }
  if (is_recovering_) {
    recover();
    return true;
  }
  // A pause does not stop draining: the program would not end.
  if ((!is_paused_ || steps_to_run_ > 0 || is_draining_) && engine_ && !engine_->is_idle()) {
    steps_to_run_ = std::max(steps_to_run_ - 1, 0);
    engine_->step();
    const StepReport& report = engine_->last_step();
    count(&report);  // first: a client that is sent an end finds it counted
    messenger_->send();
    show(&report);
    return true;
  }
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] { return !inbox_.empty() || has_abandoned_ || is_stopping_; });
  return true;
}

// Removes commands one by one: if one throws, the later ones stay in the inbox.
void EngineThread::empty_inbox() {
  std::size_t num_commands = 0;
  bool has_abandoned = false;
  {
    const std::lock_guard lock(mutex_);
    num_commands = inbox_.size();
    has_abandoned = std::exchange(has_abandoned_, false);
  }
  if (num_commands == 0 && !has_abandoned) {
    return;
  }
  for (std::size_t i = 0; i < num_commands; ++i) {
    std::function<void()> command;
    {
      const std::lock_guard lock(mutex_);
      command = std::move(inbox_.front());
      inbox_.pop_front();
    }
    command();
  }
  if (has_abandoned) {  // after the commands, which may have submitted them
    cancel_abandoned();
  }
  count();
  messenger_->send();
  show();
}

void EngineThread::submit_all(const std::shared_ptr<Ticket::State>& state,
                              const std::vector<GenerationRequest>& requests, double handed_over) {
  arriving_ = {state};
  if (!engine_) {  // the requests came before the failure was known
    refuse_arriving(failure());
    return;
  }
  const double arrival = engine_->clock().now() - (now_seconds() - handed_over);
  std::vector<int> ids;
  ids.reserve(requests.size());
  for (const GenerationRequest& request : requests) {
    const auto prompt_tokens = static_cast<int>(request.request.prompt.size() + request.request.forced.size());
    // First: a rejected request ends in submit().
    clients_[next_id_] = {state, arriving_.index, request.counted, prompt_tokens};
    arriving_.index += 1;
    const int id = engine_->submit(request, arrival, std::make_unique<Sink>(*this));
    COMMON_CHECK(id == next_id_, "an engine counts its requests");
    ids.push_back(next_id_++);
  }
  messenger_->add(state, [ids](Ticket::State& ticket) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ticket.entries[i].id = ids[i];
    }
    ticket.num_submitted = ids.size();
  });
  const std::lock_guard lock(mutex_);
  state_.status = engine_->status();  // together, or a full queue would have a gap
  state_.num_posted -= static_cast<int>(requests.size());
  arriving_ = {};
}

void EngineThread::cancel_abandoned() {
  std::vector<int> ids;
  for (const auto& [id, client] : clients_) {
    if (client.ticket->is_abandoned) {
      ids.push_back(id);
    }
  }
  for (const int id : ids) {
    engine_->cancel(id, FinishReason::kCancelled);
  }
}

// Ends all requests, with the reason.
void EngineThread::end_all(const std::string& error) {
  end_error_ = error;
  while (!clients_.empty()) {
    engine_->cancel(clients_.begin()->first, FinishReason::kCancelled);
  }
  end_error_.clear();
  messenger_->send();
}

// Ends the engine and all requests. A restart makes another.
void EngineThread::fail(const std::string& reason) {
  engine_.reset();  // first: memory may be what is missing
  end_error_.clear();
  {
    const std::lock_guard lock(mutex_);
    failure_ = reason;
  }
  refuse_arriving(reason);
  while (!clients_.empty()) {
    refuse(clients_.begin()->second, reason);
    clients_.erase(clients_.begin());
  }
  count();
  messenger_->send();
  show();
}

// Makes another engine where memory was missing, which may be there again. If it is not, this is called again, and in
// between the inbox is emptied: the commands of that time are answered.
void EngineThread::recover() {
  bool is_stopping = false;
  {
    std::unique_lock lock(mutex_);
    is_stopping = wake_.wait_for(lock, std::chrono::milliseconds(10), [&] { return is_stopping_; });
  }
  if (!is_stopping) {
    restart_engine();
  }
}

// Refuses the requests that are being submitted and that the engine has not received. Goes on where it was if it has
// thrown before.
void EngineThread::refuse_arriving(const std::string& error) {
  if (arriving_.ticket == nullptr) {
    return;
  }
  const auto num_requests = static_cast<int>(arriving_.ticket->entries.size());
  for (; arriving_.index < num_requests; ++arriving_.index) {
    refuse(arriving_, error);
  }
  messenger_->add(arriving_.ticket, [](Ticket::State& ticket) { ticket.num_submitted = ticket.entries.size(); });
  arriving_ = {};
  const std::lock_guard lock(mutex_);
  state_.num_posted -= num_requests;
}

// Reports to the ticket that the request has ended without an engine.
void EngineThread::refuse(const Client& client, const std::string& error) {
  RequestResult result;
  result.finish_reason = FinishReason::kCancelled;
  result.error = error;
  hand_over(client, std::move(result));
}

// Sends a request's result to its ticket.
void EngineThread::hand_over(const Client& client, RequestResult result) {
  const auto told = std::make_shared<RequestResult>(std::move(result));
  messenger_->add(client.ticket, [index = client.index, told](Ticket::State& ticket) {
    Ticket::State::Entry& entry = ticket.entries[static_cast<std::size_t>(index)];
    entry.result = std::move(*told);
    entry.has_ended = true;
    ticket.num_ended += 1;
  });
  // Counted only now: if there is no memory for the message, the request has not ended. It is sent later.
  const std::lock_guard lock(mutex_);
  if (client.counted != Counted::kNothing) {
    state_.tally.add(*told);
  }
  num_ended_ += 1;
}

// Brings the counts up to date.
void EngineThread::count(const StepReport* report) {
  const std::lock_guard lock(mutex_);
  state_.status = engine_ ? engine_->status()
                          : EngineStatus{.prefix = state_.status.prefix,
                                         .host_cache = state_.status.host_cache,
                                         .window_pool = state_.status.window_pool,
                                         .window_prompts = state_.status.window_prompts,
                                         .shared_reading = state_.status.shared_reading};
  state_.num_generated = num_generated_;
  for (const double seconds : between_tokens_) {
    state_.between_tokens_seconds.add(seconds);
  }
  between_tokens_.clear();
  if (report != nullptr) {
    state_.tally.add(*report);
  }
}

// Reports a change. Only then are the requests that ended in it no longer live: a server that waits for the last one
// ends when its end has been shown.
void EngineThread::show(const StepReport* report) {
  if (on_change_) {
    report_change(report);
  }
  const std::lock_guard lock(mutex_);
  num_live_ -= std::exchange(num_ended_, 0);
}

void EngineThread::report_change(const StepReport* report) {
  // No other thread changes the tally, so that it is read without the lock.
  EngineNews news{.engine = engine_.get(),
                  .pool = num_pools_ - 1,
                  .tally = &state_.tally,
                  .report = report,
                  .num_generated = num_generated_,
                  .num_slots_at_start = num_slots_at_start_,
                  .is_resized = wanted_sizes_.has_value(),
                  .is_draining = is_draining_};
  if (engine_) {
    news.is_paused = is_paused_ && steps_to_run_ == 0;
    news.is_still = news.is_paused || engine_->is_idle();
    on_change_(news);
    return;
  }
  news.is_still = true;
  try {
    news.failure = failure();
    on_change_(news);
  } catch (const std::exception&) {  // this call itself may be what failed before
  }
}

}  // namespace common
