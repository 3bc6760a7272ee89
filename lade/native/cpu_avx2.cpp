// CPU kernels for processors with AVX2, and with its dot products of int8.
#include "cpu.h"

#if defined(LADE_X86)
#define LANES 8

LADE_BEGIN_TARGET("avx2,fma,f16c")
namespace lade {
namespace {
namespace avx2 {

#include "cpu_vectors.h"

#include "cpu_exponentials.h"
#include "cpu_norms.h"
#include "cpu_elementwise.h"
#include "cpu_panels.h"

#include "cpu_attention.h"
#include "cpu_rows.h"

// Unsigned inputs and int8 weights without VNNI: bytes are widened to 16 bits, even and odd ones apart.
struct Dots {
    using Sums = __m256i;
    struct Pair {
        __m256i even, odd;
    };
    using Weights = Pair;
    using Inputs = Pair;
    INLINE Sums begin(int64_t start) { return read<__m256i>((const char*)start); }
    INLINE Weights weights(const char* line) {
        const __m256i bytes = read<__m256i>(line);
        return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
    }
    INLINE Inputs inputs(const char* word) {
        const __m256i bytes = _mm256_set1_epi32(read<int32_t>(word));
        return {_mm256_and_si256(bytes, _mm256_set1_epi16(255)), _mm256_srli_epi16(bytes, 8)};
    }
    INLINE Sums add(Sums sums, Inputs x, Weights weights) {
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(x.even, weights.even));
        return _mm256_add_epi32(sums, _mm256_madd_epi16(x.odd, weights.odd));
    }
};

#include "cpu_dots.h"

// Adds 32 products of unsigned codes up to 15 and signed ones to a start; eight pairs of them fit into 16 bits.
INLINE Ints dot_32(int32_t start, const Bits* codes, const char* x) {
    __m256i pairs = _mm256_setzero_si256();
    UNROLL for (int word = 0; word < 8; word++) {
        const __m256i inputs = _mm256_set1_epi32(read<int32_t>(x + 4 * word));
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes[word], inputs));
    }
    return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) + start;
}

#include "cpu_int4.h"

}  // namespace avx2
}  // namespace
}  // namespace lade
LADE_END_TARGET

LADE_BEGIN_TARGET("avx2,fma,f16c,avxvnni")
namespace lade {
namespace {
namespace avxvnni {

#include "cpu_vectors.h"

#include "cpu_panels.h"

// Unsigned inputs and int8 weights, without saturation.
struct Dots {
    using Sums = __m256i;
    using Weights = __m256i;
    using Inputs = __m256i;
    INLINE Sums begin(int64_t start) { return read<__m256i>((const char*)start); }
    INLINE Weights weights(const char* line) { return read<__m256i>(line); }
    INLINE Inputs inputs(const char* word) { return _mm256_set1_epi32(read<int32_t>(word)); }
    INLINE Sums add(Sums sums, Inputs x, Weights weights) { return _mm256_dpbusd_avx_epi32(sums, x, weights); }
};

#include "cpu_dots.h"

// Adds 32 products of unsigned codes up to 15 and signed ones to a start.
INLINE Ints dot_32(int32_t start, const Bits* codes, const char* x) {
    __m256i sums = _mm256_set1_epi32(start);
    UNROLL for (int word = 0; word < 8; word++)
        sums = _mm256_dpbusd_avx_epi32(sums, (__m256i)codes[word], _mm256_set1_epi32(read<int32_t>(x + 4 * word)));
    return (Ints)sums;
}

#include "cpu_int4.h"

}  // namespace avxvnni
}  // namespace
}  // namespace lade
LADE_END_TARGET

namespace lade {
const Entry avx2_kernels[] = {
    {"attend", "avx2", avx2::attend},
    {"normalise", "avx2", avx2::normalise},
    {"logistic_product", "avx2", avx2::logistic_product},
    {"rotate", "avx2", avx2::rotate},
    {"add", "avx2", avx2::add},
    {"quantise_rows", "avx2", avx2::quantise_rows},
    {"block_rows", "avx2", avx2::block_rows},
    {"multiply_few_codes", "avx2", avx2::multiply_few},
    {"multiply_many_codes", "avx2", avx2::multiply_many},
    {"multiply_int4", "avx2", avx2::multiply_int4},
    {},
};
const Entry avxvnni_kernels[] = {
    {"multiply_few_codes", "avxvnni", avxvnni::multiply_few},
    {"multiply_many_codes", "avxvnni", avxvnni::multiply_many},
    {"multiply_int4", "avxvnni", avxvnni::multiply_int4},
    {},
};
}  // namespace lade

#endif
