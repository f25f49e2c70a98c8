// The server's HTTP interface without the network: a request comes in as text and a reply goes out as text, at once or
// piece by piece. OpenAI's paths and fields (https://platform.openai.com/docs/api-reference), with vLLM's additions.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/serving/completion_request.h"
#include "common/serving/demo_pool.h"
#include "common/serving/engine_thread.h"
#include "common/serving/memory_account.h"
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
  std::string requested_headers = {};  // Access-Control-Request-Headers
  bool is_on_loopback = false;         // whether it came to an address that only this machine reaches
  std::string request_id = {};         // X-Request-Id
};

// What the texts of a reply took and gave, all prompts and samples together.
struct ReplyFigures {
  std::size_t prompt_tokens = 0;
  std::size_t cached_tokens = 0;  // of the prompts, found in the prefix cache
  std::size_t output_tokens = 0;
  std::string end;  // why they ended: "stop", "length", "length, stop"; empty: they have not
};

// A reply that comes piece by piece. Its destructor cancels the work for it.
class ReplyBody {
 public:
  virtual ~ReplyBody() = default;
  // So far. Nothing if it is no reply with texts.
  virtual std::optional<ReplyFigures> figures() const { return std::nullopt; }
  // Waits for text to send, at most about a tenth of a second, and appends it to `text`. False: the reply is complete.
  virtual bool read(std::string& text) = 0;
};

struct ApiReply {
  MemoryAccount::Share memory = {};  // what the request takes until the reply has been sent; given back last
  int status = 200;
  std::string content_type = "application/json";
  std::string body = {};
  std::shared_ptr<const std::string> shared_body = {};  // in place of the body: one for all its replies
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::unique_ptr<ReplyBody> stream = nullptr;  // in place of the body
  std::optional<ReplyFigures> figures = {};     // of the body's texts
  std::string problem = {};                     // of an error, for the operator: replies hide places in the code

  std::string_view body_text() const { return shared_body != nullptr ? *shared_body : body; }
};

struct ApiOptions {
  std::string model_name;  // in replies; the only name that requests may have
  std::string api_key;     // empty: no key is needed
  MakeDemoPool make_demo_pool;
  bool pool_controls = false;  // clients may pause, step and restart the pool, and run the demonstration
  // Whose pages may use the API, but not the controls: "https://example.org", or "*" for all.
  std::vector<std::string> cors_origins = {};
  std::string chat_format = {};  // as ChatOptions; empty: the model file's own
  bool streams_wait = false;     // a stream begins with its first token: until then a proxy may ask another server
  // What requests may make the server hold. Null: MemoryAccount::of_this_machine().
  std::shared_ptr<MemoryAccount> memory = nullptr;
};

// The header with a request's id: the client's own or, in a reply with texts, the body's.
inline constexpr const char* kRequestId = "X-Request-Id";

// An error in OpenAI's format. param: the wrong field, if there is one.
ApiReply error_reply(int status, const std::string& message, const std::string& param = "",
                     const std::string& code = "");

// The reply to every request that comes before there is an Api.
ApiReply starting_reply(const std::string& path);

// All functions may be called by any thread, at the same time.
class Api {
 public:
  // Session, engine and view must outlive the object.
  Api(const ServedModel& model, EngineThread& engine, PoolView& view, const ApiOptions& options);

  // is_gone: whether the client has hung up; asked now and then while a reply is not ready.
  ApiReply handle(ApiRequest request, const std::function<bool()>& is_gone);
  // The reply to a request that is refused for its head alone, so that its body need not be read.
  std::optional<ApiReply> refusal(const ApiRequest& request) const;
  // The reply with the headers for a page of another site and for a client's own id of the request.
  ApiReply with_headers(const ApiRequest& request, ApiReply reply) const;

  const MemoryAccount& memory() const { return *options_.memory; }

  // Undoes what clients have changed for as long as a page is open, once none has been for so long: a page that is
  // loaded anew is open again soon. For one thread, which calls it now and then.
  void restore_unwatched(std::chrono::milliseconds after = std::chrono::seconds(5));

 private:
  ApiReply reply_to(ApiRequest& request, const std::function<bool()>& is_gone);
  std::optional<ApiReply> refused(const ApiRequest& request) const;
  bool is_allowed_origin(const std::string& origin) const;
  ApiReply route(ApiRequest& request, const std::function<bool()>& is_gone);
  void check_chat() const;
  bool is_authorized(const ApiRequest& request) const;
  ApiReply complete(ApiRequest& request, bool is_chat, const std::function<bool()>& is_gone);
  ApiReply health() const;
  ApiReply models(const std::string& path) const;
  ApiReply tokenize(const ApiRequest& request) const;
  ApiReply detokenize(const ApiRequest& request) const;
  void reserve(MemoryAccount::Share& share, double bytes) const;
  ApiReply pool(const ApiRequest& request);

  const ServedModel& model_;
  EngineThread& engine_;
  PoolView& view_;
  ApiOptions options_;
  RequestDefaults defaults_;
  std::string chat_problem_;  // why there are no chats; empty: there are
  std::shared_ptr<const std::string> page_;
  DemoPool demo_;
  std::atomic<bool> has_changes_ = false;  // that last as long as a page is open
  std::chrono::steady_clock::time_point last_watched_ = std::chrono::steady_clock::now();
  std::atomic<std::uint64_t> next_seed_;
  std::atomic<std::int64_t> num_replies_ = 0;
  std::string reply_ids_;  // the common part of the ids of this server's replies, different on every server
  std::int64_t created_;   // when the server began, in seconds since 1970
};

}  // namespace common
