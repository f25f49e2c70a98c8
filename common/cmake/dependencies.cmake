# Finds the libraries that the course uses. Installed packages come first. A missing one is downloaded at a pinned
# version if COURSE_FETCH_DEPENDENCIES is ON; otherwise it is an error that says how to install it.

include(FetchContent)
find_package(Threads REQUIRED)

set(course_missing_packages "")

# Downloads `repository` at `tag` and sets <name>_SOURCE_DIR. Its own CMake code does not run, because SOURCE_SUBDIR
# names a folder without a CMakeLists.txt: the library's tests, documentation and options stay out of this build.
macro(course_fetch_sources name repository tag)
  message(STATUS "${name}: not installed, downloading ${tag}")
  FetchContent_Declare(${name} GIT_REPOSITORY ${repository} GIT_TAG ${tag} GIT_SHALLOW ON SOURCE_SUBDIR no_cmake_here)
  FetchContent_MakeAvailable(${name})
endmacro()

# A header-only library from its sources. Headers of imported targets are system headers, which give no warnings.
macro(course_fetch_headers target name repository tag include_folder)
  course_fetch_sources(${name} ${repository} ${tag})
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} INTERFACE ${${name}_SOURCE_DIR}/${include_folder})
endmacro()

find_package(Eigen3 3.4 QUIET NO_MODULE)
if(NOT TARGET Eigen3::Eigen)
  if(COURSE_FETCH_DEPENDENCIES)
    course_fetch_headers(Eigen3::Eigen eigen https://gitlab.com/libeigen/eigen.git 3.4.0 .)
  else()
    list(APPEND course_missing_packages libeigen3-dev)
  endif()
endif()

find_package(CLI11 2.1 QUIET)
if(NOT TARGET CLI11::CLI11)
  if(COURSE_FETCH_DEPENDENCIES)
    course_fetch_headers(CLI11::CLI11 cli11 https://github.com/CLIUtils/CLI11.git v2.4.1 include)
  else()
    list(APPEND course_missing_packages libcli11-dev)
  endif()
endif()

find_package(nlohmann_json 3.11 QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  if(COURSE_FETCH_DEPENDENCIES)
    course_fetch_headers(nlohmann_json::nlohmann_json json https://github.com/nlohmann/json.git v3.11.3 include)
  else()
    list(APPEND course_missing_packages nlohmann-json3-dev)
  endif()
endif()

# utf8proc has no CMake package in Debian and Ubuntu, so its two files are found by name.
find_path(UTF8PROC_INCLUDE_DIR utf8proc.h)
find_library(UTF8PROC_LIBRARY utf8proc)
mark_as_advanced(UTF8PROC_INCLUDE_DIR UTF8PROC_LIBRARY)
if(UTF8PROC_INCLUDE_DIR AND UTF8PROC_LIBRARY)
  add_library(course_utf8proc UNKNOWN IMPORTED GLOBAL)
  set_target_properties(course_utf8proc PROPERTIES
    IMPORTED_LOCATION ${UTF8PROC_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${UTF8PROC_INCLUDE_DIR})
elseif(COURSE_FETCH_DEPENDENCIES)
  enable_language(C)
  course_fetch_sources(utf8proc https://github.com/JuliaStrings/utf8proc.git v2.9.0)
  add_library(course_utf8proc STATIC ${utf8proc_SOURCE_DIR}/utf8proc.c)
  target_include_directories(course_utf8proc SYSTEM PUBLIC ${utf8proc_SOURCE_DIR})
  target_compile_definitions(course_utf8proc PUBLIC UTF8PROC_STATIC)
else()
  list(APPEND course_missing_packages libutf8proc-dev)
endif()

# The library is a single header.
find_path(XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(XXHASH_INCLUDE_DIR)
add_library(course_xxhash INTERFACE IMPORTED GLOBAL)
if(XXHASH_INCLUDE_DIR)
  target_include_directories(course_xxhash INTERFACE ${XXHASH_INCLUDE_DIR})
elseif(COURSE_FETCH_DEPENDENCIES)
  course_fetch_sources(xxhash https://github.com/Cyan4973/xxHash.git v0.8.2)
  target_include_directories(course_xxhash INTERFACE ${xxhash_SOURCE_DIR})
else()
  list(APPEND course_missing_packages libxxhash-dev)
endif()

# Optional: `chat` edits its lines with it. Systems without pkg-config files for it (macOS) have it too, so it is found
# by name.
find_path(LIBEDIT_INCLUDE_DIR histedit.h)
find_library(LIBEDIT_LIBRARY edit)
mark_as_advanced(LIBEDIT_INCLUDE_DIR LIBEDIT_LIBRARY)
add_library(course_libedit INTERFACE)
if(COURSE_LIBEDIT AND LIBEDIT_INCLUDE_DIR AND LIBEDIT_LIBRARY)
  target_include_directories(course_libedit SYSTEM INTERFACE ${LIBEDIT_INCLUDE_DIR})
  target_link_libraries(course_libedit INTERFACE ${LIBEDIT_LIBRARY})
  target_compile_definitions(course_libedit INTERFACE COURSE_LIBEDIT)
endif()

if(COURSE_TESTS)
  find_package(Catch2 QUIET)
  if(NOT TARGET Catch2::Catch2)
    if(COURSE_FETCH_DEPENDENCIES)
      message(STATUS "catch2: not installed, downloading v3.4.0")
      FetchContent_Declare(catch2 GIT_REPOSITORY https://github.com/catchorg/Catch2.git GIT_TAG v3.4.0 GIT_SHALLOW ON
                           SYSTEM)
      FetchContent_MakeAvailable(catch2)
    else()
      list(APPEND course_missing_packages catch2)
    endif()
  endif()
endif()

find_package(Python3 QUIET COMPONENTS Interpreter)
if(NOT Python3_Interpreter_FOUND)
  list(APPEND course_missing_packages python3)
endif()

if(course_missing_packages)
  list(JOIN course_missing_packages " " course_missing_packages)
  message(FATAL_ERROR
    "Missing libraries. Either install them:\n  sudo apt-get install ${course_missing_packages}\n"
    "or let CMake download them: add -DCOURSE_FETCH_DEPENDENCIES=ON to the configure command"
    " (python3 has to be installed in any case).")
endif()
