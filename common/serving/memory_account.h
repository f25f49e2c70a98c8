// What clients make a server hold, in bytes: bodies that come in, what is read from them, prompts, texts and
// log-probabilities until their reply has been sent. It is asked for before it is made. The bytes are estimates from
// above; what malloc adds to them is in the estimates.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace common {

class MemoryAccount {
 public:
  // The limits of all requests together, and of one.
  MemoryAccount(std::size_t in_all, std::size_t per_request) : in_all_(in_all), per_request_(per_request) {}
  // An eighth of the memory that the program can still take, half of that for one request.
  static std::shared_ptr<MemoryAccount> of_this_machine();
  static std::shared_ptr<MemoryAccount> of_size(std::size_t in_all);

  enum class Answer { kGranted, kNeverFits, kNotNow };

  // Of one request. Gives back what it has when it ends.
  class Share {
   public:
    Share() = default;  // of no account: it can't grow
    explicit Share(std::shared_ptr<MemoryAccount> account) : account_(std::move(account)) {}
    Share(Share&& other) noexcept : account_(std::move(other.account_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Share& operator=(Share&& other) noexcept {
      std::swap(account_, other.account_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Share() { resize(0); }

    // Makes the share this large; if that is not granted, it stays what it was. Allocates no memory.
    Answer resize(std::size_t bytes) noexcept;
    std::size_t bytes() const { return bytes_; }

   private:
    std::shared_ptr<MemoryAccount> account_;
    std::size_t bytes_ = 0;
  };

  std::size_t in_all() const { return in_all_; }
  std::size_t per_request() const { return per_request_; }
  std::size_t used() const { return used_; }

 private:
  std::size_t in_all_;
  std::size_t per_request_;
  std::atomic<std::size_t> used_ = 0;
};

}  // namespace common
