#include "engine_thread.h"

#include <algorithm>
#include <exception>
#include <future>
#include <iterator>
#include <new>
#include <utility>

#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"

namespace stage8 {

struct Ticket::State {
  struct Entry {
    int id = -1;
    bool has_ended = false;
    RequestOutput output;
    int prompt_tokens = 0;
  };
  mutable std::mutex mutex;
  std::condition_variable news;
  std::vector<TokenEvent> tokens;
  std::vector<Entry> entries;
  std::size_t num_submitted = 0;
  std::size_t num_ended = 0;
  std::size_t num_ended_told = 0;  // when wait() returned last
};

namespace {

std::string message_of(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? "not enough memory" : error.what();
}

}  // namespace

// Takes news to tickets, in order, on a thread of its own: to wake a client's thread takes microseconds, and a step has
// a token for each of hundreds of clients.
class EngineThread::Messenger {
 public:
  Messenger() : thread_([this] { run(); }) {}
  // Delivers what has been sent.
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

  // On the engine's thread. `change`: what becomes of the ticket, under its lock.
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

  // All that follows one another for a ticket, which is woken once. `message` goes on to the next one.
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

  std::vector<Message> added_;  // of the engine's thread alone

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Message> sent_;
  bool is_ending_ = false;
  std::thread thread_;
};

Ticket::~Ticket() {
  if (!has_ended()) {
    engine_thread_.post([&engine_thread = engine_thread_, state = state_] { engine_thread.cancel(state); });
  }
}

std::vector<TokenEvent> Ticket::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  state_->news.wait_for(lock, timeout,
                        [&] { return !state_->tokens.empty() || state_->num_ended != state_->num_ended_told; });
  state_->num_ended_told = state_->num_ended;
  return std::exchange(state_->tokens, {});
}

bool Ticket::is_submitted(std::chrono::milliseconds timeout) const {
  std::unique_lock lock(state_->mutex);
  return state_->news.wait_for(lock, timeout, [&] { return state_->num_submitted == state_->entries.size(); });
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

const RequestOutput& Ticket::output(std::size_t index) const {
  const std::lock_guard lock(state_->mutex);
  COMMON_CHECK(state_->entries.at(index).has_ended, "the request is being served");
  return state_->entries[index].output;
}

int Ticket::id(std::size_t index) const {
  const std::lock_guard lock(state_->mutex);
  return state_->entries.at(index).id;
}

EngineThread::EngineThread(const common::Llama& model, const EngineThreadOptions& options,
                           std::function<void(const EngineNews&)> on_change)
    : model_(model),
      options_(options),
      on_change_(std::move(on_change)),
      sizes_{options.engine.num_slots.value_or(0), options.engine.block_size, options.scheduler.token_budget},
      is_paused_(options.paused),
      messenger_(std::make_unique<Messenger>()) {
  make_engine();
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
  for (const GenerationRequest& request : requests) {
    state->entries.emplace_back().prompt_tokens = static_cast<int>(request.request.prompt.size());
  }
  {
    const std::lock_guard lock(mutex_);
    refusal = !failure_.empty()                                         ? Refusal::kFailed
              : is_draining_                                            ? Refusal::kDraining
              : num_posted_ + num_waiting_ + count > options_.max_queue ? Refusal::kQueueFull
                                                                        : Refusal::kNone;
    if (refusal != Refusal::kNone) {
      return nullptr;
    }
    num_posted_ += count;
    num_live_ += count;
    inbox_.emplace_back([this, state, requests = std::move(requests), handed_over = common::now_seconds()]() {
      submit_all(state, requests, handed_over);
    });
  }
  wake_.notify_all();
  return std::unique_ptr<Ticket>(new Ticket(*this, std::move(state)));
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

void EngineThread::restart(const PoolSizes& sizes) {
  const auto done = std::make_shared<std::promise<void>>();
  std::future<void> result = done->get_future();
  post([this, sizes, done] {
    const EngineThreadOptions before = options_;
    end_all("the pool was made anew");
    options_.engine.num_slots = sizes.num_slots;
    options_.engine.block_size = sizes.block_size;
    options_.scheduler.token_budget = sizes.token_budget;
    std::string problem;
    try {
      make_engine();
      done->set_value();
      return;
    } catch (const std::exception& error) {
      problem = "this pool can't be made: " + message_of(error);
    }
    options_ = before;
    try {
      make_engine();
    } catch (const std::exception& error) {
      problem += "; nor can the one before be made again: " + message_of(error);
      fail("there is no pool: " + message_of(error));
    }
    done->set_exception(std::make_exception_ptr(common::InputError(problem)));
  });
  result.get();
}

PoolSizes EngineThread::sizes() const {
  const std::lock_guard lock(mutex_);
  return sizes_;
}

void EngineThread::drain() {
  is_draining_ = true;
  run();
}

bool EngineThread::drained() const {
  const std::lock_guard lock(mutex_);
  return num_live_ == 0;
}

std::string EngineThread::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

ServingStatistics EngineThread::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void EngineThread::post(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    inbox_.push_back(std::move(command));
  }
  wake_.notify_all();
}

void EngineThread::make_engine() {
  setup_.reset();  // first: there may be no memory for two
  setup_.emplace(model_, options_.engine, options_.scheduler, false);
  Server& server = *setup_->server;
  const Usage usage = server.scheduler().manager().usage();
  max_context_ = std::min(setup_->engine->context_length(), usage.total);
  server.on_step([this](const StepReport& report) {
    report_ = report;
    const std::lock_guard lock(mutex_);
    statistics_.add(report);
  });
  {
    const std::lock_guard lock(mutex_);
    failure_.clear();
    sizes_ = {*setup_->engine->options().num_slots, options_.engine.block_size, options_.scheduler.token_budget};
  }
  changed();
}

void EngineThread::loop() {
  bool goes_on = true;
  std::string failure;
  while (goes_on) {
    try {
      if (!failure.empty()) {
        fail(failure);
        failure.clear();
      }
      goes_on = advance();
    } catch (const std::exception& error) {  // no request's fault: the server fails only the one that throws
      failure = message_of(error);
    }
  }
}

// Takes the inbox, and then makes one step or waits. False: the thread is to end.
bool EngineThread::advance() {
  take_inbox();
  bool is_stopping = false;
  {
    const std::lock_guard lock(mutex_);
    is_stopping = is_stopping_ && inbox_.empty();
  }
  if (is_stopping) {
    end_all("the server has ended");
    return false;
  }
  // Draining is not paused: the program would not end.
  if ((!is_paused_ || steps_to_run_ > 0 || is_draining_) && setup_ && !setup_->server->is_idle()) {
    steps_to_run_ = std::max(steps_to_run_ - 1, 0);
    setup_->server->step();
    messenger_->send();
    changed(&report_);
    for (const int id : report_.ended) {
      settle(id);
    }
    messenger_->send();
    return true;
  }
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] { return !inbox_.empty() || is_stopping_; });
  return true;
}

// One by one: if a command throws, those after it are still to be taken.
void EngineThread::take_inbox() {
  std::size_t num_commands = 0;
  {
    const std::lock_guard lock(mutex_);
    num_commands = inbox_.size();
  }
  if (num_commands == 0) {
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
  messenger_->send();
  changed();
}

void EngineThread::submit_all(const std::shared_ptr<Ticket::State>& state,
                              const std::vector<GenerationRequest>& requests, double handed_over) {
  if (!setup_) {  // they came before it was known
    refuse_from(0, state, failure());
    return;
  }
  Server& server = *setup_->server;
  const double arrival = setup_->clock->now() - (common::now_seconds() - handed_over);
  std::vector<int> ids;
  ids.reserve(requests.size());
  try {
    for (const GenerationRequest& request : requests) {
      const auto sink = [this, state, index = static_cast<int>(ids.size())](int id, int sample, common::Token token) {
        num_generated_ += 1;
        TokenEvent event{index, sample, token, std::nullopt};
        const common::Completion& written = setup_->server->output(id).completions[static_cast<std::size_t>(sample)];
        if (!written.logprobs.empty()) {
          event.logprobs = written.logprobs.back();
        }
        messenger_->add(state, [event = std::move(event)](Ticket::State& ticket) mutable {
          ticket.tokens.push_back(std::move(event));
        });
      };
      const int id = server.submit(request, sink, arrival);
      owners_[id] = {state, static_cast<int>(ids.size())};
      ids.push_back(id);
    }
  } catch (const std::exception& error) {  // the engine fails, and ends those that it knows of
    refuse_from(ids.size(), state, message_of(error));
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    num_posted_ -= static_cast<int>(requests.size());
    num_waiting_ = static_cast<int>(server.scheduler().waiting().size());  // together, or a full queue would have a gap
  }
  for (const int id : ids) {
    settle(id);  // if it was rejected
  }
  messenger_->add(state, [ids](Ticket::State& ticket) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ticket.entries[i].id = ids[i];
    }
    ticket.num_submitted = ids.size();
  });
}

void EngineThread::cancel(const std::shared_ptr<Ticket::State>& state) {
  std::vector<int> ids;
  for (const auto& [id, owner] : owners_) {
    if (owner.ticket == state) {
      ids.push_back(id);
    }
  }
  for (const int id : ids) {
    setup_->server->stop(id, common::FinishReason::kCancelled);
    settle(id);
  }
}

// Ends all requests, with the reason.
void EngineThread::end_all(const std::string& error) {
  while (!owners_.empty()) {
    const int id = owners_.begin()->first;
    setup_->server->stop(id, common::FinishReason::kCancelled);
    settle(id, error);
  }
  messenger_->send();
}

// Ends the engine and all requests. A restart makes another.
void EngineThread::fail(const std::string& reason) {
  setup_.reset();  // first: memory may be what is missing
  {
    const std::lock_guard lock(mutex_);
    failure_ = reason;
  }
  while (!owners_.empty()) {
    refuse(owners_.begin()->second, reason);
    owners_.erase(owners_.begin());
  }
  messenger_->send();
  changed();
}

// If the request has ended, tells its ticket.
void EngineThread::settle(int id, const std::string& error) {
  const auto found = owners_.find(id);
  if (found == owners_.end() || !setup_->server->output(id).finished()) {
    return;
  }
  RequestOutput output = setup_->server->output(id);
  output.error = error.empty() ? output.error : error;
  hand_over(found->second, std::move(output));
  owners_.erase(found);
  setup_->server->forget(id);
}

// The ticket's requests from this one on, of which the server knows nothing.
void EngineThread::refuse_from(std::size_t first, const std::shared_ptr<Ticket::State>& state,
                               const std::string& error) {
  const std::size_t count = state->entries.size();
  {
    const std::lock_guard lock(mutex_);
    num_posted_ -= static_cast<int>(count);
  }
  for (std::size_t i = first; i < count; ++i) {
    refuse({state, static_cast<int>(i)}, error);
  }
  messenger_->add(state, [](Ticket::State& ticket) { ticket.num_submitted = ticket.entries.size(); });
}

// Tells its ticket that the request has ended without an engine.
void EngineThread::refuse(const Owner& owner, const std::string& error) {
  RequestOutput output;
  output.finish_reason = common::FinishReason::kCancelled;
  output.error = error;
  hand_over(owner, std::move(output));
}

// A request's output, to its ticket.
void EngineThread::hand_over(const Owner& owner, RequestOutput output) {
  const auto told = std::make_shared<RequestOutput>(std::move(output));
  messenger_->add(owner.ticket, [index = owner.index, told](Ticket::State& ticket) {
    Ticket::State::Entry& entry = ticket.entries[static_cast<std::size_t>(index)];
    entry.output = std::move(*told);
    entry.has_ended = true;
    ticket.num_ended += 1;
  });
  // Counted only now: if there is no memory for the message, the request has not ended. It is sent later.
  const std::lock_guard lock(mutex_);
  statistics_.add(*told);
  if (told->admission >= 0.0) {
    statistics_.prompt_tokens += owner.ticket->entries[static_cast<std::size_t>(owner.index)].prompt_tokens;
  }
  num_live_ -= 1;
}

// There is no engine.
void EngineThread::note_failure() {
  EngineNews news;
  {
    const std::lock_guard lock(mutex_);
    num_waiting_ = 0;
    statistics_.num_waiting = num_posted_;
    statistics_.num_running = 0;
    statistics_.num_blocks = 0;
    statistics_.cache_usage = 0.0;
    news = {.num_generated = num_generated_, .is_still = true, .failure = failure_};
  }
  try {
    if (on_change_) {
      on_change_(news);
    }
  } catch (const std::exception&) {  // it may be what has failed
  }
}

void EngineThread::changed(const StepReport* report) {
  if (!setup_) {
    note_failure();
    return;
  }
  const Server& server = *setup_->server;
  const KvCacheManager& manager = server.scheduler().manager();
  const Usage usage = manager.usage();
  {
    const std::lock_guard lock(mutex_);
    num_waiting_ = static_cast<int>(server.scheduler().waiting().size());
    statistics_.num_waiting = num_waiting_ + num_posted_;
    statistics_.num_running = static_cast<int>(server.scheduler().running().size());
    statistics_.block_size = manager.block_size();
    statistics_.num_blocks = usage.total / manager.block_size();
    statistics_.cache_usage = static_cast<double>(usage.reserved) / usage.total;
    statistics_.prefix = manager.prefix_cache().statistics();
  }
  if (on_change_) {
    const bool is_paused = is_paused_ && steps_to_run_ == 0;
    on_change_({&server, report, num_generated_, is_paused, is_paused || server.is_idle()});
  }
}

}  // namespace
