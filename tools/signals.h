// What a rank does when the system interrupts it: requests to stop, requests to end, a mapped file that
// shrinks (docs/failures.md). Uses nothing but POSIX.
#pragma once

#include <string>
#include <string_view>

namespace dsv41 {

/// First thing in main, before any thread exists: SIGUSR1 asks for a graceful stop, SIGTERM and SIGINT for an
/// end within kEndGrace; a closed pipe or a file-size limit is an error of the write, not a death; an
/// exception that nobody catches is one line and exit code 4, not a core dump.
void install_signal_handlers();

/// Once the message layer is up, which may have its own idea of SIGBUS: a mapped file that has been truncated
/// or whose disk fails is one line that names it and exit code 3. name: "rank 2 (node7)", or empty without a
/// launcher.
void install_fault_handler(const std::string& name);

/// The host rank begins a step, for the line of a rank that ends in the middle of it. phase: a literal.
void note_step(std::string_view phase);

/// Whether the generation is to end after the step in progress (SIGUSR1, SIGTERM or SIGINT was seen).
bool stop_requested();

/// The process ends with this code whatever comes: a launcher that ends what is left of a job has nothing to
/// add.
void settle_exit_code(int code);

/// SIGTERM or SIGINT if one was seen, else 0. The process then ends with 128 plus this.
int end_signal();
/// That signal for a message: "SIGTERM from the parent process (...)". May be called in a handler.
std::string_view end_cause();

/// Milliseconds from SIGTERM or SIGINT until the process ends in any case, even in the middle of a step:
/// launchers send SIGKILL after 1 s.
inline constexpr int kEndGraceMilliseconds = 700;

}  // namespace dsv41
