#include "common/app/bench.h"

#include <algorithm>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/math/sampling.h"

namespace common {
namespace {

Token argmax_token(const Matrix& logits) { return argmax({logits.data(), static_cast<std::size_t>(logits.cols())}); }

template <typename Result>
std::optional<Result> require(std::optional<Result> result) {
  if (!result.has_value()) {
    throw InputError("the cache is too small for this many tokens");
  }
  return result;
}

// Seconds per layer: the fastest of several rounds over all layers, because disturbances only add time.
double fastest_layer(int num_layers, const std::function<void(int layer)>& run) {
  constexpr double kSeconds = 0.5;
  double fastest = std::numeric_limits<double>::infinity();
  const double begin = now_seconds();
  for (int round = 0; round < 3 || now_seconds() - begin < kSeconds; ++round) {
    const double start = now_seconds();
    for (int layer = 0; layer < num_layers; ++layer) {
      run(layer);
    }
    fastest = std::min(fastest, (now_seconds() - start) / num_layers);
  }
  return fastest;
}

std::string gigabytes_per_second(double bytes_per_second) { return format("%.1f GB/s", bytes_per_second / 1e9); }

}  // namespace

void print_speed(const Llama& model, const BenchTarget& target, int prompt_tokens, int new_tokens,
                 double load_seconds) {
  Random random(1);
  std::vector<Token> prompt;
  prompt.reserve(static_cast<std::size_t>(prompt_tokens));
  for (int i = 0; i < prompt_tokens; ++i) {
    prompt.push_back(static_cast<Token>(random.below(static_cast<std::uint64_t>(model.config().vocab_size))));
  }
  // The first run warms up caches and clocks. The fastest one counts, because disturbances only add time.
  constexpr int kRuns = 4;
  Progress progress("measuring", std::int64_t{kRuns} * new_tokens);
  double prefill_seconds = std::numeric_limits<double>::infinity();
  double decode_seconds = prefill_seconds;
  for (int run = 0; run < kRuns; ++run) {
    double start = now_seconds();
    double prefilled = 0.0;
    bool has_room = true;
    if (target.serve) {
      const auto on_token = [&] {
        if (prefilled == 0.0) {
          prefilled = now_seconds();
        } else {
          progress.advance();
        }
      };
      has_room = target.serve(prompt, 1 + new_tokens, on_token);
    } else if (has_room = target.start(prompt_tokens + new_tokens); has_room) {
      start = now_seconds();
      const std::optional<Matrix> logits = require(target.append(prompt));
      prefilled = now_seconds();
      Token token = argmax_token(*logits);
      for (int i = 0; i < new_tokens; ++i) {
        token = target.decode ? *require(target.decode(token)) : argmax_token(*require(target.append({&token, 1})));
        progress.advance();
      }
    }
    if (!has_room) {
      throw InputError(format("the cache is too small for %d + %d tokens; --slots %d would do", prompt_tokens,
                              new_tokens, prompt_tokens + new_tokens));
    }
    prefill_seconds = std::min(prefill_seconds, prefilled - start);
    decode_seconds = std::min(decode_seconds, now_seconds() - prefilled);
  }
  progress.clear();

  const std::int64_t peak_bytes = peak_resident_bytes();  // before the next line allocates its buffer
  const std::optional<ReadLimit> limit = target.read_limit ? target.read_limit() : std::nullopt;
  const double bandwidth = limit ? limit->bytes_per_second : measure_read_bandwidth(num_threads());
  const auto weight_bytes = static_cast<double>(limit ? limit->weight_bytes : model.weight_bytes_per_token());
  std::int64_t num_reads = 0;
  for (int i = 1; i <= new_tokens; ++i) {
    num_reads += model.config().num_reads(prompt_tokens + i, 1);
  }
  const double tokens_read = static_cast<double>(num_reads) / (1.0 * new_tokens * model.config().num_layers);
  const double kv_bytes = tokens_read * static_cast<double>(target.kv_bytes_per_token);
  const double decode_rate = new_tokens / decode_seconds;
  const double read_rate = decode_rate * (weight_bytes + kv_bytes);
  Table table({"measured", "value"});
  table.add_row({"threads", std::to_string(num_threads())});
  table.add_row({"start-up: map the file, check its weights", format("%.0f ms", 1e3 * load_seconds)});
  table.add_row(
      {format("prefill of %d tokens", prompt_tokens), format("%.1f tokens/s", prompt_tokens / prefill_seconds)});
  table.add_row({format("decode of %d tokens after it", new_tokens), format("%.1f tokens/s", decode_rate)});
  table.add_row({"weights read a token", format_bytes(static_cast<std::int64_t>(weight_bytes))});
  table.add_row({"keys and values read a token", format_bytes(static_cast<std::int64_t>(kv_bytes))});
  table.add_row({"decode reads", gigabytes_per_second(read_rate)});
  table.add_row({"this machine can read", gigabytes_per_second(bandwidth)});
  table.add_row({"share", format_percent(read_rate, bandwidth)});
  table.add_row({"most memory resident", format_bytes(peak_bytes)});
  std::cout << table.to_string();
}

void print_attention_speed(const std::function<AttentionTarget(const AttentionShape&)>& make_target, int max_context) {
  set_num_threads(1);
  constexpr double kColdBytes = 512e6;  // K and V of all layers: far more than any cache
  const double bandwidth = measure_read_bandwidth(1);
  Random random(1);
  AttentionShape shape{1, 32, 8, 128, 0};  // one layer of Llama-3-8B
  Matrix q(1, shape.num_heads * shape.head_dim);
  std::generate_n(q.data(), q.size(), [&] { return static_cast<float>(random.normal()); });
  std::vector<std::vector<std::string>> rows;
  Progress progress("measuring", 0);
  for (int context = 64; context <= max_context; context *= 2) {
    shape.context_length = context;
    const double repeated_bytes = 2.0 * context * shape.num_heads * shape.head_dim * sizeof(float);
    shape.num_layers = std::max(2, static_cast<int>(kColdBytes / repeated_bytes));
    const AttentionTarget target = make_target(shape);
    const double seconds = fastest_layer(shape.num_layers, [&](int layer) { target.attend(layer, q); });
    const double rate = static_cast<double>(target.bytes) / seconds;
    rows.push_back({std::to_string(context), format_bytes(target.bytes), format("%.1f", 1e6 * seconds),
                    format("%.1f", rate / 1e9), format_percent(rate, bandwidth)});
    if (target.copy) {
      rows.back().push_back(format_percent(fastest_layer(shape.num_layers, target.copy), seconds));
    }
    progress.advance();
  }
  progress.clear();

  // One layer again and again: what is left of the time when nothing is read from memory.
  shape.num_layers = 1;
  shape.context_length = 32;  // at most 1 MiB
  const AttentionTarget cached = make_target(shape);
  const double cached_seconds = fastest_layer(1, [&](int layer) { cached.attend(layer, q); });
  const auto a_token = [&](double seconds) { return format("%.2f us a token", 1e6 * seconds / shape.context_length); };
  std::vector<std::string> header = {"context", "KV bytes", "us a call", "GB/s", "of read bandwidth"};
  if (cached.copy) {
    header.emplace_back("spent copying");
  }
  Table table(header);
  for (const std::vector<std::string>& row : rows) {
    table.add_row(row);
  }
  std::cout << table.to_string() << "this thread can read " << gigabytes_per_second(bandwidth) << ", that is "
            << a_token(static_cast<double>(cached.bytes) / bandwidth)
            << "; with K and V in the processor's cache: " << a_token(cached_seconds) << '\n';
}

void print_block_size_sweep(const std::function<BlockSizeRow(int block_size)>& run) {
  Table table({"block size", "slots reserved", "slots used", "waste", "waste a request", "(B-1)/2", "block table bytes",
               "ms per token"});
  constexpr int kMaxBlockSize = 256;
  Progress progress("measuring", 9);
  for (int block_size = 1; block_size <= kMaxBlockSize; block_size *= 2) {
    const BlockSizeRow row = run(block_size);
    const double wasted = row.slots_reserved - row.slots_used;
    table.add_row({std::to_string(block_size), format("%.1f", row.slots_reserved), format("%.1f", row.slots_used),
                   format_percent(wasted, row.slots_reserved), format("%.1f", wasted / row.requests_held),
                   format("%.1f", (block_size - 1) / 2.0),
                   format("%.0f", row.slots_reserved / block_size * static_cast<double>(sizeof(int))),
                   format("%.2f", row.milliseconds_per_token)});
    progress.advance();
  }
  progress.clear();
  std::cout << table.to_string();
}

}  // namespace common
