// Products with weights in panels: the layout of rows, see `RowBlocks`, and the epilogue.

// Bytes from the first row's first block to some block of a row.
INLINE int64_t block_place(int64_t row, int64_t block, int64_t together, int64_t blocks) {
    return LINE * (row / together * together * blocks + block * together + row % together);
}

// Adds the bias to sums [rows, columns], rounds and stores them as rows from `row` on and outputs from `output` on.
INLINE void write_results(
    const PanelProduct& product, int64_t row, int64_t rows, int64_t output, const char* sums, int64_t columns) {
    const int64_t item = item_size(product.kind), bias_item = item_size(product.bias_kind);
    const int64_t taken = smaller(columns, product.outputs - output);
    for (int64_t column = 0; column < taken; column += LANES) {
        const int64_t place = output + column, count = taken - column;
        Floats bias = {};
        if (product.bias) bias = load_padded(product.bias + bias_item * place, product.bias_kind, count);
        for (int64_t at = 0; at < rows; at++) {
            Floats found = load(sums + 4 * (at * columns + column));
            if (product.bias) found = found + bias;
            store_first(product.out + item * ((row + at) * product.outputs + place), found, product.kind, count);
        }
    }
}
