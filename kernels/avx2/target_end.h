// Closes the region that target_begin.h opened.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef DSV41_OUT_OF_LINE
