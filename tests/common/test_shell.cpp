// The command shell of the demonstrations: what it runs, what it refuses and how it says so.
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/app/shell.h"
#include "common/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/messages.h"

using common::CheckError;
using common::InputError;
using common::Shell;
using tests::contains;
using tests::error_of;

namespace {

// A shell with three commands, which records every call.
struct Example {
  Shell shell;
  std::vector<std::string> calls;
  std::ostringstream output;
  int num_errors = 0;

  Example() {
    shell.add("add", "NAME COUNT", "append COUNT tokens to NAME",
              [this](const Shell::Arguments& arguments, std::ostream& printed) {
                const int id = common::sequence_id(arguments[0]);
                const int count = common::parse_count(arguments[1], 1);
                calls.push_back("add " + std::to_string(id) + " " + std::to_string(count));
                printed << "added\n";
              });
    shell.add("show", "", "print the map", [this](const Shell::Arguments& arguments, std::ostream&) {
      calls.push_back("show with " + std::to_string(arguments.size()));
    });
    shell.add("say", "WORD", "print WORD",
              [this](const Shell::Arguments& arguments, std::ostream&) { calls.push_back("say " + arguments[0]); });
  }

  std::string run(const std::string& script, bool echo = false) {
    std::istringstream input(script);
    output.str("");
    num_errors = shell.run(input, output, echo);
    return output.str();
  }
};

using Calls = std::vector<std::string>;

}  // namespace

TEST_CASE("commands run in order with their arguments", "[shell]") {
  Example example;
  CHECK(example.run("add A 5\nshow\nsay hello\n") == "added\n");
  CHECK(example.calls == Calls{"add 0 5", "show with 0", "say hello"});
  CHECK(example.num_errors == 0);
}

TEST_CASE("blanks and line ends do not matter", "[shell]") {
  Example example;
  CHECK(example.run("\n   \n\t add \t B  7 \r\n\r\nshow") == "added\n");  // no line end at the end of the input
  CHECK(example.calls == Calls{"add 1 7", "show with 0"});
  CHECK(example.num_errors == 0);
  CHECK(example.run("").empty());
  CHECK(example.num_errors == 0);
}

TEST_CASE("a comment reaches from # to the end of its line", "[shell]") {
  Example example;
  CHECK(example.run("# add A 1\n   # show\nadd C 2 # and no more\nsay word# glued\n#\n") == "added\n");
  CHECK(example.calls == Calls{"add 2 2", "say word"});
  CHECK(example.num_errors == 0);
  CHECK(example.run("say # hidden\n") == "error: usage: say WORD\n");
}

TEST_CASE("a semicolon separates the commands of a line", "[shell]") {
  Example example;
  CHECK(example.run("add A 1;show ;; say word\nadd B 2; # add C 3; show\n") == "added\nadded\n");
  CHECK(example.calls == Calls{"add 0 1", "show with 0", "say word", "add 1 2"});
  CHECK(example.num_errors == 0);

  // Each command on a line is right or wrong by itself.
  CHECK(example.run("add A; add C 4; no;") ==
        "error: usage: add NAME COUNT\n"
        "added\n"
        "error: no command \"no\"; 'help' lists them\n");
  CHECK(example.num_errors == 2);

  // With echo the line is shown as it was written.
  CHECK(example.run("add A 1; add B 1", true) == "> add A 1; add B 1\nadded\nadded\n");

  example.calls.clear();
  CHECK(example.run("show; quit; show\nshow\n").empty());
  CHECK(example.calls == Calls{"show with 0"});
}

TEST_CASE("quit ends the run and leaves the rest unread", "[shell]") {
  Example example;
  std::istringstream input("show\n  quit  # enough\nshow\n");
  CHECK(example.shell.run(input, example.output, true) == 0);
  CHECK(example.calls == Calls{"show with 0"});
  CHECK(example.output.str() == "> show\n>   quit  # enough\n");
  std::string rest;
  std::getline(input, rest);
  CHECK(rest == "show");
}

TEST_CASE("with echo a script reads like a session", "[shell]") {
  Example example;
  CHECK(example.run("# two tokens\nadd A 2\n\nadd A\nshow\n", true) ==
        "> # two tokens\n"
        "> add A 2\n"
        "added\n"
        "> \n"
        "> add A\n"
        "error: usage: add NAME COUNT\n"
        "> show\n");
  CHECK(example.num_errors == 1);
}

TEST_CASE("wrong lines print an error, are counted, and change nothing", "[shell]") {
  Example example;
  CHECK(example.run("free A\n") == "error: no command \"free\"; 'help' lists them\n");
  CHECK(example.run("Add A 1\n") == "error: no command \"Add\"; 'help' lists them\n");
  CHECK(example.run("add\n") == "error: usage: add NAME COUNT\n");
  CHECK(example.run("add A\n") == "error: usage: add NAME COUNT\n");
  CHECK(example.run("add A 1 2\n") == "error: usage: add NAME COUNT\n");
  CHECK(example.run("show me\n").starts_with("error: usage: show"));
  CHECK(example.run("add a 1\n") == "error: a sequence is named by a letter from A to Z, not \"a\"\n");
  CHECK(example.run("add A none\n") == "error: expected a number from 1 up, not \"none\"\n");
  CHECK(example.calls.empty());
  CHECK(example.num_errors == 1);

  // The next line runs all the same, and every wrong one is counted.
  CHECK(example.run("nonsense\nadd A 3\nadd A 0\nshow\nadd A -1\n") ==
        "error: no command \"nonsense\"; 'help' lists them\n"
        "added\n"
        "error: expected a number from 1 up, not \"0\"\n"
        "error: expected a number from 1 up, not \"-1\"\n");
  CHECK(example.calls == Calls{"add 0 3", "show with 0"});
  CHECK(example.num_errors == 3);
}

TEST_CASE("an error is one line, whatever was typed", "[shell]") {
  Example example;
  const std::string long_word(5000, 'x');
  for (const std::string& line :
       {long_word, std::string("\x01\x1b[2J"), "add " + long_word + " 1", "add A " + long_word}) {
    const std::string answer = example.run(line + "\n");
    CHECK(example.num_errors == 1);
    CHECK(answer.starts_with("error: "));
    CHECK(answer.find('\n') == answer.size() - 1);
    CHECK(answer.size() < 200);
    CHECK(answer.find('\x1b') == std::string::npos);
  }
}

TEST_CASE("an error that is not the user's ends the run", "[shell]") {
  Example example;
  example.shell.add("break", "", "fail a check",
                    [](const Shell::Arguments&, std::ostream&) { COMMON_CHECK(false, "a bug"); });
  CHECK(contains(error_of<CheckError>([&] { example.run("show\nbreak\nshow\n"); }), "a bug"));
  CHECK(example.calls == Calls{"show with 0"});
}

TEST_CASE("help lists every command with its arguments", "[shell]") {
  Example example;
  CHECK(example.run("help\n") ==
        "  add NAME COUNT           append COUNT tokens to NAME\n"
        "  say WORD                 print WORD\n"
        "  show                     print the map\n"
        "  quit                     end the session\n");
  CHECK(example.num_errors == 0);
  CHECK(example.calls.empty());
}

TEST_CASE("adding a command again replaces it", "[shell]") {
  Example example;
  example.shell.add("show", "NAME", "print one map", [&](const Shell::Arguments& arguments, std::ostream&) {
    example.calls.push_back("show of " + arguments[0]);
  });
  CHECK(example.run("show\nshow B\n") == "error: usage: show NAME\n");
  CHECK(example.calls == Calls{"show of B"});
}

TEST_CASE("sequences are named A to Z", "[shell]") {
  CHECK(common::sequence_id("A") == 0);
  CHECK(common::sequence_id("Z") == 25);
  for (int id = 0; id < 26; ++id) {
    CHECK(common::sequence_id(std::string(1, common::sequence_name(id))) == id);
  }
  // '@' and '[' are the characters before A and after Z.
  for (const std::string_view name : {"", "a", "z", "@", "[", "AA", "A ", " A", "0", "\xC3\x84"}) {
    CHECK(contains(error_of<InputError>([&] { common::sequence_id(name); }),
                   "a sequence is named by a letter from A to Z, not \""));
  }
  CHECK(common::sequence_name(0) == 'A');
  CHECK(common::sequence_name(25) == 'Z');
  CHECK_FALSE(error_of<CheckError>([] { common::sequence_name(-1); }).empty());
  CHECK_FALSE(error_of<CheckError>([] { common::sequence_name(26); }).empty());
}

TEST_CASE("counts are whole numbers from the least allowed up", "[shell]") {
  CHECK(common::parse_count("0", 0) == 0);
  CHECK(common::parse_count("1", 1) == 1);
  CHECK(common::parse_count("007", 1) == 7);
  CHECK(common::parse_count("2147483647", 1) == std::numeric_limits<int>::max());
  CHECK(common::parse_count("-3", -3) == -3);

  const auto refusal = [](std::string_view text, int least) {
    return error_of<InputError>([&] { common::parse_count(text, least); });
  };
  CHECK(refusal("0", 1) == "expected a number from 1 up, not \"0\"");
  CHECK(refusal("-1", 0) == "expected a number from 0 up, not \"-1\"");
  CHECK(refusal("-4", -3) == "expected a number from -3 up, not \"-4\"");
  // Past either end of int, and past 64 bits: refused rather than wrapped around.
  for (const std::string_view text : {"2147483648", "-2147483649", "4294967297", "18446744073709551617"}) {
    CHECK(refusal(text, 0) == "expected a number from 0 up, not \"" + std::string(text) + "\"");
  }
  for (const std::string_view text :
       {"", " ", " 1", "1 ", "+1", "1.0", "1e3", "0x10", "12a", "a12", "--1", "-", "1,000"}) {
    CHECK(refusal(text, 0) == "expected a number from 0 up, not \"" + std::string(text) + "\"");
  }
  // A view that ends before a digit does not read on.
  CHECK(common::parse_count(std::string_view("123").substr(0, 2), 0) == 12);
}
