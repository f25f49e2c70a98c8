#include "common/serving/view.h"

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <iterator>
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
#include "common/model/unicode.h"

namespace common {
namespace {

std::string name_of(int id, int sample) { return sample == 0 ? std::to_string(id) : format("%d.%d", id, sample); }

// One character per block: the letter of the request that owns it, '+' for several, 'c' if it is cached, '.' if it is
// free. Only the first max_blocks blocks are drawn, in rows of `columns`.
std::string draw_blocks(const PoolSnapshot& pool, int max_blocks, int columns, bool color) {
  std::vector<MapCell> cells;
  for (const BlockState& block : block_states(pool, max_blocks)) {
    const char fill = block.is_cached ? 'c' : block.num_owners > 1 ? '+' : owner_letter(block.owner);
    cells.push_back({.color = block.owner, .fill = fill});
  }
  return draw_map(cells, columns, color);
}

class Quiet : public View {
 public:
  void on_text(int, int, const std::string&) override {}
  void on_step(const ServedEngine&, const StepReport&) override {}
};

// One line per step: time, requests running and waiting, blocks, and for each request the number of tokens computed or
// the text they gave.
class Plain : public View {
 public:
  explicit Plain(std::ostream& output) : output_(output) {}

  void on_text(int id, int sample, const std::string& text) override { written_[{id, sample}] += text; }

  void on_step(const ServedEngine& engine, const StepReport& report) override {
    if (report.index == 0) {
      output_ << "step    time ms  run  wait  blocks    requests\n";
    }
    const int block_size = engine.description().sizes.block_size;
    output_ << format("%4lld  %9.2f  %3d  %4d  %3d/%-3d  ", static_cast<long long>(report.index), 1e3 * report.end,
                      report.num_running, report.num_waiting, report.usage.reserved / block_size,
                      report.usage.total / block_size);
    for (const int id : report.swapped_out) {
      output_ << "  " << id << " swapped out";
    }
    for (const int id : report.recomputed) {
      output_ << "  " << id << " preempted";
    }
    // If the server runs ahead, tokens arrive a step after they were computed: a request's last tokens when it is no
    // longer in the batch.
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
        output_ << "  " << name_of(id, text->first.second) << ":" << quote(text->second);
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

// The length in bytes of the character at `at`, and how many columns it takes. A byte that begins no character counts
// as a character.
std::pair<std::size_t, int> character_at(std::string_view text, std::size_t at) {
  const std::size_t length = valid_utf8_length(text.substr(at));
  return {std::max<std::size_t>(length, 1), length > 0 ? display_columns(decode_utf8(text, at).code_point) : 1};
}

// The line's first `columns` columns. Escape sequences are kept, and count for nothing.
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
    const auto [length, taken] = character_at(line, at);
    width += taken;
    if (width <= columns) {
      result += line.substr(at, length);
    }
    at += length;
  }
  return result;
}

// The text's last `columns` columns.
std::string last_columns(std::string_view text, int columns) {
  int width = 0;
  for (std::size_t at = 0; at < text.size(); at += character_at(text, at).first) {
    width += character_at(text, at).second;
  }
  while (width > columns) {
    const auto [length, taken] = character_at(text, 0);
    text.remove_prefix(length);
    width -= taken;
  }
  return std::string(text);
}

// The text in lines of at most `columns` columns, broken anywhere.
std::vector<std::string> broken(std::string_view text, int columns) {
  std::vector<std::string> lines(1);
  int width = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto [length, taken] = character_at(text, at);
    if (width + taken > columns && width > 0) {
      lines.emplace_back();
      width = 0;
    }
    lines.back() += text.substr(at, length);
    width += taken;
    at += length;
  }
  return lines;
}

// "queue  30 waiting: 12 13 14 and 27 more": the ids that fit, and the count of the others.
std::string queue_line(const std::vector<PoolSnapshot::Owner>& waiting, int columns) {
  std::string line = format("queue  %zu waiting:", waiting.size());
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    const std::string number = format(" %d", waiting[i].id);
    const std::string rest = format(" and %zu more", waiting.size() - i);
    const bool is_last = i + 1 == waiting.size();
    if (static_cast<int>(line.size() + number.size() + (is_last ? 0 : rest.size())) > columns) {
      return line + rest;
    }
    line += number;
  }
  return line;
}

// Redraws the terminal's alternate screen, so that what was there before is there again afterwards.
class Live : public View {
 public:
  Live(std::ostream& output, std::function<TerminalSize()> size) : output_(output), size_(std::move(size)) {
    output_ << "\033[?1049h\033[?25l" << std::flush;  // no cursor
    write_on_interrupt(kLeave);
  }
  ~Live() override {
    write_on_interrupt(nullptr);
    output_ << kLeave << std::flush;
  }
  Live(const Live&) = delete;
  Live& operator=(const Live&) = delete;

  void on_text(int id, int sample, const std::string& text) override { texts_[{id, sample}] += text; }

  void on_step(const ServedEngine& engine, const StepReport& report) override {
    for (const int id : report.ended) {
      texts_.erase(texts_.lower_bound({id, 0}), texts_.lower_bound({id + 1, 0}));
    }
    // 25 times a second, and at the end.
    const double now = now_seconds();
    if (now - drawn_at_ < 0.04 && !engine.is_idle()) {
      return;
    }
    drawn_at_ = now;
    const TerminalSize size = size_();
    std::string picture = "\033[H";
    for (const std::string& line : lines(engine.pool(), report, size)) {
      picture += cut_line(line, size.columns) + "\033[K\r\n";
    }
    picture.erase(picture.size() - 2);  // the last one may be the screen's last
    output_ << picture + "\033[J" << std::flush;
  }

 private:
  static constexpr const char* kLeave = "\033[?25h\033[?1049l";

  // At most as many lines as the screen has.
  std::vector<std::string> lines(const PoolSnapshot& pool, const StepReport& report, TerminalSize size) const {
    constexpr int kColumnsOfIndex = 8;
    constexpr int kOtherLines = 4;  // head, queue, batch, legend
    const int columns = std::max((size.columns - kColumnsOfIndex) / 8 * 8, 8);
    const int room = std::max(size.rows - kOtherLines, 2);
    std::vector<std::string> texts = running_lines(pool, size.columns, 1);
    // The blocks get what they need, if half of the room is left to the texts or they do not need it.
    const int map_lines = (pool.num_blocks + columns - 1) / columns;
    const int num_map_lines = std::min(map_lines, std::max(room - static_cast<int>(texts.size()), room / 2));
    // If there are lines left, each text gets more than one.
    if (const int num_each = (room - num_map_lines) / std::max<int>(static_cast<int>(texts.size()), 1); num_each > 1) {
      texts = running_lines(pool, size.columns, num_each);
    }
    const int num_texts = std::min(static_cast<int>(texts.size()), room - num_map_lines);

    std::vector<std::string> result;
    result.push_back(format("step %lld  %.2f s  %d tokens in this step", static_cast<long long>(report.index),
                            report.end, report.num_tokens));
    result.push_back(queue_line(pool.waiting, size.columns));
    const int hidden = static_cast<int>(texts.size()) - num_texts;
    result.push_back(format("batch  %zu running", pool.running.size()) +
                     (hidden > 0 ? format(", %d lines not shown", hidden) : ""));
    result.insert(result.end(), texts.begin(), texts.begin() + num_texts);
    std::string legend = "blocks: a request's letter, + of several, c cached, . free";
    if (num_map_lines < map_lines) {
      legend += format("; %d not shown", pool.num_blocks - num_map_lines * columns);
    }
    result.push_back(legend);
    std::istringstream map(draw_blocks(pool, num_map_lines * columns, columns, use_color(output_)));
    for (std::string line; std::getline(map, line);) {
      result.push_back(line);
    }
    return result;
  }

  // For each sample of the running requests: letter, number, and the end of its text, in at most num_each lines.
  std::vector<std::string> running_lines(const PoolSnapshot& pool, int columns, int num_each) const {
    std::vector<std::string> result;
    for (const PoolSnapshot::Owner& request : pool.running) {
      const int id = request.id;
      const std::string letter(1, owner_letter(id));
      const auto first = texts_.lower_bound({id, 0});
      if (first == texts_.end() || first->first.first != id) {
        result.push_back(letter + format("%5d  ", id) +
                         (request.texts.front().empty() ? "(its prompt is computed)" : "(a search)"));
      }
      for (auto entry = first; entry != texts_.end() && entry->first.first == id; ++entry) {
        std::string head = letter + format("%5s  ", name_of(id, entry->first.second).c_str());
        const int width = std::max(columns - static_cast<int>(head.size()), 1);
        for (const std::string& line : tail(entry->second, width, num_each)) {
          result.push_back(head + line);
          head.assign(head.size(), ' ');
        }
      }
    }
    return result;
  }

  // The text's last lines, at most num_lines. If there are several, whole lines are left out, so that a text that grows
  // stands still until its last line is full.
  static std::vector<std::string> tail(std::string_view text, int columns, int num_lines) {
    constexpr std::size_t kBytesPerColumn = 2;                              // at most: the rest need not be looked at
    const auto width = static_cast<std::size_t>(std::max(columns - 2, 1));  // between quotes
    const std::size_t enough = kBytesPerColumn * width * static_cast<std::size_t>(num_lines);
    std::size_t first = (text.size() - std::min(text.size(), enough) + width - 1) / width * width;
    first = std::min(first, text.size());
    while (first < text.size() && (static_cast<unsigned char>(text[first]) & 0xC0U) == 0x80U) {
      first += 1;  // not into the middle of a character
    }
    std::string escaped = quote(text.substr(first), text.size());
    escaped = escaped.substr(1, escaped.size() - 2);
    const int inside = std::max(columns - 2, 1);
    if (num_lines == 1) {
      return {'"' + last_columns(escaped, inside) + '"'};
    }
    std::vector<std::string> lines = broken(escaped, inside);
    lines.erase(lines.begin(), lines.begin() + std::max<std::ptrdiff_t>(std::ssize(lines) - num_lines, 0));
    for (std::string& line : lines) {
      line.insert(line.begin(), &line == &lines.front() ? '"' : ' ');
    }
    lines.back() += '"';
    return lines;
  }

  std::ostream& output_;
  std::function<TerminalSize()> size_;
  std::map<std::pair<int, int>, std::string> texts_;  // of the running requests, by request and sample
  double drawn_at_ = 0.0;
};

}  // namespace

std::unique_ptr<View> make_view(ViewKind kind, std::ostream& output, std::function<TerminalSize()> size) {
  if (kind == ViewKind::kAuto) {
    kind = understands_escapes(output) ? ViewKind::kLive : ViewKind::kPlain;
  }
  if (kind == ViewKind::kLive) {
    if (!size) {
      size = [&output] { return terminal_size(output); };
    }
    return std::make_unique<Live>(output, std::move(size));
  }
  if (kind == ViewKind::kPlain) {
    return std::make_unique<Plain>(output);
  }
  return std::make_unique<Quiet>();
}

}  // namespace common
