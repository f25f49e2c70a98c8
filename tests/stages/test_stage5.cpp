// Stage 5's own tests: its program, and what it prints about sharing.
#include "tests/support/catch.h"

#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "common/model/generation.h"
#include "stage5/decoding.h"
#include "stage5/demo/sampling_commands.h"
#include "stage5/engine.h"
#include "tests/stages/engine_fixtures.h"

using tests::contains;

namespace {

struct Output {
  std::string text;  // both streams
  int status = 0;
};

// The lines go to the standard input of the stage's program.
Output run_program(const std::string& arguments, const std::vector<std::string>& lines = {}) {
  std::string command = "printf '%s\\n'";
  for (const std::string& line : lines) {
    command += " '" + line + "'";
  }
  command += " | '" + std::string(STAGE_EXECUTABLE) + "' " + arguments + " 2>&1";
  Output output;
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> buffer{};
  for (std::size_t size = 0; (size = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    output.text.append(buffer.data(), size);
  }
  output.status = pclose(pipe);
  return output;
}

// Whether the parts occur one after the other.
bool contains_in_order(const std::string& text, const std::vector<std::string>& parts) {
  std::size_t position = 0;
  for (const std::string& part : parts) {
    position = text.find(part, position);
    if (position == std::string::npos) {
      return false;
    }
    position += part.size();
  }
  return true;
}

}  // namespace

TEST_CASE("demo: three owners, two copies, and the last one writes in place") {
  const Output output = run_program("demo");
  CAPTURE(output.text);
  CHECK(output.status == 0);
  CHECK(contains_in_order(
      output.text,
      {"3333", "33--", "2 blocks, 6 in separate caches: 66.7 % saved", "> write A",
       "block 1 has other owners: copied to block 2", "position 6 is slot 10", "> write B",
       "block 1 has other owners: copied to block 3", "position 6 is slot 14", "> write C\nposition 6 is slot 6\n",
       "4 blocks, 6 in separate caches", "> free B", "1111", "111-", "2 blocks, 2 in separate caches"}));
}

TEST_CASE("demo: a shell refuses what cannot be done, in one line, and continues") {
  const Output output =
      run_program("demo --shell --slots 8 --block-size 4",
                  {"fork A B", "write A", "new A 2", "append A 2", "fork A A", "fork A", "fork A B C", "fork a B",
                   "fork A B", "fork A B", "append A 0", "append A x", "new C 5", "write B", "free C", "jump", "show"});
  CAPTURE(output.text);
  CHECK(output.status == 0);
  CHECK(contains_in_order(
      output.text,
      {"error: sequence A is not there\n", "error: sequence A is not there\n", "error: sequence A is there already\n",
       "error: ", "error: ", "error: ", "error: sequence B is there already\n",
       "error: ", "error: ", "refused: no room for 5\n", "block 0 has other owners: copied to block 1\n",
       "position 2 is slot 6\n", "error: sequence C is not there\n", "error: ", "| A        |      2 | [0] ",
       "| B        |      3 | [1] ", "used 5 of 8 reserved slots, free 0\n"}));
}

TEST_CASE("demo: a write that finds no block for its copy is refused, and works once the other owner has ended") {
  const Output output =
      run_program("demo --shell --slots 4 --block-size 4",
                  {"new A 3", "append A 3", "fork A B", "write A", "append B 1", "show", "free B", "write A"});
  CAPTURE(output.text);
  CHECK(contains_in_order(output.text,
                          {"refused: no room for 1 more\n", "refused: no room for 1 more\n", "   0  222-\n",
                           "| A        |      3 | [0] ", "| B        |      3 | [0] ", "position 3 is slot 3\n"}));
  CHECK_FALSE(contains(output.text, "copied"));
}

TEST_CASE("the summary counts a block once, and what separate caches would need") {
  stage5::KvCacheManager manager(64, 16);
  CHECK(stage5::sharing_figures(manager).separate_blocks == 0);
  REQUIRE(manager.allocate(0, 64));
  manager.commit(0, 64);
  for (const int child : {1, 2, 3}) {
    manager.fork(0, child);
  }
  for (const int sequence : {0, 1, 2, 3}) {
    REQUIRE(manager.reserve(sequence, 50));
    manager.commit(sequence, 50);
  }
  CHECK(stage5::sharing_summary(manager) ==
        "20 blocks, 32 in separate caches: 37.5 % saved; 264 slots, 456 in separate caches: 42.1 % saved");
}

TEST_CASE("counters: copies are counted where they are carried out") {
  stage5::EngineOptions options;
  options.block_size = 4;
  stage5::Engine engine(tests::small_model(), options);
  const auto copied = [&] { return common::counter(engine.counters(), "blocks_copied"); };
  const std::vector<common::Request> requests = {tests::make_request(5, 6), tests::make_request(7, 6)};
  engine.run(requests, [](int, common::Token) {});
  CHECK(copied() == 0);
  // No sample writes in the first step, which computes the prompt; in the second, three of four owners copy.
  stage5::ParallelSampling sampling(engine, requests[0], 4, 10);
  REQUIRE(sampling.step());
  CHECK(copied() == 0);
  REQUIRE(sampling.step());
  CHECK(copied() == 3);
  REQUIRE(sampling.step());
  CHECK(copied() == 3);
}
