// Linked into every program of a sanitizer build, so that they run clean: what the message layer,
// its plugins and their libraries do is theirs. Our own code has no entry here.
#include <dlfcn.h>

extern "C" {

/// Plugins stay mapped until the process ends; otherwise the stacks of what they leak cannot be named, and so
/// not be told from ours. (It hides the C library's function of this name.)
int dlclose(void*) {
  return 0;
}

#if defined(__SANITIZE_ADDRESS__)
const char* __asan_default_options() {
  // Under mpirun the tests add fast_unwind_on_malloc=0: the message layer is compiled without frame pointers,
  // and a suppression must find its name in the stack. It makes allocations many times slower.
#if defined(__clang__) || __GNUC__ >= 14
  return "detect_stack_use_after_return=1:strict_string_checks=1";
#else
  // GCC's bug 110027: the frames that this takes from the heap are not aligned as vectors of 64 bytes need.
  return "strict_string_checks=1";
#endif
}
const char* __ubsan_default_options() {
  return "print_stacktrace=1";
}
const char* __lsan_default_options() {
  return "print_suppressions=0";
}
const char* __lsan_default_suppressions() {
  return "leak:libmpi\n"
         "leak:libopen-pal\n"
         "leak:libopen-rte\n"
         "leak:libpmix\n"
         "leak:libucp\n"
         "leak:libucs\n"
         "leak:libuct\n"
         "leak:libevent\n"
         "leak:libhwloc\n"
         "leak:mca_\n"
         "leak:H5FL_\n";  // blocks of a file on a full disk, which is given up and the library then left open
}
#endif

#if defined(__SANITIZE_THREAD__)
const char* __tsan_default_suppressions() {
  // Libraries that are not compiled for the sanitizer: what they synchronize by is invisible to it.
  return "called_from_lib:libmpi.so\n"
         "called_from_lib:libopen-pal.so\n"
         "called_from_lib:libopen-rte.so\n"
         "race:mca_\n"
         "race:libpmix\n"
         "race:libevent\n"
         "race:libuc\n";
}
#endif
}
