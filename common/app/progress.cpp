#include "common/app/progress.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <utility>

#include "common/base/platform.h"
#include "common/base/text.h"

namespace common {

namespace {

constexpr std::chrono::milliseconds kFirstDraw{1000};
constexpr std::chrono::milliseconds kBetweenDraws{100};

// Back to the first column, then erase to the end of the line (ECMA-48, EL).
constexpr const char* kWipeLine = "\r\033[K";

}  // namespace

Progress::Progress(std::string what, std::int64_t total, ProgressPace pace)
    : what_(std::move(what)),
      total_(total),
      redraws_(understands_escapes(std::cerr)),
      pace_(redraws_ ? ProgressPace{kFirstDraw, kBetweenDraws} : pace),
      start_(std::chrono::steady_clock::now()),
      last_draw_(start_) {}

Progress::~Progress() { clear(); }

void Progress::advance(std::int64_t steps) {
  done_ += steps;
  const auto now = std::chrono::steady_clock::now();
  if (now - start_ < pace_.first || (drawn_ && now - last_draw_ < pace_.between)) {
    return;
  }
  std::string line = what_ + ": " + format_count(done_);
  if (total_ > 0) {
    line += " of " + format_count(total_) + " (" +
            format_percent(static_cast<double>(done_), static_cast<double>(total_)) + ")";
    if (done_ > 0) {
      const double seconds = std::chrono::duration<double>(now - start_).count();
      line += format(", %.0f s left", seconds * static_cast<double>(std::max<std::int64_t>(total_ - done_, 0)) /
                                          static_cast<double>(done_));
    }
  }
  std::fprintf(stderr, "%s%s%s", redraws_ ? kWipeLine : "", line.c_str(), redraws_ ? "" : "\n");
  std::fflush(stderr);
  drawn_ = true;
  last_draw_ = now;
}

void Progress::clear() {
  if (drawn_ && redraws_) {
    std::fputs(kWipeLine, stderr);
    std::fflush(stderr);
    drawn_ = false;
  }
}

}  // namespace common
