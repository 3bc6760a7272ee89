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
    constexpr int vectors = NORM_SUMS / LANES;
    Floats sums[vectors] = {};
    int64_t at = 0;
    for (; at + NORM_SUMS <= columns; at += NORM_SUMS) {
        UNROLL for (int part = 0; part < vectors; part++) {
            const Floats numbers = load_as(row + item_size(kind) * (at + LANES * part), kind);
            sums[part] = fma(numbers, numbers, sums[part]);
        }
    }
    UNROLL for (int part = 0; part < vectors; part++) {
        const int64_t begin = at + LANES * part;
        const Floats numbers = load_padded(row + item_size(kind) * begin, kind, columns - begin);
        sums[part] = fma(numbers, numbers, sums[part]);
    }
    float total = 0;
    for (int lane = 0; lane < NORM_SUMS; lane++) total += sums[lane / LANES][lane % LANES];
    return total;
}

// Normalises one row; with `kind` and `rounded` constant, the loop has no branches.
INLINE void normalise_row(const Norm& call, int64_t row, int64_t kind, bool rounded) {
    const int64_t item = item_size(kind), start = item * call.columns * row;
    const float epsilon = load_one((const char*)&call.epsilon);
    const Floats more = broadcast(load_one((const char*)&call.more));
    const float mean = sum_of_squares(call.x + start, kind, call.columns) / (float)call.columns;
    const Floats factor = broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t at = 0; at < call.columns; at += LANES) {
        const int64_t place = item * smaller(at, call.columns - LANES);
        Floats numbers = load_as(call.x + start + place, kind) * factor + 0.0f;  // a zero is positive
        if (rounded) {
            alignas(64) char spare[2 * LANES];
            store_bfloat16(spare, numbers);
            numbers = load_bfloat16(spare);
        }
        const Floats weights = load_as(call.weight + place, kind) + more;
        store_as(call.found + start + place, numbers * weights + 0.0f, kind);
    }
}

static void normalise(int64_t* fields) {
    const auto call = arguments_of<Norm>(fields);
    for_own_share(fields, call.rows, [&](int64_t row) {
        if (call.kind != BFLOAT16)
            normalise_row(call, row, 0, false);
        else if (call.rounded)
            normalise_row(call, row, BFLOAT16, true);
        else
            normalise_row(call, row, BFLOAT16, false);
    });
}
