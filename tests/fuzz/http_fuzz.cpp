// Sends garbage, half requests and requests with something wrong over sockets. The server answers or closes, and
// afterwards it serves as before, with an empty pool. Every case is a function of its seed, which a failure prints:
//
//   build/tests/http_fuzz_stage8 --requests 100000 --seed 1
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
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

std::string random_body(Random& random) {
  if (random.below(8) == 0) {
    const std::size_t depth = random.below(2000);
    return pick(random, {"[", "{\"a\":", "[{\"a\":["}).append(depth, '[');
  }
  std::string body = R"({"prompt": "A wolf", "max_tokens": 3)";
  const std::uint64_t num_fields = random.below(3);
  for (std::uint64_t i = 0; i < num_fields; ++i) {
    body += ", \"" +
            pick(random, {"prompt",   "messages", "max_tokens", "temperature", "top_p",           "top_k",
                          "min_p",    "n",        "seed",       "stream",      "stream_options",  "stop",
                          "logprobs", "model",    "cache_salt", "tools",       "use_beam_search", "repetition_penalty",
                          "tokens",   "line",     "blocks",     "ignore_eos"}) +
            "\": " + random_value(random);
  }
  return body + "}";
}

std::string random_request(Random& random) {
  const std::string body = random_body(random);
  const std::string path =
      pick(random, {"/v1/completions", "/v1/completions", "/v1/completions", "/v1/chat/completions", "/tokenize",
                    "/detokenize", "/", "/metrics", "/pool/demo", "/pool/step", "/%00", "/../etc", "*", "x"});
  const std::string length = random.below(6) == 0 ? random_value(random) : std::to_string(body.size());
  std::string request = pick(random, {"POST", "POST", "POST", "POST", "GET", "HEAD", "PUT", "\x01"}) + " " + path +
                        " " + pick(random, {"HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9", ""}) + "\r\n";
  request += pick(random, {"Content-Type: application/json\r\n", "Content-Type: application/json\r\n",
                           "Content-Type: application/json\r\n", "Content-Type: application/json\r\n",
                           "Content-Type: multipart/form-data; boundary=x\r\n", "Content-Type: text/plain\r\n",
                           "Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n", "no colon\r\n",
                           "Range: bytes=5-1\r\nContent-Type: application/json\r\n",
                           "Expect: 100-continue\r\nContent-Type: application/json\r\n"});
  return request + "Content-Length: " + length + "\r\nConnection: close\r\n\r\n" + body;
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
  Fixture() : ApiFixture({.num_slots = 512}) {
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
    std::string text = random_request(random);
    if (random.below(3) == 0) {
      damage(random, text);
    }
    const bool is_cut = random.below(4) == 0;
    if (is_cut) {
      text.resize(random.below(text.size() + 1));
    }
    HttpConnection connection(fixture.server->port());
    connection.send(text);
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
                         FuzzCounts({"served", "refused", "cut off"}),
                         [&](std::uint64_t seed, FuzzCounts& counts) { run_case(fixture, seed, counts); });
}
