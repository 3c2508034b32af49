// Transcendental functions in fp64, error below 1 ulp, one source for host and device (docs/numerics.md 7).
// No libm: its last bit differs between systems. Compiled without contraction.
#pragma once

#include "kernels/formats.h"

namespace dsv41::exact {

DSV41_HOST_DEVICE double exp(double x);
DSV41_HOST_DEVICE double log1p(double x);
DSV41_HOST_DEVICE double sin(double x);
DSV41_HOST_DEVICE double cos(double x);
DSV41_HOST_DEVICE double pow(double base, double exponent);  // base > 0

}  // namespace dsv41::exact
