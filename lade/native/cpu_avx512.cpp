// CPU kernels for processors with AVX-512, and with its dot products of int8 and of bfloat16.
#include "cpu.h"

#if defined(LADE_X86)
#define LANES 16

LADE_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
namespace lade {
namespace {
namespace avx512 {

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
    __m512i sums = wide ? (__m512i)start : _mm512_setzero_si512();
    UNROLL for (int word = 0; word < words; word++) {
        const __m512i inputs = _mm512_set1_epi32(read<int32_t>(x + 4 * word)), line = (__m512i)codes[word];
        if (wide) {
            const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(inputs, 8), 8), odd = _mm512_srai_epi16(inputs, 8);
            sums = _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_and_si512(line, _mm512_set1_epi16(255)), even));
            sums = _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_srli_epi16(line, 8), odd));
        } else {
            sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(line, inputs));
        }
    }
    return wide ? (Ints)sums : (Ints)_mm512_madd_epi16(sums, _mm512_set1_epi16(1)) + start;
}

#include "cpu_blocks.h"

}  // namespace avx512
}  // namespace
}  // namespace lade
LADE_END_TARGET

LADE_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx512vnni")
namespace lade {
namespace {
namespace avx512vnni {

#include "cpu_vectors.h"

#include "cpu_panels.h"

// Adds products of unsigned codes and signed ones to a start.
template <int words, bool> INLINE Ints dot(Ints start, const Bits* codes, const char* x) {
    __m512i sums = (__m512i)start;
    UNROLL for (int word = 0; word < words; word++)
        sums = _mm512_dpbusd_epi32(sums, (__m512i)codes[word], _mm512_set1_epi32(read<int32_t>(x + 4 * word)));
    return (Ints)sums;
}

#include "cpu_blocks.h"

}  // namespace avx512vnni
}  // namespace
}  // namespace lade
LADE_END_TARGET

LADE_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx512bf16")
namespace lade {
namespace {
namespace avx512bf16 {

#include "cpu_vectors.h"

#include "cpu_panels.h"

#include "cpu_dots.h"

}  // namespace avx512bf16
}  // namespace
}  // namespace lade
LADE_END_TARGET

namespace lade {
const Entry avx512_kernels[] = {
    {"attend", "avx512", avx512::attend},
    {"normalise", "avx512", avx512::normalise},
    {"logistic_product", "avx512", avx512::logistic_product},
    {"rotate", "avx512", avx512::rotate},
    {"add", "avx512", avx512::add},
    {"quantise_rows", "avx512", avx512::quantise_rows},
    {"block_rows", "avx512", avx512::block_rows},
    LADE_BLOCK_KERNELS(avx512::, "avx512"),
    {},
};
const Entry avx512vnni_kernels[] = {
    LADE_BLOCK_KERNELS(avx512vnni::, "avx512vnni"),
    {},
};
const Entry avx512bf16_kernels[] = {
    {"multiply_few", "avx512bf16", avx512bf16::multiply_few},
    {"multiply_many", "avx512bf16", avx512bf16::multiply_many},
    {},
};
}  // namespace lade

#endif
