// Passes broken files to the GGUF reader. The reader may refuse them with an InputError or read them; anything else
// (another exception, a crash, a sanitizer's report) is a finding.
//
//   fuzz_gguf --seconds 10 --seed 1   mutates a small valid file; 1 on a finding, whose bytes are left in a file
//   fuzz_gguf FILE...                 tries the given files, for instance such a finding
//
// With clang, -fsanitize=fuzzer and -DCOMMON_LIBFUZZER the same file is a libFuzzer target.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/model/gguf.h"

namespace {

// A small file can hold no more than a few million weights, but the time is better spent on other files.
constexpr std::int64_t kMaxElementsRead = std::int64_t{1} << 20;

// Touches everything that the reader hands out, so that a view past the end of the file is noticed.
void read_everything(const common::Gguf& file) {
  std::int64_t num_elements = 0;
  for (const auto& [name, info] : file.tensors()) {
    num_elements += info.num_elements;
    if (num_elements > kMaxElementsRead) {
      return;
    }
    std::vector<float> values(static_cast<std::size_t>(info.num_elements));
    file.read_tensor(name, info.shape, values);
  }
}

// Each getter on a key that small_gguf() has: a mutation may have changed the type of its value.
template <typename Get>
void try_get(Get get) {
  try {
    get();
  } catch (const common::InputError&) {  // one of the two allowed outcomes
  }
}

void read_metadata(const common::Gguf& file) {
  for (const char* key :
       {"uint64", "float64", "bool", "string", "int32s", "float32s", "strings", "general.alignment"}) {
    try_get([&] { file.get_int(key); });
    try_get([&] { file.get_float(key); });
    try_get([&] { file.get_bool(key, false); });
    try_get([&] { file.get_string(key); });
    try_get([&] { file.get_strings(key); });
    try_get([&] { file.get_ints(key); });
  }
}

// True if the reader accepts the file, false if it refuses the file properly.
bool accepts(std::span<const std::uint8_t> bytes) {
  try {
    const auto file = common::Gguf::parse(std::as_bytes(bytes), "fuzz");
    read_metadata(file);
    read_everything(file);
    return true;
  } catch (const common::InputError& error) {
    // One line, and short whatever the file holds.
    const std::string message = error.what();
    COMMON_CHECK(message.find('\n') == std::string::npos && message.size() < 1000, "an error must be one clear line");
    return false;
  }
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): the name libFuzzer looks for
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  accepts({data, size});
  return 0;
}

#ifndef COMMON_LIBFUZZER

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

#include "tests/support/gguf_builder.h"

// From <sanitizer/common_interface_defs.h>; null in a build without a sanitizer.
using DeathCallback = void (*)();
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" [[gnu::weak]] void __sanitizer_set_death_callback(DeathCallback callback);

namespace {

using Input = std::vector<std::uint8_t>;

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same runs for the same seed on every machine.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  }

  // In [0, bound); the bias of the remainder does not matter here.
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }

 private:
  std::uint64_t state_;
};

constexpr std::array<std::uint8_t, 12> kInterestingBytes = {0, 1, 2, 3, 8, 9, 14, 30, 32, 127, 128, 255};

// Numbers that have broken parsers: small ones, powers of two, the size of the file, and their neighbours.
std::uint64_t pick_number(Generator& random, std::size_t size) {
  switch (random.below(4)) {
    case 0:
      return random.below(300);
    case 1:
      return size + random.below(9) - 4;
    case 2:
      return std::uint64_t{1} << random.below(64);
    default:
      return (std::uint64_t{1} << random.below(64)) + random.below(9) - 4;  // wraps around: 2^64 - 4 and above
  }
}

template <typename T>
void overwrite(Input& input, T value, Generator& random) {
  if (input.size() >= sizeof(T)) {
    std::memcpy(input.data() + random.below(input.size() - sizeof(T) + 1), &value, sizeof(T));
  }
}

// A run of at most 64 bytes (sometimes of any length) of `source`.
Input pick_chunk(const Input& source, Generator& random) {
  const std::size_t begin = random.below(source.size());
  const std::size_t limit = source.size() - begin;
  const std::size_t length = 1 + random.below(random.below(4) == 0 || limit < 64 ? limit : 64);
  const auto first = source.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(length)};
}

void insert_chunk(Input& input, const Input& chunk, Generator& random) {
  const auto position = static_cast<std::ptrdiff_t>(random.below(input.size() + 1));
  input.insert(input.begin() + position, chunk.begin(), chunk.end());
}

void erase_chunk(Input& input, Generator& random) {
  const std::size_t begin = random.below(input.size());
  const std::size_t length = 1 + random.below(std::min<std::size_t>(input.size() - begin, 16));
  const auto first = input.begin() + static_cast<std::ptrdiff_t>(begin);
  input.erase(first, first + static_cast<std::ptrdiff_t>(length));
}

// Copies a stretch of `other` over `input`, to the same place or another.
void splice(Input& input, const Input& other, Generator& random) {
  const Input chunk = pick_chunk(other, random);
  const std::size_t begin = random.below(input.size());
  const std::size_t length = std::min(chunk.size(), input.size() - begin);
  std::memcpy(input.data() + begin, chunk.data(), length);
}

void mutate_once(Input& input, const std::vector<Input>& seeds, Generator& random) {
  if (input.empty()) {
    input = seeds[random.below(seeds.size())];
  }
  switch (random.below(10)) {
    case 0:
      input[random.below(input.size())] ^= static_cast<std::uint8_t>(1U << random.below(8));
      break;
    case 1:
      input[random.below(input.size())] = kInterestingBytes[random.below(kInterestingBytes.size())];
      break;
    case 2:
      input[random.below(input.size())] = static_cast<std::uint8_t>(random.next());
      break;
    case 3:
      overwrite(input, static_cast<std::uint16_t>(pick_number(random, input.size())), random);
      break;
    case 4:
      overwrite(input, static_cast<std::uint32_t>(pick_number(random, input.size())), random);
      break;
    case 5:
      overwrite(input, pick_number(random, input.size()), random);
      break;
    case 6:
      input.resize(random.below(input.size() + 1));
      break;
    case 7:
      insert_chunk(input, pick_chunk(input, random), random);
      break;
    case 8:
      erase_chunk(input, random);
      break;
    default:
      splice(input, seeds[random.below(seeds.size())], random);
      break;
  }
}

Input to_input(const tests::Bytes& bytes) {
  Input input(bytes.size());
  std::memcpy(input.data(), bytes.data(), bytes.size());
  return input;
}

// Several valid files: after a mutation, a small one reaches the end of the parser more often than one with everything.
std::vector<Input> make_seeds() {
  tests::GgufBuilder tensors_only;
  tensors_only.add_tensor("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  tensors_only.add_tensor("b", {2, 32}, common::TensorType::Q8_0, tests::finite_data(68));
  tensors_only.add_tensor("c", {1, 256}, common::TensorType::Q6_K, tests::finite_data(210));
  tests::GgufBuilder metadata_only;
  metadata_only.version = 2;
  metadata_only.add("string", "text").add("uint64", std::uint64_t{1}).add("bool", true);
  metadata_only.add_array("strings", std::vector<std::string>{"", "one"});
  metadata_only.add_array("int32s", std::vector<std::int32_t>{1, 2, 3});
  return {to_input(tests::small_gguf().build()), to_input(tensors_only.build()), to_input(metadata_only.build())};
}

// The input being tried. It is set before the attempt, because a crash leaves no time for it.
Input current_input;
std::string dump_path;

void write_text(const char* text) {
  const auto written = ::write(STDERR_FILENO, text, std::strlen(text));
  static_cast<void>(written);  // there is nothing left to do about it
}

// Async-signal-safe, like write_text.
void dump_current_input() {
  if (dump_path.empty()) {
    return;  // a file named on the command line is being tried: it is there already
  }
  const int file = ::open(dump_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file < 0 || ::write(file, current_input.data(), current_input.size()) < 0) {
    write_text("fuzz_gguf: the input could not be written to ");
  } else {
    write_text("fuzz_gguf: the input was written to ");
  }
  write_text(dump_path.c_str());
  write_text("\n");
}

extern "C" void on_signal(int /*signal*/) {
  write_text("fuzz_gguf: finding: crashed\n");
  dump_current_input();
  ::_exit(1);
}

// AddressSanitizer ends the process itself after its report, and calls this before.
void dump_on_crash() {
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(dump_current_input);
  } else {
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE}) {
      std::signal(signal, on_signal);
    }
  }
  std::signal(SIGABRT, on_signal);
}

// Whether the reader accepted `input`; nothing if it was a finding, which has been printed to stderr.
std::optional<bool> try_input(const Input& input) {
  try {
    return accepts(input);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_gguf: finding: %s\n", error.what());
    return std::nullopt;
  }
}

}  // namespace

// UndefinedBehaviorSanitizer looks for a function of this name and calls it at every report.
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" void __ubsan_on_report() { dump_current_input(); }

namespace {

int try_files(std::span<char* const> paths) {
  for (const char* path : paths) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) {
      std::fprintf(stderr, "fuzz_gguf: cannot open %s\n", path);
      return 1;
    }
    const Input input{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    const std::optional<bool> accepted = try_input(input);
    if (!accepted) {
      return 1;
    }
    std::printf("%s: no finding, the file is %s\n", path, *accepted ? "accepted" : "refused");
  }
  return 0;
}

// Tries one file: a seed, mutated a few times or not at all. A seed that is not mutated must be accepted, or else the
// fuzzer would test nothing but the first check.
std::optional<bool> run_once(const std::vector<Input>& seeds, Generator& random) {
  current_input = seeds[random.below(seeds.size())];
  const std::size_t num_mutations = random.below(6);
  for (std::size_t i = 0; i < num_mutations; ++i) {
    mutate_once(current_input, seeds, random);
  }
  current_input.shrink_to_fit();  // so that a memory checker sees a read past the end
  const std::optional<bool> accepted = try_input(current_input);
  if (num_mutations == 0 && accepted == false) {
    std::fprintf(stderr, "fuzz_gguf: finding: a valid file was refused\n");
    return std::nullopt;
  }
  return accepted;
}

int fuzz(double seconds, std::uint64_t seed) {
  using Clock = std::chrono::steady_clock;
  Generator random(seed);
  const std::vector<Input> seeds = make_seeds();
  dump_path = "fuzz_gguf_finding_" + std::to_string(seed) + ".gguf";
  dump_on_crash();
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  long long num_runs = 0;
  long long num_accepted = 0;
  do {
    const std::optional<bool> accepted = run_once(seeds, random);
    if (!accepted) {
      dump_current_input();
      std::fprintf(stderr, "fuzz_gguf: seed %s, run %lld\n", std::to_string(seed).c_str(), num_runs);
      return 1;
    }
    ++num_runs;
    num_accepted += *accepted ? 1 : 0;
  } while (Clock::now() < end);
  std::printf("fuzz_gguf: seed %s, %lld runs, %lld files accepted, no findings\n", std::to_string(seed).c_str(),
              num_runs, num_accepted);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 2.0;
  std::uint64_t seed = 1;
  const std::span<char*> arguments(argv + 1, argv + argc);
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string option = arguments[i];
    if (!option.starts_with("--")) {
      return try_files(arguments.subspan(i));
    }
    if (i + 1 == arguments.size() || (option != "--seconds" && option != "--seed")) {
      std::fprintf(stderr, "usage: fuzz_gguf [--seconds S] [--seed N] | fuzz_gguf FILE...\n");
      return 2;
    }
    if (option == "--seconds") {
      seconds = std::strtod(arguments[i + 1], nullptr);
    } else {
      seed = std::strtoull(arguments[i + 1], nullptr, 10);
    }
  }
  return fuzz(seconds, seed);
}

#endif  // COMMON_LIBFUZZER
