// Stage 7 without a GPU: the choice of the device. The kernels' own tests are gpu_*.cpp.
#include "tests/support/catch.h"

#include <string>

#include "common/app/notes.h"
#include "common/base/check.h"
#include "stage7/cpu_runner.h"
#include "stage7/engine.h"
#include "tests/stages/engine_fixtures.h"

using common::KvCacheType;
using common::Precision;
using stage7::CpuRunner;
using stage7::Device;
using stage7::Engine;
using stage7::EngineOptions;
using tests::make_request;
using tests::small_model;

namespace {

EngineOptions options_for(Device device, Precision precision, KvCacheType kv_cache = KvCacheType::kAuto) {
  EngineOptions options;
  options.gpu = {device, {.precision = precision, .kv_cache = kv_cache}};
  return options;
}

// The message for the user; empty if the engine can be made.
std::string refusal(Device device, Precision precision, KvCacheType kv_cache = KvCacheType::kAuto) {
  try {
    const Engine engine(small_model(), options_for(device, precision, kv_cache));
  } catch (const common::InputError& error) {
    return error.what();
  }
  return "";
}

bool has_gpu() {
  Engine engine(small_model(), EngineOptions());
  return dynamic_cast<const CpuRunner*>(&engine.runner()) == nullptr;
}

// What a check of a message compares, so that it shows the message if it fails.
const std::string kNone;

// The part, if the message has it; else all of the message.
std::string part_of(const std::string& message, const std::string& part) {
  return tests::contains(message, part) ? part : message;
}

}  // namespace

TEST_CASE("without a GPU: the CPU with a note, unless a GPU is requested by name (stage 7, invariant 7)") {
  if (has_gpu()) {
    SKIP_TEST("there is a GPU");
  }
  CHECK(refusal(Device::kAuto, Precision::kFloat32) == kNone);
  CHECK(refusal(Device::kGpu, Precision::kFloat32) != kNone);
  CHECK(refusal(Device::kAuto, Precision::kBFloat16) != kNone);
  CHECK(common::cpu_reason() == refusal(Device::kGpu, Precision::kFloat32));
}

TEST_CASE("without a GPU: the engine computes on the CPU") {
  if (has_gpu()) {
    SKIP_TEST("there is a GPU");
  }
  Engine engine(small_model(), options_for(Device::kAuto, Precision::kFloat32));
  const auto completions = engine.run(std::vector{make_request(5, 7)}, [](int, common::Token) {});
  CHECK(completions[0].tokens.size() == 7);
  CHECK(engine.timing().prefill_tokens == 5);
  CHECK(engine.timing().decode_tokens == 6);  // the last token of a text is never computed
}

TEST_CASE("the CPU computes in float32 only") {
  CHECK(refusal(Device::kCpu, Precision::kFloat32) == kNone);
  CHECK(part_of(refusal(Device::kCpu, Precision::kBFloat16), "float32") == "float32");
  Engine engine(small_model(), options_for(Device::kCpu, Precision::kFloat32));
  CHECK(dynamic_cast<CpuRunner*>(&engine.runner()) != nullptr);
}

TEST_CASE("float8 K and V without kernels for them end in one clear line (stage 7, invariant 7)") {
  CHECK(refusal(Device::kCpu, Precision::kFloat32, KvCacheType::kFloat8) == "the CPU computes in float32 only");
  CHECK(refusal(Device::kCpu, Precision::kBFloat16, KvCacheType::kFloat8) == "the CPU computes in float32 only");
  for (const Device device : {Device::kAuto, Device::kGpu}) {
    CHECK(part_of(refusal(device, Precision::kFloat32, KvCacheType::kFloat8), "--precision bf16") ==
          "--precision bf16");
    CHECK(refusal(device, Precision::kBFloat16, KvCacheType::kFloat8) != kNone);  // blocks and head_dim of 8
  }
}

TEST_CASE("float8 weights without kernels for them end in one clear line (stage 7, invariant 7)") {
  using common::ActivationType;
  using common::WeightType;
  const auto refusal_of = [](Device device, Precision precision, WeightType weights = WeightType::kFloat8,
                             ActivationType activations = ActivationType::kAuto) -> std::string {
    EngineOptions options = options_for(device, precision);
    options.gpu.types.weights = weights;
    options.gpu.types.activations = activations;
    try {
      const Engine engine(small_model(), options);
    } catch (const common::InputError& error) {
      return error.what();
    }
    return "";
  };
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    CHECK(refusal_of(Device::kCpu, precision) == "the CPU computes in float32 only");
  }
  for (const Device device : {Device::kAuto, Device::kGpu}) {
    CHECK(part_of(refusal_of(device, Precision::kFloat32), "--precision bf16") == "--precision bf16");
    CHECK(refusal_of(device, Precision::kBFloat16).empty() == has_gpu());
    for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
      const std::string reason = refusal_of(device, precision, WeightType::kAuto, ActivationType::kFloat8);
      CHECK(part_of(reason, "need --weights fp8") == "need --weights fp8");
    }
    if (!has_gpu()) {
      CHECK(refusal_of(device, Precision::kBFloat16, WeightType::kFloat8, ActivationType::kFloat8) ==
            refusal_of(device, Precision::kBFloat16));
    }
  }
  CHECK(refusal_of(Device::kCpu, Precision::kFloat32, WeightType::kAuto, ActivationType::kFloat8) ==
        "the CPU computes in float32 only");
}

TEST_CASE("next draws the token that sampling from the logits draws") {
  Engine first(small_model(), options_for(Device::kCpu, Precision::kFloat32));
  Engine second(small_model(), options_for(Device::kCpu, Precision::kFloat32));
  const std::vector<common::Token> prompt = make_request(9, 1).prompt;
  for (const float temperature : {0.0F, 1.5F}) {
    common::Request request = make_request(9, 1);
    request.sampling.temperature = temperature;
    request.sample_index = 3;
    common::Completion completion;
    REQUIRE(first.start(0, prompt, 0));
    REQUIRE(second.start(0, prompt, 0));
    const std::span rest = std::span(prompt).subspan(static_cast<std::size_t>(first.manager().length(0)));
    const auto logits = first.append(0, rest);
    CHECK(second.next(0, rest, request, completion) ==
          common::sample({logits->data(), static_cast<std::size_t>(logits->cols())}, request.sampling, 9, 3));
    first.manager().free(0);
    second.manager().free(0);
  }
}
