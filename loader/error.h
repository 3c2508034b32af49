// Typed errors of everything that reads user input. Each carries one line that says what is wrong and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace dsv41 {

/// Exit codes of the programs (docs/runtime.md, "Behaviour").
enum class ExitCode : int { Ok = 0, CheckFailed = 1, Usage = 2, Checkpoint = 3, Resources = 4, Peer = 5 };

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

/// Wrong flags, prompts, ids: exit code 2.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(ExitCode::Usage, message) {}
};

/// A missing, foreign, damaged or contradictory checkpoint: exit code 3.
class CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& message) : Error(ExitCode::Checkpoint, message) {}
};

/// Memory, disk, devices: exit code 4.
class ResourceError : public Error {
 public:
  explicit ResourceError(const std::string& message) : Error(ExitCode::Resources, message) {}
};

/// A rank that died, hangs or sends nonsense: exit code 5.
class PeerError : public Error {
 public:
  explicit PeerError(const std::string& message) : Error(ExitCode::Peer, message) {}
};

}  // namespace dsv41
