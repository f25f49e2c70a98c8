// The products of a layer, by each of the kernels that compute them: the ladder of products in PRODUCTS.md.
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <string>
#include <vector>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "common/cuda/model/fused_linear.h"
#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/model/matrix_products.h"
#include "common/cuda/model/tiled_linear.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

using common::FusedLinear;
using common::Precision;
using common::ProductKernel;

struct LayerShape {
  std::string name;
  int hidden_size;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int feed_forward_size;

  int q_rows() const { return num_heads * head_dim; }
  int kv_rows() const { return num_kv_heads * head_dim; }
  int qkv_rows() const { return q_rows() + 2 * kv_rows(); }
  std::int64_t num_weights() const {
    return std::int64_t{hidden_size} * (qkv_rows() + q_rows() + 3 * std::int64_t{feed_forward_size});
  }
};

// The first shape's head norms are left out.
const LayerShape kLayers[] = {{"Qwen3 0.6B", 1024, 16, 8, 128, 3072},
                              {"Llama 3.2 1B", 2048, 32, 8, 64, 8192},
                              {"Llama 3 8B", 4096, 32, 8, 128, 14336}};
constexpr int kNumTokens[] = {1, 8, 16, 32, 64, 96, 128};
constexpr int kMaxTokens = 128;

// How a layer's products are computed.
enum class Rung {
  kRowsOneByOne,  // by rows, and no launch begins before the last one has ended
  kRows,
  kTilesAlone,  // by tiles, each of one thread block: no clusters
  kTiles,
  kWideTiles,
  kLibrary,
  kLibraryAndRest,  // with the launches for the norms, the rotation and SiLU, which the others do not need
};

struct NamedRung {
  Rung rung;
  const char* name;
};
constexpr NamedRung kRungs[] = {{Rung::kRowsOneByOne, "by rows, one launch after the other"},
                                {Rung::kRows, "by rows, weights ordered early"},
                                {Rung::kTilesAlone, "by tiles, a thread block each"},
                                {Rung::kTiles, "by tiles, in clusters"},
                                {Rung::kWideTiles, "by wide tiles"},
                                {Rung::kLibrary, "library, products alone"},
                                {Rung::kLibraryAndRest, "library, with its small launches"}};

__global__ void wait_for_all() {}

// Several layers' weights, enough that none is found in the L2 cache when its turn comes, and one step's activations.
class Layers {
 public:
  explicit Layers(const LayerShape& shape)
      : shape_(shape),
        num_layers_(static_cast<int>((std::int64_t{600} << 20) / (2 * shape.num_weights())) + 1),
        weights_(sizeof(std::uint16_t) * static_cast<std::size_t>(num_layers_ * shape.num_weights())),
        x_(bytes_of(shape.hidden_size)),
        qkv_(bytes_of(shape.qkv_rows())),
        q_(bytes_of(shape.q_rows())),
        gate_up_(bytes_of(2 * shape.feed_forward_size)),
        activated_(bytes_of(shape.feed_forward_size)),
        residual_(static_cast<std::size_t>(kMaxTokens) * static_cast<std::size_t>(shape.hidden_size)),
        norm_(static_cast<std::size_t>(shape.hidden_size)),
        squares_(residual_.size() / common::kSquaresColumns),
        rotation_(static_cast<std::size_t>(kMaxTokens) * static_cast<std::size_t>(shape.head_dim) / 2),
        products_(Precision::kBFloat16) {
    const auto fill = [&](common::DeviceMemory& memory, std::uint64_t seed, float width) {
      common::fill_uniform(Precision::kBFloat16, seed, 0, width, static_cast<std::int64_t>(memory.bytes() / 2),
                           memory.data(), nullptr);
    };
    fill(weights_, 1, 0.02F);
    for (common::DeviceMemory* memory : {&x_, &qkv_, &q_, &gate_up_, &activated_}) {
      fill(*memory, 2, 1.0F);
    }
    common::fill_floats(residual_.data(), static_cast<std::int64_t>(residual_.size()), 0.5F, nullptr);
    common::fill_floats(norm_.data(), static_cast<std::int64_t>(norm_.size()), 1.0F, nullptr);
    common::fill_floats(squares_.data(), static_cast<std::int64_t>(squares_.size()), 1.0F, nullptr);
    common::fill_floats(reinterpret_cast<float*>(rotation_.data()), 2 * static_cast<std::int64_t>(rotation_.size()),
                        0.7F, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  int num_layers() const { return num_layers_; }

  void enqueue(int layer, Rung rung, int num_tokens, cudaStream_t stream) {
    const std::uint16_t* weights = static_cast<const std::uint16_t*>(weights_.data()) + layer * shape_.num_weights();
    const std::uint16_t* output = weights + std::int64_t{shape_.qkv_rows()} * shape_.hidden_size;
    const std::uint16_t* gate_up = output + std::int64_t{shape_.hidden_size} * shape_.q_rows();
    const std::uint16_t* down = gate_up + 2 * std::int64_t{shape_.feed_forward_size} * shape_.hidden_size;
    if (rung == Rung::kLibrary || rung == Rung::kLibraryAndRest) {
      enqueue_library(weights, output, gate_up, down, rung == Rung::kLibraryAndRest, num_tokens, stream);
      return;
    }
    FusedLinear qkv_linear = linear(rung, weights, shape_.qkv_rows(), shape_.hidden_size, x_, num_tokens);
    qkv_linear.squares = squares_.data();
    FusedLinear gate_linear = linear(rung, gate_up, 2 * shape_.feed_forward_size, shape_.hidden_size, x_, num_tokens);
    gate_linear.squares = squares_.data();
    const FusedLinear output_linear = linear(rung, output, shape_.hidden_size, shape_.q_rows(), q_, num_tokens);
    const FusedLinear down_linear =
        linear(rung, down, shape_.hidden_size, shape_.feed_forward_size, activated_, num_tokens);
    const bool has_clusters = rung != Rung::kTilesAlone;
    const common::Rotary rotary = this->rotary();
    const common::Residual residual = this->residual(qkv_linear.kernel);
    const auto between = [&] {
      if (rung == Rung::kRowsOneByOne) {
        wait_for_all<<<1, 32, 0, stream>>>();
      }
    };
    if (has_clusters) {
      common::fused_qkv(qkv_linear, rotary, q_.data(), qkv_.data(), stream);
      between();
      common::fused_add(output_linear, residual, stream);
      between();
      common::fused_gated_silu(gate_linear, activated_.data(), stream);
      between();
      common::fused_add(down_linear, residual, stream);
      between();
      return;
    }
    using Kind = common::TileFinish::Kind;
    common::TileFinish finish{.kind = Kind::kRotateAndSplit};
    finish.rotate_and_split = {rotary, static_cast<__nv_bfloat16*>(q_.data()),
                               static_cast<__nv_bfloat16*>(qkv_.data())};
    launch_alone(qkv_linear, finish, stream);
    finish = {.kind = Kind::kAddToResidual};
    finish.add_to_residual = {residual};
    launch_alone(output_linear, finish, stream);
    finish = {.kind = Kind::kGatedSilu};
    finish.gated_silu = {static_cast<__nv_bfloat16*>(activated_.data()), gate_linear.num_rows};
    launch_alone(gate_linear, finish, stream);
    finish = {.kind = Kind::kAddToResidual};
    finish.add_to_residual = {residual};
    launch_alone(down_linear, finish, stream);
  }

 private:
  static std::size_t bytes_of(int cols) {
    return sizeof(std::uint16_t) * static_cast<std::size_t>(kMaxTokens) * static_cast<std::size_t>(cols);
  }

  static ProductKernel kernel_of(Rung rung) {
    switch (rung) {
      case Rung::kRowsOneByOne:
      case Rung::kRows:
        return ProductKernel::kRows;
      case Rung::kWideTiles:
        return ProductKernel::kWideTiles;
      default:
        return ProductKernel::kTiles;
    }
  }

  static FusedLinear linear(Rung rung, const void* weights, int rows, int cols, const common::DeviceMemory& x,
                            int num_tokens) {
    return {.kernel = kernel_of(rung),
            .weights = weights,
            .num_rows = rows,
            .num_cols = cols,
            .num_tokens = num_tokens,
            .x = x.data(),
            .num_x_rows = kMaxTokens,
            .epsilon = 1e-5F};
  }

  static void launch_alone(const FusedLinear& linear, const common::TileFinish& finish, cudaStream_t stream) {
    common::ClusterCounts alone{};
    alone[1] = common::max_clusters()[1];
    const bool adds = finish.kind == common::TileFinish::Kind::kAddToResidual;
    common::launch_tiled(linear, finish, common::plan_tiles(linear, adds ? common::kTileSquaresColumns : 8, alone),
                         stream);
  }

  common::Rotary rotary() const {
    return {.rotation = rotation_.data(),
            .head_dim = shape_.head_dim,
            .q_rows = shape_.q_rows(),
            .kv_rows = shape_.kv_rows()};
  }
  common::Residual residual(ProductKernel kernel) {
    return {.values = residual_.data(),
            .norm = norm_.data(),
            .weighted = x_.data(),
            .squares = squares_.data(),
            .squares_columns = kernel == ProductKernel::kRows ? common::kSquaresColumns : common::kTileSquaresColumns,
            .num_cols = shape_.hidden_size};
  }

  void enqueue_library(const void* qkv, const void* output, const void* gate_up, const void* down, bool with_rest,
                       int num_tokens, cudaStream_t stream) {
    const common::Norm norm{.residual = residual_.data(),
                            .num_residual_rows = num_tokens,
                            .weights = norm_.data(),
                            .num_cols = shape_.hidden_size,
                            .epsilon = 1e-5F};
    const auto multiply = [&](const common::DeviceMemory& x, const void* weights, int rows, int cols, void* to,
                              bool adds) {
      products_.multiply({.x = x.data(),
                          .weights = weights,
                          .num_tokens = num_tokens,
                          .num_rows = rows,
                          .num_cols = cols,
                          .output = to,
                          .float_output = adds,
                          .add = adds},
                         stream);
    };
    if (with_rest) {
      common::rms_norm(Precision::kBFloat16, norm, num_tokens, x_.data(), stream);
    }
    multiply(x_, qkv, shape_.qkv_rows(), shape_.hidden_size, qkv_.data(), false);
    if (with_rest) {
      common::rotate_and_split(Precision::kBFloat16, rotary(), {}, {}, num_tokens, qkv_.data(), q_.data(), stream);
    }
    multiply(q_, output, shape_.hidden_size, shape_.q_rows(), residual_.data(), true);
    if (with_rest) {
      common::rms_norm(Precision::kBFloat16, norm, num_tokens, x_.data(), stream);
    }
    multiply(x_, gate_up, 2 * shape_.feed_forward_size, shape_.hidden_size, gate_up_.data(), false);
    if (with_rest) {
      common::gated_silu(Precision::kBFloat16, gate_up_.data(), shape_.feed_forward_size, num_tokens, activated_.data(),
                         stream);
    }
    multiply(activated_, down, shape_.hidden_size, shape_.feed_forward_size, residual_.data(), true);
  }

  LayerShape shape_;
  int num_layers_;
  common::DeviceMemory weights_;
  common::DeviceMemory x_;
  common::DeviceMemory qkv_;
  common::DeviceMemory q_;
  common::DeviceMemory gate_up_;
  common::DeviceMemory activated_;
  common::DeviceArray<float> residual_;
  common::DeviceArray<float> norm_;
  common::DeviceArray<float> squares_;
  common::DeviceArray<float2> rotation_;
  common::MatrixProducts products_;
};

bool exists(Rung rung, int num_tokens) {
  switch (rung) {
    case Rung::kRowsOneByOne:
    case Rung::kRows:
      return num_tokens <= 32;
    case Rung::kTilesAlone:
    case Rung::kTiles:
      return common::can_tile(Precision::kBFloat16) && num_tokens <= common::max_tiled_tokens(false);
    case Rung::kWideTiles:
      return common::can_tile(Precision::kBFloat16) && num_tokens <= common::kMaxWideTokens;
    default:
      return true;
  }
}

}  // namespace

void print_product_speed(std::ostream& output) {
  const common::Stream stream;
  const Pool pool(std::int64_t{1} << 30);
  const double ceiling = print_machine(stream, pool, output);
  for (const LayerShape& shape : kLayers) {
    Layers layers(shape);
    std::vector<std::string> header = {"products of a layer, us"};
    for (const int num_tokens : kNumTokens) {
      header.push_back(std::to_string(num_tokens) + (num_tokens == 1 ? " token" : ""));
    }
    common::Table table(header);
    common::Progress progress("measuring products of " + shape.name, std::int64_t{std::size(kRungs)});
    for (const NamedRung& named : kRungs) {
      std::vector<std::string> cells = {named.name};
      for (const int num_tokens : kNumTokens) {
        cells.push_back(!exists(named.rung, num_tokens)
                            ? "-"
                            : common::format_microseconds(
                                  common::microseconds_per_call(stream, 2 * layers.num_layers(), [&](int call) {
                                    layers.enqueue(call % layers.num_layers(), named.rung, num_tokens, stream.get());
                                  })));
      }
      table.add_row(cells);
      progress.advance();
    }
    progress.clear();
    output << "Products of a layer of " << shape.name << ", bfloat16, weights not in the L2 cache: to read them takes "
           << common::format_microseconds(2e-3 * static_cast<double>(shape.num_weights()) / ceiling) << " us.\n"
           << table.to_string() << "\n";
  }
}

}  // namespace
