// Names of shared memory that the message layer leaves in the file system.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace dsv41 {

/// Open MPI's shared-memory segments (one per rank of this machine) that this process has mapped and whose
/// names still exist. Empty where the message layer uses none.
std::vector<std::string> mapped_segments();

/// Removes the name of the segment of this rank among `mapped`. Memory stays for those who have mapped it,
/// and goes with the last of them, however it ends: a job that is killed as a whole leaves nothing.
/// Returns that name, empty if there was none.
std::string remove_segment_name(const std::vector<std::string>& mapped, int rank);
/// Puts an empty file in its place: at its end the message layer complains about a name that is gone.
void restore_segment_name(const std::string& name);

}  // namespace dsv41
