// Where the headers of the stage under test are. The build sets STAGE_NAMESPACE (stage3), and makes "stage3/" lead to
// the stage's folder.
#pragma once

// STAGE_HEADER(engine.h) is "stage3/engine.h". It takes two macros, because # does not expand its argument.
#define TESTS_QUOTE(path) #path
// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#define TESTS_PATH(folder, file) TESTS_QUOTE(folder/file)  // NOLINT(bugprone-macro-parentheses)
// clang-format on
#define STAGE_HEADER(file) TESTS_PATH(STAGE_NAMESPACE, file)
