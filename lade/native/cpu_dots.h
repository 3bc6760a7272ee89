// Products by dot-product instructions.
//
// An AVX-512 instruction adds to each of 16 float32 accumulators the products of two bfloat16 inputs (with VNNI, to int32
// accumulators those of four int8 inputs). Processors with AVX2 alone have eight accumulators per register, and multiply
// pairs of 16-bit integers instead of four int8 ones. An accumulator takes its inputs in order and sees no other row, so
// an output depends on its row and its weights alone, regardless of the number of rows and of how the work is split.
//
// Weights lie in panels of 16 outputs, `[N / 16][K / 32][16][16][2]` in bfloat16: panel, block of inputs, and within it
// pairs of inputs by outputs (`[N / 16][K / 64][16][16][4]` in int8, with four inputs instead of a pair):
//
//                 output 0      output 1            output 15
//     word 0    | k0  k1      | k0  k1      | ..  | k0  k1      |   64 bytes
//     word 1    | k2  k3      | k2  k3      | ..  | k2  k3      |
//     ..
//     word 15   | k30 k31     | k30 k31     | ..  | k30 k31     |
//
// A word of a row, broadcast, times a line of the panel adds to 16 outputs of that row. Up to `FEW` rows pass through a
// panel together. The panel is then read once, front to back and prefetched, so few rows take hardly longer than one.
// More rows pass in groups of `TOGETHER`, through `COLUMNS` panels at a time.
//
// `Dots` has the instructions: a vector `Sums` of accumulators, and for each of it operands and their product.

constexpr int64_t DOT_BLOCK = 64, DOT_PANEL = 16;        // bytes of inputs in a block; outputs per panel
constexpr int64_t PANEL_BLOCK = DOT_BLOCK * DOT_PANEL;   // bytes of one block of inputs of a panel
constexpr int64_t WORDS = 16, AHEAD = 8 * PANEL_BLOCK;   // words in a block; bytes that are prefetched ahead
#if LANES == 16  // 32 registers of 64 bytes; otherwise there are 16 of 32 bytes
constexpr int64_t FEW = 24, TOGETHER = 8, COLUMNS = 2;
#else
constexpr int64_t FEW = 4, TOGETHER = 4, COLUMNS = 1;
#endif

// Sums [rows, 16 * columns] of rows by panels that are `apart` bytes apart; accumulators stay in registers.
template <int rows, int columns>
INLINE void sum_up(
    const char* x, int64_t start, const char* weight, int64_t apart, int64_t blocks, char* to) {
    constexpr int size = sizeof(Dots::Sums), vectors = LINE / size * columns;
    Dots::Sums sums[rows][vectors];
    UNROLL for (int at = 0; at < vectors; at++) {
        const Dots::Sums begin = Dots::begin(start + size * at);
        UNROLL for (int row = 0; row < rows; row++) sums[row][at] = begin;
    }
    for (int64_t block = 0; block < blocks; block++, x += DOT_BLOCK * rows, weight += PANEL_BLOCK) {
        UNROLL for (int word = 0; word < WORDS; word++) {
            Dots::Weights weights[vectors];
            UNROLL for (int at = 0; at < vectors; at++) {
                const char* line = weight + at * size / LINE * apart + LINE * word;
                if (at * size % LINE == 0) __builtin_prefetch(line + AHEAD);
                weights[at] = Dots::weights(line + at * size % LINE);
            }
            UNROLL for (int row = 0; row < rows; row++) {
                const Dots::Inputs inputs = Dots::inputs(x + DOT_BLOCK * row + 4 * word);
                UNROLL for (int at = 0; at < vectors; at++)
                    sums[row][at] = Dots::add(sums[row][at], inputs, weights[at]);
            }
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int at = 0; at < vectors; at++) write(to + size * (row * vectors + at), sums[row][at]);
}

template <int rows>
static void sum_few(const char* x, int64_t start, const char* weight, int64_t blocks, char* to) {
    sum_up<rows, 1>(x, start, weight, 0, blocks, to);
}

static void sum_few(
    int64_t together, const char* x, int64_t start, const char* weight, int64_t blocks, char* to) {
    switch (together) {
        case 1: return sum_few<1>(x, start, weight, blocks, to);
        case 2: return sum_few<2>(x, start, weight, blocks, to);
        case 4: return sum_few<4>(x, start, weight, blocks, to);
#if LANES == 16
        case 6: return sum_few<6>(x, start, weight, blocks, to);
        case 8: return sum_few<8>(x, start, weight, blocks, to);
        case 12: return sum_few<12>(x, start, weight, blocks, to);
        case 16: return sum_few<16>(x, start, weight, blocks, to);
        case 24: return sum_few<24>(x, start, weight, blocks, to);
#endif
    }
}

// Few rows: bound by the time it takes to read the weights once.
static void multiply_few(int64_t* fields) {
    const auto product = arguments_of<PanelProduct>(fields);
    const int64_t panels = ceil_div(product.outputs, DOT_PANEL), size = PANEL_BLOCK * product.blocks;
    alignas(64) char sums[FEW * LINE];
    for (int64_t part; (part = next_part(fields)) < fields[1];) {
        const int64_t first = product.panel_group * part;
        for (int64_t panel = first; panel < smaller(first + product.panel_group, panels); panel++) {
            sum_few(product.together, product.x, product.start + LINE * panel, product.weight + size * panel,
                    product.blocks, sums);
            write_results(product, 0, product.rows, DOT_PANEL * panel, sums, DOT_PANEL);
        }
    }
}

// Many rows: a group of panels stays in a core's cache while a group of rows passes through it.
static void multiply_many(int64_t* fields) {
    const auto product = arguments_of<PanelProduct>(fields);
    const int64_t panels = ceil_div(product.outputs, DOT_PANEL), size = PANEL_BLOCK * product.blocks;
    const int64_t groups = ceil_div(panels, product.panel_group);
    alignas(64) char sums[COLUMNS * TOGETHER * LINE];
    for (int64_t part; (part = next_part(fields)) < fields[1];) {
        const int64_t top = part / groups * product.row_group, first = part % groups * product.panel_group;
        for (int64_t panel = first; panel < smaller(first + product.panel_group, panels); panel += COLUMNS) {
            const char* weight = product.weight + size * panel;
            const int64_t start = product.start + LINE * panel;
            const int64_t columns = smaller(COLUMNS, panels - panel);
            for (int64_t row = top; row < smaller(top + product.row_group, product.rows); row += TOGETHER) {
                const char* x = product.x + DOT_BLOCK * product.blocks * row;
                if (columns == COLUMNS)
                    sum_up<TOGETHER, COLUMNS>(x, start, weight, size, product.blocks, sums);
                else
                    sum_up<TOGETHER, 1>(x, start, weight, 0, product.blocks, sums);
                write_results(product, row, smaller(TOGETHER, product.rows - row), DOT_PANEL * panel, sums,
                              columns * DOT_PANEL);
            }
        }
    }
}
