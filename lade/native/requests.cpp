// Drafting for many requests of an engine in one call: `Requests` of lade/decoding/kernels/native_tree.py.
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
        if (tree.nodes[child].parent == node && tree.nodes[child].id == token) return child;
    return -1;
}

// Learns a pass of one request; returns false, with nothing changed, where that needs more room or another way.
bool learn(const Request& request, int64_t drafted, const Longs& tokens, const Ints& rows, double rate) {
    Tree& tree = *request.tree;
    Tables& tables = *request.tables;
    int64_t path[LONGEST_PATH] = {0}, length = 1, known = static_cast<int64_t>(tree.text.size());
    if (drafted < 0 || drafted >= static_cast<int64_t>(tree.nodes.size())) return false;
    if (tokens.rows < 1 || tokens.rows > LONGEST_PATH) return false;
    for (int64_t next; length < tokens.rows; path[length++] = next)
        if ((next = child_of(tree, path[length - 1], tokens[length - 1], drafted + 1)) < 0) break;
    if (rows.rows < path[length - 1] + 1 || rows.rows > drafted + 1) return false;
    int64_t wanted = LOGIT_KINDS * rows.rows + room_for(length) + (length < tokens.rows ? room_for(tokens.rows - length) : 0);
    if (tables.taken + wanted > tables.most) return false;
    Longs nodes{path, length, 0}, chosen{tokens.data, length, 0};
    learn_tree(tree, tables, rows, nodes, chosen, rate);
    index_text(tree, tokens);
    for (int64_t at = known + length; at < known + tokens.rows; ++at) {
        int32_t tail[LONGEST];
        write_tail(tree, at, tail);
        tables.taken += learn_token(tables, tail, tree.text[at]);
    }
    return true;
}

}  // namespace
}  // namespace lade

using namespace lade;

LADE_KERNEL void lade_propose(const Request* requests, const Longs* budgets, const Doubles* prices, int64_t trees,
                              const Ints* ids, const Ints* parents, const Doubles* scores, const Longs* ends) {
    double price = (*prices)[0], news = (*prices)[1], first = (*prices)[2], promise = (*prices)[3];
    int64_t end = 0;
    for (int64_t at = 0; at < budgets->rows; ++at) {
        Tree& tree = *requests[at].tree;
        const Tables& tables = *requests[at].tables;
        int64_t most = (*budgets)[at], length = static_cast<int64_t>(tree.text.size());
        int32_t tail[LONGEST];
        write_tail(tree, length, tail);
        plant(tree, length - 1, tail, promise);
        if (trees != 0) {
            for (int64_t size = 2; size < most + 2; ++size) {
                double least = std::max(price - news / (first + static_cast<double>(size - 1)), 0.0);
                if (!grow(tree, tables, static_cast<double>(size), least, std::numeric_limits<int32_t>::max(), promise)) break;
            }
        } else {
            grow_chain(tree, tables, static_cast<size_t>(most + 1), price, news, first);
        }
        for (size_t node = 1; node < tree.nodes.size(); ++node, ++end) {
            (*ids)[end] = tree.nodes[node].id;
            (*parents)[end] = tree.nodes[node].parent - 1;
            (*scores)[end] = tree.nodes[node].score;
        }
        (*ends)[at] = end;
    }
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
