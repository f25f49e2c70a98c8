#include "pictures.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "../engine.h"
#include "../serve/make_engine.h"
#include "common/app/shell.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "common/model/tokenizer.h"

namespace stage8 {
namespace {

using common::Anchor;
using common::Box;
using common::Fill;
using common::Hue;
using common::Svg;

constexpr int kWidth = 720;
constexpr double kLeft = 24.0;
constexpr double kRight = kWidth - kLeft;
constexpr int kBlockSize = 4;
constexpr common::TextStyle kHeading{.size = 17.0, .bold = true};
constexpr common::TextStyle kCaption{.size = 15.0, .hue = Hue::kGrey};

// The state of the lesson's run after a step.
struct Moment {
  std::map<int, std::vector<int>> tables;  // by request
  std::set<int> computed;                  // requests with tokens in the step
  std::vector<int> preempted;
  std::vector<int> ended;
};

// Three requests in six blocks, served until all have ended.
std::vector<Moment> run_three_requests(int num_blocks) {
  const common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  const common::Llama model(file);
  const common::Tokenizer tokenizer(file);
  Engine engine(model, {.num_slots = num_blocks * kBlockSize,
                        .scheduler = {.token_budget = 8, .headroom = 0},
                        .block_size = kBlockSize,
                        .gpu = {.device = Device::kCpu}});
  std::vector<Moment> moments;
  engine.on_pass([&](const RaggedBatch& batch) {
    Moment& moment = moments.emplace_back();
    for (const auto& group : engine.scheduler().running()) {
      for (const SequenceId sequence : group->sequences()) {
        moment.tables[group->id()] = engine.manager().block_table(sequence);
        if (std::find(batch.sequences.begin(), batch.sequences.end(), sequence) != batch.sequences.end()) {
          moment.computed.insert(group->id());
        }
      }
    }
  });
  engine.on_step([&](const StepReport& report) {
    moments.back().preempted = report.recomputed;
    moments.back().ended = report.ended;
  });
  for (const char* prompt : {"Once upon a time", "The king had a garden", "A wolf"}) {
    engine.submit({.request = {tokenizer.encode_prompt(prompt), 8, {}, 0, {}}});
  }
  while (engine.step()) {
  }
  return moments;
}

std::string draw_preemption() {
  constexpr int kNumBlocks = 6;
  const std::vector<Moment> moments = run_three_requests(kNumBlocks);
  Svg svg(kWidth, 452, "Three requests in six blocks, step by step",
          "Each column is a step, each row a block, and its letter the request that owns it. When a block is missing, "
          "the latest request is preempted: its blocks go to the earlier ones, and it waits until there is room. If no "
          "later request runs that could be preempted, it pauses and keeps its blocks. In the end all have been "
          "served.");
  constexpr double kFirst = 126.0;
  constexpr double kTop = 76.0;
  constexpr double kRow = 30.0;
  const double pitch = (kRight - kFirst) / static_cast<double>(moments.size());
  svg.text({kLeft, 34.0}, "Owners of the blocks, step by step", kHeading);
  svg.text({kLeft, kTop - 8.0}, "step", kCaption);
  for (int block = 0; block < kNumBlocks; ++block) {
    svg.text({kLeft, kTop + kRow * block + 21.0}, common::format("block %d", block), kCaption);
  }
  constexpr int kNumRequests = 3;
  const double states = kTop + kRow * kNumBlocks + 50.0;
  svg.text({kLeft, states - 16.0}, "What each request does", kHeading);
  std::array<bool, kNumRequests> has_ended{};
  for (int request = 0; request < kNumRequests; ++request) {
    svg.text({kLeft, states + 40.0 * request + 24.0}, common::format("request %c", common::sequence_name(request)),
             {.size = 16.0, .hue = common::owner_hue(request), .bold = true});
  }
  for (std::size_t step = 0; step < moments.size(); ++step) {
    const Moment& moment = moments[step];
    const double x = kFirst + pitch * static_cast<double>(step);
    svg.label({x, kTop - 24.0, pitch, 22.0}, std::to_string(step), kCaption);
    for (int block = 0; block < kNumBlocks; ++block) {
      const Box box{x + 1.5, kTop + kRow * block + 1.5, pitch - 3.0, kRow - 3.0};
      std::string owners;
      Hue hue = Hue::kGrey;
      for (const auto& [request, table] : moment.tables) {
        if (std::find(table.begin(), table.end(), block) != table.end()) {
          owners += common::sequence_name(request);
          hue = common::owner_hue(request);
        }
      }
      svg.box(box, {hue, owners.empty() ? Fill::kPaper : Fill::kSoft, owners.empty() ? 0.7 : 1.5, 3.0});
      if (!owners.empty()) {
        svg.label(box, owners, {.size = 15.0, .hue = hue, .bold = true});
      }
    }
    for (int request = 0; request < kNumRequests; ++request) {
      const auto index = static_cast<std::size_t>(request);
      const Hue hue = common::owner_hue(request);
      const Box box{x + 1.0, states + 40.0 * request + 4.0, pitch - 2.0, 30.0};
      const bool is_running = moment.tables.contains(request);
      const bool preempted = std::count(moment.preempted.begin(), moment.preempted.end(), request) > 0;
      if (is_running && moment.computed.contains(request)) {
        svg.box(box, {hue, Fill::kStrong, 0.0, 3.0});
      } else if (is_running) {
        svg.box({box.x + 1.0, box.y + 1.0, box.width - 2.0, box.height - 2.0}, {hue, Fill::kPaper, 2.0, 3.0});
      } else if (!has_ended[index]) {
        svg.box(box, {preempted ? Hue::kRed : hue, Fill::kHatched, preempted ? 2.5 : 1.0, 3.0});
      }
      if (std::count(moment.ended.begin(), moment.ended.end(), request) > 0) {
        has_ended[index] = true;
      }
    }
  }
  svg.legend({kLeft, states + 142.0}, {{Hue::kBlue, Fill::kStrong, "computes"},
                                       {Hue::kBlue, Fill::kPaper, "pauses"},
                                       {Hue::kBlue, Fill::kHatched, "waits"},
                                       {Hue::kRed, Fill::kHatched, "preempted in this step"}});
  return svg.to_string();
}

constexpr int kNumPoolBlocks = 8;
constexpr int kNumHostBlocks = 4;

// A pool in which blocks 3, 1 and 7 are free, and are taken in the order 7, 1, 3. The other blocks are single ones'.
void leave_three_blocks(KvCacheManager& manager) {
  for (int block = 0; block < kNumPoolBlocks; ++block) {
    COMMON_CHECK(manager.allocate(10 + block, kBlockSize), "the picture's pool has room for it");
  }
  for (const int block : {3, 1, 7}) {
    manager.free(10 + block);
  }
}

// The pool's blocks above the host's, and copies between them, in the hues of their host blocks. hues: of the blocks
// that a text has.
void draw_moves(Svg& svg, double y, const std::string& title, const std::vector<int>& table, Hue table_hue,
                const std::map<int, Hue>& hues, const std::vector<BlockCopy>& copies) {
  constexpr double kPitch = (kRight - kLeft + 8.0) / kNumPoolBlocks;
  const auto device_box = [&](double top, int block) { return Box{kLeft + kPitch * block, top, kPitch - 8.0, 38.0}; };
  const auto host_box = [&](double top, int block) { return device_box(top, 2 + block - kNumPoolBlocks); };
  svg.text({kLeft, y}, title, kHeading);
  svg.text({kRight, y}, "block table " + common::format_list(table),
           {.size = 16.0, .anchor = Anchor::kEnd, .hue = table_hue, .bold = true});
  for (int block = 0; block < kNumPoolBlocks + kNumHostBlocks; ++block) {
    const bool on_host = block >= kNumPoolBlocks;
    const Box box = on_host ? host_box(y + 118.0, block) : device_box(y + 16.0, block);
    const bool is_owned = hues.contains(block);
    const Hue hue = is_owned ? hues.at(block) : Hue::kGrey;
    svg.box(box, {hue, is_owned ? Fill::kSoft : Fill::kPaper, is_owned ? 2.0 : 1.0, 3.0, on_host});
    svg.label(box, std::to_string(block), {.size = 17.0, .hue = hue, .bold = is_owned, .code = true});
  }
  for (const auto& [source, destination] : copies) {
    const bool leaves = destination >= kNumPoolBlocks;
    const Box device = device_box(y + 16.0, leaves ? source : destination);
    const Box host = host_box(y + 118.0, leaves ? destination : source);
    const common::Point near{device.bottom_middle().x, device.bottom() + 3.0};
    const common::Point far{host.top_middle().x, host.y - 3.0};
    svg.curve(leaves ? near : far, leaves ? far : near,
              {.hue = hues.at(leaves ? destination : source), .width = 2.0, .arrow = true});
  }
  svg.text({kLeft, y + 143.0}, "host memory", kCaption);
}

// A block table [7, 1, 3] leaves the cache and is copied back, into other blocks.
std::string draw_swapping() {
  KvCacheManager manager(kNumPoolBlocks, kBlockSize, hash_block, kNumHostBlocks);
  leave_three_blocks(manager);
  COMMON_CHECK(manager.allocate(0, 10), "the picture's pool has room for it");
  manager.commit(0, 10);
  for (const int block : {0, 2, 4, 5, 6}) {
    manager.free(10 + block);
  }
  const std::vector<int> before = manager.block_table(0);
  const std::array<SequenceId, 1> sequences = {0};
  COMMON_CHECK(manager.swap_out(sequences), "there is room on the host");
  const std::vector<BlockCopy> out(manager.pending_copies().begin(), manager.pending_copies().end());
  manager.clear_pending_copies();
  COMMON_CHECK(manager.allocate(1, 11), "the picture's pool has room for another");
  const std::vector<int> other = manager.block_table(1);
  COMMON_CHECK(manager.swap_in(sequences), "there is room in the cache");
  const std::vector<BlockCopy> in(manager.pending_copies().begin(), manager.pending_copies().end());
  manager.clear_pending_copies();
  const std::vector<int> after = manager.block_table(0);

  Svg svg(kWidth, 452, "A sequence is swapped out to host memory, and back into other blocks",
          "Above, a sequence with the block table 7, 1, 3 is preempted: its blocks are copied to the host. Below, it "
          "is resumed: its blocks are copied back into blocks that are free then, and its block table names these.");
  const auto hues = [](const std::vector<int>& others, const std::vector<BlockCopy>& copies) {
    std::map<int, Hue> result;
    for (const int block : others) {
      result[block] = Hue::kOrange;
    }
    for (const auto& [source, destination] : copies) {
      result[source] = result[destination] = Hue::kBlue;
    }
    return result;
  };
  draw_moves(svg, 36.0, "Swapped out: blocks 0 to 7 are in the cache", before, Hue::kBlue, hues({}, out), out);
  svg.line({{kLeft, 212.0}, {kRight, 212.0}}, {.hue = Hue::kGrey, .width = 0.7});
  draw_moves(svg, 246.0, "Swapped in: another sequence has its old blocks", after, Hue::kBlue, hues(other, in), in);
  svg.legend({kLeft, 436.0},
             {{Hue::kBlue, Fill::kSoft, "the sequence's blocks"}, {Hue::kOrange, Fill::kSoft, "another sequence's"}});
  return svg.to_string();
}

// Two texts of ten tokens that take turns in three blocks: what the pool evicts goes to the host, and back.
std::string draw_host_cache() {
  KvCacheManager manager(kNumPoolBlocks, kBlockSize);
  leave_three_blocks(manager);
  std::map<std::vector<common::Token>, int> places;  // host blocks, by their tokens
  std::vector<BlockCopy> copies;                     // of the text that is being served
  manager.on_evict([&](int block) {
    const std::vector<common::Token>& tokens = manager.prefix_cache().entry(block).tokens;
    const int place = kNumPoolBlocks + static_cast<int>(places.size());
    copies.push_back({block, places.emplace(tokens, place).first->second});
  });
  std::vector<int> table;
  std::map<int, Hue> hues;
  const auto serve = [&](common::Token first, Hue hue) {
    std::vector<common::Token> text(10);
    std::iota(text.begin(), text.end(), first);
    copies.clear();
    const std::map<std::vector<common::Token>, int> kept = places;
    COMMON_CHECK(manager.allocate(0, text), "the picture's pool has room for it");
    table = manager.block_table(0);
    for (std::size_t i = 0; i < table.size(); ++i) {  // as HostCache::restore
      hues[table[i]] = hue;
      const auto begin = text.begin() + static_cast<std::ptrdiff_t>(i * kBlockSize);
      const auto place = i + 1 == table.size() ? kept.end() : kept.find({begin, begin + kBlockSize});
      if (place != kept.end()) {
        copies.push_back({place->second, table[i]});
      }
    }
    for (const auto& [tokens, place] : places) {
      hues[place] = tokens.front() < 20 ? Hue::kBlue : Hue::kOrange;
    }
    manager.commit(0, text);
    manager.free(0);
  };
  serve(1, Hue::kBlue);
  serve(21, Hue::kOrange);
  Svg svg(kWidth, 452, "Blocks that the pool evicts are copied to the host, and back when their text goes on",
          "Above, another text needs the pool's three blocks: the two full ones of the first text are evicted, and "
          "copied to the host. Below, the first text is sent again: the other one's two full blocks are copied to the "
          "host, and then its own two back. Only its last two tokens are computed.");
  draw_moves(svg, 36.0, "B needs blocks: A's go to the host", table, Hue::kOrange, hues, copies);
  svg.line({{kLeft, 212.0}, {kRight, 212.0}}, {.hue = Hue::kGrey, .width = 0.7});
  serve(1, Hue::kBlue);
  draw_moves(svg, 246.0, "A is sent again: its blocks come back", table, Hue::kBlue, hues, copies);
  svg.legend({kLeft, 436.0}, {{Hue::kBlue, Fill::kSoft, "text A"}, {Hue::kOrange, Fill::kSoft, "text B"}});
  return svg.to_string();
}

// A step's work on the host and on the GPU; lengths are not to scale.
std::string draw_run_ahead() {
  Svg svg(kWidth, 410, "Running one step ahead keeps the GPU busy",
          "Above, the host collects a step's tokens, schedules the next step and enqueues it while the GPU waits. "
          "Below, the host does this for the next step while the GPU computes the present one: the GPU has no gaps, "
          "and the host waits instead.");
  constexpr double kFirst = 92.0;
  constexpr double kLane = 44.0;
  constexpr double kHost = 62.0;
  const auto lane = [&](double y, const char* name) {
    svg.text({kLeft, y + 29.0}, name, {.size = 17.0, .bold = true});
    svg.line({{kFirst, y + kLane + 4.0}, {kRight, y + kLane + 4.0}}, {.hue = Hue::kGrey, .width = 0.5});
  };
  const auto gpu = [&](double x, double y, double width, int step) {
    const Box box{x, y, width, kLane};
    const Hue hue = common::owner_hue(step - 1);
    svg.box(box, {hue, Fill::kSoft, 2.0});
    svg.label(box, common::format("step %d", step), {.size = 17.0, .hue = hue, .bold = true});
  };
  const auto host = [&](double x, double y, int step) {
    const Box box{x, y, kHost, kLane};
    const Hue hue = common::owner_hue(step - 1);
    svg.box(box, {hue, Fill::kSoft, 2.0});
    svg.label(box, common::format("%d", step), {.size = 17.0, .hue = hue, .bold = true});
  };
  constexpr double kStep = 118.0;
  svg.text({kLeft, 34.0}, "One after the other: the GPU waits for the host", kHeading);
  lane(48.0, "host");
  lane(108.0, "GPU");
  double x = kFirst;
  for (int step = 1; step <= 3; ++step) {
    host(x, 48.0, step);
    svg.line({{x + kHost, 92.0}, {x + kHost, 106.0}}, {.width = 2.0, .arrow = true});
    if (step > 1) {
      svg.box({x, 108.0, kHost, kLane}, {Hue::kRed, Fill::kHatched, 1.0});
    }
    gpu(x + kHost, 108.0, kStep, step);
    x += kHost + kStep;
  }
  svg.text({kLeft, 206.0}, "One ahead: the next step is enqueued while this one is computed", kHeading);
  lane(220.0, "host");
  lane(280.0, "GPU");
  x = kFirst + kHost;
  host(kFirst, 220.0, 1);
  svg.line({{x, 264.0}, {x, 278.0}}, {.width = 2.0, .arrow = true});
  for (int step = 1; step <= 4; ++step) {
    gpu(x, 280.0, kStep, step);
    if (step < 4) {
      host(x + 4.0, 220.0, step + 1);
      svg.curve({x + 4.0 + kHost, 266.0}, {x + kStep, 278.0}, {.width = 1.5, .arrow = true});
      svg.text({x + kHost + 12.0, 248.0}, "wait", {.size = 15.0, .hue = Hue::kGrey});
    }
    x += kStep;
  }
  svg.legend({kLeft, 360.0}, {{Hue::kBlue, Fill::kSoft, "host: collect tokens, schedule and enqueue a step"}});
  svg.legend({kLeft, 386.0}, {{Hue::kRed, Fill::kHatched, "the GPU has nothing to do"}});
  svg.text({kRight, 386.0}, "not to scale", {.size = 14.0, .anchor = Anchor::kEnd, .hue = Hue::kGrey});
  return svg.to_string();
}

// The lesson's sequence of ten tokens in blocks 7, 1 and 3 computes its eleventh and three drafts; one of them is
// right.
std::string draw_speculation() {
  constexpr int kNumBlocks = 8;
  constexpr int kFirst = 8;  // the first position in the picture
  constexpr int kCount = 8;
  constexpr int kLength = 10;
  constexpr int kNumDrafts = 3;
  const std::array<const char*, kCount> text = {"queen", "had", "a", "cat", ",", "", "", ""};
  const std::array<const char*, kNumDrafts> drafts = {"cat", ".", "and"};
  const std::array<const char*, kNumDrafts + 1> drawn = {"cat", ",", "the", "so"};
  KvCacheManager manager(kNumBlocks, kBlockSize);
  for (int block = 0; block < kNumBlocks; ++block) {
    COMMON_CHECK(manager.allocate(10 + block, kBlockSize), "the picture's pool has room for it");
  }
  for (const int block : {6, 3, 1, 7}) {
    manager.free(10 + block);
  }
  COMMON_CHECK(manager.allocate(0, kLength), "the picture's pool has room for it");
  manager.commit(0, kLength);
  COMMON_CHECK(manager.reserve(0, 1 + kNumDrafts), "the picture's pool has room for the drafts");
  const std::vector<int> slots = manager.slots(0, kFirst, kCount);
  const int computed = manager.length(0);
  int num_accepted = 0;  // as SpeculatingEngine::extend
  while (num_accepted < kNumDrafts && std::string(drawn.at(static_cast<std::size_t>(num_accepted))) ==
                                          drafts.at(static_cast<std::size_t>(num_accepted))) {
    ++num_accepted;
  }
  manager.commit(0, 1 + num_accepted);
  const int length = manager.length(0);

  Svg svg(
      kWidth, 424, "A step computes a token and three drafts, and takes two of them back",
      "Above, positions 10 to 13 are computed in one step: the text's last token and three drafts, each in its slot. "
      "In the middle, the row of each draws a token: the first draft is what the row before it draws, the second is "
      "not. Below, positions 10 and 11 count; the two slots behind them are written again by the next step.");
  constexpr double kLeftCell = 150.0;
  constexpr double kPitch = (kRight - kLeftCell) / kCount;
  const auto cell = [&](double y, int position) {
    return Box{kLeftCell + kPitch * (position - kFirst) + 2.0, y, kPitch - 4.0, 40.0};
  };
  const auto row = [&](double y, const std::string& name) { svg.text({kLeft, y + 26.0}, name, kCaption); };
  svg.text({kLeft, 34.0}, "One step: the last token, and three drafts behind it", kHeading);
  row(48.0, "position");
  row(76.0, "slot");
  for (int i = 0; i < kCount; ++i) {
    svg.label(cell(48.0, kFirst + i), std::to_string(kFirst + i), kCaption);
    svg.label(cell(76.0, kFirst + i), std::to_string(slots.at(static_cast<std::size_t>(i))),
              {.size = 16.0, .hue = Hue::kInk, .code = true});
  }
  row(116.0, "computed");
  row(186.0, "drawn behind it");
  for (int i = 0; i < kCount; ++i) {
    const int position = kFirst + i;
    const int draft = position - computed - 1;
    const bool is_draft = draft >= 0 && draft < kNumDrafts;
    const bool is_old = position < computed;
    const Hue hue = is_draft ? Hue::kOrange : position <= computed ? Hue::kBlue : Hue::kGrey;
    const Fill fill = position <= computed || is_draft ? Fill::kSoft : Fill::kPaper;
    svg.box(cell(116.0, position), {hue, fill, is_old ? 1.0 : 2.0, 3.0, is_draft});
    svg.label(cell(116.0, position),
              is_draft               ? drafts.at(static_cast<std::size_t>(draft))
              : position <= computed ? text.at(static_cast<std::size_t>(i))
                                     : "",
              {.size = 16.0, .hue = hue, .bold = !is_old});
    if (position >= computed && position <= computed + kNumDrafts) {
      const int which = position - computed;
      const bool counts = which <= num_accepted;
      svg.label(cell(186.0, position), drawn.at(static_cast<std::size_t>(which)),
                {.size = 16.0, .hue = counts ? Hue::kGreen : Hue::kGrey, .bold = counts});
      if (which < kNumDrafts && counts) {  // to the draft that it is compared with
        const Box from = cell(186.0, position);
        const Box to = cell(116.0, position + 1);
        svg.curve({from.right() - 14.0, from.y + 6.0}, {to.x + 22.0, to.bottom() + 3.0},
                  {.hue = which < num_accepted ? Hue::kGreen : Hue::kRed, .width = 2.0, .arrow = true});
      }
    }
  }
  svg.line({{kLeft, 244.0}, {kRight, 244.0}}, {.hue = Hue::kGrey, .width = 0.7});
  svg.text({kLeft, 280.0},
           common::format("Afterwards: length %d, and the text's last token is \"%s\"", length,
                          text.at(static_cast<std::size_t>(length - kFirst))),
           kHeading);
  row(296.0, "in the cache");
  for (int i = 0; i < kCount; ++i) {
    const int position = kFirst + i;
    const bool counts = position < length;
    const bool taken_back = !counts && position <= computed + kNumDrafts;
    svg.box(cell(296.0, position), {counts       ? Hue::kBlue
                                    : taken_back ? Hue::kRed
                                                 : Hue::kGrey,
                                    counts       ? Fill::kSoft
                                    : taken_back ? Fill::kHatched
                                                 : Fill::kPaper,
                                    1.0, 3.0});
    svg.label(cell(296.0, position), counts ? text.at(static_cast<std::size_t>(i)) : "",
              {.size = 16.0, .hue = Hue::kBlue, .bold = position >= computed});
  }
  svg.legend({kLeft, 376.0}, {{Hue::kBlue, Fill::kSoft, "text"},
                              {Hue::kOrange, Fill::kSoft, "draft"},
                              {Hue::kRed, Fill::kHatched, "taken back: written again by the next step"}});
  return svg.to_string();
}

// Two samples of a prompt of two blocks: a step reads these once, for both queries.
std::string draw_shared_reading() {
  constexpr int kNumBlocks = 8;
  KvCacheManager manager(kNumBlocks, kBlockSize);
  for (int block = 0; block < kNumBlocks; ++block) {
    COMMON_CHECK(manager.allocate(10 + block, kBlockSize), "the picture's pool has room for it");
  }
  for (const int block : {5, 3, 1, 7}) {
    manager.free(10 + block);
  }
  COMMON_CHECK(manager.allocate(0, 2 * kBlockSize), "the picture's pool has room for the prompt");
  manager.commit(0, 2 * kBlockSize);
  manager.fork(0, 1);
  std::array<std::vector<int>, 2> tables;
  for (const int sequence : {0, 1}) {
    COMMON_CHECK(manager.reserve(sequence, 2), "the picture's pool has room for both samples");
    manager.commit(sequence, 2);
    tables.at(static_cast<std::size_t>(sequence)) = manager.block_table(sequence);
  }
  const std::size_t num_shared = static_cast<std::size_t>(
      std::mismatch(tables[0].begin(), tables[0].end(), tables[1].begin(), tables[1].end()).first - tables[0].begin());

  Svg svg(
      kWidth, 400, "Two samples read the blocks of their prompt once",
      "Above, each of two samples reads all blocks of its own table, six blocks in all. Below, both queries read the "
      "two blocks of the prompt together; what each has then, a maximum, a sum and an output, it takes along to the "
      "one block of its own: four blocks in all.");
  constexpr double kBlock = 72.0;
  constexpr double kHeight = 40.0;
  constexpr double kFirst = 150.0;
  const auto block = [&](double x, double y, int number, Hue hue) {
    svg.box({x, y, kBlock - 6.0, kHeight}, {hue, Fill::kSoft, 1.5, 3.0});
    svg.label({x, y, kBlock - 6.0, kHeight}, std::to_string(number), {.size = 17.0, .hue = hue, .code = true});
  };
  const auto hue_of = [&](std::size_t sequence, std::size_t index) {
    return index < num_shared ? Hue::kGreen : sequence == 0 ? Hue::kBlue : Hue::kOrange;
  };
  const std::array<std::string, 2> names = {"query of A", "query of B"};

  std::size_t num_read = 0;
  for (const std::size_t sequence : {0, 1}) {
    const double y = 60.0 + 56.0 * static_cast<double>(sequence);
    svg.text({kLeft, y + 26.0}, names.at(sequence), kCaption);
    for (std::size_t i = 0; i < tables.at(sequence).size(); ++i, ++num_read) {
      block(kFirst + kBlock * static_cast<double>(i), y, tables.at(sequence)[i], hue_of(sequence, i));
    }
  }
  svg.text({kLeft, 36.0}, common::format("Apart: %zu blocks are read", num_read), kHeading);
  svg.line({{kLeft, 186.0}, {kRight, 186.0}}, {.hue = Hue::kGrey, .width = 0.7});

  num_read -= num_shared;
  svg.text({kLeft, 222.0}, common::format("Together: %zu", num_read), kHeading);
  svg.text({kLeft, 284.0}, "both queries", kCaption);
  for (std::size_t i = 0; i < num_shared; ++i) {
    block(kFirst + kBlock * static_cast<double>(i), 258.0, tables[0][i], Hue::kGreen);
  }
  const double end = kFirst + kBlock * static_cast<double>(num_shared);
  const double own = kFirst + kBlock * static_cast<double>(num_shared) + 190.0;
  for (const std::size_t sequence : {0, 1}) {
    const double y = 230.0 + 56.0 * static_cast<double>(sequence);
    svg.line({{end, 278.0}, {end + 24.0, y + 20.0}, {own - 8.0, y + 20.0}},
             {.hue = hue_of(sequence, num_shared), .width = 2.0, .arrow = true});
    svg.text({end + 32.0, y + 12.0}, "max, sum, output", {.size = 14.0, .hue = hue_of(sequence, num_shared)});
    for (std::size_t i = num_shared; i < tables.at(sequence).size(); ++i) {
      block(own + kBlock * static_cast<double>(i - num_shared), y, tables.at(sequence)[i], hue_of(sequence, i));
    }
    svg.text({own + kBlock * static_cast<double>(tables.at(sequence).size() - num_shared) + 8.0, y + 26.0},
             names.at(sequence), kCaption);
  }
  svg.legend({kLeft, 364.0}, {{Hue::kGreen, Fill::kSoft, "the prompt's blocks"},
                              {Hue::kBlue, Fill::kSoft, "A's own"},
                              {Hue::kOrange, Fill::kSoft, "B's own"}});
  return svg.to_string();
}

// A text of blocks of 4, of which a query sees 6 positions: what lies behind the window goes, and its places stay.
std::string draw_windows() {
  constexpr int kWindow = 6;
  constexpr int kNumPlaces = 5;
  KvCacheManager manager(kNumPoolBlocks, kBlockSize);
  for (int block = 0; block < kNumPoolBlocks; ++block) {
    COMMON_CHECK(manager.allocate(10 + block, 1), "the picture's pool has room for it");
  }
  for (const int block : {4, 2, 5, 3, 1, 7}) {
    manager.free(10 + block);
  }
  Svg svg(kWidth, 432, "Blocks behind the window are given up while their text is being written",
          "With 13 tokens in blocks 7, 1, 3 and 5, the next query sees positions 8 to 13. Blocks 7 and 1 are given up: "
          "one empty block, 2, stands in both of their places. With 17 tokens it stands in a third one, and the text's "
          "fifth block is 7, which it gave up before.");
  constexpr double kPitch = (kRight - kLeft + 8.0) / kNumPlaces;
  constexpr double kSlot = (kPitch - 8.0) / kBlockSize;
  const auto draw_table = [&](double y, const std::string& title, int stand_in) {
    const std::vector<int>& table = manager.block_table(0);
    const int length = manager.length(0);
    std::vector<int> free_blocks(manager.free_blocks().rbegin(), manager.free_blocks().rend());
    svg.text({kLeft, y}, title, kHeading);
    svg.text({kRight, y}, "free: " + common::format_list(free_blocks), {.size = 16.0, .anchor = Anchor::kEnd});
    for (std::size_t place = 0; place < table.size(); ++place) {
      const double x = kLeft + kPitch * static_cast<double>(place);
      const bool stands_in = table[place] == stand_in;
      const Hue hue = stands_in ? Hue::kGrey : Hue::kBlue;
      svg.label({x, y + 10.0, kPitch - 8.0, 24.0}, common::format("block %d", table[place]),
                {.size = 16.0, .hue = hue, .bold = !stands_in});
      for (int slot = 0; slot < kBlockSize; ++slot) {
        const int position = static_cast<int>(place) * kBlockSize + slot;
        const Box box{x + kSlot * slot, y + 38.0, kSlot, 34.0};
        const bool is_next = position == length;
        const bool is_seen = position > length - kWindow;
        svg.box(box, {is_next   ? Hue::kOrange
                      : is_seen ? hue
                                : Hue::kGrey,
                      stands_in || position > length ? Fill::kPaper : Fill::kSoft, 1.0, 0.0, stands_in});
        if (position <= length && !stands_in) {
          svg.label(box, std::to_string(position), {.size = 14.0, .hue = Hue::kInk, .code = true});
        }
      }
    }
  };
  const auto write = [&](int num_tokens) {
    COMMON_CHECK(manager.reserve(0, num_tokens), "the picture's pool has room for the text");
    manager.commit(0, num_tokens);
  };
  COMMON_CHECK(manager.allocate(0, 1), "the picture's pool has room for the text");
  manager.commit(0, 1);
  write(12);
  draw_table(34.0, "13 tokens: the next query sees positions 8 to 13", -1);
  const int stand_in = give_up_hidden_blocks(manager, 0, kWindow);
  draw_table(158.0, "Blocks 7 and 1 are given up, and their places stay", stand_in);
  write(4);
  give_up_hidden_blocks(manager, 0, kWindow);
  draw_table(282.0, "17 tokens: the text has its old block 7 once more", stand_in);
  svg.line({{kLeft, 124.0}, {kRight, 124.0}}, {.hue = Hue::kGrey, .width = 0.7});
  svg.line({{kLeft, 248.0}, {kRight, 248.0}}, {.hue = Hue::kGrey, .width = 0.7});
  svg.legend({kLeft, 394.0}, {{Hue::kBlue, Fill::kSoft, "seen by the next query"},
                              {Hue::kOrange, Fill::kSoft, "its own token"},
                              {Hue::kGrey, Fill::kSoft, "behind the window"},
                              {Hue::kGrey, Fill::kPaper, "nothing: the block stands in"}});
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"run_ahead", "a step's work on host and GPU", draw_run_ahead},
          {"preemption", "three requests in six blocks, step by step", draw_preemption},
          {"swapping", "a sequence leaves for host memory and comes back", draw_swapping},
          {"speculation", "drafts in their slots, accepted and taken back", draw_speculation},
          {"host_cache", "what the pool evicts, kept on the host and brought back", draw_host_cache},
          {"shared_reading", "blocks that two samples share, read apart and together", draw_shared_reading},
          {"reach", "blocks behind the window, given up while their text lives", draw_windows}};
}

}  // namespace
