// Which kernel computes a model's products: the choices that PRODUCTS.md names.
#include "common/cuda/model/product_kernel.h"
#include "tests/support/catch.h"

namespace common {
namespace {

// For each number of tokens, the kernel that is taken: rows up to `rows`, then tiles, wide tiles and the library.
struct Limits {
  int rows;
  int tiles;
  int wide;

  ProductKernel at(int tokens) const {
    return tokens <= rows    ? ProductKernel::kRows
           : tokens <= tiles ? ProductKernel::kTiles
           : tokens <= wide  ? ProductKernel::kWideTiles
                             : ProductKernel::kLibrary;
  }
};

constexpr int kSmolLm = 1536;
constexpr int kQwen = 3072;
constexpr int kLlama1b = 8192;
constexpr int kLlama8b = 14336;

void check(const ProductModel& model, const Limits& of_layers, const Limits& of_logits) {
  int max_fused = 0;
  for (int tokens = 1; tokens <= 300; ++tokens) {
    CAPTURE(model.longest_row, tokens);
    const ProductKernel kernel = product_kernel(model, tokens);
    CHECK(kernel == of_layers.at(tokens));
    CHECK(logits_kernel(model, tokens) == of_logits.at(tokens));
    max_fused = kernel == ProductKernel::kLibrary ? max_fused : tokens;
  }
  CHECK(max_fused_tokens(model) == max_fused);
}

}  // namespace

TEST_CASE("the kernel of a model's products, on Hopper in bfloat16") {
  const auto model = [](int longest_row) { return ProductModel{.longest_row = longest_row, .has_tiles = true}; };
  check(model(kSmolLm), {32, 32, 128}, {32, 64, 64});
  check(model(kQwen), {16, 32, 64}, {16, 64, 64});
  check(model(kLlama1b), {16, 16, 128}, {16, 64, 64});
  check(model(kLlama8b), {2, 2, 128}, {2, 64, 64});
}

TEST_CASE("the kernel of a model's products without tiles") {
  const auto model = [](Precision precision, int longest_row) {
    return ProductModel{.precision = precision, .longest_row = longest_row};
  };
  check(model(Precision::kBFloat16, kSmolLm), {32, 0, 0}, {32, 0, 0});
  check(model(Precision::kBFloat16, kLlama1b), {16, 0, 0}, {16, 0, 0});
  check(model(Precision::kBFloat16, kLlama8b), {8, 0, 0}, {8, 0, 0});
  check(model(Precision::kFloat32, kSmolLm), {1, 0, 0}, {1, 0, 0});
  check(model(Precision::kFloat32, kLlama8b), {1, 0, 0}, {1, 0, 0});
}

TEST_CASE("the kernel of a model's products with float8 weights: never wide tiles, and logits as before") {
  const auto model = [](int longest_row, ActivationType activations) {
    return ProductModel{
        .weights = WeightType::kFloat8, .activations = activations, .longest_row = longest_row, .has_tiles = true};
  };
  check(model(kLlama1b, ActivationType::kAuto), {16, 128, 128}, {16, 64, 64});
  check(model(kLlama8b, ActivationType::kAuto), {8, 128, 128}, {2, 64, 64});
  check(model(kLlama1b, ActivationType::kFloat8), {16, 128, 128}, {16, 64, 64});
  check(model(kLlama8b, ActivationType::kFloat8), {8, 64, 64}, {2, 64, 64});
}

}  // namespace common
