#include "pictures.h"

#include <string>
#include <vector>

#include "../kv_cache.h"
#include "common/base/text.h"

namespace stage4 {
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

// The bundled model's heads, and two queries of one sequence, in a block of four tokens.
std::string draw_groups() {
  const KvCacheShape shape{
      .num_layers = 6, .num_blocks = 8, .block_size = 4, .num_heads = 8, .num_kv_heads = 2, .head_dim = 32};
  const int group = shape.num_queries_per_kv();
  constexpr int kNumQueries = 2;
  Svg svg(
      kWidth, 520, "Grouped-query attention: a group of query heads reads one key/value head",
      "Above, eight query heads in two groups of four; each group shares one key/value head. Below, the product for "
      "key/value head 1: the query heads 4 to 7 of two queries are the eight rows of one matrix, which is multiplied "
      "with the keys of one block, read once.");
  const common::TextStyle heading{.size = 17.0, .bold = true};
  const common::TextStyle caption{.size = 15.0, .hue = Hue::kGrey};
  svg.text({kLeft, 34.0}, common::format("%d query heads, %d key/value heads", shape.num_heads, shape.num_kv_heads),
           heading);
  constexpr double kHead = 70.0;
  const double pitch = (kRight - kLeft - kHead) / (shape.num_heads - 1);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const Hue hue = common::owner_hue(kv_head);
    const double first = kLeft + pitch * kv_head * group;
    const double last = first + pitch * (group - 1) + kHead;
    const Box shared{(first + last) / 2.0 - 90.0, 140.0, 180.0, 40.0};
    for (int i = 0; i < group; ++i) {
      const int head = kv_head * group + i;
      const Box box{kLeft + pitch * head, 48.0, kHead, 40.0};
      svg.box(box, {hue, Fill::kPaper, 2.0, 6.0});
      svg.label(box, common::format("Q %d", head), {.size = 18.0, .hue = hue, .bold = true});
      svg.curve(box.bottom_middle(), {shared.x + shared.width * (i + 0.5) / group, shared.y - 2.0},
                {.hue = hue, .width = 2.0, .arrow = true});
    }
    svg.box(shared, {hue, Fill::kSoft, 2.0, 6.0});
    svg.label(shared, common::format("K, V %d", kv_head), {.size = 18.0, .hue = hue, .bold = true});
  }

  const int kv_head = 1;
  const Hue hue = common::owner_hue(kv_head);
  constexpr double kTop = 290.0;
  constexpr double kRow = 24.0;
  const int num_rows = kNumQueries * group;
  const double height = kRow * num_rows;
  svg.text({kLeft, 228.0}, common::format("One product for each key/value head and block: here head %d", kv_head),
           heading);
  svg.text({kLeft, 252.0}, common::format("row = query x %d + i is query head %d x %d + i", group, kv_head, group),
           caption);
  const Box queries{194.0, kTop, 128.0, height};
  const Box keys{382.0, kTop + (height - 128.0) / 2.0, 4.0 * 30.0, 128.0};
  const Box scores{562.0, kTop, 4.0 * 30.0, height};
  for (int row = 0; row < num_rows; ++row) {
    const int query = row / group;
    const int head = kv_head * group + row % group;
    const double y = kTop + kRow * row;
    svg.text({queries.x - 10.0, y + 17.0}, common::format("query %d, head %d", query, head),
             {.size = 15.0, .anchor = Anchor::kEnd, .hue = query == 0 ? Hue::kInk : Hue::kGrey});
    svg.box({queries.x, y, queries.width, kRow}, {hue, Fill::kPaper, 1.0, 0.0});
    svg.cells({scores.x, y, scores.width, kRow}, std::vector<Cell>(4, {hue, Fill::kPaper, ""}),
              {.hue = hue, .line_width = 1.0, .radius = 0.0}, {.size = 13.0});
  }
  for (const Box& rows : {queries, scores}) {
    for (int query = 1; query < kNumQueries; ++query) {
      const double y = kTop + kRow * group * query;
      svg.line({{rows.x, y}, {rows.right(), y}}, {.hue = hue, .width = 3.0});
    }
  }
  svg.box(queries, {hue, Fill::kNone, 2.0});
  svg.box(scores, {hue, Fill::kNone, 2.0});
  svg.cells(keys, std::vector<Cell>(4, {hue, Fill::kSoft, ""}), {.hue = hue, .line_width = 2.0}, {.size = 13.0});
  svg.text({(queries.right() + keys.x) / 2.0, kTop + height / 2.0 + 8.0}, "x",
           {.size = 24.0, .anchor = Anchor::kMiddle});
  svg.text({(keys.right() + scores.x) / 2.0, kTop + height / 2.0 + 8.0}, "=",
           {.size = 24.0, .anchor = Anchor::kMiddle});
  const auto under = [&](const Box& box, const std::string& what, const std::string& size) {
    svg.label({box.x - 30.0, kTop - 28.0, box.width + 60.0, 20.0}, what, {.size = 16.0, .bold = true});
    svg.label({box.x - 30.0, kTop + height + 4.0, box.width + 60.0, 22.0}, size, {.size = 15.0, .hue = Hue::kGrey});
  };
  under(queries, "queries", common::format("%d x %d", num_rows, shape.head_dim));
  under(keys, "keys of a block", common::format("%d x %d, read once", shape.head_dim, shape.block_size));
  under(scores, "scores", common::format("%d x %d", num_rows, shape.block_size));
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"groups", "query heads in groups, and the product of a group with a block", draw_groups}};
}

}  // namespace
