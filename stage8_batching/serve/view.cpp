#include "view.h"

#include <algorithm>
#include <iostream>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "common/app/block_map.h"
#include "common/base/machine.h"
#include "common/base/platform.h"
#include "common/base/text.h"

namespace stage8 {
namespace {

std::string name_of(int id, int sample) {
  return sample == 0 ? std::to_string(id) : common::format("%d.%d", id, sample);
}

// One character per block: the letter of the request that owns it, '+' for several, 'c' if it is cached, '.' if it is
// free. Only the first max_blocks blocks are drawn.
std::string draw_blocks(const Server& server, int max_blocks, bool color) {
  constexpr int kColumns = 64;
  const KvCacheManager& manager = server.scheduler().manager();
  const int num_blocks = manager.usage().total / manager.block_size();
  std::vector<common::MapCell> cells(static_cast<std::size_t>(num_blocks));
  std::vector<int> owner(static_cast<std::size_t>(num_blocks), -1);
  for (const SequenceGroup* group : server.scheduler().running()) {
    const int id = group->id();
    for (const SequenceId sequence : group->sequences()) {
      for (const int block : manager.block_table(sequence)) {
        const auto index = static_cast<std::size_t>(block);
        const bool is_shared = owner[index] >= 0 && owner[index] != id;
        owner[index] = id;
        cells[index] = {.color = id, .fill = is_shared ? '+' : common::owner_letter(id)};
      }
    }
  }
  for (const int block : manager.prefix_cache().evictable()) {
    cells[static_cast<std::size_t>(block)] = {.fill = 'c'};
  }
  cells.resize(static_cast<std::size_t>(std::min(num_blocks, max_blocks)));
  return common::draw_map(cells, kColumns, color);
}

class Quiet : public View {
 public:
  void on_token(int, int, common::Token) override {}
  void on_step(const Server&, const StepReport&) override {}
};

// One line per step: time, requests running and waiting, blocks, and for each request the number of tokens computed or
// the text they gave.
class Plain : public View {
 public:
  Plain(const common::Tokenizer& tokenizer, std::ostream& output) : tokenizer_(tokenizer), output_(output) {}

  void on_token(int id, int sample, common::Token token) override {
    written_[{id, sample}] = tokenizer_.decode({&token, 1});
  }

  void on_step(const Server& server, const StepReport& report) override {
    if (report.index == 0) {
      output_ << "step    time ms  run  wait  blocks    requests\n";
    }
    const int block_size = server.scheduler().manager().block_size();
    output_ << common::format("%4lld  %9.2f  %3d  %4d  %3d/%-3d  ", static_cast<long long>(report.index),
                              1e3 * report.end, report.num_running, report.num_waiting,
                              report.usage.reserved / block_size, report.usage.total / block_size);
    for (const int id : report.swapped_out) {
      output_ << "  " << id << " swapped out";
    }
    for (const int id : report.recomputed) {
      output_ << "  " << id << " preempted";
    }
    // If the server runs ahead, tokens arrive a step after they were computed: a request's last ones when it is in the
    // batch no more.
    std::map<int, int> num_served;
    for (std::size_t i = 0; i < report.served.size(); ++i) {
      num_served[report.served[i]] = report.num_served[i];
    }
    for (const auto& [request, text] : written_) {
      num_served.emplace(request.first, 0);
    }
    for (const auto& [id, count] : num_served) {
      const auto first = written_.lower_bound({id, 0});
      if (first == written_.end() || first->first.first != id) {
        output_ << "  " << id << "+" << count;
      }
      for (auto text = first; text != written_.end() && text->first.first == id; ++text) {
        output_ << "  " << name_of(id, text->first.second) << ":" << common::quote(text->second);
      }
    }
    for (const int id : report.ended) {
      output_ << "  " << id << " ends";
    }
    output_ << std::endl;
    written_.clear();
  }

 private:
  const common::Tokenizer& tokenizer_;
  std::ostream& output_;
  std::map<std::pair<int, int>, std::string> written_;  // in this step, by request and sample
};

class Live : public View {
 public:
  Live(const common::Tokenizer& tokenizer, std::ostream& output) : tokenizer_(tokenizer), output_(output) {
    output_ << "\033[2J";
  }

  void on_token(int id, int sample, common::Token token) override {
    if (sample == 0) {
      tokens_[id].push_back(token);
    }
  }

  void on_step(const Server& server, const StepReport& report) override {
    for (const int id : report.ended) {
      tokens_.erase(id);
    }
    // 25 times a second, and at the end.
    const double now = common::now_seconds();
    if (now - drawn_at_ < 0.04 && !server.is_idle()) {
      return;
    }
    drawn_at_ = now;
    const bool color = common::use_color(output_);
    std::string picture = common::format("\033[Hstep %lld  %.2f s  %d tokens in this step\033[K\n\033[K\n",
                                         static_cast<long long>(report.index), report.end, report.num_tokens);
    picture += common::format("queue  %zu waiting:", server.scheduler().waiting().size());
    for (std::size_t i = 0; i < std::min<std::size_t>(server.scheduler().waiting().size(), kMaxQueued); ++i) {
      picture += common::format(" %d", server.scheduler().waiting()[i]->id());
    }
    picture += common::format("\033[K\n\033[K\nbatch  %zu running\033[K\n", server.scheduler().running().size());
    for (std::size_t i = 0; i < std::min<std::size_t>(server.scheduler().running().size(), kMaxRunning); ++i) {
      const int id = server.scheduler().running()[i]->id();
      picture += common::format("%5d  ", id) + tail(id) + "\033[K\n";
    }
    picture += "\033[K\nblocks\033[K\n" + draw_blocks(server, kMaxBlocks, color) + "\033[J";
    output_ << picture << std::flush;
  }

 private:
  static constexpr std::size_t kMaxQueued = 16;
  static constexpr std::size_t kMaxRunning = 16;
  static constexpr int kMaxBlocks = 640;

  std::string tail(int id) const {
    constexpr std::size_t kLastTokens = 16;
    const auto found = tokens_.find(id);
    if (found == tokens_.end()) {
      return "(its prompt is computed)";
    }
    const std::vector<common::Token>& all = found->second;
    return common::quote(tokenizer_.decode(std::span(all).last(std::min(all.size(), kLastTokens))));
  }

  const common::Tokenizer& tokenizer_;
  std::ostream& output_;
  std::map<int, std::vector<common::Token>> tokens_;  // of the running requests' first samples
  double drawn_at_ = 0.0;
};

}  // namespace

std::unique_ptr<View> make_view(ViewKind kind, const common::Tokenizer& tokenizer, std::ostream& output) {
  if (kind == ViewKind::kAuto) {
    kind = common::is_terminal(output) ? ViewKind::kLive : ViewKind::kPlain;
  }
  if (kind == ViewKind::kLive) {
    return std::make_unique<Live>(tokenizer, output);
  }
  if (kind == ViewKind::kPlain) {
    return std::make_unique<Plain>(tokenizer, output);
  }
  return std::make_unique<Quiet>();
}

std::string format_batch(const RaggedBatch& batch) {
  std::string result;
  const auto add = [&](const char* name, const std::vector<int>& values, std::span<const int> starts) {
    result += common::format("%-15s", name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool begins = i > 0 && std::find(starts.begin(), starts.end(), static_cast<int>(i)) != starts.end();
      result += common::format("%s %4d", begins ? " |" : "", values[i]);
    }
    result += "\n";
  };
  add("tokens", batch.tokens, batch.query_starts);
  add("positions", batch.positions, batch.query_starts);
  add("slot_mapping", batch.slot_mapping, batch.query_starts);
  add("query_starts", batch.query_starts, {});
  add("context_lengths", batch.context_lengths, {});
  add("block_tables", batch.block_tables, batch.table_starts);
  add("table_starts", batch.table_starts, {});
  add("logits_rows", batch.logits_rows, {});
  return result;
}

}  // namespace
