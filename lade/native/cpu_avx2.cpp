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

// Adds products of unsigned codes and signed ones to a start. Eight pairs of codes up to 15 fit into 16 bits; wider ones
// are widened first, even and odd ones apart.
template <int words, bool wide> INLINE Ints dot(Ints start, const Bits* codes, const char* x) {
    __m256i sums = wide ? (__m256i)start : _mm256_setzero_si256();
    UNROLL for (int word = 0; word < words; word++) {
        const __m256i inputs = _mm256_set1_epi32(read<int32_t>(x + 4 * word)), line = (__m256i)codes[word];
        if (wide) {
            const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8), odd = _mm256_srai_epi16(inputs, 8);
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_and_si256(line, _mm256_set1_epi16(255)), even));
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_srli_epi16(line, 8), odd));
        } else {
            sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(line, inputs));
        }
    }
    return wide ? (Ints)sums : (Ints)_mm256_madd_epi16(sums, _mm256_set1_epi16(1)) + start;
}

#include "cpu_blocks.h"

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

// Adds products of unsigned codes and signed ones to a start.
template <int words, bool> INLINE Ints dot(Ints start, const Bits* codes, const char* x) {
    __m256i sums = (__m256i)start;
    UNROLL for (int word = 0; word < words; word++)
        sums = _mm256_dpbusd_avx_epi32(sums, (__m256i)codes[word], _mm256_set1_epi32(read<int32_t>(x + 4 * word)));
    return (Ints)sums;
}

#include "cpu_blocks.h"

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
    LADE_BLOCK_KERNELS(avx2::, "avx2"),
    {},
};
const Entry avxvnni_kernels[] = {
    LADE_BLOCK_KERNELS(avxvnni::, "avxvnni"),
    {},
};
}  // namespace lade

#endif
