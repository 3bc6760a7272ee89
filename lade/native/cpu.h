// The CPU kernels of packed layers and invariant models, compiled once for each set of instructions.
//
// A kernel takes the address of int64 fields: the index of the next part of its work (an atomic counter), the number of
// parts, and its arguments, a struct of 64-bit integers and addresses. Several threads enter a kernel at once with the
// same fields; each takes parts until none is left. Addresses are of bytes, and strides in bytes.
//
//     cpu_vectors.h        vectors of float32, as wide as the registers: loads, stores, conversions
//     cpu_exponentials.h   exp, tanh and the logistic function
//     cpu_attention.h      attention, and in cpu_norms.h RMS norms, with a fixed order of sums
//     cpu_elementwise.h    residual sums and rotary positions
//     cpu_rows.h          per-row int8 quantisation
//     cpu_panels.h         products with weights in panels: layout of rows and epilogue
//     cpu_dots.h           products by dot-product instructions; cpu_tiles.h: by AMX tiles; cpu_blocks.h: of integers
//
// Those headers have no include guard: cpu_plain.cpp, cpu_avx2.cpp and the like include them inside a namespace, with
// the instructions switched on, and list in a table what they compiled. No result depends on the width of vectors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__GNUC__) && defined(__x86_64__)
#define LADE_X86
#include <immintrin.h>
#endif

#define LADE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define LADE_BEGIN_TARGET(names) LADE_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define LADE_END_TARGET _Pragma("clang attribute pop")
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define LADE_BEGIN_TARGET(names) _Pragma("GCC push_options") LADE_PRAGMA(GCC target(names))
#define LADE_END_TARGET _Pragma("GCC pop_options")
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define INLINE static inline __attribute__((always_inline))

namespace lade {

using Kernel = void (*)(int64_t* fields);

// A kernel by name, and the instructions it was compiled for.
struct Entry {
    const char* name;
    const char* instructions;
    Kernel kernel;
};
extern const Entry plain_kernels[], avx2_kernels[], avxvnni_kernels[], avx512_kernels[], avx512vnni_kernels[],
    avx512bf16_kernels[], amx_kernels[];  // each ends with an entry without a name

constexpr const char* REFERENCE = "reference";  // instructions of products that run only when they are asked for

constexpr int64_t BFLOAT16 = 1, FLOAT16 = 2;  // codes of two-byte dtypes; float32 is 0
constexpr int64_t LINE = 64;                  // bytes of a cache line, and of 16 outputs of a product

constexpr int64_t item_size(int64_t kind) { return kind ? 2 : 4; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows, and where they are to lie in blocks.
//
// Blocks have 64 bytes of inputs (32 in bfloat16, 64 in int8), and those of a group of rows follow each other:
//
//     [rows / together][blocks][together][64 bytes]
//
// Rows that are a power of two apart would evict each other from the L1 cache. The last block is padded with zeros; rows
// that pad the last group are not written.
//
// Of every 32 int8 codes of a row, four numbers of 32 bits are noted, [rows / together][2 * blocks][together][4]: the
// negative sum of the codes, that of the first 16 of them, the value of one step, and the sum of the codes in such steps.
// The first two are integers, the others float32.
struct RowBlocks {
    const char* x;  // rows, [rows, inputs], contiguous
    char* to;       // the blocks
    char* facts;    // the numbers of each 32 codes; codes only
    int64_t kind;   // dtype code of x
    int64_t rows, inputs;
    int64_t together;  // rows interleaved in a group
};

// A product of rows in blocks with weights in panels.
struct PanelProduct {
    const char* x;       // rows in blocks
    const char* facts;   // the numbers of each 32 codes of the rows; codes only
    const char* weight;  // the panels
    const char* bias;    // [outputs]; null for none
    char* out;           // [rows, outputs]: sums, plus the bias
    int64_t bias_kind, kind;  // dtype codes of the bias and of the result
    int64_t rows, blocks, outputs;
    int64_t row_group, panel_group;  // rows (whole groups) and panels per part; few rows are all in each part
    int64_t together;                // rows interleaved in a group
};

#if defined(__GNUC__)  // other compilers lack vectors, and build no kernel of these
// The next part of a kernel's work, or the number of parts if none is left.
static inline int64_t next_part(int64_t* fields) {
    int64_t part = __atomic_fetch_add(fields, 1, __ATOMIC_ACQ_REL);  // orders `run_stages`, too
    return part < fields[1] ? part : fields[1];
}

// The arguments of a kernel, after the counter and the number of parts.
template <class Arguments> static inline Arguments arguments_of(const int64_t* fields) {
    static_assert(sizeof(void*) == 8 && sizeof(Arguments) % 8 == 0, "fields are 64-bit integers and addresses");
    Arguments arguments;
    memcpy(&arguments, fields + 2, sizeof arguments);
    return arguments;
}
#endif

}  // namespace lade
