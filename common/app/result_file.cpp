#include "common/app/result_file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <utility>

#include "common/base/check.h"

namespace common {

std::string write_failure(const std::string& path, const std::error_code& reason) {
  return "can't write to '" + path + "': " + reason.message();
}

namespace {

void check(const std::ofstream& file, const std::string& path) {
  if (!file) {
    throw InputError(write_failure(path, {errno, std::generic_category()}));
  }
}

}  // namespace

ResultFile::ResultFile(std::string path) : path_(std::move(path)) {
  if (is_wanted() && !is_stdout()) {
    std::error_code ignored;
    const bool is_new = !std::filesystem::exists(path_, ignored);
    check(std::ofstream(path_, std::ios::app), path_);
    if (is_new) {
      std::filesystem::remove(path_, ignored);
    }
  }
}

void ResultFile::write(const std::string& text) const {
  if (is_stdout()) {
    std::cout << text;
    return;
  }
  std::ofstream file(path_, std::ios::trunc);
  file << text;
  file.close();
  check(file, path_);
}

}  // namespace common
