// Hash tables of the context memory: rows by hashed context; a row for a known context is averaged with the old one.
// The functions are those of lade/decoding/kernels/tables.py, which documents them.
#include <cstring>
#include <limits>

#include "drafting.h"

namespace lade {
namespace {

constexpr size_t ROW_BYTES = WIDTH * sizeof(int32_t);

struct Key {
    int32_t low, high;
};

Key key_of(uint64_t state, int kind) {
    uint64_t low = (state & ~uint64_t{7}) | static_cast<uint64_t>(kind + 1);
    return {static_cast<int32_t>(static_cast<uint32_t>(low)), static_cast<int32_t>(static_cast<uint32_t>(state >> 32))};
}

// Returns the first slot that a key may have, given the upper half of its hash.
int64_t home_of(const Ints& table, uint64_t upper) {
    return static_cast<int64_t>(upper * static_cast<uint64_t>(table.rows) >> 32);
}

// Returns the slot of a key; if it is missing, the bitwise complement of the free slot for it.
int64_t slot_of(const Ints& table, Key key) {
    int64_t slot = home_of(table, static_cast<uint32_t>(key.high));
    for (const int32_t* at = table.row(slot); at[0] != 0; at = table.row(slot)) {
        if (at[0] == key.low && at[1] == key.high) return slot;
        if (++slot == table.rows) slot = 0;
    }
    return ~slot;
}

// Stores one row under the suffixes of a context; returns the number of newly occupied slots.
int64_t take_in(const Ints& young, const Ints& old, const int32_t* tail, const int32_t* row, int first, int end) {
    uint64_t state = SEED;
    int64_t taken = 0;
    int kind = first, averaged = 0;
    int32_t last[WIDTH], best[WIDTH];
    for (int place = 0; place < LENGTHS[end - 1]; ++place) {
        state = lengthened(state, tail[place]);
        if (place + 1 != LENGTHS[kind]) continue;
        Key key = key_of(state, kind++);
        int64_t slot = slot_of(young, key);
        const int32_t* before = nullptr;
        if (slot >= 0) {
            before = young.row(slot) + 2;
        } else {
            slot = ~slot;
            if (int64_t at = slot_of(old, key); at >= 0) before = old.row(at) + 2;
            young.row(slot)[0] = key.low;
            young.row(slot)[1] = key.high;
            ++taken;
        }
        if (before && (averaged++ == 0 || std::memcmp(last, before, ROW_BYTES) != 0)) {  // long contexts often agree
            average(best, before, row);
            std::memcpy(last, before, ROW_BYTES);
        }
        std::memcpy(young.row(slot) + 2, before ? best : row, ROW_BYTES);
    }
    return taken;
}

bool copy(const Ints& young, const Ints& old, uint64_t state, int kind, int32_t* rows) {
    Key key = key_of(state, kind);
    const Ints* table = &young;
    int64_t slot = slot_of(young, key);
    if (slot < 0) {
        table = &old;
        slot = slot_of(old, key);
    }
    if (slot < 0) return false;
    std::memcpy(rows + kind * WIDTH, table->row(slot) + 2, ROW_BYTES);
    return true;
}

void write_certain(int64_t token, int32_t* row) {
    for (int place = 0; place < WIDTH; ++place) row[place] = TOKEN;
    if (token < TOKEN) row[0] = 255 << BITS | static_cast<int32_t>(token);
}

}  // namespace

void fetch_rows(const Ints& table, const int32_t* tail) {
    uint64_t state = SEED;
    for (int place = 0; place < LONGEST; ++place) {
        state = lengthened(state, tail[place]);
        if (place != 5 && place != 6) LADE_PREFETCH(table.row(home_of(table, state >> 32)));
    }
}

// Without branches, which entries would decide: half of a step's learning is spent here.
void average(int32_t* best, const int32_t* before, const int32_t* row) {
    constexpr int32_t NONE = std::numeric_limits<int32_t>::min();
    int32_t entries[2 * WIDTH], ranks[2 * WIDTH] = {}, sorted[2 * WIDTH];
    for (int at = 0; at < WIDTH; ++at) {
        int32_t token = row[at] & TOKEN, other = before[at] & TOKEN, total = 0, known = 0;
        for (int place = WIDTH - 1; place >= 0; --place) {
            total = (before[place] & TOKEN) == token ? before[place] >> BITS : total;
            known |= (row[place] & TOKEN) == other;
        }
        total = static_cast<int32_t>(static_cast<uint32_t>((total + (row[at] >> BITS)) >> 1) << BITS);
        int32_t alone = static_cast<int32_t>(static_cast<uint32_t>(before[at] >> (BITS + 1)) << BITS);
        entries[at] = token == TOKEN ? NONE : total | token;
        entries[WIDTH + at] = (other == TOKEN) | known ? NONE : alone | other;
    }
    for (int first = 0; first < 2 * WIDTH; ++first)
        for (int at = 0; at < 2 * WIDTH; ++at)
            ranks[at] += (entries[first] > entries[at]) | ((entries[first] == entries[at]) & (first < at));
    for (int at = 0; at < 2 * WIDTH; ++at) sorted[ranks[at]] = entries[at];
    for (int at = 0; at < WIDTH; ++at) best[at] = sorted[at] == NONE ? TOKEN : sorted[at];
}

Hits find_rows(const Ints& young, const Ints& old, const int32_t* tail, int32_t* rows) {
    int logits = LOGITS, text = TEXT;
    uint64_t state = SEED;
    for (int place = 0; place < LONGEST; ++place) {
        state = lengthened(state, tail[place]);
        if (text < END && place + 1 == LENGTHS[text] && copy(young, old, state, text, rows)) ++text;
        if (logits < TEXT && place + 1 == LENGTHS[logits] && copy(young, old, state, logits, rows)) ++logits;
    }
    return {logits - LOGITS, text - TEXT};
}

int64_t learn_logits(const Tables& tables, const int32_t* tail, const int32_t* row) {
    return take_in(tables.young, tables.old, tail, row, LOGITS, TEXT);
}

int64_t learn_token(const Tables& tables, const int32_t* tail, int64_t token) {
    int32_t certain[WIDTH];
    write_certain(token, certain);
    return take_in(tables.young, tables.old, tail, certain, TEXT, END);
}

}  // namespace lade

using namespace lade;

LADE_KERNEL int64_t lade_learn(const Ints* young, const Ints* old, const Ints* tails, const Ints* rows, int64_t first,
                               int64_t end, int64_t start, int64_t taken, int64_t most) {
    int64_t row = start;
    for (; row < tails->rows && taken + end - first <= most; ++row)
        taken += take_in(*young, *old, tails->row(row), rows->row(row), static_cast<int>(first), static_cast<int>(end));
    return row << 32 | taken;
}

LADE_KERNEL void lade_rehash(const Ints* table, const Ints* into) {
    for (int64_t row = 0; row < table->rows; ++row) {
        const int32_t* slot = table->row(row);
        if (slot[0] != 0) std::memcpy(into->row(~slot_of(*into, {slot[0], slot[1]})), slot, 2 * sizeof(int32_t) + ROW_BYTES);
    }
}

LADE_KERNEL int64_t lade_count_missing(const Ints* table, const Ints* other) {
    int64_t missing = 0;
    for (int64_t row = 0; row < table->rows; ++row) {
        const int32_t* slot = table->row(row);
        missing += slot[0] != 0 && slot_of(*other, {slot[0], slot[1]}) < 0;
    }
    return missing;
}

LADE_KERNEL int64_t lade_look_up(const Ints* young, const Ints* old, const Ints* tail, const Ints* rows) {
    Hits hits = find_rows(*young, *old, tail->data, rows->data);
    return int64_t{hits.logits} << 32 | hits.text;
}

LADE_KERNEL void lade_tails_of(const Longs* text, int64_t start, const Ints* tails) {
    for (int64_t row = 0; row < tails->rows; ++row)
        for (int64_t place = 0; place < LONGEST; ++place)
            tails->row(row)[place] = place <= start + row ? static_cast<int32_t>((*text)[start + row - place]) : -1;
}

LADE_KERNEL void lade_certain(const Longs* tokens, const Ints* rows) {
    for (int64_t row = 0; row < rows->rows; ++row) write_certain((*tokens)[row], rows->row(row));
}
