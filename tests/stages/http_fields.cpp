// What clients may ask for beside the text itself: penalties and biases, the prompt's own probabilities, chats by
// another template, other sites' pages; and what the operator is told.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/text.h"
#include "common/math/sampling.h"
#include "common/model/chat.h"
#include "common/model/gguf.h"
#include "common/model/recommended_sampling.h"
#include "common/serving/http_command.h"
#include "common/serving/http_request.h"
#include "common/serving/prometheus.h"
#include "common/serving/request_log.h"
#include "tests/stages/http_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/http_client.h"
#include "tests/support/sanitizers.h"

using common::Token;
using nlohmann::json;
using tests::ApiFixture;
using tests::events_of;
using tests::HttpConnection;
using tests::read_all;
using tests::read_reply;
using tests::streamed_text;
using tests::text_alone;

namespace {

const std::string kPrompt = "The old king had a daughter who was more beautiful than all others, and";

json greedy_body(int max_tokens) { return {{"prompt", kPrompt}, {"max_tokens", max_tokens}, {"temperature", 0}}; }

json reply_to(ApiFixture& fixture, const json& body, const std::string& path = "/v1/completions") {
  const common::ApiReply reply = fixture.post(path, body);
  INFO(reply.body);
  REQUIRE(reply.status == 200);
  return json::parse(reply.body);
}

std::string text_of(const json& reply) { return reply["choices"].at(0)["text"].get<std::string>(); }

std::vector<Token> encode(const std::string& text) { return tests::default_session().tokenizer.encode_prompt(text); }

std::string header_of(const common::ApiReply& reply, const std::string& name) {
  const auto found = std::find_if(reply.headers.begin(), reply.headers.end(),
                                  [&](const auto& header) { return header.first == name; });
  return found == reply.headers.end() ? "" : found->second;
}

// A server of the bundled model, whose file has another chat template and another name.
struct OtherFile {
  explicit OtherFile(const tests::GgufBuilder& builder, const std::string& chat_format = {},
                     std::vector<std::string> cors_origins = {},
                     const common::Gguf& tokenizer = *tests::default_session().file)
      : session{kPath,
                common::Llama(*tests::default_session().file),
                common::Tokenizer(tokenizer),
                {},
                tests::default_session().requests},
        bytes(builder.build()),
        model((session.file = std::make_shared<const common::Gguf>(common::Gguf::parse(bytes, kPath)), session), ""),
        view(&session.tokenizer),
        engine(ApiFixture::engines({}), {64, false}, [](const common::EngineNews&) {}),
        api(model, engine, view,
            {"tales", "", stage::demo_pools(ApiFixture::add_demo_commands), false, std::move(cors_origins),
             chat_format}) {}
  common::ApiReply post(const std::string& path, const json& body) {
    return api.handle({.method = "POST", .path = path, .body = body.dump(), .content_type = "application/json"},
                      [] { return false; });
  }

  static constexpr const char* kPath = "/home/me/secret/model.gguf";
  common::Session session;
  tests::Bytes bytes;
  common::ServedModel model;
  common::PoolView view;
  common::EngineThread engine;
  common::Api api;
};

const json kChat = {{"messages", json::parse(R"([{"role": "user", "content": "Once upon a time"}])")},
                    {"max_tokens", 4},
                    {"temperature", 0}};

// The error of a request that is refused with this status.
json error_of(const common::ApiReply& reply, int status = 400) {
  INFO(reply.body);
  REQUIRE(reply.status == status);
  return json::parse(reply.body)["error"];
}

}  // namespace

TEST_CASE("penalties and biases change a text as they change its logits, and no text beside it") {
  ApiFixture fixture;
  common::SamplingOptions options;
  options.temperature = 0.8F;
  options.seed = 5;
  const std::string plain = text_alone(kPrompt, 24, options);
  common::SamplingOptions changed = options;
  changed.presence_penalty = 1.5F;
  changed.frequency_penalty = 0.5F;
  changed.repetition_penalty = 1.2F;
  changed.logit_bias = {{encode(" the").back(), -100.0F}, {encode(" castle").back(), 2.5F}};
  const std::string penalised = text_alone(kPrompt, 24, changed);
  REQUIRE(plain != penalised);
  REQUIRE(plain.find(" the ") != std::string::npos);
  CHECK(penalised.find(" the ") == std::string::npos);
  json body = greedy_body(24);
  body.update({{"temperature", 0.8}, {"seed", 5}, {"top_k", 0}, {"top_p", 1}});
  json changed_body = body;
  changed_body.update({{"presence_penalty", 1.5}, {"frequency_penalty", 0.5}, {"repetition_penalty", 1.2}});
  changed_body["logit_bias"] = {{std::to_string(encode(" the").back()), -100},
                                {std::to_string(encode(" castle").back()), 2.5}};
  // The runner draws all tokens; or, in the same steps, there are rows for which it hands out logits.
  for (const bool with_logits : {false, true}) {
    std::vector<std::string> texts(6);
    std::vector<std::thread> clients;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      json own = i % 2 == 0 ? body : changed_body;
      if (with_logits && i >= 4) {
        own["logprobs"] = 1;
      }
      clients.emplace_back([&, i, own] {
        const common::ApiReply reply = fixture.post("/v1/completions", own);
        texts[i] = text_of(json::parse(reply.body));
      });
    }
    for (std::thread& client : clients) {
      client.join();
    }
    for (std::size_t i = 0; i < texts.size(); ++i) {
      CAPTURE(with_logits, i);
      CHECK(texts[i] == (i % 2 == 0 ? plain : penalised));
    }
  }
  // A bias of 100 is as good as a choice.
  json chosen = greedy_body(3);
  chosen["logit_bias"] = {{std::to_string(encode(" a").back()), 100}};
  CHECK(text_of(reply_to(fixture, chosen)) == " a a a");
}

TEST_CASE("stop_token_ids end a text, and min_tokens keeps it going") {
  ApiFixture fixture;
  const json whole = reply_to(fixture, greedy_body(12));
  json body = greedy_body(12);
  body["logprobs"] = 0;
  const json tokens = reply_to(fixture, body)["choices"][0]["logprobs"]["tokens"];
  const Token third = tests::default_session().tokenizer.encode(tokens[2].get<std::string>()).back();
  json stopped = greedy_body(12);
  stopped["stop_token_ids"] = {third};
  const json early = reply_to(fixture, stopped);
  CHECK(early["choices"][0]["finish_reason"] == "stop");
  CHECK(early["usage"]["completion_tokens"] == 2);
  CHECK(text_of(early) == tokens[0].get<std::string>() + tokens[1].get<std::string>());
  stopped["ignore_eos"] = true;  // is about the model's own stop tokens
  CHECK(reply_to(fixture, stopped)["usage"]["completion_tokens"] == 2);
  stopped["min_tokens"] = 2;
  CHECK(reply_to(fixture, stopped)["usage"]["completion_tokens"] == 2);
  stopped["min_tokens"] = 8;
  CHECK(reply_to(fixture, stopped)["usage"]["completion_tokens"] >= 8);
  // The text is another one from where the stop token was, and the log-probabilities are still the model's own.
  stopped["logprobs"] = 1;
  const json longer = reply_to(fixture, stopped)["choices"][0]["logprobs"];
  CHECK(longer["tokens"][1] == tokens[1]);
  CHECK(longer["tokens"][2] != tokens[2]);
  CHECK(longer["top_logprobs"][2].size() == 2);
  CHECK(longer["top_logprobs"][2].contains(tokens[2].get<std::string>()));
  CHECK(text_of(whole).starts_with(text_of(early)));
}

TEST_CASE("min_tokens holds back stop texts too, in a stream as in a whole reply") {
  ApiFixture fixture;
  const std::string whole = text_of(reply_to(fixture, greedy_body(24)));
  json body = greedy_body(24);
  body["stop"] = "e";
  const std::size_t first = whole.find('e');
  CHECK(text_of(reply_to(fixture, body)) == whole.substr(0, first));
  body["min_tokens"] = 8;
  const json reply = reply_to(fixture, body);
  CHECK(reply["choices"][0]["finish_reason"] == "stop");
  CHECK(reply["choices"][0]["stop_reason"] == "e");
  CHECK(reply["usage"]["completion_tokens"] > 8);
  CHECK(text_of(reply).size() > first);
  CHECK(whole.starts_with(text_of(reply) + "e"));
  body["stream"] = true;
  CHECK(streamed_text(read_all(*fixture.post("/v1/completions", body).stream)) == text_of(reply));
  body.update({{"stream", false}, {"min_tokens", 24}});
  CHECK(text_of(reply_to(fixture, body)) == whole);
  // A chat without max_tokens has the room that its context leaves.
  json chat = kChat;
  chat.erase("max_tokens");
  chat["min_tokens"] = 1024;
  const auto room = 1024 - static_cast<int>(encode("Once upon a time").size());
  CHECK(error_of(fixture.post("/v1/chat/completions", chat))["message"] ==
        "'min_tokens' must be at most " + std::to_string(room) + ": a reply has no more room");
  chat["messages"][0]["content"] = std::string(5000, 'x');
  CHECK(error_of(fixture.post("/v1/chat/completions", chat))["code"] == "context_length_exceeded");
}

#ifdef COURSE_PRODUCTION
TEST_CASE("num_speculative_tokens changes no text") {
  ApiFixture fixture;
  for (const double temperature : {0.0, 1.0}) {
    json body = greedy_body(24);
    body["temperature"] = temperature;
    body["seed"] = 5;
    body["logprobs"] = 1;
    const json plain = reply_to(fixture, body)["choices"][0];
    body["num_speculative_tokens"] = 8;
    const json speculated = reply_to(fixture, body)["choices"][0];
    CHECK(speculated["text"] == plain["text"]);
    CHECK(speculated["logprobs"]["tokens"] == plain["logprobs"]["tokens"]);
  }
}
#endif

TEST_CASE("usage says how much of the prompts the prefix cache had") {
  ApiFixture fixture;  // blocks of 4
  const std::size_t length = encode(kPrompt).size();
  const auto cached = [&](const json& body) {
    const json usage = reply_to(fixture, body)["usage"];
    CHECK(usage["total_tokens"] == usage["prompt_tokens"].get<int>() + usage["completion_tokens"].get<int>());
    return usage["prompt_tokens_details"]["cached_tokens"].get<std::size_t>();
  };
  CHECK(cached(greedy_body(2)) == 0);
  CHECK(cached(greedy_body(2)) == (length - 1) / 4 * 4);
  json several = greedy_body(2);
  several["n"] = 3;
  CHECK(cached(several) == (length - 1) / 4 * 4);  // a prompt is counted once, as in prompt_tokens
  several["prompt"] = {kPrompt, kPrompt};
  CHECK(cached(several) == 2 * ((length - 1) / 4 * 4));
  json salted = greedy_body(2);
  salted["cache_salt"] = "mine";
  CHECK(cached(salted) == 0);
  salted["cache_salt"] = "";  // none
  CHECK(cached(salted) == (length - 1) / 4 * 4);
  json streamed = greedy_body(2);
  streamed.update({{"stream", true}, {"stream_options", {{"include_usage", true}}}});
  const std::vector<json> events = events_of(read_all(*fixture.post("/v1/completions", streamed).stream));
  CHECK(events.at(events.size() - 2)["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) / 4 * 4);
}

TEST_CASE("/metrics counts the prompts' tokens that were looked up in the prefix cache, and those found") {
  ApiFixture fixture({.num_slots = 32, .token_budget = 16});  // 8 blocks
  const auto counted = [&] {
    const common::PrefixFigures prefix = fixture.engine.state().status.prefix;
    return std::pair(prefix.prompt_tokens, prefix.prompt_tokens_found);
  };
  const auto length = static_cast<std::int64_t>(encode("Once upon a time there was").size());
  json body = greedy_body(12);
  body["prompt"] = "Once upon a time there was";
  const std::int64_t found = (length - 1) / 4 * 4;
  REQUIRE(found > 0);
  reply_to(fixture, body);
  CHECK(counted() == std::pair<std::int64_t, std::int64_t>(length, 0));
  reply_to(fixture, body);
  CHECK(counted() == std::pair(2 * length, found));
  // Texts that push each other out of the cache: what they find when they are resumed does not count as a prompt that
  // was looked up.
  body.update({{"max_tokens", 20}, {"temperature", 1}, {"ignore_eos", true}});
  body["prompt"] = {"Once upon a time there was", "Once upon a time there was"};
  reply_to(fixture, body);
  REQUIRE(fixture.engine.state().tally.num_preemptions() > 0);
  CHECK(counted().first == 4 * length);
  CHECK(counted().second <= 3 * found);
  const std::string metrics = fixture.get("/metrics").body;
  CHECK(metrics.find("vllm:prefix_cache_queries_total{model_name=\"tales-5m\"} " + std::to_string(counted().first) +
                     "\n") != std::string::npos);
  CHECK(metrics.find("vllm:prefix_cache_hits_total{model_name=\"tales-5m\"} " + std::to_string(counted().second) +
                     "\n") != std::string::npos);
}

TEST_CASE("a prompt whose probabilities alone are wanted may be as long as the context") {
  ApiFixture fixture({.num_slots = 4096, .context_length = tests::kSanitized ? 64 : 0});
  const auto most = static_cast<std::size_t>(fixture.engine.max_context());
  const auto asked = [&](std::size_t length, const json& more) {
    json body = {{"prompt", std::vector<int>(length, 5)}, {"max_tokens", 0}, {"temperature", 0}};
    body.update(more);
    return body;
  };
  const json scored = reply_to(fixture, asked(most, {{"echo", true}, {"logprobs", 1}, {"n", 2}}));
  REQUIRE(scored["choices"].size() == 2);
  CHECK(scored["choices"][1]["logprobs"]["tokens"].size() == most);
  CHECK(scored["choices"][1]["finish_reason"] == "length");
  CHECK(scored["usage"]["prompt_tokens"] == most);
  CHECK(scored["usage"]["completion_tokens"] == 0);
  // Without "echo" too: then the text is empty.
  const json alone = reply_to(fixture, asked(most, {{"prompt_logprobs", 0}}));
  CHECK(text_of(alone).empty());
  CHECK(alone["choices"][0]["prompt_logprobs"].size() == most);
  // A prompt that is only sent back takes no computation.
  const json sent_back = reply_to(fixture, asked(most, {{"echo", true}}));
  CHECK(text_of(sent_back) == text_of(scored));
  json streamed = asked(most, {{"echo", true}, {"stream", true}});
  CHECK(streamed_text(read_all(*fixture.post("/v1/completions", streamed).stream)) == text_of(scored));
  // The scores are the same in a text that goes on, but for rounding: its prompt is computed beside them.
  constexpr double kTolerance = 1e-4;
  const json shorter = {{"echo", true}, {"logprobs", 1}};
  json longer = shorter;
  longer["max_tokens"] = 1;
  const json probabilities = reply_to(fixture, asked(8, shorter))["choices"][0]["logprobs"]["token_logprobs"];
  json before = reply_to(fixture, asked(8, longer))["choices"][0]["logprobs"]["token_logprobs"];
  before.erase(before.size() - 1);
  REQUIRE(probabilities.size() == before.size());
  CHECK((probabilities[0].is_null() && before[0].is_null()));
  for (std::size_t i = 1; i < before.size(); ++i) {
    CHECK(std::abs(probabilities[i].get<double>() - before[i].get<double>()) < kTolerance);
  }
  // One token more is too long for the model.
  for (const json& more : {json{{"echo", true}}, json{{"echo", true}, {"logprobs", 1}}, json{{"prompt_logprobs", 0}}}) {
    const json error = error_of(fixture.post("/v1/completions", asked(most + 1, more)));
    CHECK(error["code"] == "context_length_exceeded");
    CHECK(error["message"].get<std::string>().ends_with(std::to_string(most + 1) + " tokens in 'prompt'"));
  }
  CHECK(error_of(fixture.post("/v1/completions", asked(4, json::object())))["param"] == "max_tokens");
}

TEST_CASE("stop_reason is the stop text or the token that ended a text, and null for any other end") {
  ApiFixture fixture;
  json body = greedy_body(12);
  body["logprobs"] = 0;
  const json tokens = reply_to(fixture, body)["choices"][0]["logprobs"]["tokens"];
  body.erase("logprobs");
  const Token third = tests::default_session().tokenizer.encode(tokens[2].get<std::string>()).back();
  // The reason of a text and of a chat, each whole and streamed: it stands beside finish_reason.
  const auto reasons = [&](json request) {
    std::vector<json> result;
    for (const bool is_chat : {false, true}) {
      const std::string path = is_chat ? "/v1/chat/completions" : "/v1/completions";
      if (is_chat) {
        request.erase("prompt");
        request["messages"] = {{{"role", "user"}, {"content", kPrompt}}};
      }
      request["stream"] = false;
      const json choice = reply_to(fixture, request, path)["choices"][0];
      result.push_back(json::array({choice["finish_reason"], choice.at("stop_reason")}));
      request["stream"] = true;
      const std::vector<json> events = events_of(read_all(*fixture.post(path, request).stream));
      for (std::size_t i = 0; i + 2 < events.size(); ++i) {
        CHECK(events[i]["choices"][0].value("stop_reason", json()).is_null());
      }
      const json last = events.at(events.size() - 2)["choices"][0];
      result.push_back(json::array({last["finish_reason"], last.at("stop_reason")}));
    }
    return result;
  };
  const auto all_are = [](const json& reason, const json& stop_reason) {
    return std::vector<json>(4, json::array({reason, stop_reason}));
  };
  CHECK(reasons(body) == all_are("length", nullptr));
  json by_token = body;
  by_token["stop_token_ids"] = {3, third};
  CHECK(reasons(by_token) == all_are("stop", third));
  by_token["ignore_eos"] = true;
  CHECK(reasons(by_token) == all_are("stop", third));
  by_token.update({{"use_beam_search", true}, {"n", 1}});
  CHECK(reasons(by_token) == all_are("stop", third));
  // Of several texts, the one at which the reply was cut.
  json by_text = body;
  const std::string stop = tokens[1].get<std::string>() + tokens[2].get<std::string>();
  by_text["stop"] = {"never", stop.substr(1), stop};
  CHECK(reasons(by_text) == all_are("stop", stop));
  // The model's own end, even if it is asked for again.
  json ended = body;
  const Token eos = tests::default_session().tokenizer.eos().value();
  ended["logit_bias"] = {{std::to_string(eos), 100}};
  CHECK(reasons(ended) == all_are("stop", nullptr));
  ended["stop_token_ids"] = {eos};
  CHECK(reasons(ended) == all_are("stop", nullptr));
  ended["ignore_eos"] = true;
  CHECK(reasons(ended) == all_are("stop", eos));
  json scored = body;
  scored.update({{"echo", true}, {"max_tokens", 0}});
  CHECK(reply_to(fixture, scored)["choices"][0].at("stop_reason").is_null());
}

TEST_CASE("echo puts the prompt before the text, and a prompt's log-probabilities are those of the text that it was") {
  ApiFixture fixture;
  constexpr double kTolerance = 1e-4;  // the tokens were computed in chunks of other sizes
  const std::string plain = text_of(reply_to(fixture, greedy_body(8)));
  json echoed = greedy_body(8);
  echoed["echo"] = true;
  CHECK(text_of(reply_to(fixture, echoed)) == kPrompt + plain);
  echoed["stream"] = true;
  CHECK(streamed_text(read_all(*fixture.post("/v1/completions", echoed).stream)) == kPrompt + plain);
  echoed["stream"] = false;
  echoed["logprobs"] = 2;
  const json whole = reply_to(fixture, echoed)["choices"][0];
  const std::vector<Token> prompt = encode(kPrompt);
  REQUIRE(whole["logprobs"]["tokens"].size() == prompt.size() + 8);
  CHECK(whole["logprobs"]["token_logprobs"][0].is_null());
  CHECK(whole["logprobs"]["top_logprobs"][0].is_null());
  // Each token stands in the text where its offset says.
  for (std::size_t i = 1; i < whole["logprobs"]["tokens"].size(); ++i) {
    const auto token = whole["logprobs"]["tokens"][i].get<std::string>();
    CHECK(whole["text"].get<std::string>().substr(whole["logprobs"]["text_offset"][i].get<std::size_t>(),
                                                  token.size()) == token);
  }
  // The whole text as a prompt: its last tokens have the log-probabilities with which they were drawn.
  json scored = greedy_body(0);
  scored["prompt"] = prompt;
  for (std::size_t i = prompt.size(); i < prompt.size() + 8; ++i) {
    scored["prompt"].push_back(
        tests::default_session().tokenizer.encode(whole["logprobs"]["tokens"][i].get<std::string>()).back());
  }
  scored.update({{"echo", true}, {"prompt_logprobs", 1}});
  const json reply = reply_to(fixture, scored);
  CHECK(text_of(reply) == kPrompt + plain);
  CHECK(reply["usage"]["completion_tokens"] == 0);
  CHECK(reply["choices"][0]["finish_reason"] == "length");
  const json& scores = reply["choices"][0]["prompt_logprobs"];
  REQUIRE(scores.size() == prompt.size() + 8);
  CHECK(scores[0].is_null());
  for (std::size_t i = 1; i < scores.size(); ++i) {
    const json& entry = scores[i].at(std::to_string(scored["prompt"][i].get<Token>()));
    CHECK(std::abs(entry["logprob"].get<double>() - whole["logprobs"]["token_logprobs"][i].get<double>()) < kTolerance);
    CHECK((i < prompt.size() || entry["rank"] == 1));  // greedy
    CHECK(scores[i].size() == (entry["rank"] == 1 ? 1 : 2));
  }
  // A chat has them beside its choices. The shortest prompt has a token, and no probability.
  json chat = kChat;
  chat["prompt_logprobs"] = 0;
  CHECK(reply_to(fixture, chat, "/v1/chat/completions")["prompt_logprobs"].size() == encode("Once upon a time").size());
  json shortest = greedy_body(2);
  shortest.update({{"prompt", {5}}, {"prompt_logprobs", 3}, {"n", 2}});
  const json both = reply_to(fixture, shortest)["choices"];
  REQUIRE(both.size() == 2);
  CHECK(both[1]["prompt_logprobs"] == json::array({nullptr}));
  CHECK(ApiFixture::wait_for([&] { return fixture.is_pool_empty(); }));
}

TEST_CASE("log-probabilities say where their tokens begin, in characters, streamed or not") {
  ApiFixture fixture;
  json body = greedy_body(16);
  body["logprobs"] = 0;
  const json whole = reply_to(fixture, body)["choices"][0]["logprobs"]["text_offset"];
  body["stream"] = true;
  json streamed = json::array();
  for (const json& event : events_of(read_all(*fixture.post("/v1/completions", body).stream))) {
    if (event.is_object() && event["choices"][0]["logprobs"].is_object()) {
      for (const json& offset : event["choices"][0]["logprobs"]["text_offset"]) {
        streamed.push_back(offset);
      }
    }
  }
  CHECK(whole[0] == 0);
  CHECK(whole[15] > 30);
  CHECK(streamed == whole);
}

TEST_CASE("fields with wrong values are refused in one line that names them") {
  ApiFixture fixture;
  const auto with = [](const std::string& name, const json& value) {
    json body = greedy_body(2);
    body[name] = value;
    return body;
  };
  json many_biases = json::object();
  for (int token = 0; token < 1025; ++token) {
    many_biases[std::to_string(token)] = 1;
  }
  json streamed = with("prompt_logprobs", 1);
  streamed["stream"] = true;
  json streamed_echo = with("echo", true);
  streamed_echo.update({{"stream", true}, {"logprobs", 1}});
  json many_scores = with("prompt_logprobs", 20);
  many_scores["prompt"] = std::vector<std::vector<int>>(20, std::vector<int>(700, 5));
  json beams = with("presence_penalty", 1);
  beams["use_beam_search"] = true;
  json drafted_beams = with("num_speculative_tokens", 4);
  drafted_beams["use_beam_search"] = true;
  const std::vector<std::pair<json, std::string>> cases = {
      {with("presence_penalty", 2.1), "presence_penalty"},
      {with("presence_penalty", 1e308), "presence_penalty"},
      {with("frequency_penalty", -2.5), "frequency_penalty"},
      {with("frequency_penalty", "1"), "frequency_penalty"},
      {with("frequency_penalty", {1}), "frequency_penalty"},
      {with("logit_bias", json::array({{1, 2}})), "logit_bias"},
      {with("logit_bias", "x"), "logit_bias"},
      {with("logit_bias", {{"-1", 1}}), "logit_bias"},
      {with("logit_bias", {{"01", 1}}), "logit_bias"},
      {with("logit_bias", {{"+1", 1}}), "logit_bias"},
      {with("logit_bias", {{"1 ", 1}}), "logit_bias"},
      {with("logit_bias", {{"", 1}}), "logit_bias"},
      {with("logit_bias", {{"1e3", 1}}), "logit_bias"},
      {with("logit_bias", {{"99999999999999999999", 1}}), "logit_bias"},
      {with("logit_bias", {{"2147483647", 1}}), "logit_bias"},
      {with("logit_bias", {{"5", 100.5}}), "logit_bias"},
      {with("logit_bias", {{"5", -1e308}}), "logit_bias"},
      {with("logit_bias", {{"5", nullptr}}), "logit_bias"},
      {with("logit_bias", {{"5", {{"5", 1}}}}), "logit_bias"},
      {with("logit_bias", many_biases), "logit_bias"},
      {with("stop_token_ids", 5), "stop_token_ids"},
      {with("stop_token_ids", {-1}), "stop_token_ids"},
      {with("stop_token_ids", {1 << 30}), "stop_token_ids"},
      {with("stop_token_ids", {1.5}), "stop_token_ids"},
      {with("stop_token_ids", {"5"}), "stop_token_ids"},
      {with("stop_token_ids", std::vector<int>(65, 5)), "stop_token_ids"},
      {with("min_tokens", -1), "min_tokens"},
      {with("min_tokens", 3), "min_tokens"},
      {with("min_tokens", 18446744073709551615ULL), "min_tokens"},
      {with("num_speculative_tokens", -1), "num_speculative_tokens"},
      {with("num_speculative_tokens", 9), "num_speculative_tokens"},
      {with("num_speculative_tokens", "4"), "num_speculative_tokens"},
      {drafted_beams, "num_speculative_tokens"},
      {with("echo", 1), "echo"},
      {streamed_echo, "echo"},
      {with("prompt_logprobs", -1), "prompt_logprobs"},
      {with("prompt_logprobs", 21), "prompt_logprobs"},
      {with("prompt_logprobs", true), "prompt_logprobs"},
      {streamed, "prompt_logprobs"},
      {beams, "presence_penalty"},
      {many_scores, "prompt_logprobs"},
      {with("max_tokens", 0), "max_tokens"},
      {with("chat_template_kwargs", json::object()), "chat_template_kwargs"},  // no chat
      {with("response_format", {{"type", "json_object"}}), "response_format"},
      {with("tools", {{{"type", "function"}}}), "tools"},
  };
  for (const auto& [body, param] : cases) {
    INFO(body.dump().substr(0, 200));
    const common::ApiReply reply = fixture.post("/v1/completions", body);
    CHECK(reply.status == 400);
    const json error = json::parse(reply.body)["error"];
    CHECK(error["param"] == param);
    CHECK(error["message"].get<std::string>().find('\n') == std::string::npos);
  }
  for (const json& value :
       {json("x"), json({{"enable_thinking", 1}}), json({{"thinking", false}}), json({{"enable_thinking", true}})}) {
    json chat = kChat;
    chat["chat_template_kwargs"] = value;
    const common::ApiReply reply = fixture.post("/v1/chat/completions", chat);
    CHECK(reply.status == 400);
    CHECK(json::parse(reply.body)["error"]["param"] == "chat_template_kwargs");
  }
  json echoed_chat = kChat;
  echoed_chat["echo"] = true;
  CHECK(fixture.post("/v1/chat/completions", echoed_chat).status == 400);
  // Fields that change nothing are accepted.
  for (const json& body : {with("logit_bias", json::object()), with("stop_token_ids", json::array()),
                           with("min_tokens", 0), with("min_tokens", 2), with("echo", false)}) {
    CHECK(fixture.post("/v1/completions", body).status == 200);
  }
  json thoughtless = kChat;
  thoughtless["chat_template_kwargs"] = {{"enable_thinking", false}};
  CHECK(fixture.post("/v1/chat/completions", thoughtless).status == 200);
}

TEST_CASE("requests that do not say are sampled as the model's file recommends, or as in a chat at the terminal") {
  ApiFixture fixture;
  common::SamplingOptions usual;
  usual.temperature = 0.7F;
  usual.top_k = 40;
  usual.top_p = 0.95F;
  usual.seed = 9;
  json body = greedy_body(24);
  body.erase("temperature");
  body["seed"] = 9;
  CHECK(text_of(reply_to(fixture, body)) == text_alone(kPrompt, 24, usual));
  tests::GgufBuilder builder;
  builder.add("general.architecture", "llama")
      .add("general.sampling.temp", 0.25F)
      .add("general.sampling.top_k", std::int32_t{-1})
      .add("general.sampling.min_p", 0.1F);
  OtherFile other(builder);
  common::SamplingOptions recommended = usual;
  recommended.temperature = 0.25F;
  recommended.top_k = 0;
  recommended.min_p = 0.1F;
  CHECK(text_of(json::parse(other.post("/v1/completions", body).body)) == text_alone(kPrompt, 24, recommended));
  common::SamplingOptions chosen = usual;
  chosen.top_k = 7;
  const common::SamplingOptions merged = common::with_recommendations(chosen, *other.session.file);
  CHECK((merged.temperature == 0.25F && merged.top_k == 7 && merged.min_p == 0.1F && merged.seed == 9));
  for (const float wrong : {-1.0F, std::nanf("")}) {
    const tests::Bytes bytes = tests::GgufBuilder().add("general.sampling.temp", wrong).build();
    CHECK(common::recommended_sampling(common::Gguf::parse(bytes, "x")).temperature == 0.7F);
  }
}

TEST_CASE("a chat template that is not known refuses chats without the file's place, and another one may be chosen") {
  tests::GgufBuilder builder;
  builder.add("general.architecture", "llama").add("tokenizer.chat_template", "{{ messages | tojson }}");
  OtherFile unknown(builder);
  CHECK(common::chat_problem(unknown.model, "").find("not supported") != std::string::npos);
  for (const auto& [path, body] : {std::pair<std::string, json>("/v1/chat/completions", kChat),
                                   std::pair<std::string, json>("/tokenize", {{"messages", kChat["messages"]}})}) {
    const common::ApiReply reply = unknown.post(path, body);
    CHECK(reply.status == 400);
    CHECK(json::parse(reply.body)["error"]["param"] == "messages");
    CHECK(reply.body.find("--chat-template") != std::string::npos);
    CHECK(reply.body.find("secret") == std::string::npos);
  }
  CHECK(unknown.post("/v1/completions", greedy_body(2)).status == 200);
  OtherFile chosen(builder, "none");
  CHECK(chosen.post("/v1/chat/completions", kChat).status == 200);
  // The bundled vocabulary has none of ChatML's special tokens.
  CHECK(common::chat_problem(unknown.model, "chatml").find("<|im_start|>") != std::string::npos);
  CHECK(common::chat_problem(unknown.model, "mistral").find("known: chatml, qwen3") != std::string::npos);
}

TEST_CASE("errors of the engine reach clients without places in the source, and the operator with them") {
  const common::ApiReply reply = common::error_reply(
      500, "no pool: /home/me/common/base/a.cpp:12: a logit (or two) is NaN (f(x) >= 0); b.h:7: more, see a.cpp");
  CHECK(json::parse(reply.body)["error"]["message"] == "no pool: a logit (or two) is NaN; more, see a.cpp");
  CHECK(reply.problem.find("/home/me/common/base/a.cpp:12: ") != std::string::npos);
  CHECK(json::parse(common::error_reply(500, "a.cpp:12: it is NaN (x >= 0)").body)["error"]["message"] == "it is NaN");
  // What a client has sent is quoted as it was.
  ApiFixture fixture;
  json body = greedy_body(1);
  body["model"] = "my a.cpp:12: model (x)";
  CHECK(error_of(fixture.post("/v1/completions", body), 404)["message"] ==
        "the model \"my a.cpp:12: model (x)\" is not here; this is \"tales-5m\"");
  // A long name is neither in the message nor in `param` whole.
  json unknown = greedy_body(1);
  unknown[std::string(10000, 'n')] = 1;
  CHECK(fixture.post("/v1/completions", unknown).body.size() < 600);
}

TEST_CASE("one model by its name, the version, an icon, and the methods of a path") {
  ApiFixture fixture;
  const json listed = json::parse(fixture.get("/v1/models").body)["data"][0];
  CHECK(json::parse(fixture.get("/v1/models/tales-5m").body) == listed);
  CHECK(json::parse(fixture.get("/v1/models/tales%2D5m").body) == listed);
  for (const char* const path : {"/v1/models/gpt-4", "/v1/models/tales-5", "/v1/models/tales-5m/", "/v1/models/%",
                                 "/v1/models/%00", "/v1/models/", "/v1/modelsx"}) {
    INFO(path);
    CHECK(fixture.get(path).status == 404);
  }
  CHECK_FALSE(json::parse(fixture.get("/version").body)["version"].get<std::string>().empty());
  CHECK(fixture.get("/favicon.ico").content_type == "image/svg+xml");
  const auto method = [&](const char* name, const char* path) {
    return fixture.api.handle({.method = name, .path = path}, [] { return false; });
  };
  CHECK(header_of(method("POST", "/v1/models"), "Allow") == "GET, HEAD");
  CHECK(header_of(method("DELETE", "/v1/models/tales-5m"), "Allow") == "GET, HEAD");
  CHECK(header_of(method("GET", "/v1/completions"), "Allow") == "POST");
  CHECK(method("HEAD", "/v1/models").status == 200);
  CHECK(method("HEAD", "/v1/models/tales-5").status == 404);
  CHECK(method("HEAD", "/v1/completions").status == 405);
  CHECK(method("OPTIONS", "/v1/completions").status == 405);  // without --cors
  CHECK(fixture.post("/v1/embeddings", {{"input", "x"}}).body.find("embeddings") != std::string::npos);
  // With a key, only paths that say nothing of the model are open.
  ApiFixture locked({.api_key = "secret"});
  for (const auto& [path, status] : {std::pair("/v1/models/tales-5m", 401), std::pair("/version", 200),
                                     std::pair("/favicon.ico", 200), std::pair("/health", 200)}) {
    CHECK(locked.get(path).status == status);
  }
}

TEST_CASE("pages of the origins that --cors names may use the API, and no others") {
  tests::GgufBuilder builder;
  builder.add("general.architecture", "llama");
  const std::string ours = "https://ours.example";
  OtherFile some(builder, "", {ours, "http://localhost:3000"});
  OtherFile all(builder, "", {"*"});
  const auto ask = [](OtherFile& server, const std::string& method, const std::string& origin) {
    return server.api.handle({.method = method,
                              .path = "/v1/completions",
                              .body = greedy_body(1).dump(),
                              .content_type = "application/json",
                              .origin = origin,
                              .host = "localhost:8080",
                              .requested_headers = "authorization,x-mine"},
                             [] { return false; });
  };
  const std::string allowed = "Access-Control-Allow-Origin";
  CHECK(ask(some, "POST", ours).status == 200);
  CHECK(header_of(ask(some, "POST", ours), allowed) == ours);
  CHECK(header_of(ask(some, "POST", ours), "Vary") == "Origin");
  CHECK(header_of(ask(some, "OPTIONS", ours), allowed) == ours);
  CHECK(header_of(ask(some, "OPTIONS", ours), "Access-Control-Allow-Headers") == "authorization,x-mine");
  CHECK(header_of(ask(some, "OPTIONS", ours), "Access-Control-Allow-Methods") == "POST");
  CHECK(header_of(ask(some, "GET", ours), allowed) == ours);  // an error is for the page too
  for (const char* const other :
       {"https://ours.example.org", "http://ours.example", "null", "https://theirs.example"}) {
    INFO(other);
    CHECK(ask(some, "POST", other).status == 403);
    CHECK(header_of(ask(some, "POST", other), allowed).empty());
    CHECK(header_of(ask(some, "OPTIONS", other), allowed).empty());
    CHECK(ask(all, "POST", other).status == 200);
    CHECK(header_of(ask(all, "POST", other), allowed) == other);
  }
  CHECK(ask(some, "POST", "").status == 200);  // no browser
  for (const char* const origin : {"*", "https://a.example", "http://[::1]:8080", "http://localhost:3000"}) {
    CHECK_NOTHROW(common::check_origin(origin));
  }
  for (const char* const origin : {"", "a.example", "https://", "https://a.example/", "https://A.example", "ftp://a",
                                   "https://a.example\r\nX: y"}) {
    INFO(origin);
    CHECK_THROWS_AS(common::check_origin(origin), common::InputError);
  }
}

TEST_CASE("the terminal has a line for each request, and none of a client's own") {
  common::AnsweredRequest request{.method = "POST",
                                  .path = "/v1/completions",
                                  .status = 200,
                                  .figures = common::ReplyFigures{24, 16, 57, "stop"},
                                  .seconds = 0.8124};
  CHECK(common::log_line(request) == "POST /v1/completions 200, 24 tokens in (16 cached), 57 out, 812 ms: stop");
  request.is_read = false;
  CHECK(common::log_line(request) == "POST /v1/completions 200, 24 tokens in (16 cached), 57 out, 812 ms: client gone");
  CHECK(common::log_line({.method = "GET", .path = "/" + std::string(200, 'x'), .status = 404}).size() < 120);
  CHECK(common::log_line({.status = 400, .problem = "\x1B[2J\nx"}) == "(no request) 400, 0 ms: \"\\x1b[2J\\nx\"");
  CHECK_FALSE(common::is_logged({.method = "GET", .path = "/health", .status = 200}));
  CHECK(common::is_logged({.method = "GET", .path = "/health", .status = 503}));

  ApiFixture fixture;
  std::mutex mutex;
  std::vector<common::AnsweredRequest> answered;
  common::HttpOptions options;
  options.port = 0;
  options.on_answered = [&](const common::AnsweredRequest& done) {
    const std::lock_guard lock(mutex);
    answered.push_back(done);
  };
  {
    common::HttpServer server(fixture.api, options);
    std::size_t num_asked = 0;
    json streamed = greedy_body(4);
    streamed["stream"] = true;
    for (const std::string& text :
         {tests::http_post("/v1/completions", greedy_body(3).dump()),
          tests::http_post("/v1/completions", streamed.dump()),
          tests::http_post("/v1/completions", R"({"prompt": "x", "top_p": 7})"), std::string("nonsense\r\n\r\n")}) {
      HttpConnection connection(server.port());
      connection.send(text);
      read_reply(connection);
      num_asked += 1;
      REQUIRE(ApiFixture::wait_for([&] {  // a reply is noted when it has been sent
        const std::lock_guard lock(mutex);
        return answered.size() == num_asked;
      }));
    }
    HttpConnection leaves(server.port());
    json endless = greedy_body(900);
    endless.update({{"stream", true}, {"ignore_eos", true}});
    leaves.send(tests::http_post("/v1/completions", endless.dump()));
    leaves.read_until("data: ", 3000);
  }
  REQUIRE(answered.size() == 5);
  CHECK(answered[0].figures->output_tokens == 3);
  CHECK(answered[1].figures->output_tokens == 4);
  CHECK(answered[1].figures->cached_tokens > 0);
  CHECK(answered[1].figures->end == "length");
  CHECK(answered[2].status == 400);
  CHECK_FALSE(answered[2].figures.has_value());
  CHECK(answered[2].problem.starts_with("'top_p'"));
  CHECK((answered[3].method.empty() && answered[3].status == 400));
  CHECK_FALSE(answered[4].is_read);
  CHECK((answered[4].figures->end.empty() && answered[4].figures->prompt_tokens > 0));
  CHECK((answered[4].figures->output_tokens > 0 && answered[4].figures->output_tokens < 900));
}

TEST_CASE("more prompts than the queue can ever hold are the client's mistake, and no queue that is full") {
  ApiFixture fixture({.max_queue = 4});
  json body = greedy_body(1);
  body["prompt"] = std::vector<std::string>(5, "x");
  const json error = error_of(fixture.post("/v1/completions", body));
  CHECK(error["message"] == "'prompt' has 5 prompts, and this server's queue has room for 4 (--max-queue)");
  CHECK(error["param"] == "prompt");
  body["prompt"] = std::vector<std::string>(3, "x");  // with their log-probabilities, six requests
  body["prompt_logprobs"] = 0;
  CHECK(error_of(fixture.post("/v1/completions", body))["param"] == "prompt");
  body["prompt"] = std::vector<std::string>(2, "x");
  CHECK(fixture.post("/v1/completions", body).status == 200);
  ApiFixture narrow({.max_queue = 1});
  json chat = kChat;
  CHECK(narrow.post("/v1/chat/completions", chat).status == 200);
  chat["prompt_logprobs"] = 0;
  CHECK(error_of(narrow.post("/v1/chat/completions", chat))["param"] == "prompt_logprobs");
}

TEST_CASE("a context that is too long has OpenAI's code, and the field that is to blame") {
  ApiFixture fixture({.num_slots = 4096});
  const int most = fixture.engine.max_context();
  const auto refused = [&](const json& body, const std::string& path = "/v1/completions") {
    const json error = error_of(fixture.post(path, body));
    CHECK(error["code"] == "context_length_exceeded");
    return std::pair(error["param"].get<std::string>(), error["message"].get<std::string>());
  };
  const std::string limit =
      "This model's maximum context length is " + std::to_string(most) + " tokens. However, you requested ";
  const auto tokens = [&](int more) { return std::vector<int>(static_cast<std::size_t>(most + more), 5); };
  const auto number = [&](int more) { return std::to_string(most + more); };
  json body = {{"prompt", tokens(6)}, {"max_tokens", 1}};
  CHECK(refused(body) == std::pair<std::string, std::string>("prompt", limit + number(6) + " tokens in 'prompt'"));
  body["prompt"] = {tokens(-4), tokens(6)};
  CHECK(refused(body) == std::pair<std::string, std::string>("prompt", limit + number(6) + " tokens in 'prompt[1]'"));
  body["prompt"] = tokens(0);
  CHECK(refused(body).second == limit + number(0) + " tokens in 'prompt', which leaves no room for a reply");
  const auto too_many = [&](const std::string& field) {
    return limit + number(1) + " tokens (" + number(-4) + " in 'prompt', 5 in '" + field + "'): '" + field +
           "' can be at most 4";
  };
  for (const std::string name : {"max_tokens", "max_completion_tokens"}) {
    const json reply = {{"prompt", tokens(-4)}, {name, 5}};
    CHECK(refused(reply) == std::pair(name, too_many(name)));
  }
  CHECK(refused({{"prompt", tokens(-4)}}).second ==
        limit + number(12) + " tokens (" + number(-4) +
            " in 'prompt', 16 in 'max_tokens' by default): 'max_tokens' can be at most 4");
  std::string text;
  for (int i = 0; i < most; ++i) {
    text += " the";
  }
  json chat = kChat;
  chat["messages"][0]["content"] = text;
  chat.erase("max_tokens");
  const auto [param, message] = refused(chat, "/v1/chat/completions");
  CHECK(param == "messages");
  CHECK(message.starts_with(limit));
  CHECK(message.find(" tokens in 'messages'") != std::string::npos);
  // The limit of a small cache.
  ApiFixture small({.num_slots = 64});
  CHECK(error_of(small.post("/v1/completions", greedy_body(400)))["param"] == "max_tokens");
}

TEST_CASE("texts whose length is left open share the cache, but for the whole blocks of their prompt") {
  ApiFixture fixture({.num_slots = 64});  // 16 blocks of 4
  json body = kChat;
  body.erase("max_tokens");
  body.update({{"n", 2}, {"ignore_eos", true}});
  for (const char* const text : {"One day", "Once upon a time", "There was a king", "Said the wolf to the girl"}) {
    body["messages"][0]["content"] = text;
    const json usage = reply_to(fixture, body, "/v1/chat/completions")["usage"];
    const int length = usage["prompt_tokens"];
    CAPTURE(text, length);
    CHECK(usage["completion_tokens"] == 2 * ((length / 4 + (16 - length / 4) / 2) * 4 - length));
  }
}

TEST_CASE("n is as many texts as a step has room for, and the limit is the engine's") {
  ApiFixture fixture;
  const int most = std::min(stage::SchedulerOptions{}.max_sequences, 64);
  const std::string expected = "'n' must be a whole number from 1 to " + std::to_string(most) + " (--max-sequences)";
  json body = greedy_body(1);
  for (const json& value : {json(most + 1), json(0), json(-1), json(1.5), json("2"), json(18446744073709551615ULL)}) {
    body["n"] = value;
    const json error = error_of(fixture.post("/v1/completions", body));
    CHECK(error["message"] == expected);
    CHECK(error["param"] == "n");
  }
  body["n"] = most;
  CHECK(fixture.post("/v1/completions", body).status == 200);
  ApiFixture tight({.token_budget = 3});
  body["n"] = 4;
  CHECK(error_of(tight.post("/v1/completions", body))["message"] ==
        "'n' must be a whole number from 1 to 3 (--budget)");
}

TEST_CASE("a reply has a request's id, its own or the client's, and so has the log") {
  ApiFixture fixture;
  const auto ask = [&](const std::string& path, const json& body, const std::string& id) {
    return fixture.api.handle(
        {.method = "POST", .path = path, .body = body.dump(), .content_type = "application/json", .request_id = id},
        [] { return false; });
  };
  for (const std::string& bad : {std::string(), std::string("a b"), std::string("\x1B[2J"), std::string(129, 'x')}) {
    const common::ApiReply reply = ask("/v1/completions", greedy_body(1), bad);
    CHECK(header_of(reply, "X-Request-Id") == json::parse(reply.body)["id"].get<std::string>());
    CHECK_FALSE(header_of(reply, "X-Request-Ids").empty());
  }
  CHECK(header_of(ask("/v1/chat/completions", kChat, ""), "X-Request-Id").starts_with("chatcmpl-"));
  CHECK(header_of(ask("/v1/completions", greedy_body(1), "my-1.2_Z"), "X-Request-Id") == "my-1.2_Z");
  CHECK(header_of(ask("/v1/completions", json::object(), "mine"), "X-Request-Id") == "mine");
  CHECK(common::log_line({.method = "POST", .path = "/", .status = 200, .id = "cmpl-1"}) == "POST / 200, 0 ms, cmpl-1");
}

TEST_CASE("what ends a server says what still runs, and for how long") {
  common::ServerState state;
  CHECK(common::describe_drain(state, 5) == "draining: no request runs\n");
  state.status.num_running = 1;
  CHECK(common::describe_drain(state, std::nullopt) == "draining: 1 request runs; a second Ctrl-C ends it\n");
  state.status.num_running = 4;
  state.status.num_waiting = 1;
  state.num_posted = 1;
  CHECK(common::describe_drain(state, 30) ==
        "draining: 4 requests run, 2 wait; the server ends at the latest in 30 s; a second Ctrl-C ends them\n");
}

TEST_CASE("tokens and the times between them are counted while their request runs, and each once") {
  ApiFixture fixture({.paused = true});
  json body = greedy_body(8);
  body.update({{"stream", true}, {"ignore_eos", true}});
  const common::ApiReply reply = fixture.post("/v1/completions", body);
  for (int i = 0; i < 3; ++i) {
    fixture.engine.step();
  }
  REQUIRE(ApiFixture::wait_for([&] { return fixture.engine.state().tally.steps.steps == 3; }));
  const common::ServerState state = fixture.engine.state();
  CHECK(state.num_generated >= 2);
  CHECK(state.between_tokens_seconds.count() == state.num_generated - 1);
  fixture.engine.run();
  read_all(*reply.stream);
  CHECK(fixture.engine.state().num_generated == 8);
  CHECK(fixture.engine.state().between_tokens_seconds.count() == 7);
  json beams = greedy_body(4);  // its tokens are known at the end
  beams.update({{"use_beam_search", true}, {"n", 2}, {"ignore_eos", true}});
  const json found = reply_to(fixture, beams);
  CHECK(fixture.engine.state().num_generated == 8 + found["usage"]["completion_tokens"].get<int>());
  json samples = greedy_body(5);
  samples.update({{"n", 3}, {"temperature", 1}, {"ignore_eos", true}});
  reply_to(fixture, samples);
  const std::string text = fixture.get("/metrics").body;
  CHECK(text.find("vllm:inter_token_latency_seconds_count{model_name=\"tales-5m\"} 19\n") != std::string::npos);
}

TEST_CASE("a body that is not JSON is refused with the place, and one with a bad character or number by its own line") {
  ApiFixture fixture;
  const auto message_of = [&](const std::string& body) {
    const common::ApiReply reply = fixture.api.handle(
        {.method = "POST", .path = "/v1/completions", .body = body, .content_type = "application/json"},
        [] { return false; });
    return error_of(reply)["message"].get<std::string>();
  };
  CHECK(message_of(R"({"prompt": "x",})") == "the body is not JSON: at byte 16: unexpected '}'");
  CHECK(message_of("").starts_with("the body is not JSON: at byte 1: "));
  CHECK(message_of(R"({"prompt": x})") == "the body is not JSON: at byte 12: invalid literal");
  CHECK(message_of(R"({"prompt": "\ud83d"})").starts_with("the body has an unpaired surrogate at byte "));
  CHECK(message_of(R"({"seed": 1e999})") == "the body has a number that is out of range: \"1e999\"");
  CHECK(message_of("{\"prompt\": \"" + std::string(100'000, 'x')).size() < 200);
  common::HttpRequestReader reader(10);
  std::string received = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n";
  CHECK_THROWS_WITH(reader.read_head(received), "the body is too large: this server takes 10 bytes");
}

TEST_CASE("fields inside fields are refused by name and place, and /tokenize knows the model's name too") {
  ApiFixture fixture;
  const auto refused = [&](const json& body, const std::string& path = "/v1/chat/completions") {
    const json error = error_of(fixture.post(path, body));
    CHECK(error["message"].get<std::string>().find('\n') == std::string::npos);
    return std::pair(error["param"].get<std::string>(), error["message"].get<std::string>());
  };
  const auto with = [](const std::string& name, const json& value) {
    json body = kChat;
    body[name] = value;
    return body;
  };
  json body = with("stream", true);
  body["stream_options"] = {{"include_usage", true}, {"chunk_size", 5}};
  CHECK(refused(body).second == "'stream_options' has a field that is not known: \"chunk_size\"");
  body["stream_options"] = {{"include_usage", true}};
  CHECK(fixture.post("/v1/chat/completions", body).status == 200);
  body["stream_options"]["continuous_usage_stats"] = 1;
  CHECK(refused(body).first == "stream_options");
  body["stream_options"]["continuous_usage_stats"] = true;
  CHECK(fixture.post("/v1/chat/completions", body).status == 200);
  body["stream_options"]["include_usage"] = false;  // then no event has any, as in vLLM
  CHECK(read_all(*fixture.post("/v1/chat/completions", body).stream).find("usage") == std::string::npos);
  body["stream"] = false;
  CHECK(refused(body) ==
        std::pair<std::string, std::string>("stream_options", "'stream_options' needs \"stream\": true"));
  const json user = kChat["messages"][0];
  json named = user;
  named.update({{"name", "me"}, {"tool_calls", json::array()}, {"refusal", nullptr}});
  CHECK(fixture.post("/v1/chat/completions", with("messages", {user, named})).status == 200);
  named["tool_calls"] = {1};
  CHECK(refused(with("messages", {user, named})) ==
        std::pair<std::string, std::string>("messages[1]",
                                            "'messages[1]' has a field that is not known: \"tool_calls\""));
  CHECK(refused(with("messages", {user, user, user, {{"role", "x"}}})).first == "messages[3].role");
  CHECK(refused(with("messages", {user, {{"role", "user"}}})).first == "messages[1].content");
  CHECK(refused({{"prompt", "x"}, {"stop_token_ids", {"5"}}}, "/v1/completions").second ==
        "'stop_token_ids' must be a list of tokens");
  CHECK(refused({{"tokens", {"5"}}}, "/detokenize").second == "'tokens' must be a list of tokens");
  CHECK(refused(with("a\nb", 1)).second == "\"a\\nb\" is not a field of this request");
  CHECK(refused(with("seed", 1.5)).second ==
        "'seed' must be a whole number from -9223372036854775808 to 18446744073709551615");
  for (const std::string path : {"/tokenize", "/detokenize"}) {
    json tokens = {{"prompt", "x"}, {"tokens", {5}}, {"model", "gpt-4"}};
    CHECK(error_of(fixture.post(path, tokens), 404)["code"] == "model_not_found");
    tokens["model"] = "tales-5m";
    // Unknown fields as everywhere: what would have no effect may be misspelt.
    tokens.erase(path == "/tokenize" ? "tokens" : "prompt");
    CHECK(fixture.post(path, tokens).status == 200);
    tokens["add_special_token"] = false;
    CHECK(refused(tokens, path) == std::pair<std::string, std::string>(
                                       "add_special_token", "'add_special_token' is not a field of this request"));
  }
  CHECK(fixture.post("/tokenize", {{"messages", kChat["messages"]}, {"model", "tales-5m"}}).status == 200);
  CHECK(refused({{"messages", kChat["messages"]}, {"prompt", "x"}}, "/tokenize").first == "prompt");
}

TEST_CASE("the offset of a token inside a character is the character's") {
  ApiFixture fixture;
  json body = greedy_body(1);
  body.update({{"prompt", "a\xF0\x9F\xA6\x8A"}, {"echo", true}, {"logprobs", 0}});
  const json offsets = reply_to(fixture, body)["choices"][0]["logprobs"]["text_offset"];
  const std::size_t count = encode("a\xF0\x9F\xA6\x8A").size();
  REQUIRE(offsets.size() == count + 1);
  const auto num_at = [&](int offset) { return std::count(offsets.begin(), offsets.end(), offset); };
  CHECK(num_at(1) > 1);
  CHECK(num_at(0) + num_at(1) == static_cast<std::ptrdiff_t>(count));
  CHECK(offsets[count] == 2);
}

TEST_CASE("echo: a token without text stands where the next one begins, and a blank put in front is not counted") {
  ApiFixture fixture;
  json body = greedy_body(1);
  body.update({{"echo", true}, {"logprobs", 0}, {"prompt", {0, 65, 0, 66}}});
  const json special = reply_to(fixture, body)["choices"][0];
  CHECK(special["text"].get<std::string>().starts_with("ab"));
  CHECK(special["logprobs"]["tokens"][0] == "<|endoftext|>");
  CHECK(special["logprobs"]["tokens"][2] == "<|endoftext|>");
  CHECK(special["logprobs"]["text_offset"] == json({0, 0, 1, 1, 2}));

  const tests::Bytes pieces = [] {  // SentencePiece's: three special tokens, a blank, two letters, one with a blank
    const std::string blank = "\xE2\x96\x81";
    std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", blank, "a", "b", blank + "a"};
    std::vector<float> scores = {0, 0, 0, -3, -2, -2, -1};
    std::vector<std::int32_t> types = {2, 3, 3, 1, 1, 1, 1};
    for (unsigned byte = 0; byte < 256; ++byte) {
      tokens.push_back(common::format("<0x%02X>", byte));
      scores.push_back(0);
      types.push_back(6);
    }
    tests::GgufBuilder builder;
    builder.add("tokenizer.ggml.model", "llama").add("tokenizer.ggml.bos_token_id", 1);
    builder.add("tokenizer.ggml.eos_token_id", 2).add_array("tokenizer.ggml.tokens", tokens);
    builder.add_array("tokenizer.ggml.scores", scores).add_array("tokenizer.ggml.token_type", types);
    return builder.build();
  }();
  tests::GgufBuilder builder;
  builder.add("general.architecture", "llama");
  OtherFile other(builder, "", {}, common::Gguf::parse(pieces, "pieces.gguf"));
  body.update({{"max_tokens", 0}, {"prompt", "ab a"}});
  const json blank = json::parse(other.post("/v1/completions", body).body)["choices"][0];
  CHECK(blank["text"] == "ab a");
  CHECK(blank["logprobs"]["tokens"] == json({"<s>", " a", "b", " a"}));
  CHECK(blank["logprobs"]["text_offset"] == json({0, 0, 1, 2}));
}

TEST_CASE("max_tokens 0 is refused with what makes it legal") {
  ApiFixture fixture;
  for (const std::string name : {"max_tokens", "max_completion_tokens"}) {
    json body = greedy_body(4);
    body[name] = 0;
    CHECK(error_of(fixture.post("/v1/completions", body))["message"] ==
          "'" + name + "' can be 0 only with 'echo' or 'prompt_logprobs'");
    body[name] = -1;
    CHECK(error_of(fixture.post("/v1/completions", body))["message"] ==
          "'" + name + "' must be a whole number from 1 to 2147483647");
    json chat = kChat;
    chat[name] = 0;
    CHECK(error_of(fixture.post("/v1/chat/completions", chat))["message"] ==
          "'" + name + "' can be 0 only with 'prompt_logprobs'");
  }
}

TEST_CASE("of a name that a body has twice, the last value counts, as in other servers") {
  ApiFixture fixture;
  const auto twice = [&](const std::string& fields) {
    return fixture.api.handle({.method = "POST",
                               .path = "/v1/completions",
                               .body = R"({"prompt": "a", "temperature": 0, )" + fields + "}",
                               .content_type = "application/json"},
                              [] { return false; });
  };
  CHECK(json::parse(twice(R"("max_tokens": 9, "max_tokens": 2)").body)["usage"]["completion_tokens"] == 2);
  CHECK(json::parse(twice(R"("max_tokens": "x", "max_tokens": 2)").body)["usage"]["completion_tokens"] == 2);
  CHECK(error_of(twice(R"("max_tokens": 2, "max_tokens": "x")"))["param"] == "max_tokens");
}

TEST_CASE("a prompt that is scored is counted as the client's prompt, and its scores as no text") {
  ApiFixture fixture;
  json body = greedy_body(0);
  body.update({{"prompt", std::vector<int>(17, 5)}, {"echo", true}, {"logprobs", 1}});
  CHECK(reply_to(fixture, body)["usage"]["prompt_tokens"] == 17);
  common::ServerState state = fixture.engine.state();
  CHECK(state.num_generated == 0);
  CHECK(state.tally.output_tokens == 0);
  CHECK(state.tally.prompt_tokens == 17);
  CHECK(state.tally.num_finished() == 1);
  CHECK(state.tally.first_token_seconds.count() == 0);
  CHECK(state.between_tokens_seconds.count() == 0);
  CHECK(state.tally.request_seconds.count() == 1);
  CHECK(state.status.prefix.prompt_tokens == 0);           // scores are computed anew, whatever is in the cache
  body.update({{"max_tokens", 4}, {"ignore_eos", true}});  // now the scores stand beside the text
  reply_to(fixture, body);
  state = fixture.engine.state();
  CHECK(state.num_generated == 4);
  CHECK(state.tally.output_tokens == 4);
  CHECK(state.tally.prompt_tokens == 34);
  CHECK(state.tally.num_finished() == 2);
  CHECK(state.between_tokens_seconds.count() == 3);
  CHECK(state.tally.request_seconds.count() == 2);
  CHECK(state.status.prefix.prompt_tokens == 17);
}

TEST_CASE("/metrics: a request's time begins with its arrival, and a model's name may have any character") {
  common::RequestResult result;
  result.finish_reason = common::FinishReason::kLength;
  result.arrival = 1.0;
  result.admission = 4.0;
  result.end = 9.0;
  common::ServerState state;
  state.tally.add(result);
  const std::string text = common::metrics_text(state, "C:\\tales\"5m\"\n");
  const std::string label = R"({model_name="C:\\tales\"5m\"\n"} )";
  CHECK(text.find("vllm:e2e_request_latency_seconds_sum" + label + "8\n") != std::string::npos);
  CHECK(text.find("vllm:request_queue_time_seconds_sum" + label + "3\n") != std::string::npos);
}

TEST_CASE("a beam search has all its texts, each with its end, whole or streamed") {
  ApiFixture fixture;
  json body = greedy_body(12);
  body.update({{"use_beam_search", true}, {"n", 3}, {"ignore_eos", true}});
  const json plain = reply_to(fixture, body);
  CHECK(fixture.engine.state().num_generated == plain["usage"]["completion_tokens"]);
  const std::string best = text_of(plain);
  const std::vector<Token> tokens = tests::default_session().tokenizer.encode(best);
  json by_token = body;
  // The likeliest text ends at once, and no other text can have a better sum.
  by_token.update({{"stop_token_ids", {tokens.front()}}, {"length_penalty", 0}});
  json by_text = body;
  by_text["stop"] = {best.substr(4, 3), "e"};
  for (json request : {body, by_token, by_text}) {
    INFO(request.dump());
    const json whole = reply_to(fixture, request);
    REQUIRE(whole["choices"].size() == 3);
    request["logprobs"] = nullptr;
    request["stream"] = true;
    request["stream_options"] = {{"include_usage", true}};
    const std::string streamed = read_all(*fixture.post("/v1/completions", request).stream);
    std::map<int, json> ends;
    for (const json& event : events_of(streamed)) {
      if (event.is_object() && !event["choices"].empty() && !event["choices"][0]["finish_reason"].is_null()) {
        ends[event["choices"][0]["index"].get<int>()] = event["choices"][0];
      }
      if (event.is_object() && event["usage"].is_object()) {
        CHECK(event["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]);
      }
    }
    REQUIRE(ends.size() == 3);
    for (int i = 0; i < 3; ++i) {
      const json& choice = whole["choices"].at(static_cast<std::size_t>(i));
      CAPTURE(choice.dump());
      CHECK(choice["text"] == streamed_text(streamed, i));
      CHECK(ends[i]["finish_reason"] == choice["finish_reason"]);
      CHECK(ends[i]["stop_reason"] == choice["stop_reason"]);
      CHECK((choice["finish_reason"] == "stop") == !choice["stop_reason"].is_null());
      if (request.contains("stop") && choice["finish_reason"] == "stop") {
        const auto stop = choice["stop_reason"].get<std::string>();
        CHECK(choice["text"].get<std::string>().find(stop) == std::string::npos);
      }
    }
    CHECK(whole["usage"]["completion_tokens"].get<int>() <= 36);
    if (request.contains("stop") || request.contains("stop_token_ids")) {
      CHECK(whole["choices"][0]["finish_reason"] == "stop");
      CHECK(whole["usage"]["completion_tokens"] < plain["usage"]["completion_tokens"]);
    }
  }
  CHECK(ApiFixture::wait_for([&] { return fixture.is_pool_empty(); }));
}

TEST_CASE("usage and ends of several samples are those of their texts, whole or streamed") {
  ApiFixture fixture;
  json body = greedy_body(24);
  body.update({{"temperature", 1}, {"n", 4}, {"seed", 3}, {"stop", {"a", "the"}}, {"ignore_eos", true}});
  body["logprobs"] = 0;
  const json whole = reply_to(fixture, body);
  std::size_t num_tokens = 0;
  for (const json& choice : whole["choices"]) {
    num_tokens += choice["logprobs"]["tokens"].size();
    std::string spelled;
    for (const json& token : choice["logprobs"]["tokens"]) {
      spelled += token.get<std::string>();
    }
    const bool is_stopped = spelled.find('a') != std::string::npos || spelled.find("the") != std::string::npos;
    CHECK(choice["finish_reason"] == (is_stopped ? "stop" : "length"));
    CHECK(choice["stop_reason"].is_null() == !is_stopped);
  }
  CHECK(whole["usage"]["completion_tokens"] == num_tokens);
  body.update({{"stream", true}, {"stream_options", {{"include_usage", true}}}});
  const std::string streamed = read_all(*fixture.post("/v1/completions", body).stream);
  CHECK(events_of(streamed).at(events_of(streamed).size() - 2)["usage"]["completion_tokens"] == num_tokens);
  for (int i = 0; i < 4; ++i) {
    CHECK(whole["choices"][static_cast<std::size_t>(i)]["text"] == streamed_text(streamed, i));
  }
}

TEST_CASE("no two tokens of a list of log-probabilities have one name, whatever their bytes are") {
  // The tokens that the bundled model finds likeliest after token 5, the likeliest first.
  ApiFixture plain;
  const json scored = reply_to(plain, {{"prompt", {5, 5}}, {"prompt_logprobs", 20}, {"echo", true}, {"max_tokens", 0}});
  std::vector<std::pair<int, std::size_t>> ranked;
  for (const auto& [token, entry] : scored["choices"][0]["prompt_logprobs"][1].items()) {
    ranked.emplace_back(entry["rank"].get<int>(), static_cast<std::size_t>(std::stoi(token)));
  }
  std::sort(ranked.begin(), ranked.end());
  // A vocabulary in which they are parts of characters, a letter and the letter as a byte.
  const auto vocabulary = static_cast<std::size_t>(tests::default_session().model.config().vocab_size);
  std::vector<std::string> tokens(vocabulary);
  tokens[0] = "<unk>";
  tokens[1] = "<s>";
  tokens[2] = "</s>";
  std::vector<std::string> likely = {"<0xF0>", "<0x9F>", "A", "<0x41>", "<0xE2>"};
  std::vector<std::size_t> ids;  // of the likely tokens
  for (const auto& [rank, token] : ranked) {
    if (tokens[token].empty() && ids.size() < likely.size()) {
      tokens[token] = likely[ids.size()];
      ids.push_back(token);
    }
  }
  REQUIRE(ids.size() == likely.size());
  std::vector<std::int32_t> types(vocabulary, 1);
  types[0] = 2;
  types[1] = types[2] = 3;
  int next_byte = 0;
  for (std::size_t token = 0; token < vocabulary; ++token) {
    for (; tokens[token].empty() && next_byte < 256; ++next_byte) {
      const std::string byte = common::format("<0x%02X>", next_byte);
      if (std::find(likely.begin(), likely.end(), byte) == likely.end()) {
        tokens[token] = byte;
      }
    }
    tokens[token] = tokens[token].empty() ? common::format("t%zu", token) : tokens[token];
    types[token] = tokens[token].starts_with("<0x") ? 6 : types[token];
  }
  REQUIRE(next_byte == 256);
  tests::GgufBuilder pieces;
  pieces.add("tokenizer.ggml.model", "llama").add("tokenizer.ggml.bos_token_id", 1);
  pieces.add("tokenizer.ggml.eos_token_id", 2).add_array("tokenizer.ggml.tokens", tokens);
  pieces.add_array("tokenizer.ggml.scores", std::vector<float>(vocabulary, 0.0F));
  pieces.add_array("tokenizer.ggml.token_type", types);
  const tests::Bytes file = pieces.build();
  tests::GgufBuilder builder;
  builder.add("general.architecture", "llama");
  OtherFile other(builder, "", {}, common::Gguf::parse(file, "pieces.gguf"));
  const json body = {{"prompt", {5}},         {"max_tokens", 1}, {"temperature", 0},  {"logprobs", 20},
                     {"prompt_logprobs", 20}, {"echo", true},    {"ignore_eos", true}};
  const common::ApiReply reply = other.post("/v1/completions", body);
  INFO(reply.body);
  REQUIRE(reply.status == 200);
  const json logprobs = json::parse(reply.body)["choices"][0]["logprobs"];
  const json& best = logprobs["top_logprobs"].at(1);
  CHECK(best.size() == 20);
  CHECK(logprobs["tokens"][1].get<std::string>().size() > 0);
  CHECK(best.at(logprobs["tokens"][1].get<std::string>()) == logprobs["token_logprobs"][1]);
  const auto logprob_of = [&](std::size_t i) {
    return scored["choices"][0]["prompt_logprobs"][1].at(std::to_string(ids[i]))["logprob"].get<double>();
  };
  const std::vector<std::string> names = {"bytes:\\xf0", "bytes:\\x9f", "A", common::format("token_id:%zu", ids[3]),
                                          "bytes:\\xe2"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    CAPTURE(names[i]);
    CHECK(std::abs(best.at(names[i]).get<double>() - logprob_of(i)) < 1e-4);
  }
  // A prompt's own tokens too.
  json echoed = body;
  echoed.update({{"prompt", {5, ids[3]}}, {"max_tokens", 0}});
  const json whole = json::parse(other.post("/v1/completions", echoed).body)["choices"][0]["logprobs"];
  CHECK(whole["tokens"][1] == "A");
  CHECK(whole["top_logprobs"][1].at("A") == whole["token_logprobs"][1]);
  CHECK(std::abs(whole["token_logprobs"][1].get<double>() - logprob_of(3)) < 1e-4);
  CHECK(std::abs(whole["top_logprobs"][1].at(common::format("token_id:%zu", ids[2])).get<double>() - logprob_of(2)) <
        1e-4);
  // And the log-probabilities of a chat, which has the bytes themselves beside the names.
  json chat = kChat;
  chat.update({{"logprobs", true}, {"top_logprobs", 20}, {"max_tokens", 8}, {"ignore_eos", true}});
  const json answered = json::parse(other.post("/v1/chat/completions", chat).body);
  for (const json& token : answered["choices"][0]["logprobs"]["content"]) {
    std::set<std::string> seen;
    for (const json& entry : token["top_logprobs"]) {
      CHECK(seen.insert(entry["token"].get<std::string>()).second);
      CHECK((entry["token"].get<std::string>().starts_with("bytes:") ==
             (entry["bytes"].size() == 1 && entry["bytes"][0] >= 128)));
      CHECK((entry["token"] != token["token"] || entry["logprob"] == token["logprob"]));
    }
  }
}

TEST_CASE("control tokens that a prompt spells are tokens, unless parse_special is false; one of 'stop' ends a text") {
  ApiFixture fixture;
  const Token end = tests::default_session().tokenizer.eos().value();
  const std::string text = "a<|endoftext|>b";
  const auto tokens_of = [&](const json& body) { return reply_to(fixture, body, "/tokenize")["tokens"]; };
  CHECK(tokens_of({{"prompt", text}}) == json(tests::default_session().tokenizer.encode_prompt(text, true)));
  CHECK(tokens_of({{"prompt", text}, {"add_special_tokens", false}})[1] == end);
  CHECK(tokens_of({{"prompt", text}, {"parse_special", false}}) == json(encode(text)));
  json body = greedy_body(0);
  body.update({{"prompt", text}, {"echo", true}, {"logprobs", 0}});
  const json parsed = reply_to(fixture, body);
  CHECK(parsed["usage"]["prompt_tokens"] == 4);
  CHECK(text_of(parsed) == text);
  CHECK(parsed["choices"][0]["logprobs"]["text_offset"] == json({0, 0, 1, 14}));
  body["add_special_tokens"] = false;
  CHECK(reply_to(fixture, body)["choices"][0]["logprobs"]["text_offset"] == json({0, 1, 14}));
  body["prompt"] = "<|endoftext|>" + text;
  CHECK(reply_to(fixture, body)["choices"][0]["logprobs"]["text_offset"] == json({0, 13, 14, 27}));
  body.update({{"prompt", text}, {"parse_special", false}});
  CHECK(reply_to(fixture, body)["usage"]["prompt_tokens"] == encode(text).size() - 1);
  // A message's text spells no control tokens: it would write other messages.
  CHECK(tokens_of({{"messages", json::array({{{"role", "user"}, {"content", text}}})}}) == json(encode(text)));

  json stopped = greedy_body(6);
  stopped.update({{"stop", {"never", "<|endoftext|>"}}, {"ignore_eos", true}});
  stopped["logit_bias"] = {{std::to_string(end), 100}};
  const json choice = reply_to(fixture, stopped)["choices"][0];
  CHECK(choice["text"] == "");
  CHECK(choice["finish_reason"] == "stop");
  CHECK(choice["stop_reason"] == "<|endoftext|>");
  stopped["ignore_eos"] = false;  // then it is the model's own end
  CHECK(reply_to(fixture, stopped)["choices"][0]["stop_reason"].is_null());
}

TEST_CASE("what clients send although it says nothing is taken, and what would have an effect is refused") {
  ApiFixture fixture;
  const auto with = [](json body, const std::string& name, const json& value) {
    body[name] = value;
    return body;
  };
  for (const auto& [name, value] :
       {std::pair<std::string, json>("suffix", ""), {"tools", json::array()}, {"priority", 0}, {"user", "x"}}) {
    INFO(name);
    CHECK(fixture.post("/v1/completions", with(greedy_body(1), name, value)).status == 200);
  }
  CHECK(error_of(fixture.post("/v1/completions", with(greedy_body(1), "suffix", "x")))["param"] == "suffix");
  const json priority = error_of(fixture.post("/v1/completions", with(greedy_body(1), "priority", 1)));
  CHECK(priority["param"] == "priority");
  CHECK(priority["message"] == "'priority' is not supported: requests are served in the order in which they come");

  const std::string path = "/v1/chat/completions";
  const json user = kChat["messages"][0];
  const json silent = {{"role", "assistant"}, {"content", nullptr}, {"refusal", ""}, {"tool_calls", json::array()}};
  CHECK(fixture.post(path, with(kChat, "messages", {user, silent, user})).status == 200);
  CHECK(error_of(fixture.post(path, with(kChat, "messages", {user, with(silent, "role", "user")})))["param"] ==
        "messages[1].content");
  CHECK(error_of(fixture.post(path, with(kChat, "messages", json::array())))["message"] ==
        "'messages' must have at least one message");
  CHECK(error_of(fixture.post(path, with(kChat, "messages", "x")))["message"] ==
        "'messages' must be a list of messages");
  CHECK(fixture.post(path, with(kChat, "modalities", {"text"})).status == 200);
  CHECK(error_of(fixture.post(path, with(kChat, "modalities", {"text", "audio"})))["param"] == "modalities");
  for (const char* const effort : {"none", "minimal", "low", "medium", "high"}) {
    CHECK(fixture.post(path, with(kChat, "reasoning_effort", effort)).status == 200);
  }
  CHECK(error_of(fixture.post(path, with(kChat, "reasoning_effort", "most")))["param"] == "reasoning_effort");
  CHECK(error_of(fixture.post("/v1/completions", with(greedy_body(1), "reasoning_effort", "low")))["param"] ==
        "reasoning_effort");
}

TEST_CASE("an error quotes no more of what a client has sent than a line holds") {
  ApiFixture fixture;
  const std::string endless(100'000, 'x');
  const auto with = [&](const std::string& name, const json& value) {
    json body = kChat;
    body[name] = value;
    return body;
  };
  json message = kChat["messages"][0];
  message[endless] = 1;
  for (const json& body :
       {with(endless, 1), with("model", endless), with("messages", {message}), with("logit_bias", {{endless, 1}}),
        with("stream_options", {{endless, 1}}), with("chat_template_kwargs", {{endless, true}}),
        with("response_format", {{"type", endless}}), with("stop", endless)}) {
    const common::ApiReply reply = fixture.post("/v1/chat/completions", body);
    CHECK(reply.status >= 400);
    CHECK(reply.body.size() < 600);
    CHECK(reply.problem.size() < 300);
  }
  CHECK(fixture.get("/" + endless).body.size() < 600);
  CHECK(fixture.get("/v1/models/" + endless).body.size() < 600);
}

TEST_CASE("an echo that ends inside a character goes on with the reply, streamed or not") {
  ApiFixture fixture;
  const std::string text = "a\xF0\x9F\xA6\x8A";
  std::vector<Token> prompt = encode(text);
  json body = greedy_body(1);
  body.update({{"echo", true}, {"logit_bias", {{std::to_string(prompt.back()), 100}}}});
  prompt.pop_back();
  body["prompt"] = prompt;
  CHECK(text_of(reply_to(fixture, body)) == text);
  body["stream"] = true;
  const std::string streamed = read_all(*fixture.post("/v1/completions", body).stream);
  CHECK(streamed_text(streamed) == text);
  // A character that nothing completes is shown as in a whole reply.
  body["logit_bias"] = {{std::to_string(encode("b").back()), 100}};
  const std::string broken = streamed_text(read_all(*fixture.post("/v1/completions", body).stream));
  body["stream"] = false;
  CHECK(broken == text_of(reply_to(fixture, body)));
  body.update({{"max_tokens", 0}, {"stream", true}});
  const std::string ended = streamed_text(read_all(*fixture.post("/v1/completions", body).stream));
  body["stream"] = false;
  CHECK(ended == text_of(reply_to(fixture, body)));
}
