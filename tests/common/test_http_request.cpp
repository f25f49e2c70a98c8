// The bytes of a request: where it ends, what it asks for, and what is refused.
#include <string>

#include "common/serving/http_request.h"
#include "tests/support/catch.h"

namespace {

using common::HttpError;
using common::HttpRequestReader;

constexpr std::size_t kMaxBody = 1000;

// The head of a GET with these lines, or the status with which it is refused.
struct Outcome {
  int refused = 0;
  common::HttpHead head;
  std::string body;
};

Outcome read(std::string bytes) {
  HttpRequestReader reader(kMaxBody);
  try {
    const bool is_whole = reader.read_head(bytes) && reader.read_body(bytes);
    REQUIRE(is_whole);
    return {0, reader.head(), reader.body()};
  } catch (const HttpError& error) {
    return {error.status(), {}, {}};
  }
}

Outcome with_fields(const std::string& fields) { return read("GET / HTTP/1.1\r\nHost: x\r\n" + fields + "\r\n"); }

}  // namespace

TEST_CASE("a body has one length: two fields are refused, equal or not") {
  CHECK(with_fields("Content-Length: 0\r\n").refused == 0);
  CHECK(with_fields("Content-Length: 0\r\nContent-Length: 0\r\n").refused == 400);
  CHECK(with_fields("Content-Length: 0\r\nContent-Length: 5\r\n").refused == 400);
  CHECK(with_fields("content-length: 0\r\nX-Other: 1\r\nCONTENT-LENGTH: 0\r\n").refused == 400);
  for (const char* const value : {"0, 0", "+0", "-0", "0x0", "", "0 0", "18446744073709551616"}) {
    CHECK(with_fields(std::string("Content-Length: ") + value + "\r\n").refused == 400);
  }
  CHECK(with_fields("Content-Length: 0\r\nTransfer-Encoding: chunked\r\n").refused == 400);
}

TEST_CASE("Connection is a list, and its words ignore their case") {
  for (const char* const value : {"close", "Close", "CLOSE", "keep-alive, close", "upgrade , Close,", ",close"}) {
    CHECK_FALSE(with_fields(std::string("Connection: ") + value + "\r\n").head.keeps_alive);
  }
  for (const char* const value : {"keep-alive", "closed", "Upgrade", ""}) {
    CHECK(with_fields(std::string("Connection: ") + value + "\r\n").head.keeps_alive);
  }
  CHECK_FALSE(with_fields("Connection: keep-alive\r\nConnection: close\r\n").head.keeps_alive);
  CHECK_FALSE(read("GET / HTTP/1.0\r\n\r\n").head.keeps_alive);
  CHECK(read("GET / HTTP/1.0\r\nConnection: Upgrade, Keep-Alive\r\n\r\n").head.keeps_alive);
}

TEST_CASE("a target may have a scheme and a host before its path") {
  const auto path = [](const std::string& target) {
    return read("GET " + target + " HTTP/1.1\r\nHost: x\r\n\r\n").head.path;
  };
  CHECK(path("http://127.0.0.1:8080/v1/models?a=b") == "/v1/models");
  CHECK(path("HTTPS://example.org/") == "/");
  CHECK(path("http://example.org") == "/");
  CHECK(path("http://example.org?/a") == "/");
  CHECK(path("/http://example.org/a") == "/http://example.org/a");
  const auto authority = [](const std::string& target) {
    return read("GET " + target + " HTTP/1.1\r\nHost: x\r\n\r\n").head.authority;
  };
  CHECK(authority("http://example.org:80/a") == "example.org:80");
  CHECK(authority("http://example.org") == "example.org");
  CHECK(authority("/http://example.org/a").empty());
  for (const char* const target :
       {"ftp://example.org/", "example.org/", "*", "http:/a", "http://", "http:///a", "http://:80/a", ""}) {
    CHECK(read(std::string("GET ") + target + " HTTP/1.1\r\nHost: x\r\n\r\n").refused == 400);
  }
}

TEST_CASE("a chunk's size is digits alone") {
  const auto chunks = [](const std::string& size) {
    return read("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + size + "\r\nab\r\n0\r\n\r\n");
  };
  CHECK(chunks("2").body == "ab");
  CHECK(chunks("2;a=b").body == "ab");
  CHECK(chunks("0002").body == "ab");
  for (const char* const size : {" 2", "2 ", "\t2", "+2", "0x2", "", "2 ;a=b"}) {
    CHECK(chunks(size).refused == 400);
  }
}
