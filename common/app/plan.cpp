#include "common/app/plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <memory>
#include <system_error>

#include "common/app/cli.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

struct Preset {
  const char* name;
  PoolShape shape;
};

// From config.json of https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf and of
// https://huggingface.co/HuggingFaceTB/SmolLM2-135M; the last one is described in common/model/tales/MODEL.md.
constexpr std::array<Preset, 5> kPresets = {{{"llama-2-7b", {32, 32, 32, 128, 2}},
                                             {"llama-2-13b", {40, 40, 40, 128, 2}},
                                             {"llama-2-70b", {80, 64, 8, 128, 2}},
                                             {"smollm2-135m", {30, 9, 3, 64, 2}},
                                             {"tales-5m", {6, 8, 2, 32, 4}}}};

constexpr Range<std::int64_t> kCounts = {1, std::numeric_limits<std::int32_t>::max()};

void check_range(const char* name, std::int64_t value) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (value < 1 || value > kMost) {
    throw InputError(
        format("%s must be from 1 to %s, not %s", name, std::to_string(kMost).c_str(), std::to_string(value).c_str()));
  }
}

std::int64_t product(std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) {
      throw InputError("the sizes multiply to more than 2^63 - 1 bytes");
    }
  }
  return result;
}

std::int64_t blocks_needed(std::int64_t length, std::int64_t block_size) {
  return (length + block_size - 1) / block_size;
}

void check_shape(const PoolShape& shape) {
  check_range("the number of layers", shape.num_layers);
  check_range("the number of query heads", shape.num_heads);
  check_range("the number of KV heads", shape.num_kv_heads);
  check_range("the head dimension", shape.head_dim);
  check_range("the bytes per element", shape.bytes_per_element);
  check_range("the block size", shape.block_size);
  if (shape.num_heads % shape.num_kv_heads != 0) {
    throw InputError("the number of query heads, " + std::to_string(shape.num_heads) +
                     ", is not a multiple of the number of KV heads, " + std::to_string(shape.num_kv_heads));
  }
}

void check_length(const char* name, std::int64_t length, std::int64_t max_length) {
  check_range(name, length);
  if (length > max_length) {
    throw InputError(std::string(name) + ", " + std::to_string(length) + ", is more than the maximum length, " +
                     std::to_string(max_length));
  }
}

void check_demand(const PoolDemand& demand) {
  check_range("the maximum length", demand.max_length);
  if (demand.lengths.empty()) {
    check_length("the mean length", demand.mean_length, demand.max_length);
  }
  for (const std::int64_t length : demand.lengths) {
    check_length("the length of a sequence", length, demand.max_length);
  }
}

// Sequences of the mix, in turn and again from its start, until one finds too few blocks.
std::int64_t sequences_that_fit(const std::vector<std::int64_t>& lengths, std::int64_t block_size,
                                std::int64_t mix_blocks, std::int64_t num_blocks) {
  std::int64_t sequences = num_blocks / mix_blocks * std::ssize(lengths);
  std::int64_t free_blocks = num_blocks % mix_blocks;
  for (const std::int64_t length : lengths) {
    free_blocks -= blocks_needed(length, block_size);
    if (free_blocks < 0) {
      break;
    }
    ++sequences;
  }
  return sequences;
}

void plan_mix(const PoolShape& shape, const PoolDemand& demand, PoolPlan& plan) {
  for (const std::int64_t length : demand.lengths) {
    const std::int64_t slots = blocks_needed(length, shape.block_size) * shape.block_size;
    plan.mix_tokens += length;
    plan.mix_slots += slots;
    plan.most_unused_slots = std::max(plan.most_unused_slots, slots - length);
    plan.most_unused_reserved_slots = std::max(plan.most_unused_reserved_slots, demand.max_length - length);
  }
  plan.mix_sequences = std::ssize(demand.lengths);
  plan.paged_sequences =
      sequences_that_fit(demand.lengths, shape.block_size, plan.mix_slots / shape.block_size, plan.num_blocks);
}

// If every fill of the last block from 1 to B is as likely, 0 to B - 1 slots are unused: (B - 1) / 2 on average.
void plan_mean(const PoolShape& shape, const PoolDemand& demand, PoolPlan& plan) {
  plan.mix_sequences = 2;
  plan.mix_tokens = 2 * demand.mean_length;
  // Near the ends of the range that cannot be: no sequence takes less than a block, or more than the longest one does.
  const std::int64_t most_slots = blocks_needed(demand.max_length, shape.block_size) * shape.block_size;
  plan.mix_slots = std::clamp(plan.mix_tokens + shape.block_size - 1, 2 * shape.block_size, 2 * most_slots);
  plan.most_unused_slots = shape.block_size - 1;
  plan.most_unused_reserved_slots = demand.max_length - 1;
  // Cannot overflow: a token takes 2 bytes or more, so there are at most memory / 2 slots.
  plan.paged_sequences = 2 * plan.num_slots / plan.mix_slots;
}

std::string preset_names() {
  std::string names;
  for (const Preset& preset : kPresets) {
    names += std::string(names.empty() ? "" : ", ") + preset.name;
  }
  return names;
}

const Preset& find_preset(const std::string& name) {
  const auto* const found =
      std::find_if(kPresets.begin(), kPresets.end(), [&](const Preset& preset) { return name == preset.name; });
  if (found == kPresets.end()) {
    throw InputError("there is no preset " + quote(name) + "; there are " + preset_names());
  }
  return *found;
}

std::int64_t given(std::int64_t option, std::int64_t otherwise) { return option != 0 ? option : otherwise; }

PoolShape shape_of(const PlanOptions& options, const PoolShape& preset) {
  PoolShape shape = preset;
  shape.num_layers = given(options.num_layers, preset.num_layers);
  shape.num_heads = given(options.num_heads, preset.num_heads);
  shape.num_kv_heads = given(options.num_kv_heads, preset.num_kv_heads);
  shape.head_dim = given(options.head_dim, preset.head_dim);
  shape.bytes_per_element = given(options.bytes_per_element, preset.bytes_per_element);
  shape.block_size = options.block_size;
  return shape;
}

PoolShape shape_without_preset(const PlanOptions& options) {
  if (!options.num_layers || !options.num_heads || !options.head_dim) {
    throw InputError("without --preset, a shape needs --layers, --heads and --head-dim");
  }
  PoolShape shape;
  shape.num_kv_heads = options.num_heads;  // multi-head attention, unless --kv-heads says otherwise
  return shape_of(options, shape);
}

// "1.5625 GiB": up to four decimals, since the sizes of a plan are most often exact.
std::string exact_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024.0; value /= 1024.0) {
    ++unit;
  }
  std::string number = format("%.4f", value);
  number.erase(number.find_last_not_of('0') + 1);
  if (number.back() == '.') {
    number.pop_back();
  }
  return number + " " + kUnits[unit];
}

std::string average(std::int64_t sum, std::int64_t count) {
  return format("%.1f", static_cast<double>(sum) / static_cast<double>(count));
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return format_percent(static_cast<double>(part), static_cast<double>(whole));
}

std::string sizes_table(const PoolShape& shape, const PoolDemand& demand, const PoolPlan& plan, bool with_memory) {
  Table table({"KV cache", "size"});
  table.add_row({"a token", exact_bytes(plan.bytes_per_token)});
  if (shape.num_heads != shape.num_kv_heads) {
    table.add_row({"a token, K and V repeated for each query head", exact_bytes(plan.bytes_per_repeated_token)});
  }
  table.add_row({"a block of " + format_count(shape.block_size), exact_bytes(plan.bytes_per_block)});
  table.add_row({"a sequence of " + format_count(demand.max_length), exact_bytes(plan.bytes_per_max_length)});
  if (with_memory) {
    table.add_row({"blocks in the memory", format_count(plan.num_blocks)});
    table.add_row({"tokens in these blocks", format_count(plan.num_slots)});
    table.add_row({"memory that makes no block", exact_bytes(plan.bytes_unused)});
  }
  return table.to_string();
}

std::string demand_name(const PoolDemand& demand, const PoolPlan& plan) {
  if (demand.lengths.empty()) {
    return "sequences of " + format_count(demand.mean_length) + " on average";
  }
  return format_count(plan.mix_sequences) + " sequences of " + format_count(plan.mix_tokens) + " tokens in all";
}

std::string sequences_table(std::int64_t block_size, const PoolDemand& demand, const PoolPlan& plan) {
  const std::int64_t reserved_slots = plan.mix_sequences * demand.max_length;
  Table table({demand_name(demand, plan), "in blocks", "reserved at " + format_count(demand.max_length)});
  table.add_row({"sequences at once", format_count(plan.paged_sequences), format_count(plan.reserved_sequences)});
  if (!demand.lengths.empty()) {
    table.add_row({"blocks of one round of them", format_count(plan.mix_slots / block_size), "-"});
  }
  table.add_row(
      {"slots a sequence", average(plan.mix_slots, plan.mix_sequences), average(reserved_slots, plan.mix_sequences)});
  table.add_row({"unused slots a sequence", average(plan.mix_slots - plan.mix_tokens, plan.mix_sequences),
                 average(reserved_slots - plan.mix_tokens, plan.mix_sequences)});
  table.add_row(
      {"unused slots, at most", format_count(plan.most_unused_slots), format_count(plan.most_unused_reserved_slots)});
  table.add_row({"unused memory, at most", exact_bytes(product({plan.most_unused_slots, plan.bytes_per_token})),
                 exact_bytes(product({plan.most_unused_reserved_slots, plan.bytes_per_token}))});
  table.add_row({"utilisation", percent(plan.mix_tokens, plan.mix_slots), percent(plan.mix_tokens, reserved_slots)});
  return table.to_string();
}

std::string describe(const PoolShape& shape) {
  return format("%s layers, %s query heads, %s KV heads, %s values a head, %s bytes a value",
                format_count(shape.num_layers).c_str(), format_count(shape.num_heads).c_str(),
                format_count(shape.num_kv_heads).c_str(), format_count(shape.head_dim).c_str(),
                format_count(shape.bytes_per_element).c_str());
}

void print_one(const PoolShape& shape, const PlanOptions& options, std::ostream& output) {
  const PoolPlan plan = plan_pool(shape, given(options.memory, 1), options.demand);
  if (options.memory && plan.num_blocks == 0) {
    throw InputError("the memory, " + exact_bytes(options.memory) + ", is less than one block, " +
                     exact_bytes(plan.bytes_per_block));
  }
  output << describe(shape) << "\n\n" << sizes_table(shape, options.demand, plan, options.memory != 0);
  if (options.memory) {
    output << '\n' << sequences_table(shape.block_size, options.demand, plan);
  }
}

void print_presets(const PlanOptions& options, std::ostream& output) {
  std::vector<std::string> header = {"preset",
                                     "layers",
                                     "heads",
                                     "KV heads",
                                     "head_dim",
                                     "bytes",
                                     "a token",
                                     "a block of " + format_count(options.block_size),
                                     "a sequence of " + format_count(options.demand.max_length)};
  if (options.memory) {
    header.insert(header.end(), {"blocks", "sequences in blocks", "reserved"});
  }
  Table table(header);
  for (const Preset& preset : kPresets) {
    const PoolShape shape = shape_of(options, preset.shape);
    const PoolPlan plan = plan_pool(shape, given(options.memory, 1), options.demand);
    std::vector<std::string> row = {preset.name};
    for (const std::int64_t number :
         {shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.bytes_per_element}) {
      row.push_back(std::to_string(number));
    }
    for (const std::int64_t bytes : {plan.bytes_per_token, plan.bytes_per_block, plan.bytes_per_max_length}) {
      row.push_back(exact_bytes(bytes));
    }
    if (options.memory) {
      for (const std::int64_t count : {plan.num_blocks, plan.paged_sequences, plan.reserved_sequences}) {
        row.push_back(format_count(count));
      }
    }
    table.add_row(row);
  }
  output << table.to_string();
}

// "300,1200"
std::vector<std::int64_t> parse_lengths(const std::string& text) {
  std::vector<std::int64_t> lengths;
  const char* const end = text.data() + text.size();
  for (const char* at = text.data();; ++at) {
    const auto [next, error] = std::from_chars(at, end, lengths.emplace_back());
    if (error != std::errc() || (next != end && *next != ',')) {
      throw InputError("the lengths " + quote(text) + " are not whole numbers with commas between them");
    }
    if (next == end) {
      return lengths;
    }
    at = next;
  }
}

void add_plan_options(Command& command, PlanOptions& options) {
  // A function, so that an empty text is an error too, not the same as no option.
  command.option(
      "--preset", [&options](const std::string& name) { options.preset = find_preset(name).name; },
      "a model's shape: " + preset_names());
  command.option("--layers", options.num_layers, kCounts, "layers of the model");
  command.option("--heads", options.num_heads, kCounts, "query heads");
  command.option("--kv-heads", options.num_kv_heads, kCounts, "heads of K and V (default: one for each query head)");
  command.option("--head-dim", options.head_dim, kCounts, "values of a head");
  command.option("--bytes", options.bytes_per_element, kCounts, "bytes of a value (default: 2, as in fp16)");
  command.option("--block-size", options.block_size, kCounts, "slots in a block");
  command.option(
      "--memory", [&options](const std::string& text) { options.memory = parse_memory(text); },
      "for K and V, such as 16GiB, 600MiB or 24e9; weights come on top");
  command.option("--mean-length", options.demand.mean_length, kCounts,
                 "tokens of a sequence, prompt and reply, on average");
  command.option(
      "--lengths", [&options](const std::string& text) { options.demand.lengths = parse_lengths(text); },
      "tokens of each sequence of a mix that repeats, such as 300,1200");
  command.exclude("--lengths", "--mean-length");
  command.option("--max-length", options.demand.max_length, kCounts,
                 "slots that a contiguous cache reserves a sequence");
}

// Bytes in a unit, 0 if there is no such unit.
double unit_bytes(std::string_view unit) {
  if (unit.empty() || unit == "B") {
    return 1.0;
  }
  constexpr std::string_view kPrefixes = "KMGT";
  const std::size_t power = kPrefixes.find(unit.front() == 'k' ? 'K' : unit.front());
  const std::string_view rest = unit.substr(1);
  if (power == std::string_view::npos || (rest != "B" && rest != "iB")) {
    return 0.0;
  }
  return std::pow(rest == "iB" ? 1024.0 : 1000.0, static_cast<double>(power) + 1.0);
}

}  // namespace

PoolPlan plan_pool(const PoolShape& shape, std::int64_t memory, const PoolDemand& demand) {
  check_shape(shape);
  check_demand(demand);
  if (memory < 1) {
    throw InputError("the memory must be at least 1 byte, not " + std::to_string(memory));
  }
  PoolPlan plan;
  plan.bytes_per_token = product({2, shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.bytes_per_element});
  plan.bytes_per_repeated_token = product({plan.bytes_per_token, shape.num_heads / shape.num_kv_heads});
  plan.bytes_per_block = product({plan.bytes_per_token, shape.block_size});
  plan.bytes_per_max_length = product({plan.bytes_per_token, demand.max_length});
  plan.num_blocks = memory / plan.bytes_per_block;
  plan.num_slots = plan.num_blocks * shape.block_size;
  plan.bytes_unused = memory % plan.bytes_per_block;
  plan.reserved_sequences = memory / plan.bytes_per_max_length;
  if (demand.lengths.empty()) {
    plan_mean(shape, demand, plan);
  } else {
    plan_mix(shape, demand, plan);
  }
  return plan;
}

std::int64_t parse_memory(std::string_view text) {
  // strtod and not from_chars, which LLVM's library has had for floats since version 20 only. It reads spaces, signs,
  // "inf" and hexadecimal digits too, none of which is a size.
  const std::string copy(text);
  const bool is_decimal = !copy.empty() && (copy[0] == '.' || (copy[0] >= '0' && copy[0] <= '9')) &&
                          copy.find_first_of("xX") == std::string::npos;
  char* at = nullptr;
  const double number = std::strtod(copy.c_str(), &at);
  std::string_view unit(at);
  unit.remove_prefix(!unit.empty() && unit.front() == ' ' ? 1 : 0);
  const double bytes = is_decimal ? std::floor(number * unit_bytes(unit)) : 0.0;
  // Above 2^53 a double no longer holds every whole number. Infinity, NaN and negative numbers end here too.
  constexpr double kMost = 9007199254740992.0;
  if (!(bytes >= 1.0 && bytes <= kMost)) {
    throw InputError("the memory " + quote(text) + " is not a size such as 16GiB, 600MiB or 24e9, of at most 8 PiB");
  }
  return static_cast<std::int64_t>(bytes);
}

void print_plan(const PlanOptions& options, std::ostream& output) {
  const bool any_shape = options.num_layers || options.num_heads || options.num_kv_heads || options.head_dim;
  if (!options.preset.empty()) {
    print_one(shape_of(options, find_preset(options.preset).shape), options, output);
  } else if (any_shape) {
    print_one(shape_without_preset(options), options, output);
  } else {
    print_presets(options, output);
  }
}

void add_plan(Program& program) {
  const auto options = std::make_shared<PlanOptions>();
  Command& command = program.add_command("plan", "Size a KV cache: bytes a token, blocks, sequences at once",
                                         [options] { print_plan(*options, std::cout); });
  add_plan_options(command, *options);
}

}  // namespace common
