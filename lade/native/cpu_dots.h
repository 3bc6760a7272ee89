// Products of bfloat16 by dot-product instructions, which AVX512-BF16 has.
//
// An instruction adds to each of 16 float32 accumulators the products of two inputs. An accumulator takes its inputs in
// order and sees no other row, so an output depends on its row and its weights alone, regardless of the number of rows
// and of how the work is split.
//
// Weights lie in panels of 16 outputs, `[N / 16][K / 32][16][16][2]`: panel, block of inputs, and within it pairs of inputs
// by outputs:
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

constexpr int64_t DOT_BLOCK = 64, DOT_PANEL = 16;        // bytes of inputs in a block; outputs per panel
constexpr int64_t PANEL_BLOCK = DOT_BLOCK * DOT_PANEL;   // bytes of one block of inputs of a panel
constexpr int64_t WORDS = 16, AHEAD = 8 * PANEL_BLOCK;   // words in a block; bytes that are prefetched ahead
constexpr int64_t FEW = 24, TOGETHER = 8, COLUMNS = 2;  // for 32 registers of 64 bytes

// Sums [rows, 16 * columns] of rows by panels that are `apart` bytes apart; accumulators stay in registers.
template <int rows, int columns>
INLINE void sum_up(const char* x, const char* weight, int64_t apart, int64_t blocks, char* to) {
    __m512 sums[rows][columns] = {};
    for (int64_t block = 0; block < blocks; block++, x += DOT_BLOCK * rows, weight += PANEL_BLOCK) {
        UNROLL for (int word = 0; word < WORDS; word++) {
            __m512bh weights[columns];
            UNROLL for (int at = 0; at < columns; at++) {
                const char* line = weight + at * apart + LINE * word;
                __builtin_prefetch(line + AHEAD);
                weights[at] = (__m512bh)read<__m512i>(line);
            }
            UNROLL for (int row = 0; row < rows; row++) {
                const auto inputs = (__m512bh)_mm512_set1_epi32(read<int32_t>(x + DOT_BLOCK * row + 4 * word));
                UNROLL for (int at = 0; at < columns; at++)
                    sums[row][at] = _mm512_dpbf16_ps(sums[row][at], inputs, weights[at]);
            }
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
        UNROLL for (int at = 0; at < columns; at++) write(to + LINE * (row * columns + at), sums[row][at]);
}

template <int rows>
static void sum_few(const char* x, const char* weight, int64_t blocks, char* to) {
    sum_up<rows, 1>(x, weight, 0, blocks, to);
}

static void sum_few(
    int64_t together, const char* x, const char* weight, int64_t blocks, char* to) {
    switch (together) {
        case 1: return sum_few<1>(x, weight, blocks, to);
        case 2: return sum_few<2>(x, weight, blocks, to);
        case 4: return sum_few<4>(x, weight, blocks, to);
        case 6: return sum_few<6>(x, weight, blocks, to);
        case 8: return sum_few<8>(x, weight, blocks, to);
        case 12: return sum_few<12>(x, weight, blocks, to);
        case 16: return sum_few<16>(x, weight, blocks, to);
        case 24: return sum_few<24>(x, weight, blocks, to);
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
            sum_few(product.together, product.x, product.weight + size * panel,
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
            const int64_t columns = smaller(COLUMNS, panels - panel);
            for (int64_t row = top; row < smaller(top + product.row_group, product.rows); row += TOGETHER) {
                const char* x = product.x + DOT_BLOCK * product.blocks * row;
                if (columns == COLUMNS)
                    sum_up<TOGETHER, COLUMNS>(x, weight, size, product.blocks, sums);
                else
                    sum_up<TOGETHER, 1>(x, weight, 0, product.blocks, sums);
                write_results(product, row, smaller(TOGETHER, product.rows - row), DOT_PANEL * panel, sums,
                              columns * DOT_PANEL);
            }
        }
    }
}
