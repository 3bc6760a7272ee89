// Shared by all kernels: how a function is exported from the library.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define LADE_KERNEL extern "C" __declspec(dllexport)
#else
#define LADE_KERNEL extern "C" __attribute__((visibility("default")))
#endif
