// Runs a fuzz target over the files of a folder: the seed corpora are tests wherever libFuzzer is not.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  std::size_t inputs = 0;
  for (int i = 1; i < argc; ++i)
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::stringstream text;
      text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
      const std::string input = text.str();
      // Every prefix of the beginning too: truncated files are the commonest damage.
      for (std::size_t size = 0; size <= std::min<std::size_t>(input.size(), 400); ++size) {
        const std::string prefix = input.substr(0, size);
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(prefix.data()), prefix.size());
      }
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
      ++inputs;
    }
  std::cout << inputs << " inputs\n";
  return inputs == 0 ? 1 : 0;
}
