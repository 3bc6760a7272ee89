// Mixing of a node's features into probabilities, and learning of the weights.
#include <limits>

#include "drafting.h"

namespace lade {
namespace {

constexpr double NEGLIGIBLE = -4.6;  // log-odds of about 1 %; below it only the chosen token takes part in learning
constexpr double MTP_RATE = 1.0;     // factor of the learning rate for the final mixing
constexpr double TRUST_RATE = 20.0;  // factor for the layer's share, a single number that every node updates
constexpr double MOST_TRUST = 5.0;   // log-odds
constexpr double MOST_ODDS = -2.0 * FLOOR;  // log-odds of the memory in the final mixing, either way: twice those of a row
constexpr double NOT_SEEN = 0.4;     // pseudo-count of an unseen token after the matches
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

bool has_row(Hits hits, int kind) { return kind < hits.logits || (TEXT <= kind && kind < TEXT + hits.text); }

double* line_of(const Doubles& weights, Hits hits) { return weights.row(hits.logits * (TEXT_KINDS + 1) + hits.text); }

// Copies the notes for a node's position and for its token there; returns the bit set of kinds present.
int recall(Tree& tree, Node& node) {
    int kinds = 0;
    auto place = static_cast<int32_t>(tree.root + node.depth);
    for (int kind = 0; kind < NOTE_KINDS; ++kind) {
        int32_t token = kind == AT_TOKEN ? node.id : -1;
        const Note& note = note_at(tree, place, token);
        if (note.place != place || note.token != token) continue;
        kinds |= 1 << kind;
        std::copy_n(note.row, WIDTH, node.note_rows[kind]);
    }
    return kinds;
}

// Log-odds of distinct tokens; a token's sum begins at `base` and grows by each row that has it.
struct Candidates {
    int32_t* tokens;
    double* odds;
    double base;
    int count = 0;
    uint8_t places[256] = {};  // hash table of the place of each token, counted from 1

    // Returns the place of a token, which is appended if it is new.
    int place_of(int32_t token) {
        uint8_t home = static_cast<uint32_t>(token) * 0x9E3779B1u >> 24;
        while (places[home] != 0 && tokens[places[home] - 1] != token) ++home;
        if (places[home] == 0) {
            tokens[count] = token;
            odds[count] = base;
            places[home] = static_cast<uint8_t>(++count);
        }
        return places[home] - 1;
    }

    void add_row(const int32_t* row, double weight) {
        double step = weight * SCALE;
        for (int place = 0; place < WIDTH; ++place) {
            int32_t token = row[place] & TOKEN;
            if (token != TOKEN) odds[place_of(token)] += step * (row[place] >> BITS);
        }
    }
};

// Mixes a node's rows, notes and copies into log-odds; a token that a row misses counts `FLOOR` there.
Candidates mix(const Tree& tree, Node& node, const Doubles& weights) {
    Hits hits{node.logit_hits, node.text_hits};
    const double *line = line_of(weights, hits), *notes = tree.note_weights[node.note_kinds];
    const double* copies = tree.copy_weights[std::max(node.copy_line, 0)];
    double base = line[END] + notes[NOTE_KINDS];
    for (int kind = 0; kind < END; ++kind)
        if (has_row(hits, kind)) base += FLOOR * line[kind];
    for (int kind = 0; kind < NOTE_KINDS; ++kind)
        if (node.note_kinds >> kind & 1) base += FLOOR * notes[kind];
    if (node.copy_line >= 0) {
        base += copies[COPY_KINDS];
        for (int kind = 0; kind < COPY_KINDS; ++kind) base += FLOOR * copies[kind];
    }
    Candidates found{node.tokens, node.odds, base};
    for (int kind = 0; kind < END; ++kind)
        if (has_row(hits, kind)) found.add_row(node.rows[kind], line[kind]);
    for (int kind = 0; kind < NOTE_KINDS; ++kind)
        if (node.note_kinds >> kind & 1) found.add_row(node.note_rows[kind], notes[kind]);
    for (int kind = 0; kind < COPY_KINDS && node.copy_line >= 0; ++kind) found.add_row(node.copy_rows[kind], copies[kind]);
    return found;
}

int length_bucket(int length) {
    if (length <= 3) return length - 1;
    if (length <= 7) return length <= 5 ? 3 : 4;
    return length <= 15 ? 5 : 6;
}

// Writes the tokens after a node's matches as rows; returns the index within a set of copy weights.
int write_copy_rows(const Tree& tree, Node& node) {
    int count = node.match_count, different = 0;
    int32_t *latest = node.copy_rows[LATEST], *each = node.copy_rows[EACH], tokens[MOST_MATCHES];
    std::fill_n(latest, COPY_KINDS * WIDTH, TOKEN);
    for (int at = 0; at < MOST_MATCHES; ++at) tokens[at] = at < count ? tree.text[node.matches[at].next] : -1;
    for (int at = 0; at < count; ++at) {
        int32_t token = tokens[at];
        int same = 0, before = 0;
        for (int other = 0; other < MOST_MATCHES; ++other) {
            same += tokens[other] == token;
            before += (tokens[other] == token) & (other < at);
        }
        if (before > 0 || token < 0 || token >= TOKEN) continue;
        if (different == 0) latest[0] = 255 << BITS | token;
        double value = (std::log(same / (count - same + NOT_SEEN)) - FLOOR) / SCALE;
        if (different < WIDTH)
            each[different] = static_cast<int32_t>(std::min(std::max(value + 0.5, 0.0), 255.0)) << BITS | token;
        ++different;
    }
    return 2 * length_bucket(node.matches[0].length) + (different == 1 ? 1 : 0);
}

// Returns the first index of a set of copy weights: by match in the prompt or answer, and before or after a copy.
int copy_set(const Tree& tree, int64_t place) {
    bool of_prompt = place < tree.prompt, copying = tree.root - tree.copy < AFTER_COPY;
    return 2 * LENGTH_BUCKETS * ((of_prompt ? 0 : 1) + (copying ? 2 : 0));
}

// Returns the final mixing's weights in use.
double* mtp_line(const Tree& tree, const Node& node) {
    int depth = std::min(tree.predictions[node.prediction].depth, MTP_DEPTHS) - 1;
    return tree.mtp_weights + (depth * (LOGIT_KINDS + 1) + node.logit_hits) * MTP_INPUTS;
}

// Returns the log-odds of a token in a prediction; `FLOOR` if it is not listed.
double layer_odds(const Prediction& prediction, int32_t token) {
    for (int place = 0; place < MTP_WIDTH; ++place)
        if (prediction.tokens[place] == token) return std::max(prediction.odds[place], FLOOR);
    return FLOOR;
}

// Returns the log-odds before the final mixing; `base` for NaN, which marks tokens that only the layer suggests.
// Clipped: sums over many rows reach -100, and one step along such a gradient would throw the weights far off.
double before(double log_odds, double base) {
    return std::clamp(std::isnan(log_odds) ? base : log_odds, -MOST_ODDS, MOST_ODDS);
}

double weighed(const double* line, double memory, double layer) {
    return line[0] * memory + line[1] * layer + line[2] * std::max(memory, 0.0) + line[3];
}

void swap(Node& node, int one, int other) {
    std::swap(node.tokens[one], node.tokens[other]);
    std::swap(node.odds[one], node.odds[other]);
    std::swap(node.memory_odds[one], node.memory_odds[other]);
}

// Final mixing: combines the candidates' log-odds with the MTP layer's, and adds tokens that only the layer suggests.
void mix_prediction(const Tree& tree, Node& node, Candidates found) {
    const Prediction& prediction = tree.predictions[node.prediction];
    int known = found.count;
    std::copy_n(found.odds, known, node.memory_odds);
    for (int32_t token : prediction.tokens) {
        if (token < 0) break;
        int before = found.count, at = found.place_of(token);
        if (at == before) node.memory_odds[at] = NOT_A_NUMBER;
    }
    node.listed = found.count;
    node.base = found.base;
    const double* line = mtp_line(tree, node);
    double share = probability(*tree.mtp_trust);
    for (int at = 0; at < found.count; ++at) {
        double layer = layer_odds(prediction, node.tokens[at]);
        double mixed = weighed(line, before(node.memory_odds[at], node.base), layer);
        double without = before(node.memory_odds[at], FLOOR);  // with a share of zero there is no such token
        node.odds[at] = without + share * (mixed - without);
        if (at >= known && node.odds[at] >= NEGLIGIBLE)  // less likely ones would displace cells of the window
            swap(node, known++, at);
    }
    node.candidates = known;
}

// Returns the quantised log-odds of a token in a row; 0 if it is not listed.
int32_t value_of(const int32_t* row, int32_t token) {
    for (int place = 0; place < WIDTH; ++place)
        if ((row[place] & TOKEN) == token) return row[place] >> BITS;
    return 0;
}

// Returns the candidates' log-odds before any final mixing; NaN for tokens that only the layer suggests.
const double* odds_before(const Node& node) { return node.prediction >= 0 ? node.memory_odds : node.odds; }

bool takes_part(double log_odds, bool is_chosen) {
    return !std::isnan(log_odds) && (is_chosen || !(log_odds < NEGLIGIBLE));
}

// Updates the copy weights of a node by one gradient step per token.
void learn_copies(Tree& tree, const Node& node, int64_t chosen, double rate) {
    double* weights = tree.copy_weights[node.copy_line];
    const double* odds = odds_before(node);
    rate *= weights[COPY_KINDS + 1];
    for (int at = 0; at < node.candidates; ++at) {
        int32_t token = node.tokens[at];
        if (!takes_part(odds[at], token == chosen)) continue;
        double error = (token == chosen ? 1.0 : 0.0) - probability(odds[at]);
        for (int kind = 0; kind < COPY_KINDS; ++kind)
            weights[kind] += rate * error * (FLOOR + SCALE * value_of(node.copy_rows[kind], token));
        weights[COPY_KINDS] += rate * error;
    }
}

// Updates weights and share of the final mixing by one gradient step on the coding cost.
void learn_mtp(const Tree& tree, const Node& node, int64_t chosen, double rate) {
    const Prediction& prediction = tree.predictions[node.prediction];
    double* line = mtp_line(tree, node);
    double share = probability(*tree.mtp_trust), of_share = 0.0, gradient[MTP_INPUTS] = {};
    for (int at = 0; at < node.listed; ++at) {
        int32_t token = node.tokens[at];
        double log_odds = node.odds[at], memory = node.memory_odds[at];
        if (token != chosen && log_odds < NEGLIGIBLE) continue;
        double error = (token == chosen ? 1.0 : 0.0) - probability(log_odds);
        double prior = before(memory, node.base), layer = layer_odds(prediction, token);
        gradient[0] += error * prior;
        gradient[1] += error * layer;
        gradient[2] += error * std::max(prior, 0.0);
        gradient[3] += error;
        of_share += error * (weighed(line, prior, layer) - before(memory, FLOOR));
    }
    for (int kind = 0; kind < MTP_INPUTS; ++kind) line[kind] += MTP_RATE * rate * share * gradient[kind];
    double moved = *tree.mtp_trust + TRUST_RATE * rate * share * (1.0 - share) * of_share;
    *tree.mtp_trust = std::min(std::max(moved, -MOST_TRUST), MOST_TRUST);
}

// Updates the weights of rows and notes by one gradient step on the coding cost.
void learn_rows(Tree& tree, const Node& node, int64_t chosen, const Doubles& weights, double rate) {
    Hits hits{node.logit_hits, node.text_hits};
    double gradient[END + 1] = {}, note_gradient[NOTE_KINDS] = {};
    const double* odds = odds_before(node);
    for (int at = 0; at < node.candidates; ++at) {
        int32_t token = node.tokens[at];
        if (!takes_part(odds[at], token == chosen)) continue;
        double error = (token == chosen ? 1.0 : 0.0) - probability(odds[at]);
        for (int kind = 0; kind < END; ++kind)
            if (has_row(hits, kind)) gradient[kind] += error * (FLOOR + SCALE * value_of(node.rows[kind], token));
        for (int kind = 0; kind < NOTE_KINDS; ++kind)
            if (node.note_kinds >> kind & 1)
                note_gradient[kind] += error * (FLOOR + SCALE * value_of(node.note_rows[kind], token));
        gradient[END] += error;
    }
    double* line = line_of(weights, hits);
    for (int kind = 0; kind <= END; ++kind) line[kind] += rate * gradient[kind];
    if (node.note_kinds == 0) return;
    double* notes = tree.note_weights[node.note_kinds];
    for (int kind = 0; kind < NOTE_KINDS; ++kind) notes[kind] += rate * note_gradient[kind];
    notes[NOTE_KINDS] += rate * gradient[END];
}

}  // namespace

Note& note_at(Tree& tree, int64_t place, int64_t token) {
    uint64_t state = lengthened(lengthened(SEED, place), token);
    return tree.notes[(state >> 40) % tree.notes.size()];
}

void expand(Tree& tree, Node& node, const Tables& tables) {
    if (node.logit_hits >= 0) return;
    Hits hits = find_rows(tables.young, tables.old, node.tail, node.rows[0]);
    node.logit_hits = hits.logits;
    node.text_hits = hits.text;
    node.note_kinds = recall(tree, node);
    if (node.match_count > 0) node.copy_line = write_copy_rows(tree, node) + copy_set(tree, node.matches[0].next);
    Candidates found = mix(tree, node, tables.weights);
    node.candidates = found.count;
    if (node.prediction >= 0) mix_prediction(tree, node, found);
}

int led_by_mtp(const Tree& tree, const Node& parent, int rank) {
    double layer = layer_odds(tree.predictions[parent.prediction], parent.tokens[rank]);
    return layer > std::max(before(parent.memory_odds[rank], parent.base), FLOOR) ? 1 : 0;
}

void bring_forward(Node& node, int rank) {
    int best = rank;
    for (int at = rank + 1; at < node.candidates; ++at)
        if (node.odds[at] > node.odds[best]) best = at;
    swap(node, rank, best);
}

void learn_weights(Tree& tree, const Tables& tables, const Longs& path, const Longs& chosen, double rate) {
    for (int64_t step = 0; step < path.rows; ++step) {
        Node& node = tree.nodes[path[step]];
        expand(tree, node, tables);
        learn_rows(tree, node, chosen[step], tables.weights, rate);
        if (node.copy_line >= 0) learn_copies(tree, node, chosen[step], rate);
        if (node.prediction >= 0) learn_mtp(tree, node, chosen[step], rate);
    }
}

}  // namespace lade
