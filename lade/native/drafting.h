// What the drafting kernels share: tables of the context memory, and a growing tree with its text.
#pragma once

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

#include "kernels.h"
#include "layout.h"  // written by the build: the constants of lade/decoding/kernels/layout.py

namespace lade {

constexpr int LOGIT_KINDS = TEXT - LOGITS, TEXT_KINDS = END - TEXT;
constexpr int AT_TOKEN = 1;          // kind of the notes for a position and a token there; 0: for a position
constexpr int LATEST = 0, EACH = 1;  // kinds of copy rows: see `Node`
constexpr int MOST_MATCHES = 16;     // earlier occurrences kept per node: those with the longest suffixes
constexpr int LENGTH_BUCKETS = 7;    // of match lengths: 1, 2, 3, 4 to 5, 6 to 7, 8 to 15, and more tokens
constexpr int COPY_LINES = 4 * 2 * LENGTH_BUCKETS;
constexpr int AFTER_COPY = 64;                 // tokens after a copy during which further copies are likely
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

// An earlier occurrence of a node's suffix: index of the token after it, and number of matching tokens.
struct Match {
    int32_t next, length;
};

// A token of a tree, its context, and the features by which its candidates are weighed.
struct Node {
    Node() {}  // leaves the arrays as they are: to fill them would take a tenth of a growth

    int32_t id = 0, parent = -1, depth = 0;
    int32_t by_mtp = 0;  // 1 where the MTP layer gives it higher odds than the memory does
    double score = 1.0;  // probability that it is accepted
    int32_t tail[LONGEST];    // context
    int32_t logit_hits = -1;  // rows of logits that the memory has for it; -1 before the lookup
    int32_t text_hits = 0;    // rows of text that it has
    int32_t note_kinds = 0;   // bit set of the kinds of notes present
    int32_t copy_line = -1;   // row of `copy_weights` in use; -1 without matches
    int32_t prediction = -1;  // index of the MTP layer's prediction after it; -1 without one
    int32_t match_count = 0;
    Match matches[MOST_MATCHES];  // longest first
    int32_t rows[END][WIDTH];     // the memory's rows by kind
    int32_t note_rows[NOTE_KINDS][WIDTH];
    int32_t copy_rows[COPY_KINDS][WIDTH];  // tokens after the latest longest match, and after all matches
    int32_t candidates = 0;  // distinct tokens that rows, notes, copies and the layer suggest
    int32_t listed = 0;      // the same with those after them, which only the layer suggests: too unlikely
    double base = 0.0;       // log-odds before the final mixing of tokens that only the layer suggests
    int32_t tokens[MOST_CANDIDATES];      // as many as were asked for are sorted to the front, likeliest first
    double odds[MOST_CANDIDATES];         // their log-odds
    double memory_odds[MOST_CANDIDATES];  // the same before the final mixing; NaN for tokens of the layer alone
};

// The child of a node that is added next: its score, or an estimate from above; rank -1 before the node's lookup.
struct Offer {
    double key;
    int32_t node, rank;
};

// Logits seen at a position, whatever the text before it: position, token there or -1, row.
struct Note {
    int32_t place = -2, token = -2, row[WIDTH] = {};
};

// An MTP layer's prediction after a node: index of its parent's prediction, token, and depth, counted from 1 at the root.
struct Prediction {
    int32_t parent, token, depth;
    int32_t tokens[MTP_WIDTH];  // -1 for none
    double odds[MTP_WIDTH];
};

// A growing tree, the text that it continues, and the weights that the text teaches.
struct Tree {
    std::vector<int32_t> excluded;  // ids that are not added
    std::vector<Node> nodes;
    std::vector<Offer> heap;
    int64_t vocabulary = 0;         // ids from here on are not added
    int64_t root = 0, prompt = 0, copy = -AFTER_COPY;  // index of the root; tokens of the prompt; last root in a copy
    std::vector<int32_t> text, links;             // ids; index of the previous occurrence of each, -1 for none
    std::unordered_map<int32_t, int32_t> latest;  // last occurrence of each token
    std::vector<Note> notes;                      // a later note overwrites an earlier one
    std::vector<Prediction> predictions;          // the root's comes first
    double note_weights[1 << NOTE_KINDS][NOTE_KINDS + 1];  // by bit set: the weight of each kind, and a bias
    double copy_weights[COPY_LINES][COPY_KINDS + 2];       // weight of each row, a bias, a factor of the learning rate
    double *mtp_weights = nullptr, *mtp_trust = nullptr;   // shared by texts: `MtpWeights` of lade/decoding/drafting/memory.py
};

// The same as Python gives them: [3, N] parents, tokens, and depths counted from 0; [N, MTP_WIDTH] tokens and odds.
struct PredictionRows {
    Ints places, tokens;
    Doubles odds;
};

// What Python reads of a tree: [5, N] ids, parents, depths, predictions, and where the layer leads; [N] scores.
struct Columns {
    Ints numbers;
    Doubles scores;
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
int64_t learn_logits(const Tables& tables, const int32_t* tail, const int32_t* row);
int64_t learn_token(const Tables& tables, const int32_t* tail, int64_t token);

// Returns the number of slots that are kept free for tokens of a text.
inline int64_t room_for(int64_t tokens) { return std::max<int64_t>(TEXT_KINDS * tokens, END); }

// tree.cpp
void index_text(Tree& tree, const Longs& tokens);
void write_tail(const Tree& tree, int64_t end, int32_t* tail);

// growth.cpp
int32_t add(Tree& tree, int64_t parent, int32_t token);
void plant(Tree& tree, int64_t root, const int32_t* tail, double promise);
bool grow(Tree& tree, const Tables& tables, double size, double least, int64_t max_depth, double promise);
void grow_chain(Tree& tree, const Tables& tables, size_t most, double price, double news, double first);
bool learn_tree(Tree& tree, Tables& tables, const Ints& entries, const Longs& path, const Longs& chosen, double rate);

// mixing.cpp
Note& note_at(Tree& tree, int64_t place, int64_t token);
void expand(Tree& tree, Node& node, const Tables& tables);
void bring_forward(Node& node, int rank);
int led_by_mtp(const Tree& tree, const Node& parent, int rank);
void learn_weights(Tree& tree, const Tables& tables, const Longs& path, const Longs& chosen, double rate);

}  // namespace lade
