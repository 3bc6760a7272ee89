// Rows laid out in blocks: bfloat16 as they are, or quantised to int8, symmetric and scaled by each row's largest
// magnitude.

// Lays bfloat16 rows out in blocks.
static void block_rows(int64_t* fields) {
    const auto call = arguments_of<RowBlocks>(fields);
    const int64_t parts = fields[1], length = 2 * call.inputs, blocks = ceil_div(length, LINE);
    for (int64_t part; (part = next_part(fields)) < parts;) {
        for (int64_t row = call.rows * part / parts; row < call.rows * (part + 1) / parts; row++) {
            for (int64_t block = 0; block < blocks; block++) {
                char* to = call.to + block_place(row, block, call.together, blocks);
                const int64_t count = smaller(LINE, length - LINE * block);
                if (count < LINE) memset(to, 0, LINE);
                memcpy(to, call.x + length * row + LINE * block, count);
            }
        }
    }
}

// The conversion truncates, so adding one half rounds; for signed codes the offset of 128 is removed by flipping the
// sign bit.
INLINE void store_codes(char* address, Floats numbers, Floats steps, int64_t zero) {
    const Ints codes = __builtin_convertvector(numbers / steps + 128.5f, Ints) ^ (int32_t)(zero ^ 128);
    write(address, __builtin_convertvector(codes, Bytes));
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

// -8 times the sum of the signed codes of every 32 inputs.
static void write_starts(const RowBlocks& call, const char* codes, int64_t row, int64_t blocks) {
    char* starts = call.starts + 4 * (row / call.together * call.together * 2 * blocks + row % call.together);
    for (int64_t group = 0; group < 2 * blocks; group++) {
        const int8_t* from = (const int8_t*)codes + group / 2 * LINE * call.together + group % 2 * 32;
        int32_t sum = 0;
        for (int at = 0; at < 32; at++) sum += from[at];
        write(starts + 4 * group * call.together, -8 * sum);
    }
}

static void quantise_rows(int64_t* fields) {
    const auto call = arguments_of<RowBlocks>(fields);
    const int64_t parts = fields[1], item = item_size(call.kind), blocks = ceil_div(call.inputs, LINE);
    for (int64_t part; (part = next_part(fields)) < parts;) {
        for (int64_t row = call.rows * part / parts; row < call.rows * (part + 1) / parts; row++) {
            const char* x = call.x + item * call.inputs * row;
            char* codes = call.to + block_place(row, 0, call.together, blocks);
            const float size = largest_magnitude(x, call.kind, call.inputs);
            const float step = (size < 1e-30f ? 1e-30f : size) / 127.0f;  // not 0 for rows of zeros
            for (int64_t at = 0; at < blocks * LINE; at += LANES) {
                const Floats numbers = load_padded(x + item * at, call.kind, call.inputs - at);
                char* to = codes + at / LINE * LINE * call.together + at % LINE;
                store_codes(to, numbers, broadcast(step), call.zero);
            }
            store_one(call.scales + 4 * row, step);
            if (call.starts) write_starts(call, codes, row, blocks);
        }
    }
}
