// The Llama forward pass, compared with an independent one: float64, plain loops, reading the tensors of the same file.
// Attention comes from reference_decoder.h, so nothing here depends on a stage.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/app/workload.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/product.h"
#include "common/math/sampling.h"
#include "common/model/default_model.h"
#include "common/model/dequantize.h"
#include "common/model/gguf.h"
#include "common/model/linear.h"
#include "common/model/llama.h"
#include "common/model/presets.h"
#include "common/model/tokenizer.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/messages.h"
#include "tests/support/paths.h"
#include "tests/support/quantised_rows.h"
#include "tests/support/reference_decoder.h"
#include "tests/support/sanitizers.h"
#include "tests/support/thread_count.h"
#include "tests/support/tiny_llama.h"

using common::CheckError;
using common::Gguf;
using common::InputError;
using common::Llama;
using common::LlamaConfig;
using common::Matrix;
using common::Random;
using common::TensorType;
using common::Token;
using common::Windows;
using tests::Bytes;
using tests::contains;
using tests::error_of;
using tests::GgufBuilder;
using tests::ReferenceCache;
using tests::SlowLlama;
using tests::source_path;
using tests::ThreadCount;
using tests::TinyModel;

namespace {

// Logits here are of size 20 and below, and a float32 forward pass was measured within 4e-5 of float64: each of some 40
// products and norms on the way to a logit adds a relative error of a few 2^-24. The bound leaves room for processors
// that add in another order, and is a hundredth of the smallest margin that the workload may have.
constexpr tests::Tolerance kRounding{1e-4, 1e-5};

// What compare() and refusal() return if all is well. Comparing with it makes a failed CHECK print what they returned.
const std::string kNoComplaint;

std::span<const float> all_of(const Matrix& matrix) { return {matrix.data(), static_cast<std::size_t>(matrix.size())}; }

const Gguf& bundled_file() {
  static const Gguf file = Gguf::parse(common::default_model(), "the bundled model");
  return file;
}

const Llama& bundled_model() {
  static const Llama model(bundled_file());
  return model;
}

std::vector<Token> random_tokens(Random& random, int count, int vocab_size) {
  std::vector<Token> tokens(static_cast<std::size_t>(count));
  std::generate(tokens.begin(), tokens.end(),
                [&] { return static_cast<Token>(random.below(static_cast<std::uint64_t>(vocab_size))); });
  return tokens;
}

// Checks a whole sequence in one pass, and again in chunks, against the independent forward pass.
void check_against_float64(const Gguf& file, std::span<const Token> tokens) {
  const Llama model(file, Windows::kComputed);
  const std::vector<double> expected = SlowLlama(file).logits(tokens);
  ReferenceCache whole(model.config());
  CHECK(tests::compare(all_of(tests::next_logits(model, whole, tokens)), expected, kRounding) == kNoComplaint);

  ReferenceCache cache(model.config());
  Matrix logits;
  const auto vocab_size = static_cast<std::size_t>(model.config().vocab_size);
  for (const std::size_t chunk : {std::size_t{3}, std::size_t{1}, std::size_t{6}, tokens.size() - 10}) {
    const auto begin = static_cast<std::size_t>(cache.length());
    logits = tests::next_logits(model, cache, tokens.subspan(begin, chunk));
    CAPTURE(begin, chunk);
    const auto expected_rows = std::span(expected).subspan(begin * vocab_size, chunk * vocab_size);
    CHECK(tests::compare(all_of(logits), expected_rows, kRounding) == kNoComplaint);
  }
  CHECK(cache.length() == static_cast<int>(tokens.size()));
}

void check_against_float64(const TinyModel& tiny) {
  const Bytes bytes = tiny.builder().build();
  Random random(3);
  check_against_float64(Gguf::parse(bytes, "tiny.gguf"), random_tokens(random, 24, tiny.vocab_size));
}

// The InputError that reading a file throws, without the file's name, which must come first. "" if it is accepted.
std::string refusal(const GgufBuilder& builder) {
  const Bytes bytes = builder.build();
  const Gguf file = Gguf::parse(bytes, "tiny.gguf");
  const std::string message = error_of<InputError>([&] { const Llama model(file); });
  if (message.empty()) {
    return "";
  }
  CHECK(message.find('\n') == std::string::npos);
  CHECK(message.starts_with("tiny.gguf: "));
  return message.substr(std::string("tiny.gguf: ").size());
}

// The small model's file with another value for one key.
template <typename T>
std::string refusal_with(const std::string& key, const T& value, const TinyModel& tiny = {}) {
  return refusal(tiny.builder().remove(key).add(key, value));
}

std::string refusal_without(const std::string& key) { return refusal(TinyModel().builder().remove(key)); }

// ---- Flat batches -------------------------------------------------------------------------------------------------

// Tokens of several sequences in one flat pass: owner[row] is the sequence of a row.
class FlatBatch {
 public:
  FlatBatch(const Llama& model, std::size_t num_sequences)
      : model_(model), caches_(num_sequences, ReferenceCache(model.config())) {}

  void add(std::size_t owner, Token token) {
    owners_.push_back(owner);
    tokens_.push_back(token);
    positions_.push_back(static_cast<int>(std::count(owners_.begin(), owners_.end(), owner)) - 1);
  }

  // The logits of all rows.
  Matrix run() {
    return model_.logits(
        model_.forward(tokens_, positions_, [this](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
          Matrix result(q.rows(), q.cols());
          for (std::size_t owner = 0; owner < caches_.size(); ++owner) {
            const std::vector<Eigen::Index> rows = rows_of(owner);
            result(rows, Eigen::all) =
                caches_[owner].attend(layer, q(rows, Eigen::all), k(rows, Eigen::all), v(rows, Eigen::all));
          }
          return result;
        }));
  }

  std::vector<Eigen::Index> rows_of(std::size_t owner) const {
    std::vector<Eigen::Index> rows;
    for (std::size_t row = 0; row < owners_.size(); ++row) {
      if (owners_[row] == owner) {
        rows.push_back(static_cast<Eigen::Index>(row));
      }
    }
    return rows;
  }

 private:
  const Llama& model_;
  std::vector<ReferenceCache> caches_;
  std::vector<std::size_t> owners_;
  std::vector<Token> tokens_;
  std::vector<int> positions_;
};

LlamaConfig small_config() {
  LlamaConfig config;
  config.vocab_size = 101;
  config.context_length = 64;
  config.hidden_size = 48;
  config.num_layers = 2;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.feed_forward_size = 72;
  return config;
}

Matrix logits_of(const Llama& model, std::span<const Token> tokens) {
  ReferenceCache cache(model.config());
  return tests::next_logits(model, cache, tokens);
}

// An attention for tests of forward()'s checks.
Matrix zeros_like_q(int, const Matrix& q, const Matrix&, const Matrix&) { return Matrix::Zero(q.rows(), q.cols()); }

}  // namespace

TEST_CASE("the bundled model's configuration", "[llama]") {
  const LlamaConfig& config = bundled_model().config();
  CHECK(config.vocab_size == 2048);
  CHECK(config.context_length == 1024);
  CHECK(config.hidden_size == 256);
  CHECK(config.num_layers == 6);
  CHECK(config.num_heads == 8);
  CHECK(config.num_kv_heads == 2);
  CHECK(config.num_queries_per_kv() == 4);
  CHECK(config.head_dim == 32);
  CHECK(config.feed_forward_size == 768);
  CHECK(config.rope_freq_base == 10000.0F);
  CHECK(config.rms_epsilon == 1e-5F);
  CHECK(config.tied_output);
  CHECK(bundled_model().num_parameters() == 5049600);  // common/model/tales/MODEL.md
  // Every matrix and norm once, the embedding as the output matrix among them, and one row of the embedding as a
  // lookup. Matrices take 34 bytes for 32 weights, and the 13 norms four bytes for each weight.
  CHECK(bundled_model().weight_bytes_per_token() == (5049600 - 13 * 256 + 256) / 32 * 34 + 4 * 13 * 256);
}

TEST_CASE("the bundled model against float64", "[llama]") {
  const common::Tokenizer tokenizer(bundled_file());
  check_against_float64(bundled_file(),
                        tokenizer.encode_prompt("The king had a garden, and in the garden stood a tree"));
}

TEST_CASE("a small model against float64", "[llama]") {
  TinyModel tiny;
  SECTION("grouped heads, tied output") { check_against_float64(tiny); }
  SECTION("an output matrix of its own") {
    tiny.tied = false;
    check_against_float64(tiny);
  }
  SECTION("as many kv heads as heads, by default") {
    tiny.num_kv_heads = tiny.num_heads;
    tiny.write_num_kv_heads = false;
    check_against_float64(tiny);
  }
  SECTION("one kv head for all") {
    tiny.num_kv_heads = 1;
    check_against_float64(tiny);
  }
  SECTION("heads whose size is not hidden size / heads") {
    tiny.hidden_size = 16;  // not a multiple of 6
    tiny.head_dim = 10;
    tiny.write_head_dim = true;
    check_against_float64(tiny);
  }
  SECTION("another base of the rotation") {
    tiny.head_dim = 8;
    tiny.write_head_dim = true;
    tiny.freq_base = 37.0F;
    check_against_float64(tiny);
  }
  SECTION("rotation slowed by factors") {
    tiny.head_dim = 6;
    tiny.write_head_dim = true;
    tiny.rope_factors = {1.0F, 2.5F, 32.0F};
    check_against_float64(tiny);
  }
  SECTION("a large epsilon") {
    tiny.epsilon = 0.5F;
    check_against_float64(tiny);
  }
  SECTION("all at once") {
    tiny.hidden_size = 33;
    tiny.num_heads = 3;
    tiny.num_kv_heads = 3;
    tiny.head_dim = 4;
    tiny.write_head_dim = true;
    tiny.write_num_kv_heads = false;
    tiny.tied = false;
    tiny.freq_base = 500000.0F;
    tiny.rope_factors = {1.5F, 8.0F};
    check_against_float64(tiny);
  }
}

// Metadata as in files of these architectures: a head size of their own, a base of a million.
TinyModel small_model_of(const std::string& architecture) {
  TinyModel tiny;
  tiny.architecture = architecture;
  tiny.head_dim = 8;
  tiny.write_head_dim = true;
  tiny.freq_base = 1e6F;
  return tiny;
}

TEST_CASE("every architecture against float64", "[llama]") {
  for (const std::string architecture : {"llama", "qwen2", "qwen3"}) {
    for (const bool tied : {false, true}) {
      TinyModel tiny = small_model_of(architecture);
      tiny.tied = tied;
      CAPTURE(architecture, tied);
      check_against_float64(tiny);
      tiny.num_kv_heads = tiny.num_heads;
      check_against_float64(tiny);
    }
  }
}

TEST_CASE("rotations slowed for longer contexts, against float64", "[llama]") {
  for (const std::string architecture : {"llama", "qwen2", "qwen3"}) {
    TinyModel tiny = small_model_of(architecture);
    CAPTURE(architecture);
    SECTION(architecture + ": all equally") {
      tiny.scaling = "linear";
      check_against_float64(tiny);
    }
    SECTION(architecture + ": YaRN") {
      tiny.scaling = "yarn";
      tiny.head_dim = 16;
      tiny.freq_base = 10000.0F;
      tiny.trained_length = 2048;  // pairs 2 to 6 of 8 lie on the ramp
      check_against_float64(tiny);
    }
    SECTION(architecture + ": YaRN and factors") {
      tiny.scaling = "yarn";
      tiny.trained_length = 16;
      tiny.rope_factors = {1.0F, 2.0F, 4.0F, 8.0F};
      check_against_float64(tiny);
    }
  }
}

TEST_CASE("layers that see the last tokens only, against float64", "[llama][windows]") {
  for (const int window : {1, 2, 5, 23, 24, 63}) {
    for (const int global_period : {0, 1, 2, 3}) {
      TinyModel tiny;
      tiny.num_layers = 4;
      tiny.window = window;
      tiny.global_period = global_period;
      CAPTURE(window, global_period);
      check_against_float64(tiny);
    }
  }
}

TEST_CASE("what layers with a window read, summed over all", "[llama][windows]") {
  LlamaConfig config{.context_length = 100, .num_layers = 7};
  CHECK(config.num_reads(10, 3) == 7 * 10);
  config.window = 6;
  CHECK(config.num_reads(6, 1) == 7 * 6);
  CHECK(config.num_reads(10, 1) == 7 * 6);
  CHECK(config.num_reads(10, 3) == 7 * 8);  // the queries at 7, 8 and 9 see 2 … 9
  CHECK(config.num_reads(10, 10) == 7 * 10);
  config.global_period = 3;  // the layers 2 and 5
  CHECK(config.num_windowed_layers() == 5);
  CHECK(config.num_reads(10, 3) == 5 * 8 + 2 * 10);
}

// The proportions of Gemma 3's smallest shape, 270M: one kv head for four, heads that are not hidden size / heads, five
// layers with a window for each that sees all, bases 10,000 and 1,000,000, eighteen layers, the embedding as output.
TinyModel small_gemma() {
  TinyModel tiny = small_model_of("gemma3");
  tiny.hidden_size = 20;
  tiny.num_layers = 18;
  tiny.num_heads = 4;
  tiny.num_kv_heads = 1;
  tiny.feed_forward_size = 64;
  tiny.epsilon = 1e-6F;
  tiny.window = 7;
  return tiny;
}

TEST_CASE("Gemma 3 against float64", "[llama][windows]") {
  TinyModel tiny = small_gemma();
  SECTION("as its files are") { check_against_float64(tiny); }
  SECTION("with an output matrix of its own") {
    tiny.tied = false;
    check_against_float64(tiny);
  }
  SECTION("with another pattern") {
    tiny.global_period = 2;
    check_against_float64(tiny);
  }
  SECTION("with fewer layers than its period, so that none sees all") {
    tiny.num_layers = 5;
    check_against_float64(tiny);
  }
  SECTION("with a window that hides nothing, and still says how its layers rotate") {
    tiny.window = 64;  // the context
    check_against_float64(tiny);
  }
  SECTION("with rotations slowed in layers that see all") {
    tiny.scaling = "linear";
    check_against_float64(tiny);
  }
  SECTION("with rotations slowed and scaled in layers that see all") {
    tiny.scaling = "yarn";
    tiny.freq_base = 10000.0F;
    tiny.trained_length = 16;
    check_against_float64(tiny);
  }
  SECTION("another base of rotations in layers with a window") {
    const Bytes bytes = tiny.builder().add("gemma3.rope.freq_base_swa", 500.0F).build();
    Random random(3);
    check_against_float64(Gguf::parse(bytes, "tiny.gguf"), random_tokens(random, 24, tiny.vocab_size));
  }
}

TEST_CASE("what a file of Gemma 3 says, and what not", "[llama][windows]") {
  const TinyModel tiny = small_gemma();
  const Bytes bytes = tiny.builder().build();
  const LlamaConfig config = Llama::read_config(Gguf::parse(bytes, "tiny.gguf"));
  CHECK(config.rope_freq_base == 1e6F);
  CHECK(config.window_rope_freq_base == 10000.0F);
  CHECK(config.embedding_scale == std::sqrt(20.0F));
  for (int layer = 0; layer < 18; ++layer) {
    CHECK(config.window_of(layer) == (layer == 5 || layer == 11 || layer == 17 ? 0 : 7));
  }
  TinyModel few = tiny;
  few.num_layers = 5;
  const Bytes few_bytes = few.builder().build();
  const LlamaConfig short_config = Llama::read_config(Gguf::parse(few_bytes, "tiny.gguf"));
  CHECK(short_config.global_period == 0);  // one pool for all layers (WINDOWS.md)
  for (int layer = 0; layer < 5; ++layer) {
    CHECK(short_config.window_of(layer) == 7);
  }
  CHECK(refusal_with("gemma3.block_count", 62, tiny) ==
        "Gemma 3 27B divides its scores by another number than the root of head_dim, which is not supported");
  CHECK(refusal_with("gemma3.final_logit_softcapping", 30.0F, tiny) ==
        "gemma3.final_logit_softcapping is 30, which is not supported");
  CHECK(refusal_with("gemma3.rope.freq_base_swa", 0.0F, tiny) == "gemma3.rope.freq_base_swa is not a positive number");
  CHECK(refusal(tiny.builder().remove("gemma3.attention.sliding_window")) ==
        "metadata key \"gemma3.attention.sliding_window\" is missing");
  GgufBuilder incomplete = tiny.builder();
  std::erase_if(incomplete.tensors, [](const auto& tensor) { return tensor.name == "blk.3.post_ffw_norm.weight"; });
  CHECK(refusal(incomplete).starts_with("tensor \"blk.3.post_ffw_norm.weight\" is missing"));
}

TEST_CASE("random weights of Gemma 3's shape", "[llama][windows]") {
  LlamaConfig config = small_config();
  config.window = 4;
  config.global_period = 2;
  config.window_rope_freq_base = 100.0F;
  config.qk_norm = true;
  config.rotates_halves = true;
  config.post_norms = true;
  config.gelu = true;
  config.embedding_scale = 7.0F;
  config.tied_output = true;
  const Llama model(config, 1, Windows::kComputed);
  Random random(3);
  const std::vector<Token> tokens = random_tokens(random, 12, config.vocab_size);
  const Matrix logits = logits_of(model, tokens);
  CHECK(logits.allFinite());
  LlamaConfig plain = config;
  for (const auto& change : std::vector<std::function<void()>>{
           [&] { plain.window = 5; }, [&] { plain.global_period = 0; }, [&] { plain.window_rope_freq_base = 0.0F; },
           [&] { plain.post_norms = false; }, [&] { plain.gelu = false; }, [&] { plain.embedding_scale = 1.0F; }}) {
    plain = config;
    change();
    CHECK(logits_of(Llama(plain, 1, Windows::kComputed), tokens) != logits);
  }
}

TEST_CASE("a file says which layers have windows", "[llama][windows]") {
  TinyModel tiny;
  tiny.num_layers = 5;
  tiny.window = 8;
  const auto windows_of = [](const GgufBuilder& builder) {
    const Bytes bytes = builder.build();
    const LlamaConfig config = Llama::read_config(Gguf::parse(bytes, "tiny.gguf"));
    std::vector<int> windows;
    for (int layer = 0; layer < config.num_layers; ++layer) {
      windows.push_back(config.window_of(layer));
    }
    CHECK(config.context_length == 64);
    return windows;
  };
  using std::vector;
  CHECK(windows_of(TinyModel().builder()) == vector<int>{0, 0});
  CHECK(windows_of(tiny.builder()) == vector<int>{8, 8, 8, 8, 8});
  const std::string window = "llama.attention.sliding_window";
  const std::string pattern = window + "_pattern";
  CHECK(windows_of(tiny.builder().add(pattern, 0)) == vector<int>{8, 8, 8, 8, 8});
  CHECK(windows_of(tiny.builder().add(pattern, 1)) == vector<int>{0, 0, 0, 0, 0});
  CHECK(windows_of(tiny.builder().add(pattern, 2)) == vector<int>{8, 0, 8, 0, 8});
  CHECK(windows_of(tiny.builder().add(pattern, 4)) == vector<int>{8, 8, 8, 0, 8});
  CHECK(windows_of(tiny.builder().add(pattern, 9)) == vector<int>{8, 8, 8, 8, 8});
  using Bools = vector<bool>;
  CHECK(windows_of(tiny.builder().add_array(pattern, Bools{true, false, true, false, true})) ==
        vector<int>{8, 0, 8, 0, 8});
  CHECK(windows_of(tiny.builder().add_array(pattern, Bools(5, true))) == vector<int>{8, 8, 8, 8, 8});
  CHECK(windows_of(tiny.builder().add_array(pattern, Bools(5, false))) == vector<int>{0, 0, 0, 0, 0});

  CHECK(refusal(tiny.builder().add_array(pattern, Bools{true, false, true, true, false})) ==
        pattern + " is not supported: it does not repeat itself after a layer that sees all tokens");
  CHECK(refusal(tiny.builder().add_array(pattern, Bools(4, true))) == pattern + " has 4 values for 5 layers");
  CHECK(refusal_with(window, -8) == window + " is below 0");
  CHECK(refusal_with(pattern, -1) == pattern + " is not a number of layers");
  CHECK(contains(refusal_with(pattern, std::string("all")), pattern));
}

TEST_CASE("without windows in attention, the context ends with the window", "[llama][windows]") {
  TinyModel tiny;
  tiny.window = 8;
  const Bytes bytes = tiny.builder().build();
  const Gguf file = Gguf::parse(bytes, "tiny.gguf");
  const Llama limited(file);
  const Llama whole(file, Windows::kComputed);
  CHECK(limited.config().context_length == 8);
  CHECK(whole.config().context_length == 64);

  // Up to there, all layers see all.
  Random random(3);
  const std::vector<Token> tokens = random_tokens(random, 9, tiny.vocab_size);
  LlamaConfig plain = limited.config();
  plain.window = 0;
  ReferenceCache cache(plain);
  CHECK(tests::compare(all_of(tests::next_logits(limited, cache, std::span(tokens).first(8))),
                       SlowLlama(file).logits(std::span(tokens).first(8)), kRounding) == kNoComplaint);
  CHECK(contains(error_of<CheckError>([&] { tests::next_logits(limited, cache, std::span(tokens).last(1)); }),
                 "layers see the last 8 tokens only, and the attention all of them"));

  // YaRN's context of training is the whole one.
  tiny.scaling = "yarn";
  const Bytes slowed = tiny.builder().build();
  const Gguf slowed_file = Gguf::parse(slowed, "tiny.gguf");
  CHECK(Llama(slowed_file).weights().frequencies == Llama(slowed_file, Windows::kComputed).weights().frequencies);
  tiny.scaling = "";

  // A window that reaches as far as the context changes nothing.
  tiny.window = 64;
  const Bytes same = tiny.builder().build();
  CHECK(Llama(Gguf::parse(same, "tiny.gguf")).config().context_length == 64);
  CHECK(Llama(Gguf::parse(same, "tiny.gguf")).config().window == 0);

  LlamaConfig config = small_config();
  config.window = 16;
  CHECK(Llama(config, 1).config().context_length == 16);
  CHECK(Llama::synthetic(config, 1).config().context_length == 16);
  CHECK(Llama::synthetic(config, 1, Windows::kComputed).config().context_length == 64);
}

// Llama 3.1 and later slow rotations by a rule with four numbers; files carry the resulting factors, as
// rope_freqs.weight.
TEST_CASE("the factors of Llama 3", "[llama]") {
  TinyModel tiny = small_model_of("llama");
  tiny.head_dim = 64;
  tiny.hidden_size = 16;
  tiny.freq_base = 500000.0F;
  constexpr double kTrained = 8192.0;
  for (int i = 0; i < 32; ++i) {
    const double wavelength = 2.0 * std::acos(-1.0) * std::pow(500000.0, i / 32.0);
    const double smooth = (kTrained / wavelength - 1.0) / (4.0 - 1.0);
    const double kept = std::min(1.0, std::max(0.0, smooth));
    tiny.rope_factors.push_back(static_cast<float>(1.0 / ((1.0 - kept) / 32.0 + kept)));
  }
  CHECK(tiny.rope_factors.front() == 1.0F);
  CHECK(tiny.rope_factors.back() == 32.0F);
  check_against_float64(tiny);
}

TEST_CASE("models of every type of weights against float64", "[llama]") {
  for (const TensorType type : tests::all_types()) {
    TinyModel tiny = small_model_of("qwen2");
    tiny.type = type;
    tiny.other_type = type == TensorType::Q4_K ? TensorType::Q6_K : TensorType::Q5_K;
    tiny.hidden_size = 256;
    tiny.num_heads = 4;
    tiny.num_kv_heads = 2;
    tiny.head_dim = 64;
    tiny.feed_forward_size = 256;
    CAPTURE(common::type_name(type));
    check_against_float64(tiny);
  }
}

TEST_CASE("positions say where a token is, not its row", "[llama]") {
  const Bytes bytes = TinyModel().builder().build();
  const Gguf file = Gguf::parse(bytes, "tiny.gguf");
  const Llama model(file);
  const std::vector<Token> tokens = {1, 2, 3, 4};
  const std::vector<int> positions = {5, 6, 7, 8};
  Matrix first_q;
  Matrix first_v;
  ReferenceCache cache(model.config());
  const Matrix hidden =
      model.forward(tokens, positions, [&](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
        if (layer == 0) {
          first_q = q;
          first_v = v;
        }
        return cache.attend(layer, q, k, v);
      });
  CHECK(tests::compare(all_of(model.logits(hidden)), SlowLlama(file).logits(tokens, 5), kRounding) == kNoComplaint);

  // The logits alone would not show it, because rotation makes scores depend on distances only. So q is compared as
  // well.
  Matrix unrotated;
  model.forward(tokens, std::vector<int>(4, 0), [&](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
    if (layer == 0) {
      unrotated = q;
      CHECK(tests::compare_bits(all_of(v), all_of(first_v)) == kNoComplaint);  // values do not turn
    }
    return zeros_like_q(layer, q, k, v);
  });
  const double angle = 5.0;  // pair 0 turns by one radian a position
  const auto even = static_cast<double>(unrotated(0, 0));
  const auto odd = static_cast<double>(unrotated(0, 1));
  CHECK(std::abs(static_cast<double>(first_q(0, 0)) - (even * std::cos(angle) - odd * std::sin(angle))) < 1e-5);
  CHECK(std::abs(static_cast<double>(first_q(0, 1)) - (even * std::sin(angle) + odd * std::cos(angle))) < 1e-5);
}

TEST_CASE("attention is called once for each layer, in order, with the promised shapes", "[llama]") {
  const LlamaConfig config = small_config();
  const Llama model(config, 1);
  std::vector<int> layers;
  const Matrix hidden = model.forward(std::vector<Token>{4, 5, 6}, std::vector<int>{0, 1, 2},
                                      [&](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
                                        layers.push_back(layer);
                                        CHECK((q.rows() == 3 && q.cols() == 48));
                                        CHECK((k.rows() == 3 && k.cols() == 16));
                                        CHECK((v.rows() == 3 && v.cols() == 16));
                                        return zeros_like_q(layer, q, k, v);
                                      });
  CHECK(layers == std::vector<int>{0, 1});
  CHECK((hidden.rows() == 3 && hidden.cols() == 48));
  const Matrix logits = model.logits(hidden.row(1));
  CHECK((logits.rows() == 1 && logits.cols() == 101));
}

TEST_CASE("greedy tokens and margins equal those of another program", "[llama][golden]") {
  std::ifstream stream(source_path("tests/golden/golden_greedy.json"));
  REQUIRE(stream.is_open());
  const nlohmann::json golden = nlohmann::json::parse(stream);
  const common::Tokenizer tokenizer(bundled_file());
  REQUIRE(golden.at("cases").size() == 5);
  for (const nlohmann::json& entry : golden.at("cases")) {
    const auto prompt = entry.at("prompt").get<std::string>();
    CAPTURE(prompt);
    const auto prompt_ids = entry.at("prompt_ids").get<std::vector<Token>>();
    CHECK(tokenizer.encode_prompt(prompt) == prompt_ids);
    const auto expected_ids = entry.at("generated_ids").get<std::vector<Token>>();
    const auto expected_margins = entry.at("margins").get<std::vector<double>>();
    REQUIRE(expected_ids.size() == expected_margins.size());

    std::vector<Token> ids;
    double worst = 0.0;
    double smallest = std::numeric_limits<double>::infinity();
    for (const tests::GreedyStep& step :
         tests::decode_greedily(bundled_model(), prompt_ids, static_cast<int>(expected_ids.size()))) {
      worst = std::max(worst, std::abs(step.margin - expected_margins[ids.size()]));
      smallest = std::min(smallest, step.margin);
      ids.push_back(step.token);
    }
    CHECK(ids == expected_ids);
    CHECK(worst < 1e-3);  // the file gives four decimals, and the other program rounds in another order
    std::cout << common::format("golden   margin %.4f (off by at most %.5f)  %s\n", smallest, worst,
                                common::quote(prompt, 60).c_str());
  }
}

TEST_CASE("no greedy choice of the workload is a near-tie", "[llama][golden]") {
  // All stages must print the same text whatever the order of their arithmetic. kRounding is a hundredth of this.
  constexpr double kThinnestMargin = 0.01;
  const common::Tokenizer tokenizer(bundled_file());
  double smallest_of_all = std::numeric_limits<double>::infinity();
  // The margins are the prompts' own, whatever the build: under a sanitizer one of them takes every path.
  const std::size_t num_prompts = tests::kSanitized ? 1 : common::workload().size();
  for (const common::WorkloadItem& item : std::span(common::workload()).first(num_prompts)) {
    const std::vector<Token> prompt = tokenizer.encode_prompt(item.prompt);
    CAPTURE(item.prompt);
    REQUIRE(static_cast<int>(prompt.size()) + item.max_new_tokens <= bundled_model().config().context_length);
    const std::vector<tests::GreedyStep> steps =
        tests::decode_greedily(bundled_model(), prompt, item.max_new_tokens, tokenizer.eos());
    const auto thinnest =
        std::min_element(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a.margin < b.margin; });
    std::cout << common::format("workload margin %.4f at token %td of %zu  %s\n", thinnest->margin,
                                thinnest - steps.begin(), steps.size(), common::quote(item.prompt, 60).c_str());
    CHECK(thinnest->margin >= kThinnestMargin);
    smallest_of_all = std::min(smallest_of_all, thinnest->margin);
  }
  std::cout << common::format("smallest margin of the workload: %.4f\n", smallest_of_all);
}

TEST_CASE("a sequence's rows do not depend on what else is in the batch", "[llama]") {
  Random random(11);
  const Llama& model = bundled_model();
  // Alone, a few tokens take linear()'s path for few tokens; together they take the other path.
  const auto lengths = GENERATE(std::pair<int, int>{1, 1}, std::pair<int, int>{3, 2}, std::pair<int, int>{4, 9},
                                std::pair<int, int>{17, 1});
  const bool interleaved = GENERATE(false, true);
  CAPTURE(lengths.first, lengths.second, interleaved);
  const std::vector<std::vector<Token>> sequences = {random_tokens(random, lengths.first, 2048),
                                                     random_tokens(random, lengths.second, 2048)};
  FlatBatch batch(model, 2);
  if (interleaved) {
    for (std::size_t i = 0; i < std::max(sequences[0].size(), sequences[1].size()); ++i) {
      for (std::size_t owner : {std::size_t{1}, std::size_t{0}}) {
        if (i < sequences[owner].size()) {
          batch.add(owner, sequences[owner][i]);
        }
      }
    }
  } else {
    for (std::size_t owner : {std::size_t{0}, std::size_t{1}}) {
      for (const Token token : sequences[owner]) {
        batch.add(owner, token);
      }
    }
  }
  const Matrix together = batch.run();
  for (std::size_t owner : {std::size_t{0}, std::size_t{1}}) {
    CAPTURE(owner);
    const Matrix alone = logits_of(model, sequences[owner]);
    const Matrix rows = together(batch.rows_of(owner), Eigen::all);
    CHECK(tests::compare(all_of(rows), all_of(alone), kRounding) == kNoComplaint);
  }
}

TEST_CASE("a sequence in chunks has the logits of the whole sequence", "[llama]") {
  Random random(12);
  const Llama& model = bundled_model();
  const std::vector<Token> tokens = random_tokens(random, 40, 2048);
  const Matrix whole = logits_of(model, tokens);
  const std::size_t chunk = GENERATE(std::size_t{1}, std::size_t{4}, std::size_t{5}, std::size_t{16}, std::size_t{39});
  CAPTURE(chunk);
  ReferenceCache cache(model.config());
  Matrix logits;
  for (std::size_t begin = 0; begin < tokens.size(); begin += chunk) {
    const auto part = std::span(tokens).subspan(begin, std::min(chunk, tokens.size() - begin));
    tests::append_rows(logits, tests::next_logits(model, cache, part));
  }
  CHECK(tests::compare(all_of(logits), all_of(whole), kRounding) == kNoComplaint);
}

// Rounding differs: threads share the output features, and their number decides how Eigen blocks a product, and so the
// order in which it adds. Up to four tokens, sizes that are multiples of 16 were seen to be bit-equal.
TEST_CASE("the number of threads changes nothing but rounding", "[llama][threads]") {
  Random random(13);
  const bool bundled = GENERATE(true, false);
  const int length = GENERATE(1, 4, 5, 37);
  const Llama odd_sizes(small_config(), 5);
  const Llama& model = bundled ? bundled_model() : odd_sizes;
  const std::vector<Token> tokens = random_tokens(random, length, model.config().vocab_size);
  Matrix one;
  {
    const ThreadCount threads(1);
    one = logits_of(model, tokens);
  }
  for (const int num_threads : {2, 3, 4}) {
    const ThreadCount threads(num_threads);
    const Matrix several = logits_of(model, tokens);
    const Matrix again = logits_of(model, tokens);
    CAPTURE(bundled, length, num_threads);
    CHECK(tests::compare(all_of(several), all_of(one), kRounding) == kNoComplaint);
    // Ranges depend on the count and the number of threads alone, so a run repeats to the bit.
    CHECK(tests::compare_bits(all_of(again), all_of(several)) == kNoComplaint);
  }
}

TEST_CASE("random weights follow the seed", "[llama]") {
  const std::vector<Token> tokens = {3, 1, 4, 1, 5};
  const LlamaConfig config = small_config();
  const Matrix logits = logits_of(Llama(config, 1), tokens);
  CHECK(tests::compare_bits(all_of(logits_of(Llama(config, 1), tokens)), all_of(logits)) == kNoComplaint);
  CHECK(tests::compare(all_of(logits_of(Llama(config, 2), tokens)), all_of(logits), {0.1, 0.0}) != kNoComplaint);

  // Activations keep their size, so that the weights are fit for comparisons: logits are near 1, neither 0 nor huge.
  CHECK(logits.cwiseAbs().maxCoeff() < 10.0F);
  CHECK(logits.norm() / std::sqrt(static_cast<float>(logits.size())) > 0.3F);
}

TEST_CASE("a synthetic model draws the same weights when it needs them", "[llama]") {
  const Llama eager(small_config(), 7);
  const Llama lazy = Llama::synthetic(small_config(), 7);
  CHECK(lazy.is_synthetic());
  CHECK_FALSE(eager.is_synthetic());
  CHECK(lazy.weight_bytes_per_token() == eager.weight_bytes_per_token());
  const common::Matrix hidden = common::Matrix::Ones(2, small_config().hidden_size);
  CHECK(lazy.logits(hidden) == eager.logits(hidden));
}

TEST_CASE("presets have as many parameters as the published models", "[llama]") {
  // The models' cards: 6.74, 13.02 and 68.98 billion (Llama 2), 8.03, 70.55 and 1.24 billion (Llama 3), 134,515,008,
  // 7.24 billion (Mistral), 268 million (Gemma 3), and 5,049,600.
  const std::vector<std::pair<std::string, double>> millions = {
      {"llama-2-7b", 6738.4},   {"llama-2-13b", 13015.9}, {"llama-2-70b", 68976.6}, {"llama-3-8b", 8030.3},
      {"llama-3-70b", 70553.7}, {"llama-3.2-1b", 1235.8}, {"smollm2-135m", 134.5},  {"qwen3-0.6b", 596.05},
      {"mistral-7b", 7241.7},   {"gemma-3-270m", 268.1},  {"tales-5m", 5.05}};
  REQUIRE(millions.size() == common::presets().size());
  for (const auto& [name, expected] : millions) {
    const LlamaConfig& config = common::find_preset(name).config;
    const double heads = 2.0 * config.num_heads * config.head_dim + 2.0 * config.num_kv_heads * config.head_dim;
    const double head_norms = config.qk_norm ? 2.0 * config.head_dim : 0.0;
    const double norms = config.post_norms ? 4.0 : 2.0;
    const double layer = config.hidden_size * (heads + 3.0 * config.feed_forward_size + norms) + head_norms;
    const double embeddings = (config.tied_output ? 1.0 : 2.0) * config.vocab_size * config.hidden_size;
    CAPTURE(name);
    CHECK(std::abs((config.num_layers * layer + embeddings + config.hidden_size) / 1e6 - expected) < 0.06);
  }
  CHECK(Llama::synthetic(common::find_preset("smollm2-135m").config, 1).num_parameters() == 134515008);
  CHECK_THROWS_AS(common::find_preset("llama-9"), common::InputError);
  // More is checked of this model, because it is run beside other engines: its config.json, and its number of weights.
  const LlamaConfig& qwen3 = common::find_preset("qwen3-0.6b").config;
  CHECK((qwen3.vocab_size == 151936 && qwen3.hidden_size == 1024 && qwen3.feed_forward_size == 3072));
  CHECK((qwen3.num_layers == 28 && qwen3.num_heads == 16 && qwen3.num_kv_heads == 8 && qwen3.head_dim == 128));
  CHECK((qwen3.qk_norm && qwen3.rotates_halves && qwen3.tied_output && !qwen3.qkv_bias));
  CHECK((qwen3.rope_freq_base == 1e6F && qwen3.rms_epsilon == 1e-6F && qwen3.context_length == 40960));
  CHECK(Llama::synthetic(qwen3, 1).num_parameters() == 596049920);
}

TEST_CASE("parameters and bytes are counted", "[llama]") {
  LlamaConfig config = small_config();
  const std::int64_t layer = 48 + (48 + 2 * 16) * 48 + 48 * 48 + 48 + 3 * 72 * 48;
  config.tied_output = true;
  CHECK(Llama(config, 1).num_parameters() == 101 * 48 + 48 + 2 * layer);
  CHECK(Llama(config, 1).weight_bytes_per_token() == 4 * (101 * 48 + 48 + 2 * layer + 48));
  config.tied_output = false;
  CHECK(Llama(config, 1).num_parameters() == 2 * 101 * 48 + 48 + 2 * layer);
  CHECK(Llama(config, 1).weight_bytes_per_token() == 4 * (101 * 48 + 48 + 2 * layer + 48));
}

TEST_CASE("weights are the file's own bytes", "[llama]") {
  const std::span<const std::byte> file = common::default_model();
  const auto is_inside = [&](const common::WeightMatrix& matrix) {
    return std::all_of(matrix.parts().begin(), matrix.parts().end(), [&](const common::WeightMatrix::Part& part) {
      return part.data.data() >= file.data() && part.data.data() + part.data.size() <= file.data() + file.size();
    });
  };
  const common::LlamaWeights& weights = bundled_model().weights();
  CHECK(is_inside(weights.embedding));
  CHECK(weights.output.parts().front().data.data() == weights.embedding.parts().front().data.data());  // tied
  for (const common::LlamaLayer& layer : weights.layers) {
    CHECK((is_inside(layer.qkv) && is_inside(layer.output) && is_inside(layer.gate_up) && is_inside(layer.down)));
    CHECK(layer.qkv.parts().size() == 3);
  }
}

TEST_CASE("a model keeps its file mapped", "[llama]") {
  const Llama model(Gguf::open(source_path("common/model/tales/tales-5m-q8_0.gguf")));  // the Gguf is gone
  const std::vector<Token> tokens = {1, 2, 3};
  CHECK(tests::compare_bits(all_of(logits_of(model, tokens)), all_of(logits_of(bundled_model(), tokens))) ==
        kNoComplaint);
}

TEST_CASE("a model works after it was moved", "[llama]") {
  const std::vector<Token> tokens = {7, 8};
  Llama first(small_config(), 1);
  const Matrix logits = logits_of(first, tokens);
  Llama second(std::move(first));
  CHECK(tests::compare_bits(all_of(logits_of(second, tokens)), all_of(logits)) == kNoComplaint);
  Llama third(small_config(), 2);
  third = std::move(second);
  CHECK(tests::compare_bits(all_of(logits_of(third, tokens)), all_of(logits)) == kNoComplaint);
}

TEST_CASE("misuse of forward is caught", "[llama]") {
  const Llama model(small_config(), 1);
  const auto complaint = [&](const std::vector<Token>& tokens, const std::vector<int>& positions,
                             const common::AttentionFn& attention) {
    return error_of<CheckError>([&] { model.forward(tokens, positions, attention); });
  };
  CHECK(complaint({0, 100}, {0, 1}, zeros_like_q).empty());
  CHECK(contains(complaint({0, 101}, {0, 1}, zeros_like_q), "token 101 is not in the vocabulary"));
  CHECK(contains(complaint({-1}, {0}, zeros_like_q), "token -1 is not in the vocabulary"));
  CHECK(contains(complaint({}, {}, zeros_like_q), "each token needs a position"));
  CHECK(contains(complaint({1, 2}, {0}, zeros_like_q), "each token needs a position"));
  CHECK(contains(complaint({1}, {0, 1}, zeros_like_q), "each token needs a position"));

  const std::string shape = "attention returned a matrix of another shape";
  const auto returning = [](Eigen::Index rows, Eigen::Index cols) {
    return [=](int, const Matrix&, const Matrix&, const Matrix&) -> Matrix { return Matrix::Zero(rows, cols); };
  };
  CHECK(complaint({1, 2}, {0, 1}, returning(2, 48)).empty());
  CHECK(contains(complaint({1, 2}, {0, 1}, returning(2, 16)), shape));  // as wide as k, not as q
  CHECK(contains(complaint({1, 2}, {0, 1}, returning(1, 48)), shape));
  CHECK(contains(complaint({1, 2}, {0, 1}, returning(0, 0)), shape));
}

TEST_CASE("an exception from attention leaves forward", "[llama]") {
  const Llama model(small_config(), 1);
  const auto failing = [](int, const Matrix&, const Matrix&, const Matrix&) -> Matrix { throw InputError("no slots"); };
  CHECK(error_of<InputError>([&] { model.forward(std::vector<Token>{1}, std::vector<int>{0}, failing); }) ==
        "no slots");
}

TEST_CASE("files that state the defaults are accepted", "[llama][errors]") {
  CHECK(refusal(TinyModel().builder()) == kNoComplaint);
  CHECK(refusal_with("llama.rope.scaling.type", std::string("none")) == kNoComplaint);
  CHECK(refusal_with("llama.expert_count", 0) == kNoComplaint);
  CHECK(refusal_with("llama.vocab_size", 11) == kNoComplaint);
  CHECK(refusal_with("llama.rope.dimension_count", 2) == kNoComplaint);
  CHECK(refusal_with("llama.attention.value_length", 2) == kNoComplaint);
  CHECK(refusal_with("llama.attention.layer_norm_rms_epsilon", 0.0F) == kNoComplaint);
}

TEST_CASE("keys that change the arithmetic are refused, unless their value changes nothing", "[llama][errors]") {
  struct Case {
    std::string key;
    double changing;
    std::vector<double> neutral;
  };
  const std::vector<Case> cases = {{"attention.scale", 0.25, {0}},
                                   {"logit_scale", 0.0625, {0, 1}},
                                   {"embedding_scale", 12, {0, 1}},
                                   {"residual_scale", 0.22, {0, 1}},
                                   {"attn_logit_softcapping", 50, {0}},
                                   {"final_logit_softcapping", 30, {0}},
                                   {"attention.clamp_kqv", 8, {0}},
                                   {"attention.max_alibi_bias", 8, {0}},
                                   {"expert_used_count", 2, {0}},
                                   {"rope.scaling.yarn_ext_factor", 0.5, {1}},
                                   {"rope.scaling.yarn_attn_factor", 2, {1}}};
  for (const Case& item : cases) {
    const std::string key = "llama." + item.key;
    CHECK(refusal_with(key, item.changing) == key + common::format(" is %g, which is not supported", item.changing));
    for (const double value : item.neutral) {
      CHECK(refusal_with(key, value) == kNoComplaint);
    }
  }
  // Files of other architectures name windows that only some of their layers have, and not which.
  const TinyModel qwen = small_model_of("qwen2");
  CHECK(refusal_with("qwen2.attention.sliding_window", 8, qwen) ==
        "qwen2.attention.sliding_window is 8, which is not supported");
  CHECK(refusal_with("qwen2.attention.sliding_window", 1 << 20, qwen) == kNoComplaint);
  CHECK(refusal_with("llama.use_parallel_residual", false) == kNoComplaint);
  CHECK(refusal_with("llama.use_parallel_residual", true) == "llama.use_parallel_residual is not supported");
  CHECK(refusal_with("llama.attention.causal", true) == kNoComplaint);
  CHECK(refusal_with("llama.attention.causal", false) == "llama.attention.causal is not supported");
  CHECK(refusal_with("llama.rope.scaling.attn_factor", 2.0) == "llama.rope.scaling.attn_factor needs YaRN");
  CHECK(refusal_with("llama.rope.dimension_sections", 2) ==
        "metadata key \"llama.rope.dimension_sections\" is not known, and may change what the model computes");
  // Keys that converters also write, and keys of no architecture.
  CHECK(refusal_with("llama.tensor_data_layout", std::string("Meta AI original pth")) == kNoComplaint);
  CHECK(refusal_with("llama.pooling_type", 3) == kNoComplaint);
  CHECK(refusal_with("llama.rope.scaling.finetuned", true) == kNoComplaint);
  CHECK(refusal_with("general.quantization_version", 2) == kNoComplaint);
}

TEST_CASE("missing keys are named", "[llama][errors]") {
  for (const std::string key : {"general.architecture", "llama.context_length", "llama.embedding_length",
                                "llama.block_count", "llama.feed_forward_length", "llama.attention.head_count",
                                "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.tokens"}) {
    CHECK(refusal_without(key) == "metadata key \"" + key + "\" is missing");
  }
}

TEST_CASE("sizes out of range", "[llama][errors]") {
  const std::vector<std::pair<std::string, std::int64_t>> largest = {
      {"llama.context_length", 1 << 26},       {"llama.embedding_length", 1 << 20},
      {"llama.block_count", 1 << 12},          {"llama.feed_forward_length", 1 << 20},
      {"llama.attention.head_count", 1 << 10}, {"llama.attention.head_count_kv", 1 << 10},
      {"llama.attention.key_length", 1 << 10}, {"llama.attention.value_length", 1 << 10},
      {"llama.rope.dimension_count", 1 << 10}};
  for (const auto& [key, most] : largest) {
    for (const std::int64_t value : {std::int64_t{0}, std::int64_t{-4}, most + 1, std::int64_t{1} << 40}) {
      CHECK(refusal_with(key, value) ==
            key + " is " + std::to_string(value) + ", expected 1 to " + std::to_string(most));
    }
  }
  CHECK(refusal_with("tokenizer.ggml.tokens", std::uint32_t{11}) != kNoComplaint);
  CHECK(refusal(TinyModel()
                    .builder()
                    .remove("tokenizer.ggml.tokens")
                    .add_array("tokenizer.ggml.tokens", std::vector<std::string>{})) ==
        "the number of tokens is 0, expected 1 to 16777216");
}

TEST_CASE("keys that contradict each other, and models of other kinds", "[llama][errors]") {
  CHECK(refusal_with("general.architecture", std::string("gemma")) ==
        "the architecture \"gemma\" is not supported (supported: \"llama\", \"qwen2\", \"qwen3\", \"gemma3\")");
  CHECK(refusal_with("llama.attention.head_count_kv", 4) == "6 query heads can't share 4 kv heads evenly");
  CHECK(refusal_with("llama.attention.head_count_kv", 12) == "6 query heads can't share 12 kv heads evenly");
  CHECK(refusal_with("llama.embedding_length", 13) ==
        "no llama.attention.key_length, and the hidden size is not a multiple of the number of heads");
  CHECK(refusal_with("llama.attention.value_length", 4) == "keys and values of different length are not supported");
  CHECK(refusal_with("llama.attention.key_length", 3) == "the head size is odd, so it has no pairs to rotate");
  CHECK(refusal_with("llama.embedding_length", 18) == "the head size is odd, so it has no pairs to rotate");
  CHECK(refusal_with("llama.rope.dimension_count", 1) ==
        "rotating a part of the head only (llama.rope.dimension_count) is not supported");
  CHECK(refusal_with("llama.rope.scaling.type", std::string("longrope")) ==
        "rotary scaling \"longrope\" is not supported (supported: \"none\", \"linear\", \"yarn\")");
  CHECK(refusal_with("llama.rope.scaling.factor", -2.0F) == "llama.rope.scaling.factor is not a positive number");
  CHECK(refusal_with("llama.expert_count", 8) == "mixtures of experts are not supported");
  CHECK(refusal_with("llama.vocab_size", 12) ==
        "llama.vocab_size and the number of tokens in tokenizer.ggml.tokens differ");
  CHECK(contains(refusal_with("llama.block_count", std::string("two")), "\"llama.block_count\""));

  // 1e300 is finite as the double it is stored as, and infinite as the float it is used as.
  for (const double base : {0.0, -10000.0, 1e300}) {
    CHECK(refusal_with("llama.rope.freq_base", base) == "llama.rope.freq_base is not a positive number");
  }
  for (const double epsilon : {-1e-5, 1e300}) {
    CHECK(refusal_with("llama.attention.layer_norm_rms_epsilon", epsilon) ==
          "llama.attention.layer_norm_rms_epsilon is not a number from 0 up");
  }
}

TEST_CASE("tensors that are missing or have another shape are named", "[llama][errors]") {
  TinyModel tiny;
  tiny.tied = false;
  tiny.rope_factors = {2.0F};
  const GgufBuilder complete = tiny.builder();
  REQUIRE(refusal(complete) == kNoComplaint);
  REQUIRE(complete.tensors.size() == 2 * 9 + 4);
  for (std::size_t i = 0; i < complete.tensors.size(); ++i) {
    const std::string name = complete.tensors[i].name;
    CAPTURE(name);

    GgufBuilder incomplete = complete;
    incomplete.tensors.erase(incomplete.tensors.begin() + static_cast<std::ptrdiff_t>(i));
    // A file without one of these two is another complete model: tied output, plain rotation.
    const bool optional = name == "output.weight" || name == "rope_freqs.weight";
    const std::string missing = refusal(incomplete);
    CHECK(
        (optional ? missing.empty() : missing.starts_with("tensor \"" + name + "\" is missing; it must have shape [")));

    // One row more (for a vector, one number), which is the last dimension in the file's order.
    GgufBuilder larger = complete;
    tests::GgufTensor& tensor = larger.tensors[i];
    const std::uint64_t rows = tensor.dimensions.back()++;
    tensor.data.resize(tensor.data.size() / rows * (rows + 1));
    CHECK(refusal(larger).starts_with("tensor \"" + name + "\" has shape ["));

    // The same number of elements in another shape.
    GgufBuilder reshaped = complete;
    reshaped.tensors[i].dimensions.push_back(1);
    CHECK(refusal(reshaped).starts_with("tensor \"" + name + "\" has shape [1, "));
  }
}

TEST_CASE("A weight that is NaN or infinite is refused by the tensor's name", "[llama][errors]") {
  TinyModel tiny;
  tiny.tied = false;
  const GgufBuilder complete = tiny.builder();
  for (std::size_t i = 0; i < complete.tensors.size(); ++i) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      GgufBuilder damaged = complete;
      tests::GgufTensor& tensor = damaged.tensors[i];
      std::memcpy(tensor.data.data() + tensor.data.size() - sizeof bad, &bad, sizeof bad);
      CAPTURE(tensor.name, bad);
      CHECK(refusal(damaged) ==
            "tensor \"" + tensor.name + "\" holds a value that is not a finite number: the file is damaged");
    }
  }
}

TEST_CASE("shapes that contradict the metadata", "[llama][errors]") {
  CHECK(refusal_with("llama.embedding_length", 24) ==
        "tensor \"token_embd.weight\" has shape [11, 12], and must have [11, 24]");
  CHECK(refusal_with("llama.feed_forward_length", 19) ==
        "tensor \"blk.0.ffn_gate.weight\" has shape [20, 12], and must have [19, 12]");
  CHECK(refusal_with("llama.attention.head_count_kv", 3) ==
        "tensor \"blk.0.attn_k.weight\" has shape [4, 12], and must have [6, 12]");
  CHECK(refusal_with("llama.attention.key_length", 4) ==
        "tensor \"blk.0.attn_q.weight\" has shape [12, 12], and must have [24, 12]");
  CHECK(refusal(TinyModel()
                    .builder()
                    .remove("tokenizer.ggml.tokens")
                    .add_array("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"})) ==
        "tensor \"token_embd.weight\" has shape [11, 12], and must have [2, 12]");
  CHECK(refusal_with("llama.block_count", 3).starts_with("tensor \"blk.2.attn_norm.weight\" is missing"));
}

TEST_CASE("tensors that would be left out of the computation", "[llama][errors]") {
  for (const std::string name : {"blk.0.attn_q.bias", "blk.2.attn_q.weight", "blk.0.attn_q_norm.weight",
                                 "blk.00.attn_q.weight", "rope_factors_long.weight", "output.bias"}) {
    GgufBuilder builder = TinyModel().builder();
    builder.add_tensor(name, {2}, std::vector<float>(2));
    CHECK(refusal(builder) == "tensor \"" + name + "\" is not part of the Llama architecture");
  }
  // With fewer layers than the file holds, the last ones would be skipped.
  CHECK(refusal_with("llama.block_count", 1) == "tensor \"blk.1.attn_k.weight\" is not part of the Llama architecture");
  // A name of the file is quoted: the terminal shows it, and executes nothing of it.
  GgufBuilder builder = TinyModel().builder();
  // NOLINTNEXTLINE(misc-misleading-bidirectional): it must not reach the terminal
  builder.add_tensor("a\x1b[2J\n\u202E", {2}, std::vector<float>(2));
  CHECK(refusal(builder) == R"(tensor "a\x1b[2J\n\xe2\x80\xae" is not part of the Llama architecture)");
}

// The classical bound (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1): if n products are added
// in any order, the error is at most about n * 2^-24 times the sum of their magnitudes.
TEST_CASE("linear agrees with loops in double", "[linear]") {
  const int num_threads = GENERATE(1, 2, 3, 4);
  const ThreadCount threads(num_threads);
  Random random(17);
  for (const int in_features : {1, 7, 33, 257}) {
    for (const int out_features : {1, 7, 33, 257}) {
      for (const int num_tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 65}) {
        Matrix x(num_tokens, in_features);
        Matrix weights(out_features, in_features);
        std::generate_n(x.data(), x.size(), [&] { return static_cast<float>(random.normal()); });
        std::generate_n(weights.data(), weights.size(), [&] { return static_cast<float>(random.normal()); });
        const Matrix y = common::linear(x, weights);
        REQUIRE((y.rows() == num_tokens && y.cols() == out_features));
        int num_wrong = 0;
        for (int token = 0; token < num_tokens; ++token) {
          for (int out = 0; out < out_features; ++out) {
            double sum = 0.0;
            double sum_of_sizes = 0.0;
            for (int in = 0; in < in_features; ++in) {
              const double product = static_cast<double>(x(token, in)) * static_cast<double>(weights(out, in));
              sum += product;
              sum_of_sizes += std::abs(product);
            }
            const double error = std::abs(static_cast<double>(y(token, out)) - sum);
            const double bound = (in_features + 1) * std::ldexp(1.0, -24) * sum_of_sizes;
            num_wrong += error <= bound ? 0 : 1;  // NaN counts as wrong
          }
        }
        CAPTURE(num_threads, in_features, out_features, num_tokens);
        CHECK(num_wrong == 0);
      }
    }
  }
}

TEST_CASE("linear: from 9 tokens on, a token's row does not depend on the other rows, bit for bit", "[linear]") {
  Random random(18);
  Matrix x(150, 100);
  Matrix weights(37, 100);
  std::generate_n(x.data(), x.size(), [&] { return static_cast<float>(random.normal()); });
  std::generate_n(weights.data(), weights.size(), [&] { return static_cast<float>(random.normal()); });
  const Matrix all = common::linear(x, weights);
  for (const int num_tokens : {9, 15, 16, 17, 40, 64, 65, 145}) {
    CHECK(common::linear(x.topRows(num_tokens), weights) == all.topRows(num_tokens));
    CHECK(common::linear(x.bottomRows(num_tokens), weights) == all.bottomRows(num_tokens));
  }
}

TEST_CASE("linear: up to 8 tokens, a token's row is what it is alone, bit for bit", "[linear]") {
  Random random(19);
  Matrix x(8, 100);
  Matrix weights(37, 100);
  std::generate_n(x.data(), x.size(), [&] { return static_cast<float>(random.normal()); });
  std::generate_n(weights.data(), weights.size(), [&] { return static_cast<float>(random.normal()); });
  for (int num_tokens = 1; num_tokens <= 8; ++num_tokens) {
    const Matrix product = common::linear(x.topRows(num_tokens), weights);
    Matrix sum = Matrix::Ones(num_tokens, 37);
    common::multiply_add(x.topRows(num_tokens), weights.transpose(), sum);
    for (int token = 0; token < num_tokens; ++token) {
      Matrix alone = Matrix::Ones(1, 37);
      common::multiply_add(x.row(token), weights.transpose(), alone);
      CAPTURE(num_tokens, token);
      CHECK(product.row(token) == common::linear(x.row(token), weights));
      CHECK(sum.row(token) == alone);
    }
  }
}

TEST_CASE("a product does not depend on where its numbers lie in memory", "[linear]") {
  Random random(23);
  const auto random_matrix = [&](Eigen::Index rows, Eigen::Index cols) {
    Matrix matrix(rows, cols);
    std::generate_n(matrix.data(), matrix.size(), [&] { return static_cast<float>(random.normal()); });
    return matrix;
  };
  for (const Eigen::Index rows : {3, 9, 10, 12}) {  // few, and more than that
    for (Eigen::Index depth = 1; depth <= 8; ++depth) {
      for (Eigen::Index cols = 1; cols <= 12; ++cols) {
        const Matrix a = random_matrix(rows, depth);
        const Matrix b = random_matrix(depth, cols);
        const Matrix before = random_matrix(rows, cols);
        Matrix expected = before;
        common::multiply_add(a, b, expected);
        for (Eigen::Index offset = 1; offset < 8; ++offset) {
          Matrix memory = Matrix::Zero(1, offset + rows * cols);
          Eigen::Map<Matrix> sum(memory.data() + offset, rows, cols);
          sum = before;
          common::multiply_add(a, b, sum);
          CAPTURE(rows, depth, cols, offset);
          CHECK(sum == expected);
        }
      }
    }
  }
}

TEST_CASE("linear wants as many features as the weights have", "[linear]") {
  const Matrix x = Matrix::Ones(2, 7);
  CHECK(contains(error_of<CheckError>([&] { common::linear(x, Matrix::Ones(3, 8)); }),
                 "a linear layer got 7 features, expected 8"));
  CHECK(error_of<CheckError>([&] { common::linear(x, Matrix::Ones(3, 7)); }).empty());
}
