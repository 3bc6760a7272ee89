// Best-first growth of token trees, earlier occurrences of a suffix, and notes by position.
// The functions are those of lade/decoding/kernels/growth.py, which documents them.
#include <algorithm>

#include "drafting.h"

namespace lade {
namespace {

constexpr int LOOKED_AT = 128;   // earlier occurrences of the last token that are examined
constexpr int LONGEST_END = 32;  // longest match that is measured
constexpr int COPIED = 16;       // length of a match that counts as a copy

void push(Tree& tree, double key, int32_t node, int32_t rank) {
    int64_t at = tree.used[HEAP]++;
    for (; at > 0 && tree.keys[(at - 1) >> 1] < key; at = (at - 1) >> 1) {
        int64_t above = (at - 1) >> 1;
        tree.keys[at] = tree.keys[above];
        tree.nodes[at] = tree.nodes[above];
        tree.ranks[at] = tree.ranks[above];
    }
    tree.keys[at] = key;
    tree.nodes[at] = node;
    tree.ranks[at] = rank;
}

// Removes the entry with the highest key.
void pop(Tree& tree) {
    int64_t count = --tree.used[HEAP], at = 0;
    double key = tree.keys[count];
    int32_t node = tree.nodes[count], rank = tree.ranks[count];
    for (int64_t below = 1; below < count; below = 2 * at + 1) {
        if (below + 1 < count && tree.keys[below + 1] > tree.keys[below]) ++below;
        if (tree.keys[below] <= key) break;
        tree.keys[at] = tree.keys[below];
        tree.nodes[at] = tree.nodes[below];
        tree.ranks[at] = tree.ranks[below];
        at = below;
    }
    tree.keys[at] = key;
    tree.nodes[at] = node;
    tree.ranks[at] = rank;
}

// Returns the index of the prediction after a child, given that of its parent; -1 for none.
int32_t prediction_of(const Tree& tree, int32_t parent, int32_t token) {
    if (parent >= 0)
        for (int32_t number = 1; number < tree.used[PREDICTED]; ++number)
            if (tree.mtp_parents[number] == parent && tree.mtp_ids[number] == token) return number;
    return -1;
}

// Adds a child with its context and matches; returns its node.
int32_t add(Tree& tree, int64_t parent, int32_t token) {
    auto node = static_cast<int32_t>(tree.used[NODES]++);
    tree.ids[node] = token;
    tree.parents[node] = static_cast<int32_t>(parent);
    tree.depths[node] = tree.depths[parent] + 1;
    tree.logit_hits[node] = -1;
    tree.by_mtp[node] = 0;
    tree.predicted[node] = prediction_of(tree, tree.predicted[parent], token);
    std::copy(tree.tail(parent), tree.tail(parent) + LONGEST - 1, tree.tail(node) + 1);
    tree.tail(node)[0] = token;
    int32_t count = 0;
    for (int32_t at = 0; at < tree.match_counts[parent]; ++at) {
        int32_t match = tree.matches_of(parent)[at];
        if (tree.text[match] != token || match + 1 >= tree.used[READ]) continue;
        tree.matches_of(node)[count] = match + 1;
        tree.match_lengths_of(node)[count++] = tree.match_lengths_of(parent)[at] + 1;
    }
    tree.match_counts[node] = count;
    return node;
}

// Finds the earlier occurrences with the longest matching suffix, later ones first; returns their number.
int32_t find_matches(const Tree& tree, int64_t last) {
    const int32_t* text = tree.text;
    int32_t *matches = tree.matches_of(0), *lengths = tree.match_lengths_of(0), count = 0;
    int32_t number = tree.links[last];
    for (int looked_at = 0; number >= 0 && looked_at < LOOKED_AT; ++looked_at, number = tree.links[number]) {
        int32_t length = 1;
        while (length < LONGEST_END && length <= number && text[number - length] == text[last - length]) ++length;
        int32_t place = count;
        for (; place > 0 && length > lengths[place - 1]; --place) {
            if (place == MOST_MATCHES) continue;
            matches[place] = matches[place - 1];
            lengths[place] = lengths[place - 1];
        }
        if (place == MOST_MATCHES) continue;
        matches[place] = number + 1;
        lengths[place] = length;
        count = std::min(count + 1, MOST_MATCHES);
    }
    return count;
}

bool is_among(const Longs& tokens, int32_t token) {
    return std::find(tokens.data, tokens.data + tokens.rows, token) != tokens.data + tokens.rows;
}

// Notes the logits at all nodes of a tree by position; rows for the same slot are averaged.
void note(Tree& tree, const Ints& entries) {
    for (int64_t node = entries.rows - 1; node >= 0; --node) {  // the last one weighs most: the likeliest node
        auto place = static_cast<int32_t>(tree.used[ROOT] + tree.depths[node]);
        for (int kind = 0; kind < NOTE_KINDS; ++kind) {
            int32_t token = kind == AT_TOKEN ? tree.ids[node] : -1, best[WIDTH];
            int32_t* slot = tree.note(note_slot(tree, place, token));
            const int32_t* row = entries.row(node);
            if (slot[0] == place && slot[1] == token) {
                average(best, slot + 2, row);
                row = best;
            }
            slot[0] = place;
            slot[1] = token;
            std::copy(row, row + WIDTH, slot + 2);
        }
    }
}

// Moves the likeliest child that may be added to the front; returns its rank, or the number of candidates.
int first_offer(Tree& tree, int64_t node, const Longs& excluded, int64_t vocabulary) {
    int rank = 0;
    for (; rank < tree.candidates[node]; ++rank) {
        bring_forward(tree, node, rank);
        int32_t token = tree.tokens_of(node)[rank];
        if (token < vocabulary && !is_among(excluded, token)) break;
    }
    return rank;
}

// Returns where the last occurrence of a token is kept; a slot that is free has the index -2.
int32_t* latest_of(const Tree& tree, int32_t token) {
    uint64_t home = (static_cast<uint32_t>(token) * 0x9E3779B1u) * static_cast<uint64_t>(tree.text_slots) >> 32;
    int32_t* slot = tree.latest + 2 * home;
    while (slot[1] != -2 && slot[0] != token)
        if ((slot += 2) == tree.latest + 2 * tree.text_slots) slot = tree.latest;
    return slot;
}

}  // namespace

void index_text(Tree& tree, const Longs& tokens) {
    for (int64_t number = 0; number < tokens.rows; ++number) {
        auto token = static_cast<int32_t>(tokens[number]);
        int64_t at = tree.used[READ]++;
        int32_t* slot = latest_of(tree, token);
        tree.text[at] = token;
        tree.links[at] = slot[1] < 0 ? -1 : slot[1];
        slot[0] = token;
        slot[1] = static_cast<int32_t>(at);
    }
}

// Starts to fetch the notes for a node into the caches.
void fetch_notes(const Tree& tree, int64_t node) {
    int64_t place = tree.used[ROOT] + tree.depths[node];
    LADE_PREFETCH(tree.note(note_slot(tree, place, -1)));
    LADE_PREFETCH(tree.note(note_slot(tree, place, tree.ids[node])));
}

void plant(Tree& t, int64_t root, double promise) {
    bool is_read = t.used[READ] == root + 1;
    for (int64_t place = 0; place < LONGEST && is_read; ++place)
        t.tail(0)[place] = place <= root ? t.text[root - place] : -1;
    t.ids[0] = t.tail(0)[0];
    t.parents[0] = -1;
    t.depths[0] = 0;
    t.scores[0] = 1.0;
    t.logit_hits[0] = -1;
    t.by_mtp[0] = 0;
    t.predicted[0] = t.used[PREDICTED] > 0 ? 0 : -1;
    t.used[NODES] = 1;
    t.used[HEAP] = 0;
    t.used[ROOT] = root;
    t.match_counts[0] = is_read ? find_matches(t, root) : 0;
    fetch_notes(t, 0);
    if (t.match_counts[0] > 0 && t.match_lengths_of(0)[0] >= COPIED) t.used[COPY] = root;
    push(t, promise, 0, -1);
}

bool grow(Tree& t, const Tables& tables, double size, double least, const Longs& excluded, int64_t vocabulary,
          int64_t max_depth, double promise) {
    while (t.used[HEAP] > 0 && static_cast<double>(t.used[NODES]) < size && t.keys[0] > least) {
        double score = t.keys[0];
        int32_t parent = t.nodes[0], rank = t.ranks[0];
        pop(t);
        if (rank < 0) expand(t, parent, tables);
        int32_t following = rank + 1;
        if (following < t.candidates[parent] && t.depths[parent] < max_depth) {
            bring_forward(t, parent, following);
            push(t, t.scores[parent] * probability(t.odds_of(parent)[following]), parent, following);
        }
        if (rank < 0) continue;
        int32_t token = t.tokens_of(parent)[rank];
        if (token >= vocabulary || is_among(excluded, token)) continue;
        int32_t node = add(t, parent, token);
        t.scores[node] = score;
        fetch_rows(tables.young, t.tail(node));
        fetch_notes(t, node);
        if (t.predicted[parent] >= 0) t.by_mtp[node] = led_by_mtp(t, parent, rank);
        push(t, promise * score, node, -1);
    }
    return static_cast<double>(t.used[NODES]) >= size;
}

void grow_chain(Tree& t, const Tables& tables, const Longs& excluded, int64_t vocabulary, int64_t most, double price,
                double news, double first) {
    for (int64_t node = 0; t.used[NODES] < most;) {
        expand(t, node, tables);
        int rank = first_offer(t, node, excluded, vocabulary);
        if (rank == t.candidates[node]) break;
        double score = t.scores[node] * probability(t.odds_of(node)[rank]);
        if (score + news / (first + static_cast<double>(t.used[NODES])) <= price) break;
        node = add(t, node, t.tokens_of(node)[rank]);
        t.scores[node] = score;
        fetch_notes(t, node);
    }
}

bool learn_tree(Tree& tree, Tables& tables, const Ints& entries, const Longs& path, const Longs& chosen, double rate) {
    for (int64_t node = 0; node < entries.rows; ++node) {
        fetch_rows(tables.young, tree.tail(node));
        fetch_notes(tree, node);
    }
    learn_weights(tree, tables, path, chosen, rate);
    note(tree, entries);
    return learn_step(tables, tree.tails, entries, path, chosen);
}

}  // namespace lade

using namespace lade;

LADE_KERNEL int64_t lade_learn_tree(Tree* tree, Tables* tables, const Ints* entries, const Longs* path,
                                    const Longs* chosen, double rate) {
    return learn_tree(*tree, *tables, *entries, *path, *chosen, rate) ? 1 : 0;
}

LADE_KERNEL void lade_plant(Tree* tree, int64_t root, double promise) { plant(*tree, root, promise); }

LADE_KERNEL int64_t lade_grow(Tree* tree, const Tables* tables, const Doubles* stages, const Longs* excluded,
                              int64_t vocabulary, int64_t max_depth, double promise) {
    for (int64_t at = 0; at < stages->rows; at += 2)
        if (!grow(*tree, *tables, (*stages)[at], (*stages)[at + 1], *excluded, vocabulary, max_depth, promise)) break;
    return tree->used[NODES];
}

LADE_KERNEL int64_t lade_grow_chain(Tree* tree, const Tables* tables, const Longs* excluded, int64_t vocabulary,
                                    int64_t most, double price, double news, double first) {
    grow_chain(*tree, *tables, *excluded, vocabulary, most, price, news, first);
    return tree->used[NODES];
}

LADE_KERNEL void lade_follow(Tree* tree, int64_t kept, const Longs* ids, const Longs* parents) {
    tree->used[NODES] = kept;
    for (int64_t at = 0; at < ids->rows; ++at) add(*tree, (*parents)[at], static_cast<int32_t>((*ids)[at]));
}

LADE_KERNEL int64_t lade_candidates(Tree* tree, const Tables* tables, int64_t node) {
    expand(*tree, node, *tables);
    return tree->candidates[node];
}

LADE_KERNEL void lade_index_text(Tree* tree, const Longs* tokens) { index_text(*tree, *tokens); }

LADE_KERNEL void lade_take_back(Tree* tree, int64_t kept) {
    for (int64_t& read = tree->used[READ]; read > kept; --read) latest_of(*tree, tree->text[read - 1])[1] = tree->links[read - 1];
}
