// Products with int4 weights: codes from 0 to 15 that stand for -8 to 7, and a bfloat16 scale per output and 32 inputs.
//
// Weights lie in panels of 16 outputs. A panel's blocks of 64 inputs take nine lines of 64 bytes each:
//
//     line 0          scales of outputs 0 to 15 for inputs 0 to 31, then for inputs 32 to 63
//     lines 1 to 4    codes for inputs 0 to 31. Byte 4 * output + i of line 1 + w has two codes: that of input 4 * w + i
//                     in its low half, and that of input 16 + 4 * w + i in its high half
//     lines 5 to 8    codes for inputs 32 to 63, likewise
//
// Rows are signed int8 codes in blocks, see `RowBlocks`, with one scale per row. `PanelProduct::start` has for every row
// and 32 inputs -8 times the sum of the row's codes, [rows / together][2 * blocks][together] int32. From there the
// products of 32 unsigned codes are added up: an exact sum of at most 16 bits. Times a scale of 8 bits it is still exact
// in float32, so each 32 inputs add one rounding to an output, in their order, whatever the number of rows.
//
// `dot_32` has the instructions.

constexpr int64_t INT4_LINES = 9, INT4_BLOCK = INT4_LINES * LINE;  // lines and bytes of 64 inputs of a panel
constexpr int64_t INT4_AHEAD = 8 * INT4_BLOCK;                     // bytes that are prefetched ahead
constexpr int64_t INT4_PANEL = 16, INT4_VECTORS = INT4_PANEL / LANES;
#if LANES == 16  // 32 registers of 64 bytes
constexpr int64_t INT4_TOGETHER = 16;
#else
constexpr int64_t INT4_TOGETHER = 4;
#endif

// Sums [rows, 16] float32 of rows by a panel; accumulators stay in registers.
template <int rows>
static void sum_int4(const char* x, const char* starts, const char* weight, int64_t blocks, char* to) {
    Floats sums[rows][INT4_VECTORS] = {};
    for (int64_t block = 0; block < blocks; block++, x += LINE * rows, starts += 8 * rows, weight += INT4_BLOCK) {
        UNROLL for (int line = 0; line < INT4_LINES; line++) __builtin_prefetch(weight + INT4_AHEAD + LINE * line);
        UNROLL for (int half = 0; half < 2; half++) {
            UNROLL for (int vector = 0; vector < INT4_VECTORS; vector++) {
                const char* lines = weight + LINE * (1 + 4 * half) + 4 * LANES * vector;
                const Floats scale = load_bfloat16(weight + 32 * half + 2 * LANES * vector);
                Bits codes[8];
                UNROLL for (int line = 0; line < 4; line++) {
                    const Bits both = read<Bits>(lines + LINE * line);
                    codes[line] = both & 0x0F0F0F0F;
                    codes[line + 4] = both >> 4 & 0x0F0F0F0F;
                }
                UNROLL for (int row = 0; row < rows; row++) {
                    const int32_t start = read<int32_t>(starts + 4 * (half * rows + row));
                    const Ints sum = dot_32(start, codes, x + LINE * row + 32 * half);
                    sums[row][vector] = fma(__builtin_convertvector(sum, Floats), scale, sums[row][vector]);
                }
            }
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int vector = 0; vector < INT4_VECTORS; vector++)
            store(to + 4 * (INT4_PANEL * row + LANES * vector), sums[row][vector]);
}

static void sum_int4(
    int64_t together, const char* x, const char* starts, const char* weight, int64_t blocks, char* to) {
    switch (together) {
        case 1: return sum_int4<1>(x, starts, weight, blocks, to);
        case 2: return sum_int4<2>(x, starts, weight, blocks, to);
        case 4: return sum_int4<4>(x, starts, weight, blocks, to);
#if LANES == 16
        case 6: return sum_int4<6>(x, starts, weight, blocks, to);
        case 8: return sum_int4<8>(x, starts, weight, blocks, to);
        case 12: return sum_int4<12>(x, starts, weight, blocks, to);
        case 16: return sum_int4<16>(x, starts, weight, blocks, to);
#endif
    }
}

// A panel is read from memory once, and stays in a core's cache while groups of rows pass through it.
static void multiply_int4(int64_t* fields) {
    const auto product = arguments_of<PanelProduct>(fields);
    const int64_t panels = ceil_div(product.outputs, INT4_PANEL), size = INT4_BLOCK * product.blocks;
    const int64_t groups = ceil_div(panels, product.panel_group);
    alignas(64) char sums[INT4_TOGETHER * LINE];
    for (int64_t part; (part = next_part(fields)) < fields[1];) {
        const int64_t top = part / groups * product.row_group, first = part % groups * product.panel_group;
        const int64_t end = smaller(top + product.row_group, product.rows);
        for (int64_t panel = first; panel < smaller(first + product.panel_group, panels); panel++) {
            for (int64_t row = top; row < end; row += product.together) {
                const char* x = product.x + LINE * product.blocks * row;
                const char* starts = (const char*)product.start + 8 * product.blocks * row;
                sum_int4(product.together, x, starts, product.weight + size * panel, product.blocks, sums);
                write_results(product, row, smaller(product.together, end - row), INT4_PANEL * panel, sums, INT4_PANEL);
            }
        }
    }
}
