// How the C library's heap behaves for programs that gather much and stop soon. Linux and glibc only;
// elsewhere, and under a sanitizer's heap, nothing happens.
#pragma once

namespace dsv41 {

/// One heap that starts out large, in huge pages where the system grants them, and is not given back in
/// between: tens of megabytes in small pages cost more in page faults than a header audit does by itself.
/// Call it before any thread starts.
void prepare_heap_for_bulk();

}  // namespace dsv41
