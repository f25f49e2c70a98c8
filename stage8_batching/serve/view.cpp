#include "view.h"

#include <algorithm>
#include <iostream>
#include <map>
#include <span>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "common/app/block_map.h"
#include "common/base/machine.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/base/utf8.h"

namespace stage8 {
namespace {

std::string name_of(int id, int sample) {
  return sample == 0 ? std::to_string(id) : common::format("%d.%d", id, sample);
}

// One character per block: the letter of the request that owns it, '+' for several, 'c' if it is cached, '.' if it is
// free. Only the first max_blocks blocks are drawn, in rows of `columns`.
std::string draw_blocks(const Server& server, int max_blocks, int columns, bool color) {
  const KvCacheManager& manager = server.scheduler().manager();
  const int num_blocks = manager.usage().total / manager.block_size();
  std::vector<common::MapCell> cells(static_cast<std::size_t>(num_blocks));
  std::vector<int> owner(static_cast<std::size_t>(num_blocks), -1);
  for (const auto& group : server.scheduler().running()) {
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
  return common::draw_map(cells, columns, color);
}

class Quiet : public View {
 public:
  void on_text(int, int, const std::string&) override {}
  void on_step(const Server&, const StepReport&) override {}
};

// One line per step: time, requests running and waiting, blocks, and for each request the number of tokens computed or
// the text they gave.
class Plain : public View {
 public:
  explicit Plain(std::ostream& output) : output_(output) {}

  void on_text(int id, int sample, const std::string& text) override { written_[{id, sample}] += text; }

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
  std::ostream& output_;
  std::map<std::pair<int, int>, std::string> written_;  // in this step, by request and sample
};

// The line's first `columns` characters. Escape sequences are kept, and count for nothing.
std::string cut_line(const std::string& line, int columns) {
  std::string result;
  int width = 0;
  for (std::size_t at = 0; at < line.size();) {
    if (line[at] == '\033') {
      const std::size_t end = line.find('m', at);
      result += line.substr(at, end - at + 1);
      at = end == std::string::npos ? line.size() : end + 1;
      continue;
    }
    const std::size_t length = std::max<std::size_t>(common::valid_utf8_length(std::string_view(line).substr(at)), 1);
    if (width++ < columns) {
      result += line.substr(at, length);
    }
    at += length;
  }
  return result;
}

// Redraws the terminal's alternate screen, so that what was there before is there again afterwards.
class Live : public View {
 public:
  Live(std::ostream& output, std::function<common::TerminalSize()> size) : output_(output), size_(std::move(size)) {
    output_ << "\033[?1049h\033[?25l" << std::flush;  // no cursor
    common::write_on_interrupt(kLeave);
  }
  ~Live() override {
    common::write_on_interrupt(nullptr);
    output_ << kLeave << std::flush;
  }
  Live(const Live&) = delete;
  Live& operator=(const Live&) = delete;

  void on_text(int id, int sample, const std::string& text) override { texts_[{id, sample}] += text; }

  void on_step(const Server& server, const StepReport& report) override {
    for (const int id : report.ended) {
      texts_.erase(texts_.lower_bound({id, 0}), texts_.lower_bound({id + 1, 0}));
    }
    // 25 times a second, and at the end.
    const double now = common::now_seconds();
    if (now - drawn_at_ < 0.04 && !server.is_idle()) {
      return;
    }
    drawn_at_ = now;
    const common::TerminalSize size = size_();
    std::string picture = "\033[H";
    for (const std::string& line : lines(server, report, size)) {
      picture += cut_line(line, size.columns) + "\033[K\r\n";
    }
    picture.erase(picture.size() - 2);  // the last one may be the screen's last
    output_ << picture + "\033[J" << std::flush;
  }

 private:
  static constexpr const char* kLeave = "\033[?25h\033[?1049l";

  // As many as the screen has, or fewer.
  std::vector<std::string> lines(const Server& server, const StepReport& report, common::TerminalSize size) const {
    constexpr int kColumnsOfIndex = 8;
    constexpr int kOtherLines = 4;  // head, queue, batch, legend
    const KvCacheManager& manager = server.scheduler().manager();
    const int num_blocks = manager.usage().total / manager.block_size();
    const int columns = std::clamp((size.columns - kColumnsOfIndex) / 8 * 8, 8, 64);
    const int room = std::max(size.rows - kOtherLines, 2);
    const std::vector<std::string> texts = running_lines(server);
    // The blocks get what they need, if half of the room is left to the texts or they do not need it.
    const int map_lines = (num_blocks + columns - 1) / columns;
    const int num_map_lines = std::min(map_lines, std::max(room - static_cast<int>(texts.size()), room / 2));
    const int num_texts = std::min(static_cast<int>(texts.size()), room - num_map_lines);

    std::vector<std::string> result;
    result.push_back(common::format("step %lld  %.2f s  %d tokens in this step", static_cast<long long>(report.index),
                                    report.end, report.num_tokens));
    std::string queue = common::format("queue  %zu waiting:", server.scheduler().waiting().size());
    for (const auto& group : server.scheduler().waiting()) {
      queue += common::format(" %d", group->id());
      if (static_cast<int>(queue.size()) > size.columns) {
        break;
      }
    }
    result.push_back(queue);
    const int hidden = static_cast<int>(texts.size()) - num_texts;
    result.push_back(common::format("batch  %zu running", server.scheduler().running().size()) +
                     (hidden > 0 ? common::format(", %d lines not shown", hidden) : ""));
    result.insert(result.end(), texts.begin(), texts.begin() + num_texts);
    std::string legend = "blocks: a request's letter, + of several, c cached, . free";
    if (num_map_lines < map_lines) {
      legend += common::format("; %d not shown", num_blocks - num_map_lines * columns);
    }
    result.push_back(legend);
    std::istringstream map(draw_blocks(server, num_map_lines * columns, columns, common::use_color(output_)));
    for (std::string line; std::getline(map, line);) {
      result.push_back(line);
    }
    return result;
  }

  // A line for each sample of the running requests: letter, number, the end of its text.
  std::vector<std::string> running_lines(const Server& server) const {
    std::vector<std::string> result;
    for (const auto& group : server.scheduler().running()) {
      const int id = group->id();
      const std::string letter(1, common::owner_letter(id));
      const auto first = texts_.lower_bound({id, 0});
      if (first == texts_.end() || first->first.first != id) {
        result.push_back(letter + common::format("%5d  ", id) +
                         (group->live().front().tokens.empty() ? "(its prompt is computed)" : "(a search)"));
      }
      for (auto entry = first; entry != texts_.end() && entry->first.first == id; ++entry) {
        result.push_back(letter + common::format("%5s  ", name_of(id, entry->first.second).c_str()) +
                         tail(entry->second));
      }
    }
    return result;
  }

  static std::string tail(std::string_view text) {
    constexpr std::size_t kMaxBytes = 72;
    std::size_t first = text.size() - std::min(text.size(), kMaxBytes);
    while (first < text.size() && (static_cast<unsigned char>(text[first]) & 0xC0U) == 0x80U) {
      first += 1;  // not into the middle of a character
    }
    return common::quote(text.substr(first));
  }

  std::ostream& output_;
  std::function<common::TerminalSize()> size_;
  std::map<std::pair<int, int>, std::string> texts_;  // of the running requests, by request and sample
  double drawn_at_ = 0.0;
};

}  // namespace

std::unique_ptr<View> make_view(ViewKind kind, std::ostream& output, std::function<common::TerminalSize()> size) {
  if (kind == ViewKind::kAuto) {
    kind = common::understands_escapes(output) ? ViewKind::kLive : ViewKind::kPlain;
  }
  if (kind == ViewKind::kLive) {
    if (!size) {
      size = [&output] { return common::terminal_size(output); };
    }
    return std::make_unique<Live>(output, std::move(size));
  }
  if (kind == ViewKind::kPlain) {
    return std::make_unique<Plain>(output);
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
