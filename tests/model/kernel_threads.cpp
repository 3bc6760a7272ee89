// Kernels entered by four threads at once, for a sanitizer of threads: see `make test-native`.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

extern "C" void* lade_cpu_kernel(const char* name, const char* instructions);

using Fields = std::vector<int64_t>;
using Floats = std::vector<float>;
using Halves = std::vector<uint16_t>;

template <class Number> int64_t at(const std::vector<Number>& numbers) { return (int64_t)numbers.data(); }

int64_t bits(float number) {
    int32_t found;
    memcpy(&found, &number, sizeof found);
    return found;
}

Floats drawn(size_t count) {
    static std::mt19937 generator(0);
    std::normal_distribution<float> normal;
    Floats numbers(count);
    for (float& number : numbers) number = normal(generator);
    return numbers;
}

Halves drawn_halves(size_t count) {
    Halves halves;
    for (float number : drawn(count)) halves.push_back((uint16_t)(bits(number) >> 16));
    return halves;
}

void run(const std::string& name, const std::string& instructions, const Fields& arguments, int64_t parts) {
    auto kernel = (void (*)(int64_t*))lade_cpu_kernel(name.c_str(), instructions.c_str());
    if (!kernel) return;
    Fields fields{0, parts};
    fields.insert(fields.end(), arguments.begin(), arguments.end());
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; number++) threads.emplace_back([&] { kernel(fields.data()); });
    for (std::thread& thread : threads) thread.join();
    printf("%s %s\n", name.c_str(), instructions.c_str());
}

void attend(const std::string& instructions) {
    const int64_t rows = 2, heads = 2, group = 2, step = 9, size = 40, keys = 100, slots = 128, block = 12;
    const int64_t room = 64 * (64 + 64) + block * (size + slots + 64 + 1), blocks = (group * step + block - 1) / block;
    Floats query = drawn(rows * heads * group * step * size), key = drawn(rows * heads * keys * size);
    Floats out(query.size()), scratch(5 * room);
    std::vector<uint8_t> allowed(rows * step * keys, 1);
    Fields spans, fields{at(scratch), room, bits(0.2f), bits(5)};
    for (int64_t token = 0; token < rows * step; token++) spans.insert(spans.end(), {0, keys});
    fields.insert(fields.end(), {at(query), heads * group * step * size * 4, step * size * 4, size * 4, 0});
    for (int states = 0; states < 2; states++)
        fields.insert(fields.end(), {at(key), heads * keys * size * 4, keys * size * 4, size * 4, 0});
    fields.insert(fields.end(), {at(allowed), step * keys, keys, at(spans), 0, at(out), 0, rows, heads, group, step});
    fields.insert(fields.end(), {size, size, block, blocks, slots});
    run("attend", instructions, fields, 5);
}

void run_codes(const std::string& instructions, const Floats& x, int64_t rows, int64_t inputs, int64_t outputs) {
    const int64_t blocks = (inputs + 63) / 64, panels = (outputs + 15) / 16, padded = (rows + 15) / 16 * 16;
    const int64_t parts = 4 * ((panels + 3) / 4);
    Floats out(rows * outputs);
    std::vector<int8_t> codes(padded * blocks * 64), weight(panels * blocks * 18 * 64, 0x11);
    std::vector<int32_t> facts(padded * blocks * 8);
    const Fields rounded{at(x), at(codes), at(facts), 0, rows, inputs, 4};
    Fields product{at(codes), at(facts), at(weight), 0, at(out), 0, 0, rows, blocks, outputs, 16, 4, 4};
    run("quantise_rows", instructions, rounded, 9);
    for (const char* name : {"int8", "int4", "q8_0", "q4_0", "q4_1", "q5_1", "q4_k", "q5_k", "q6_k"})
        run(std::string("multiply_") + name, instructions, product, parts);
    Fields stages{4, 0, 0};  // the same in one call, and two products that do not wait for each other
    auto add = [&](const char* name, const Fields& arguments, int64_t count, bool joined) {
        const int64_t address = (int64_t)lade_cpu_kernel(name, "");
        stages.insert(stages.end(), {0, address, 2 + (int64_t)arguments.size(), joined, 0, count});
        stages.insert(stages.end(), arguments.begin(), arguments.end());
    };
    Floats more(rows * outputs), sums(rows * outputs);
    if (!lade_cpu_kernel("run_stages", instructions.c_str())) return;
    const int64_t together = lade_cpu_kernel("multiply_int4", "avx512") ? 16 : 4;
    product[10] = product[12] = together;
    add("quantise_rows", {at(x), at(codes), at(facts), 0, rows, inputs, together}, 9, false);
    add("multiply_int4", product, parts, false);
    product[4] = at(more);
    add("multiply_int4", product, parts, true);
    add("add", {at(out), at(more), at(sums), 0, rows * outputs}, 5, false);
    run("run_stages", instructions, stages, 1);
}

int main() {
    const int64_t rows = 61, inputs = 200, outputs = 333, blocks = 7, panels = 21;
    Floats x = drawn(rows * inputs), weights = drawn(rows * inputs), y(x.size()), weight = drawn(inputs), partial(1024 * 2 * 12);
    Halves halves = drawn_halves(x.size()), blocked(64 * blocks * 32), rest = drawn_halves(rows * 32);
    Halves in_panels = drawn_halves(panels * blocks * 512), in_tiles = drawn_halves(6 * blocks * 2048), out(rows * outputs);
    for (const char* instructions : {"", "avx2", "plain"}) {
        attend(instructions);
        run("normalise", instructions, {at(x), at(weight), at(y), 0, inputs, rows, bits(1e-5f), 0, 0}, 7);
        run("logistic_product", instructions, {at(x), at(weights), at(y), 0, bits(-1), 0, rows * inputs}, 13);
        run("add", instructions, {at(x), at(weights), at(y), 0, rows * inputs}, 13);
        run("rotate", instructions, {at(y), at(x), at(x), 0, rows, 5, 5, inputs / 5}, 7);
        run("block_rows", instructions, {at(halves), at(blocked), 0, 1, rows, inputs, 8}, 9);
        run_codes(instructions, x, rows, inputs, outputs);
    }
    for (const char* instructions : {"", "reference"}) {
        Fields product{at(blocked), 0, at(in_panels), 0, at(out), 1, 1};
        Fields many = product, few = product;
        many.insert(many.end(), {rows, blocks, outputs, 16, 4, 8});
        few.insert(few.end(), {7, blocks, outputs, 7, 2, 8});
        run("multiply_many", instructions, many, 4 * 6);
        run("multiply_few", instructions, few, 11);
        Fields tiles{at(halves), at(rest), at(in_tiles), 0, at(out), at(partial)};
        for (int64_t taken : {rows, (int64_t)13}) {
            Fields fields = tiles;
            fields.insert(fields.end(), {taken, inputs, outputs, 3});
            run(taken > 16 ? "multiply_many_by_tiles" : "multiply_few_by_tiles", instructions, fields, 4);
        }
    }
}
