#include "pictures.h"

#include <string>

#include "../kv_cache_manager.h"
#include "common/app/shell.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace stage1 {
namespace {

using common::Box;
using common::Fill;
using common::Hue;
using common::Svg;

constexpr int kWidth = 720;
constexpr double kLeft = 24.0;
constexpr double kSlot = 21.0;  // the width of one
constexpr double kHeight = 44.0;

double x_of(int slot) { return kLeft + kSlot * slot; }

// The arena, slot by slot, with the requests' names and the holes' sizes under it.
void draw_arena(Svg& svg, double y, const KvCacheManager& manager) {
  const int total = manager.usage().total;
  svg.box({kLeft, y, kSlot * total, kHeight});
  for (const SequenceId sequence : manager.sequences()) {
    const Region region = manager.region(sequence);
    const int length = manager.length(sequence);
    const Hue hue = common::owner_hue(sequence);
    svg.box({x_of(region.first), y, kSlot * length, kHeight}, {hue, Fill::kSoft, 0.0, 0.0});
    svg.box({x_of(region.first + length), y, kSlot * (region.size - length), kHeight}, {hue, Fill::kHatched, 0.0, 0.0});
    for (int slot = region.first + 1; slot < region.first + region.size; ++slot) {
      svg.line({{x_of(slot), y}, {x_of(slot), y + kHeight}}, {hue, 0.7});
    }
    const Box whole{x_of(region.first), y, kSlot * region.size, kHeight};
    svg.box(whole, {hue, Fill::kNone, 2.0});
    svg.label({whole.x, whole.bottom() + 4.0, whole.width, 24.0},
              common::format("%c: %d of %d used", common::sequence_name(sequence), length, region.size),
              {.size = 16.0, .hue = hue, .bold = true});
  }
  for (const Region& hole : manager.holes()) {
    const Box box{x_of(hole.first), y, kSlot * hole.size, kHeight};
    svg.label(box, common::format("%d free", hole.size), {.size = 16.0, .hue = Hue::kGrey});
  }
}

void start(KvCacheManager& manager, SequenceId sequence, int reserved, int length) {
  COMMON_CHECK(manager.allocate(sequence, reserved), "the picture's arena has room for it");
  manager.commit(sequence, length);
}

std::string draw_reservations() {
  KvCacheManager manager(32);
  start(manager, 0, 8, 3);
  start(manager, 1, 8, 8);
  start(manager, 2, 8, 2);
  start(manager, 3, 8, 5);
  Svg svg(
      kWidth, 330, "What reservations waste in one arena of 32 slots",
      "Above, four requests have reserved eight neighbouring slots each, and use 3, 8, 2 and 5 of them; the rest is "
      "reserved and empty. Below, A and C "
      "have ended. Sixteen slots are free, in two holes of eight, so that a request for twelve neighbouring slots is "
      "refused.");
  const common::TextStyle heading{.size = 17.0, .bold = true};
  const Usage full = manager.usage();
  svg.text({kLeft, 34.0}, "Reserved and empty", heading);
  svg.text({kWidth - kLeft, 34.0}, common::format("%d of %d reserved slots hold a token", full.used, full.reserved),
           {.size = 16.0, .anchor = common::Anchor::kEnd, .hue = Hue::kGrey});
  draw_arena(svg, 48.0, manager);

  manager.free(0);
  manager.free(2);
  constexpr int kWanted = 12;
  COMMON_CHECK(!manager.allocate(4, kWanted), "the picture shows a request that is refused");
  const Usage holes = manager.usage();
  svg.text({kLeft, 166.0}, "External fragmentation", heading);
  svg.text({kWidth - kLeft, 166.0}, "A and C have ended",
           {.size = 16.0, .anchor = common::Anchor::kEnd, .hue = Hue::kGrey});
  draw_arena(svg, 180.0, manager);
  const Box wanted{x_of(0), 262.0, kSlot * kWanted, 30.0};
  svg.box(wanted, {Hue::kRed, Fill::kNone, 2.0, 3.0, true});
  svg.label(wanted, common::format("E needs %d in a row", kWanted), {.size = 16.0, .hue = Hue::kRed, .bold = true});
  svg.text({wanted.right() + 12.0, 282.0},
           common::format("refused, though %d slots are free", holes.total - holes.reserved),
           {.size = 16.0, .hue = Hue::kRed});
  svg.legend({kLeft, 316.0}, {{Hue::kBlue, Fill::kSoft, "holds a token"},
                              {Hue::kBlue, Fill::kHatched, "reserved, not used"},
                              {Hue::kGrey, Fill::kSoft, "free"}});
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"reservations", "what reservations waste, inside and between requests", draw_reservations}};
}

}  // namespace
