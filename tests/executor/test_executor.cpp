// The executor itself: what a kernel's threads may and may not do, and that counts are exact.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/cuda/executor/counts.h"
#include "common/cuda/executor/executor.h"
#include "common/cuda/executor/small_floats.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/launch.h"
#include "common/math/sampling.h"
#include "tests/executor/small_kernels.h"
#include "tests/support/catch.h"
#include "tests/support/float8.h"

namespace {

using common::DeviceArray;
using common::executor::Counts;
using tests::Element;

// A seed for the rest of a test case.
class Seed {
 public:
  explicit Seed(std::uint64_t seed) { common::executor::set_seed(seed); }
  ~Seed() { common::executor::set_seed(0); }
  Seed(const Seed&) = delete;
  Seed& operator=(const Seed&) = delete;
};

template <typename... Parameters, typename... Arguments>
void run(void (*kernel)(Parameters...), int blocks, int threads, std::size_t shared_bytes,
         const Arguments&... arguments) {
  common::launch(kernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, nullptr, common::Overlap::kNone,
                 arguments...);
}

// What the executor says to it; empty if nothing.
std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const common::executor::Error& error) {
    return error.what();
  }
  return {};
}

// 0, 1, 2, …
std::vector<float> numbers(int count) {
  std::vector<float> all(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<float>(i);
  }
  return all;
}

// A NaN of any kind is equal to any other.
bool are_nan(const std::vector<float>& values, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    if (!std::isnan(values[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("Executor: lanes shuffle in parts of a warp and together, in any order") {
  const Seed seed(GENERATE(0, 1, 2, 3));
  const DeviceArray<int> in_half(32);
  const DeviceArray<int> across(32);
  run(tests::shuffle_halves, 1, 32, 0, in_half.data(), across.data());
  for (int lane = 0; lane < 32; ++lane) {
    CAPTURE(lane);
    const auto i = static_cast<std::size_t>(lane);
    CHECK(across.download()[i] == 31 - lane);
    if (lane >= 16) {
      CHECK(in_half.download()[i] == (lane ^ 1));
    } else if (lane < 13) {  // the others ask for lanes that are not in their mask
      CHECK(in_half.download()[i] == lane + 3);
    } else {
      CHECK(in_half.download()[i] == -1);
    }
  }
}

TEST_CASE("Executor: lanes that are not there or have ended do not vote") {
  const Seed seed(GENERATE(0, 1));
  // 41 of 70 threads go on: warps of 32, of 9 and of none.
  const DeviceArray<unsigned> ballots(41);
  const DeviceArray<int> all(41);
  const DeviceArray<int> any(41);
  run(tests::vote, 1, 70, 0, 41, ballots.data(), all.data(), any.data());
  for (std::size_t thread = 0; thread < 41; ++thread) {
    CAPTURE(thread);
    CHECK(ballots.download()[thread] == (thread < 32 ? ~0U : 0x1FFU));
    CHECK(all.download()[thread] == (thread < 32 ? 1 : 0));
    CHECK(any.download()[thread] == (thread < 32 ? 1 : 0));
  }
}

TEST_CASE("Executor: a block's barrier does not wait for threads that have ended") {
  const Seed seed(GENERATE(0, 1));
  const DeviceArray<int> sums(50);
  run(tests::count_after_barrier, 1, 100, 0, 50, sums.data());
  CHECK(sums.download() == std::vector<int>(50, 50));
}

TEST_CASE("Executor: every block runs once, in order or in the random order of a seed, and the counts are the same") {
  constexpr int kBlocks = 4 * 3 * 2;
  std::set<std::vector<int>> orders;
  std::set<std::int64_t> sectors;
  for (const std::uint64_t seed : {0, 1, 2, 2}) {
    const Seed of_kernels(seed);
    const DeviceArray<int> turn(std::vector<int>{0});
    const DeviceArray<int> turns(kBlocks);
    const auto note_turns = [&] {
      common::launch(tests::note_turn, dim3(4, 3, 2), 32, 0, nullptr, common::Overlap::kNone, turn.data(),
                     turns.data());
    };
    if (common::executor::can_count()) {
      sectors.insert(common::executor::count(note_turns).global_stores.units);
    } else {
      note_turns();
    }
    const std::vector<int> order = turns.download();
    std::vector<int> in_order(kBlocks);
    std::iota(in_order.begin(), in_order.end(), 0);
    CHECK((order == in_order) == (seed == 0));
    CHECK(std::is_permutation(order.begin(), order.end(), in_order.begin()));
    orders.insert(order);
  }
  CHECK(orders.size() == 3);
  CHECK(sectors.size() == (common::executor::can_count() ? 1 : 0));
}

TEST_CASE("Executor: a hang says which threads wait where, and the next launch works") {
  CHECK(error_of([] { run(tests::wait_at_different_barriers, 2, 64, 0); }) ==
        "block (0, 0, 0) hangs: 0 of its 64 threads have ended, 32 wait at __syncthreads (the first is thread 0), 32 "
        "wait at a named barrier (the first is thread 32)");
  CHECK(error_of([] { run(tests::wait_for_missing_arrival, 1, 8, 0); }) ==
        "block (0, 0, 0) hangs: 5 of its 8 threads have ended, 3 wait at a barrier in shared memory (the first is "
        "thread 0)");
  const DeviceArray<int> sums(50);
  run(tests::count_after_barrier, 1, 50, 0, 50, sums.data());
  CHECK(sums.download() == std::vector<int>(50, 50));
}

TEST_CASE("Executor: what a thread does wrong is said with its block and number") {
  const DeviceArray<int> ints(2);
  CHECK(error_of([&] { run(tests::meet_at_different_instructions, 1, 32, 0, ints.data()); }) ==
        "block (0, 0, 0), thread 7: is at a vote while other lanes of its warp are at a shuffle");
  CHECK(error_of([] { run(tests::wait_at_uninitialised_barrier, 1, 1, 0); }) ==
        "block (0, 0, 0), thread 0: uses a barrier in shared memory that was not initialised");
  CHECK(error_of([] { run(tests::throw_exception, 1, 1, 0); }) ==
        "block (0, 0, 0), thread 0: a bug of the host's code");
  CHECK_THROWS_AS(run(tests::throw_exception, 1, 1025, 0), common::CheckError);
  CHECK_THROWS_AS(run(tests::throw_exception, 1, 32, 228 * 1024), common::CheckError);
}

TEST_CASE("Executor: an access outside of an array, or not aligned, is an error") {
  if (!common::executor::can_count()) {
    return;  // the address sanitizer finds them, and ends the program
  }
  const DeviceArray<float> from(numbers(100));
  const DeviceArray<float> out(3);
  run(tests::read_at, 3, 40, 0, from.data(), 99, 35, out.data());
  CHECK(out.download() == std::vector<float>(3, 99.0F));
  for (const int index : {-1, 100, 1 << 20}) {
    CAPTURE(index);
    CHECK(error_of([&] { run(tests::read_at, 3, 40, 0, from.data(), index, 35, out.data()); }) ==
          "block (0, 0, 0), thread 35: reads 4 bytes of global memory outside of all arrays");
  }
  CHECK(error_of([&] { run(tests::read_at, 3, 40, 0, from.data(), 0, 1, out.data() + 1); }) ==
        "block (2, 0, 0), thread 1: writes 4 bytes of global memory outside of all arrays");
  // NOLINTNEXTLINE(performance-no-int-to-ptr): a page that no program has
  const auto* const nowhere = reinterpret_cast<const float*>(std::uintptr_t{4096});
  CHECK(error_of([&] { run(tests::read_at, 3, 40, 0, nowhere, 1, 35, out.data()); }) ==
        "block (0, 0, 0), thread 35: reads 4 bytes at address 0x1004, where there is no memory");
  CHECK(error_of([&] { run(tests::read_2_bytes_off, 1, 1, 0, from.data(), out.data()); }) ==
        "block (0, 0, 0), thread 0: reads 4 bytes at an address that is no multiple of that");
  CHECK(error_of([&] { run(tests::read_shared_at, 1, 1, 100, 25, out.data()); }) ==
        "block (0, 0, 0), thread 0: reads 4 bytes of shared memory that the launch does not ask for");
  CHECK(error_of([&] { run(tests::copy_to_shared_at, 1, 1, 100, 24, from.data()); }) ==
        "block (0, 0, 0), thread 0: writes 16 bytes of shared memory that the launch does not ask for");
  CHECK(error_of([&] { run(tests::copy_to_shared_at, 1, 1, 100, 1, from.data()); }) ==
        "block (0, 0, 0), thread 0: writes 16 bytes at an address that is no multiple of that");
  CHECK(error_of([&] { run(tests::read_shared_at, 1, 1, 100, 24, out.data()); }).empty());
}

TEST_CASE("Executor: what a block has not written to shared memory is NaN") {
  const DeviceArray<float> out(64);
  for (int i = 0; i < 2; ++i) {  // the second launch finds what the first one left
    run(tests::read_fresh_dynamic, 2, 32, 128, out.data());
    CHECK(are_nan(out.download(), 0, 64));
  }
  if (common::executor::can_count()) {
    for (int i = 0; i < 2; ++i) {
      run(tests::read_fresh_static, 2, 32, 0, out.data());
      CHECK(are_nan(out.download(), 0, 64));
      run(tests::read_other_static, 2, 32, 0, out.data());
      // Threads from 16 on read what threads 0 to 15 have written.
      CHECK(are_nan(out.download(), 0, 16));
      CHECK(out.download()[16] == 1.0F);
    }
  }
}

TEST_CASE("Executor: a copy lands when it is waited for") {
  const DeviceArray<float> from(numbers(128));
  const DeviceArray<float> first(128);
  const DeviceArray<float> second(128);
  run(tests::copy_without_waiting, 1, 32, 0, from.data(), first.data(), second.data());
  CHECK(first.download() == std::vector<float>(128, -1.0F));
  for (std::size_t i = 0; i < 128; ++i) {
    CHECK(second.download()[i] == static_cast<float>((i + 4) % 128));
  }
  run(tests::copy_in_groups, 1, 32, 0, from.data(), first.data(), second.data());
  CHECK(first.download() == numbers(128));
  CHECK(second.download() == std::vector<float>(128, -1.0F));
}

TEST_CASE("Executor: bulk copies and copies that arrive end a barrier's phases, in any order") {
  const Seed seed(GENERATE(0, 1, 2));
  const DeviceArray<float> from(numbers(128 * 5));
  const DeviceArray<float> to(128 * 5);
  run(tests::copy_tiles, 1, 128, 0, from.data(), to.data(), 5);
  CHECK(to.download() == numbers(128 * 5));
  const DeviceArray<float> rotated(128);
  run(tests::arrive_by_copies, 1, 32, 0, from.data(), rotated.data());
  for (std::size_t i = 0; i < 128; ++i) {
    const std::size_t place = (i + 64) % 128;
    CHECK(rotated.download()[i] == (place / 4 == 5 ? 0.0F : static_cast<float>(place)));  // thread 5 copies zeros
  }
}

TEST_CASE("Executor: matrix instructions multiply as a plain loop does") {
  const auto element = GENERATE(Element::kBFloat16, Element::kHalf);
  common::Random random(3);
  std::vector<std::uint16_t> a(256);
  std::vector<std::uint16_t> b(128);
  const auto to_bits = [&](float x) {
    return element == Element::kHalf ? common::executor::half_of_float(x) : __float2bfloat16_rn(x).bits;
  };
  const auto value = [&](std::uint16_t bits) {
    return static_cast<double>(element == Element::kHalf ? common::executor::float_of_half(bits)
                                                         : __bfloat162float({bits}));
  };
  for (std::vector<std::uint16_t>* matrix : {&a, &b}) {
    for (std::uint16_t& x : *matrix) {
      x = to_bits(static_cast<float>(random.normal()));
    }
  }
  const DeviceArray<std::uint16_t> device_a(a);
  const DeviceArray<std::uint16_t> device_b(b);
  const DeviceArray<float> c(128);
  const DeviceArray<float> upper(64);
  run(tests::multiply, 1, 32, 0, element, device_a.data(), device_b.data(), c.data());
  run(tests::multiply_upper, 1, 32, 0, device_a.data(), device_b.data(), upper.data());
  for (std::size_t row = 0; row < 16; ++row) {
    for (std::size_t column = 0; column < 8; ++column) {
      double sum = 0.0;
      for (std::size_t k = 0; k < 16; ++k) {
        sum += value(a[row * 16 + k]) * value(b[k * 8 + column]);
      }
      CAPTURE(row, column);
      CHECK(c.download()[row * 8 + column] == static_cast<float>(1.0 + sum));
      if (row < 8 && element == Element::kBFloat16) {
        CHECK(upper.download()[row * 8 + column] == static_cast<float>(sum));
      }
    }
  }
  std::vector<std::uint16_t> matrix(64);
  for (std::size_t i = 0; i < 64; ++i) {
    matrix[i] = static_cast<std::uint16_t>(i);
  }
  const DeviceArray<std::uint16_t> device_matrix(matrix);
  const DeviceArray<std::uint16_t> result(64);
  run(tests::transpose_matrix, 1, 32, 0, device_matrix.data(), result.data());
  for (std::size_t i = 0; i < 64; ++i) {
    CHECK(result.download()[i] == i % 8 * 8 + i / 8);
  }
}

TEST_CASE("Executor: bfloat16, float16 and float8 are rounded to the nearest number, on a tie to the even one") {
  using common::executor::float8_of_float;
  using common::executor::float_of_float8;
  using common::executor::float_of_half;
  using common::executor::half_of_float;
  // Each number of a type is its own nearest. Half-way between two neighbours the even one counts as nearest, and a
  // little to one side the neighbour on that side.
  const auto check_neighbours = [](const auto& of_float, const auto& to_float, unsigned last) {
    bool is_right = true;
    for (unsigned bits = 0; bits < last; ++bits) {
      const auto low = static_cast<double>(to_float(bits));
      const auto high = static_cast<double>(to_float(bits + 1));
      const auto middle = static_cast<float>((low + high) / 2);  // exact
      is_right = is_right && of_float(to_float(bits)) == bits && of_float(middle) == bits + bits % 2 &&
                 of_float(std::nextafter(middle, 0.0F)) == bits &&
                 of_float(std::nextafter(middle, std::numeric_limits<float>::infinity())) == bits + 1;
    }
    return is_right;
  };
  CHECK(check_neighbours([](float x) { return unsigned{half_of_float(x)}; },
                         [](unsigned bits) { return float_of_half(bits); }, 0x7BFF));
  CHECK(check_neighbours([](float x) { return unsigned{float8_of_float(x)}; },
                         [](unsigned bits) { return float_of_float8(bits); }, 0x7E));
  CHECK(check_neighbours([](float x) { return unsigned{__float2bfloat16_rn(x).bits}; },
                         [](unsigned bits) { return __bfloat162float({static_cast<std::uint16_t>(bits)}); }, 0x7F7F));
  // Beyond the largest.
  CHECK(half_of_float(65519.0F) == 0x7BFF);
  CHECK(half_of_float(65520.0F) == 0x7C00);
  CHECK(half_of_float(-1e30F) == 0xFC00);
  CHECK(std::isinf(float_of_half(0x7C00)));
  CHECK(std::isnan(float_of_half(half_of_float(std::nanf("")))));
  CHECK(std::isnan(__bfloat162float(__float2bfloat16_rn(std::nanf("")))));
  CHECK(std::isinf(__bfloat162float(__float2bfloat16_rn(std::numeric_limits<float>::max()))));
  for (int byte = 0; byte < 256; ++byte) {
    const double value = tests::float8_value(static_cast<std::uint8_t>(byte));
    const float own = float_of_float8(static_cast<unsigned>(byte));
    CHECK((std::isnan(value) ? std::isnan(own) : static_cast<double>(own) == value));
  }
  common::Random random(5);
  for (int i = 0; i < 10000; ++i) {
    const auto x = static_cast<float>(std::ldexp(random.normal(), static_cast<int>(random.below(24)) - 12));
    CHECK(float8_of_float(x) == tests::float8_byte(static_cast<double>(x)));
  }
}

TEST_CASE("Executor: requests, sectors and passes are counted exactly, in any order") {
  if (!common::executor::can_count()) {
    return;
  }
  const Seed seed(GENERATE(0, 1, 2));
  const DeviceArray<float> from(numbers(32 * 32));
  const DeviceArray<float> to(32 * 32);
  const auto count = [&](const auto& work) { return common::executor::count(work); };
  const auto are = [](const common::executor::Requests& requests, std::int64_t number, std::int64_t bytes,
                      std::int64_t units, std::int64_t ideal) {
    CHECK(requests.requests == number);
    CHECK(requests.bytes == bytes);
    CHECK(requests.units == units);
    CHECK(requests.ideal == ideal);
  };
  SECTION("4 bytes a lane, side by side: 4 sectors") {
    const Counts counts = count([&] { run(tests::load_strided, 1, 32, 0, from.data(), to.data(), 1); });
    are(counts.global_loads, 1, 128, 4, 4);
    are(counts.global_stores, 1, 128, 4, 4);
    CHECK(counts.distinct_bytes == 128);
    CHECK(counts.shared_loads.requests + counts.shared_stores.requests == 0);
  }
  SECTION("not at the beginning of a sector: 5") {
    const Counts counts = count([&] { run(tests::load_strided, 1, 32, 0, from.data() + 1, to.data(), 1); });
    are(counts.global_loads, 1, 128, 5, 4);
  }
  SECTION("128 bytes apart: a sector a lane") {
    const Counts counts = count([&] { run(tests::load_strided, 1, 32, 0, from.data(), to.data(), 32); });
    are(counts.global_loads, 1, 128, 32, 4);
    CHECK(counts.distinct_bytes == 32 * 32);
  }
  SECTION("two warps, the second with 8 lanes") {
    const Counts counts = count([&] { run(tests::load_strided, 3, 40, 0, from.data(), to.data(), 1); });
    are(counts.global_loads, 6, 3 * 160, 15, 15);
    CHECK(counts.distinct_bytes == 160);
  }
  SECTION("16 bytes a lane: 16 sectors") {
    const Counts counts = count([&] {
      run(tests::load_vectors, 1, 32, 0, reinterpret_cast<const float4*>(from.data()),
          reinterpret_cast<float4*>(to.data()));
    });
    are(counts.global_loads, 1, 512, 16, 16);
    are(counts.global_stores, 1, 512, 16, 16);
  }
  SECTION("one word for all lanes: a sector") {
    const Counts counts = count([&] { run(tests::load_the_same, 1, 32, 0, from.data(), to.data()); });
    are(counts.global_loads, 1, 128, 1, 1);
  }
  SECTION("the same words twice: distinct bytes once") {
    const Counts counts = count([&] { run(tests::load_twice, 1, 32, 0, from.data(), to.data()); });
    are(counts.global_loads, 2, 256, 8, 8);
    CHECK(counts.distinct_bytes == 128);
  }
  SECTION("a loop that each lane runs another number of times") {
    const Counts counts = count([&] { run(tests::load_by_lane, 1, 32, 0, from.data(), to.data()); });
    are(counts.global_loads, 32, 4 * 32 * 33 / 2, 32, 32);
    are(counts.global_stores, 1, 128, 4, 4);
  }
  SECTION("half a warp meets in between: still one request") {
    const Counts counts = count([&] { run(tests::load_after_halves_met, 1, 32, 0, from.data(), to.data()); });
    are(counts.global_loads, 1, 128, 4, 4);
    are(counts.global_stores, 1, 128, 4, 4);
    CHECK(counts.shuffles == 1);
  }
  SECTION("structures of 12 bytes: three loads of 4") {
    const Counts counts = count([&] {
      run(tests::load_triples, 1, 32, 0, reinterpret_cast<const tests::Triple*>(from.data()),
          reinterpret_cast<tests::Triple*>(to.data()));
    });
    CHECK(counts.global_loads.bytes == 384);
    CHECK(counts.global_stores.bytes == 384);
    CHECK(to.download()[95] == 95.0F);
  }
  SECTION("shared words 1, 2 and 32 apart: 1, 2 and 32 passes") {
    for (const int stride : {1, 2, 3, 32}) {
      CAPTURE(stride);
      const Counts counts = count([&] { run(tests::share_strided, 1, 32, 4096, to.data(), stride); });
      const int passes = stride == 3 ? 1 : stride;
      are(counts.shared_stores, 1, 128, passes, 1);
      are(counts.shared_loads, 1, 128, passes, 1);
      CHECK(counts.bank_conflicts() == 2 * (passes - 1));
    }
  }
  SECTION("16 shared bytes a lane: 4 passes") {
    const Counts counts = count([&] { run(tests::share_vectors, 1, 32, 512, reinterpret_cast<float4*>(to.data())); });
    are(counts.shared_stores, 1, 512, 4, 4);
    are(counts.shared_loads, 1, 512, 4, 4);
    CHECK(counts.bank_conflicts() == 0);
  }
  SECTION("columns of a tile: 32 passes each, with rows of 33 words one") {
    const Counts plain = count([&] { run(tests::transpose_tile, 1, 32, 4096, from.data(), to.data(), 32); });
    are(plain.shared_loads, 32, 4096, 32 * 32, 32);
    CHECK(plain.bank_conflicts() == 32 * 31);
    const Counts padded = count([&] { run(tests::transpose_tile, 1, 32, 4224, from.data(), to.data(), 33); });
    are(padded.shared_loads, 32, 4096, 32, 32);
    CHECK(padded.bank_conflicts() == 0);
    CHECK(to.download()[32] == 1.0F);
  }
  SECTION("copies") {
    const DeviceArray<float> first(128);
    const Counts counts =
        count([&] { run(tests::copy_without_waiting, 1, 32, 0, from.data(), first.data(), to.data()); });
    CHECK(counts.async_copies == 32);
    are(counts.global_loads, 1, 512, 16, 16);
    CHECK(counts.barriers == 2);
    const Counts bulk = count([&] { run(tests::copy_tiles, 1, 128, 0, from.data(), to.data(), 5); });
    CHECK(bulk.bulk_copies == 5);
    CHECK(bulk.bulk_bytes == 5 * 512);
    CHECK(bulk.global_loads.requests == 0);
    CHECK(bulk.distinct_bytes == 5 * 512);
    CHECK(bulk.barriers == 6);
  }
  SECTION("instructions of a warp") {
    const DeviceArray<std::uint16_t> a(256);
    CUDA_CHECK(cudaMemset(a.data(), 0, 512));
    const Counts counts =
        count([&] { run(tests::multiply, 1, 32, 0, Element::kBFloat16, a.data(), a.data(), to.data()); });
    CHECK(counts.matrix_loads == 2);
    CHECK(counts.matrix_products == 1);
    const DeviceArray<int> out(64);
    const Counts shuffled = count([&] { run(tests::shuffle_halves, 1, 32, 0, out.data(), out.data() + 32); });
    CHECK(shuffled.shuffles == 3);
    CHECK(shuffled.votes == 0);
  }
}

TEST_CASE("Executor: a lane that copies zeros takes no part in the load") {
  if (!common::executor::can_count()) {
    return;
  }
  const DeviceArray<float> from(numbers(128));
  const DeviceArray<float> to(128);
  std::vector<common::executor::WarpLoad> loads;
  const Counts counts = common::executor::count([&] { run(tests::arrive_by_copies, 1, 32, 0, from.data(), to.data()); },
                                                [&](const common::executor::WarpLoad& load) { loads.push_back(load); });
  CHECK(counts.global_loads.requests == 1);
  CHECK(counts.global_loads.bytes == 31 * 16);
  CHECK(counts.global_loads.units == 16);
  REQUIRE(loads.size() == 1);
  CHECK(loads.front().lanes.size() == 31);
}

TEST_CASE("Executor: each load of a warp is shown to who asks, in the order in which it is made") {
  if (!common::executor::can_count()) {
    return;
  }
  using common::executor::WarpLoad;
  const Seed seed(GENERATE(0, 1, 2));
  const DeviceArray<float> from(numbers(128 * 5));
  const DeviceArray<float> to(128 * 5);
  const auto address = reinterpret_cast<std::uintptr_t>(from.data());
  std::vector<WarpLoad> loads;
  const auto see = [&](const WarpLoad& load) { loads.push_back(load); };
  SECTION("by grid, block, warp and lane") {
    const Counts counts = common::executor::count(
        [&] {
          run(tests::load_strided, 1, 32, 0, from.data(), to.data(), 2);
          run(tests::load_strided, 2, 40, 0, from.data(), to.data(), 2);
        },
        see);
    REQUIRE(loads.size() == 5);
    CHECK(counts.global_loads.requests == 5);
    std::set<std::tuple<int, int, int, std::size_t>> who;
    for (const WarpLoad& load : loads) {
      who.insert({load.grid, load.block, load.warp, load.lanes.size()});
      CHECK_FALSE(load.is_bulk);
      for (std::size_t i = 0; i < load.lanes.size(); ++i) {
        CHECK(load.lanes[i].lane == static_cast<int>(i));
        CHECK(load.lanes[i].address == address + 8 * (32 * static_cast<std::uintptr_t>(load.warp) + i));
        CHECK(load.lanes[i].bytes == 4);
      }
    }
    CHECK(who == std::set<std::tuple<int, int, int, std::size_t>>{
                     {0, 0, 0, 32}, {1, 0, 0, 32}, {1, 0, 1, 8}, {1, 1, 0, 32}, {1, 1, 1, 8}});
  }
  SECTION("a loop, which the lanes leave one after the other") {
    (void)common::executor::count([&] { run(tests::load_by_lane, 1, 32, 0, from.data(), to.data()); }, see);
    REQUIRE(loads.size() == 32);
    for (std::size_t i = 0; i < loads.size(); ++i) {
      CHECK(loads[i].lanes.size() == 32 - i);
      CHECK(loads[i].lanes.front().address == address + 32 * i);
    }
  }
  SECTION("bulk copies, each a lane's") {
    const Counts counts =
        common::executor::count([&] { run(tests::copy_tiles, 1, 128, 0, from.data(), to.data(), 5); }, see);
    REQUIRE(loads.size() == 5);
    CHECK(counts.bulk_copies == 5);
    CHECK(counts.bulk_bytes == 5 * 512);
    CHECK(counts.global_loads.requests == 0);
    CHECK(counts.distinct_bytes == 5 * 512);
    for (std::size_t i = 0; i < loads.size(); ++i) {
      CHECK(loads[i].is_bulk);
      REQUIRE(loads[i].lanes.size() == 1);
      CHECK(loads[i].lanes.front().address == address + 512 * i);
      CHECK(loads[i].lanes.front().bytes == 512);
    }
  }
  SECTION("nothing once count() has ended") {
    (void)common::executor::count([] {}, see);
    (void)common::executor::count([&] { run(tests::load_strided, 1, 32, 0, from.data(), to.data(), 1); });
    CHECK(loads.empty());
  }
}

TEST_CASE("Executor: nothing is counted after a fault or outside of count()") {
  if (!common::executor::can_count()) {
    return;
  }
  const DeviceArray<float> data(numbers(64));
  CHECK_THROWS_AS(common::executor::count([&] { run(tests::read_at, 1, 1, 0, data.data(), 1000, 0, data.data()); }),
                  common::executor::Error);
  run(tests::load_twice, 1, 32, 0, data.data(), data.data() + 32);
  const Counts counts = common::executor::count([] {});
  CHECK(counts.global_loads.requests == 0);
  CHECK(counts.distinct_bytes == 0);
}

TEST_CASE("Executor: a graph runs when it is launched, each time with what memory holds then") {
  const common::Stream stream;
  DeviceArray<float> from(numbers(32));
  const DeviceArray<float> to(std::vector<float>(32, -1.0F));
  const common::Graph graph(stream, [&] {
    common::launch(tests::load_strided, dim3(1), 32, 0, stream.get(), common::Overlap::kNone, from.data(), to.data(),
                   1);
  });
  CHECK(to.download() == std::vector<float>(32, -1.0F));
  graph.launch(stream);
  stream.synchronize();
  CHECK(to.download() == numbers(32));
  from.upload(std::vector<float>(32, 7.0F));
  graph.launch(stream);
  stream.synchronize();
  CHECK(to.download() == std::vector<float>(32, 7.0F));
}

TEST_CASE("Executor: memory that is freed can be had again, and none that is not there") {
  const std::size_t free_before = common::executor::free_bytes();
  void* const first = common::executor::allocate(1000);
  void* const second = common::executor::allocate(1);
  CHECK(reinterpret_cast<std::uintptr_t>(first) % 256 == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(second) % 256 == 0);
  CHECK(common::executor::free_bytes() == free_before - 1001);
  CHECK(common::executor::allocate(common::executor::total_bytes()) == nullptr);
  common::executor::free(first);
  CHECK(common::executor::allocate(900) == first);
  common::executor::free(first);
  CHECK_THROWS_AS(common::executor::free(first), common::CheckError);
  common::executor::free(second);
  CHECK(common::executor::free_bytes() == free_before);
}
