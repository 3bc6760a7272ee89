// What the drafting kernels share: constants, tables of the context memory, a growing tree.
// The constants are those of lade/decoding/kernels/layout.py, the tree is `Work` of work.py: see there.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace lade {

constexpr int LENGTHS[] = {1, 2, 3, 5, 8, 2, 4};
constexpr int LOGITS = 0, TEXT = 5, END = 7;
constexpr int ORDERS = TEXT, TEXT_ORDERS = END - TEXT;
constexpr int AT_TOKEN = 1, NOTE_KINDS = 2;
constexpr int MOST_MATCHES = 16;
constexpr int LATEST = 0, EACH = 1, COPY_KINDS = 2;
enum Counter { NODES, HEAP, ROOT, READ, PROMPT, COPY, PREDICTED };
constexpr int LONGEST = 8;
constexpr int WIDTH = 6;
constexpr int BITS = 21;
constexpr int32_t TOKEN = (1 << BITS) - 1;
constexpr double FLOOR = -7.0, CEILING = 5.0;
constexpr double SCALE = (CEILING - FLOOR) / 255;
constexpr double TINY = 1e-9;
constexpr int BLOCK = 64;
constexpr int MTP_WIDTH = 16, MTP_DEPTHS = 5, MTP_INPUTS = 4;
constexpr int AFTER_COPY = 64;
constexpr int LENGTH_BUCKETS = 7;
constexpr int MOST = (END + NOTE_KINDS + COPY_KINDS) * WIDTH + MTP_WIDTH;  // distinct candidates of a node

constexpr uint64_t SEED = 0x243F6A8885A308D3;  // hash of the empty context

using Ints = Array<int32_t>;
using Longs = Array<int64_t>;
using Doubles = Array<double>;

// The context memory: [C, 2 + WIDTH] the table that is written and the former one, [WEIGHT_SETS, END + 1] weights.
struct Tables {
    Ints young, old;
    Doubles weights;
    int64_t taken, most;  // occupied slots of `young`; the greatest number of them that may be
};

// The arrays of `Work`, in its order, and their sizes.
struct Tree {
    int32_t *ids, *parents, *depths;
    double* scores;
    int32_t *tails, *logit_hits, *text_hits, *rows, *note_kinds, *note_rows, *notes;
    double* note_weights;
    int32_t *candidates, *tokens;
    double *odds, *keys;
    int32_t *nodes, *ranks;
    int64_t* used;
    int32_t *text, *links, *latest, *matches, *match_lengths, *match_counts, *copy_line, *copy_rows;
    double* copy_weights;
    int32_t* predicted;
    double* memory_odds;
    int32_t* listed;
    double* bases;
    int32_t *by_mtp, *mtp_parents, *mtp_ids, *mtp_depths, *mtp_tokens;
    double *mtp_odds, *mtp_weights, *mtp_trust;
    int64_t room, note_slots, text_room, text_slots;  // nodes; rows of `notes`; tokens of `text`; rows of `latest`

    int32_t* tail(int64_t node) const { return tails + node * LONGEST; }
    int32_t* rows_of(int64_t node) const { return rows + node * END * WIDTH; }
    int32_t* note_rows_of(int64_t node) const { return note_rows + node * NOTE_KINDS * WIDTH; }
    int32_t* note(int64_t slot) const { return notes + slot * (2 + WIDTH); }
    double* note_line(int64_t kinds) const { return note_weights + kinds * (NOTE_KINDS + 1); }
    int32_t* tokens_of(int64_t node) const { return tokens + node * MOST; }
    double* odds_of(int64_t node) const { return odds + node * MOST; }
    double* memory_odds_of(int64_t node) const { return memory_odds + node * MOST; }
    int32_t* matches_of(int64_t node) const { return matches + node * MOST_MATCHES; }
    int32_t* match_lengths_of(int64_t node) const { return match_lengths + node * MOST_MATCHES; }
    int32_t* copy_rows_of(int64_t node) const { return copy_rows + node * COPY_KINDS * WIDTH; }
    double* copy_weights_of(int64_t line) const { return copy_weights + line * (COPY_KINDS + 2); }
    int32_t* prediction(int64_t number) const { return mtp_tokens + number * MTP_WIDTH; }
    double* predicted_odds(int64_t number) const { return mtp_odds + number * MTP_WIDTH; }
};

// Returns the hash of a context extended by one token towards the start of the text.
inline uint64_t lengthened(uint64_t state, int64_t token) {
    state = (state ^ static_cast<uint64_t>(token + 2)) * 0x9E3779B97F4A7C15;
    return state ^ (state >> 29);
}

inline double probability(double log_odds) { return 1.0 / (1.0 + std::exp(-log_odds)); }

// tables.cpp
struct Hits {
    int logits, text;
};
Hits find_rows(const Ints& young, const Ints& old, const int32_t* tail, int32_t* rows);
void fetch_rows(const Ints& table, const int32_t* tail);
void average(int32_t* best, const int32_t* before, const int32_t* row);
bool learn_step(Tables& tables, const int32_t* tails, const Ints& rows, const Longs& path, const Longs& chosen);
int64_t learn_token(const Tables& tables, const int32_t* tail, int64_t token);

// Returns the number of slots that are kept free for tokens of a text.
inline int64_t room_for(int64_t tokens) { return std::max<int64_t>((END - TEXT) * tokens, END); }

// growth.cpp
void index_text(Tree& tree, const Longs& tokens);
void plant(Tree& tree, int64_t root, double promise);
bool grow(Tree& tree, const Tables& tables, double size, double least, const Longs& excluded, int64_t vocabulary,
          int64_t max_depth, double promise);
void grow_chain(Tree& tree, const Tables& tables, const Longs& excluded, int64_t vocabulary, int64_t most, double price,
                double news, double first);
bool learn_tree(Tree& tree, Tables& tables, const Ints& entries, const Longs& path, const Longs& chosen, double rate);

// mixing.cpp
int64_t note_slot(const Tree& tree, int64_t place, int64_t token);
void expand(Tree& tree, int64_t node, const Tables& tables);
void bring_forward(Tree& tree, int64_t node, int rank);
int led_by_mtp(const Tree& tree, int64_t parent, int rank);
void learn_weights(Tree& tree, const Tables& tables, const Longs& path, const Longs& chosen, double rate);

}  // namespace lade
