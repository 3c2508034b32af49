// Any bytes as tokenizer.json; one that loads must encode and decode text without harm.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "loader/error.h"
#include "loader/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const dsv41::Tokenizer tokenizer =
        dsv41::Tokenizer::from_json(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    tokenizer.decode(tokenizer.encode("The capital of France is Paris. 123 \xc3\xa9\xe4\xb8\xad"));
  } catch (const dsv41::Error&) {
  }
  return 0;
}
