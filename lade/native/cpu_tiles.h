// Products by AMX tiles, registers of 16 rows of 64 bytes: bfloat16 sums in the order of the inputs.
//
// One instruction adds to each element of a tile `[16 rows, 16 outputs]` the products of 32 inputs, in an order that no
// other row affects. So an output depends on its row and its weights alone, whatever the number of rows and however the
// work is split.
//
// Weights lie in panels of 64 outputs, `[N / 64][K / 32][4][16][16][2]`: panel, block of inputs, tile, and within it pairs
// of inputs by outputs.
// The last block and the last panel are padded with zeros. So a product reads a panel front to back, one KiB per tile.
//
// Tiles 0 to 3 are accumulators, 4 and those after it hold rows, those up to 7 weights:
//
//     up to 16 rows, a whole panel:  4 x 5 6 7 5 -> 0 1 2 3       32 rows, half a panel:      6  7
//                                                                                          4  0  1
//                                                                                          5  2  3
//
// `Tiles` has the instructions: the processor's, or their definition in plain C++, which these are compared with.

constexpr int64_t TILE_ROWS = 16, TILE = 1024;  // rows of a tile, and its bytes
constexpr int64_t TILE_PANEL = 64;              // outputs per panel of weights
constexpr int64_t TILE_BLOCK = 4 * TILE;        // bytes of one block of inputs of a panel, and of four accumulators
constexpr int64_t BLOCK_INPUTS = 32;            // inputs per block
constexpr int64_t TILE_AHEAD = 2 * TILE_BLOCK;  // bytes of weights that are prefetched ahead
constexpr int64_t HALF = TILE_PANEL / 2;        // outputs of half a panel
constexpr int64_t PANEL_ROW = 4 * TILE_PANEL;   // bytes of a panel's sums

INLINE void prefetch_lines(const char* address, int64_t count) {
    for (int64_t line = 0; line < count; line++) __builtin_prefetch(address + LINE * line);
}

INLINE void zero_sums() { Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>(), Tiles::zero<3>(); }

// Stores accumulators: two `step` bytes apart, and two more of them from `below` on.
INLINE void store_sums(char* sums, int64_t stride, int64_t step, int64_t below) {
    Tiles::store<0>(sums, stride), Tiles::store<1>(sums + step, stride);
    Tiles::store<2>(sums + below, stride), Tiles::store<3>(sums + below + step, stride);
}

INLINE void store_panel(char* sums) { store_sums(sums, PANEL_ROW, LINE, 2 * LINE); }       // [rows, 64]
INLINE void store_square(char* sums) { store_sums(sums, 2 * LINE, LINE, 2 * TILE); }       // [32, 32]
INLINE void keep_sums(char* sums) { store_sums(sums, LINE, TILE, 2 * TILE); }              // tile by tile

INLINE void load_sums(const char* sums) {
    Tiles::load<0>(sums, LINE), Tiles::load<1>(sums + TILE, LINE);
    Tiles::load<2>(sums + 2 * TILE, LINE), Tiles::load<3>(sums + 3 * TILE, LINE);
}

// Accumulates one block of inputs of up to 16 rows by a whole panel, and prefetches the panel.
INLINE void add_block(const char* rows, int64_t stride, const char* weights) {
    Tiles::load<4>(rows, stride);
    prefetch_lines(weights + TILE_AHEAD, TILE_BLOCK / LINE);
    Tiles::load<5>(weights, LINE), Tiles::load<6>(weights + TILE, LINE), Tiles::load<7>(weights + 2 * TILE, LINE);
    Tiles::multiply<0, 4, 5>(), Tiles::multiply<1, 4, 6>(), Tiles::multiply<2, 4, 7>();
    Tiles::load<5>(weights + 3 * TILE, LINE);
    Tiles::multiply<3, 4, 5>();
}

// Accumulates one block of inputs of 2 x 16 rows by half a panel.
INLINE void add_square(
    const char* upper, const char* lower, int64_t stride, const char* weights) {
    Tiles::load<6>(weights, LINE), Tiles::load<4>(upper, stride);
    Tiles::multiply<0, 4, 6>();
    Tiles::load<7>(weights + TILE, LINE);
    Tiles::multiply<1, 4, 7>();
    Tiles::load<5>(lower, stride);
    Tiles::multiply<2, 5, 6>(), Tiles::multiply<3, 5, 7>();
}

// A product of bfloat16 rows that need not be laid out in blocks.
struct TileProduct {
    const char* x;       // rows, [rows, inputs], contiguous
    const char* rest;    // inputs after the last whole block, [rows, 32], padded with zeros; null for none
    const char* weight;  // the panels
    const char* bias;    // [outputs]; null for none
    char* out;           // the result, [rows, outputs], contiguous
    char* partial;       // partial sums, [halves, squares, 4, 16, 16] float32; unused if there is one chunk
    int64_t rows, inputs, outputs;
    int64_t chunk;  // blocks of inputs that pass through all panels together

    int64_t whole() const { return inputs / BLOCK_INPUTS; }
    int64_t blocks() const { return ceil_div(inputs, BLOCK_INPUTS); }
    int64_t panels() const { return ceil_div(outputs, TILE_PANEL); }
    int64_t squares() const { return ceil_div(rows, 2 * TILE_ROWS); }
    const char* half(int64_t number) const {
        return weight + TILE_BLOCK * blocks() * (number / 2) + 2 * TILE * (number % 2);
    }
    // The epilogue's view of it.
    PanelProduct results() const {
        PanelProduct product = {};
        product.bias = bias, product.bias_kind = BFLOAT16, product.out = out, product.kind = BFLOAT16;
        product.rows = rows, product.outputs = outputs;
        return product;
    }
};

// Up to 16 rows; bound by the time it takes to read the weights once.
static void multiply_few(int64_t* fields) {
    const auto product = arguments_of<TileProduct>(fields);
    const PanelProduct results = product.results();
    const int64_t whole = product.whole();
    alignas(64) char sums[TILE_BLOCK];
    Tiles::configure(product.rows);
    for_own_share(fields, product.panels(), [&](int64_t panel) {
        const char* weight = product.weight + TILE_BLOCK * product.blocks() * panel;
        zero_sums();
        for (int64_t block = 0; block < whole; block++)
            add_block(product.x + LINE * block, 2 * product.inputs, weight + TILE_BLOCK * block);
        if (product.rest) add_block(product.rest, LINE, weight + TILE_BLOCK * whole);
        store_panel(sums);
        write_results(results, 0, product.rows, TILE_PANEL * panel, sums, TILE_PANEL);
    });
    Tiles::release();
}

// Multiplies two tiles of rows by half a panel, over the input blocks from `begin` to `end`.
static void multiply_square(
    const TileProduct& product, int64_t half, int64_t square, int64_t begin, int64_t end, const char* following) {
    const int64_t whole = product.whole(), stride = 2 * product.inputs, squares = product.squares();
    const int64_t upper = larger(0, smaller(2 * TILE_ROWS * square, product.rows - 2 * TILE_ROWS));
    const int64_t lower = smaller(upper + TILE_ROWS, product.rows - TILE_ROWS);
    const char *above = product.x + stride * upper, *below = product.x + stride * lower;
    const char* weight = product.half(half);
    char* partial = product.partial + TILE_BLOCK * (squares * half + square);
    if (begin == 0)
        zero_sums();
    else
        load_sums(partial);
    for (int64_t block = begin; block < end; block++) {
        const int64_t lines = 2 * TILE / LINE, from = lines * square / squares;
        const char* ahead = squares > 1 ? following + TILE_BLOCK * (block - begin)
                                        : weight + TILE_BLOCK * block + TILE_AHEAD;
        for (int64_t line = from; line < lines * (square + 1) / squares; line++)
            __builtin_prefetch(ahead + LINE * line, 0, 2);
        add_square(above + LINE * block, below + LINE * block, stride, weight + TILE_BLOCK * block);
    }
    if (end < whole) return keep_sums(partial);
    if (product.rest)
        add_square(product.rest + LINE * upper, product.rest + LINE * lower, LINE, weight + TILE_BLOCK * end);
    alignas(64) char sums[TILE_BLOCK];
    store_square(sums);
    write_results(product.results(), upper, TILE_ROWS, HALF * half, sums, HALF);
    write_results(product.results(), lower, TILE_ROWS, HALF * half, sums + 2 * TILE, HALF);
}

// More than 16 rows: 32 of them by half a panel at a time.
//
// The last tiles of rows may overlap those before them and then write the same bits again. While rows are multiplied by
// half a panel, the next half is prefetched. With many inputs, one chunk of them passes through all halves before the
// next chunk, so that the rows' part of it stays in the cache; partial sums are kept exactly in between.
static void multiply_many(int64_t* fields) {
    const auto product = arguments_of<TileProduct>(fields);
    const int64_t parts = fields[1], whole = product.whole(), halves = ceil_div(product.outputs, HALF);
    Tiles::configure(TILE_ROWS);
    for (int64_t part; (part = next_part(fields)) < parts;) {
        const int64_t first = 2 * (product.panels() * part / parts);
        const int64_t last = 2 * (product.panels() * (part + 1) / parts);
        for (int64_t begin = 0; begin < larger(1, whole); begin += product.chunk) {
            const int64_t end = smaller(whole, begin + product.chunk);
            for (int64_t half = first; half < smaller(last, halves); half++) {
                const char* following = half + 1 == last ? product.half(first) + TILE_BLOCK * end
                                                         : product.half(half + 1) + TILE_BLOCK * begin;
                for (int64_t square = 0; square < product.squares(); square++)
                    multiply_square(product, half, square, begin, end, following);
            }
        }
    }
    Tiles::release();
}
