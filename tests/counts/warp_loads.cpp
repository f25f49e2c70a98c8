#include "tests/counts/warp_loads.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "common/app/words.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/executor/counts.h"

namespace tests {
namespace {

using common::counted;
using common::format_count;
using common::executor::Counts;
using common::executor::WarpLoad;
using nlohmann::ordered_json;

constexpr int kSectorBytes = 32;

// Which of the warp's loads of K and of V are shown, counted from 1. Step 1: loads that one sector of a key serves, the
// first and the last of them too, and the first that takes the next sectors. Steps 2 to 5: one turn of the loop. Step
// 6: a tile. Step 7: all of the warp's copies.
struct Shown {
  std::set<int> keys;
  std::set<int> values;
};
Shown shown_loads(int step) {
  switch (step) {
    case 1:
      return {.keys = {1, 2, 3, 16, 17}, .values = {1, 2, 3}};
    case 6:
      return {.keys = {1, 2, 3, 4, 5, 6, 7, 8}, .values = {1, 2, 3, 4, 5, 6, 7, 8}};
    case 7:
      return {.keys = {1, 2}, .values = {1, 2}};
    default:
      return {.keys = {1, 2, 3, 4}, .values = {1, 2, 3, 4}};
  }
}
// What a step keeps in its workspace, as far as this warp reads it.
constexpr std::array<const char*, 7> kWorkspace = {
    "scores and weights", "scores", "the workspace", "the workspace", "the workspace", "the workspace", "the plan"};

// Bytes of one row of K or V that a lane asks for.
struct Part {
  int lane;
  int token;
  int first_byte;
  int bytes;
};

struct Load {
  char of;  // 'K' or 'V'
  bool is_bulk;
  std::vector<Part> parts;
};

// Where things lie in the device's memory.
class Places {
 public:
  Places(const GpuBatch& batch, const common::Pages& pages, stage::RowOrder rows, const char* workspace)
      : pages_(pages), workspace_(workspace) {
    const common::PageShape& shape = pages.shape;
    row_bytes_ = shape.head_dim * common::bytes_of(shape.type);
    block_bytes_ = row_bytes_ * shape.block_size;
    const int vecs_per_row = row_bytes_ / stage::kVecBytes;
    for (int row = 0; row < shape.block_size; ++row) {
      for (int vec = 0; vec < vecs_per_row; ++vec) {
        const auto place = rows == stage::RowOrder::kPlain
                               ? std::int64_t{row} * vecs_per_row + vec
                               : std::int64_t{stage::swizzled_place(shape.block_size, row, vec)};
        rows_and_vecs_[place] = {row, vec};
      }
    }
    tables_ = batch.block_tables();
    first_entry_ = batch.table_starts().front();
    const common::BatchArrays& on_device = batch.batch();
    add("the query", batch.queries.data(), batch.queries.size());
    add("the block table", on_device.block_tables, tables_.size() * sizeof(int));
    add("the table's start", on_device.table_starts, sizeof(int));
    add("the length", on_device.context_lengths, sizeof(int));
  }

  int block_of(int token) const {
    const int entry = first_entry_ + token / pages_.shape.block_size;
    return tables_[static_cast<std::size_t>(entry)];
  }
  int row_bytes() const { return row_bytes_; }

  // 'K' or 'V', or ' ' for what is neither.
  char array_of(std::uintptr_t address) const {
    const auto bytes = static_cast<std::uintptr_t>(pages_.shape.elements() * common::bytes_of(pages_.shape.type));
    const auto is_in = [&](const void* begin) { return address - reinterpret_cast<std::uintptr_t>(begin) < bytes; };
    return is_in(pages_.keys) ? 'K' : is_in(pages_.values) ? 'V' : ' ';
  }

  std::string name_of(std::uintptr_t address) const {
    for (const Range& range : ranges_) {
      if (address - range.begin < range.bytes) {
        return range.name;
      }
    }
    return workspace_;
  }

  // What a lane asks for, row by row.
  void add_parts(std::vector<Part>& parts, char of, const WarpLoad::OfLane& lane) const {
    const auto base = reinterpret_cast<std::uintptr_t>(of == 'K' ? pages_.keys : pages_.values);
    std::map<std::pair<int, int>, int> bytes;  // by token and first byte: vectors, or what is asked for of one
    for (int done = 0; done < lane.bytes;) {
      const auto offset = static_cast<std::int64_t>(lane.address - base) + done;
      const int in_vec = static_cast<int>(offset % stage::kVecBytes);
      const int size = std::min(stage::kVecBytes - in_vec, lane.bytes - done);
      const auto [row, vec] = rows_and_vecs_.at(offset % block_bytes_ / stage::kVecBytes);
      const auto block = static_cast<int>(offset / block_bytes_);
      const auto entry = std::find(tables_.begin() + first_entry_, tables_.end(), block);
      COMMON_CHECK(entry != tables_.end(), "the kernel reads blocks of its sequence alone");
      const int token = static_cast<int>(entry - tables_.begin() - first_entry_) * pages_.shape.block_size + row;
      bytes[{token, vec * stage::kVecBytes + in_vec}] = size;
      done += size;
    }
    for (const auto& [place, size] : bytes) {
      const auto [token, first_byte] = place;
      Part* last = parts.empty() ? nullptr : &parts.back();
      if (last != nullptr && last->lane == lane.lane && last->token == token &&
          last->first_byte + last->bytes == first_byte) {
        last->bytes += size;
      } else {
        parts.push_back({lane.lane, token, first_byte, size});
      }
    }
  }

 private:
  struct Range {
    std::string name;
    std::uintptr_t begin;
    std::size_t bytes;
  };
  void add(const char* name, const void* begin, std::size_t bytes) {
    ranges_.push_back({name, reinterpret_cast<std::uintptr_t>(begin), bytes});
  }

  common::Pages pages_;
  std::string workspace_;
  int row_bytes_ = 0;
  int block_bytes_ = 0;
  std::map<std::int64_t, std::pair<int, int>> rows_and_vecs_;  // by the place of a vector in its block
  std::vector<int> tables_;
  int first_entry_ = 0;
  std::vector<Range> ranges_;
};

using Sector = std::pair<int, int>;  // token, sector of its row
std::set<Sector> sectors_of(const Load& load) {
  std::set<Sector> sectors;
  for (const Part& part : load.parts) {
    for (int sector = part.first_byte / kSectorBytes; sector * kSectorBytes < part.first_byte + part.bytes; ++sector) {
      sectors.insert({part.token, sector});
    }
  }
  return sectors;
}

int bytes_of(const Load& load) {
  int bytes = 0;
  for (const Part& part : load.parts) {
    bytes += part.bytes;
  }
  return bytes;
}

// "token 3", "tokens 0 to 31", "tokens 8 and 9".
std::string tokens_text(const Load& load) {
  std::set<int> tokens;
  for (const Part& part : load.parts) {
    tokens.insert(part.token);
  }
  const int first = *tokens.begin();
  const int last = *tokens.rbegin();
  if (tokens.size() == 1) {
    return "token " + std::to_string(first);
  }
  COMMON_CHECK(last - first + 1 == static_cast<int>(tokens.size()), "the tokens of a load follow one another");
  return "tokens " + std::to_string(first) + (tokens.size() == 2 ? " and " : " to ") + std::to_string(last);
}

std::string said(const Load& load, int number, int total, bool is_known) {
  const auto sectors = static_cast<int>(sectors_of(load).size());
  std::set<int> lanes;
  for (const Part& part : load.parts) {
    lanes.insert(part.lane);
  }
  const auto num_lanes = static_cast<int>(lanes.size());
  const int bytes = bytes_of(load);
  std::string text = "Number " + format_count(number) + " of the warp's " + format_count(total) +
                     (load.is_bulk ? " copies of " : " loads of ") + load.of + ". ";
  if (load.is_bulk) {
    text += "Lane " + std::to_string(*lanes.begin()) + " orders " + format_count(bytes) + " bytes at once, all of ";
  } else {
    text += counted(num_lanes, "lane") + (num_lanes == 1 ? " asks for " : " ask for ") +
            counted(bytes / num_lanes, "byte") + " each, of ";
  }
  text += tokens_text(load) + ": " + counted(sectors, "sector") + ", and ";
  text += bytes == sectors * kSectorBytes
              ? "every byte of them is asked for."
              : format_count(bytes) + " of their " + format_count(sectors * kSectorBytes) + " bytes are asked for.";
  return text + (is_known ? " Earlier loads have taken the same sectors; a cache may still have them." : "");
}

WarpScene record(int number, const GpuBatch& batch, const PagesInOrder& pages) {
  const auto index = static_cast<std::size_t>(number - 1);
  const stage::LadderStep& step = stage::ladder()[index];
  const Places places(batch, pages.of(step.rows), step.rows, kWorkspace[index]);
  const Shown which = shown_loads(number);
  struct ShownLoad {
    Load load;
    int number;     // among the warp's loads of K, or of V
    bool is_known;  // all sectors have been taken before
    ordered_json between;
    ordered_json counters;
  };
  std::vector<ShownLoad> shown;
  int grid = -1;  // the grid that loads K
  std::map<char, int> totals;
  std::set<std::pair<char, Sector>> taken;
  std::int64_t bytes = 0;
  std::int64_t sectors = 0;
  const auto counters = [&] {
    return ordered_json({{"loads so far", totals['K'] + totals['V']},
                         {"bytes asked for", bytes},
                         {"sectors", sectors},
                         {"different sectors", taken.size()}});
  };
  const ordered_json first_counters = counters();
  std::vector<std::string> names;  // of other loads, in the order in which they came first
  std::map<std::string, int> between;
  const Counts counts = common::executor::count(
      [&] { (void)run_step(step, batch, pages); },
      [&](const WarpLoad& load) {
        if (load.block != 0 || load.warp != 0 || (grid >= 0 && load.grid != grid)) {
          return;
        }
        const char of = places.array_of(load.lanes.front().address);
        if (of == ' ') {
          const std::string name = places.name_of(load.lanes.front().address);
          if (std::find(names.begin(), names.end(), name) == names.end()) {
            names.push_back(name);
          }
          ++between[name];
          return;
        }
        grid = load.grid;
        Load own{.of = of, .is_bulk = load.is_bulk, .parts = {}};
        for (const WarpLoad::OfLane& lane : load.lanes) {
          places.add_parts(own.parts, of, lane);
        }
        const std::set<Sector> touched = sectors_of(own);
        const std::size_t known = taken.size();
        for (const Sector& sector : touched) {
          taken.insert({of, sector});
        }
        ++totals[of];
        bytes += bytes_of(own);
        sectors += static_cast<std::int64_t>(touched.size());
        if ((of == 'K' ? which.keys : which.values).contains(totals[of])) {
          ordered_json others = ordered_json::array();
          for (const std::string& name : names) {
            if (between[name] > 0) {
              others.push_back({name, between[name]});
            }
          }
          shown.push_back({std::move(own), totals[of], taken.size() == known, std::move(others), counters()});
        }
        between.clear();
      });
  std::set<int> blocks;  // logical blocks, whose tokens are all drawn
  const int block_size = pages.of(step.rows).shape.block_size;
  for (const ShownLoad& one : shown) {
    for (const Part& part : one.load.parts) {
      blocks.insert(part.token / block_size);
    }
  }
  ordered_json tokens = ordered_json::array();
  ordered_json physical = ordered_json::array();
  for (const int block : blocks) {
    physical.push_back({places.block_of(block * block_size), block * block_size});
    for (int row = 0; row < block_size; ++row) {
      tokens.push_back(block * block_size + row);
    }
  }
  WarpScene scene{.name = common::format("warp-loads-%d", number),
                  .title = common::format("Step %d: what a warp loads", number),
                  .states = {}};
  scene.states.push_back({{"said",
                           "Warp 0 of thread block 0. A column is a token: its key above, its value below, each a "
                           "row of 256 bytes, in 8 sectors of 32 bytes."},
                          {"memory", {{"tokens", tokens}, {"blocks", physical}, {"row_bytes", places.row_bytes()}}},
                          {"whole",
                           {{"command", common::format("build/kernel_count --step %d", number)},
                            {"requests", counts.global_loads.requests},
                            {"bytes", counts.global_loads.bytes},
                            {"sectors", counts.global_loads.units},
                            {"fewest", counts.global_loads.ideal},
                            {"bulk_copies", counts.bulk_copies},
                            {"bulk_bytes", counts.bulk_bytes}}},
                          {"counters", first_counters},
                          {"actions", ordered_json::array()}});
  for (const ShownLoad& one : shown) {
    ordered_json parts = ordered_json::array();
    for (const Part& part : one.load.parts) {
      parts.push_back({part.lane, part.token, part.first_byte, part.bytes});
    }
    const char of = one.load.of;
    scene.states.push_back(
        {{"command", "load"},
         {"label", std::string(one.load.is_bulk ? "copy " : "load ") + format_count(one.number) + " of " + of},
         {"said", said(one.load, one.number, totals[of], one.is_known)},
         {"of", std::string(1, of)},
         {"is_bulk", one.load.is_bulk},
         {"parts", std::move(parts)},
         {"between", one.between},
         {"counters", one.counters},
         {"actions", ordered_json::array()}});
  }
  return scene;
}

}  // namespace

std::vector<WarpScene> warp_scenes(const GpuBatch& batch, const PagesInOrder& pages) {
  std::vector<WarpScene> scenes;
  for (int number = 1; number <= static_cast<int>(kWorkspace.size()); ++number) {
    scenes.push_back(record(number, batch, pages));
  }
  return scenes;
}

}  // namespace tests
