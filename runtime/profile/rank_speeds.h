// How fast the expert ranks of a run were, compared with each other.
#pragma once

#include <vector>

#include "runtime/profile/profile.h"

namespace dsv41 {

/// One positive number per position on the rank axis, their mean 1: how many calls of one kind the rank does
/// in the time in which an average rank does one. All of them 1 when the ranks are equal up to noise, or when
/// the profile cannot tell.
std::vector<double> rank_speeds(const Profile& profile);

}  // namespace dsv41
