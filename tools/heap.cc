// Settings of glibc's malloc (heap.h).
#include "tools/heap.h"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace dsv41 {

void prepare_heap_for_bulk() {
#if defined(__GLIBC__)
  constexpr int kStartBytes =
      128 << 20;  // the audit of the released headers takes 70 MB; what is not touched is free
  constexpr std::uintptr_t kHugePage = 2u << 20;
  mallopt(M_ARENA_MAX, 1);  // threads of an audit allocate rarely
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 2 * kStartBytes);
  mallopt(M_TOP_PAD, kStartBytes);
  const auto before = reinterpret_cast<std::uintptr_t>(sbrk(0));
  void* volatile block =
      std::malloc(kHugePage);  // makes the heap grow by the padding; volatile: not optimized away
  std::free(block);
  const auto after = reinterpret_cast<std::uintptr_t>(sbrk(0));
  const std::uintptr_t first = (before + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = after / kHugePage * kHugePage;
  if (after - before >= kHugePage && first < last)
    madvise(reinterpret_cast<void*>(first), last - first,
            MADV_HUGEPAGE);  // a wish: whether it holds does not matter
#endif
}

}  // namespace dsv41
