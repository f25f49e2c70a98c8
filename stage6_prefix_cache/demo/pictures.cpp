#include "pictures.h"

#include <map>
#include <span>
#include <string>
#include <vector>

#include "../kv_cache_manager.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace stage6 {
namespace {

using common::Anchor;
using common::Box;
using common::Fill;
using common::Hue;
using common::Svg;
using common::Token;

constexpr int kWidth = 720;
constexpr double kLeft = 24.0;
constexpr double kRight = kWidth - kLeft;
constexpr int kBlockSize = 4;
constexpr double kBlock = 150.0;  // the width of one
constexpr double kPitch = (kRight - kLeft - kBlock) / 3.0;

// A token is a character.
std::vector<Token> tokens_of(const std::string& text) { return {text.begin(), text.end()}; }

// Starts a sequence and computes what is not in the cache. Returns how many of its tokens were cached.
int start(KvCacheManager& manager, SequenceId sequence, const std::string& text) {
  const std::vector<Token> tokens = tokens_of(text);
  COMMON_CHECK(manager.allocate(sequence, tokens), "the picture's pool has room for it");
  const int found = manager.length(sequence);
  manager.commit(sequence, std::span(tokens).subspan(static_cast<std::size_t>(found)));
  return found;
}

// A prompt's blocks, and which of them were found.
void draw_prompt(Svg& svg, double y, const KvCacheManager& manager, SequenceId sequence, const std::string& text,
                 int found) {
  const std::vector<int>& table = manager.block_table(sequence);
  for (std::size_t i = 0; i < table.size(); ++i) {
    const bool is_found = static_cast<int>(i + 1) * kBlockSize <= found;
    const Hue hue = is_found ? Hue::kGreen : Hue::kBlue;
    const Box box{kLeft + kPitch * static_cast<double>(i), y, kBlock, 42.0};
    svg.box(box, {hue, is_found ? Fill::kPaper : Fill::kSoft, 2.0, 5.0, is_found});
    svg.label(box, text.substr(i * kBlockSize, kBlockSize), {.size = 20.0, .bold = true, .code = true});
    svg.label({box.x, box.bottom() + 3.0, box.width, 22.0},
              common::format(is_found ? "found: block %d" : "computed: block %d", table[i]),
              {.size = 14.0, .hue = hue, .bold = true});
  }
}

std::string draw_hash_chain() {
  const std::string first = "once_upon_a_time";
  const std::string second = "once_upon_a_hill";
  constexpr int kNumBlocks = 8;
  KvCacheManager manager(kNumBlocks, kBlockSize);
  Svg svg(
      kWidth, 528, "Blocks are found again by the hash of their tokens and of all before them",
      "Prompt A, once upon a time, is computed and its four blocks are published, each under a hash of its tokens and "
      "of the "
      "hash before it. Prompt B, once upon a hill, finds the first three. Prompt C is A again, and finds three too: "
      "the last token is always computed. When all have ended, the deepest block of the one that ended first is "
      "evicted first.");
  const common::TextStyle heading{.size = 17.0, .bold = true};
  const common::TextStyle caption{.size = 15.0, .anchor = Anchor::kEnd, .hue = Hue::kGrey};
  std::map<int, std::string> texts;  // by block
  const auto note_texts = [&](SequenceId sequence, const std::string& text) {
    const std::vector<int>& table = manager.block_table(sequence);
    for (std::size_t i = 0; i < table.size(); ++i) {
      texts[table[i]] = text.substr(i * kBlockSize, kBlockSize);
    }
  };

  int found = start(manager, 0, first);
  note_texts(0, first);
  svg.text({kLeft, 34.0}, "A is computed and published", heading);
  svg.text({kRight, 34.0}, "each hash includes the one before it", caption);
  draw_prompt(svg, 48.0, manager, 0, first, found);
  BlockHash hash = 0;
  const std::vector<Token> tokens = tokens_of(first);
  for (std::size_t i = 0; i < tokens.size() / kBlockSize; ++i) {
    hash = hash_block(hash, std::span(tokens).subspan(i * kBlockSize, kBlockSize), 0);
    const Box box{kLeft + kPitch * static_cast<double>(i), 122.0, kBlock, 32.0};
    svg.box(box, {Hue::kOrange, Fill::kSoft, 1.5, 16.0});
    svg.label(box, common::format("h%zu = %04x", i, static_cast<unsigned>(hash >> 48U)), {.size = 16.0, .code = true});
    if (i > 0) {
      svg.line({{box.x - kPitch + kBlock, 138.0}, {box.x - 2.0, 138.0}},
               {.hue = Hue::kOrange, .width = 2.0, .arrow = true});
    }
  }

  found = start(manager, 1, second);
  note_texts(1, second);
  svg.text({kLeft, 196.0}, "B begins alike", heading);
  svg.text({kRight, 196.0}, common::format("%d of %zu tokens found", found, second.size()), caption);
  draw_prompt(svg, 208.0, manager, 1, second, found);

  manager.free(0);
  manager.free(1);
  found = start(manager, 2, first);
  note_texts(2, first);
  svg.text({kLeft, 316.0}, "C is A's prompt again", heading);
  svg.text({kRight, 316.0}, common::format("%d of %zu found: the last token is always computed", found, first.size()),
           caption);
  draw_prompt(svg, 328.0, manager, 2, first, found);

  manager.free(2);
  svg.text({kLeft, 436.0}, "All have ended: cached, evicted in this order when blocks are needed", heading);
  double x = kLeft;
  for (const int block : manager.prefix_cache().evictable()) {
    const Box box{x, 450.0, 96.0, 40.0};
    svg.box(box, {Hue::kGrey, Fill::kSoft, 1.5, 5.0});
    svg.label(box, texts[block], {.size = 18.0, .bold = true, .code = true});
    svg.label({box.x, box.bottom() + 3.0, box.width, 22.0}, common::format("block %d", block),
              {.size = 15.0, .hue = Hue::kGrey});
    x += 115.2;
  }
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"hash_chain", "a prompt's hashes, what later prompts find, and the order of eviction", draw_hash_chain}};
}

}  // namespace
