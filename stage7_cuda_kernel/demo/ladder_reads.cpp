#include "ladder_reads.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "../kernels/page_layout.h"
#include "../ladder/swizzled_pages.h"
#include "common/app/table.h"
#include "common/base/text.h"

namespace stage7 {
namespace {

constexpr int kElementBytes = 2;
constexpr int kSectorBytes = 32;
constexpr int kGroup = 4;  // query heads that share a kv head
constexpr int kKvHeads = 2;
constexpr int kQueryHeads = kGroup * kKvHeads;
constexpr int kTokens = 4;  // of a block, and of a tile
constexpr int kVecsPerRow = 16;
constexpr int kRowBytes = kVecsPerRow * kVecBytes;
constexpr int kPanelRowBytes = kPanelVecs * kVecBytes;
constexpr std::array<int, 3> kTable = {7, 1, 3};
constexpr int kLength = 10;
const common::PageShape kShape = {
    .num_blocks = 8, .num_kv_heads = kKvHeads, .block_size = kTokens, .head_dim = kRowBytes / kElementBytes};

// How many thread blocks the toy device holds at once: small ones (steps 1 to 4), or ones that compute a whole group.
constexpr int kSmallPlaces = 24;
constexpr int kLargePlaces = 6;

struct Step {
  const char* name;
  int passes;  // over K or V, for each query
  bool splits;
  bool groups;
};
constexpr std::array<Step, 7> kSteps = {{{"1 naive", 3, false, false},
                                         {"2 coalesced", 2, false, false},
                                         {"3 online softmax", 1, false, false},
                                         {"4 split contexts", 1, true, false},
                                         {"5 group together", 1, true, true},
                                         {"6 tensor cores", 1, true, true},
                                         {"7 balanced", 1, true, true}}};
constexpr int kBalanced = 7;

// Some tokens of one head of one sequence.
struct Walk {
  int sequence;  // 0 is A, which has the block table above
  int head;      // a kv head if groups walk together, else a query head
  int begin;
  int end;
};
using ThreadBlock = std::vector<Walk>;

int num_tiles(int length) { return (length + kTokens - 1) / kTokens; }

// All tiles of all heads in one line, cut into equal parts.
std::vector<ThreadBlock> balanced_blocks(const std::vector<int>& lengths) {
  std::vector<Walk> line;
  for (int sequence = 0; sequence < static_cast<int>(lengths.size()); ++sequence) {
    const int length = lengths[static_cast<std::size_t>(sequence)];
    for (int head = 0; head < kKvHeads; ++head) {
      for (int begin = 0; begin < length; begin += kTokens) {
        line.push_back({sequence, head, begin, std::min(begin + kTokens, length)});
      }
    }
  }
  const int total = static_cast<int>(line.size());
  const int shares = std::min(kLargePlaces, total);
  std::vector<ThreadBlock> blocks;
  for (int share = 0; share < shares; ++share) {
    ThreadBlock& block = blocks.emplace_back();
    for (int tile = total * share / shares; tile < total * (share + 1) / shares; ++tile) {
      const Walk& walk = line[static_cast<std::size_t>(tile)];
      if (!block.empty() && block.back().sequence == walk.sequence && block.back().head == walk.head) {
        block.back().end = walk.end;
      } else {
        block.push_back(walk);
      }
    }
  }
  return blocks;
}

// The thread blocks of a step, 1 to 7.
std::vector<ThreadBlock> thread_blocks(int step, const std::vector<int>& lengths) {
  if (step == kBalanced) {
    return balanced_blocks(lengths);
  }
  const Step& rule = kSteps[static_cast<std::size_t>(step - 1)];
  const int heads = rule.groups ? kKvHeads : kQueryHeads;
  const int places = rule.groups ? kLargePlaces : kSmallPlaces;
  const int max_pieces = num_tiles(*std::max_element(lengths.begin(), lengths.end()));
  const int pieces = rule.splits ? std::clamp(places / (heads * static_cast<int>(lengths.size())), 1, max_pieces) : 1;
  std::vector<ThreadBlock> blocks;
  for (int sequence = 0; sequence < static_cast<int>(lengths.size()); ++sequence) {
    const int length = lengths[static_cast<std::size_t>(sequence)];
    for (int head = 0; head < heads; ++head) {
      for (int piece = 0; piece < pieces; ++piece) {
        const int begin = num_tiles(length) * piece / pieces * kTokens;
        const int end = std::min(num_tiles(length) * (piece + 1) / pieces * kTokens, length);
        blocks.push_back({{sequence, head, begin, end}});
      }
    }
  }
  return blocks;
}

int longest_walk(const std::vector<ThreadBlock>& blocks) {
  int longest = 0;
  for (const ThreadBlock& block : blocks) {
    int tokens = 0;
    for (const Walk& walk : block) {
      tokens += walk.end - walk.begin;
    }
    longest = std::max(longest, tokens);
  }
  return longest;
}

int block_of(int token) { return kTable[static_cast<std::size_t>(token / kTokens)]; }

// The place of a vector of a token's key, from the beginning of the layer's keys, with rows in the plain order.
std::int64_t plain_byte_of(int kv_head, int token, int vec) {
  return row_offset(kShape, block_of(token), kv_head, token % kTokens) * kElementBytes + vec * std::int64_t{kVecBytes};
}

// The same in the order of swizzled_pages.h.
std::int64_t byte_of(int kv_head, int token, int vec) {
  const int row = token % kTokens;
  return row_offset(kShape, block_of(token), kv_head, 0) * kElementBytes +
         swizzled_place(kTokens, row, vec) * std::int64_t{kVecBytes};
}

struct Read {
  int thread;
  int token;
  int vec;
  std::int64_t byte;
  int bytes;
};

// The first load of K by the first warp of the first thread block. In step 7 a copy that one thread orders.
std::vector<Read> first_load(int step) {
  std::vector<Read> reads;
  if (step == kBalanced) {
    const std::int64_t first = row_offset(kShape, kTable[0], 0, 0) * kElementBytes;
    return {{0, 0, 0, first, kTokens * kRowBytes}};
  }
  for (int thread = 0; thread < 32; ++thread) {
    const int token = step == 1 ? thread : thread / kVecsPerRow;
    const int vec = step == 1 ? 0 : thread % kVecsPerRow;
    if (token < kLength) {
      reads.push_back({thread, token, vec, plain_byte_of(0, token, vec), step == 1 ? kElementBytes : kVecBytes});
    }
  }
  return reads;
}

// What memory moves for these reads: whole sectors.
std::int64_t bytes_moved(const std::vector<Read>& reads) {
  std::set<std::int64_t> sectors;
  for (const Read& read : reads) {
    for (std::int64_t sector = read.byte / kSectorBytes; sector * kSectorBytes < read.byte + read.bytes; ++sector) {
      sectors.insert(sector);
    }
  }
  return static_cast<std::int64_t>(sectors.size()) * kSectorBytes;
}

std::int64_t bytes_used(const std::vector<Read>& reads) {
  std::int64_t bytes = 0;
  for (const Read& read : reads) {
    bytes += read.bytes;
  }
  return bytes;
}

std::string bytes_text(std::int64_t first, std::int64_t count) {
  return common::format_count(first) + " to " + common::format_count(first + count - 1);
}

void print_layout() {
  common::Table table({"token", "block", "row", "kv head 0, panel 0", "panel 1", "kv head 1, panel 0", "panel 1",
                       "vectors 0 to 7 at places"});
  for (int token = 0; token < kLength; ++token) {
    const int row = token % kTokens;
    std::string places;
    for (int vec = 0; vec < 8; ++vec) {
      places += common::format("%s%d", vec > 0 ? " " : "", swizzled_place(kTokens, row, vec) % kPanelVecs);
    }
    const auto part = [&](int kv_head, int panel) {
      const std::int64_t first = byte_of(kv_head, token, panel * kPanelVecs);
      return bytes_text(first / kPanelRowBytes * kPanelRowBytes, kPanelRowBytes);
    };
    table.add_row({std::to_string(token), std::to_string(block_of(token)), std::to_string(row), part(0, 0), part(0, 1),
                   part(1, 0), part(1, 1), places});
  }
  std::cout << table.to_string();
}

void print_steps() {
  std::cout
      << "A has 10 tokens in the blocks [7, 1, 3], B has 3, C has 2. 8 query heads share 2 kv heads; a key is 256 "
         "bytes.\nThe device has room for 24 small thread blocks at once (steps 1 to 4) or for 6 large ones.\n\n";
  common::Table table({"step", "thread blocks for A", "passes", "a first load uses", "and moves", "loads of each key",
                       "longest walk: A alone", "A, B and C"});
  for (int step = 1; step <= kBalanced; ++step) {
    const Step& rule = kSteps[static_cast<std::size_t>(step - 1)];
    const std::vector<Read> reads = first_load(step);
    const std::vector<ThreadBlock> alone = thread_blocks(step, {kLength});
    table.add_row({rule.name, std::to_string(alone.size()), std::to_string(rule.passes),
                   common::format_count(bytes_used(reads)) + " B", common::format_count(bytes_moved(reads)) + " B",
                   std::to_string(rule.groups ? 1 : kGroup), std::to_string(longest_walk(alone)),
                   std::to_string(longest_walk(thread_blocks(step, {kLength, 3, 2})))});
  }
  std::cout << table.to_string();
}

void print_step(int step) {
  const Step& rule = kSteps[static_cast<std::size_t>(step - 1)];
  const bool batch = step == kBalanced;
  common::Table blocks({"thread block", "walks"});
  int number = 0;
  for (const ThreadBlock& block : thread_blocks(step, batch ? std::vector{kLength, 3, 2} : std::vector{kLength})) {
    std::string text;
    for (const Walk& walk : block) {
      text += common::format("%s%c, %s head %d, tokens %d to %d", text.empty() ? "" : "; ", 'A' + walk.sequence,
                             rule.groups ? "kv" : "query", walk.head, walk.begin, walk.end - 1);
    }
    blocks.add_row({std::to_string(number++), text});
  }
  common::Table loads({"thread", "token", "block", "row", "vector", "bytes of the layer's keys"});
  for (const Read& read : first_load(step)) {
    const bool copy = read.bytes > kVecBytes;
    loads.add_row({std::to_string(read.thread), copy ? "0 to 3" : std::to_string(read.token),
                   std::to_string(block_of(read.token)), copy ? "0 to 3" : std::to_string(read.token % kTokens),
                   copy ? "all" : std::to_string(read.vec), bytes_text(read.byte, read.bytes)});
  }
  std::cout << "step " << rule.name << "\n\n"
            << blocks.to_string() << "\nthe first load of K in thread block 0, warp 0:\n\n"
            << loads.to_string();
}

}  // namespace

void add_ladder_commands(common::Program& program, int& step) {
  program.add_command("layout", "Where the keys of ten tokens lie in the kernels' pages", print_layout);
  program
      .add_command("ladder", "What the threads of each decode kernel read, on ten tokens",
                   [&step] { step == 0 ? print_steps() : print_step(step); })
      .option("--step", step, {0, kBalanced}, "one step in detail: thread blocks, a warp's first load; 0: all steps");
}

}  // namespace
