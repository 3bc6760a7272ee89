// Products with weights in integers: unsigned codes of 4 or 8 bits in blocks, with a scale per output and block, as files
// in GGUF have them.
//
// Weights lie in panels of 16 outputs. For every 64 inputs a panel has a head, and then the codes:
//
//     head            scales of the outputs, see the formats below; one or two lines of 64 bytes
//     4-bit codes     four lines for inputs 0 to 31, four for inputs 32 to 63. Byte 4 * output + i of line w has two codes:
//                     that of input 4 * w + i in its low half, and that of input 16 + 4 * w + i in its high half
//     8-bit codes     eight lines for either half. Byte 4 * output + i of line w is the code of input 4 * w + i
//
// Rows are signed int8 codes in blocks, with a scale for every 32 inputs, see `RowBlocks`. Sums of up to 32 products of
// codes are exact. They begin with what makes codes signed, -8 or -128 times the sum of the row's codes. Every sum adds
// one rounding to an output, scaled by the product of both scales, and so does every minimum: in the order of the inputs,
// whatever the number of rows.
//
// `dot<words, wide>` has the instructions: it adds the products of so many words of four inputs to a start; `wide` says
// that codes have 8 bits.

constexpr int64_t BLOCK_PANEL = 16, BLOCK_VECTORS = BLOCK_PANEL / LANES, BLOCK_LINES_AHEAD = 72;
constexpr int64_t FACTS = 16;  // bytes of what is known of 32 inputs of a row
#if LANES == 16  // 32 registers of 64 bytes
constexpr int64_t BLOCK_TOGETHER = 16;
#else
constexpr int64_t BLOCK_TOGETHER = 4;
#endif

struct FourBits {
    static constexpr int lines = 4, zero = 3;  // lines of 32 inputs, and the zero's power of two
    static constexpr bool wide = false;
    INLINE void read_codes(const char* place, Bits* codes) {
        UNROLL for (int line = 0; line < 4; line++) {
            const Bits both = read<Bits>(place + LINE * line);
            codes[line] = both & 0x0F0F0F0F;
            codes[line + 4] = both >> 4 & 0x0F0F0F0F;
        }
    }
};

struct EightBits {
    static constexpr int lines = 8, zero = 7;
    static constexpr bool wide = true;
    INLINE void read_codes(const char* place, Bits* codes) {
        UNROLL for (int line = 0; line < 8; line++) codes[line] = read<Bits>(place + LINE * line);
    }
};

INLINE Floats load_signed(const char* address) {
    return __builtin_convertvector((Ints)(__builtin_convertvector(read<Bytes>(address), Bits) << 24) >> 24, Floats);
}

INLINE Floats load_unsigned(const char* address) {
    return __builtin_convertvector((Ints)__builtin_convertvector(read<Bytes>(address), Bits), Floats);
}

// Formats: the lines of their heads, inputs per scale, and scale and minimum of outputs from `at` on, for 32 inputs.

// A scale in 16 bits; int8 and int4 have bfloat16, Q8_0 and Q4_0 float16.
template <class Width, int64_t kind> struct Scaled : Width {
    static constexpr int head = 1, group = 32;
    static constexpr bool has_minimum = false;
    INLINE Floats scale(const char* head, int64_t half, int, int64_t at) {
        return load_as(head + 32 * half + 2 * at, kind);
    }
    INLINE Floats minimum(const char*, int64_t, int64_t) { return Floats{}; }
};

// Q4_1 and Q5_1: scales and minima in float16, on a line each. Codes stay unsigned.
template <class Width> struct Shifted : Width {
    static constexpr int head = 2, group = 32;
    static constexpr bool has_minimum = true;
    INLINE Floats scale(const char* head, int64_t half, int, int64_t at) {
        return load_float16(head + 32 * half + 2 * at);
    }
    INLINE Floats minimum(const char* head, int64_t half, int64_t at) {
        return load_float16(head + LINE + 32 * half + 2 * at);
    }
};

// Q4_K and Q5_K: unsigned bytes, scales and minima of either half, times float16 factors on the second line.
template <class Width> struct Factored : Width {
    static constexpr int head = 2, group = 32;
    static constexpr bool has_minimum = true;
    INLINE Floats scale(const char* head, int64_t half, int, int64_t at) {
        return load_unsigned(head + 16 * half + at) * load_float16(head + LINE + 2 * at);
    }
    INLINE Floats minimum(const char* head, int64_t half, int64_t at) {
        return load_unsigned(head + 32 + 16 * half + at) * load_float16(head + LINE + 32 + 2 * at);
    }
};

// Q6_K: signed bytes for every 16 inputs, times a float16 factor on the second line.
struct Fine : EightBits {
    static constexpr int head = 2, group = 16;
    static constexpr bool has_minimum = false;
    INLINE Floats scale(const char* head, int64_t half, int part, int64_t at) {
        return load_signed(head + 32 * half + 16 * part + at) * load_float16(head + LINE + 2 * at);
    }
    INLINE Floats minimum(const char*, int64_t, int64_t) { return Floats{}; }
};

// Adds the products of 32 inputs of a row to the sums of a vector of outputs.
template <class Format>
INLINE Floats add_inputs(Floats sums, const Bits* codes, const Floats* scales, Floats minimum, const char* x, const char* facts) {
    const Floats step = broadcast(load_one(facts + 8));
    const Ints all = read<int32_t>(facts) - Ints{};
    if constexpr (Format::has_minimum) {
        const Ints sum = dot<8, Format::wide>(Ints{}, codes, x);
        sums = fma(__builtin_convertvector(sum, Floats), scales[0] * step, sums);
        return fma(minimum, broadcast(load_one(facts + 12)), sums);
    } else if constexpr (Format::group == 16) {
        const Ints first = read<int32_t>(facts + 4) - Ints{};
        const Ints one = dot<4, Format::wide>(first << Format::zero, codes, x);
        const Ints other = dot<4, Format::wide>((all - first) << Format::zero, codes + 4, x + 16);
        sums = fma(__builtin_convertvector(one, Floats), scales[0] * step, sums);
        return fma(__builtin_convertvector(other, Floats), scales[1] * step, sums);
    } else {
        const Ints sum = dot<8, Format::wide>(all << Format::zero, codes, x);
        return fma(__builtin_convertvector(sum, Floats), scales[0] * step, sums);
    }
}

// Sums [rows, 16] float32 of rows by a panel; accumulators stay in registers.
template <class Format, int rows>
static void sum_blocks(const char* x, const char* facts, const char* weight, int64_t blocks, char* to) {
    constexpr int lines = Format::head + 2 * Format::lines;
    Floats sums[rows][BLOCK_VECTORS] = {};
    for (int64_t block = 0; block < blocks; block++, x += LINE * rows, facts += 2 * FACTS * rows, weight += LINE * lines) {
        UNROLL for (int line = 0; line < lines; line++)
            __builtin_prefetch(weight + LINE * (BLOCK_LINES_AHEAD + line));
        UNROLL for (int half = 0; half < 2; half++) {
            UNROLL for (int vector = 0; vector < BLOCK_VECTORS; vector++) {
                Bits codes[8];
                Format::read_codes(weight + LINE * (Format::head + Format::lines * half) + 4 * LANES * vector, codes);
                Floats scales[32 / Format::group];
                UNROLL for (int part = 0; part < 32 / Format::group; part++)
                    scales[part] = Format::scale(weight, half, part, LANES * vector);
                const Floats minimum = Format::minimum(weight, half, LANES * vector);
                UNROLL for (int row = 0; row < rows; row++)
                    sums[row][vector] = add_inputs<Format>(sums[row][vector], codes, scales, minimum,
                        x + LINE * row + 32 * half, facts + FACTS * (half * rows + row));
            }
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int vector = 0; vector < BLOCK_VECTORS; vector++)
            store(to + 4 * (BLOCK_PANEL * row + LANES * vector), sums[row][vector]);
}

template <class Format> static void sum_blocks(
    int64_t together, const char* x, const char* facts, const char* weight, int64_t blocks, char* to) {
    switch (together) {
        case 1: return sum_blocks<Format, 1>(x, facts, weight, blocks, to);
        case 2: return sum_blocks<Format, 2>(x, facts, weight, blocks, to);
        case 4: return sum_blocks<Format, 4>(x, facts, weight, blocks, to);
#if LANES == 16
        case 6: return sum_blocks<Format, 6>(x, facts, weight, blocks, to);
        case 8: return sum_blocks<Format, 8>(x, facts, weight, blocks, to);
        case 12: return sum_blocks<Format, 12>(x, facts, weight, blocks, to);
        case 16: return sum_blocks<Format, 16>(x, facts, weight, blocks, to);
#endif
    }
}

// A panel is read from memory once, and stays in a core's cache while groups of rows pass through it.
template <class Format> static void multiply_blocks(int64_t* fields) {
    const auto product = arguments_of<PanelProduct>(fields);
    const int64_t panels = ceil_div(product.outputs, BLOCK_PANEL);
    const int64_t size = LINE * (Format::head + 2 * Format::lines) * product.blocks;
    const int64_t groups = ceil_div(panels, product.panel_group);
    alignas(64) char sums[BLOCK_TOGETHER * LINE];
    for (int64_t part; (part = next_part(fields)) < fields[1];) {
        const int64_t top = part / groups * product.row_group, first = part % groups * product.panel_group;
        const int64_t end = smaller(top + product.row_group, product.rows);
        for (int64_t panel = first; panel < smaller(first + product.panel_group, panels); panel++) {
            for (int64_t row = top; row < end; row += product.together) {
                const char* x = product.x + LINE * product.blocks * row;
                const char* facts = product.facts + 2 * FACTS * product.blocks * row;
                sum_blocks<Format>(product.together, x, facts, product.weight + size * panel, product.blocks, sums);
                write_results(product, row, smaller(product.together, end - row), BLOCK_PANEL * panel, sums, BLOCK_PANEL);
            }
        }
    }
}

// Entries of a table of kernels.
#define LADE_BLOCK_KERNELS(space, instructions)                                                          \
    {"multiply_int8", instructions, space multiply_blocks<space Scaled<space EightBits, BFLOAT16>>},     \
    {"multiply_int4", instructions, space multiply_blocks<space Scaled<space FourBits, BFLOAT16>>},      \
    {"multiply_q8_0", instructions, space multiply_blocks<space Scaled<space EightBits, FLOAT16>>},      \
    {"multiply_q4_0", instructions, space multiply_blocks<space Scaled<space FourBits, FLOAT16>>},       \
    {"multiply_q4_1", instructions, space multiply_blocks<space Shifted<space FourBits>>},               \
    {"multiply_q5_1", instructions, space multiply_blocks<space Shifted<space EightBits>>},              \
    {"multiply_q4_k", instructions, space multiply_blocks<space Factored<space FourBits>>},              \
    {"multiply_q5_k", instructions, space multiply_blocks<space Factored<space EightBits>>},             \
    {"multiply_q6_k", instructions, space multiply_blocks<space Fine>}
