// The pool as JSON, for the page: blocks, block tables with their tokens' texts, queue, counters. Made from the real
// manager and scheduler on the engine's thread, and only while a client watches.
//
// A watcher gets one whole record and then, for each step, a record of what has changed since the one before:
//
//   {"whole": true,                                     only in the first, and in a new pool's: forget what was known
//    "sizes": {...}, "paused": false,                   sizes: where they have changed, or the pool was made anew;
//                                                       is_changed in it: they are not those of the server's start
//    "draining": true,                                  only while the server drains
//    "steps": [[index, prompt tokens, decoded tokens, milliseconds, preempted, copied, drafts, accepted], ...],
//                                                       since the last record; drafts are among the decoded tokens
//    "happened": {"admitted": [ids], "ended": [ids], "recomputed": [ids], "swapped_out": [ids],
//                 "copies": [[source, destination], ...],     behind the pool's blocks, `host_blocks` for swapping,
//                                                             and then `tier_blocks` of a second tier (sizes)
//                 "batch": [[id, tokens], ...],
//                 "drafts": [[id, sequence id, position of the first, accepted, [texts], drawn], ...],
//                 "shared": [[blocks that were read once for several sequences], how many reads that saved]},
//                                                       of the last step; drawn: the text that the model drew behind
//                                                       the accepted ones, missing if the sequence has ended
//    "running": [ids], "waiting": [ids],                where they have changed; what is in neither has ended
//    "requests": [{"id": 7, "prompt": 12, "max": 75, "swapped": false, "gone": [sequence ids],
//                  "sequences": [{"id": 3, "length": 9, "from": 2, "blocks": [12], "at": 8, "texts": [" wolf"]}]}],
//    "cached": [[block, [texts]], ...], "uncached": [blocks],
//    "num_running": 1, "num_waiting": 0, "counters": {...}}
//
// Only requests that have changed are listed, with the sequences that have: a block table is what it was before entry
// `from`, and then `blocks`; the texts are what they were before position `at`, and then `texts`. {"failure": "..."}:
// there is no engine.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/base/json.h"
#include "common/model/tokenizer.h"
#include "common/serving/engine_thread.h"
#include "common/serving/pool_snapshot.h"
#include "common/serving/step_report.h"

namespace common {

class PoolView {
 public:
  // tokenizer: null if the model's tokens are no text; their numbers are shown. Must outlive the object.
  explicit PoolView(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // On the engine's thread, when something has changed. Makes a record of each step while that takes little time. With
  // hundreds of sequences a record may stand for several steps, so that records take a twentieth of the time at most.
  void update(const EngineNews& news);

  int num_watchers() const { return num_watchers_; }

  // One client's reading. Records are made only while a Watcher exists.
  class Watcher {
   public:
    explicit Watcher(PoolView& view);
    ~Watcher() { view_.num_watchers_ -= 1; }
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

    // Waits for records, at most `timeout`, and returns all since the last call, oldest first.
    std::vector<std::string> read(std::chrono::milliseconds timeout);
    // Whether the next record has to be a whole one, which an update makes: at first, and when this client has read so
    // slowly that records are gone.
    bool needs_whole() const { return needs_whole_; }

   private:
    PoolView& view_;
    std::int64_t next_ = 0;  // record to read next
    bool needs_whole_ = true;
  };

 private:
  struct Record {
    std::string json;
    bool is_whole = false;
  };
  // What watchers know of a sequence, and of a request.
  struct KnownSequence {
    std::vector<int> block_table;
    std::vector<Token> tokens;
    int length = 0;
  };
  struct KnownRequest {
    bool is_swapped = false;
    std::map<int, KnownSequence> sequences;
  };

  void publish(std::string json, bool is_whole);
  std::string record_of(const EngineNews& news, bool is_whole);
  Json changes_of(const PoolSnapshot::Owner& request);
  Json changes_of(const PoolSnapshot::Sequence& sequence, KnownSequence& known) const;
  void add_cached(const PoolSnapshot& pool, Json& record);
  Json drafts_json(const StepReport& step) const;
  Json texts_of(std::span<const Token> tokens) const;
  void forget();

  const Tokenizer* tokenizer_;
  // On the engine's thread.
  std::vector<StepReport> steps_;  // since the last record
  std::map<int, KnownRequest> requests_;
  std::vector<int> running_;
  std::vector<int> waiting_;
  std::vector<std::vector<Token>> cached_;  // by block; empty: it is not cached
  std::string sizes_;
  int pool_ = -1;                // the latest record's
  double record_seconds_ = 0.0;  // what it typically takes to make a record
  double next_record_at_ = 0.0;

  std::atomic<int> num_watchers_ = 0;
  std::atomic<bool> wants_whole_ = true;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Record> records_;
  std::int64_t first_ = 0;  // number of records_.front()
  std::size_t num_bytes_ = 0;
};

}  // namespace common
