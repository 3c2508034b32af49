// The table of the AVX-512 backend: the AVX2 one with faster entries (docs/numerics.md holds for both).
#include "kernels/avx512/avx512.h"

#include "kernels/avx2/avx2.h"

namespace dsv41 {

const Ops& avx512_ops() {
  static const Ops ops = [] {
    Ops table = avx2_ops();
    table.name = "avx512";
    table.linear_fp8 = avx512::linear_fp8;
    table.linear_fp4 = avx512::linear_fp4;
    return table;
  }();
  return ops;
}

}  // namespace dsv41
