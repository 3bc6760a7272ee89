// Attention in which each query executes the same instructions whatever its neighbours.
//
// - A score is a chain of fused multiply-adds over the head dimension, first to last.
// - The row maximum is taken over all keys, which rounds nothing.
// - Softmax weights, and weighted values, are summed from the first key to the last. A masked key has weight zero and
//   adds nothing, so a node of a tree gets the sums of plain decoding.
//
// So a lane depends on its query and the keys it sees, on nothing else: not on its lane index, the number of queries,
// the position of keys in memory, or how the work is split.
//
// A work item is a block of queries of one KV head. Four queries are a quad; quads lie number by number, [D, 4], and
// their scores in tiles, [slots / LANES][4][LANES]:
//
//     query 0   k0 k1 .. k15        query 0   k16 k17 ..
//     query 1   k0 k1 .. k15        query 1   k16 k17 ..
//     query 2   k0 k1 .. k15        query 2   ...
//     query 3   k0 k1 .. k15        query 3   ...
//
// 64 keys, or values, are converted to float32 at a time.

constexpr int64_t QUAD = 4;            // queries that pass through the keys together
constexpr int64_t WIDE = 2 * LANES;    // columns of the micro-kernel; rows of a chunk are padded to a multiple
constexpr int64_t CHUNK = 64;          // keys converted to float32 at a time
constexpr int64_t VECTOR = 4 * LANES;  // bytes
typedef float FloatsOfQuad __attribute__((vector_size(4 * QUAD)));

// Queries, keys or values: vectors of numbers of a dtype code, by row of the batch, head and token.
struct States {
    const char* address;
    int64_t row, head, step;  // strides
    int64_t kind;             // dtype code
};

struct AttentionCall {
    char* scratch;         // per part `scratch_size` float32 numbers
    int64_t scratch_size;  // of one part
    int64_t scale, cap;    // factor of the scores; logit soft cap: s becomes cap * tanh(s / cap), 0 for none; bits
    States query;          // [B, H, S, D]
    States key;            // [B, Hkv, K, D]
    States value;          // [B, Hkv, K, Dv]
    const char* allowed;   // mask, [B, S, K] bytes, nonzero where a query sees a key
    int64_t allowed_row, allowed_step;  // strides of the mask
    const int64_t* spans;  // [B, S, 2]: first key that a query sees, and one past its last
    const char* sinks;     // attention sinks, [H] float32; null if there are none
    char* out;             // the result, [B, S, H, Dv], contiguous
    int64_t out_kind;      // dtype code of the result, float32 or bfloat16
    int64_t rows, heads, group, step, size, value_size;  // B, Hkv, H / Hkv, S, D, Dv; R is S * H / Hkv
    int64_t block;         // how many of the R rows make one work item, a multiple of QUAD
    int64_t blocks;        // number of work items that R is split into
    int64_t slots;         // K, padded to a multiple of CHUNK
};

// A work item, and the scratch memory of the thread that computes it.
struct Item {
    const AttentionCall& call;
    int64_t row, head, begin, count;  // `count` of the R rows, from `begin` on
    int64_t first, last;              // keys that any of them sees
    char *floats, *turned;            // converted keys or values, and keys transposed
    char *queries, *tiles, *sums, *totals;

    // Token and query head of a row; rows that pad a quad repeat the last one.
    int64_t token(int64_t at) const { return (begin + smaller(at, count - 1)) / call.group; }
    int64_t member(int64_t at) const { return (begin + smaller(at, count - 1)) % call.group; }
};

template <int distance> struct Upper {
    static constexpr int of(int lane) { return lane & distance ? lane - distance + LANES : lane; }
};
template <int distance> struct Lower {
    static constexpr int of(int lane) { return lane & distance ? lane + LANES : lane + distance; }
};
template <int half> struct Alternating {
    static constexpr int of(int lane) { return lane % 2 * LANES + half * LANES / 2 + lane / 2; }
};
template <int half> struct PairsAlternating {
    static constexpr int of(int lane) { return lane / 2 % 2 * LANES + half * LANES / 2 + lane / 4 * 2 + lane % 2; }
};

template <int distance> INLINE void swap_blocks(Floats (&rows)[LANES]) {
    UNROLL for (int row = 0; row < LANES; row++) {
        if (row & distance) continue;
        const Floats upper = rows[row], lower = rows[row + distance];
        rows[row] = shuffled<Upper<distance>>(upper, lower);
        rows[row + distance] = shuffled<Lower<distance>>(upper, lower);
    }
    if constexpr (distance > 1) swap_blocks<distance / 2>(rows);
}

// Transposes a block [LANES, LANES]: swaps off-diagonal blocks, halves first, single numbers last.
INLINE void transpose(const char* address, int64_t step, char* to, int64_t to_step) {
    Floats rows[LANES];
    UNROLL for (int row = 0; row < LANES; row++) rows[row] = load(address + step * row);
    swap_blocks<LANES / 2>(rows);
    UNROLL for (int row = 0; row < LANES; row++) store(to + to_step * row, rows[row]);
}

// Transposes a tile [4, LANES] to [LANES, 4] in place.
INLINE void make_quads(char* tile) {
    const Floats a = load(tile), b = load(tile + VECTOR), c = load(tile + 2 * VECTOR), d = load(tile + 3 * VECTOR);
    const Floats ab = shuffled<Alternating<0>>(a, b), more_ab = shuffled<Alternating<1>>(a, b);
    const Floats cd = shuffled<Alternating<0>>(c, d), more_cd = shuffled<Alternating<1>>(c, d);
    store(tile, shuffled<PairsAlternating<0>>(ab, cd));
    store(tile + VECTOR, shuffled<PairsAlternating<1>>(ab, cd));
    store(tile + 2 * VECTOR, shuffled<PairsAlternating<0>>(more_ab, more_cd));
    store(tile + 3 * VECTOR, shuffled<PairsAlternating<1>>(more_ab, more_cd));
}

// Accumulates a quad [depth, 4] times `columns` columns of [depth, width] into tiles.
INLINE void multiply(
    const char* left, const char* right, int64_t width, int64_t columns, int64_t depth, char* tiles) {
    for (int64_t column = 0; column < columns; column += WIDE) {
        char* tile = tiles + 4 * QUAD * column;
        Floats a = load(tile), b = load(tile + VECTOR), c = load(tile + 2 * VECTOR), d = load(tile + 3 * VECTOR);
        Floats e = load(tile + 4 * VECTOR), f = load(tile + 5 * VECTOR);
        Floats g = load(tile + 6 * VECTOR), h = load(tile + 7 * VECTOR);
        for (int64_t at = 0; at < depth; at++) {
            const char *row = right + 4 * (at * width + column), *quad = left + 4 * QUAD * at;
            const Floats x = load(row), y = load(row + VECTOR);
            const Floats p = broadcast(load_one(quad)), q = broadcast(load_one(quad + 4));
            const Floats r = broadcast(load_one(quad + 8)), s = broadcast(load_one(quad + 12));
            a = fma(p, x, a), b = fma(q, x, b), c = fma(r, x, c), d = fma(s, x, d);
            e = fma(p, y, e), f = fma(q, y, f), g = fma(r, y, g), h = fma(s, y, h);
        }
        store(tile, a), store(tile + VECTOR, b), store(tile + 2 * VECTOR, c), store(tile + 3 * VECTOR, d);
        store(tile + 4 * VECTOR, e), store(tile + 5 * VECTOR, f);
        store(tile + 6 * VECTOR, g), store(tile + 7 * VECTOR, h);
    }
}

// Converts `count` rows of a cache to float32, [count, padded size].
INLINE void convert(
    const char* address, int64_t step, int64_t kind, int64_t count, int64_t size, char* floats) {
    const int64_t width = ceil_div(size, WIDE) * WIDE, item = item_size(kind), whole = size / LANES * LANES;
    for (int64_t key = 0; key < count; key++) {
        const char* row = address + key * step;
        char* to = floats + 4 * width * key;
        for (int64_t at = 0; at < whole; at += LANES) store(to + 4 * at, load_as(row + item * at, kind));
        if (whole < size) store(to + 4 * whole, load_padded(row + item * whole, kind, size - whole));
    }
}

static void convert(const States& states, const char* address, int64_t count, int64_t size, char* floats) {
    if (states.kind == BFLOAT16)
        convert(address, states.step, BFLOAT16, count, size, floats);
    else if (states.kind == FLOAT16)
        convert(address, states.step, FLOAT16, count, size, floats);
    else
        convert(address, states.step, 0, count, size, floats);
}

INLINE const char* keys_of(const Item& item, const States& states) {
    return states.address + item.row * states.row + item.head * states.head + item.first * states.step;
}

// Loads and scales queries into quads [R / 4, D, 4]; padding rows may be overwritten.
INLINE void load_queries(const Item& item, float scale) {
    const AttentionCall& call = item.call;
    const States& query = call.query;
    for (int64_t first = 0; first < item.count; first += QUAD) {
        for (int64_t at = 0; at < call.size; at += LANES) {
            char* tile = item.queries + 4 * (first * call.size + QUAD * at);
            for (int64_t place = first; place < first + QUAD; place++) {
                const int64_t head = item.head * call.group + item.member(place);
                const char* numbers = query.address + item.row * query.row + head * query.head +
                                      item.token(place) * query.step + item_size(query.kind) * at;
                const Floats found = load_padded(numbers, query.kind, call.size - at);
                store(tile + VECTOR * (place - first), broadcast(scale) * found);
            }
            make_quads(tile);
        }
    }
}

// Computes the scores of all keys into tiles [R / 4, slots / LANES, 4, LANES].
static inline void score(const Item& item) {
    const AttentionCall& call = item.call;
    const int64_t count = item.last - item.first, width = ceil_div(call.size, WIDE) * WIDE;
    for (int64_t first = 0; first < count; first += CHUNK) {
        const int64_t some = smaller(CHUNK, count - first), columns = ceil_div(some, WIDE) * WIDE;
        convert(call.key, keys_of(item, call.key) + first * call.key.step, some, call.size, item.floats);
        for (int64_t key = 0; key < some; key += LANES)
            for (int64_t at = 0; at < call.size; at += LANES)
                transpose(item.floats + 4 * (key * width + at), 4 * width, item.turned + 4 * (at * CHUNK + key),
                          4 * CHUNK);
        for (int64_t quad = 0; quad < item.count; quad += QUAD) {
            char* to = item.tiles + 4 * (quad * call.slots + QUAD * first);
            memset(to, 0, 4 * QUAD * columns);
            multiply(item.queries + 4 * quad * call.size, item.turned, CHUNK, columns, call.size, to);
        }
    }
}

// Caps and masks a row's scores in place; returns the maximum, or the least float if no key is seen.
INLINE float mask_and_max(char* scores, int64_t count, const char* allowed, float cap) {
    Floats best = broadcast(-__FLT_MAX__);
    for (int64_t key = 0; key < count; key += LANES) {
        Bytes shown = {};
        if (key + LANES > count)
            memcpy(&shown, allowed + key, count - key);
        else
            shown = read<Bytes>(allowed + key);
        char* at = scores + 4 * QUAD * key;
        Floats found = load(at);
        if (cap > 0) found = capped(found, cap);
        found = __builtin_convertvector(shown, Ints) != 0 ? found : broadcast(-INFINITY);
        store(at, found);
        best = maximum(found, best);
    }
    float top = best[0];
    for (int lane = 1; lane < LANES; lane++) top = best[lane] > top ? best[lane] : top;
    return top;
}

// Replaces a quad's scores by softmax weights, [keys, 4], and adds these to `totals` key by key.
INLINE void softmax_weights(char* tiles, int64_t count, const float (&tops)[QUAD], char* totals) {
    FloatsOfQuad total = read<FloatsOfQuad>(totals);
    for (int64_t key = 0; key < count; key += LANES) {
        char* tile = tiles + 4 * QUAD * key;
        for (int row = 0; row < QUAD; row++) {
            char* at = tile + VECTOR * row;
            store(at, exponential(load(at) - broadcast(tops[row])));
        }
        make_quads(tile);
        for (int lane = 0; lane < LANES; lane++) total = total + read<FloatsOfQuad>(tile + 4 * QUAD * lane);
    }
    write(totals, total);
}

// Turns the scores of a quad of rows into softmax weights, and sums these.
static inline void weigh(const Item& item, int64_t quad, float cap) {
    const AttentionCall& call = item.call;
    char *scores = item.tiles + 4 * quad * call.slots, *totals = item.totals + 4 * quad;
    float tops[QUAD];
    for (int64_t at = 0; at < QUAD; at++) {
        const char* allowed = call.allowed + item.row * call.allowed_row +
                              item.token(quad + at) * call.allowed_step + item.first;
        float top = mask_and_max(scores + VECTOR * at, item.last - item.first, allowed, cap), total = 0;
        if (call.sinks) {
            const float sink = load_one(call.sinks + 4 * (item.head * call.group + item.member(quad + at)));
            top = sink > top ? sink : top;
            total = exponential(broadcast(sink - top))[0];
        }
        tops[at] = top;
        store_one(totals + 4 * at, total);
    }
    softmax_weights(scores, item.last - item.first, tops, totals);
}

// Computes weighted values into tiles [R / 4, Dv / LANES, 4, LANES].
static inline void weighted_sums(const Item& item) {
    const AttentionCall& call = item.call;
    const int64_t count = item.last - item.first, width = ceil_div(call.value_size, WIDE) * WIDE;
    memset(item.sums, 0, 4 * ceil_div(item.count, QUAD) * QUAD * width);
    for (int64_t first = 0; first < count; first += CHUNK) {
        const int64_t some = smaller(CHUNK, count - first);
        convert(call.value, keys_of(item, call.value) + first * call.value.step, some, call.value_size, item.floats);
        for (int64_t quad = 0; quad < item.count; quad += QUAD) {
            const char* weights = item.tiles + 4 * (quad * call.slots + QUAD * first);
            multiply(weights, item.floats, width, width, some, item.sums + 4 * quad * width);
        }
    }
}

// Divides by the sums of weights and stores the result.
static inline void write_output(const Item& item) {
    const AttentionCall& call = item.call;
    const int64_t size = call.value_size, width = ceil_div(size, WIDE) * WIDE, bytes = item_size(call.out_kind);
    for (int64_t at = 0; at < item.count; at++) {
        const int64_t token = item.row * call.step + item.token(at);
        char* out = call.out + bytes * size * ((token * call.heads + item.head) * call.group + item.member(at));
        const char* found = item.sums + 4 * (at / QUAD * QUAD * width + at % QUAD * LANES);
        const float total = load_one(item.totals + 4 * at);
        const Floats divisor = broadcast(total != 0 ? total : 1);
        for (int64_t place = 0; place < size; place += LANES)
            store_first(out + bytes * place, load(found + 4 * QUAD * place) / divisor, call.out_kind, size - place);
    }
}

static void compute(Item& item, float scale, float cap) {
    const AttentionCall& call = item.call;
    item.first = call.slots, item.last = 0;
    for (int64_t token = item.token(0); token <= item.token(item.count - 1); token++) {
        const int64_t* span = call.spans + 2 * (item.row * call.step + token);
        item.first = smaller(item.first, span[0]), item.last = larger(item.last, span[1]);
    }
    load_queries(item, scale);
    score(item);
    for (int64_t quad = 0; quad < item.count; quad += QUAD) weigh(item, quad, cap);
    weighted_sums(item);
    write_output(item);
}

// Each part takes every `parts`-th work item.
static void attend(int64_t* fields) {
    const auto call = arguments_of<AttentionCall>(fields);
    const int64_t parts = fields[1], items = call.rows * call.heads * call.blocks;
    const float scale = load_one((const char*)&call.scale), cap = load_one((const char*)&call.cap);
    const int64_t size = ceil_div(call.size, WIDE) * WIDE, value_size = ceil_div(call.value_size, WIDE) * WIDE;
    for (int64_t part; (part = next_part(fields)) < parts;) {
        char* floats = call.scratch + 4 * call.scratch_size * part;
        char* turned = floats + 4 * CHUNK * larger(size, value_size);
        char* queries = turned + 4 * CHUNK * size;
        char* tiles = queries + 4 * call.block * call.size;  // the last quad's padding reaches into them
        char* sums = tiles + 4 * call.block * call.slots;
        char* totals = sums + 4 * call.block * value_size;
        for (int64_t number = part; number < items; number += parts) {
            const int64_t begin = number % call.blocks * call.block;
            Item item{call, number / call.blocks / call.heads, number / call.blocks % call.heads, begin,
                      smaller(call.block, call.group * call.step - begin), 0, 0, floats, turned, queries, tiles, sums,
                      totals};
            compute(item, scale, cap);
        }
    }
}
