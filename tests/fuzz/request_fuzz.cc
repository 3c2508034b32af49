// Any bytes as a line of --requests; one that is accepted asks for ids that the model has.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "loader/error.h"
#include "tools/requests.h"

namespace {

const std::string kModel = DSV41_TEST_CHECKPOINTS "/mini";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const dsv41::ModelConfig config = dsv41::read_config(kModel + "/config.json");
  static const dsv41::Tokenizer tokenizer(kModel + "/tokenizer.json");
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  try {
    const dsv41::GenerationRequest request = dsv41::parse_request(line, {}, tokenizer, config);
    for (const std::uint32_t id : request.prompt)
      if (id >= config.vocab_size) std::abort();
    dsv41::error_line(request.id, 1, line);
  } catch (const dsv41::Error& error) {
    dsv41::error_line("", 1, error.what());  // quotes what was wrong, whatever bytes that were
  }
  return 0;
}
