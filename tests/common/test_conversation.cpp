// A conversation with an engine that says what it is told to: what is kept of it when a reply fails, and what a file
// may not do to it.
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/app/conversation.h"
#include "common/app/session.h"
#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/platform.h"
#include "common/model/default_model.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/support/catch.h"
#include "tests/support/messages.h"

using tests::contains;

namespace {

namespace fs = std::filesystem;

common::Session make_session(const common::ChatOptions& chat) {
  const auto file =
      std::make_shared<const common::Gguf>(common::Gguf::parse(common::default_model(), "the bundled model"));
  common::Session result{"tales", common::Llama(*file), common::Tokenizer(*file), {}, {common::Request{}}};
  result.requests.front().max_new_tokens = 8;
  result.file = file;
  result.chat = chat;
  return result;
}

const common::Session& session() {
  static const common::Session session = make_session({});
  return session;
}

// Replies with these texts, one after another; "!" fails, and "^C" is interrupted after a token.
struct Scripted {
  std::vector<std::string> replies;
  common::RunRequests run = [this](std::span<const common::Request> requests, const common::OnToken& on_token) {
    common::RunResult result;
    result.counters = {{"slots_total", 1024.0}};
    if (requests.empty()) {
      return result;
    }
    prompts.push_back(session().tokenizer.decode(requests.front().prompt));
    const std::string reply = replies.at(num_replies++);
    if (reply == "!") {
      result.completions.push_back({{}, common::FinishReason::kFailed, "the engine is broken"});
      return result;
    }
    if (reply == "^C") {
      on_token(0, session().tokenizer.encode("half").front());
      std::raise(SIGINT);
    }
    const std::vector<common::Token> tokens = session().tokenizer.encode(reply);
    for (const common::Token token : tokens) {
      on_token(0, token);
    }
    result.completions.push_back({tokens, common::FinishReason::kStop, ""});
    return result;
  };
  std::size_t num_replies = 0;
  std::vector<std::string> prompts = {};
};

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("conversation-" + std::to_string(std::random_device{}()))) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string text(const std::string& name) const {
    std::ifstream stream(file(name));
    return {std::istreambuf_iterator<char>(stream), {}};
  }

 private:
  fs::path path_;
};

// The replies to these lines.
std::string say(common::Conversation& conversation, const Folder& folder, const std::string& lines) {
  std::ofstream(folder.file("typed")) << lines;
  REQUIRE(std::freopen(folder.file("typed").c_str(), "r", stdin) != nullptr);
  std::cin.clear();
  std::ostringstream output;
  try {
    conversation.converse(output);
  } catch (const common::Interrupted&) {
    output << "interrupted";
  }
  return output.str();
}

// A conversation of one question, which has been saved.
struct Saved {
  explicit Saved(std::vector<std::string> replies = {"The first."})
      : engine{std::move(replies)},
        conversation(session(), engine.run, ""),
        save("/save " + folder.file("saved") + "\n") {
    say("Who?\n" + save);
    first = text();
  }
  std::string say(const std::string& lines) { return ::say(conversation, folder, lines); }
  std::string text() const { return folder.text("saved"); }

  const Folder folder;
  Scripted engine;
  common::Conversation conversation;
  std::string save;   // a line that saves it again
  std::string first;  // its text when it was saved first
};

}  // namespace

TEST_CASE("conversation: however often Ctrl-C is pressed before a reply has begun, the program goes on") {
  {
    const common::NoteInterrupts interrupts(true);
    for (int i = 0; i < 5; ++i) {
      REQUIRE(std::raise(SIGINT) == 0);
      CHECK(common::NoteInterrupts::is_noted());
    }
  }
  const common::NoteInterrupts interrupts;
  CHECK_FALSE(common::NoteInterrupts::is_noted());
}

TEST_CASE("conversation: a reply is kept until the one in its place has ended well") {
  Saved saved({"The first.", "!", "^C", "The second."});
  CHECK(contains(saved.first, "The first."));
  saved.say("/regenerate\n" + saved.save);
  CHECK(saved.engine.num_replies == 2);
  CHECK(saved.text() == saved.first);
  CHECK(contains(saved.say("/regenerate\n"), "interrupted"));
  CHECK(saved.engine.num_replies == 3);
  saved.say(saved.save);
  CHECK(saved.text() == saved.first);
  saved.say("/regenerate\n" + saved.save);
  CHECK(contains(saved.text(), "The second."));
  CHECK_FALSE(contains(saved.text(), "The first."));
}

TEST_CASE("conversation: what is saved takes the place of its own file, and of no other") {
  const Folder folder;
  Scripted engine{{"The first."}};
  common::Conversation conversation(session(), engine.run, "");
  std::ofstream(folder.file("kept.part")) << "the user's own";
  say(conversation, folder, "Who?\n/save " + folder.file("kept") + "\n");
  CHECK(contains(folder.text("kept"), "The first."));
  CHECK(folder.text("kept.part") == "the user's own");
}

TEST_CASE("conversation: what is saved has the permissions of the file in whose place it is") {
  const Folder folder;
  Scripted engine{{"The first."}};
  common::Conversation conversation(session(), engine.run, "");
  say(conversation, folder, "Who?\n");
  for (const fs::perms permissions : {fs::perms::owner_read | fs::perms::owner_write, fs::perms::owner_read}) {
    const std::string path = folder.file("private");
    fs::remove(path);
    std::ofstream(path) << "the user's own";
    fs::permissions(path, permissions);
    const bool may_write = std::ofstream(path, std::ios::app).is_open();  // root may always
    say(conversation, folder, "/save " + path + "\n");
    CHECK(contains(folder.text("private"), may_write ? "The first." : "the user's own"));
    CHECK(fs::status(path).permissions() == permissions);
  }
  const auto files = fs::directory_iterator(fs::path(folder.file("")));
  CHECK(std::distance(begin(files), end(files)) == 2);  // with what is typed: nothing else is left
}

TEST_CASE("conversation: a file's name may be as long as the system allows") {
  const Folder folder;
  Scripted engine{{"The first."}};
  common::Conversation conversation(session(), engine.run, "");
  constexpr std::size_t kMaxName = 255;
  const std::string name(kMaxName, 'n');
  say(conversation, folder, "Who?\n/save " + folder.file(name) + "\n");
  CHECK(contains(folder.text(name), "The first."));
}

TEST_CASE("conversation: a file that is nested deep is none, and changes nothing") {
  Saved saved;
  constexpr std::size_t kDepth = 200'000;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  for (const std::string& text :
       {deep, R"({"messages": [{"role": "user", "content": "x", "tokens": )" + deep + "}]}"}) {
    std::ofstream(saved.folder.file("deep")) << text;
    saved.say("/load " + saved.folder.file("deep") + "\n" + saved.save);
    CHECK(saved.text() == saved.first);
  }
}

TEST_CASE("conversation: a file that cannot be read, or has no end, is none, and changes nothing") {
  Saved saved;
  for (const char* const path : {"/proc/self/mem", "/proc/self/pagemap"}) {  // on Linux
    saved.say("/load " + std::string(path) + "\n" + saved.save);
    CHECK(saved.text() == saved.first);
  }
}

TEST_CASE(
    "conversation: a context that fills up is told, then the oldest turns are left out of prompts, never of a file") {
  const Folder folder;
  const std::string filler = [] {  // 300 tokens: three such messages fit into 1024, and a fourth does not
    std::string text;
    while (session().tokenizer.encode(text).size() < 300) {
      text += " a";
    }
    return text;
  }();
  Scripted engine{{"One.", "Two.", "Three.", "!", "Four.", "Again.", "Five."}};
  common::Conversation conversation(session(), engine.run, "Be brief.");
  CHECK_FALSE(contains(say(conversation, folder, "first" + filler + "\n"), "full"));
  CHECK_FALSE(contains(say(conversation, folder, "second" + filler + "\n"), "full"));
  CHECK(contains(
      say(conversation, folder, "third" + filler + "\n"),
      "the context of 1024 tokens is nearly full: soon the oldest messages are left out of what the model reads"));
  CHECK(contains(engine.prompts.back(), "first"));
  const std::string left_out = "[the oldest 4 messages are left out from here on: the context has 1024 tokens]";
  for (const char* const outcome : {"the engine fails", "it replies"}) {
    CAPTURE(outcome);
    const std::string told = say(conversation, folder, "fourth" + filler + "\n");
    CHECK(contains(told, left_out));
    CHECK(contains(told, "Four.") == (engine.num_replies == 5));
    CHECK_FALSE(contains(engine.prompts.back(), "first"));
    CHECK(contains(engine.prompts.back(), "Be brief."));
    CHECK(contains(engine.prompts.back(), "third"));
  }
  // They stay left out, so that a cache finds the rest.
  const std::string prompt = engine.prompts.back();
  CHECK_FALSE(contains(say(conversation, folder, "/regenerate\n"), "left out from"));
  CHECK(engine.prompts.back() == prompt);
  say(conversation, folder, "/save " + folder.file("saved") + "\n");
  for (const char* const text : {"first", "One.", "second", "third", "fourth", "Again."}) {
    CHECK(contains(folder.text("saved"), text));
  }
  say(conversation, folder, "/reset\nfifth\n");
  CHECK_FALSE(contains(engine.prompts.back(), "fourth"));
  CHECK(contains(engine.prompts.back(), "fifth"));
}

TEST_CASE("conversation: a message that fits alone has a reply, one that does not leaves nothing out") {
  const Folder folder;
  const auto of_tokens = [](std::size_t count) {
    std::string text = "king";
    while (session().tokenizer.encode(text).size() < count) {
      text += " a";
    }
    return text;
  };
  Scripted engine{{"One.", "Two.", "Three."}};
  common::Conversation conversation(session(), engine.run, "");
  std::ostringstream errors;
  std::streambuf* const usual = std::cerr.rdbuf(errors.rdbuf());
  say(conversation, folder, "Who?\n" + of_tokens(1100) + "\nWhere?\n");
  std::cerr.rdbuf(usual);
  CHECK(contains(errors.str(), "error: this message has 1"));
  CHECK(contains(engine.prompts.back(), "Who?"));
  CHECK(contains(say(conversation, folder, of_tokens(1015) + "\n"), "Three."));
  CHECK_FALSE(contains(engine.prompts.back(), "Who?"));
}

TEST_CASE("conversation: a message that is too long is counted in the chat template that was named") {
  const Folder folder;
  const common::Session named = make_session({.format = "llama2"});
  Scripted engine{{}};
  common::Conversation conversation(named, engine.run, "");
  std::string message = "a";
  while (named.tokenizer.encode(message).size() < 1020) {  // of 1024: too many with the template's marks
    message += " a";
  }
  std::ostringstream errors;
  std::streambuf* const usual = std::cerr.rdbuf(errors.rdbuf());
  say(conversation, folder, message + "\n");
  std::cerr.rdbuf(usual);
  CHECK(contains(errors.str(), "error: this message has 10"));
}
