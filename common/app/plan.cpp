#include "common/app/plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>

#include "common/app/command.h"
#include "common/app/session.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/gguf.h"
#include "common/model/presets.h"

namespace common {
namespace {

// The limits of the options and of a LlamaConfig keep all products below 2^63 bytes.
constexpr Range<std::int64_t> kLengths = {1, 1 << 26};
constexpr Range<std::int64_t> kBlockSizes = {1, 1 << 20};
constexpr Range<std::int64_t> kElementBytes = {1, 8};

struct PlanOptions {
  std::string preset;
  std::string model_path;
  std::int64_t bytes_per_element = 0;  // 0: the preset's
  std::int64_t block_size = PoolShape().block_size;
  std::int64_t memory = 0;  // bytes; 0: print sizes only
  PoolDemand demand;
};

std::int64_t blocks_needed(std::int64_t length, std::int64_t block_size) {
  return (length + block_size - 1) / block_size;
}

void check_length(std::int64_t length, std::int64_t max_length) {
  if (length < 1 || length > max_length) {
    throw UsageError("a length of " + std::to_string(length) + " is not from 1 to the maximum length, " +
                     std::to_string(max_length) + " (--max-length)");
  }
}

// Adds sequences of the mix in turn, starting over at its end, until one does not fit.
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
  std::int64_t mix_blocks = 0;
  for (const std::int64_t length : demand.lengths) {
    check_length(length, demand.max_length);
    plan.mix_tokens += length;
    mix_blocks += blocks_needed(length, shape.block_size);
  }
  plan.mix_sequences = std::ssize(demand.lengths);
  plan.mix_slots = mix_blocks * shape.block_size;
  plan.paged_sequences = sequences_that_fit(demand.lengths, shape.block_size, mix_blocks, plan.num_blocks);
}

// A last block holds 1 to B tokens. If all are equally likely, (B - 1) / 2 of its slots are unused on average.
void plan_mean(const PoolShape& shape, const PoolDemand& demand, PoolPlan& plan) {
  check_length(demand.mean_length, demand.max_length);
  plan.mix_sequences = 2;
  plan.mix_tokens = 2 * demand.mean_length;
  // Near the ends of the range they are not equally likely: a sequence takes at least a block, and at most what the
  // longest one takes.
  const std::int64_t max_slots = blocks_needed(demand.max_length, shape.block_size) * shape.block_size;
  plan.mix_slots = std::clamp(plan.mix_tokens + shape.block_size - 1, 2 * shape.block_size, 2 * max_slots);
  plan.paged_sequences = 2 * plan.num_slots / plan.mix_slots;
}

PoolShape shape_of(const PlanOptions& options, const LlamaConfig& model, int bytes_per_element) {
  return {model, options.bytes_per_element != 0 ? options.bytes_per_element : bytes_per_element, options.block_size};
}

std::string average(std::int64_t sum, std::int64_t count) {
  return format("%.1f", static_cast<double>(sum) / static_cast<double>(count));
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return format_percent(static_cast<double>(part), static_cast<double>(whole));
}

// The bytes of the blocks that hold what the token after `length` tokens sees, in all layers, wherever its windows
// begin.
std::int64_t bytes_seen(const PoolShape& shape, std::int64_t bytes_per_block, std::int64_t length) {
  const LlamaConfig& model = shape.model;
  const std::int64_t all = blocks_needed(length, shape.block_size);
  std::int64_t blocks = 0;  // of one layer each
  for (int layer = 0; layer < model.num_layers; ++layer) {
    const std::int64_t window = model.window_of(layer);
    blocks += window == 0 ? all : std::min(all, (window + shape.block_size - 2) / shape.block_size + 1);
  }
  return bytes_per_block / model.num_layers * blocks;
}

void print_sizes(const PoolShape& shape, const PoolDemand& demand, const PoolPlan& plan, bool with_memory) {
  const LlamaConfig& model = shape.model;
  std::cout << format("%d layers, %d query heads, %d KV heads, %d values per head, %d bytes per value\n\n",
                      model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim,
                      static_cast<int>(shape.bytes_per_element));
  Table table({"KV cache", "size"});
  table.add_row({"a token", format_bytes(plan.bytes_per_token)});
  if (model.num_queries_per_kv() > 1) {
    table.add_row(
        {"a token, repeated for each query head", format_bytes(plan.bytes_per_token * model.num_queries_per_kv())});
  }
  table.add_row({"a block of " + format_count(shape.block_size), format_bytes(plan.bytes_per_block)});
  table.add_row({"a sequence of " + format_count(demand.max_length), format_bytes(plan.bytes_per_max_length)});
  if (plan.bytes_seen < plan.bytes_per_max_length) {
    table.add_row({"of these, in blocks that a window reaches", format_bytes(plan.bytes_seen)});
  }
  if (with_memory) {
    table.add_row({"blocks in the memory", format_count(plan.num_blocks)});
    table.add_row({"tokens in these blocks", format_count(plan.num_slots)});
  }
  std::cout << table.to_string();
}

void print_sequences(const PoolDemand& demand, const PoolPlan& plan) {
  const std::int64_t reserved_slots = plan.mix_sequences * demand.max_length;
  Table table({demand.lengths.empty() ? "sequences of " + format_count(demand.mean_length) + " on average"
                                      : format_count(plan.mix_sequences) + " sequences of " +
                                            format_count(plan.mix_tokens) + " tokens in all",
               "in blocks", "reserved at " + format_count(demand.max_length)});
  table.add_row({"sequences at once", format_count(plan.paged_sequences), format_count(plan.reserved_sequences)});
  table.add_row(
      {"slots per sequence", average(plan.mix_slots, plan.mix_sequences), average(reserved_slots, plan.mix_sequences)});
  table.add_row({"unused slots per sequence", average(plan.mix_slots - plan.mix_tokens, plan.mix_sequences),
                 average(reserved_slots - plan.mix_tokens, plan.mix_sequences)});
  table.add_row({"utilisation", percent(plan.mix_tokens, plan.mix_slots), percent(plan.mix_tokens, reserved_slots)});
  std::cout << '\n' << table.to_string();
}

void print_one(const PoolShape& shape, const PlanOptions& options) {
  const PoolPlan plan = plan_pool(shape, options.memory, options.demand);
  if (options.memory != 0 && plan.num_blocks == 0) {
    throw InputError("the memory, " + format_bytes(options.memory) + ", is less than one block, " +
                     format_bytes(plan.bytes_per_block));
  }
  print_sizes(shape, options.demand, plan, options.memory != 0);
  if (options.memory != 0) {
    print_sequences(options.demand, plan);
  }
}

void print_presets(const PlanOptions& options) {
  std::vector<std::string> header = {"preset",
                                     "layers",
                                     "heads",
                                     "KV heads",
                                     "head_dim",
                                     "bytes",
                                     "a token",
                                     "a block of " + format_count(options.block_size),
                                     "a sequence of " + format_count(options.demand.max_length)};
  if (options.memory != 0) {
    header.insert(header.end(), {"sequences in blocks", "reserved"});
  }
  Table table(header);
  for (const Preset& preset : presets()) {
    const LlamaConfig& model = preset.config;
    const PoolShape shape = shape_of(options, model, preset.bytes_per_kv_element);
    const PoolPlan plan = plan_pool(shape, options.memory, options.demand);
    std::vector<std::string> row = {preset.name,
                                    std::to_string(model.num_layers),
                                    std::to_string(model.num_heads),
                                    std::to_string(model.num_kv_heads),
                                    std::to_string(model.head_dim),
                                    std::to_string(shape.bytes_per_element),
                                    format_bytes(plan.bytes_per_token),
                                    format_bytes(plan.bytes_per_block),
                                    format_bytes(plan.bytes_per_max_length)};
    if (options.memory != 0) {
      row.insert(row.end(), {format_count(plan.paged_sequences), format_count(plan.reserved_sequences)});
    }
    table.add_row(row);
  }
  std::cout << table.to_string();
}

void print_plan(const PlanOptions& options) {
  if (!options.model_path.empty()) {
    print_one(shape_of(options, Llama::read_config(Gguf::open(options.model_path)), 2), options);
  } else if (!options.preset.empty()) {
    const Preset& preset = find_preset(options.preset);
    print_one(shape_of(options, preset.config, preset.bytes_per_kv_element), options);
  } else {
    print_presets(options);
  }
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
  const LlamaConfig& model = shape.model;
  PoolPlan plan;
  plan.bytes_per_token =
      std::int64_t{2} * model.num_layers * model.num_kv_heads * model.head_dim * shape.bytes_per_element;
  plan.bytes_per_block = plan.bytes_per_token * shape.block_size;
  plan.bytes_per_max_length = plan.bytes_per_token * demand.max_length;
  plan.bytes_seen = bytes_seen(shape, plan.bytes_per_block, demand.max_length);
  plan.num_blocks = memory / plan.bytes_per_block;
  plan.num_slots = plan.num_blocks * shape.block_size;
  plan.reserved_sequences = memory / plan.bytes_per_max_length;
  if (demand.lengths.empty()) {
    plan_mean(shape, demand, plan);
  } else {
    plan_mix(shape, demand, plan);
  }
  return plan;
}

std::int64_t parse_memory(std::string_view text) {
  // strtod instead of from_chars, which LLVM's library supports for floats only since version 20. It also accepts
  // blanks, signs, "inf" and hexadecimal digits, none of which is a size.
  const std::string copy(text);
  const bool is_decimal = !copy.empty() && (copy[0] == '.' || (copy[0] >= '0' && copy[0] <= '9')) &&
                          copy.find_first_of("xX") == std::string::npos;
  char* at = nullptr;
  const double number = std::strtod(copy.c_str(), &at);
  std::string_view unit(at);
  unit.remove_prefix(!unit.empty() && unit.front() == ' ' ? 1 : 0);
  const double bytes = is_decimal ? std::floor(number * unit_bytes(unit)) : 0.0;
  constexpr double kMaxBytes = 9007199254740992.0;  // 2^53: above it a double does not hold every whole number
  if (!(bytes >= 1.0 && bytes <= kMaxBytes)) {
    throw InputError("the memory " + quote(text) + " is not a size such as 16GiB, 600MiB or 24e9, of at most 8 PiB");
  }
  return static_cast<std::int64_t>(bytes);
}

void add_plan(CommandLine& command_line) {
  const auto shared_options = std::make_shared<PlanOptions>();
  PlanOptions& options = *shared_options;
  Command& command =
      command_line.add("plan", "Plan a KV cache: bytes per token, blocks, and how many sequences fit at once",
                       [shared_options] { print_plan(*shared_options); });
  // A function, so that an empty text is an error too.
  command.option(
      "--preset", [&options](const std::string& name) { options.preset = find_preset(name).name; },
      "a published model: " + preset_names() + " (default: all)");
  command.file("--model", options.model_path, kLoadableModels);
  command.exclude("--model", "--preset");
  command.option("--bytes", options.bytes_per_element, kElementBytes,
                 "bytes of a stored value (default: 2, as in fp16; 4 for tales-5m)");
  command.option("--block-size", options.block_size, kBlockSizes, "slots in a block");
  command.option(
      "--memory", [&options](const std::string& text) { options.memory = parse_memory(text); },
      "size of the cache, such as 16GiB, 600MiB or 24e9; weights are not included");
  command.option("--mean-length", options.demand.mean_length, kLengths,
                 "mean number of tokens of a sequence, prompt and reply");
  command.option(
      "--lengths", [&options](const std::string& text) { options.demand.lengths = parse_lengths(text); },
      "tokens of each sequence of a mix that repeats, such as 300,1200");
  command.exclude("--lengths", "--mean-length");
  command.option("--max-length", options.demand.max_length, kLengths,
                 "slots that a contiguous cache reserves for each sequence");
}

}  // namespace common
