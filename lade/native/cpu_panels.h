// Products with weights in panels: arguments, the layout of rows, and the epilogue.
//
// Rows lie in groups, and a group's blocks of 64 bytes of inputs (32 in bfloat16, 64 in int8) follow each other:
//
//     [rows / together][blocks][together][64 bytes]
//
// Rows that are a power of two apart would evict each other from the L1 cache. The last block is padded with zeros; rows
// that pad the last group are not written.

struct PanelProduct {
    const char* x;         // rows in blocks, see above
    const char* scales;    // [rows] float32, scales of the rows; int8 and int4 only
    const char* weight;    // the panels
    const char* steps;     // [outputs] float32, scales of the weights; int8 only
    const char* bias;      // [outputs]; null for none
    int64_t bias_kind;     // dtype code of the bias
    char* out;             // [rows, outputs]: sums, times `steps` and `scales` if given, plus the bias
    int64_t kind;          // dtype code of the result
    int64_t rows, blocks, outputs;
    int64_t row_group, panel_group;  // rows (whole groups) and panels per part; few rows are all in each part
    int64_t together;                // rows interleaved in a group
    int64_t start;  // address of initial sums for unsigned codes, [outputs padded] int32: -128 times the sum of an
                    // output's weights, since 128 stands for an input of zero; 0 for none. For int4 see cpu_int4.h
};

// Bytes from the first row's first block to some block of a row.
INLINE int64_t block_place(int64_t row, int64_t block, int64_t together, int64_t blocks) {
    return LINE * (row / together * together * blocks + block * together + row % together);
}

// Scales sums [rows, columns], adds the bias, rounds and stores them as rows from `row` on and outputs from `output` on.
INLINE void write_results(
    const PanelProduct& product, int64_t row, int64_t rows, int64_t output, const char* sums, int64_t columns) {
    const int64_t item = item_size(product.kind), bias_item = item_size(product.bias_kind);
    const int64_t taken = smaller(columns, product.outputs - output);
    for (int64_t column = 0; column < taken; column += LANES) {
        const int64_t place = output + column, count = taken - column;
        Floats steps = {}, bias = {};
        if (product.steps) steps = load_padded(product.steps + 4 * place, 0, count);
        if (product.bias) bias = load_padded(product.bias + bias_item * place, product.bias_kind, count);
        for (int64_t at = 0; at < rows; at++) {
            const char* sum = sums + 4 * (at * columns + column);
            Floats found = load(sum);
            if (product.steps) found = __builtin_convertvector(read<Ints>(sum), Floats) * steps;
            if (product.scales) found = found * broadcast(load_one(product.scales + 4 * (row + at)));
            if (product.bias) found = found + bias;
            store_first(product.out + item * ((row + at) * product.outputs + place), found, product.kind, count);
        }
    }
}
