// Vectors of LANES float32, written out by hand: a compiler that vectorises sums must be free to reorder them, and here
// it is not. A lane depends on no other lane. Fused multiply-adds are where `fma` is written, and nowhere else.

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

// Calls a function with each of `count` items that is in one of this thread's parts. Not in cpu.h: it has to be compiled
// for the same instructions as what it calls.
template <class Act> INLINE void for_own_share(int64_t* fields, int64_t count, Act act) {
    for (int64_t part; (part = next_part(fields)) < fields[1];)
        for (int64_t item = count * part / fields[1]; item < count * (part + 1) / fields[1]; item++) act(item);
}

template <class Vector> INLINE Vector read(const char* address) {
    Vector found;
    memcpy(&found, address, sizeof found);
    return found;
}

template <class Value> INLINE void write(char* address, Value value) { memcpy(address, &value, sizeof value); }

INLINE Floats load(const char* address) { return read<Floats>(address); }
INLINE void store(char* address, Floats numbers) { write(address, numbers); }
INLINE float load_one(const char* address) { return read<float>(address); }
INLINE void store_one(char* address, float number) { write(address, number); }

INLINE Floats broadcast(float number) { return number - Floats{}; }
INLINE Bits broadcast_bits(uint32_t bits) { return bits - Bits{}; }

// a * b + c, rounded once.
INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(LADE_X86) && LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif defined(LADE_X86) && LANES == 8
    return _mm256_fmadd_ps(a, b, c);
#else
    for (int lane = 0; lane < LANES; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
}

// The larger number of each lane; b where a is NaN.
INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

INLINE Floats load_bfloat16(const char* address) {
    return (Floats)(__builtin_convertvector(read<Shorts>(address), Bits) << 16);
}

// Rounded to nearest even; NaN stays NaN.
INLINE void store_bfloat16(char* address, Floats numbers) {
    Bits bits = (Bits)numbers;
    Bits odd = (bits >> 16) & 1;
    Bits found = numbers == numbers ? (bits + (odd + 0x7FFF)) >> 16 : broadcast_bits(0x7FC0);
    write(address, __builtin_convertvector(found, Shorts));
}

INLINE Floats load_float16(const char* address) {
#if defined(LADE_X86) && LANES == 16
    return _mm512_maskz_cvtph_ps(0xFFFF, read<__m256i>(address));
#elif defined(LADE_X86) && LANES == 8
    return _mm256_cvtph_ps(read<__m128i>(address));
#else  // rebias the exponent by 112, keep infinities
    Bits bits = __builtin_convertvector(read<Shorts>(address), Bits);
    Bits sign = (bits & 0x8000) << 16, rest = (bits & 0x7FFF) << 13;
    Bits number = (Bits)((Floats)rest * 0x1p112f);
    number = rest >= 0x7C00 << 13 ? rest | 0x7F800000 : number;
    return (Floats)(number | sign);
#endif
}

// Rounded to nearest even.
INLINE void store_float16(char* address, Floats numbers) {
#if defined(LADE_X86) && LANES == 16
    write(address, _mm512_maskz_cvtps_ph(0xFFFF, numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(LADE_X86) && LANES == 8
    write(address, _mm256_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    // 2^-14 is the least normal number: below it, adding one half rounds to a multiple of 2^-24 as float32 does at 0.5.
    Bits bits = (Bits)numbers, sign = bits & 0x80000000, size = bits ^ sign;
    Bits tiny = (Bits)((Floats)size + 0.5f) - 0x3F000000;
    Bits normal = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13;
    Bits found = size < 113 << 23 ? tiny : size >= 0x477FF000 ? broadcast_bits(0x7C00) : normal;
    found = size > 0x7F800000 ? 0x7E00 | ((size >> 13) & 0x3FF) : found;
    write(address, __builtin_convertvector(found | sign >> 16, Shorts));
#endif
}

INLINE Floats load_as(const char* address, int64_t kind) {
    return kind == BFLOAT16 ? load_bfloat16(address) : kind == FLOAT16 ? load_float16(address) : load(address);
}

INLINE void store_as(char* address, Floats numbers, int64_t kind) {
    if (kind == BFLOAT16)
        store_bfloat16(address, numbers);
    else if (kind == FLOAT16)
        store_float16(address, numbers);
    else
        store(address, numbers);
}

// Up to LANES numbers, padded with zeros; nothing past them is read.
INLINE Floats load_padded(const char* address, int64_t kind, int64_t count) {
    if (count >= LANES) return load_as(address, kind);
    alignas(64) char spare[4 * LANES] = {};
    if (count > 0) memcpy(spare, address, item_size(kind) * count);
    return load_as(spare, kind);
}

// The first `count` numbers of a vector; nothing past them is written.
INLINE void store_first(char* address, Floats numbers, int64_t kind, int64_t count) {
    if (count >= LANES) return store_as(address, numbers, kind);
    alignas(64) char spare[4 * LANES];
    store_as(spare, numbers, kind);
    memcpy(address, spare, item_size(kind) * count);
}

// Lanes of two vectors, chosen by `Lane::of`: 0 to LANES - 1 are the first vector's, the others the second's.
template <class Lane, int... lanes>
INLINE Floats shuffled(Floats a, Floats b, std::integer_sequence<int, lanes...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Lane::of(lanes)...);
#else
    return __builtin_shuffle(a, b, Ints{Lane::of(lanes)...});
#endif
}

template <class Lane> INLINE Floats shuffled(Floats a, Floats b) {
    return shuffled<Lane>(a, b, std::make_integer_sequence<int, LANES>{});
}
