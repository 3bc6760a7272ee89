// RMS norms whose sum of squares has a fixed order, independent of neighbouring rows.

struct Norm {
    const char* x;       // rows, [rows, columns]
    const char* weight;  // [columns]
    char* found;         // the result, distinct from x
    int64_t kind;        // dtype code of all three, float32 or bfloat16
    int64_t columns;     // at least NORM_SUMS
    int64_t rows;
    int64_t epsilon, more;  // number added to the mean square, and to the weights, as float32 bits
    int64_t rounded;        // 1 to round the normalised row to its dtype before the weights multiply it
};

constexpr int64_t NORM_SUMS = 32;  // partial sums: whatever LANES is, number i is added to sum i % 32

INLINE float sum_of_squares(const char* row, int64_t kind, int64_t columns) {
    alignas(64) char sums[4 * NORM_SUMS] = {};
    for (int64_t at = 0; at < columns; at += LANES) {
        const Floats numbers = load_padded(row + item_size(kind) * at, kind, columns - at);
        char* partial = sums + 4 * (at % NORM_SUMS);
        store(partial, fma(numbers, numbers, load(partial)));
    }
    float total = 0;
    for (int64_t lane = 0; lane < NORM_SUMS; lane++) total += load_one(sums + 4 * lane);
    return total;
}

static void normalise(int64_t* fields) {
    const auto call = arguments_of<Norm>(fields);
    const int64_t parts = fields[1], kind = call.kind, item = item_size(kind);
    const float epsilon = load_one((const char*)&call.epsilon);
    const Floats more = broadcast(load_one((const char*)&call.more));
    for (int64_t part; (part = next_part(fields)) < parts;) {
        for (int64_t row = call.rows * part / parts; row < call.rows * (part + 1) / parts; row++) {
            const char* x = call.x + item * call.columns * row;
            char* found = call.found + item * call.columns * row;
            const float mean = sum_of_squares(x, kind, call.columns) / (float)call.columns;
            const Floats factor = broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
            for (int64_t at = 0; at < call.columns; at += LANES) {
                const int64_t place = item * smaller(at, call.columns - LANES);
                Floats numbers = load_as(x + place, kind) * factor + 0.0f;  // a zero is positive
                if (call.rounded && kind == BFLOAT16) {
                    alignas(64) char spare[2 * LANES];
                    store_bfloat16(spare, numbers);
                    numbers = load_bfloat16(spare);
                }
                store_as(found + place, numbers * (load_as(call.weight + place, kind) + more) + 0.0f, kind);
            }
        }
    }
}
