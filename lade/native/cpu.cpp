// Which instructions this processor has, and the kernels for them.
#include "cpu.h"

#include "kernels.h"

#if defined(LADE_X86)
#include <cpuid.h>
#endif
#if defined(LADE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lade {
namespace {

#if defined(LADE_X86)
struct Features {
    bool avx2 = false, avxvnni = false, avx512 = false, avx512vnni = false, avx512bf16 = false, amx = false;
};

bool has(uint32_t word, int bit) { return word >> bit & 1; }

// Asks Linux for the tiles' data, which a process has to before it uses them.
bool request_tiles() {
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

// What the processor has and the system saves when it switches threads.
Features found_features() {
    Features found;
    uint32_t a, b, c, d, saved, upper, more, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27) || !has(c, 12) || !has(c, 29)) return found;  // xgetbv, fma, f16c
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    if (a == 0 || !__get_cpuid_count(7, 1, &more, &unused, &unused, &unused)) more = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
    found.avx2 = (saved & 0x6) == 0x6 && has(b, 5);
    found.avxvnni = found.avx2 && has(more, 4);
    found.avx512 = found.avx2 && (saved & 0xE0) == 0xE0 && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);
    found.avx512vnni = found.avx512 && has(c, 11);
    found.avx512bf16 = found.avx512 && has(more, 5);
    const bool tiles = has(d, 22) && has(d, 24) && has(d, 25);
    found.amx = found.avx512 && (saved & 0x60000) == 0x60000 && tiles && request_tiles();
    return found;
}
#endif

Kernel find(const Entry* entries, const char* name, const char* instructions) {
    for (; entries->name; entries++) {
        const bool wanted = *instructions ? !strcmp(entries->instructions, instructions)
                                          : strcmp(entries->instructions, REFERENCE) != 0;
        if (wanted && !strcmp(entries->name, name)) return entries->kernel;
    }
    return nullptr;
}

}  // namespace
}  // namespace lade

// Returns the kernel of a name for given instructions, or for the best that this processor has if these are empty; null
// if there is none. Products for any processor, named "reference", are only found when they are asked for.
LADE_KERNEL void* lade_cpu_kernel([[maybe_unused]] const char* name, [[maybe_unused]] const char* instructions) {
    using namespace lade;
    Kernel kernel = nullptr;
#if defined(LADE_X86)
    static const Features features = found_features();
    const std::pair<bool, const Entry*> tables[] = {
        {features.amx, amx_kernels},         {features.avx512bf16, avx512bf16_kernels},
        {features.avx512vnni, avx512vnni_kernels}, {features.avx512, avx512_kernels},
        {features.avxvnni, avxvnni_kernels}, {features.avx2, avx2_kernels},
    };
    for (const auto& [available, entries] : tables)
        if (available && !kernel) kernel = find(entries, name, instructions);
#endif
#if defined(__GNUC__)
    if (!kernel) kernel = find(plain_kernels, name, instructions);
#endif
    return (void*)kernel;
}
