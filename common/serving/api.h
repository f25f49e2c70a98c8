// The server's HTTP interface without the network: a request comes in as text and a reply goes out as text, at once or
// piece by piece. OpenAI's paths and fields (https://platform.openai.com/docs/api-reference), with vLLM's additions.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/serving/demo_pool.h"
#include "common/serving/engine_thread.h"
#include "common/serving/pool_view.h"
#include "common/serving/served_model.h"

namespace common {

struct ApiRequest {
  std::string method;  // GET, POST
  std::string path;    // without the query
  std::string body = {};
  std::string authorization = {};  // the values of these headers; empty: absent
  std::string content_type = {};
  std::string origin = {};
  std::string host = {};
  bool is_on_loopback = false;  // whether it came to an address that only this machine reaches
};

// A reply that comes piece by piece. Its destructor cancels the work for it.
class ReplyBody {
 public:
  virtual ~ReplyBody() = default;
  // Waits for text to send, at most about a tenth of a second, and appends it to `text`. False: the reply is complete.
  virtual bool read(std::string& text) = 0;
};

struct ApiReply {
  int status = 200;
  std::string content_type = "application/json";
  std::string body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::unique_ptr<ReplyBody> stream = nullptr;  // in place of the body
};

struct ApiOptions {
  std::string model_name;  // in replies; the only name that requests may have
  std::string api_key;     // empty: no key is needed
  MakeDemoPool make_demo_pool;
  bool pool_controls = false;  // clients may pause, step and restart the pool, and run the demonstration
};

// An error in OpenAI's format. param: the wrong field, if there is one.
ApiReply error_reply(int status, const std::string& message, const std::string& param = "",
                     const std::string& code = "");

// All functions may be called by any thread, at the same time.
class Api {
 public:
  // Session, engine and view must outlive the object.
  Api(const ServedModel& model, EngineThread& engine, PoolView& view, const ApiOptions& options);

  // is_gone: whether the client has hung up; asked now and then while a reply is not ready.
  ApiReply handle(const ApiRequest& request, const std::function<bool()>& is_gone);
  // The reply to a request that is refused for its head alone, so that its body need not be read.
  std::optional<ApiReply> refusal(const ApiRequest& request) const;

 private:
  ApiReply route(const ApiRequest& request, const std::function<bool()>& is_gone);
  bool is_authorized(const ApiRequest& request) const;
  ApiReply complete(const ApiRequest& request, bool is_chat, const std::function<bool()>& is_gone);
  ApiReply models() const;
  ApiReply tokenize(const ApiRequest& request) const;
  ApiReply detokenize(const ApiRequest& request) const;
  ApiReply pool(const ApiRequest& request);

  const ServedModel& model_;
  EngineThread& engine_;
  PoolView& view_;
  ApiOptions options_;
  DemoPool demo_;
  std::atomic<std::uint64_t> next_seed_;
  std::atomic<std::int64_t> num_replies_ = 0;
  std::string reply_ids_;  // the common part of the ids of this server's replies, different on every server
  std::int64_t created_;   // when the server began, in seconds since 1970
};

}  // namespace common
