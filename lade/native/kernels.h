// Shared by all kernels: how a function is exported, and arrays as Python passes them.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define LADE_KERNEL extern "C" __declspec(dllexport)
#else
#define LADE_KERNEL extern "C" __attribute__((visibility("default")))
#endif

// Compiles a function once per instruction set; the loader selects one, which it cannot where a sanitizer is linked.
// Elsewhere the compiler's default serves.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LADE_CLONES
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && (!defined(__clang__) || __clang_major__ >= 14)
#define LADE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LADE_CLONES
#endif

#if defined(__GNUC__)
#define LADE_PREFETCH(address) __builtin_prefetch(address)
#else
#define LADE_PREFETCH(address)
#endif

namespace lade {

// A contiguous array of one or two dimensions, see `lade.native.kernel`; an array of one has no columns.
template <class T>
struct Array {
    T* data;
    int64_t rows, columns;

    T* row(int64_t at) const { return data + at * columns; }
    T& operator[](int64_t at) const { return data[at]; }
};

}  // namespace lade
