// Rows laid out in blocks: bfloat16 as they are, or quantised to int8, symmetric, every 32 inputs scaled by their largest
// magnitude.

// Lays bfloat16 rows out in blocks.
static void block_rows(int64_t* fields) {
    const auto call = arguments_of<RowBlocks>(fields);
    const int64_t length = 2 * call.inputs, blocks = ceil_div(length, LINE);
    for_own_share(fields, call.rows, [&](int64_t row) {
        for (int64_t block = 0; block < blocks; block++) {
            char* to = call.to + block_place(row, block, call.together, blocks);
            const int64_t count = smaller(LINE, length - LINE * block);
            if (count < LINE) memset(to, 0, LINE);
            memcpy(to, call.x + length * row + LINE * block, count);
        }
    });
}

// Stores codes, and returns their sum. The conversion truncates, so adding one half rounds; the offset of 128 is removed by
// flipping the sign bit.
INLINE int32_t store_codes(char* address, Floats numbers, Floats steps) {
    const Ints found = __builtin_convertvector(numbers / steps + 128.5f, Ints) ^ 128;
    write(address, __builtin_convertvector(found, Bytes));
    Ints signed_codes = (Ints)((Bits)found << 24) >> 24;
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += signed_codes[lane];
    return sum;
}

// Magnitudes are compared as bits without the sign, among which NaN is the largest.
INLINE float largest_magnitude(const char* x, int64_t kind, int64_t inputs) {
    Bits sizes = {};
    for (int64_t at = 0; at < inputs; at += LANES) {
        const Bits bits = (Bits)load_padded(x + item_size(kind) * at, kind, inputs - at) & INT32_MAX;
        sizes = bits > sizes ? bits : sizes;
    }
    uint32_t most = 0;
    for (int lane = 0; lane < LANES; lane++) most = sizes[lane] > most ? sizes[lane] : most;
    return load_one((const char*)&most);
}

// Rounds up to 32 inputs to codes, and notes what products need to know of them, see `RowBlocks`.
INLINE void quantise(const char* x, int64_t kind, int64_t inputs, char* to, char* facts) {
    const float size = largest_magnitude(x, kind, inputs);
    const float step = (size < 1e-30f ? 1e-30f : size) / 127.0f;  // not 0 for zeros
    int32_t sums[2] = {};  // of the first 16 codes, and of the others
    for (int64_t at = 0; at < 32; at += LANES)
        sums[at / 16] += store_codes(to + at, load_padded(x + item_size(kind) * at, kind, inputs - at), broadcast(step));
    write(facts, -(sums[0] + sums[1]));
    write(facts + 4, -sums[0]);
    store_one(facts + 8, step);
    store_one(facts + 12, step * (float)(sums[0] + sums[1]));
}

static void quantise_rows(int64_t* fields) {
    const auto call = arguments_of<RowBlocks>(fields);
    const int64_t item = item_size(call.kind), blocks = ceil_div(call.inputs, LINE);
    for_own_share(fields, call.rows, [&](int64_t row) {
        const int64_t first = row / call.together * call.together;
        for (int64_t half = 0; half < 2 * blocks; half++) {
            const int64_t inputs = smaller(32, call.inputs - 32 * half);
            char* to = call.to + block_place(row, half / 2, call.together, blocks) + half % 2 * 32;
            char* facts = call.facts + 16 * (first * 2 * blocks + half * call.together + row - first);
            quantise(call.x + item * (call.inputs * row + 32 * half), call.kind, inputs, to, facts);
        }
    });
}
