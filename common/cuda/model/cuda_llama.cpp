#include "common/cuda/model/cuda_llama.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/cuda/model/float8_rows.h"
#include "common/cuda/model/fused_linear.h"
#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/model/llama_weights.h"
#include "common/cuda/model/matrix_products.h"
#include "common/cuda/model/peer_sums.h"
#include "common/cuda/runtime/device.h"

namespace common {
namespace {

const LlamaConfig& checked(const LlamaConfig& config, const GpuTypes& types) {
  COMMON_CHECK(types.weights == WeightType::kAuto || types.precision == Precision::kBFloat16,
               "float8 goes with bfloat16");
  COMMON_CHECK(types.activations == ActivationType::kAuto || types.weights == WeightType::kFloat8,
               "float8 goes with float8");
  if (const std::string reason = CudaLlama::unsupported(config, types); !reason.empty()) {
    throw InputError(reason);
  }
  return config;
}

bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

}  // namespace

struct CudaLlama::Impl {
  Communicator* peers;  // nullptr: this GPU has the whole model
  Shard shard;
  LlamaConfig config;  // the shard's
  Precision precision;
  WeightType weight_type;
  ActivationType activation_type;
  int max_tokens;
  int q_cols;
  int kv_cols;
  ProductModel product_model;
  CudaLlamaWeights weights;
  MatrixProducts products;
  // One step's activations, for max_tokens tokens.
  DeviceArray<float> residual;   // [., hidden_size]
  DeviceArray<float2> rotation;  // [., head_dim / 2], or twice that: see look_up
  DeviceMemory normed;           // [., hidden_size]
  DeviceMemory weighted;         // [max_fused, hidden_size], see fused_linear.h
  DeviceArray<float> squares;    // [max_fused, hidden_size / kSquaresColumns]
  DeviceMemory qkv;              // [., q_cols + 2 * kv_cols], or [., 2 * kv_cols] if the product has put Q into q
  DeviceMemory q;                // [., q_cols]
  DeviceMemory attended;         // [., q_cols]
  DeviceMemory gate_up;          // [., 2 * feed_forward_size]; also what goes to the residual, if that is scaled or
                                 //   normalised first
  DeviceMemory activated;        // [., feed_forward_size], or [max_fused, feed_forward_size] with float8 activations
  DeviceMemory argmax_scratch;
  DeviceMemory unpacked;  // with float8 weights alone, the largest matrix of a layer
  // With float8 activations, what the library multiplies next.
  DeviceArray<std::uint8_t> rounded;  // [., the longest row]
  DeviceArray<float> token_scales;    // [.]
  // With peers: the sums to which this GPU adds a part, a fused product's in float32; and ranks of logits.
  PeerSums sums;
  DeviceArray<unsigned long long> ranks;
  int num_tokens = 0;  // the last forward's

  using Layer = CudaLlamaWeights::Layer;
  using LayerMatrix = CudaLlamaWeights::LayerMatrix;

  Impl(const LlamaConfig& whole, const GpuTypes& types, int llama_max_tokens, Communicator* communicator)
      : peers(communicator),
        shard(peers == nullptr ? Shard{} : peers->shard()),
        config(checked(shard_config(whole, shard.count), types)),
        precision(types.precision),
        weight_type(types.weights),
        activation_type(types.activations),
        max_tokens(llama_max_tokens),
        q_cols(config.num_heads * config.head_dim),
        kv_cols(config.num_kv_heads * config.head_dim),
        product_model{.precision = precision,
                      .weights = weight_type,
                      .activations = activation_type,
                      .longest_row = longest_row(),
                      .has_tiles = can_tile(precision)},
        weights(whole, precision, weight_type, shard),
        products(precision),
        residual(activation_elements(config.hidden_size)),
        rotation(activation_elements(config.head_dim / 2 * (config.window_rope_freq_base > 0.0F ? 2 : 1))),
        normed(activation_bytes(config.hidden_size)),
        weighted(static_cast<std::size_t>(max_fused() * config.hidden_size * bytes_of(precision))),
        squares(static_cast<std::size_t>(max_fused() * config.hidden_size / kSquaresColumns)),
        qkv(activation_bytes(q_cols + 2 * kv_cols)),
        q(activation_bytes(q_cols)),
        attended(activation_bytes(q_cols)),
        gate_up(activation_bytes(2 * std::max(config.feed_forward_size, config.post_norms ? config.hidden_size : 0))),
        activated(has_float8_activations()
                      ? static_cast<std::size_t>(max_fused() * config.feed_forward_size * bytes_of(precision))
                      : activation_bytes(config.feed_forward_size)),
        argmax_scratch(argmax_scratch_bytes(llama_max_tokens)),
        unpacked(has_float8() && !has_float8_activations() && max_tokens > max_fused()
                     ? largest_matrix() * sizeof(std::uint16_t)
                     : 0),
        rounded(has_float8_activations() ? activation_elements(longest_row()) : 0),
        token_scales(has_float8_activations() ? activation_elements(1) : 0),
        sums(peers,
             peers == nullptr ? 0
                              : std::max(activation_bytes(config.hidden_size),
                                         static_cast<std::size_t>(max_fused() * config.hidden_size) * sizeof(float)),
             config.hidden_size),
        ranks(peers == nullptr ? 0 : static_cast<std::size_t>(llama_max_tokens)) {
    COMMON_CHECK(peers == nullptr || !has_float8_activations(), "float8 activations are for one GPU");
    CUDA_CHECK(cudaMemset(argmax_scratch.data(), 0, argmax_scratch.bytes()));
  }

  int first_token() const { return shard.rank * config.vocab_size; }
  int longest_row() const { return std::max({config.hidden_size, q_cols, config.feed_forward_size}); }
  bool has_float8() const { return weight_type == WeightType::kFloat8; }
  bool has_float8_activations() const { return activation_type == ActivationType::kFloat8; }
  // The number of elements of the largest matrix.
  std::size_t largest_matrix() const {
    const std::int64_t rows = std::max(q_cols + 2 * kv_cols, 2 * config.feed_forward_size);
    return static_cast<std::size_t>(rows * config.hidden_size);
  }
  int max_fused() const { return max_fused_tokens(product_model); }
  ProductKernel kernel_for(int tokens) const { return product_kernel(product_model, tokens); }
  bool is_fused(int tokens) const { return kernel_for(tokens) != ProductKernel::kLibrary; }

  std::size_t activation_elements(int cols) const {
    COMMON_CHECK(max_tokens > 0, "a step has tokens");
    return static_cast<std::size_t>(max_tokens) * static_cast<std::size_t>(cols);
  }
  std::size_t activation_bytes(int cols) const {
    return activation_elements(cols) * static_cast<std::size_t>(bytes_of(precision));
  }

  Rotary rotary(int layer, const float* bias) const {
    const bool is_apart = weights.window_frequencies != nullptr && !config.sees_all(layer);
    return {.rotation = rotation.data() + (is_apart ? std::int64_t{num_tokens} * (config.head_dim / 2) : 0),
            .head_dim = config.head_dim,
            .q_rows = q_cols,
            .kv_rows = kv_cols,
            .bias = bias};
  }

  // next_norm: of the product that reads the residual stream next. Only fused products need it prepared.
  Residual residual_for(const float* next_norm) const {
    return {.values = residual.data(),
            .norm = next_norm,
            .weighted = is_fused(num_tokens) ? weighted.data() : nullptr,
            .squares = squares.data(),
            .squares_columns = kernel_for(num_tokens) == ProductKernel::kRows ? kSquaresColumns : kTileSquaresColumns,
            .num_cols = config.hidden_size};
  }
  FusedLinear of_residual(const LayerMatrix& matrix, int rows) const {
    return {.kernel = kernel_for(num_tokens),
            .precision = precision,
            .weights = matrix.data,
            .row_scales = matrix.row_scales,
            .num_rows = rows,
            .num_cols = config.hidden_size,
            .num_tokens = num_tokens,
            .x = weighted.data(),
            .num_x_rows = max_fused(),
            .squares = squares.data(),
            .epsilon = config.rms_epsilon};
  }
  FusedLinear of_activations(const LayerMatrix& matrix, int rows, const DeviceMemory& activations, int cols) const {
    return {.kernel = kernel_for(num_tokens),
            .precision = precision,
            .weights = matrix.data,
            .row_scales = matrix.row_scales,
            .num_rows = rows,
            .num_cols = cols,
            .num_tokens = num_tokens,
            .x = activations.data(),
            .num_x_rows = rows_of(activations, cols)};
  }
  // All allocated rows: the copy engine is slower where it has to put zeros for rows that do not exist.
  int rows_of(const DeviceMemory& activations, int cols) const {
    return static_cast<int>(activations.bytes() / static_cast<std::size_t>(cols * bytes_of(precision)));
  }
  Norm norm_of_residual(const float* norm) const {
    return {.residual = residual.data(),
            .num_residual_rows = num_tokens,
            .weights = norm,
            .num_cols = config.hidden_size,
            .epsilon = config.rms_epsilon};
  }

  HeadNorms head_norms(const Layer& layer) const {
    return {.q = layer.q_norm, .k = layer.k_norm, .epsilon = config.rms_epsilon};
  }

  // Float8 is unpacked for the library, or the library multiplies it by float8.
  void multiply(MatrixProduct product, const LayerMatrix& matrix, cudaStream_t stream) {
    if (has_float8_activations()) {
      product = of_float8(product);
    } else if (matrix.row_scales != nullptr) {
      unpack_float8(matrix.data, matrix.row_scales, product.num_rows, product.num_cols, unpacked.data(), stream);
      product.weights = unpacked.data();
    }
    products.multiply(product, stream);
  }
  MatrixProduct of_float8(MatrixProduct product) const {
    product.x = rounded.data();
    product.is_float8 = true;
    return product;
  }
  // Of a product of float8 and float8.
  SumScales sum_scales(const LayerMatrix& matrix) const {
    return has_float8_activations() ? SumScales{token_scales.data(), matrix.row_exponents} : SumScales{};
  }
  Float8Rows float8_rows() const { return {rounded.data(), token_scales.data()}; }

  // The two products of a layer that are added to the residual stream. With peers each GPU has a part of the sum.
  enum Added { kOutput, kDown };
  int num_sums() const { return 2 * config.num_layers; }
  // A product that is normalised before it is added has a place of its own, where nothing else is at the time.
  void* destination(Added which) const {
    return peers != nullptr ? sums.part(which) : config.post_norms ? gate_up.data() : residual.data();
  }
  SumNorm sum_norm(int layer, Added which) const {
    const Layer& own = weights.layers[static_cast<std::size_t>(layer)];
    return {which == kOutput ? own.post_attention_norm : own.post_feed_forward_norm, config.rms_epsilon};
  }
  // type: of the product's numbers at its destination.
  void add_normalised(int layer, Added which, Precision type, const Residual& to, const Normed& normalised,
                      cudaStream_t stream) {
    PartialSum sum;
    sum.parts[0] = destination(which);
    sum.num_parts = 1;
    sum.norm = sum_norm(layer, which);
    add_sum(precision, sum, type, num_tokens, to, normalised, stream);
  }
  void add(int layer, Added which, const FusedLinear& linear, const Residual& to, cudaStream_t stream) {
    if (peers != nullptr) {
      sums.add_fused(2 * layer + which, linear, sum_norm(layer, which), to, stream);
    } else if (config.post_norms) {
      fused_logits(linear, static_cast<float*>(destination(which)), stream);
      add_normalised(layer, which, Precision::kFloat32, to, {}, stream);
    } else {
      fused_add(linear, to, stream);
    }
  }
  // The residual stream goes to `normed` too, or to `rounded`, with the norm that is next; nullptr: it does not.
  void add(int layer, Added which, const MatrixProduct& product, const LayerMatrix& matrix, const float* next_norm,
           cudaStream_t stream) {
    multiply(product, matrix, stream);
    const Normed normalised{next_norm == nullptr ? nullptr : normed.data(), config.rms_epsilon};
    if (peers != nullptr) {
      sums.add(which, precision, precision, num_tokens, sum_norm(layer, which), residual_for(next_norm), normalised,
               stream);
    } else if (config.post_norms) {
      add_normalised(layer, which, precision, residual_for(next_norm), normalised, stream);
    } else if (has_float8_activations()) {
      // The kernel that scales the product also adds it. Nothing reads what it makes of the last layer's.
      add_and_norm_to_float8({gate_up.data(), sum_scales(matrix)},
                             {.values = residual.data(),
                              .norm = next_norm == nullptr ? weights.output_norm : next_norm,
                              .num_cols = config.hidden_size},
                             config.rms_epsilon, num_tokens, float8_rows(), stream);
    } else if (next_norm != nullptr) {
      normalise(next_norm, stream);
    }
  }
  // For the library's products.
  void normalise(const float* norm, cudaStream_t stream) {
    if (has_float8_activations()) {
      rms_norm_to_float8(norm_of_residual(norm), num_tokens, float8_rows(), stream);
    } else {
      rms_norm(precision, norm_of_residual(norm), num_tokens, normed.data(), stream);
    }
  }

  // The four products of a layer, for any number of tokens.
  MatrixProduct qkv_product(const Layer& layer, int tokens) const {
    return {.x = normed.data(),
            .weights = layer.qkv.data,
            .num_tokens = tokens,
            .num_rows = q_cols + 2 * kv_cols,
            .num_cols = config.hidden_size,
            .output = qkv.data()};
  }
  MatrixProduct output_product(const Layer& layer, int tokens) const {
    return residual_product(attended.data(), layer.output.data, tokens, q_cols, kOutput);
  }
  MatrixProduct gate_up_product(const Layer& layer, int tokens) const {
    return {.x = normed.data(),
            .weights = layer.gate_up.data,
            .num_tokens = tokens,
            .num_rows = 2 * config.feed_forward_size,
            .num_cols = config.hidden_size,
            .output = gate_up.data()};
  }
  MatrixProduct down_product(const Layer& layer, int tokens) const {
    return residual_product(activated.data(), layer.down.data, tokens, config.feed_forward_size, kDown);
  }
  // The product is added to the residual stream at once, unless it is a part of a sum over several GPUs, has no scales
  // yet, or is normalised first.
  MatrixProduct residual_product(const void* x, const void* matrix, int tokens, int num_cols, Added which) const {
    const bool adds = peers == nullptr && !has_float8_activations() && !config.post_norms;
    return {.x = x,
            .weights = matrix,
            .num_tokens = tokens,
            .num_rows = config.hidden_size,
            .num_cols = num_cols,
            .output = has_float8_activations() ? gate_up.data() : destination(which),
            .float_output = adds,
            .add = adds};
  }
  MatrixProduct logits_product(int rows, float* logits) const {
    return {.x = normed.data(),
            .weights = weights.output,
            .num_tokens = rows,
            .num_rows = config.vocab_size,
            .num_cols = config.hidden_size,
            .output = logits,
            .float_output = true};
  }

  // K begins at this column of `qkv`, and V follows.
  CudaAttentionCall attention_call(int layer, int k_column, cudaStream_t stream) const {
    const auto qkv_at = [&](int column) {
      return static_cast<const std::byte*>(qkv.data()) + std::int64_t{column} * bytes_of(precision);
    };
    return {.layer = layer,
            .num_tokens = num_tokens,
            .q = q.data(),
            .k = qkv_at(k_column),
            .v = qkv_at(k_column + kv_cols),
            .kv_row_stride = k_column + 2 * std::int64_t{kv_cols},
            .output = attended.data(),
            .stream = stream};
  }

  void fused_layer(int index, const CudaAttentionFn& attention, cudaStream_t stream) {
    const Layer& layer = weights.layers[static_cast<std::size_t>(index)];
    const FusedLinear qkv_linear = of_residual(layer.qkv, q_cols + 2 * kv_cols);
    if (config.qk_norm) {
      // The norm of a head needs all of its columns, and several thread blocks compute them.
      fused_qkv(qkv_linear, Rotary::none(q_cols + 2 * kv_cols, layer.qkv_bias), nullptr, qkv.data(), stream);
      rotate_and_split(precision, rotary(index, nullptr), head_norms(layer), {}, num_tokens, qkv.data(), q.data(),
                       stream);
      attention(attention_call(index, q_cols, stream));
    } else {
      fused_qkv(qkv_linear, rotary(index, layer.qkv_bias), q.data(), qkv.data(), stream);
      attention(attention_call(index, 0, stream));
    }
    add(index, kOutput, of_activations(layer.output, config.hidden_size, attended, q_cols),
        residual_for(layer.feed_forward_norm), stream);
    const FusedLinear gate_up_linear = of_residual(layer.gate_up, 2 * config.feed_forward_size);
    if (config.gelu) {
      fused_qkv(gate_up_linear, Rotary::none(gate_up_linear.num_rows, nullptr), nullptr, gate_up.data(), stream);
      gated_gelu(precision, gate_up.data(), config.feed_forward_size, num_tokens, activated.data(), stream);
    } else {
      fused_gated_silu(gate_up_linear, activated.data(), stream);
    }
    add(index, kDown, of_activations(layer.down, config.hidden_size, activated, config.feed_forward_size),
        residual_for(norm_of_layer(index + 1)), stream);
  }

  const float* norm_of_layer(int index) const {
    return index < config.num_layers ? weights.layers[static_cast<std::size_t>(index)].attention_norm
                                     : weights.output_norm;
  }

  void layer_of_products(int index, const CudaAttentionFn& attention, cudaStream_t stream) {
    const Layer& layer = weights.layers[static_cast<std::size_t>(index)];
    if (index == 0) {
      normalise(layer.attention_norm, stream);
    }
    multiply(qkv_product(layer, num_tokens), layer.qkv, stream);
    rotate_and_split(precision, rotary(index, layer.qkv_bias), head_norms(layer), sum_scales(layer.qkv), num_tokens,
                     qkv.data(), q.data(), stream);
    attention(attention_call(index, q_cols, stream));
    if (has_float8_activations()) {
      round_to_float8(attended.data(), q_cols, num_tokens, float8_rows(), stream);
    }
    add(index, kOutput, output_product(layer, num_tokens), layer.output, layer.feed_forward_norm, stream);
    multiply(gate_up_product(layer, num_tokens), layer.gate_up, stream);
    if (has_float8_activations()) {
      gated_silu_to_float8({gate_up.data(), sum_scales(layer.gate_up)}, config.feed_forward_size, num_tokens,
                           float8_rows(), stream);
    } else {
      (config.gelu ? gated_gelu : gated_silu)(precision, gate_up.data(), config.feed_forward_size, num_tokens,
                                              activated.data(), stream);
    }
    // Only some rows of the last layer's result are normalised, for their logits.
    add(index, kDown, down_product(layer, num_tokens), layer.down,
        index + 1 < config.num_layers ? norm_of_layer(index + 1) : nullptr, stream);
  }
};

std::string CudaLlama::unsupported(const LlamaConfig& config, const GpuTypes& types) {
  if (types.activations == ActivationType::kFloat8 && has_cuda_device()) {  // without one, callers say why
    if (std::string obstacle = float8_obstacle(); !obstacle.empty()) {
      return obstacle;
    }
  }
  if (types.activations == ActivationType::kFloat8 && (config.post_norms || config.gelu)) {
    return "on the GPU, the layers of Gemma 3 are not computed with float8 activations";
  }
  if (config.head_dim > kMaxHeadDim) {
    return "on the GPU, a head has at most " + std::to_string(kMaxHeadDim) + " dimensions, and this model's have " +
           std::to_string(config.head_dim);
  }
  // Rows are read 16 bytes at a time, in every type.
  const int multiple = types.weights == WeightType::kFloat8 ? 16 : 8;
  const std::pair<int, const char*> sizes[] = {{config.hidden_size, "hidden size"},
                                               {config.num_heads * config.head_dim, "size of all query heads together"},
                                               {config.num_kv_heads * config.head_dim, "size of all kv heads together"},
                                               {config.feed_forward_size, "feed-forward size"}};
  for (const auto& [size, what] : sizes) {
    if (size % multiple != 0) {
      return std::string("on the GPU, the ") + what + " must be a multiple of " + std::to_string(multiple) +
             (types.weights == WeightType::kFloat8 ? " with float8 weights" : "") + ", and this model's is " +
             std::to_string(size);
    }
  }
  return "";
}

CudaLlama::CudaLlama(const Llama& model, const GpuTypes& types, int max_tokens, Communicator* peers)
    : impl_(std::make_unique<Impl>(model.config(), types, max_tokens, peers)) {
  impl_->weights.upload(model.weights());
}

CudaLlama::CudaLlama(const LlamaConfig& config, std::uint64_t seed, const GpuTypes& types, int max_tokens,
                     Communicator* peers)
    : impl_(std::make_unique<Impl>(config, types, max_tokens, peers)) {
  impl_->weights.randomize(seed);
}

CudaLlama::CudaLlama(CudaLlama&&) noexcept = default;
CudaLlama& CudaLlama::operator=(CudaLlama&&) noexcept = default;
CudaLlama::~CudaLlama() = default;

const LlamaConfig& CudaLlama::config() const { return impl_->config; }
Precision CudaLlama::precision() const { return impl_->precision; }
int CudaLlama::max_tokens() const { return impl_->max_tokens; }
void CudaLlama::stop_sums() noexcept { impl_->sums.stop(); }
void CudaLlama::reset_sums() { impl_->sums.reset(); }

void CudaLlama::prepare(int num_tokens, int num_rows, cudaStream_t stream) {
  Impl& impl = *impl_;
  COMMON_CHECK(num_tokens <= impl.max_tokens && num_rows <= impl.max_tokens, "steps have at most max_tokens tokens");
  const Impl::Layer& any_layer = impl.weights.layers.front();
  const auto prepare_product = [&](MatrixProduct product) {
    if (impl.has_float8_activations()) {
      product = impl.of_float8(product);
    } else if (impl.has_float8()) {
      product.weights = impl.unpacked.data();
    }
    impl.products.prepare(product, stream);
  };
  for (int tokens = impl.max_fused(); tokens < num_tokens;) {
    tokens = std::min(MatrixProducts::next_size(tokens), num_tokens);
    prepare_product(impl.qkv_product(any_layer, tokens));
    prepare_product(impl.output_product(any_layer, tokens));
    prepare_product(impl.gate_up_product(any_layer, tokens));
    prepare_product(impl.down_product(any_layer, tokens));
  }
  for (int rows = max_fused_logits(impl.product_model); rows < num_rows;) {
    rows = std::min(MatrixProducts::next_size(rows), num_rows);
    impl.products.prepare(impl.logits_product(rows, nullptr), stream);
  }
}

std::size_t CudaLlama::num_prepared() const { return impl_->products.num_prepared(); }

void CudaLlama::forward(const int* tokens, const int* positions, int num_tokens, const CudaAttentionFn& attention,
                        cudaStream_t stream, const CudaPendingTokens& pending) {
  Impl& impl = *impl_;
  COMMON_CHECK(num_tokens > 0 && num_tokens <= impl.max_tokens, "a step has 1 to max_tokens tokens");
  COMMON_CHECK(tokens != nullptr && positions != nullptr, "each token needs a position");
  COMMON_CHECK(attention != nullptr, "attention is given");
  impl.num_tokens = num_tokens;
  look_up(impl.precision,
          {.tokens = tokens,
           .pending_rows = pending.rows,
           .pending_tokens = pending.tokens,
           .positions = positions,
           .embedding = impl.weights.embedding,
           .frequencies = impl.weights.frequencies,
           .rotation_scale = impl.config.rotation_scale,
           .window_frequencies = impl.weights.window_frequencies,
           .embedding_scale = impl.config.embedding_scale,
           .vocab_size = impl.config.vocab_size,
           .first_token = impl.first_token(),
           .num_tokens = impl.shard.count * impl.config.vocab_size,
           .head_dim = impl.config.head_dim},
          num_tokens, impl.residual_for(impl.norm_of_layer(0)), impl.rotation.data(), stream);
  if (impl.peers != nullptr) {
    if (impl.is_fused(num_tokens) && !impl.config.post_norms) {
      impl.sums.begin_fused(num_tokens, impl.num_sums(), stream);
    }
    // Each token is found on one of the GPUs, and the others add zeros.
    impl.peers->sum(impl.residual.data(),
                    static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(impl.config.hidden_size),
                    Precision::kFloat32, stream);
    if (impl.is_fused(num_tokens)) {
      add_sum(impl.precision, {}, impl.precision, num_tokens, impl.residual_for(impl.norm_of_layer(0)), {}, stream);
    }
  }
  for (int layer = 0; layer < impl.config.num_layers; ++layer) {
    impl.is_fused(num_tokens) ? impl.fused_layer(layer, attention, stream)
                              : impl.layer_of_products(layer, attention, stream);
  }
}

void CudaLlama::logits(const int* rows, int num_rows, float* logits, cudaStream_t stream) {
  Impl& impl = *impl_;
  COMMON_CHECK(impl.num_tokens > 0, "forward comes before logits");
  COMMON_CHECK(num_rows > 0 && num_rows <= impl.max_tokens, "logits are of 1 to max_tokens rows");
  COMMON_CHECK(rows != nullptr && logits != nullptr && is_aligned(logits), "rows and logits are given");
  const ProductKernel kernel = logits_kernel(impl.product_model, num_rows);
  if (kernel == ProductKernel::kRows && impl.kernel_for(impl.num_tokens) == ProductKernel::kRows) {
    FusedLinear linear = impl.of_residual({impl.weights.output}, impl.config.vocab_size);
    linear.rows = rows;
    linear.num_tokens = num_rows;
    linear.num_x_rows = impl.num_tokens;
    fused_logits(linear, logits, stream);
    return;
  }
  Norm norm = impl.norm_of_residual(impl.weights.output_norm);
  norm.rows = rows;
  rms_norm(impl.precision, norm, num_rows, impl.normed.data(), stream);
  if (kernel != ProductKernel::kLibrary) {
    FusedLinear linear =
        impl.of_activations({impl.weights.output}, impl.config.vocab_size, impl.normed, impl.config.hidden_size);
    linear.kernel = kernel;
    linear.num_tokens = num_rows;
    fused_logits(linear, logits, stream);
  } else {
    impl.products.multiply(impl.logits_product(num_rows, logits), stream);
  }
}

void CudaLlama::argmax(const float* logits, int num_rows, int* next_tokens, cudaStream_t stream) {
  COMMON_CHECK(num_rows > 0 && num_rows <= impl_->max_tokens, "1 to max_tokens rows have a next token");
  COMMON_CHECK(logits != nullptr && next_tokens != nullptr, "logits and next tokens are given");
  void* const scratch = impl_->argmax_scratch.data();
  if (impl_->peers == nullptr) {
    argmax_rows(logits, impl_->config.vocab_size, num_rows, scratch, next_tokens, stream);
    return;
  }
  unsigned long long* const ranks = impl_->ranks.data();
  rank_rows(logits, impl_->config.vocab_size, impl_->first_token(), num_rows, scratch, ranks, stream);
  impl_->peers->max(ranks, static_cast<std::size_t>(num_rows), stream);
  tokens_of_ranks(ranks, num_rows, impl_->shard.count * impl_->config.vocab_size, next_tokens, stream);
}

}  // namespace common
