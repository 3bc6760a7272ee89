// Operations number by number, rounded as transformers' and torch's are: residual sums and rotary positions.

struct Sum {
    const char* a;  // numbers of a dtype code, float32 or bfloat16
    const char* b;  // as many
    char* found;    // their sums
    int64_t kind, count;
};

INLINE void add_numbers(const Sum& call, int64_t first, int64_t last, int64_t kind) {
    for (int64_t at = first; at < last; at += LANES) {
        const int64_t place = item_size(kind) * at, count = last - at;
        const Floats found = load_padded(call.a + place, kind, count) + load_padded(call.b + place, kind, count);
        store_first(call.found + place, found, kind, count);
    }
}

static void add(int64_t* fields) {
    const auto call = arguments_of<Sum>(fields);
    const int64_t parts = fields[1];
    for (int64_t part; (part = next_part(fields)) < parts;) {
        const int64_t first = call.count * part / parts, last = call.count * (part + 1) / parts;
        call.kind == BFLOAT16 ? add_numbers(call, first, last, BFLOAT16) : add_numbers(call, first, last, 0);
    }
}

// Rotary positions: x * cos + turned(x) * sin, with three roundings. Number i of `turned(x)` is -x[i + D / 2], and number
// i + D / 2 is x[i].
struct Rotation {
    char* x;           // [tokens, heads, size], turned in place
    const char* cos;   // [positions, size]
    const char* sin;   // [positions, size]
    int64_t kind;      // dtype code of all three, float32 or bfloat16
    int64_t tokens, positions;  // token i has the position i % positions
    int64_t heads, size;
};

INLINE Floats turned(Floats x, Floats other, const char* cos, const char* sin, int64_t kind, int64_t count) {
    const Floats kept = rounded_to(x * load_padded(cos, kind, count), kind);
    return kept + rounded_to(other * load_padded(sin, kind, count), kind);
}

INLINE void rotate_head(char* x, const char* cos, const char* sin, int64_t kind, int64_t size) {
    const int64_t item = item_size(kind), half = size / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        const int64_t low = item * at, high = item * (half + at), count = half - at;
        const Floats first = load_padded(x + low, kind, count), second = load_padded(x + high, kind, count);
        store_first(x + low, turned(first, -second, cos + low, sin + low, kind, count), kind, count);
        store_first(x + high, turned(second, first, cos + high, sin + high, kind, count), kind, count);
    }
}

static void rotate(int64_t* fields) {
    const auto call = arguments_of<Rotation>(fields);
    const int64_t length = item_size(call.kind) * call.size;
    for_own_share(fields, call.tokens, [&](int64_t token) {
        const char *cos = call.cos + length * (token % call.positions), *sin = call.sin + length * (token % call.positions);
        for (int64_t head = 0; head < call.heads; head++) {
            char* x = call.x + length * (token * call.heads + head);
            if (call.kind == BFLOAT16)
                rotate_head(x, cos, sin, BFLOAT16, call.size);
            else
                rotate_head(x, cos, sin, 0, call.size);
        }
    });
}
