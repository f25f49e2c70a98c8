// How the server has a step computed. On a GPU, the host is always a step ahead: while step 2 is computed, it takes the
// tokens of step 1, schedules step 3 and orders it. What step 3 takes up from step 2 is not known then; in its place
// stands where it will be found, and the GPU looks there (GpuStep::pending_tokens).
//
//   GPU   |  step 1                |  step 2                  |  step 3                  |
//   host  order 2, wait for 1      |  take 1, order 3, wait   |  take 2, order 4, wait   |
#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "common/base/machine.h"
#include "common/math/sampling.h"
#include "server.h"

namespace stage8 {
namespace {

// Whose logits are wanted.
int num_rows(const Share& share) { return share.work.with_logits ? static_cast<int>(share.work.sequences.size()) : 0; }

}  // namespace

// All in one pass. If that throws, nobody knows whose fault it was: each is computed again alone, and who throws then
// has failed.
void Server::compute(std::vector<Share> shares) {
  Flight flight;
  flight.shares = std::move(shares);
  for (const Share& share : flight.shares) {
    flight.ids.push_back(id_of(share.group));
  }
  const auto goes_on = [&](int id) { return !entry(id).outcome.finished && !entry(id).group->finished(); };
  try {
    forward(flight);
  } catch (const std::exception& error) {
    land(flight.is_ordered ? 1 : 0);
    for (std::size_t i = 0; i < flight.shares.size(); ++i) {
      if (goes_on(flight.ids[i]) && flight.shares.size() > 1) {
        compute({flight.shares[i]});
      } else if (goes_on(flight.ids[i])) {
        finish(flight.ids[i], common::FinishReason::kFailed, error.what());
      }
    }
    return;
  }
  // While a GPU is at it, the step before is brought to its end. Its tokens are what this one has computed.
  const std::vector<common::Token> before = land(1);
  clock_.step_computed(flight.batch.num_tokens());
  for (const auto& [index, row] : flight.batch.pending_tokens) {
    flight.batch.tokens[static_cast<std::size_t>(index)] = before[static_cast<std::size_t>(row)];
  }
  engine_.commit(flight.batch);
  report_.num_read =
      std::accumulate(flight.batch.context_lengths.begin(), flight.batch.context_lengths.end(), report_.num_read);
  report_.usage = engine_.manager().usage();
  int row = 0;
  for (std::size_t i = 0; i < flight.shares.size(); ++i) {
    const int count = num_rows(flight.shares[i]);
    if (goes_on(flight.ids[i])) {
      entry(flight.ids[i]).group->computed();
      if (flight.is_greedy && count > 0) {
        entry(flight.ids[i]).sampling->expect(row);
      }
    }
    row += count;
  }
  const bool runs_ahead = flight.is_greedy && options_.run_ahead.value_or(engine_.gpu() != nullptr);
  flight_ = std::move(flight);
  if (!runs_ahead) {
    land(0);
  }
}

void Server::forward(Flight& flight) {
  const KvCacheManager& manager = engine_.manager();
  RaggedBatch& batch = flight.batch;
  flight.is_greedy = true;
  for (std::size_t i = 0; i < flight.shares.size(); ++i) {
    const Work& work = flight.shares[i].work;
    const Entry& served = entry(flight.ids[i]);
    for (std::size_t j = 0; j < work.sequences.size(); ++j) {
      const SequenceId sequence = work.sequences[j];
      const std::vector<common::Token> next =
          served.group->tokens(sequence, manager.length(sequence), work.num_tokens[j]);
      batch.add(manager, sequence, next, work.with_logits);
    }
    flight.is_greedy =
        flight.is_greedy && (!work.with_logits || (served.sampling != nullptr && served.sampling->is_greedy()));
  }
  batch.on_layer = on_layer_;
  if (on_pass_) {
    on_pass_(batch);
  }
  if (engine_.gpu() == nullptr && flight_.has_value()) {  // a GPU puts the tokens in by itself
    for (const auto& [index, row] : batch.pending_tokens) {
      batch.tokens[static_cast<std::size_t>(index)] = flight_->tokens[static_cast<std::size_t>(row)];
    }
  }
  engine_.forward(batch);
  flight.is_ordered = true;
  if (flight.is_greedy && engine_.gpu() != nullptr) {
    return;
  }
  const double start = common::now_seconds();
  flight.logits = split_rows(engine_.logits());
  report_.waiting_seconds += engine_.gpu() != nullptr ? common::now_seconds() - start : 0.0;
  for (std::size_t i = 0; flight.is_greedy && i < flight.logits.size(); ++i) {
    flight.tokens.push_back(
        common::argmax({flight.logits[i].data(), static_cast<std::size_t>(flight.logits[i].cols())}));
  }
}

// Everybody in the flight, if there is one, goes on from what it has found. Returns its tokens if it is greedy.
std::vector<common::Token> Server::land(int step_age) {
  if (!flight_.has_value()) {
    return {};
  }
  Flight flight = std::move(*flight_);
  flight_.reset();
  if (flight.is_greedy && engine_.gpu() != nullptr) {
    const double start = common::now_seconds();
    flight.tokens = engine_.gpu()->argmax_tokens(step_age);
    report_.waiting_seconds += common::now_seconds() - start;
  }
  int row = 0;
  for (std::size_t i = 0; i < flight.shares.size(); ++i) {
    const int id = flight.ids[i];
    if (!entry(id).outcome.finished) {
      landed_.push_back(id);
      try {
        deliver(flight, i, row);
      } catch (const std::exception& error) {
        finish(id, common::FinishReason::kFailed, error.what());
      }
    }
    row += num_rows(flight.shares[i]);
  }
  return std::move(flight.tokens);
}

void Server::deliver(const Flight& flight, std::size_t share, int row) {
  const int id = flight.ids[share];
  Entry& served = entry(id);
  if (served.stop.has_value() || num_rows(flight.shares[share]) == 0) {
    return;
  }
  if (flight.is_greedy) {
    served.sampling->take_expected(flight.tokens[static_cast<std::size_t>(row)]);
  } else {
    const auto first = flight.logits.begin() + row;
    served.group->take({first, first + num_rows(flight.shares[share])});
  }
  hand_out_tokens(id);
}

}  // namespace
