// A growing tree with its text, which Python holds by a handle: `NativeTree` of lade/decoding/kernels/native_tree.py,
// which documents the functions.
#include "drafting.h"

namespace lade {
namespace {

constexpr int NOTES = 2048;      // slots
constexpr int FIRST_NODES = 24;  // initial capacity

// By bit set of the kinds of notes present: the weight of each kind, and a bias. Close to what they converge to.
constexpr double NOTE_PRIORS[][NOTE_KINDS + 1] = {{0.0, 0.0, 0.0}, {0.05, 0.0, 0.15}, {0.0, 0.1, 0.3}, {0.05, 0.1, 0.45}};

// By bucket of the match length, and whether all matches continue alike: the weight of the token after the latest longest
// match, that of the tokens after all matches, and a bias. In the first column without a quote: an eighth of the values
// learned where a text is quoted, since text that a model writes by itself needs small weights. While a text is being
// quoted, in the second for matches in the prompt, and in the third for matches in the answer: three fifths of the learned
// values, as models repeat themselves loosely.
constexpr double COPY_PRIORS[2 * LENGTH_BUCKETS][3][COPY_KINDS + 1] = {
    {{0.0, 0.05, 0.02}, {0.07, 0.25, -0.01}, {0.02, 0.33, 0.1}},
    {{0.02, 0.04, 0.0}, {0.14, 0.21, -0.03}, {0.2, 0.18, 0.02}},
    {{0.0, 0.03, 0.01}, {0.07, 0.18, 0.02}, {-0.02, 0.22, 0.02}},
    {{0.03, 0.03, 0.0}, {0.1, 0.15, -0.02}, {0.07, 0.11, -0.01}},
    {{0.01, 0.04, 0.0}, {0.19, 0.12, 0.02}, {0.02, 0.17, -0.01}},
    {{0.08, 0.02, 0.02}, {0.25, 0.12, 0.03}, {0.14, 0.1, 0.01}},
    {{0.03, 0.04, 0.0}, {0.15, 0.11, 0.01}, {-0.03, 0.19, -0.03}},
    {{0.08, 0.02, 0.02}, {0.26, 0.09, 0.05}, {0.11, 0.09, 0.01}},
    {{0.05, 0.03, 0.02}, {0.22, 0.06, 0.03}, {0.09, 0.11, 0.01}},
    {{0.09, 0.03, 0.03}, {0.33, 0.1, 0.06}, {0.15, 0.1, 0.03}},
    {{0.08, 0.04, 0.02}, {0.34, 0.05, 0.04}, {0.06, 0.16, -0.05}},
    {{0.15, 0.04, 0.03}, {0.5, 0.14, 0.09}, {0.16, 0.17, 0.0}},
    {{0.08, 0.03, 0.02}, {0.83, -0.13, 0.13}, {0.18, 0.09, 0.0}},
    {{0.1, 0.05, 0.02}, {0.56, 0.19, 0.08}, {0.27, 0.14, 0.04}},
};
constexpr int SHORT = 4;         // rows for matches of one or two tokens
constexpr double CAUTION = 0.3;  // factor of the learning rate: matches come in many lengths, few of them often

// Sets the prior weights of copies, in four sets: for matches in the prompt and answer, before and after a copy. Before
// the first copy a match of three tokens with the prompt counts half of what it does later, a shorter one next to nothing.
void set_copy_priors(Tree& tree) {
    for (int line = 0; line < COPY_LINES; ++line) {
        int set = line / (2 * LENGTH_BUCKETS), bucket = line % (2 * LENGTH_BUCKETS);
        bool is_early = set == 0 && bucket >= SHORT;
        const double* prior = COPY_PRIORS[bucket][set > 1 ? set - 1 : is_early ? 1 : 0];
        double* weights = tree.copy_weights[line];
        for (int kind = 0; kind <= COPY_KINDS; ++kind) weights[kind] = is_early ? prior[kind] / 2.0 : prior[kind];
        weights[COPY_KINDS + 1] = set > 1 || is_early ? 1.0 : CAUTION;
    }
}

// Forgets all tokens of the text but the first `kept` ones.
void take_back(Tree& tree, size_t kept) {
    for (; tree.text.size() > kept; tree.text.pop_back(), tree.links.pop_back()) {
        if (tree.links.back() < 0)
            tree.latest.erase(tree.text.back());
        else
            tree.latest[tree.text.back()] = tree.links.back();
    }
}

// Starts a tree whose root is the token at index `root` of a text that ends with the tokens `last`.
void start(Tree& tree, int64_t root, const Longs& last, double promise) {
    int32_t tail[LONGEST];
    for (int64_t place = 0; place < LONGEST; ++place)
        tail[place] = place < last.rows ? static_cast<int32_t>(last[last.rows - 1 - place]) : -1;
    plant(tree, root, tail, promise);
}

// Takes over the first predictions; none of others are left.
void take_predictions(Tree& tree, const PredictionRows& given, int64_t count) {
    tree.predictions.resize(count);
    for (int64_t at = 0; at < count; ++at) {
        Prediction& prediction = tree.predictions[at];
        prediction.parent = given.places.row(0)[at];
        prediction.token = given.places.row(1)[at];
        prediction.depth = given.places.row(2)[at] + 1;
        std::copy_n(given.tokens.row(at), MTP_WIDTH, prediction.tokens);
        std::copy_n(given.odds.row(at), MTP_WIDTH, prediction.odds);
    }
}

// Writes the nodes, as many as there is room for; returns the number of all.
int64_t write(const Tree& tree, const Columns& columns) {
    int64_t count = static_cast<int64_t>(tree.nodes.size());
    for (int64_t at = 0; at < std::min(count, columns.scores.rows); ++at) {
        const Node& node = tree.nodes[at];
        columns.numbers.row(0)[at] = node.id;
        columns.numbers.row(1)[at] = node.parent;
        columns.numbers.row(2)[at] = node.depth;
        columns.numbers.row(3)[at] = node.prediction;
        columns.numbers.row(4)[at] = node.by_mtp;
        columns.scores[at] = node.score;
    }
    return count;
}

template <class T>
Array<char> bytes_of(std::vector<T>& rows) {
    return {reinterpret_cast<char*>(rows.data()), static_cast<int64_t>(rows.size()), sizeof(T)};
}

template <class T, size_t N>
Array<char> bytes_of(T (&rows)[N]) {
    return {reinterpret_cast<char*>(rows), N, sizeof(T)};
}

bool is_node(const Tree& tree, int64_t node) { return node >= 0 && node < static_cast<int64_t>(tree.nodes.size()); }

}  // namespace

void index_text(Tree& tree, const Longs& tokens) {
    for (int64_t at = 0; at < tokens.rows; ++at) {
        auto token = static_cast<int32_t>(tokens[at]), number = static_cast<int32_t>(tree.text.size());
        auto [found, is_new] = tree.latest.try_emplace(token, number);
        tree.text.push_back(token);
        tree.links.push_back(is_new ? -1 : found->second);
        found->second = number;
    }
}

void write_tail(const Tree& tree, int64_t end, int32_t* tail) {
    for (int64_t place = 0; place < LONGEST; ++place) tail[place] = place < end ? tree.text[end - 1 - place] : -1;
}

}  // namespace lade

using namespace lade;

LADE_KERNEL Tree* lade_new_tree(const Longs* excluded, int64_t vocabulary) {
    Tree* tree = new Tree{};
    tree->excluded.assign(excluded->data, excluded->data + excluded->rows);
    tree->vocabulary = vocabulary;
    tree->nodes.reserve(FIRST_NODES);
    tree->notes.resize(NOTES);
    std::copy(&NOTE_PRIORS[0][0], &NOTE_PRIORS[0][0] + sizeof NOTE_PRIORS / sizeof(double), &tree->note_weights[0][0]);
    set_copy_priors(*tree);
    return tree;
}

LADE_KERNEL void lade_free_tree(Tree* tree) { delete tree; }

LADE_KERNEL void lade_use_mtp(Tree* tree, const Doubles* weights, const Doubles* trust) {
    tree->mtp_weights = weights->data;
    tree->mtp_trust = trust->data;
}

LADE_KERNEL void lade_set_prompt(Tree* tree, int64_t length) { tree->prompt = length; }

LADE_KERNEL void lade_read(Tree* tree, int64_t start, const Longs* tokens) {
    int64_t same = 0, known = static_cast<int64_t>(tree->text.size());
    while (same < tokens->rows && start + same < known && tree->text[start + same] == (*tokens)[same]) ++same;
    take_back(*tree, start + same);
    index_text(*tree, {tokens->data + same, tokens->rows - same, 0});
}

LADE_KERNEL void lade_start(Tree* tree, int64_t root, const Longs* last) { start(*tree, root, *last, 0.0); }

LADE_KERNEL int64_t lade_grow(Tree* tree, const Tables* tables, int64_t root, const Longs* last, int64_t lead,
                              const PredictionRows* predictions, int64_t predicted, const Doubles* stages,
                              int64_t max_depth, double promise, const Columns* columns) {
    take_predictions(*tree, *predictions, predicted);
    const int64_t* forced = last->data + last->rows - lead;
    start(*tree, root, {last->data, last->rows - lead, 0}, promise);
    for (int64_t at = 0; at < lead; ++at) tree->heap[0].node = add(*tree, at, static_cast<int32_t>(forced[at]));
    for (int64_t at = 0; at < stages->rows; at += 2)
        if (!grow(*tree, *tables, (*stages)[at], (*stages)[at + 1], max_depth, promise)) break;
    return write(*tree, *columns);
}

LADE_KERNEL int64_t lade_keep(Tree* tree, const Longs* nodes, const Columns* columns) {
    const int64_t *begin = nodes->data, *end = begin + nodes->rows;
    for (int64_t at = 0; at < nodes->rows; ++at) {
        Node& node = tree->nodes[at] = tree->nodes[(*nodes)[at]];
        if (at > 0) node.parent = static_cast<int32_t>(std::lower_bound(begin, end, node.parent) - begin);
    }
    tree->nodes.resize(nodes->rows);
    return write(*tree, *columns);
}

LADE_KERNEL void lade_extend(Tree* tree, int64_t kept, const Longs* ids, const Longs* parents) {
    tree->nodes.resize(kept);
    for (int64_t at = 0; at < ids->rows; ++at) add(*tree, (*parents)[at], static_cast<int32_t>((*ids)[at]));
}

LADE_KERNEL void lade_contexts(const Tree* tree, const Longs* nodes, const Ints* tails) {
    for (int64_t at = 0; at < nodes->rows; ++at)
        std::copy_n(tree->nodes[(*nodes)[at]].tail, LONGEST, tails->row(at));
}

LADE_KERNEL int64_t lade_candidates(Tree* tree, const Tables* tables, const Longs* nodes, const Ints* tokens) {
    int32_t* end = tokens->data;
    for (int64_t at = 0; at < nodes->rows; ++at) {
        Node& node = tree->nodes[(*nodes)[at]];
        expand(*tree, node, *tables);
        end = std::copy_n(node.tokens, node.candidates, end);
    }
    return end - tokens->data;
}

LADE_KERNEL int64_t lade_learn_tree(Tree* tree, Tables* tables, const Ints* entries, const Longs* path,
                                    const Longs* chosen, double rate) {
    bool fits = entries->rows <= static_cast<int64_t>(tree->nodes.size()) && entries->columns == WIDTH;
    for (int64_t at = 0; at < path->rows; ++at) fits = fits && is_node(*tree, (*path)[at]);
    if (!fits || path->rows != chosen->rows) return -1;
    return learn_tree(*tree, *tables, *entries, *path, *chosen, rate) ? 1 : 0;
}

// Parts of a tree for tests, which compare them with those of tests/reference/tree.py; they lie there until it changes.
LADE_KERNEL void lade_parts(Tree* tree, Array<char>* parts) {
    Array<char> counters{reinterpret_cast<char*>(&tree->vocabulary), 4, sizeof(int64_t)};  // to `copy`
    Array<char> found[] = {
        bytes_of(tree->excluded),     counters,
        bytes_of(tree->nodes),        bytes_of(tree->heap),
        bytes_of(tree->text),         bytes_of(tree->links),
        bytes_of(tree->notes),        bytes_of(tree->predictions),
        bytes_of(tree->note_weights), bytes_of(tree->copy_weights),
    };
    std::copy(std::begin(found), std::end(found), parts);
}
