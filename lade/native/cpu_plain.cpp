// CPU kernels for any processor, and what products are compared with: their definition, input by input.
#include <chrono>
#include <thread>

#include "cpu.h"

#if defined(__GNUC__)
#define LANES 4

namespace lade {
namespace {

#include "cpu_vectors.h"

#include "cpu_exponentials.h"
#include "cpu_norms.h"
#include "cpu_elementwise.h"
#include "cpu_panels.h"

#include "cpu_attention.h"
#include "cpu_rows.h"

// Flushes numbers below the least normal one to zero, as the instructions for bfloat16 do.
INLINE float flushed(float number) { return __builtin_fabsf(number) < __FLT_MIN__ ? 0 * number : number; }

// Number `at` of bfloat16 numbers.
INLINE float half_at(const char* numbers, int64_t at) {
    const uint32_t bits = (uint32_t)read<uint16_t>(numbers + 2 * at) << 16;
    return flushed(load_one((const char*)&bits));
}

INLINE float add_product(float sum, const char* x, const char* y, int64_t at) {
    return flushed(__builtin_fmaf(half_at(x, at), half_at(y, at), sum));
}

// A product with bfloat16 weights in panels of 16 outputs, see cpu_dots.h: pairs of products, each rounded.
static void multiply_by_dots(int64_t* fields) {
    const auto product = arguments_of<PanelProduct>(fields);
    const int64_t panels = ceil_div(product.outputs, 16), groups = ceil_div(panels, product.panel_group);
    for (int64_t part; (part = next_part(fields)) < fields[1];) {
        const int64_t top = part / groups * product.row_group, first = part % groups * product.panel_group;
        for (int64_t row = top; row < smaller(top + product.row_group, product.rows); row++) {
            for (int64_t panel = first; panel < smaller(first + product.panel_group, panels); panel++) {
                float sums[16] = {};
                for (int64_t output = 0; output < 16; output++) {
                    for (int64_t word = 0; word < 16 * product.blocks; word++) {
                        const char* x = product.x + block_place(row, word / 16, product.together, product.blocks);
                        const char* weight = product.weight + LINE * (16 * product.blocks * panel + word) + 4 * output;
                        sums[output] = add_product(sums[output], x + 4 * (word % 16), weight, 1);
                        sums[output] = add_product(sums[output], x + 4 * (word % 16), weight, 0);
                    }
                }
                write_results(product, row, 1, 16 * panel, (const char*)sums, 16);
            }
        }
    }
}

// Adds products of unsigned codes and signed ones to a start.
template <int words, bool> INLINE Ints dot(Ints start, const Bits* codes, const char* x) {
    for (int word = 0; word < words; word++)
        for (int at = 0; at < 4; at++)
            start += (Ints)(codes[word] >> (8 * at) & 0xFF) * (int32_t)(int8_t)x[4 * word + at];
    return start;
}

#include "cpu_blocks.h"

// Nanoseconds of the clock that Python's `time.monotonic_ns` reads.
static int64_t clock_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Addresses of a call, and the places among the fields of later stages that hold them.
struct Addresses {
    int64_t* fields;          // of all stages
    const int64_t* places;    // [count, 3]: a field, the index of an address, and bytes after it
    const int64_t* addresses;
    int64_t count;
};

static void fill_addresses(int64_t* fields) {
    const auto call = arguments_of<Addresses>(fields);
    while (next_part(fields) < fields[1])
        for (const int64_t* place = call.places; place < call.places + 3 * call.count; place += 3)
            call.fields[place[0]] = call.addresses[place[1]] + place[2];
}

// New keys and values of a layer, and where they go in its cache.
struct NewStates {
    const char *keys, *values;          // [B, S, heads, bytes]
    char *to_keys, *to_values;          // the cache, [B, heads, slots, bytes]
    int64_t row, head, step;            // strides of both
    int64_t first;                      // slot of the first token
    int64_t rows, tokens, heads, size;  // B, S, heads, bytes
};

static void store_states(int64_t* fields) {
    const auto call = arguments_of<NewStates>(fields);
    for_own_share(fields, call.rows * call.tokens, [&](int64_t token) {
        const int64_t to = token / call.tokens * call.row + (call.first + token % call.tokens) * call.step;
        for (int64_t head = 0; head < call.heads; head++) {
            const int64_t from = call.size * (token * call.heads + head);
            memcpy(call.to_keys + to + head * call.head, call.keys + from, call.size);
            memcpy(call.to_values + to + head * call.head, call.values + from, call.size);
        }
    });
}

// Kernels that one thread runs one after the other: how many, and for each of them its address, the number of its fields,
// and these.
static void run_sequence(int64_t* fields) {
    while (next_part(fields) < fields[1]) {
        int64_t* kernel = fields + 3;
        for (int64_t left = fields[2]; left > 0; left--, kernel += 2 + kernel[1]) ((Kernel)kernel[0])(kernel + 2);
    }
}

// Runs kernels one after the other. A thread that finds no part of a kernel's work left waits for those that others have
// begun, unless the next kernel is joined to this one: then it waits behind that. Once one had to wait for longer than
// threads that run take, all of them leave behind the kernel that they are in, as they do at the clock that was asked for.
// Called again with the same fields, they go on: kernels that are done have no parts left. The fields are: nanoseconds of
// such waits, of all threads together; whether all is done; the number of kernels; the clock at which to leave, 0 for
// never; the clock when the first thread left; and for each kernel how many threads are in it, its address, the number of
// its fields, whether it is joined to the one before, and its fields.
static void run_stages(int64_t* fields) {
    const int turns_of_a_moment = 1000;
    const int64_t time_slice_ns = 200'000;  // a thread that does not run is waited for longer
    int64_t nobody = 0;
    int64_t *stage = fields + 5, *first = stage;
    int64_t left = fields[2];
    for (; left > 0; left--) {
        const int64_t end = __atomic_load_n(fields + 3, __ATOMIC_ACQUIRE);
        if (end && clock_ns() >= end) break;
        int64_t* next = stage + 4 + stage[2];
        __atomic_fetch_add(stage, 1, __ATOMIC_ACQ_REL);
        ((Kernel)stage[1])(stage + 4);
        __atomic_fetch_sub(stage, 1, __ATOMIC_ACQ_REL);
        stage = next;
        if (left == 1 || next[3]) continue;
        int64_t since = 0;
        int turns = 0;
        for (; first < next; first += 4 + first[2]) {
            for (; __atomic_load_n(first, __ATOMIC_ACQUIRE) > 0; turns++) {
                if (turns < turns_of_a_moment) continue;
                if (!since) since = clock_ns();
                std::this_thread::yield();  // more threads than processors
            }
        }
        const int64_t waited = since ? clock_ns() - since : 0;
        if (waited > time_slice_ns) {
            __atomic_fetch_add(fields, waited, __ATOMIC_ACQ_REL);
            __atomic_store_n(fields + 3, 1, __ATOMIC_RELEASE);  // long ago
        }
    }
    if (!left) __atomic_store_n(fields + 1, 1, __ATOMIC_RELAXED);
    __atomic_compare_exchange_n(fields + 4, &nobody, clock_ns(), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Runs stages on a team of threads. The fields are: the address of OpenMP's entrance, that of the stages' fields, the number
// of threads, and the clock when the last of them had left.
static void run_team(int64_t* fields) {
    using Entrance = void (*)(void (*)(void*), void*, unsigned, unsigned);
    ((Entrance)fields[0])([](void* stages) { run_stages((int64_t*)stages); }, (void*)fields[1], (unsigned)fields[2], 0);
    fields[3] = clock_ns();
}

// AMX tiles as they are defined, in memory.
struct Tiles {
    static thread_local int rows[8];
    static thread_local char tiles[8][1024];

    static void configure(int64_t count) {
        for (int tile = 0; tile < 8; tile++) rows[tile] = tile > 4 ? 16 : (int)count;
        memset(tiles, 0, sizeof tiles);
    }
    static void release() {}
    template <int tile> static void zero() { memset(tiles[tile], 0, 1024); }
    template <int tile> static void load(const char* address, int64_t stride) {
        for (int row = 0; row < rows[tile]; row++) memcpy(tiles[tile] + 64 * row, address + stride * row, 64);
    }
    template <int tile> static void store(char* address, int64_t stride) {
        for (int row = 0; row < rows[tile]; row++) memcpy(address + stride * row, tiles[tile] + 64 * row, 64);
    }
    template <int sums, int x, int weights> static void multiply() {
        for (int row = 0; row < rows[sums]; row++)
            for (int output = 0; output < 16; output++)
                add(tiles[sums] + 64 * row + 4 * output, tiles[x] + 64 * row, tiles[weights] + 4 * output);
    }
    static void add(char* sum, const char* x, const char* weights) {
        float even = 0, odd = 0;
        for (int word = 0; word < 16; word++) {
            even = add_product(even, x + 4 * word, weights + 64 * word, 0);
            odd = add_product(odd, x + 4 * word, weights + 64 * word, 1);
        }
        store_one(sum, flushed(load_one(sum) + flushed(even + odd)));
    }
};
thread_local int Tiles::rows[8];
thread_local char Tiles::tiles[8][1024];

#include "cpu_tiles.h"

}  // namespace

const Entry plain_kernels[] = {
    {"attend", "plain", attend},
    {"normalise", "plain", normalise},
    {"logistic_product", "plain", logistic_product},
    {"rotate", "plain", rotate},
    {"add", "plain", add},
    {"quantise_rows", "plain", quantise_rows},
    {"block_rows", "plain", block_rows},
    LADE_BLOCK_KERNELS(, "plain"),
    {"run_stages", "plain", run_stages},
    {"run_team", "plain", run_team},
    {"run_sequence", "plain", run_sequence},
    {"fill_addresses", "plain", fill_addresses},
    {"store_states", "plain", store_states},
    {"multiply_few", REFERENCE, multiply_by_dots},
    {"multiply_many", REFERENCE, multiply_by_dots},
    {"multiply_few_by_tiles", REFERENCE, multiply_few},
    {"multiply_many_by_tiles", REFERENCE, multiply_many},
    {},
};

}  // namespace lade

#endif
