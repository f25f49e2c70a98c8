#include "common/serving/memory_account.h"

#include <algorithm>
#include <cstdint>

#include "common/base/platform.h"

namespace common {

std::shared_ptr<MemoryAccount> MemoryAccount::of_size(std::size_t in_all) {
  return std::make_shared<MemoryAccount>(in_all, in_all / 2);
}

std::shared_ptr<MemoryAccount> MemoryAccount::of_this_machine() {
  constexpr std::int64_t kPart = 8;
  constexpr std::int64_t kUnknown = std::int64_t{4} << 30;  // where the system does not say
  const std::int64_t available = available_memory_bytes();
  return of_size(static_cast<std::size_t>((available > 0 ? available : kUnknown) / kPart));
}

MemoryAccount::Answer MemoryAccount::Share::resize(std::size_t bytes) noexcept {
  if (bytes > bytes_) {
    if (account_ == nullptr || bytes > account_->per_request_) {
      return Answer::kNeverFits;
    }
    const std::size_t added = bytes - bytes_;
    std::size_t used = account_->used_;
    do {
      if (used > account_->in_all_ || added > account_->in_all_ - used) {
        return Answer::kNotNow;
      }
    } while (!account_->used_.compare_exchange_weak(used, used + added));
  } else if (account_ != nullptr) {
    account_->used_ -= bytes_ - bytes;
  }
  bytes_ = bytes;
  return Answer::kGranted;
}

}  // namespace common
