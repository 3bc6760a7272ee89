// Best-first growth of token trees, earlier occurrences of a suffix, and notes by position.
#include "drafting.h"

namespace lade {
namespace {

constexpr int LOOKED_AT = 128;     // earlier occurrences of the last token that are examined
constexpr int LONGEST_END = 32;    // longest match that is measured
constexpr int COPIED = 16;         // length of a match that counts as a copy
constexpr int64_t LIKELIEST = 32;  // nodes of a tree whose logits are learned last, as all of a smaller tree are

void push(std::vector<Offer>& heap, Offer offer) {
    heap.push_back(offer);
    size_t at = heap.size() - 1;
    for (; at > 0 && heap[(at - 1) >> 1].key < offer.key; at = (at - 1) >> 1) heap[at] = heap[(at - 1) >> 1];
    heap[at] = offer;
}

// Removes the entry with the highest key, and returns it.
Offer pop(std::vector<Offer>& heap) {
    Offer first = heap[0], last = heap.back();
    heap.pop_back();
    size_t at = 0;
    for (size_t below = 1; below < heap.size(); below = 2 * at + 1) {
        if (below + 1 < heap.size() && heap[below + 1].key > heap[below].key) ++below;
        if (heap[below].key <= last.key) break;
        heap[at] = heap[below];
        at = below;
    }
    if (at < heap.size()) heap[at] = last;
    return first;
}

// Returns the index of the prediction after a child, given that of its parent; -1 for none.
int32_t prediction_of(const Tree& tree, int32_t parent, int32_t token) {
    if (parent >= 0)
        for (size_t number = 1; number < tree.predictions.size(); ++number)
            if (tree.predictions[number].parent == parent && tree.predictions[number].token == token)
                return static_cast<int32_t>(number);
    return -1;
}

// Finds the earlier occurrences with the longest matching suffix, later ones first; returns their number.
int32_t find_matches(const Tree& tree, int64_t last, Match* matches) {
    const int32_t* text = tree.text.data();
    int32_t count = 0, number = tree.links[last];
    for (int looked_at = 0; number >= 0 && looked_at < LOOKED_AT; ++looked_at, number = tree.links[number]) {
        int32_t length = 1;
        while (length < LONGEST_END && length <= number && text[number - length] == text[last - length]) ++length;
        int32_t place = count;
        for (; place > 0 && length > matches[place - 1].length; --place)
            if (place < MOST_MATCHES) matches[place] = matches[place - 1];
        if (place == MOST_MATCHES) continue;
        matches[place] = {number + 1, length};
        count = std::min(count + 1, MOST_MATCHES);
    }
    return count;
}

bool may_be_added(const Tree& tree, int32_t token) {
    const auto& excluded = tree.excluded;
    return token < tree.vocabulary && std::find(excluded.begin(), excluded.end(), token) == excluded.end();
}

// Notes the logits at all nodes of a tree by position; rows for the same slot are averaged.
void note(Tree& tree, const Ints& entries) {
    for (int64_t at = entries.rows - 1; at >= 0; --at) {  // the last one weighs most: the likeliest node
        auto place = static_cast<int32_t>(tree.root + tree.nodes[at].depth);
        for (int kind = 0; kind < NOTE_KINDS; ++kind) {
            int32_t token = kind == AT_TOKEN ? tree.nodes[at].id : -1, best[WIDTH];
            Note& slot = note_at(tree, place, token);
            const int32_t* row = entries.row(at);
            if (slot.place == place && slot.token == token) {
                average(best, slot.row, row);
                row = best;
            }
            slot.place = place;
            slot.token = token;
            std::copy_n(row, WIDTH, slot.row);
        }
    }
}

// Moves the likeliest child that may be added to the front; returns its rank, or the number of candidates.
int first_offer(const Tree& tree, Node& node) {
    int rank = 0;
    for (; rank < node.candidates; ++rank) {
        bring_forward(node, rank);
        if (may_be_added(tree, node.tokens[rank])) break;
    }
    return rank;
}

// Starts to fetch the notes for a node into the caches.
void fetch_notes(Tree& tree, const Node& node) {
    LADE_PREFETCH(&note_at(tree, tree.root + node.depth, -1));
    LADE_PREFETCH(&note_at(tree, tree.root + node.depth, node.id));
}

// Stores the rows of a tree and the tokens that followed in the text; returns false, with nothing stored, without room.
// The last row under a short context weighs most, so those of nodes beyond the likeliest ones come first: 3 to 17 % at
// 128 fed (lab/log/drafting-and-mixing.md). Values other than 32 were not tried; trees up to it stay as they were.
bool learn_step(const Tree& tree, Tables& tables, const Ints& rows, const Longs& path, const Longs& chosen) {
    if (tables.taken + LOGIT_KINDS * rows.rows + room_for(path.rows) > tables.most) return false;
    auto learn = [&](int64_t row) { tables.taken += learn_logits(tables, tree.nodes[row].tail, rows.row(row)); };
    for (int64_t row = LIKELIEST; row < rows.rows; ++row) learn(row);
    for (int64_t row = 0; row < std::min(LIKELIEST, rows.rows); ++row) learn(row);
    for (int64_t at = 0; at < path.rows; ++at) tables.taken += learn_token(tables, tree.nodes[path[at]].tail, chosen[at]);
    return true;
}

}  // namespace

// Adds a child with its context and matches; returns its node.
int32_t add(Tree& tree, int64_t parent, int32_t token) {
    auto number = static_cast<int32_t>(tree.nodes.size());
    Node& node = tree.nodes.emplace_back();
    const Node& above = tree.nodes[parent];
    node.id = token;
    node.parent = static_cast<int32_t>(parent);
    node.depth = above.depth + 1;
    node.prediction = prediction_of(tree, above.prediction, token);
    std::copy_n(above.tail, LONGEST - 1, node.tail + 1);
    node.tail[0] = token;
    for (int32_t at = 0; at < above.match_count; ++at) {
        Match match = above.matches[at];
        if (tree.text[match.next] == token && match.next + 1 < static_cast<int32_t>(tree.text.size()))
            node.matches[node.match_count++] = {match.next + 1, match.length + 1};
    }
    return number;
}

void plant(Tree& tree, int64_t root, const int32_t* tail, double promise) {
    tree.nodes.clear();
    tree.heap.clear();
    tree.root = root;
    Node& node = tree.nodes.emplace_back();
    std::copy_n(tail, LONGEST, node.tail);
    node.id = tail[0];
    node.prediction = tree.predictions.empty() ? -1 : 0;
    if (static_cast<int64_t>(tree.text.size()) == root + 1) node.match_count = find_matches(tree, root, node.matches);
    if (node.match_count > 0 && node.matches[0].length >= COPIED) tree.copy = root;
    fetch_notes(tree, node);
    push(tree.heap, {promise, 0, -1});
}

bool grow(Tree& tree, const Tables& tables, double size, double least, int64_t max_depth, double promise) {
    while (!tree.heap.empty() && static_cast<double>(tree.nodes.size()) < size && tree.heap[0].key > least) {
        Offer offer = pop(tree.heap);
        Node& parent = tree.nodes[offer.node];
        if (offer.rank < 0) expand(tree, parent, tables);
        int32_t following = offer.rank + 1;
        if (following < parent.candidates && parent.depth < max_depth) {
            bring_forward(parent, following);
            push(tree.heap, {parent.score * probability(parent.odds[following]), offer.node, following});
        }
        if (offer.rank < 0 || !may_be_added(tree, parent.tokens[offer.rank])) continue;
        int by_mtp = parent.prediction >= 0 ? led_by_mtp(tree, parent, offer.rank) : 0;
        int32_t number = add(tree, offer.node, parent.tokens[offer.rank]);  // nodes may lie elsewhere from here on
        Node& node = tree.nodes[number];
        node.score = offer.key;
        node.by_mtp = by_mtp;
        fetch_rows(tables.young, node.tail);
        fetch_notes(tree, node);
        push(tree.heap, {promise * node.score, number, -1});
    }
    return static_cast<double>(tree.nodes.size()) >= size;
}

void grow_chain(Tree& tree, const Tables& tables, size_t most, double price, double news, double first) {
    while (tree.nodes.size() < most) {
        Node& last = tree.nodes.back();
        expand(tree, last, tables);
        int rank = first_offer(tree, last);
        if (rank == last.candidates) break;
        double score = last.score * probability(last.odds[rank]);
        if (score + news / (first + static_cast<double>(tree.nodes.size())) <= price) break;
        Node& node = tree.nodes[add(tree, static_cast<int64_t>(tree.nodes.size()) - 1, last.tokens[rank])];
        node.score = score;
        fetch_notes(tree, node);
    }
}

bool learn_tree(Tree& tree, Tables& tables, const Ints& entries, const Longs& path, const Longs& chosen, double rate) {
    for (int64_t at = 0; at < entries.rows; ++at) {
        fetch_rows(tables.young, tree.nodes[at].tail);
        fetch_notes(tree, tree.nodes[at]);
    }
    learn_weights(tree, tables, path, chosen, rate);
    note(tree, entries);
    return learn_step(tree, tables, entries, path, chosen);
}

}  // namespace lade
