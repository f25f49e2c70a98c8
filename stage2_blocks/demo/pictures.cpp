#include "pictures.h"

#include <algorithm>
#include <string>
#include <vector>

#include "../kv_cache_manager.h"
#include "common/app/shell.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace stage2 {
namespace {

using common::Box;
using common::Cell;
using common::Fill;
using common::Hue;
using common::Svg;

constexpr int kWidth = 720;
constexpr double kLeft = 24.0;
constexpr double kRight = kWidth - kLeft;
constexpr int kBlockSize = 4;

void start(KvCacheManager& manager, SequenceId sequence, int length) {
  COMMON_CHECK(manager.allocate(sequence, length), "the picture's pool has room for it");
  manager.commit(sequence, length);
}

void append(KvCacheManager& manager, SequenceId sequence, int count) {
  COMMON_CHECK(manager.reserve(sequence, count), "the picture's pool has room for it");
  manager.commit(sequence, count);
}

// Which token of which sequence each block holds, as its cells; free blocks have no text.
std::vector<std::vector<Cell>> pool_cells(const KvCacheManager& manager) {
  const auto num_blocks = static_cast<std::size_t>(manager.usage().total / kBlockSize);
  std::vector<std::vector<Cell>> cells(num_blocks, std::vector<Cell>(kBlockSize));
  for (const SequenceId sequence : manager.sequences()) {
    const std::vector<int> slots = manager.slots(sequence, 0, manager.capacity(sequence));
    for (std::size_t position = 0; position < slots.size(); ++position) {
      const bool used = static_cast<int>(position) < manager.length(sequence);
      cells[static_cast<std::size_t>(slots[position] / kBlockSize)]
           [static_cast<std::size_t>(slots[position] % kBlockSize)] = {
               common::owner_hue(sequence), used ? Fill::kSoft : Fill::kHatched, used ? std::to_string(position) : ""};
    }
  }
  return cells;
}

// Three requests that came and grew in turn, beside others that have ended.
std::string draw_paged_attention() {
  constexpr int kNumBlocks = 10;
  constexpr int kNumRequests = 3;
  KvCacheManager manager(kNumBlocks, kBlockSize);
  start(manager, 1, 4);  // block 0
  start(manager, 5, 4);
  start(manager, 2, 4);  // block 2
  start(manager, 6, 4);
  append(manager, 1, 3);  // block 4
  append(manager, 2, 1);  // block 5
  start(manager, 7, 4);
  start(manager, 8, 4);
  for (const SequenceId ended : {7, 6, 5, 8}) {
    manager.free(ended);
  }
  start(manager, 0, 10);
  Svg svg(kWidth, 416, "PagedAttention: block tables point into one pool of blocks",
          "Three requests of 10, 7 and 5 tokens. The tokens of each are cut into logical blocks of four, and its block "
          "table "
          "says in which physical block of the pool each lies: 7, 1, 3 for request A. The blocks lie anywhere in "
          "memory, only "
          "the end of a last block is unused, and blocks 6, 8 and 9 are free.");
  const common::TextStyle caption{.size = 15.0, .hue = Hue::kGrey};

  constexpr double kLogical = 86.0;  // width of a logical block
  constexpr double kGap = 35.0;      // between requests
  constexpr double kPhysical = 61.0;
  constexpr double kPitch = (kRight - kLeft - kPhysical) / (kNumBlocks - 1);
  constexpr double kPoolTop = 296.0;
  double x = kLeft;
  for (SequenceId request = 0; request < kNumRequests; ++request) {
    const std::vector<int>& table = manager.block_table(request);
    const int length = manager.length(request);
    const Hue hue = common::owner_hue(request);
    svg.text({x, 36.0}, common::format("Request %c", common::sequence_name(request)),
             {.size = 18.0, .hue = hue, .bold = true});
    svg.text({x, 56.0}, common::format("%d tokens", length), caption);
    svg.text({x, 122.0}, "block table", caption);
    for (std::size_t i = 0; i < table.size(); ++i) {
      const int first = static_cast<int>(i) * kBlockSize;
      std::vector<Cell> tokens;
      for (int position = first; position < first + kBlockSize; ++position) {
        const bool used = position < length;
        tokens.push_back({hue, used ? Fill::kSoft : Fill::kPaper, used ? std::to_string(position) : ""});
      }
      const Box logical{x, 66.0, kLogical - 6.0, 32.0};
      const Box entry{x, 130.0, kLogical - 6.0, 38.0};
      svg.cells(logical, tokens, {.hue = hue, .line_width = 2.0}, {.size = 13.0});
      svg.box(entry, {hue, Fill::kPaper, 2.0});
      svg.label(entry, std::to_string(table[i]), {.size = 20.0, .hue = hue, .bold = true, .code = true});
      const double target = kLeft + kPitch * table[i] + kPhysical / 2.0;
      svg.curve(entry.bottom_middle(), {target, kPoolTop - 26.0}, {.hue = hue, .width = 2.0, .arrow = true});
      x += kLogical;
    }
    x += kGap;
  }

  svg.box({kLeft - 12.0, kPoolTop - 24.0, kRight - kLeft + 24.0, 78.0}, {Hue::kGrey, Fill::kSoft, 1.5, 8.0});
  const std::vector<std::vector<Cell>> cells = pool_cells(manager);
  for (int block = 0; block < kNumBlocks; ++block) {
    const auto index = static_cast<std::size_t>(block);
    const Box box{kLeft + kPitch * block, kPoolTop, kPhysical, 42.0};
    const bool is_free = std::count(manager.free_blocks().begin(), manager.free_blocks().end(), block) > 0;
    svg.label({box.x, box.y - 22.0, box.width, 20.0}, std::to_string(block),
              {.size = 16.0, .hue = is_free ? Hue::kGrey : Hue::kInk, .bold = !is_free, .code = true});
    if (is_free) {
      svg.box(box, {.fill = Fill::kPaper, .dashed = true});
      svg.label(box, "free", {.size = 16.0, .hue = Hue::kGrey});
    } else {
      const Hue hue = cells[index].front().hue;
      svg.cells(box, cells[index], {.hue = hue, .line_width = 2.0}, {.size = 13.0});
    }
  }
  svg.text({kLeft - 12.0, kPoolTop + 78.0}, "One pool of blocks in memory", {.size = 17.0, .bold = true});
  svg.legend({kLeft - 12.0, kPoolTop + 106.0}, {{Hue::kBlue, Fill::kSoft, "keys and values of a token"},
                                                {Hue::kBlue, Fill::kHatched, "unused end of a last block"},
                                                {Hue::kGrey, Fill::kPaper, "free block"}});
  return svg.to_string();
}

// The numbers of every stage's example by hand.
std::string draw_block_table() {
  constexpr int kNumBlocks = 8;
  constexpr int kPosition = 9;
  KvCacheManager manager(kNumBlocks, kBlockSize);
  for (SequenceId sequence = 1; sequence <= kNumBlocks; ++sequence) {
    start(manager, sequence, kBlockSize);  // block sequence - 1
  }
  for (const int block : {3, 1, 7}) {
    manager.free(block + 1);
  }
  start(manager, 0, 10);
  const std::vector<int>& table = manager.block_table(0);
  const int entry_index = kPosition / kBlockSize;
  const int row = kPosition % kBlockSize;
  const int block = table[static_cast<std::size_t>(entry_index)];
  const int slot = manager.slots(0, kPosition, 1).front();

  Svg svg(
      kWidth, 444, "From a position to a slot through the block table",
      "Ten tokens in blocks of four, with the block table 7, 1, 3. Position 9 is entry 2 of the table and row 1 of the "
      "block: entry 2 is block 3, and row 1 of block 3 is slot 13. The last two slots of block 3 are not used.");
  const common::TextStyle heading{.size = 17.0, .bold = true};
  const common::TextStyle caption{.size = 15.0, .hue = Hue::kGrey};
  svg.text({kLeft, 34.0}, "Positions of the text", heading);
  constexpr double kCell = 50.0;
  constexpr double kFirst = kLeft;
  constexpr double kBlockGap = 12.0;
  std::vector<double> middles;
  for (int i = 0; i < static_cast<int>(table.size()); ++i) {
    const Box box{kFirst + i * (kBlockSize * kCell + kBlockGap), 46.0, kBlockSize * kCell, 38.0};
    std::vector<Cell> cells;
    for (int position = i * kBlockSize; position < (i + 1) * kBlockSize; ++position) {
      const bool used = position < manager.length(0);
      const bool chosen = position == kPosition;
      cells.push_back({chosen ? Hue::kOrange : Hue::kBlue, used ? Fill::kSoft : Fill::kPaper,
                       used ? std::to_string(position) : ""});
    }
    svg.cells(box, cells, {.hue = Hue::kBlue, .line_width = 2.0}, {.size = 18.0});
    middles.push_back(box.top_middle().x);
  }
  svg.text({kLeft, 134.0}, "Block table", heading);
  for (std::size_t i = 0; i < table.size(); ++i) {
    const bool chosen = static_cast<int>(i) == entry_index;
    const Hue hue = chosen ? Hue::kOrange : Hue::kBlue;
    const Box entry{middles[i] - 40.0, 146.0, 80.0, 40.0};
    svg.box(entry, {hue, Fill::kPaper, 2.0});
    svg.label(entry, std::to_string(table[i]), {.size = 20.0, .hue = hue, .bold = true, .code = true});
    svg.text({entry.right() + 8.0, entry.y + 26.0}, common::format("entry %zu", i), caption);
  }
  const double chosen_x = kFirst + entry_index * (kBlockSize * kCell + kBlockGap) + kCell * (row + 0.5);
  svg.curve({chosen_x, 86.0}, {middles[static_cast<std::size_t>(entry_index)], 143.0},
            {.hue = Hue::kOrange, .width = 2.0, .arrow = true});

  svg.text({kLeft, 362.0}, "The pool: 8 blocks of 4 slots, of which the hatched ones are not used yet", caption);
  constexpr double kSlot = (kRight - kLeft - 7.0 * 6.0) / (kNumBlocks * kBlockSize);
  const std::vector<std::vector<Cell>> pool = pool_cells(manager);
  for (int b = 0; b < kNumBlocks; ++b) {
    const bool own = std::find(table.begin(), table.end(), b) != table.end();
    const Box box{kLeft + b * (kBlockSize * kSlot + 6.0), 266.0, kBlockSize * kSlot, 38.0};
    std::vector<Cell> cells = pool[static_cast<std::size_t>(b)];
    for (int i = 0; i < kBlockSize; ++i) {
      Cell& cell = cells[static_cast<std::size_t>(i)];
      const int this_slot = b * kBlockSize + i;
      cell.text = std::to_string(this_slot);
      cell.hue = !own ? Hue::kGrey : this_slot == slot ? Hue::kOrange : Hue::kBlue;
      cell.text = own && cell.fill == Fill::kHatched ? "" : cell.text;
    }
    svg.cells(box, cells, {.hue = own ? Hue::kBlue : Hue::kGrey, .line_width = own ? 2.0 : 1.0},
              {.size = 13.0, .hue = own ? Hue::kInk : Hue::kGrey});
    svg.label({box.x, box.bottom() + 4.0, box.width, 22.0}, common::format("block %d", b),
              {.size = 15.0, .hue = own ? Hue::kInk : Hue::kGrey, .bold = own});
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (table[i] == b) {
        svg.curve({middles[i], 188.0}, {box.top_middle().x, 263.0},
                  {.hue = b == block ? Hue::kOrange : Hue::kBlue, .width = 2.0, .arrow = true});
      }
    }
  }
  svg.text({kLeft, 398.0},
           common::format("Position %d:  %d / %d = %d, so entry %d, which is block %d", kPosition, kPosition,
                          kBlockSize, entry_index, entry_index, block),
           {.size = 17.0, .hue = Hue::kOrange, .bold = true});
  svg.text({kLeft, 424.0},
           common::format("%d %% %d = %d, so row %d of it:  slot %d x %d + %d = %d", kPosition, kBlockSize, row, row,
                          block, kBlockSize, row, slot),
           {.size = 17.0, .hue = Hue::kOrange, .bold = true});
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"paged_attention", "three requests' block tables, and the pool they point into", draw_paged_attention},
          {"block_table", "from a position to its slot", draw_block_table}};
}

}  // namespace
