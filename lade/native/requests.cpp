// Drafting for many requests of an engine in one call: lade/decoding/kernels/requests.py, which documents it.
#include <algorithm>
#include <limits>

#include "drafting.h"

namespace lade {
namespace {

constexpr int LONGEST_PATH = 64;  // tokens of a request that one call learns

struct Request {
    Tree* tree;
    Tables* tables;
};

// Returns the child of a node that carries a token, among the first `count` nodes; -1 if there is none.
int64_t child_of(const Tree& tree, int64_t node, int64_t token, int64_t count) {
    for (int64_t child = node + 1; child < count; ++child)
        if (tree.parents[child] == node && tree.ids[child] == token) return child;
    return -1;
}

// Learns a pass of one request; returns false, with nothing changed, where that needs more room or another way.
bool learn(const Request& request, int64_t drafted, const Longs& tokens, const Ints& rows, double rate) {
    Tree& tree = *request.tree;
    Tables& tables = *request.tables;
    int64_t path[LONGEST_PATH] = {0}, length = 1, known = tree.used[READ];
    if (drafted < 0 || tokens.rows < 1 || tokens.rows > LONGEST_PATH || known + tokens.rows > tree.text_room) return false;
    for (int64_t next; length < tokens.rows; path[length++] = next)
        if ((next = child_of(tree, path[length - 1], tokens[length - 1], drafted + 1)) < 0) break;
    if (rows.rows < path[length - 1] + 1 || rows.rows > drafted + 1) return false;
    int64_t wanted = TEXT * rows.rows + room_for(length) + (length < tokens.rows ? room_for(tokens.rows - length) : 0);
    if (tables.taken + wanted > tables.most) return false;
    Longs nodes{path, length, 0}, chosen{tokens.data, length, 0};
    learn_tree(tree, tables, rows, nodes, chosen, rate);
    index_text(tree, tokens);
    for (int64_t at = known + length; at < tree.used[READ]; ++at) {
        int32_t tail[LONGEST];
        for (int64_t place = 0; place < LONGEST; ++place) tail[place] = place < at ? tree.text[at - 1 - place] : -1;
        tables.taken += learn_token(tables, tail, tree.text[at]);
    }
    return true;
}

}  // namespace
}  // namespace lade

using namespace lade;

LADE_KERNEL int64_t lade_propose(const Request* requests, const Longs* budgets, int64_t start, const Doubles* prices,
                                 const Longs* excluded, int64_t vocabulary, int64_t trees, const Ints* ids,
                                 const Ints* parents, const Doubles* scores, const Longs* ends) {
    double price = (*prices)[0], news = (*prices)[1], first = (*prices)[2], promise = (*prices)[3];
    int64_t end = start > 0 ? (*ends)[start - 1] : 0;
    for (int64_t at = start; at < budgets->rows; ++at) {
        Tree& tree = *requests[at].tree;
        const Tables& tables = *requests[at].tables;
        int64_t most = (*budgets)[at];
        if (most + 1 > tree.room) return at;
        plant(tree, tree.used[READ] - 1, promise);
        if (trees != 0) {
            for (int64_t size = 2; size < most + 2; ++size) {
                double least = std::max(price - news / (first + static_cast<double>(size - 1)), 0.0);
                if (!grow(tree, tables, static_cast<double>(size), least, *excluded, vocabulary,
                          std::numeric_limits<int32_t>::max(), promise))
                    break;
            }
        } else {
            grow_chain(tree, tables, *excluded, vocabulary, most + 1, price, news, first);
        }
        for (int64_t node = 1; node < tree.used[NODES]; ++node, ++end) {
            (*ids)[end] = tree.ids[node];
            (*parents)[end] = tree.parents[node] - 1;
            (*scores)[end] = tree.scores[node];
        }
        (*ends)[at] = end;
    }
    return budgets->rows;
}

LADE_KERNEL int64_t lade_learn_requests(const Request* requests, const Longs* drafted, int64_t start, const Longs* tokens,
                                        const Longs* token_ends, const Ints* rows, const Longs* row_ends, double rate) {
    for (int64_t at = start; at < drafted->rows; ++at) {
        int64_t token = at > 0 ? (*token_ends)[at - 1] : 0, row = at > 0 ? (*row_ends)[at - 1] : 0;
        Longs own{tokens->data + token, (*token_ends)[at] - token, 0};
        Ints entries{rows->row(row), (*row_ends)[at] - row, WIDTH};
        if (!learn(requests[at], (*drafted)[at], own, entries, rate)) return at;
    }
    return drafted->rows;
}
