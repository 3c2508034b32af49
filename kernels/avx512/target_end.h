// Closes the region that target_begin.h opened.
#if !defined(DSV41_EMULATED_AVX512)
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif
#endif
#undef DSV41_OUT_OF_LINE
