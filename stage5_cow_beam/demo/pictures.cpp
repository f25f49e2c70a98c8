#include "pictures.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../decoding.h"
#include "../kv_cache_manager.h"
#include "common/app/shell.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "common/model/tokenizer.h"

namespace stage5 {
namespace {

using common::Anchor;
using common::Box;
using common::Cell;
using common::Fill;
using common::Hue;
using common::Svg;

constexpr int kWidth = 720;
constexpr double kLeft = 24.0;
constexpr double kRight = kWidth - kLeft;
constexpr int kBlockSize = 4;
constexpr int kNumBlocks = 8;

void start(KvCacheManager& manager, SequenceId sequence, int length) {
  COMMON_CHECK(manager.allocate(sequence, length), "the picture's pool has room for it");
  manager.commit(sequence, length);
}

// The block tables side by side, and under them the pool with each block's owners.
void draw_tables_and_pool(Svg& svg, double y, const KvCacheManager& manager) {
  constexpr double kEntry = 46.0;
  double x = kLeft;
  for (const SequenceId sequence : manager.sequences()) {
    const Hue hue = common::owner_hue(sequence);
    svg.text({x, y + 25.0}, std::string(1, common::sequence_name(sequence)), {.size = 20.0, .hue = hue, .bold = true});
    std::vector<Cell> entries;
    for (const int block : manager.block_table(sequence)) {
      const bool shared = manager.reference_count(block) > 1;
      entries.push_back({hue, shared ? Fill::kPaper : Fill::kSoft, std::to_string(block)});
    }
    svg.cells({x + 26.0, y, kEntry * static_cast<double>(entries.size()), 36.0}, entries,
              {.hue = hue, .line_width = 2.0}, {.size = 19.0, .bold = true, .code = true});
    x += 234.0;
  }
  constexpr double kPitch = (kRight - kLeft + 8.0) / kNumBlocks;
  for (int block = 0; block < kNumBlocks; ++block) {
    const Box box{kLeft + kPitch * block, y + 82.0, kPitch - 8.0, 36.0};
    const int owners = manager.reference_count(block);
    svg.label({box.x, box.y - 24.0, box.width, 22.0}, std::to_string(block),
              {.size = 16.0, .hue = owners > 0 ? Hue::kInk : Hue::kGrey, .bold = owners > 0, .code = true});
    if (owners == 0) {
      svg.box(box, {.fill = Fill::kPaper, .dashed = true});
      svg.label(box, "free", {.size = 15.0, .hue = Hue::kGrey});
      continue;
    }
    std::vector<Cell> cells(kBlockSize);
    std::string names;
    Hue hue = Hue::kGrey;
    for (const SequenceId sequence : manager.sequences()) {
      const std::vector<int>& table = manager.block_table(sequence);
      const auto entry = std::find(table.begin(), table.end(), block);
      if (entry == table.end()) {
        continue;
      }
      hue = owners > 1 ? Hue::kGrey : common::owner_hue(sequence);
      names += names.empty() ? "" : " ";
      names += common::sequence_name(sequence);
      const int first = static_cast<int>(entry - table.begin()) * kBlockSize;
      for (int row = 0; row < kBlockSize; ++row) {
        const bool used = first + row < manager.length(sequence);
        cells[static_cast<std::size_t>(row)] = {hue, used ? Fill::kSoft : Fill::kPaper,
                                                used ? std::to_string(first + row) : ""};
      }
    }
    svg.cells(box, cells, {.hue = hue, .line_width = 2.0}, {.size = 14.0});
    svg.label({box.x, box.bottom() + 4.0, box.width, 22.0}, common::format("%d: ", owners) + names,
              {.size = 16.0, .hue = owners > 1 ? Hue::kInk : hue, .bold = true});
  }
}

// Three sequences of ten tokens in blocks 7, 1 and 3; blocks 6, 5 … are free.
std::string draw_copy_on_write() {
  KvCacheManager manager(kNumBlocks, kBlockSize);
  for (int block = 0; block < kNumBlocks; ++block) {
    start(manager, 10 + block, kBlockSize);
  }
  for (const int block : {3, 1, 7}) {
    manager.free(10 + block);
  }
  start(manager, 0, 10);
  for (const int block : {0, 2, 4, 5, 6}) {
    manager.free(10 + block);
  }
  Svg svg(
      kWidth, 460, "Fork and copy-on-write: who owns which block",
      "Above, sequence A has been forked twice: A, B and C have the same block table, 7, 1, 3, and each of the blocks "
      "has three owners. Below, each has written a token at position 10: A into block 6 and B into block 5, copies of "
      "block 3, and C, its last owner, into block 3 itself.");
  const common::TextStyle heading{.size = 17.0, .bold = true};
  const common::TextStyle caption{.size = 15.0, .anchor = Anchor::kEnd, .hue = Hue::kGrey};
  manager.fork(0, 1);
  manager.fork(0, 2);
  svg.text({kLeft, 34.0}, "A has been forked twice: no float has moved", heading);
  svg.text({kRight, 34.0}, "under each block: its owners", caption);
  draw_tables_and_pool(svg, 50.0, manager);

  std::vector<BlockCopy> copies;
  for (const SequenceId sequence : {0, 1, 2}) {
    COMMON_CHECK(manager.reserve(sequence, 1), "the picture's pool has room for a token each");
    copies.insert(copies.end(), manager.pending_copies().begin(), manager.pending_copies().end());
    manager.clear_pending_copies();
    manager.commit(sequence, 1);
  }
  svg.line({{kLeft, 218.0}, {kRight, 218.0}}, {.hue = Hue::kGrey, .width = 0.7});
  svg.text({kLeft, 252.0}, "Each has written position 10: two copies, the last owner in place", heading);
  draw_tables_and_pool(svg, 268.0, manager);
  constexpr double kPitch = (kRight - kLeft + 8.0) / kNumBlocks;
  const auto middle_of = [&](int block) { return kLeft + kPitch * block + (kPitch - 8.0) / 2.0; };
  double depth = 18.0 * static_cast<double>(copies.size());  // the first copy goes farthest
  for (const auto& [source, destination] : copies) {
    const double x = middle_of(source) - depth / 2.0 + 14.0;
    const double y = 420.0;
    svg.line({{x, y}, {x, y + depth / 1.6}, {middle_of(destination), y + depth / 1.6}, {middle_of(destination), y}},
             {.hue = Hue::kRed, .width = 2.0, .arrow = true});
    depth -= 18.0;
  }
  svg.text({kLeft, 442.0}, common::format("%zu blocks copied", copies.size()),
           {.size = 15.0, .hue = Hue::kRed, .bold = true});
  return svg.to_string();
}

// Keeps what a step decides by.
class RecordedSearch : public BeamSearch {
 public:
  using BeamSearch::BeamSearch;
  void extend(std::vector<common::Matrix> logits) override {
    last_logits = logits;
    BeamSearch::extend(std::move(logits));
  }
  std::vector<common::Matrix> last_logits;
};

std::string visible(const std::string& text) { return "“" + text + "”"; }

// One step of a search by the bundled model.
std::string draw_beam_step() {
  constexpr int kWidthOfBeam = 4;
  constexpr int kStep = 3;
  constexpr int kShown = 3;  // of each parent's tokens
  const common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  const common::Llama model(file);
  const common::Tokenizer tokenizer(file);
  Engine engine(model, {.num_slots = 64, .block_size = kBlockSize});
  const common::Request request{tokenizer.encode_prompt("The old woman opened the door and"), 8, {}, 0, {}};
  RecordedSearch search(engine, request, {.width = kWidthOfBeam});
  for (int step = 0; step < kStep; ++step) {
    COMMON_CHECK(search.step(), "the picture's pool has room for the search");
  }
  const std::vector<Branch> parents = search.live();
  const int blocks_before = engine.manager().usage().reserved / kBlockSize;
  COMMON_CHECK(search.step(), "the picture's pool has room for the search");
  const std::vector<Branch> children = search.live();

  Svg svg(
      kWidth, 548, "One step of a beam search of width 4",
      "Each of four parents is extended by every token there is. Of all continuations, the four with the largest log "
      "probability are kept, whatever their parents. A parent with several children is forked; one without a child "
      "is freed.");
  const common::TextStyle heading{.size = 17.0, .bold = true};
  svg.text({kLeft, 34.0}, common::format("%zu parents", parents.size()), heading);
  svg.text({264.0, 34.0}, "x every token (best three)", heading);
  svg.text({566.0, 34.0}, "then", heading);
  std::size_t num_shown = 0;
  constexpr double kRow = 32.0;
  constexpr double kPitch = kShown * kRow + 22.0;
  for (std::size_t i = 0; i < parents.size(); ++i) {
    const double y = 52.0 + kPitch * static_cast<double>(i);
    const Branch& parent = parents[i];
    std::vector<std::pair<double, common::Token>> candidates;
    const common::Matrix& logits = search.last_logits[i];
    const std::vector<float> log_probabilities =
        common::log_softmax({logits.data(), static_cast<std::size_t>(logits.cols())});
    for (std::size_t token = 0; token < log_probabilities.size(); ++token) {
      candidates.emplace_back(parent.log_probability + static_cast<double>(log_probabilities[token]),
                              static_cast<common::Token>(token));
    }
    std::partial_sort(candidates.begin(), candidates.begin() + kShown, candidates.end(),
                      [](const auto& left, const auto& right) { return left.first > right.first; });
    int num_children = 0;
    const Box box{kLeft, y + 16.0, 178.0, kShown * kRow - 32.0};
    for (int k = 0; k < kShown; ++k) {
      const auto [log_probability, token] = candidates[static_cast<std::size_t>(k)];
      std::vector<common::Token> text = parent.tokens;
      text.push_back(token);
      const auto child =
          std::find_if(children.begin(), children.end(), [&](const Branch& branch) { return branch.tokens == text; });
      const bool kept = child != children.end();
      num_children += kept ? 1 : 0;
      num_shown += kept ? 1 : 0;
      const Hue hue = kept ? Hue::kBlue : Hue::kGrey;
      const Box candidate{264.0, y + kRow * k, 270.0, kRow - 5.0};
      svg.box(candidate, {hue, kept ? Fill::kSoft : Fill::kPaper, kept ? 2.0 : 1.0});
      svg.text({candidate.x + 10.0, candidate.y + 19.0}, visible(tokenizer.decode(std::vector<common::Token>{token})),
               {.size = 16.0, .hue = kept ? Hue::kInk : Hue::kGrey, .bold = kept});
      svg.text({candidate.x + 190.0, candidate.y + 19.0}, common::format("%.2f", log_probability),
               {.size = 16.0, .anchor = Anchor::kEnd, .hue = kept ? Hue::kInk : Hue::kGrey, .bold = kept});
      if (kept) {
        svg.text({candidate.right() - 10.0, candidate.y + 19.0},
                 common::format("no. %d", static_cast<int>(child - children.begin()) + 1),
                 {.size = 16.0, .anchor = Anchor::kEnd, .hue = Hue::kBlue, .bold = true});
      }
      svg.line({{box.right(), box.y + box.height / 2.0}, {candidate.x - 3.0, candidate.y + candidate.height / 2.0}},
               {hue, kept ? 2.0 : 1.0, false, kept});
    }
    svg.box(box, {num_children > 0 ? Hue::kBlue : Hue::kRed, Fill::kPaper, 2.0, 5.0});
    svg.text({box.x + 10.0, box.y + 27.0}, visible(tokenizer.decode(parent.tokens)), {.size = 16.0, .bold = true});
    svg.text({box.x + 10.0, box.y + 50.0}, common::format("log probability %.2f", parent.log_probability),
             {.size = 14.0, .hue = Hue::kGrey});
    const std::string fate = num_children == 0   ? "freed"
                             : num_children == 1 ? "goes on"
                             : num_children == 2 ? "1 fork"
                                                 : common::format("%d forks", num_children - 1);
    svg.text({566.0, y + 50.0}, fate, {.size = 18.0, .hue = num_children == 0 ? Hue::kRed : Hue::kBlue, .bold = true});
  }
  COMMON_CHECK(num_shown == children.size(), "the picture shows every child");
  const int blocks_after = engine.manager().usage().reserved / kBlockSize;
  svg.text({kLeft, 534.0},
           common::format("Blocks in use: %d before the step, %d after it", blocks_before, blocks_after),
           {.size = 16.0, .hue = Hue::kGrey});
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"copy_on_write", "who owns which block before and after three writes", draw_copy_on_write},
          {"beam_step", "parents, their likeliest tokens, and the four that go on", draw_beam_step}};
}

}  // namespace
