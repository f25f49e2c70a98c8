// build/kernel_count: what the steps of the ladder ask of memory, counted while the executor runs them. Needs no GPU;
// the numbers are the same on every machine. `scene` prints what one warp loads, load by load, for the course's site.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/executor/counts.h"
#include "tests/counts/warp_loads.h"
#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_ladder_pages.h"

namespace {

using common::executor::Counts;

struct Options {
  int step = 0;  // 0: all
  int context = 1024;
  int group = 4;
};

struct SceneOptions {
  std::string name;
  bool record = false;
};

std::string per(std::int64_t count, std::int64_t of) {
  return common::format("%.2f", static_cast<double>(count) / static_cast<double>(of));
}

Counts count_step(const stage::LadderStep& step, const tests::GpuBatch& batch, const tests::PagesInOrder& pages) {
  return common::executor::count([&] { (void)tests::run_step(step, batch, pages); });
}

void print_table(const std::vector<std::pair<std::string, Counts>>& rows, const Options& options) {
  // Of K and V together: what attention has to read once.
  const std::int64_t kv_bytes = std::int64_t{2} * options.context * 128 * 2;
  common::Table table({"step", "bytes loaded", "of K and V", "requests", "sectors of one", "shared passes", "conflicts",
                       "shuffles", "mma", "barriers"});
  for (const auto& [name, counts] : rows) {
    const std::int64_t loaded = 32 * counts.global_loads.units + counts.bulk_bytes;
    table.add_row({name, common::format_count(loaded), per(loaded, kv_bytes),
                   common::format_count(counts.global_loads.requests + counts.bulk_copies),
                   per(counts.global_loads.units, counts.global_loads.requests),
                   common::format_count(counts.shared_loads.units + counts.shared_stores.units),
                   common::format_count(counts.bank_conflicts()), common::format_count(counts.shuffles),
                   common::format_count(counts.matrix_products), common::format_count(counts.barriers)});
  }
  std::cout << table.to_string();
}

void print_requests(common::Table& table, const char* name, const common::executor::Requests& requests) {
  if (requests.requests > 0) {
    table.add_row({name, common::format_count(requests.requests), common::format_count(requests.bytes),
                   common::format_count(requests.units), per(requests.units, requests.requests),
                   common::format_count(requests.ideal)});
  }
}

void print_step(const std::string& name, const Counts& counts) {
  std::cout << name << "\n\n";
  common::Table requests(
      {"a warp's requests", "number", "bytes", "sectors or passes", "of a request", "fewest possible"});
  print_requests(requests, "global loads", counts.global_loads);
  print_requests(requests, "global stores", counts.global_stores);
  print_requests(requests, "shared loads", counts.shared_loads);
  print_requests(requests, "shared stores", counts.shared_stores);
  std::cout << requests.to_string() << "\n";
  common::Table instructions({"a warp's instructions", "number"});
  for (const auto& [what, number] : {std::pair{"shuffles", counts.shuffles},
                                     {"votes", counts.votes},
                                     {"ldmatrix", counts.matrix_loads},
                                     {"mma", counts.matrix_products},
                                     {"barriers of a thread block", counts.barriers},
                                     {"bulk copies", counts.bulk_copies},
                                     {"bytes of bulk copies", counts.bulk_bytes},
                                     {"16-byte copies of a thread", counts.async_copies},
                                     {"bytes read, each sector once", counts.distinct_bytes}}) {
    if (number > 0) {
      instructions.add_row({what, common::format_count(number)});
    }
  }
  std::cout << instructions.to_string();
}

// As the stages' programs print theirs (common/app/scene.h). Returns whether there is such a scene.
bool print_scenes(const SceneOptions& options, const tests::GpuBatch& batch, const tests::PagesInOrder& pages) {
  const std::vector<tests::WarpScene> scenes = tests::warp_scenes(batch, pages);
  if (options.record) {
    nlohmann::ordered_json record;
    for (const tests::WarpScene& scene : scenes) {
      record[scene.name] = {{"title", scene.title}, {"states", scene.states}};
    }
    std::cout << record.dump() << '\n';
    return true;
  }
  const auto found = std::find_if(scenes.begin(), scenes.end(),
                                  [&](const tests::WarpScene& scene) { return scene.name == options.name; });
  if (found == scenes.end()) {
    std::cerr << "error: no scene " << common::quote(options.name) << "; there are: " << scenes.front().name << " to "
              << scenes.back().name << '\n';
    return false;
  }
  for (const nlohmann::ordered_json& state : found->states) {
    std::cout << state.dump() << '\n';
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Counts what the ladder's kernels ask of memory, without a GPU.", "kernel_count");
  Options options;
  const int num_steps = static_cast<int>(stage::ladder().size());
  app.add_option("--step", options.step, "this step only, in detail")->check(CLI::Range(1, num_steps));
  app.add_option("--context", options.context, "tokens of the one sequence")
      ->check(CLI::Range(1, 16384))
      ->capture_default_str();
  app.add_option("--group", options.group, "query heads that share the one kv head")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  SceneOptions scene_options;
  CLI::App* scene = app.add_subcommand("scene", "What a warp of a step loads, load by load: a line of JSON for each");
  CLI::Option* name = scene->add_option("name", scene_options.name, "warp-loads-1 to warp-loads-7");
  scene->add_flag("--record", scene_options.record, "all of them in one document, for the course's site")
      ->excludes(name);
  CLI11_PARSE(app, argc, argv);
  if (!common::executor::can_count()) {
    std::cerr << "error: under a sanitizer, accesses are not counted\n";
    return 1;
  }
  const tests::GpuBatch batch(
      {.num_kv_heads = 1, .group = options.group, .context_lengths = {options.context}, .query_lengths = {}});
  const tests::PagesInOrder pages(batch);
  if (*scene) {
    return print_scenes(scene_options, batch, pages) ? 0 : 2;
  }
  std::cout << "One sequence of " << common::format_count(options.context) << " tokens, " << options.group
            << " query heads that share one kv head of 128 dimensions, bfloat16.\n\n";
  std::vector<std::pair<std::string, Counts>> rows;
  for (int i = 1; i <= num_steps; ++i) {
    if (options.step == 0 || options.step == i) {
      const stage::LadderStep& step = stage::ladder()[static_cast<std::size_t>(i - 1)];
      rows.emplace_back(step.name, count_step(step, batch, pages));
    }
  }
  if (options.step == 0) {
    print_table(rows, options);
  } else {
    print_step(rows.front().first, rows.front().second);
  }
  return 0;
}
