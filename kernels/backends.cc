// The table of backends, best first. A backend is one line: its operations, what it needs, whether this CPU
// has that.
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/ops.h"
#if defined(__x86_64__)
#include "kernels/avx2/avx2.h"
#include "kernels/avx512/avx512.h"
#include "kernels/avx512_vbmi/avx512_vbmi.h"
#endif

namespace dsv41 {
namespace {

struct Entry {
  const Ops& (*ops)();
  const char* requires_features;
  bool (*usable)();
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
#endif

// __builtin_cpu_supports also asks the system whether it saves the wide registers.
constexpr Entry kBackends[] = {
#if defined(__x86_64__)
    {avx512_vbmi_ops, "AVX-512 F BW DQ VL VNNI VBMI, GFNI",
     [] { return has_avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni"); }},
    {avx512_ops, "AVX-512 F BW DQ VL VNNI", has_avx512},
    {avx2_ops, "AVX2 FMA BMI",
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
     }},
#endif
    {plain_ops, "any CPU", [] { return true; }},
};

}  // namespace

std::size_t backend_count() {
  return std::size(kBackends);
}

BackendChoice backend(std::size_t index) {
  const Entry& entry = kBackends[index];
  return {&entry.ops(), entry.requires_features, entry.usable()};
}

const Ops& find_backend(const char* name) {
  const std::string_view wanted = name;
  std::string known = "auto";
  for (std::size_t i = 0; i < backend_count(); ++i) {
    const BackendChoice choice = backend(i);
    if (choice.usable && (wanted == "auto" || wanted == choice.ops->name)) return *choice.ops;
    if (wanted == choice.ops->name)
      throw std::invalid_argument("backend '" + std::string(wanted) + "' needs " + choice.requires_features +
                                  ", which this CPU does not have; use 'auto'");
    known += std::string(", ") + choice.ops->name;
  }
  throw std::invalid_argument("no backend is called '" + std::string(wanted) + "'; there are: " + known);
}

}  // namespace dsv41
