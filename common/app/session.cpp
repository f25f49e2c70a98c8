#include "common/app/session.h"

#include <iostream>

#include "common/base/text.h"

namespace common {

int Session::bench_slots(int num_slots) const {
  if (slots_given || num_slots >= bench_tokens) {
    return num_slots;
  }
  std::cerr << "note: a cache of " << format_count(bench_tokens) << " slots: what the text needs (--slots sets it)\n";
  return bench_tokens;
}

}  // namespace common
