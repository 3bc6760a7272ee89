// CPU kernels for processors with AMX tiles.
#include "cpu.h"

#if defined(LADE_X86)
#define LANES 16

LADE_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,amx-tile,amx-bf16")
namespace lade {
namespace {

#include "cpu_vectors.h"

#include "cpu_panels.h"

// The processor's tiles. Compilers' intrinsics take literal numbers of tiles, and not all of them say what is read.
struct Tiles {
    // Gives tiles 0 to 4 `count` rows, and the weight tiles 5 to 7 all 16; zeroes all tiles.
    INLINE void configure(int64_t count) {
        alignas(64) uint8_t shapes[64] = {1};
        for (int tile = 0; tile < 8; tile++) {
            shapes[16 + 2 * tile] = 64;
            shapes[48 + tile] = tile > 4 ? 16 : (uint8_t)count;
        }
        __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
    }
    // Makes context switches cheap again.
    INLINE void release() { __asm__ volatile("tilerelease" : : : "memory"); }
    template <int tile> INLINE void zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile)); }
    template <int tile> INLINE void load(const char* address, int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(address), "r"(stride), "i"(tile) : "memory");
    }
    template <int tile> INLINE void store(char* address, int64_t stride) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(address), "r"(stride), "i"(tile) : "memory");
    }
    template <int sums, int x, int weights> INLINE void multiply() {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(x), "i"(weights));
    }
};

#include "cpu_tiles.h"

}  // namespace

const Entry amx_kernels[] = {
    {"multiply_few_by_tiles", "amx", multiply_few},
    {"multiply_many_by_tiles", "amx", multiply_many},
    {},
};

}  // namespace lade
LADE_END_TARGET

#endif
