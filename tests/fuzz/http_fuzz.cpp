// Sends garbage, half requests and requests with something wrong in their head, framing or JSON over sockets. The
// server answers or closes, and afterwards it serves as before, with an empty pool. Every case is a function of its
// seed, which a failure prints:
//
//   build/tests/http_fuzz_stage8 --requests 100000 --seed 1
//   build-asan-ubsan/tests/http_fuzz_stage8 --seconds 20      as in .ci/run
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/stages/http_fixtures.h"
#include "tests/support/http_client.h"
#include "tests/support/sanitizers.h"

namespace {

using common::Random;
using tests::ApiFixture;
using tests::FuzzCounts;
using tests::FuzzFailure;
using tests::HttpConnection;

constexpr int kDefaultRequests = tests::kSanitized ? 600 : 3000;
constexpr int kRequestsPerSeed = 50;

std::string pick(Random& random, const std::vector<std::string>& texts) { return texts[random.below(texts.size())]; }

// The first text seven times of eight.
std::string usually(Random& random, const std::vector<std::string>& texts) {
  return random.below(8) == 0 ? pick(random, texts) : texts.front();
}

// Values for a field, most of them wrong.
std::string random_value(Random& random) {
  return pick(random, {"0",
                       "1",
                       "2",
                       "-1",
                       "1e999",
                       "18446744073709551615",
                       "-9223372036854775808",
                       "0.5",
                       "true",
                       "null",
                       "\"\"",
                       "\"x\"",
                       "\"\\ud800\"",
                       "[]",
                       "[[]]",
                       "[1,2,3]",
                       "[1,\"x\"]",
                       "[-1]",
                       "{}",
                       "{\"type\":\"text\"}",
                       "\"\xFF\"",
                       "[[[[[[[[[[]]]]]]]]]]",
                       "4294967296",
                       "nan",
                       "{\"a\":"});
}

// Tokens and their biases: few or many, twice the same, of this vocabulary or of none.
std::string random_biases(Random& random) {
  std::string result = "{";
  const std::uint64_t count = random.below(8) == 0 ? random.below(3000) : random.below(6);
  for (std::uint64_t i = 0; i < count; ++i) {
    result += (i == 0 ? "\"" : ", \"") + std::to_string(random.below(2) == 0 ? i : random.below(10)) + "\": ";
    result += random.below(40) == 0 ? random_value(random) : pick(random, {"1", "-100", "0.5", "100", "-0", "1e-308"});
  }
  return result + (random.below(60) == 0 ? ", \"-1\": 5}" : random.below(60) == 0 ? ", \"05\": 5}" : "}");
}

// A field of this server with a value of its own kind, most of them right.
std::string likely_field(Random& random) {
  switch (random.below(8)) {
    case 0:
      return R"("logit_bias": )" + random_biases(random);
    case 1:
      return R"("presence_penalty": )" + pick(random, {"2", "-2", "0.1", "1e308", "-1e308", "1e-320", "2.0001"});
    case 2:
      return R"("frequency_penalty": )" + pick(random, {"2", "-2", "0.1", "1e308", "null", "-0.0"});
    case 3:
      return R"("stop_token_ids": )" + pick(random, {"[1,2,3,3,3]", "[]", "[0]", "[-1]", "[99999999999999999999]"});
    case 4:
      return R"("min_tokens": )" + pick(random, {"3", "0", "2", "2147483647", "-2147483649"});
    case 5:
      return R"("echo": true, "logprobs": )" + pick(random, {"1", "0", "null", "20"});
    case 6:
      return R"("prompt_logprobs": )" + pick(random, {"0", "1", "20", "21"});
    default:
      return R"("chat_template_kwargs": {"enable_thinking": )" +
             pick(random, {"false}", "true}", "0}", "false, \"x\": 1}"});
  }
}

std::string repeated(const std::string& text, std::uint64_t times) {
  std::string result;
  for (std::uint64_t i = 0; i < times; ++i) {
    result += text;
  }
  return result;
}

// Lists and objects within each other: some more than a server may take, and more than a thread's stack would hold.
std::string deep_value(Random& random) {
  const std::uint64_t depth = random.below(16) == 0 ? 200'000 : random.below(100);
  const bool is_list = random.below(2) == 0;
  return repeated(is_list ? "[" : "{\"a\":", depth) + pick(random, {"1", "", "\"x"}) +
         repeated(is_list ? "]" : "}", depth - random.below(2) * std::min<std::uint64_t>(depth, 1));
}

std::string random_body(Random& random, FuzzCounts& counts) {
  const std::uint64_t kind = random.below(40);
  counts.add("deep", kind < 4 ? 1 : 0);
  if (kind < 2) {
    return deep_value(random);
  }
  if (kind == 4) {  // around the limit of a body, and of what is large
    const std::size_t size = pick(random, {"x", "xx"}).size() == 1 ? 1 << 20 : 1 << 17;
    return R"({"prompt": ")" + std::string(size - 100 + random.below(200), 'x') + R"("})";
  }
  std::string body = R"({"prompt": "A wolf", "max_tokens": 3)";
  if (kind == 5) {
    body = R"({"messages": [{"role": "user", "content": )" + random_value(random) + "}]";
  }
  while (random.below(3) == 0) {
    body += ", " + likely_field(random);
    counts.add("own fields");
  }
  const std::uint64_t num_fields = random.below(4);
  for (std::uint64_t i = 0; i < num_fields; ++i) {  // also one that is there already
    body += ", \"" +
            pick(random, {"prompt",
                          "messages",
                          "max_tokens",
                          "temperature",
                          "top_p",
                          "top_k",
                          "min_p",
                          "n",
                          "seed",
                          "stream",
                          "stream_options",
                          "stop",
                          "logprobs",
                          "model",
                          "cache_salt",
                          "tools",
                          "use_beam_search",
                          "repetition_penalty",
                          "tokens",
                          "line",
                          "blocks",
                          "ignore_eos",
                          "response_format",
                          "prompt\xFF",
                          "logit_bias",
                          "presence_penalty",
                          "frequency_penalty",
                          "stop_token_ids",
                          "min_tokens",
                          "echo",
                          "prompt_logprobs",
                          "chat_template_kwargs"}) +
            "\": " + (kind == 2 || kind == 3 ? deep_value(random) : random_value(random));
  }
  return body + "}";
}

std::string hexadecimal(std::size_t number) { return common::format("%zx", number); }

// The body in pieces, most of them framed as they should be.
std::string in_chunks(Random& random, const std::string& body) {
  std::string text;
  for (std::size_t at = 0; at < body.size();) {
    const std::size_t size =
        std::min<std::size_t>(1 + random.below(random.below(4) == 0 ? 1 << 16 : 16), body.size() - at);
    text += random.below(200) == 0 ? random_value(random) : hexadecimal(size);
    text += random.below(8) == 0 ? "; extension=x\r\n" : "\r\n";
    text += body.substr(at, size) + (random.below(200) == 0 ? "\n" : "\r\n");
    at += size;
  }
  return text + pick(random, {"0\r\n\r\n", "0\r\n\r\n", "0\r\n\r\n", "0\r\nTrailer: x\r\n\r\n", "0\r\n", "00\r\n\r\n"});
}

std::string random_bytes(Random& random) {
  std::string text(random.below(400), '\0');
  for (char& byte : text) {
    byte = static_cast<char>(random.below(256));
  }
  return text;
}

std::string random_request(Random& random, FuzzCounts& counts) {
  const std::string body = random_body(random, counts);
  const std::string path =
      pick(random, {"/v1/completions", "/v1/completions", "/v1/completions", "/v1/chat/completions", "/tokenize",
                    "/detokenize", "/", "/metrics", "/v1/models/x", "/v1/models/%", "/version", "/favicon.ico",
                    "/pool/demo", "/pool/step", "/%00", "/../etc", "*", "x"});
  std::string request = usually(random, {"POST", "GET", "HEAD", "PUT", "OPTIONS", "\x01"}) + " " + path + " " +
                        usually(random, {"HTTP/1.1", "HTTP/1.0", "HTTP/9", ""}) + "\r\n";
  request +=
      usually(random, {"Host: localhost\r\n", "Host: 127.0.0.1:1\r\n", "host:\r\n", "Host: example.org\r\n", ""});
  request +=
      usually(random, {"Content-Type: application/json\r\n", "Content-Type: multipart/form-data; boundary=x\r\n",
                       "Content-Type: text/plain\r\n", "Content-Type: application/json\r\nContent-Encoding: gzip\r\n",
                       "no colon\r\n", "Range: bytes=5-1,0-,0-\r\nContent-Type: application/json\r\n",
                       "Expect: 100-continue\r\nContent-Type: application/json\r\n"});
  request += usually(random, {"", "Origin: https://ours.example\r\n", "Origin: null\r\n",
                              "Origin: https://ours.example\r\nAccess-Control-Request-Headers: x, y\r\n"});
  if (random.below(8) == 0) {
    request += pick(random,
                    {"X: " + std::string(random.below(1 << 15), 'x') + "\r\n", repeated("X: y\r\n", random.below(3000)),
                     std::string(" folded\r\n"), "X: " + random_bytes(random) + "\r\n",
                     std::string("Connection: keep-alive, close\r\n"), std::string("Transfer-Encoding: gzip\r\n"),
                     std::string("Content-Length: 3\r\n"), std::string("Authorization: Bearer\r\n")});
  }
  request += pick(random, {"Connection: close\r\n", "Connection: close\r\n", ""});
  if (random.below(3) == 0) {
    counts.add("in chunks");
    return request + "Transfer-Encoding: chunked\r\n\r\n" + in_chunks(random, body);
  }
  const std::string length = random.below(6) == 0 ? random_value(random) : std::to_string(body.size());
  return request + "Content-Length: " + length + "\r\n\r\n" + body;
}

// Changes, drops and doubles bytes.
void damage(Random& random, std::string& text) {
  const std::uint64_t num_changes = random.below(6);
  for (std::uint64_t i = 0; i < num_changes && !text.empty(); ++i) {
    const std::size_t at = random.below(text.size());
    switch (random.below(3)) {
      case 0:
        text[at] = static_cast<char>(random.below(256));
        break;
      case 1:
        text.erase(at, random.below(20));
        break;
      default:
        text.insert(at, text.substr(at, random.below(20)));
    }
  }
}

struct Fixture : ApiFixture {
  Fixture() : ApiFixture({.num_slots = 512, .cors_origins = {"https://ours.example"}}) {
    common::HttpOptions options;
    options.port = 0;
    options.timeout = std::chrono::milliseconds(20);  // most requests are never complete
    server = std::make_unique<common::HttpServer>(api, options);
  }
  std::unique_ptr<common::HttpServer> server;
};

void run_case(Fixture& fixture, std::uint64_t seed, FuzzCounts& counts) {
  Random random(seed);
  for (int i = 0; i < kRequestsPerSeed; ++i) {
    std::string text = random.below(12) == 0 ? random_bytes(random) : random_request(random, counts);
    if (random.below(3) == 0) {
      damage(random, text);
    }
    const bool is_followed = random.below(6) == 0;
    if (is_followed) {
      text += random_request(random, counts);
    }
    counts.add("followed", is_followed ? 1 : 0);
    const bool is_cut = random.below(4) == 0;
    if (is_cut) {
      text.resize(random.below(text.size() + 1));
    }
    HttpConnection connection(fixture.server->port());
    const std::size_t cut = random.below(2) == 0 ? random.below(text.size() + 1) : text.size();
    connection.send(std::string_view(text).substr(0, cut));
    connection.send(std::string_view(text).substr(cut));
    if (random.below(4) == 0) {
      connection.close_half();
    }
    counts.add("cut off", is_cut ? 1 : 0);
    if (is_cut || random.below(4) == 0) {
      continue;  // the client leaves without reading the reply
    }
    const std::string reply = connection.read_until("\r\n\r\n", 3000);
    if (!reply.empty() && !reply.starts_with("HTTP/1.")) {
      throw FuzzFailure("the reply is no HTTP: " + common::quote(reply) + " to " + common::quote(text, 1000));
    }
    const int status = reply.size() < 12 ? 0 : std::atoi(reply.substr(9, 3).c_str());
    counts.add("served", status == 200 ? 1 : 0);
    counts.add("refused", status >= 400 && status < 500 ? 1 : 0);
    if (status == 500) {
      throw FuzzFailure("an internal error: " + common::quote(reply + connection.read_some(), 1000) + " after " +
                        common::quote(text, 1000));
    }
  }
  fixture.engine.run();
  if (!ApiFixture::wait_for([&] { return fixture.engine.drained() && fixture.is_pool_empty(); })) {
    throw FuzzFailure("requests or blocks are left over");
  }
  static const std::string expected = tests::text_alone("A wolf", 5, {});
  tests::HttpReply reply;
  constexpr int kMaxTries = 20;  // the time-out is short: on a busy machine the client may be too slow for it
  for (int i = 0; i < kMaxTries && reply.status == 0; ++i) {
    fixture.engine.run();  // a late /pool/step pauses it
    HttpConnection connection(fixture.server->port());
    connection.send(tests::http_post("/v1/completions", R"({"prompt": "A wolf", "max_tokens": 5, "temperature": 0})"));
    reply = tests::read_reply(connection);
  }
  if (reply.status != 200 || nlohmann::json::parse(reply.body)["choices"][0]["text"] != expected) {
    throw FuzzFailure("a good request is not served as before: " + reply.body);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Fixture fixture;
  return tests::run_fuzz({argv + 1, argv + argc},
                         {.unit = "requests", .default_units = kDefaultRequests, .units_per_seed = kRequestsPerSeed},
                         FuzzCounts({"served", "refused", "cut off", "in chunks", "deep", "followed", "own fields"}),
                         [&](std::uint64_t seed, FuzzCounts& counts) { run_case(fixture, seed, counts); });
}
