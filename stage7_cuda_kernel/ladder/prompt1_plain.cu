// Prompts, step 1: plain arithmetic on tiles that all rows of a thread block share.
//
// Decoding reads all of K and V for one query; a prompt has a query for each token. A thread block takes 32 queries of
// one head, its rows, and walks the blocks of tokens that they see. It copies 16 keys and values to shared memory, and
// each of the 32 rows uses them: four threads to a row, with a quarter of its dimensions each, run the online softmax
// of decoding's step 3. Token i sees the tokens up to i: what lies behind has the weight 0, and tiles that no row sees
// are not loaded at all.
//
// flops for one prompt of 8,192 tokens, 32 heads of 128 dimensions: 4 * 32 * 128 * 8,192^2 / 2 = 550 G. bytes: a tile
// serves 32 rows, 32 flops for each byte that comes from L2.
//
// Why it is slow: all of it is arithmetic on plain units, which at most do 132 x 128 multiplications with additions in
// each of 1.8 G cycles a second, 61 Tflop/s; and every product has operands to unpack and to fetch from shared memory.
#include "prompt_call.cuh"

namespace stage7 {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 32;                      // queries of a thread block
constexpr int kRowThreads = kThreads / kRows;  // 4: threads that share a query

using Vec = common::Vec16<Element>;
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;
constexpr int kOwnVecs = kVecsPerRow / kRowThreads;  // of a row: a thread has every fourth vector

__device__ Vec load_vec(const Element* row, int vec) {
  return {*reinterpret_cast<const uint4*>(row + vec * kVecElements)};
}

__global__ void __launch_bounds__(kThreads) attend(PromptCall call) {
  __shared__ Vec keys[kBlockTokens][kVecsPerRow];
  __shared__ Vec values[kBlockTokens][kVecsPerRow];
  const auto thread = static_cast<int>(threadIdx.x);
  const int part = thread % kRowThreads;
  const auto head = static_cast<int>(blockIdx.y);
  const Rows rows = find_rows(call, kRows, static_cast<int>(blockIdx.x));
  if (rows.count == 0) {
    return;
  }
  const int* table = call.block_tables + call.table_starts[rows.sequence];
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const int own = min(thread / kRowThreads, rows.count - 1);  // past the end: the last row again
  const std::int64_t row = (std::int64_t{rows.first + own} * call.num_heads + head) * kDimensions;
  Vec query[kOwnVecs];
#pragma unroll
  for (int i = 0; i < kOwnVecs; ++i) {
    query[i] = load_vec(call.queries + row, i * kRowThreads + part);
  }

  float largest = -INFINITY;
  float sum = 0.0F;
  float output[kOwnVecs][kVecElements] = {};
  const int seen = rows.position + rows.count;  // by the last row
  for (int begin = 0; begin < seen; begin += kBlockTokens) {
    __syncthreads();  // threads may still read the tile before
    for (int i = thread; i < kBlockTokens * kVecsPerRow; i += kThreads) {
      const std::int64_t offset = row_offset(call, table, kv_head, min(begin + i / kVecsPerRow, seen - 1));
      keys[i / kVecsPerRow][i % kVecsPerRow] = load_vec(call.keys + offset, i % kVecsPerRow);
      values[i / kVecsPerRow][i % kVecsPerRow] = load_vec(call.values + offset, i % kVecsPerRow);
    }
    __syncthreads();
    float scores[kBlockTokens];
    float new_largest = largest;
#pragma unroll
    for (int token = 0; token < kBlockTokens; ++token) {
      float score = 0.0F;
#pragma unroll
      for (int i = 0; i < kOwnVecs; ++i) {
        const Vec key = keys[token][i * kRowThreads + part];
#pragma unroll
        for (int j = 0; j < kVecElements; ++j) {
          score += query[i][j] * key[j];
        }
      }
      score += __shfl_xor_sync(~0U, score, 1);
      score += __shfl_xor_sync(~0U, score, 2);
      scores[token] = begin + token <= rows.position + own ? score * call.scale : -INFINITY;
      new_largest = fmaxf(new_largest, scores[token]);
    }
    const float factor = common::exp2_fast(largest - new_largest);
    largest = new_largest;
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kOwnVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kVecElements; ++j) {
        output[i][j] *= factor;
      }
    }
#pragma unroll
    for (int token = 0; token < kBlockTokens; ++token) {
      const float weight = common::exp2_fast(scores[token] - largest);
      sum += weight;
#pragma unroll
      for (int i = 0; i < kOwnVecs; ++i) {
        const Vec value = values[token][i * kRowThreads + part];
#pragma unroll
        for (int j = 0; j < kVecElements; ++j) {
          output[i][j] += weight * value[j];
        }
      }
    }
  }

  if (thread / kRowThreads < rows.count) {
#pragma unroll
    for (int i = 0; i < kOwnVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kVecElements; ++j) {
        call.output[row + (i * kRowThreads + part) * kVecElements + j] =
            common::from_float<Element>(output[i][j] / sum);
      }
    }
  }
}

void attend_prompts(const Pages& pages, const BatchArrays& batch, const int* query_starts, const void* queries,
                    void* output, int num_tokens, void* /*workspace*/, cudaStream_t stream) {
  const PromptCall call = prompt_call(pages, batch, query_starts, queries, output);
  if (num_tokens > 0) {
    common::launch(attend, prompt_grid(call, num_tokens, kRows), kThreads, 0, stream, common::Overlap::kNone, call);
  }
}

}  // namespace

const PromptStep kPromptPlain = {"1 plain", attend_prompts};

}  // namespace
