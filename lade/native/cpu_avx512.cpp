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

// Unsigned inputs and int8 weights without VNNI: bytes are widened to 16 bits, even and odd ones apart.
struct Dots {
    using Sums = __m512i;
    struct Pair {
        __m512i even, odd;
    };
    using Weights = Pair;
    using Inputs = Pair;
    INLINE Sums begin(int64_t start) { return read<__m512i>((const char*)start); }
    INLINE Weights weights(const char* line) {
        const __m512i bytes = read<__m512i>(line);
        return {_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
    }
    INLINE Inputs inputs(const char* word) {
        const __m512i bytes = _mm512_set1_epi32(read<int32_t>(word));
        return {_mm512_and_si512(bytes, _mm512_set1_epi16(255)), _mm512_srli_epi16(bytes, 8)};
    }
    INLINE Sums add(Sums sums, Inputs x, Weights weights) {
        sums = _mm512_add_epi32(sums, _mm512_madd_epi16(x.even, weights.even));
        return _mm512_add_epi32(sums, _mm512_madd_epi16(x.odd, weights.odd));
    }
};

#include "cpu_dots.h"

// Adds 32 products of unsigned codes up to 15 and signed ones to a start; eight pairs of them fit into 16 bits.
INLINE Ints dot_32(int32_t start, const Bits* codes, const char* x) {
    __m512i pairs = _mm512_setzero_si512();
    UNROLL for (int word = 0; word < 8; word++) {
        const __m512i inputs = _mm512_set1_epi32(read<int32_t>(x + 4 * word));
        pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)codes[word], inputs));
    }
    return (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)) + start;
}

#include "cpu_int4.h"

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

// Unsigned inputs and int8 weights, without saturation.
struct Dots {
    using Sums = __m512i;
    using Weights = __m512i;
    using Inputs = __m512i;
    INLINE Sums begin(int64_t start) { return read<__m512i>((const char*)start); }
    INLINE Weights weights(const char* line) { return read<__m512i>(line); }
    INLINE Inputs inputs(const char* word) { return _mm512_set1_epi32(read<int32_t>(word)); }
    INLINE Sums add(Sums sums, Inputs x, Weights weights) { return _mm512_dpbusd_epi32(sums, x, weights); }
};

#include "cpu_dots.h"

// Adds 32 products of unsigned codes up to 15 and signed ones to a start.
INLINE Ints dot_32(int32_t start, const Bits* codes, const char* x) {
    __m512i sums = _mm512_set1_epi32(start);
    UNROLL for (int word = 0; word < 8; word++)
        sums = _mm512_dpbusd_epi32(sums, (__m512i)codes[word], _mm512_set1_epi32(read<int32_t>(x + 4 * word)));
    return (Ints)sums;
}

#include "cpu_int4.h"

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

// Pairs of bfloat16.
struct Dots {
    using Sums = __m512;
    using Weights = __m512bh;
    using Inputs = __m512bh;
    INLINE Sums begin(int64_t) { return _mm512_setzero_ps(); }
    INLINE Weights weights(const char* line) { return (__m512bh)read<__m512i>(line); }
    INLINE Inputs inputs(const char* word) { return (__m512bh)_mm512_set1_epi32(read<int32_t>(word)); }
    INLINE Sums add(Sums sums, Inputs x, Weights weights) { return _mm512_dpbf16_ps(sums, x, weights); }
};

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
    {"multiply_few_codes", "avx512", avx512::multiply_few},
    {"multiply_many_codes", "avx512", avx512::multiply_many},
    {"multiply_int4", "avx512", avx512::multiply_int4},
    {},
};
const Entry avx512vnni_kernels[] = {
    {"multiply_few_codes", "avx512vnni", avx512vnni::multiply_few},
    {"multiply_many_codes", "avx512vnni", avx512vnni::multiply_many},
    {"multiply_int4", "avx512vnni", avx512vnni::multiply_int4},
    {},
};
const Entry avx512bf16_kernels[] = {
    {"multiply_few", "avx512bf16", avx512bf16::multiply_few},
    {"multiply_many", "avx512bf16", avx512bf16::multiply_many},
    {},
};
}  // namespace lade

#endif
