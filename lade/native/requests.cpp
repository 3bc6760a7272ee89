// Drafting for many requests of an engine in one call: lade/decoding/kernels/requests.py, which documents it.
#include <algorithm>
#include <limits>

#include "drafting.h"

namespace lade {
namespace {

constexpr int LONGEST_PATH = 64;      // tokens of a request that one call learns
constexpr int64_t MOST_FETCHED = 8;  // nodes of a request that are fetched ahead

struct Request {
    Tree* tree;
    Tables* tables;
};

// Requests lie scattered in memory and are used once a pass. What the next ones need is fetched ahead, each time as far
// as the addresses are known: the struct, then its arrays, then the text's end and the nodes, then slots of the tables.
class Ahead {
  public:
    Ahead(const Request* requests, int64_t count) : requests_(requests), count_(count) {}

    // To be called for each request in turn; `nodes` is what the tree has or may get.
    template <class Nodes> void fetch(int64_t at, Nodes nodes) const {
        if (at + 4 < count_) prefetch(requests_[at + 4].tree, sizeof(Tree));
        if (at + 3 < count_) fetch_arrays(*requests_[at + 3].tree);
        if (at + 2 < count_) fetch_nodes(*requests_[at + 2].tree, nodes(at + 2));
        if (at + 1 < count_) fetch_slots(requests_[at + 1]);
    }

  private:
    const Request* requests_;
    int64_t count_;

    static void fetch_arrays(const Tree& tree) {
        for (const void* array : {(void*)tree.ids, (void*)tree.parents, (void*)tree.depths, (void*)tree.scores,
                                  (void*)tree.logit_hits, (void*)tree.text_hits, (void*)tree.note_kinds,
                                  (void*)tree.note_weights, (void*)tree.candidates, (void*)tree.keys, (void*)tree.nodes,
                                  (void*)tree.ranks, (void*)tree.used, (void*)tree.match_counts, (void*)tree.copy_line,
                                  (void*)tree.predicted, (void*)tree.by_mtp, (void*)tree.copy_weights})
            LADE_PREFETCH(array);
    }

    static void fetch_nodes(const Tree& tree, int64_t nodes) {
        int64_t length = tree.used[READ], last = std::max<int64_t>(length - LONGEST, 0);
        prefetch(tree.text + last, 2 * LONGEST * sizeof(int32_t));
        prefetch(tree.links + last, 2 * LONGEST * sizeof(int32_t));
        nodes = std::min(nodes, tree.room);
        prefetch(tree.tails, nodes * LONGEST * sizeof(int32_t));
        prefetch(tree.rows, nodes * END * WIDTH * sizeof(int32_t));
        prefetch(tree.note_rows, nodes * NOTE_KINDS * WIDTH * sizeof(int32_t));
        prefetch(tree.copy_rows, nodes * COPY_KINDS * WIDTH * sizeof(int32_t));
        for (int64_t node = 0; node < nodes; ++node) {  // few of the places for candidates are used
            prefetch(tree.tokens_of(node), 64);
            prefetch(tree.odds_of(node), 128);
            prefetch(tree.matches_of(node), 64);
            prefetch(tree.match_lengths_of(node), 64);
        }
    }

    static void fetch_slots(const Request& request) {
        const Tree& tree = *request.tree;
        int32_t tail[LONGEST];
        for (int64_t place = 0, length = tree.used[READ]; place < LONGEST; ++place)
            tail[place] = place < length ? tree.text[length - 1 - place] : -1;
        prefetch_slots(*request.tables, tail);
    }
};

// Starts a tree after the last token of a request's text.
void begin(Tree& tree, double promise) {
    int64_t tail[LONGEST], length = tree.used[READ], count = std::min<int64_t>(length, LONGEST);
    for (int64_t at = 0; at < count; ++at) tail[at] = tree.text[length - count + at];
    plant(tree, length - 1, {tail, count, 0}, promise);
}

// Returns the child of a node that carries a token, among the first `count` nodes; -1 if there is none.
int64_t child_of(const Tree& tree, int64_t node, int64_t token, int64_t count) {
    for (int64_t child = node + 1; child < count; ++child)
        if (tree.parents[child] == node && tree.ids[child] == token) return child;
    return -1;
}

// Returns the number of slots that are kept free for tokens of a text.
int64_t room_for(int64_t tokens) { return std::max<int64_t>((END - TEXT) * tokens, END); }

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
    for (int64_t row = 1; row < rows.rows; ++row) prefetch_slots(tables, tree.tail(row));
    learn_tree(tree, tables, rows, nodes, chosen, rate);
    tables.taken += learn_step(tables, {tree.tails, rows.rows, LONGEST}, rows, nodes, chosen);
    index_text(tree.indexed(), tokens.data, tokens.rows, known);
    tree.used[READ] += tokens.rows;
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
    const Ahead ahead(requests, budgets->rows);
    for (int64_t at = start; at < budgets->rows; ++at) {
        ahead.fetch(at, [&](int64_t next) { return std::min<int64_t>((*budgets)[next] + 1, MOST_FETCHED); });
        Tree& tree = *requests[at].tree;
        const Tables& tables = *requests[at].tables;
        int64_t most = (*budgets)[at];
        if (most + 1 > tree.room) return at;
        begin(tree, promise);
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
    const Ahead ahead(requests, drafted->rows);
    for (int64_t at = start; at < drafted->rows; ++at) {
        ahead.fetch(at, [&](int64_t next) { return std::clamp<int64_t>((*drafted)[next] + 1, 0, MOST_FETCHED); });
        int64_t token = at > 0 ? (*token_ends)[at - 1] : 0, row = at > 0 ? (*row_ends)[at - 1] : 0;
        Longs own{tokens->data + token, (*token_ends)[at] - token, 0};
        Ints entries{rows->row(row), (*row_ends)[at] - row, WIDTH};
        if (!learn(requests[at], (*drafted)[at], own, entries, rate)) return at;
    }
    return drafted->rows;
}
