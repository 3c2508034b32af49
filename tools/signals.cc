// Handlers of signals; everything in them is async-signal-safe (signals.h; docs/failures.md).
#include "tools/signals.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "loader/error.h"

namespace dsv41 {
namespace {

static_assert(std::atomic<int>::is_always_lock_free);
std::atomic<bool> g_stop{false};
std::atomic<int> g_end_signal{0};
std::atomic<bool> g_end_by_parent{false};
std::atomic<const char*> g_phase{nullptr};
std::atomic<std::uint64_t> g_steps{0};
std::atomic<int> g_settled_code{-1};
timer_t g_end_timer;
bool g_have_end_timer = false;
std::array<char, 300> g_name{};  // "rank 2 (node7): "

/// A line put together without allocation.
class Line {
 public:
  Line& operator<<(std::string_view text) {
    const std::size_t count = std::min(text.size(), text_.size() - 1 - size_);
    std::memcpy(text_.data() + size_, text.data(), count);
    size_ += count;
    return *this;
  }
  Line& operator<<(std::uint64_t number) {
    std::array<char, 20> digits;
    std::size_t at = digits.size();
    do digits[--at] = static_cast<char>('0' + number % 10);
    while ((number /= 10) > 0);
    return *this << std::string_view(digits.data() + at, digits.size() - at);
  }
  /// To standard error, unless its reader has stopped reading.
  void write() {
    text_[size_++] = '\n';
    pollfd ready{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&ready, 1, 0) != 1 || (ready.revents & POLLOUT) == 0) return;
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text_.data(), size_);
  }

 private:
  std::array<char, 1024> text_;
  std::size_t size_ = 0;
};

Line message() {
  Line line;
  line << "dsv41-mpi: " << g_name.data();
  return line;
}

/// Ends this process from a handler. The launcher drops what it has not read when a rank ends badly: it gets
/// a moment.
[[noreturn]] void end_process(int code) {
  const timespec moment{0, 100'000'000};
  ::nanosleep(&moment, nullptr);
  ::_exit(code);
}

void on_stop(int) {
  g_stop = true;
}

void on_end(int signal, siginfo_t* information, void*) {
  g_end_by_parent = information->si_code <= 0 && information->si_pid == ::getppid();
  g_end_signal = signal;
  g_stop = true;
  if (!g_have_end_timer) ::_exit(128 + signal);
  constexpr long kNanosecondsBeforeLine = (kEndGraceMilliseconds - 100) * 1'000'000L;
  const itimerspec grace{{0, 0}, {0, kNanosecondsBeforeLine}};
  ::timer_settime(g_end_timer, 0, &grace, nullptr);
}

void on_end_timer(int) {
  if (g_settled_code >= 0) ::_exit(g_settled_code);
  const int signal = g_end_signal;
  Line line = message();
  line << "ended by " << end_cause();
  if (const char* phase = g_phase) line << " in " << phase << ", step " << g_steps.load();
  line.write();
  end_process(128 + signal);
}

/// Reads /proc/self/maps for the file that is mapped at an address. The view is into `line`.
std::string_view file_at(std::uintptr_t address, std::array<char, 512>& line) {
  const int maps = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) return {};
  std::array<char, 4096> block;
  std::size_t length = 0;
  for (ssize_t count; (count = ::read(maps, block.data(), block.size())) > 0;) {
    for (ssize_t index = 0; index < count; ++index) {
      const char letter = block[static_cast<std::size_t>(index)];
      if (letter != '\n') {
        if (length < line.size()) line[length++] = letter;
        continue;
      }
      // "begin-end rw-p offset device inode   /path"
      std::uintptr_t bounds[2] = {0, 0};
      std::size_t at = 0;
      for (std::uintptr_t& bound : bounds) {
        for (; at < length && line[at] != '-' && line[at] != ' '; ++at)
          bound = bound * 16 +
                  static_cast<std::uintptr_t>(line[at] <= '9' ? line[at] - '0' : line[at] - 'a' + 10);
        ++at;
      }
      const std::string_view text(line.data(), length);
      length = 0;
      if (address < bounds[0] || address >= bounds[1]) continue;
      ::close(maps);
      const std::size_t path = text.find('/');
      return path == std::string_view::npos ? std::string_view() : text.substr(path);
    }
  }
  ::close(maps);
  return {};
}

void on_bus_error(int signal, siginfo_t* information, void*) {
  std::array<char, 512> line;
  const std::string_view path = file_at(reinterpret_cast<std::uintptr_t>(information->si_addr), line);
  if (path.empty()) {  // not a file: an error of the program, whose core dump is wanted
    ::signal(signal, SIG_DFL);
    return;
  }
  (message() << path
             << ": truncated, replaced or unreadable while in use: give every rank files that do not change")
      .write();
  end_process(static_cast<int>(ExitCode::Checkpoint));
}

[[noreturn]] void on_terminate() {
  Line line = message();
  try {
    if (std::current_exception()) throw;
    line << "ended without an exception";
  } catch (const std::bad_alloc&) {
    line << "out of memory";
  } catch (const std::exception& error) {
    line << error.what();
  } catch (...) {
    line << "unknown failure";
  }
  line.write();
  end_process(static_cast<int>(ExitCode::Resources));
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  ::sigaction(signal, &action, nullptr);
}
void handle(int signal, void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // a write under way goes on
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

void install_signal_handlers() {
  std::set_terminate(on_terminate);
  handle(SIGPIPE, SIG_IGN);
  handle(SIGXFSZ, SIG_IGN);
  handle(SIGALRM, on_end_timer);
  sigevent event = {};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGALRM;
  g_have_end_timer = ::timer_create(CLOCK_MONOTONIC, &event, &g_end_timer) == 0;
  handle(SIGUSR1, on_stop);
  handle(SIGTERM, on_end);
  handle(SIGINT, on_end);
}

void install_fault_handler(const std::string& name) {
  if (!name.empty()) {
    const std::string prefix = name.substr(0, g_name.size() - 3) + ": ";
    std::memcpy(g_name.data(), prefix.c_str(), prefix.size() + 1);
  }
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

void note_step(std::string_view phase) {
  g_phase = phase.data();
  ++g_steps;
}

void settle_exit_code(int code) {
  g_settled_code = code;
}

bool stop_requested() {
  return g_stop;
}

int end_signal() {
  return g_end_signal;
}

std::string_view end_cause() {
  if (g_end_signal == SIGINT) return g_end_by_parent ? "SIGINT from the parent process" : "SIGINT";
  return g_end_by_parent ? "SIGTERM from the parent process (a launcher sends it when any rank has ended)"
                         : "SIGTERM";
}

}  // namespace dsv41
