#include "common/cuda/model/cuda_sampler.h"

#include <cmath>
#include <limits>
#include "common/cuda/ptx.cuh"

#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/model/ranked.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/math/gumbel.h"

namespace common {
namespace {

// ---- Biases and penalties ------------------------------------------------------------------------------------------

constexpr int kChangeThreads = 1024;

// A block for each row. uses: a number for each token of the row, zero before and after: 1 if the text has the token,
// and 2 more for each time that the reply has it.
__global__ void __launch_bounds__(kChangeThreads)
    change_kernel(float* logits, int vocab_size, SamplingBatch batch, unsigned* uses) {
  wait_for_previous_launch();
  allow_next_launch();
  const int row = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const SamplingParameters parameters = batch.rows[row];
  float* const row_logits = logits + std::int64_t{row} * vocab_size;
  const auto is_token = [=](int token) { return token >= 0 && token < vocab_size; };

  const SamplingBias* const biases = batch.biases + parameters.first_bias;
  for (int i = thread; i < parameters.num_biases; i += kChangeThreads) {
    const int token = biases[i].token;
    if (!is_token(token) || (i > 0 && biases[i - 1].token == token)) {
      continue;  // a token's first entry is for all of its entries
    }
    float logit = __ldcg(row_logits + token);
    for (int j = i; j < parameters.num_biases && biases[j].token == token; ++j) {
      logit = biases[j].bias == -INFINITY ? -INFINITY : logit + biases[j].bias;
    }
    row_logits[token] = logit;
  }
  if (!parameters.has_penalties()) {
    return;
  }
  unsigned* const row_uses = uses + std::int64_t{row} * vocab_size;
  const auto used_token = [&](int i) {
    if (i < parameters.num_used) {
      return batch.used[parameters.first_used + i];
    }
    const int token_row = batch.token_rows[row];
    const int pending_row = batch.pending_rows[token_row];
    return pending_row >= 0 ? batch.pending_tokens[pending_row] : batch.tokens[token_row];
  };
  for (int i = thread; i <= parameters.num_used; i += kChangeThreads) {
    const int token = used_token(i);
    if (is_token(token)) {
      atomicOr(&row_uses[token], 1U);
      if (i >= parameters.prompt_length) {
        atomicAdd(&row_uses[token], 2U);
      }
    }
  }
  __syncthreads();
  for (int i = thread; i <= parameters.num_used; i += kChangeThreads) {
    const int token = used_token(i);
    const unsigned number = is_token(token) ? atomicExch(&row_uses[token], 0U) : 0;
    if (number == 0) {
      continue;  // or another thread has the token
    }
    float logit = penalised(__ldcg(row_logits + token), parameters.repetition_penalty);
    if (const auto count = static_cast<int>(number / 2); count > 0) {
      logit = penalised_in_reply(logit, parameters.presence_penalty, parameters.frequency_penalty, count);
    }
    row_logits[token] = logit;
  }
}

// ---- Top-k and top-p -----------------------------------------------------------------------------------------------

constexpr int kCutThreads = 1024;
constexpr int kDigitBits = 15;
constexpr int kBuckets = 1 << kDigitBits;
constexpr int kBucketsPerThread = kBuckets / kCutThreads;
constexpr int kLoads = 8;  // in flight for each thread
static_assert(kMaxDepth == (1U << (2 * kDigitBits)) - 1 && kClassBits == kDigitBits);

struct CutShared {
  std::uint32_t counts[kBuckets];  // bucket b's is at place_of(b)
  std::uint64_t warp_sums[kCutThreads / 32];
  std::uint64_t missing;
  std::uint32_t in_bucket;
  int bucket;
};

// Thread t sums up buckets 32 t … 32 t + 31: neighbouring threads' are in neighbouring banks.
__device__ __forceinline__ int place_of(int bucket) {
  return bucket % kBucketsPerThread * kCutThreads + bucket / kBucketsPerThread;
}

// The last token that is kept, in the order of depth, then id.
struct alignas(8) Kept {
  std::uint32_t depth = kMaxDepth;
  int token = 0x7FFFFFFF;
  __device__ bool has(std::uint32_t other_depth, int other_token) const {
    return other_depth < depth || (other_depth == depth && other_token <= token);
  }
};

// The row of a block of kCutThreads.
struct Row {
  const float* logits;
  int vocab_size;
  float max_logit;
  float temperature;
  float min_score;

  // Counts the tokens that min-p keeps by bucket_of(depth, token); -1: not at all.
  template <typename BucketOf>
  __device__ void count(CutShared& shared, const BucketOf& bucket_of) const {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kBuckets; i += kCutThreads) {
      shared.counts[i] = 0;
    }
    __syncthreads();
    for (int first = static_cast<int>(threadIdx.x); first < vocab_size; first += kLoads * kCutThreads) {
      float values[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int token = first + i * kCutThreads;
        values[i] = token < vocab_size ? __ldcg(logits + token) : -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int token = first + i * kCutThreads;
        const float score = score_of(values[i], max_logit, temperature);
        if (token < vocab_size && score >= min_score) {
          if (const int bucket = bucket_of(depth_of(score), token); bucket >= 0) {
            atomicAdd(&shared.counts[place_of(bucket)], 1U);
          }
        }
      }
    }
    __syncthreads();
  }
};

// Finds the bucket in which the sum of counts, each times weight_of(bucket), reaches the target target_of(total).
// Stores its number, its count, and the rest of the target after the buckets before it, in shared memory.
template <typename WeightOf, typename TargetOf>
__device__ void find_bucket(CutShared& shared, const WeightOf& weight_of, const TargetOf& target_of) {
  const int thread = static_cast<int>(threadIdx.x);
  std::uint64_t own = 0;
#pragma unroll 4
  for (int i = 0; i < kBucketsPerThread; ++i) {
    const std::uint32_t count = shared.counts[i * kCutThreads + thread];
    own += count != 0 ? count * weight_of(thread * kBucketsPerThread + i) : 0;
  }
  std::uint64_t before = own;  // the sum over all threads up to this one; in the end without this one
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint64_t other = __shfl_up_sync(0xFFFFFFFFU, before, distance);
    before += thread % 32 >= distance ? other : 0;
  }
  if (thread % 32 == 31) {
    shared.warp_sums[thread / 32] = before;
  }
  __syncthreads();
  std::uint64_t total = 0;
  for (int warp = 0; warp < kCutThreads / 32; ++warp) {
    before += warp < thread / 32 ? shared.warp_sums[warp] : 0;
    total += shared.warp_sums[warp];
  }
  before -= own;
  const std::uint64_t target = target_of(total);
  if (before < target && target <= before + own) {
    int bucket = thread * kBucketsPerThread;
    for (;; ++bucket) {
      const std::uint32_t count = shared.counts[place_of(bucket)];
      const std::uint64_t sum = count != 0 ? count * weight_of(bucket) : 0;
      if (target <= before + sum) {
        shared.in_bucket = count;
        break;
      }
      before += sum;
    }
    shared.bucket = bucket;
    shared.missing = target - before;
  }
  __syncthreads();
}

// Keeps the first `wanted` kept tokens of bucket `upper` of depths, in order. The bucket has at least as many.
__device__ Kept keep_in_bucket(CutShared& shared, const Row& row, const Kept& kept, int upper, std::uint64_t wanted) {
  constexpr int kMask = kBuckets - 1;
  const auto one = [](int) { return std::uint64_t{1}; };
  const auto missing = [&](std::uint64_t) { return wanted; };
  row.count(shared, [&](std::uint32_t depth, int token) {
    const bool is_in = static_cast<int>(depth >> kDigitBits) == upper && kept.has(depth, token);
    return is_in ? static_cast<int>(depth) & kMask : -1;
  });
  find_bucket(shared, one, missing);
  const auto depth = static_cast<std::uint32_t>(upper) << kDigitBits | static_cast<std::uint32_t>(shared.bucket);
  wanted = shared.missing;
  if (wanted == shared.in_bucket) {
    return {depth, depth == kept.depth ? kept.token : 0x7FFFFFFF};
  }
  // The remaining tokens have equal depths; those with the lowest ids are kept.
  row.count(shared, [&](std::uint32_t other, int token) {
    return other == depth && kept.has(other, token) ? token >> kDigitBits : -1;
  });
  find_bucket(shared, one, missing);
  const int upper_id = shared.bucket;
  wanted = shared.missing;
  row.count(shared, [&](std::uint32_t other, int token) {
    return other == depth && kept.has(other, token) && token >> kDigitBits == upper_id ? token & kMask : -1;
  });
  find_bucket(shared, one, missing);
  return {depth, upper_id << kDigitBits | shared.bucket};
}

// The tokens that are kept, counted by the upper digit of their depth.
__device__ void count_kept(CutShared& shared, const Row& row, const Kept& kept) {
  row.count(shared, [&](std::uint32_t depth, int token) {
    return kept.has(depth, token) ? static_cast<int>(depth >> kDigitBits) : -1;
  });
}

__device__ Kept keep_top_k(CutShared& shared, const Row& row, const Kept& kept, std::uint64_t top_k) {
  count_kept(shared, row, kept);
  find_bucket(
      shared, [](int) { return std::uint64_t{1}; }, [&](std::uint64_t total) { return min(top_k, total); });
  return keep_in_bucket(shared, row, kept, shared.bucket, shared.missing);
}

__device__ Kept keep_top_p(CutShared& shared, const Row& row, const Kept& kept, float top_p) {
  count_kept(shared, row, kept);
  const auto weight = [](int bucket) { return weight_of_class(static_cast<std::uint32_t>(bucket)); };
  find_bucket(shared, weight, [&](std::uint64_t total) { return top_p_target(top_p, total); });
  const std::uint64_t each = weight(shared.bucket);
  return keep_in_bucket(shared, row, kept, shared.bucket, (shared.missing + each - 1) / each);
}

// A block for each row.
__global__ void __launch_bounds__(kCutThreads)
    cut_kernel(const float* logits, int vocab_size, const SamplingParameters* rows, const int* most_likely,
               Kept* last_kept) {
  COURSE_SHARED_OBJECT(CutShared, shared);
  wait_for_previous_launch();
  allow_next_launch();
  const int index = static_cast<int>(blockIdx.x);
  const SamplingParameters parameters = rows[index];
  const int best = __ldcg(most_likely + index);
  Kept kept;
  if (parameters.temperature > 0.0F && best >= 0) {
    const float* const row_logits = logits + std::int64_t{index} * vocab_size;
    const Row row = {row_logits, vocab_size, __ldcg(row_logits + best), parameters.temperature, parameters.min_score};
    if (parameters.top_k > 0 && parameters.top_k < vocab_size && row.max_logit < INFINITY) {
      kept = keep_top_k(shared, row, kept, static_cast<std::uint64_t>(parameters.top_k));
    }
    if (parameters.top_p < 1.0F && row.max_logit < INFINITY) {
      kept = keep_top_p(shared, row, kept, parameters.top_p);
    }
  }
  if (threadIdx.x == 0) {
    last_kept[index] = kept;
  }
}

// ---- Noise and the largest sum -------------------------------------------------------------------------------------

constexpr int kSampleThreads = 256;
constexpr int kPerThread = 16;
constexpr int kLogitsPerBlock = kPerThread * kSampleThreads;

struct Best {
  unsigned long long rank;
  unsigned num_finished;  // blocks
};

// The largest value of a warp, in every lane. None is NaN.
__device__ __forceinline__ float warp_max(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFU, value, distance));
  }
  return value;
#else
  int bits = __float_as_int(value);
  bits ^= (bits >> 31) & 0x7FFFFFFF;  // so that floats compare as ints do
  bits = __reduce_max_sync(0xFFFFFFFFU, bits);
  return __int_as_float(bits ^ ((bits >> 31) & 0x7FFFFFFF));
#endif
}

// blockIdx.y: the row. last_kept is nullptr if no row has top_k or top_p.
__global__ void __launch_bounds__(kSampleThreads)
    sample_kernel(const float* logits, int vocab_size, const SamplingParameters* rows, const Kept* last_kept,
                  Best* scratch, int* next_tokens) {
  __shared__ unsigned long long best_of_warps[kSampleThreads / 32];
  wait_for_previous_launch();
  allow_next_launch();
  const int row = static_cast<int>(blockIdx.y);
  const float temperature = rows[row].temperature;
  const int most_likely = __ldcg(next_tokens + row);
  if (temperature == 0.0F || most_likely < 0) {
    return;
  }
  const float* const row_logits = logits + std::int64_t{row} * vocab_size;
  float values[kPerThread];
  const int first = static_cast<int>(blockIdx.x) * kLogitsPerBlock + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = first + i * kSampleThreads;
    values[i] = token < vocab_size ? __ldcg(row_logits + token) : -INFINITY;
  }
  const float max_logit = __ldcg(row_logits + most_likely);
  const std::uint64_t key = rows[row].noise_key;
  const float min_score = rows[row].min_score;
  Kept kept;
  if (last_kept != nullptr) {
    kept = last_kept[row];
  }
  // A lower bound for the best sum: most tokens cannot reach it with any noise.
  float best_score = kept.has(0, most_likely) ? gumbel_noise(noise_bits(key, most_likely)) : -INFINITY;
  unsigned long long best = 0;
  if (kept.has(0, most_likely)) {
    best = ranked(best_score, static_cast<unsigned>(most_likely));
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (i == 1 || i % 4 == 0) {
      best_score = warp_max(best_score);  // the warp's best so far rules out more than the thread's
    }
    const int token = first + i * kSampleThreads;
    const float score = score_of(values[i], max_logit, temperature);
    if (token >= vocab_size || !(score >= min_score) || score + max_gumbel_noise(32) < best_score) {
      continue;
    }
    const std::uint32_t bits = noise_bits(key, token);
    if (score + max_gumbel_noise(__clz(static_cast<int>(bits))) < best_score || !kept.has(depth_of(score), token)) {
      continue;
    }
    const float sum = score + gumbel_noise(bits);
    best = max(best, ranked(sum, static_cast<unsigned>(token)));
    best_score = fmaxf(best_score, sum);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    best = max(best, __shfl_xor_sync(0xFFFFFFFFU, best, distance));
  }
  if (threadIdx.x % 32 == 0) {
    best_of_warps[threadIdx.x / 32] = best;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const unsigned long long other : best_of_warps) {
      best = max(best, other);
    }
    Best& shared = scratch[row];
    atomicMax(&shared.rank, best);
    __threadfence();
    if (atomicAdd(&shared.num_finished, 1) == gridDim.x - 1) {  // the last block of the row
      __threadfence();
      best = atomicExch(&shared.rank, 0ULL);
      shared.num_finished = 0;
      next_tokens[row] = max_logit < INFINITY ? static_cast<int>(~static_cast<unsigned>(best)) : -1;
    }
  }
}

}  // namespace

CudaSampler::CudaSampler(int vocab_size, int max_rows)
    : vocab_size_(vocab_size),
      max_rows_(max_rows),
      best_((sizeof(Best) + argmax_scratch_bytes(1)) * static_cast<std::size_t>(max_rows)),
      last_kept_(sizeof(Kept) * static_cast<std::size_t>(max_rows)),
      uses_(static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(vocab_size) * sizeof(unsigned)) {
  CUDA_CHECK(cudaMemset(best_.data(), 0, best_.bytes()));
  CUDA_CHECK(cudaMemset(uses_.data(), 0, uses_.bytes()));
}

void CudaSampler::sample(float* logits, const SamplingBatch& batch, int* next_tokens, cudaStream_t stream) {
  COMMON_CHECK(batch.num_rows > 0 && batch.num_rows <= max_rows_, "1 to max_rows rows are drawn");
  const dim3 rows(static_cast<unsigned>(batch.num_rows));
  auto* const best = static_cast<Best*>(best_.data());
  auto* const last_kept = static_cast<Kept*>(last_kept_.data());
  if (batch.change_logits) {
    launch(change_kernel, rows, kChangeThreads, 0, stream, Overlap::kPreviousWithoutL1, logits, vocab_size_, batch,
           static_cast<unsigned*>(uses_.data()));
    argmax_rows(logits, vocab_size_, batch.num_rows, best + max_rows_, next_tokens, stream);
  }
  if (batch.have_cuts) {
    launch(cut_kernel, rows, kCutThreads, sizeof(CutShared), stream, Overlap::kPreviousWithoutL1, logits, vocab_size_,
           batch.rows, next_tokens, last_kept);
  }
  const dim3 grid(static_cast<unsigned>((vocab_size_ + kLogitsPerBlock - 1) / kLogitsPerBlock), rows.x);
  launch(sample_kernel, grid, kSampleThreads, 0, stream, Overlap::kPreviousWithoutL1, logits, vocab_size_, batch.rows,
         batch.have_cuts ? last_kept : nullptr, best, next_tokens);
}

}  // namespace common
