#include "common/cuda/model/cuda_sampler.h"

#include <cmath>
#include <limits>

#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/model/ranked.cuh"
#include "common/cuda/ptx.cuh"
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
      continue;  // a token's first entry applies all its entries
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

// ---- Noise and the largest sum -------------------------------------------------------------------------------------

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

// The largest number of a block, in thread 0.
template <int kThreads>
__device__ unsigned long long block_max(unsigned long long value) {
  __shared__ unsigned long long of_warps[kThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(0xFFFFFFFFU, value, distance));
  }
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const unsigned long long other : of_warps) {
      value = max(value, other);
    }
  }
  return value;
}

// The best of the tokens that a thread has considered.
struct Draw {
  std::uint64_t key;
  float best_score = -INFINITY;  // a lower bound for the best sum: most tokens cannot reach it with any noise
  unsigned long long best = 0;

  // Before the others, so that there is a bound.
  __device__ void begin(int most_likely) {
    best_score = gumbel_noise(noise_bits(key, most_likely));
    best = ranked(best_score, static_cast<unsigned>(most_likely));
  }
  template <typename IsKept>
  __device__ void consider(float score, int token, const IsKept& is_kept) {
    if (score + max_gumbel_noise(32) < best_score) {
      return;
    }
    const std::uint32_t bits = noise_bits(key, token);
    if (score + max_gumbel_noise(__clz(static_cast<int>(bits))) < best_score || !is_kept()) {
      return;
    }
    const float sum = score + gumbel_noise(bits);
    best = max(best, ranked(sum, static_cast<unsigned>(token)));
    best_score = fmaxf(best_score, sum);
  }
};

// ---- Top-k and top-p: the candidates -------------------------------------------------------------------------------
//
// Few tokens of a row can be kept. bound_kernel reads a sixteenth of the row and guesses a depth before which there are
// some hundreds. sample_kernel, which reads the whole row, lists them. cut_kernel sorts the list and draws from it. If
// the list turns out to be too long, or to lack a kept token, it goes over the row itself, once for each digit of what
// it looks for: the same tokens are kept. So a row is read once, and 1/16 of it before.

constexpr int kMaxCandidates = 2048;
constexpr int kSampledShare = 16;

struct CutRow {
  unsigned long long weight;  // with top_p and no top_k: of all tokens that min_p keeps
  unsigned num_candidates;    // tokens that min_p keeps with a depth below the bound; kMaxCandidates of them are listed
  std::uint32_t depth_bound;
};

__device__ __forceinline__ bool has_top_k(const SamplingParameters& row, int vocab_size) {
  return row.top_k > 0 && row.top_k < vocab_size;
}

__device__ __forceinline__ bool is_cut(const SamplingParameters& row, int vocab_size) {
  return row.temperature > 0.0F && (has_top_k(row, vocab_size) || row.top_p < 1.0F);
}

// In the order of depth, then id.
__device__ __forceinline__ unsigned long long candidate(std::uint32_t depth, int token) {
  return static_cast<unsigned long long>(depth) << 32 | static_cast<unsigned>(token);
}

constexpr int kCutThreads = 1024;
constexpr int kDigitBits = 15;
constexpr int kBuckets = 1 << kDigitBits;
constexpr int kBucketsPerThread = kBuckets / kCutThreads;
constexpr int kLoads = 8;  // in flight for each thread
static_assert(kMaxDepth == (1U << (2 * kDigitBits)) - 1 && kClassBits == kDigitBits);

// What both forms of CutShared have.
struct CutResults {
  std::uint64_t warp_sums[kCutThreads / 32];
  std::uint64_t missing;
  std::uint32_t in_bucket;
  int bucket;
};

// kCountsApart: the counts do not fit into the shared memory that a thread block can have (99 KB on most GPUs), and lie
// in device memory. Then they are read where atomicAdd() changes them, in L2.
template <bool kCountsApart>
struct CutShared : CutResults {
  union {
    std::uint32_t own_counts[kBuckets];  // bucket b's is at place_of(b)
    unsigned long long candidates[kMaxCandidates];
  };
  __device__ void use_counts(std::uint32_t* /*apart*/) {}
  __device__ std::uint32_t* counts() { return own_counts; }
  __device__ std::uint32_t count_at(int place) const { return own_counts[place]; }
};
template <>
struct CutShared<true> : CutResults {
  unsigned long long candidates[kMaxCandidates];
  std::uint32_t* counts_apart;  // [kBuckets] of the row
  // For all threads; they have to meet before the first use.
  __device__ void use_counts(std::uint32_t* apart) {
    if (threadIdx.x == 0) {
      counts_apart = apart;
    }
  }
  __device__ std::uint32_t* counts() { return counts_apart; }
  __device__ std::uint32_t count_at(int place) const { return __ldcg(counts_apart + place); }
};

struct Prefix {
  std::uint64_t before;  // the sum of the threads with lower numbers
  std::uint64_t total;
};

// Of a block of kCutThreads. warp_sums must not be in use.
__device__ Prefix block_prefix(std::uint64_t own, std::uint64_t* warp_sums) {
  const int thread = static_cast<int>(threadIdx.x);
  Prefix result = {own, 0};
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint64_t other = __shfl_up_sync(0xFFFFFFFFU, result.before, distance);
    result.before += thread % 32 >= distance ? other : 0;
  }
  if (thread % 32 == 31) {
    warp_sums[thread / 32] = result.before;
  }
  __syncthreads();
  for (int warp = 0; warp < kCutThreads / 32; ++warp) {
    result.before += warp < thread / 32 ? warp_sums[warp] : 0;
    result.total += warp_sums[warp];
  }
  result.before -= own;
  return result;
}

// Levels of depth, for a rough count: 64 for each power of two. Lower numbers are levels of their own.
constexpr int kLevelBits = 6;
constexpr int kNumLevels = 2 * kCutThreads;  // some more than there are
__device__ int level_of(std::uint32_t depth) {
  const int shift = max(31 - __clz(static_cast<int>(depth)) - kLevelBits, 0);
  return (shift << kLevelBits) + static_cast<int>(depth >> shift);
}
__device__ std::uint32_t first_depth_of(int level) {
  const int shift = max((level >> kLevelBits) - 1, 0);
  return static_cast<std::uint32_t>(level - (shift << kLevelBits)) << shift;
}

// A block for each row. Chooses the depth bound, and clears the rest of its CutRow.
__global__ void __launch_bounds__(kCutThreads)
    bound_kernel(const float* logits, int vocab_size, const SamplingParameters* rows, const int* most_likely,
                 CutRow* cuts) {
  __shared__ unsigned counts[kNumLevels];
  __shared__ std::uint64_t warp_sums[kCutThreads / 32];
  __shared__ std::uint32_t bound;
  wait_for_previous_launch();
  allow_next_launch();
  const int index = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const SamplingParameters parameters = rows[index];
  const int best = __ldcg(most_likely + index);
  if (!is_cut(parameters, vocab_size) || best < 0) {
    return;
  }
  // No token of kMaxDepth is a candidate: it has no weight, and cannot win.
  const bool is_hopeless = has_top_k(parameters, vocab_size) && parameters.top_k > kMaxCandidates;
  if (vocab_size <= kMaxCandidates || is_hopeless) {
    if (thread == 0) {
      cuts[index] = {0, 0, is_hopeless ? 0 : kMaxDepth};
    }
    return;
  }
  counts[2 * thread] = 0;
  counts[2 * thread + 1] = 0;
  if (thread == 0) {
    bound = kMaxDepth;
  }
  __syncthreads();
  // Every 16th sector of 8 numbers.
  const float* const row_logits = logits + std::int64_t{index} * vocab_size;
  const float max_logit = __ldcg(row_logits + best);
  for (int first = thread; first < vocab_size / kSampledShare; first += kLoads * kCutThreads) {
    float values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int place = first + i * kCutThreads;
      const int token = place / 8 * 8 * kSampledShare + place % 8;
      values[i] = place < vocab_size / kSampledShare ? __ldcg(row_logits + token) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float score = score_of(values[i], max_logit, parameters.temperature);
      if (const std::uint32_t depth = depth_of(score); score >= parameters.min_score && depth < kMaxDepth) {
        atomicAdd(&counts[level_of(depth)], 1U);
      }
    }
  }
  __syncthreads();
  // A sixteenth of the top_k tokens is expected among the tokens read. With twice that and 16 more, there are hardly
  // ever too few. How many tokens top-p keeps is not known; as good as always, they come before the 64th of the tokens
  // read.
  const unsigned wanted =
      has_top_k(parameters, vocab_size) ? static_cast<unsigned>(min(16 + parameters.top_k / 8, 96)) : 64;
  const unsigned own = counts[2 * thread] + counts[2 * thread + 1];
  const std::uint64_t before = block_prefix(own, warp_sums).before;
  if (before < wanted && wanted <= before + own) {
    const int level = 2 * thread + (wanted <= before + counts[2 * thread] ? 0 : 1);
    bound = min(first_depth_of(level + 1), kMaxDepth);
  }
  __syncthreads();
  if (thread == 0) {
    cuts[index] = {0, 0, bound};
  }
}

// The tokens that top_k and top_p keep, from the list of candidates: shared.candidates, sorted, begins with them.
// Returns their number, or -1 if the list does not have all.
template <typename Shared>
__device__ int keep_listed(Shared& shared, const SamplingParameters& row, int vocab_size, const CutRow& cut,
                           const unsigned long long* list) {
  const auto thread = static_cast<int>(threadIdx.x);
  const bool is_top_k = has_top_k(row, vocab_size);
  const bool has_all = cut.depth_bound == kMaxDepth || cut.depth_bound > depth_of(row.min_score);
  const auto count = static_cast<int>(min(cut.num_candidates, kMaxCandidates + 1U));
  if (count > kMaxCandidates || count == 0 || (is_top_k && count < row.top_k && !has_all)) {
    return -1;
  }
  // A bitonic sort. Up to a distance of 32, both numbers of a pair are in the 64 that the same warp has had in hand.
  int size = 2;
  while (size < count) {
    size *= 2;
  }
  for (int i = thread; i < size; i += kCutThreads) {
    shared.candidates[i] = i < count ? __ldcg(list + i) : ~0ULL;
  }
  for (int length = 2; length <= size; length *= 2) {
    for (int distance = length / 2; distance > 0; distance /= 2) {
      if (distance >= 32 || length == 2) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      if (thread < size / 2) {
        const int low = thread / distance * 2 * distance + thread % distance;
        const unsigned long long first = shared.candidates[low];
        const unsigned long long second = shared.candidates[low + distance];
        if ((first > second) == ((low & length) == 0)) {
          shared.candidates[low] = second;
          shared.candidates[low + distance] = first;
        }
      }
    }
  }
  __syncthreads();
  const int num_kept = is_top_k ? min(count, row.top_k) : count;
  if (row.top_p >= 1.0F) {
    return num_kept;
  }
  const auto weight_at = [&](int i) {
    const auto depth = static_cast<std::uint32_t>(shared.candidates[i] >> 32);
    return i < num_kept ? weight_of_class(class_of(depth)) : 0;
  };
  const std::uint64_t weight = 2 * thread < num_kept ? weight_at(2 * thread) : 0;
  const std::uint64_t next_weight = 2 * thread + 1 < num_kept ? weight_at(2 * thread + 1) : 0;
  const auto [before, listed] = block_prefix(weight + next_weight, shared.warp_sums);
  const std::uint64_t target = top_p_target(row.top_p, is_top_k ? listed : cut.weight);
  if (target > listed) {
    return -1;
  }
  if (before < target && target <= before + weight + next_weight) {
    shared.bucket = 2 * thread + (target <= before + weight ? 1 : 2);
  }
  __syncthreads();
  return shared.bucket;
}

// ---- Top-k and top-p: over the whole row ---------------------------------------------------------------------------

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
  template <typename Shared, typename BucketOf>
  __device__ void count(Shared& shared, const BucketOf& bucket_of) const {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kBuckets; i += kCutThreads) {
      shared.counts()[i] = 0;
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
            atomicAdd(&shared.counts()[place_of(bucket)], 1U);
          }
        }
      }
    }
    __syncthreads();
  }

  // Considers all tokens that are kept.
  __device__ void consider_kept(Draw& draw, const Kept& kept, int most_likely) const {
    if (kept.has(0, most_likely)) {  // others may be level with it
      draw.begin(most_likely);
    }
    for (int begin = 0; begin < vocab_size; begin += kLoads * kCutThreads) {
      draw.best_score = warp_max(draw.best_score);
      const int first = begin + static_cast<int>(threadIdx.x);
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
          draw.consider(score, token, [&] { return kept.has(depth_of(score), token); });
        }
      }
    }
  }
};

// Finds the bucket in which the sum of counts, each times weight_of(bucket), reaches the target target_of(total).
// Stores its number, its count, and the rest of the target after the buckets before it, in shared memory.
template <typename Shared, typename WeightOf, typename TargetOf>
__device__ void find_bucket(Shared& shared, const WeightOf& weight_of, const TargetOf& target_of) {
  const int thread = static_cast<int>(threadIdx.x);
  std::uint64_t own = 0;
#pragma unroll 4
  for (int i = 0; i < kBucketsPerThread; ++i) {
    const std::uint32_t count = shared.count_at(i * kCutThreads + thread);
    own += count != 0 ? count * weight_of(thread * kBucketsPerThread + i) : 0;
  }
  auto [before, total] = block_prefix(own, shared.warp_sums);
  const std::uint64_t target = target_of(total);
  if (before < target && target <= before + own) {
    int bucket = thread * kBucketsPerThread;
    for (;; ++bucket) {
      const std::uint32_t count = shared.count_at(place_of(bucket));
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
template <typename Shared>
__device__ Kept keep_in_bucket(Shared& shared, const Row& row, const Kept& kept, int upper, std::uint64_t wanted) {
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
  // The remaining tokens have equal depths; the lowest ids are kept.
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
template <typename Shared>
__device__ void count_kept(Shared& shared, const Row& row, const Kept& kept) {
  row.count(shared, [&](std::uint32_t depth, int token) {
    return kept.has(depth, token) ? static_cast<int>(depth >> kDigitBits) : -1;
  });
}

template <typename Shared>
__device__ Kept keep_top_k(Shared& shared, const Row& row, const Kept& kept, std::uint64_t top_k) {
  count_kept(shared, row, kept);
  find_bucket(
      shared, [](int) { return std::uint64_t{1}; }, [&](std::uint64_t total) { return min(top_k, total); });
  return keep_in_bucket(shared, row, kept, shared.bucket, shared.missing);
}

template <typename Shared>
__device__ Kept keep_top_p(Shared& shared, const Row& row, const Kept& kept, float top_p) {
  count_kept(shared, row, kept);
  const auto weight = [](int bucket) { return weight_of_class(static_cast<std::uint32_t>(bucket)); };
  find_bucket(shared, weight, [&](std::uint64_t total) { return top_p_target(top_p, total); });
  const std::uint64_t each = weight(shared.bucket);
  return keep_in_bucket(shared, row, kept, shared.bucket, (shared.missing + each - 1) / each);
}

// A block for each row. counts: [rows, kBuckets] if kCountsApart.
template <bool kCountsApart>
__global__ void __launch_bounds__(kCutThreads)
    cut_kernel(const float* logits, int vocab_size, const SamplingParameters* rows, const CutRow* cuts,
               const unsigned long long* lists, std::uint32_t* counts, int* next_tokens) {
  COURSE_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<CutShared<kCountsApart>*>(memory);
  wait_for_previous_launch();
  allow_next_launch();
  const int index = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const SamplingParameters parameters = rows[index];
  const int best = __ldcg(next_tokens + index);
  if (!is_cut(parameters, vocab_size) || best < 0) {
    return;
  }
  const float* const row_logits = logits + std::int64_t{index} * vocab_size;
  const Row row = {row_logits, vocab_size, __ldcg(row_logits + best), parameters.temperature, parameters.min_score};
  if (!(row.max_logit < INFINITY)) {
    if (thread == 0) {
      next_tokens[index] = -1;
    }
    return;
  }
  const CutRow cut = {__ldcg(&cuts[index].weight), __ldcg(&cuts[index].num_candidates),
                      __ldcg(&cuts[index].depth_bound)};
  const int num_kept = keep_listed(shared, parameters, vocab_size, cut, lists + std::int64_t{index} * kMaxCandidates);
  Draw draw = {parameters.noise_key};
  if (num_kept >= 0) {
    for (int i = thread; i < num_kept; i += kCutThreads) {
      const auto token = static_cast<int>(shared.candidates[i] & 0xFFFFFFFFU);
      const float score = score_of(__ldcg(row_logits + token), row.max_logit, parameters.temperature);
      draw.consider(score, token, [] { return true; });
    }
  } else {
    shared.use_counts(counts + std::int64_t{index} * kBuckets);
    __syncthreads();
    Kept kept;
    if (has_top_k(parameters, vocab_size)) {
      kept = keep_top_k(shared, row, kept, static_cast<std::uint64_t>(parameters.top_k));
    }
    if (parameters.top_p < 1.0F) {
      kept = keep_top_p(shared, row, kept, parameters.top_p);
    }
    row.consider_kept(draw, kept, best);
  }
  const unsigned long long drawn = block_max<kCutThreads>(draw.best);
  if (thread == 0) {
    next_tokens[index] = static_cast<int>(~static_cast<unsigned>(drawn));
  }
}

// ---- A pass over all rows ------------------------------------------------------------------------------------------

constexpr int kSampleThreads = 256;
constexpr int kPerThread = 16;
constexpr int kLogitsPerBlock = kPerThread * kSampleThreads;

struct Best {
  unsigned long long rank;
  unsigned num_finished;  // blocks
};

// Adds the candidates among a block's logits to the row's list; values[i] belongs to token first + i * kSampleThreads.
__device__ __forceinline__ void list_candidates(const float (&values)[kPerThread], int first, int vocab_size,
                                                float max_logit, const SamplingParameters& row, CutRow& cut,
                                                unsigned long long* list) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t bound = __ldcg(&cut.depth_bound);
  const bool is_weight_needed = !has_top_k(row, vocab_size);
  unsigned long long weight = 0;
  unsigned found = 0;  // a bit for each value
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = first + i * kSampleThreads;
    const float score = score_of(values[i], max_logit, row.temperature);
    if (token < vocab_size && score >= row.min_score) {
      const std::uint32_t depth = depth_of(score);
      found |= (depth < bound ? 1U : 0U) << i;
      weight += is_weight_needed ? weight_of_class(class_of(depth)) : 0;
    }
  }
  const int own = __popc(found);
  int up_to_own = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFU, up_to_own, distance);
    up_to_own += lane >= distance ? other : 0;
    weight += __shfl_xor_sync(0xFFFFFFFFU, weight, distance);
  }
  if (lane == 31 && weight > 0) {
    atomicAdd(&cut.weight, weight);
  }
  if (__any_sync(0xFFFFFFFFU, own > 0)) {
    unsigned place = lane == 31 ? atomicAdd(&cut.num_candidates, static_cast<unsigned>(up_to_own)) : 0;
    place = __shfl_sync(0xFFFFFFFFU, place, 31) + static_cast<unsigned>(up_to_own - own);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if ((found >> i & 1U) != 0 && place < kMaxCandidates) {
        const float score = score_of(values[i], max_logit, row.temperature);
        list[place++] = candidate(depth_of(score), first + i * kSampleThreads);
      }
    }
  }
}

// ---- Temperature alone ---------------------------------------------------------------------------------------------
//
// The drawn token has the largest sum of score and noise. Noise to the last bit is two logarithms and a division or
// two, more than a hundred instructions, and a score is a division: far too much for every token. So each token gets an
// upper bound of its sum in few instructions: -log(v) >= -log(-log(1 - v)), and to base 2 that is one instruction. The
// bound is close where it matters, since the noise of tokens that win has a small v. Sums are computed to the last bit
// for the token with the largest bound of each warp, and then for the few tokens of a row whose bounds reach the best
// sum.

constexpr float kLog2E = 1.44269504F;
constexpr float kSlack = 0.01F;               // far more than rounding changes a score, a sum or a bound
constexpr float kMaxNoise = 33.0F;            // to base 2
constexpr float kMinBestSum = -3.15F;         // the most likely token's score is 0, and no noise is below -3.14
constexpr float kMaxScale = 0x1.FFFFFEp127F;  // not infinite: of the most likely token, 0 is multiplied by it

// A token whose bound is lower cannot win against a token of this rank; 0: against the most likely token.
__device__ __forceinline__ float least_bound(unsigned long long rank) {
  return fmaxf(value_of_rank(rank), kMinBestSum) * kLog2E - kSlack;
}

// blockIdx.x: the row. Thus the last blocks of a row, which run after many of the others, know what these have found.
// Draws from the rows without top_k and top_p, and lists the candidates of the others.
__global__ void __launch_bounds__(kSampleThreads)
    sample_kernel(const float* logits, int vocab_size, const SamplingParameters* rows, CutRow* cuts,
                  unsigned long long* lists, Best* scratch, int* next_tokens) {
  __shared__ unsigned long long best[2];  // ranks: of the warps' first tokens, and of the others
  wait_for_previous_launch();
  allow_next_launch();
  const auto row = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const SamplingParameters parameters = rows[row];
  const int most_likely = __ldcg(next_tokens + row);
  if (parameters.temperature == 0.0F || most_likely < 0) {
    return;
  }
  const float* const row_logits = logits + std::int64_t{row} * vocab_size;
  float values[kPerThread];
  const int first = static_cast<int>(blockIdx.y) * kLogitsPerBlock + thread;
  const float* const own_logits = row_logits + first;
  const int num_left = vocab_size - first;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    values[i] = i * kSampleThreads < num_left ? __ldcg(own_logits + i * kSampleThreads) : -INFINITY;
  }
  const float max_logit = __ldcg(row_logits + most_likely);
  if (is_cut(parameters, vocab_size)) {
    if (max_logit < INFINITY) {
      list_candidates(values, first, vocab_size, max_logit, parameters, cuts[row],
                      lists + std::int64_t{row} * kMaxCandidates);
    }
    return;
  }
  if (!(max_logit < INFINITY)) {
    if (thread == 0) {
      next_tokens[row] = -1;  // the row's other blocks end here too, or above
    }
    return;
  }

  Best& of_row = scratch[row];
  const float least = least_bound(__ldcg(&of_row.rank));
  const float scale = fminf(kLog2E / parameters.temperature, kMaxScale);
  const float min_score = parameters.min_score * kLog2E - kSlack;  // to base 2, like everything from here to `consider`
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    values[i] -= max_logit;
    largest = fmaxf(largest, values[i]);
  }
  const bool is_hopeless = largest * scale < fmaxf(min_score, least - kMaxNoise);
  largest = -INFINITY;
  if (__any_sync(0xFFFFFFFFU, !is_hopeless)) {
    if (parameters.min_score > -INFINITY) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        values[i] = values[i] * scale < min_score ? -INFINITY : values[i];
      }
    }
    const std::uint64_t key = parameters.noise_key + static_cast<std::uint64_t>(first) * kSplitMixStep;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      // The noise is at most -log2(bits / 2^32). Of a token that is impossible, it may be NaN.
      const std::uint32_t bits = noise_bits(key, i * kSampleThreads);
      values[i] = fused(values[i], scale, 32.0F) - log2_fast(static_cast<float>(bits));
      largest = fmaxf(largest, values[i]);
    }
  }
  const auto consider = [&](float bound, unsigned long long& best_of_block) {
    unsigned found = 0;  // a bit for each value
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      found |= (values[i] >= bound ? 1U : 0U) << i;
    }
    while (found != 0) {
      const int i = 31 - __clz(static_cast<int>(found));
      found ^= 1U << i;
      const int token = first + i * kSampleThreads;
      const float score = score_of(__ldcg(row_logits + token), max_logit, parameters.temperature);
      if (score >= parameters.min_score) {
        const float sum = score + gumbel_noise(noise_bits(parameters.noise_key, token));
        atomicMax(&best_of_block, ranked(sum, static_cast<unsigned>(token)));
      }
    }
  };
  if (thread < 2) {
    best[thread] = 0;
  }
  __syncthreads();
  float bound = fmaxf(warp_max(largest), least);
#pragma unroll 1
  for (unsigned long long& best_of_pass : best) {
    if (largest >= bound) {
      consider(bound, best_of_pass);
    }
    __syncthreads();
    bound = fmaxf(least_bound(best_of_pass), least);
  }
  if (thread == 0) {
    const unsigned long long best_of_block = max(best[0], best[1]);
    if (best_of_block != 0) {
      atomicMax(&of_row.rank, best_of_block);
      __threadfence();
    }
    if (atomicAdd(&of_row.num_finished, 1) == gridDim.y - 1) {  // the last block of the row
      __threadfence();
      const unsigned long long rank = atomicExch(&of_row.rank, 0ULL);
      of_row.num_finished = 0;
      next_tokens[row] = static_cast<int>(~static_cast<unsigned>(rank));
    }
  }
}

// Whether a thread block can have as much shared memory as cut_kernel<false> needs.
bool has_room_for_counts() { return sizeof(CutShared<false>) + 1024 <= shared_bytes_per_block(); }

}  // namespace

CudaSampler::CudaSampler(int vocab_size, int max_rows)
    : vocab_size_(vocab_size),
      max_rows_(max_rows),
      best_((sizeof(Best) + argmax_scratch_bytes(1)) * static_cast<std::size_t>(max_rows)),
      cuts_(sizeof(CutRow) * static_cast<std::size_t>(max_rows)),
      candidates_(sizeof(unsigned long long) * kMaxCandidates * static_cast<std::size_t>(max_rows)),
      counts_(has_room_for_counts() ? 0 : sizeof(std::uint32_t) * kBuckets * static_cast<std::size_t>(max_rows)),
      uses_(static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(vocab_size) * sizeof(unsigned)) {
  CUDA_CHECK(cudaMemset(best_.data(), 0, best_.bytes()));
  CUDA_CHECK(cudaMemset(uses_.data(), 0, uses_.bytes()));
}

void CudaSampler::sample(float* logits, const SamplingBatch& batch, int* next_tokens, cudaStream_t stream) {
  COMMON_CHECK(batch.num_rows > 0 && batch.num_rows <= max_rows_, "1 to max_rows rows are drawn");
  const dim3 rows(static_cast<unsigned>(batch.num_rows));
  auto* const best = static_cast<Best*>(best_.data());
  auto* const cuts = static_cast<CutRow*>(cuts_.data());
  auto* const lists = static_cast<unsigned long long*>(candidates_.data());
  if (batch.change_logits) {
    launch(change_kernel, rows, kChangeThreads, 0, stream, Overlap::kPreviousWithoutL1, logits, vocab_size_, batch,
           static_cast<unsigned*>(uses_.data()));
    argmax_rows(logits, vocab_size_, batch.num_rows, best + max_rows_, next_tokens, stream);
  }
  if (batch.have_cuts) {
    launch(bound_kernel, rows, kCutThreads, 0, stream, Overlap::kPreviousWithoutL1, logits, vocab_size_, batch.rows,
           next_tokens, cuts);
  }
  const dim3 grid(rows.x, static_cast<unsigned>((vocab_size_ + kLogitsPerBlock - 1) / kLogitsPerBlock));
  launch(sample_kernel, grid, kSampleThreads, 0, stream, Overlap::kPreviousWithoutL1, logits, vocab_size_, batch.rows,
         cuts, lists, best, next_tokens);
  if (batch.have_cuts) {
    auto* const counts = static_cast<std::uint32_t*>(counts_.data());
    const auto cut = [&](auto kernel, std::size_t shared_bytes) {
      launch(kernel, rows, kCutThreads, shared_bytes, stream, Overlap::kPreviousWithoutL1, logits, vocab_size_,
             batch.rows, cuts, lists, counts, next_tokens);
    };
    if (counts == nullptr) {
      cut(cut_kernel<false>, sizeof(CutShared<false>));
    } else {
      cut(cut_kernel<true>, sizeof(CutShared<true>));
    }
  }
}

}  // namespace common
