#include "common/serving/request_log.h"

#include <cstddef>

#include "common/base/text.h"

namespace common {
namespace {

constexpr std::size_t kMaxShownPath = 80;  // bytes of a path
constexpr std::size_t kMaxShownProblem = 200;

std::string shortened(const std::string& text) {
  return text.size() <= kMaxShownPath ? text : text.substr(0, kMaxShownPath) + "...";
}

}  // namespace

std::string log_line(const AnsweredRequest& request) {
  std::string line =
      request.method.empty() ? "(no request)" : shortened(request.method) + " " + shortened(request.path);
  line += format(" %d", request.status);
  if (request.figures.has_value()) {
    line += format(", %zu tokens in (%zu cached), %zu out", request.figures->prompt_tokens,
                   request.figures->cached_tokens, request.figures->output_tokens);
  }
  constexpr int kClientGone = 499;
  const std::string end = !request.is_read || request.status == kClientGone ? "client gone"
                          : request.figures.has_value()                     ? request.figures->end
                          : request.problem.empty()                         ? ""
                                                                            : quote(request.problem, kMaxShownProblem);
  return line + format(", %.0f ms", 1e3 * request.seconds) + (end.empty() ? "" : ": " + end) +
         (request.id.empty() ? "" : ", " + request.id);
}

bool is_logged(const AnsweredRequest& request) {
  return request.status != 200 || (request.path != "/health" && request.path != "/metrics");
}

}  // namespace common
