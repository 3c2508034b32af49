// The table of the AVX-512 backend with VBMI and GFNI.
#include "kernels/avx512_vbmi/avx512_vbmi.h"

#include "kernels/avx512/avx512.h"

namespace dsv41 {

const Ops& avx512_vbmi_ops() {
  static const Ops ops = [] {
    Ops table = avx512_ops();
    table.name = "avx512vbmi";
    table.linear_fp8 = avx512_vbmi::linear_fp8;
    table.linear_fp4 = avx512_vbmi::linear_fp4;
    return table;
  }();
  return ops;
}

}  // namespace dsv41
