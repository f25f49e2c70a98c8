#include "pictures.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/executor/mma_layout.h"

namespace stage7 {
namespace {

using common::Anchor;
using common::Box;
using common::Fill;
using common::Hue;
using common::Svg;
using common::executor::left_place;
using common::executor::MatrixPlace;
using common::executor::result_place;
using common::executor::right_place;

constexpr int kWidth = 720;
constexpr double kLeft = 24.0;
constexpr double kRight = kWidth - kLeft;
constexpr common::TextStyle kHeading{.size = 17.0, .bold = true};

// An H200 with 132 multiprocessors: NVIDIA's H100 white paper (registers, shared memory, L2) and H200 data sheet
// (device memory, PCIe); 128 bytes are the 32 banks of shared memory.
struct Memory {
  const char* name;
  const char* used_by;
  const char* size;
  const char* speed;
  Hue hue;
};
constexpr std::array<Memory, 5> kMemories = {
    {{"Registers", "one thread", "256 KB", "read by every instruction", Hue::kGreen},
     {"Shared memory", "one thread block", "up to 228 KB", "128 bytes a clock", Hue::kGreen},
     {"L2 cache", "what was read lately", "50 MB", "shared by all multiprocessors", Hue::kYellow},
     {"Device memory (HBM3e)", "weights, K and V", "141 GB", "4,800 GB/s", Hue::kOrange},
     {"Host memory, over PCIe 5", "what is swapped out", "hundreds of GB", "64 GB/s each way", Hue::kRed}}};

std::string draw_memory_hierarchy() {
  Svg svg(
      kWidth, 470, "The memories of an H200, from the nearest to the farthest",
      "Five memories. Registers, 256 kilobytes for each of 132 multiprocessors. Shared memory, up to 228 kilobytes "
      "each, 128 bytes a clock. The L2 cache, 50 megabytes for all. Device memory, 141 gigabytes at 4.8 terabytes a "
      "second. The host's memory, at 64 gigabytes a second each way.");
  svg.text({kLeft, 34.0}, "Near the arithmetic: small and fast", kHeading);
  constexpr double kHeight = 62.0;
  constexpr std::array<double, kMemories.size()> kWidths = {430.0, 430.0, 510.0, 590.0, kRight - kLeft};
  double y = 50.0;
  for (std::size_t i = 0; i < kMemories.size(); ++i) {
    const Memory& memory = kMemories[i];
    const Box box{kLeft, y, kWidths[i], kHeight};
    svg.box(box, {memory.hue, Fill::kSoft, 2.0, 6.0});
    svg.text({box.x + 14.0, y + 26.0}, memory.name, {.size = 18.0, .bold = true});
    svg.text({box.x + 14.0, y + 49.0}, memory.used_by, {.size = 15.0});
    svg.text({box.right() - 14.0, y + 26.0}, memory.size, {.size = 17.0, .anchor = Anchor::kEnd, .bold = true});
    svg.text({box.right() - 14.0, y + 49.0}, memory.speed, {.size = 15.0, .anchor = Anchor::kEnd});
    if (i + 1 < kMemories.size()) {
      svg.line({{kLeft + 224.0, box.bottom() + 1.0}, {kLeft + 224.0, box.bottom() + 15.0}}, {.width = 2.0});
    }
    y += kHeight + 16.0;
  }
  // What one multiprocessor has.
  svg.line({{462.0, 51.0}, {476.0, 51.0}, {476.0, 189.0}, {462.0, 189.0}}, {.hue = Hue::kGreen, .width = 2.0});
  svg.text({490.0, 115.0}, "in each of 132", {.size = 17.0, .hue = Hue::kGreen, .bold = true});
  svg.text({490.0, 137.0}, "multiprocessors", {.size = 17.0, .hue = Hue::kGreen, .bold = true});
  svg.text({kLeft, 458.0}, "Far from it: large and slow", kHeading);
  return svg.to_string();
}

// Measured by build/kernel_bench, on the machine that the file names.
nlohmann::json read_ladder() {
  const std::string path = std::string(STAGE_SOURCE_DIR) + "/ladder/figures.json";
  std::ifstream file(path);
  if (!file) {
    throw common::InputError("can't read '" + path + "'");
  }
  nlohmann::json figures = nlohmann::json::parse(file, nullptr, false);
  if (figures.is_discarded()) {
    throw common::InputError("'" + path + "' is not JSON");
  }
  return figures;
}

std::string draw_ladder() {
  const nlohmann::json ladder = read_ladder();
  const auto cells = ladder.at("cells").get<std::vector<std::string>>();
  const nlohmann::json& steps = ladder.at("steps");
  constexpr double kTop = 84.0;
  constexpr double kRow = 38.0;
  const double bottom = kTop + kRow * static_cast<double>(steps.size());
  Svg svg(
      kWidth, static_cast<int>(bottom) + 76,
      "The ladder of decode kernels: how much of the memory's bandwidth each step uses",
      "Seven steps, the kernel in production and, below them, one that only reads. For one sequence of 8,192 tokens, "
      "for 32 of them, and for 32 of different lengths, the share of the memory's bandwidth that each reaches. Each "
      "step helps some of the batches; the kernel in production serves all three.");
  const std::array<std::pair<const char*, const char*>, 3> panels = {
      {{"1x8192", "1 x 8,192 tokens"}, {"32x8192", "32 x 8,192 tokens"}, {"32xragged", "32, mixed lengths"}}};
  constexpr double kFirst = 184.0;
  constexpr double kPitch = 178.0;
  constexpr double kBar = 104.0;  // at 100 %
  svg.text({kLeft, 32.0}, "Share of the memory's bandwidth, step by step", kHeading);
  for (std::size_t panel = 0; panel < panels.size(); ++panel) {
    const double x = kFirst + kPitch * static_cast<double>(panel);
    const auto cell =
        static_cast<std::size_t>(std::find(cells.begin(), cells.end(), panels[panel].first) - cells.begin());
    svg.text({x, 66.0}, panels[panel].second, {.size = 16.0, .hue = Hue::kGrey, .bold = true});
    int previous = 100;  // the first step gains nothing
    double y = kTop;
    for (const nlohmann::json& step : steps) {
      const auto name = step.at("step").get<std::string>();
      const bool reads_only = name == "reading alone";
      if (panel == 0) {
        svg.text({kLeft, y + 19.0}, name, {.size = 16.0, .hue = reads_only ? Hue::kGrey : Hue::kInk});
      }
      if (!step.contains("percent")) {
        svg.text({x, y + 19.0}, "not measured yet", {.size = 16.0, .hue = Hue::kGrey});
        y += kRow;
        continue;
      }
      const int percent = step.at("percent").at(cell).get<int>();
      const bool better = !reads_only && percent >= previous + 5;  // a step that this batch gains from
      const Hue hue = reads_only ? Hue::kGrey : better ? Hue::kGreen : Hue::kBlue;
      const double width = std::max(2.0, kBar * percent / 100.0);
      svg.box({x, y, kBar, kRow - 12.0}, {Hue::kGrey, Fill::kSoft, 0.0, 2.0});
      svg.box({x, y, width, kRow - 12.0}, {hue, Fill::kStrong, 0.0, 2.0});
      svg.text({x + kBar + 8.0, y + 19.0}, common::format("%d %%", percent),
               {.size = 16.0, .hue = better ? Hue::kGreen : Hue::kInk, .bold = better});
      previous = percent;
      y += kRow;
    }
  }
  svg.legend({kLeft, bottom + 20.0},
             {{Hue::kGreen, Fill::kStrong, "gains 5 points or more"}, {Hue::kBlue, Fill::kStrong, "gains less"}});
  const auto text_of = [&](const char* name) { return ladder.at(name).get<std::string>(); };
  svg.text({kLeft, bottom + 46.0}, text_of("machine"), {.size = 14.0, .hue = Hue::kGrey});
  svg.text({kLeft, bottom + 64.0}, text_of("date") + ", at " + text_of("commit") + ", " + text_of("form"),
           {.size = 14.0, .hue = Hue::kGrey});
  return svg.to_string();
}

// The three matrices of an mma side by side. Two numbers that lie beside each other in one lane are one box, with the
// lane's number.
std::string draw_mma() {
  constexpr double kTop = 74.0;
  constexpr double kUnit = 20.0;  // of one number
  constexpr int kLane = 5;        // the lesson's example
  Svg svg(
      kWidth, 462, "Which lane of a warp holds which numbers of an mma's matrices",
      "Three matrices: K, of 16 tokens and 16 dimensions; Q, of 16 dimensions and 8 queries; and the scores, of 16 "
      "tokens and 8 queries. Each pair of numbers has the number of the lane that holds it. Lane 5 has rows 1 and 9 "
      "of K in dimensions 2, 3, 10 and 11, the same dimensions of query 1, and the scores of queries 2 and 3 for "
      "tokens 1 and 9.");
  const auto draw_pair = [&](double left, const MatrixPlace& first, const MatrixPlace& second, int lane) {
    const Box box{left + kUnit * first.column, kTop + kUnit * first.row, kUnit * (second.column - first.column + 1),
                  kUnit * (second.row - first.row + 1)};
    svg.box(box, {lane == kLane ? Hue::kBlue : Hue::kGrey, lane == kLane ? Fill::kSoft : Fill::kPaper, 1.0, 0.0});
    svg.label(box, common::format("%d", lane),
              {.size = 13.0, .hue = lane == kLane ? Hue::kBlue : Hue::kGrey, .bold = lane == kLane});
  };
  constexpr double kKeys = kLeft;
  constexpr double kQueries = kKeys + 16.0 * kUnit + 16.0;
  constexpr double kScores = kQueries + 8.0 * kUnit + 16.0;
  for (int lane = 0; lane < 32; ++lane) {
    for (int index = 0; index < 4; ++index) {
      draw_pair(kKeys, left_place(lane, index, 0), left_place(lane, index, 1), lane);
    }
    for (int index = 0; index < 2; ++index) {
      draw_pair(kQueries, right_place(lane, index, 0), right_place(lane, index, 1), lane);
      draw_pair(kScores, result_place(lane, 2 * index), result_place(lane, 2 * index + 1), lane);
    }
  }
  const std::array<std::pair<double, std::pair<const char*, const char*>>, 3> headings = {
      {{kKeys, {"left: K", "tokens x dimensions"}},
       {kQueries, {"right: Q", "dimensions x queries"}},
       {kScores, {"result: scores", "tokens x queries"}}}};
  for (const auto& [x, texts] : headings) {
    svg.text({x, 34.0}, texts.first, kHeading);
    svg.text({x, 58.0}, texts.second, {.size = 13.0, .hue = Hue::kGrey});
  }
  svg.text({kLeft, kTop + 16.0 * kUnit + 34.0}, "A number is a lane, a box two numbers that it holds; lane 5 is blue.",
           {.size = 15.0});
  return svg.to_string();
}

// Two warps of a thread block, each with a ring of two tiles; a copy takes three units of time, the arithmetic one.
std::string draw_tile_ring() {
  constexpr std::array<int, 8> kPages = {7, 1, 3, 12, 5, 9, 2, 8};  // a block table
  constexpr int kWarps = 2;
  constexpr int kStages = 2;
  constexpr int kCopy = 3;
  Svg svg(kWidth, 420, "Rings of tiles: copies are always on their way while a warp computes",
          "A block table of eight pages is dealt to two warps in turn. Each warp has a ring of two places in shared "
          "memory. While it computes on the tile in one place, the copy into the other is under way, and as soon as a "
          "place is free, the next copy into it is ordered.");
  svg.text({kLeft, 34.0}, "The tiles of one head, dealt to the warps in turn", kHeading);
  constexpr double kPage = 84.0;
  for (std::size_t tile = 0; tile < kPages.size(); ++tile) {
    const Box box{kLeft + kPage * static_cast<double>(tile), 48.0, kPage - 8.0, 40.0};
    const Hue hue = common::owner_hue(static_cast<int>(tile) % kWarps);
    svg.box(box, {hue, Fill::kSoft, 2.0, 4.0});
    svg.label(box, common::format("page %d", kPages[tile]), {.size = 15.0, .hue = hue, .bold = true});
  }
  svg.text({kLeft, 128.0}, "Each warp's ring in shared memory, over time", kHeading);
  constexpr double kFirst = 172.0;
  constexpr double kUnit = 53.0;
  constexpr double kLane = 38.0;
  for (int warp = 0; warp < kWarps; ++warp) {
    const Hue hue = common::owner_hue(warp);
    const double top = 146.0 + warp * 112.0;
    svg.text({kLeft, top + 24.0}, common::format("warp %d", warp), {.size = 17.0, .hue = hue, .bold = true});
    std::array<double, kStages> place_is_free{};
    place_is_free.fill(0.5 * warp);
    double warp_is_free = 0.0;
    int num_taken = 0;
    for (auto tile = static_cast<std::size_t>(warp); tile < kPages.size(); tile += kWarps) {
      const int place = num_taken++ % kStages;
      const double begin = place_is_free[static_cast<std::size_t>(place)];
      const double arrival = begin + kCopy;
      const double compute = std::max(arrival, warp_is_free);
      place_is_free[static_cast<std::size_t>(place)] = compute + 1.0;
      warp_is_free = compute + 1.0;
      const double y = top + place * (kLane + 6.0);
      const auto x = [&](double time) { return kFirst + kUnit * time; };
      const Box copy{x(begin), y, x(compute) - x(begin) - 2.0, kLane};
      svg.box(copy, {hue, Fill::kPaper, 1.5, 3.0, true});
      svg.label(copy, common::format("copy page %d", kPages[tile]), {.size = 15.0, .hue = hue});
      svg.box({x(compute), y, kUnit - 2.0, kLane}, {hue, Fill::kStrong, 0.0, 3.0});
    }
    for (int place = 0; place < kStages; ++place) {
      svg.text({kFirst - 10.0, top + place * (kLane + 6.0) + 24.0}, common::format("place %d", place),
               {.size = 15.0, .anchor = Anchor::kEnd, .hue = Hue::kGrey});
    }
  }
  svg.line({{kFirst, 366.0}, {kRight, 366.0}}, {.hue = Hue::kGrey, .arrow = true});
  svg.text({kFirst - 10.0, 371.0}, "time", {.size = 15.0, .anchor = Anchor::kEnd, .hue = Hue::kGrey});
  svg.legend({kLeft, 402.0}, {{Hue::kBlue, Fill::kPaper, "a copy under way"},
                              {Hue::kBlue, Fill::kStrong, "tensor cores compute on it"}});
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"memory_hierarchy", "an H200's memories, with sizes and speeds", draw_memory_hierarchy},
          {"ladder", "how much of the memory's bandwidth each step of the ladder uses", draw_ladder},
          {"mma", "which lane holds which numbers of an mma's matrices", draw_mma},
          {"tile_ring", "copies under way while warps compute", draw_tile_ring}};
}

}  // namespace
