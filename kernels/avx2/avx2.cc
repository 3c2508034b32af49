// The table of the AVX2 backend: the plain one with faster entries (docs/numerics.md holds for both).
#include "kernels/avx2/avx2.h"

namespace dsv41 {

const Ops& avx2_ops() {
  static const Ops ops = [] {
    Ops table = plain_ops();
    table.name = "avx2";
    table.linear_fp8 = avx2::linear_fp8;
    table.linear_fp4 = avx2::linear_fp4;
    return table;
  }();
  return ops;
}

}  // namespace dsv41
