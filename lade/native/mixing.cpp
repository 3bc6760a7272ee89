// Mixing of a node's features into probabilities, and learning of the weights.
// The functions are those of lade/decoding/kernels/mixing.py, which documents them.
#include <algorithm>
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

double* line_of(const Doubles& weights, Hits hits) { return weights.row(hits.logits * (TEXT_ORDERS + 1) + hits.text); }

// Copies the notes for a position and for a token there; returns the bit set of kinds present.
int recall(const Tree& tree, int64_t place, int32_t token, int32_t* rows) {
    int kinds = 0;
    for (int kind = 0; kind < NOTE_KINDS; ++kind) {
        int32_t of = kind == AT_TOKEN ? token : -1;
        const int32_t* note = tree.note(note_slot(tree, place, of));
        if (note[0] != place || note[1] != of) continue;
        kinds |= 1 << kind;
        std::copy(note + 2, note + 2 + WIDTH, rows + kind * WIDTH);
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
Candidates mix(Tree& tree, int64_t node, Hits hits, int note_kinds, int copy_line, const Doubles& weights) {
    const double *line = line_of(weights, hits), *notes = tree.note_line(note_kinds);
    const double* copies = tree.copy_weights_of(std::max(copy_line, 0));
    double base = line[END] + notes[NOTE_KINDS];
    for (int kind = 0; kind < END; ++kind)
        if (has_row(hits, kind)) base += FLOOR * line[kind];
    for (int kind = 0; kind < NOTE_KINDS; ++kind)
        if (note_kinds >> kind & 1) base += FLOOR * notes[kind];
    if (copy_line >= 0) {
        base += copies[COPY_KINDS];
        for (int kind = 0; kind < COPY_KINDS; ++kind) base += FLOOR * copies[kind];
    }
    Candidates found{tree.tokens_of(node), tree.odds_of(node), base};
    for (int kind = 0; kind < END; ++kind)
        if (has_row(hits, kind)) found.add_row(tree.rows_of(node) + kind * WIDTH, line[kind]);
    for (int kind = 0; kind < NOTE_KINDS; ++kind)
        if (note_kinds >> kind & 1) found.add_row(tree.note_rows_of(node) + kind * WIDTH, notes[kind]);
    for (int kind = 0; kind < COPY_KINDS && copy_line >= 0; ++kind)
        found.add_row(tree.copy_rows_of(node) + kind * WIDTH, copies[kind]);
    return found;
}

int length_bucket(int length) {
    if (length <= 3) return length - 1;
    if (length <= 7) return length <= 5 ? 3 : 4;
    return length <= 15 ? 5 : 6;
}

// Writes the tokens after a node's matches as rows; returns the index within a set of copy weights.
int write_copy_rows(const Tree& tree, int64_t node, int32_t* rows) {
    int count = tree.match_counts[node], different = 0;
    int32_t *latest = rows + LATEST * WIDTH, *each = rows + EACH * WIDTH, tokens[MOST_MATCHES];
    std::fill(rows, rows + COPY_KINDS * WIDTH, TOKEN);
    for (int at = 0; at < MOST_MATCHES; ++at) tokens[at] = at < count ? tree.text[tree.matches_of(node)[at]] : -1;
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
    return 2 * length_bucket(tree.match_lengths_of(node)[0]) + (different == 1 ? 1 : 0);
}

// Returns the first index of a set of copy weights: by match in the prompt or answer, and before or after a copy.
int copy_set(const Tree& tree, int64_t place) {
    bool of_prompt = place < tree.used[PROMPT], copying = tree.used[ROOT] - tree.used[COPY] < AFTER_COPY;
    return 2 * LENGTH_BUCKETS * ((of_prompt ? 0 : 1) + (copying ? 2 : 0));
}

// Returns the final mixing's weights in use.
double* mtp_line(const Tree& tree, int64_t node) {
    int depth = std::min(tree.mtp_depths[tree.predicted[node]], MTP_DEPTHS) - 1;
    return tree.mtp_weights + (depth * (ORDERS + 1) + tree.logit_hits[node]) * MTP_INPUTS;
}

// Returns the log-odds of a token in a prediction; `FLOOR` if it is not listed.
double layer_odds(const Tree& tree, int64_t number, int32_t token) {
    const int32_t* listed = tree.prediction(number);
    for (int place = 0; place < MTP_WIDTH; ++place)
        if (listed[place] == token) return std::max(tree.predicted_odds(number)[place], FLOOR);
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

void swap(Tree& tree, int64_t node, int one, int other) {
    std::swap(tree.tokens_of(node)[one], tree.tokens_of(node)[other]);
    std::swap(tree.odds_of(node)[one], tree.odds_of(node)[other]);
    std::swap(tree.memory_odds_of(node)[one], tree.memory_odds_of(node)[other]);
}

// Final mixing: combines the candidates' log-odds with the MTP layer's, and adds tokens that only the layer suggests.
void mix_prediction(Tree& tree, int64_t node, Candidates found) {
    int64_t number = tree.predicted[node];
    int known = found.count;
    double* memory_odds = tree.memory_odds_of(node);
    std::copy(found.odds, found.odds + known, memory_odds);
    for (int place = 0; place < MTP_WIDTH; ++place) {
        int32_t token = tree.prediction(number)[place];
        if (token < 0) break;
        int before = found.count, at = found.place_of(token);
        if (at == before) memory_odds[at] = NOT_A_NUMBER;
    }
    tree.listed[node] = found.count;
    tree.bases[node] = found.base;
    const double* line = mtp_line(tree, node);
    double share = probability(tree.mtp_trust[0]);
    for (int at = 0; at < found.count; ++at) {
        double layer = layer_odds(tree, number, found.tokens[at]);
        double mixed = weighed(line, before(memory_odds[at], found.base), layer);
        double without = before(memory_odds[at], FLOOR);  // with a share of zero there is no such token
        found.odds[at] = without + share * (mixed - without);
        if (at >= known && found.odds[at] >= NEGLIGIBLE)  // less likely ones would displace cells of the window
            swap(tree, node, known++, at);
    }
    tree.candidates[node] = known;
}

// Returns the quantised log-odds of a token in a row; 0 if it is not listed.
int32_t value_of(const int32_t* row, int32_t token) {
    for (int place = 0; place < WIDTH; ++place)
        if ((row[place] & TOKEN) == token) return row[place] >> BITS;
    return 0;
}

// Returns the candidates' log-odds before any final mixing; NaN for tokens that only the layer suggests.
const double* odds_before(const Tree& tree, int64_t node) {
    return tree.predicted[node] >= 0 ? tree.memory_odds_of(node) : tree.odds_of(node);
}

bool takes_part(double log_odds, bool is_chosen) {
    return !std::isnan(log_odds) && (is_chosen || !(log_odds < NEGLIGIBLE));
}

// Updates the copy weights of a node by one gradient step per token.
void learn_copies(Tree& tree, int64_t node, int64_t chosen, double rate) {
    const int32_t* rows = tree.copy_rows_of(node);
    double* weights = tree.copy_weights_of(tree.copy_line[node]);
    const double* odds = odds_before(tree, node);
    rate *= weights[COPY_KINDS + 1];
    for (int at = 0; at < tree.candidates[node]; ++at) {
        int32_t token = tree.tokens_of(node)[at];
        if (!takes_part(odds[at], token == chosen)) continue;
        double error = (token == chosen ? 1.0 : 0.0) - probability(odds[at]);
        for (int kind = 0; kind < COPY_KINDS; ++kind)
            weights[kind] += rate * error * (FLOOR + SCALE * value_of(rows + kind * WIDTH, token));
        weights[COPY_KINDS] += rate * error;
    }
}

// Updates weights and share of the final mixing by one gradient step on the coding cost.
void learn_mtp(Tree& tree, int64_t node, int64_t chosen, double rate) {
    int64_t number = tree.predicted[node];
    double* line = mtp_line(tree, node);
    double share = probability(tree.mtp_trust[0]), of_share = 0.0, gradient[MTP_INPUTS] = {};
    for (int at = 0; at < tree.listed[node]; ++at) {
        int32_t token = tree.tokens_of(node)[at];
        double log_odds = tree.odds_of(node)[at], memory = tree.memory_odds_of(node)[at];
        if (token != chosen && log_odds < NEGLIGIBLE) continue;
        double error = (token == chosen ? 1.0 : 0.0) - probability(log_odds);
        double prior = before(memory, tree.bases[node]), layer = layer_odds(tree, number, token);
        gradient[0] += error * prior;
        gradient[1] += error * layer;
        gradient[2] += error * std::max(prior, 0.0);
        gradient[3] += error;
        of_share += error * (weighed(line, prior, layer) - before(memory, FLOOR));
    }
    for (int kind = 0; kind < MTP_INPUTS; ++kind) line[kind] += MTP_RATE * rate * share * gradient[kind];
    double moved = tree.mtp_trust[0] + TRUST_RATE * rate * share * (1.0 - share) * of_share;
    tree.mtp_trust[0] = std::min(std::max(moved, -MOST_TRUST), MOST_TRUST);
}

// Updates the weights of rows and notes by one gradient step on the coding cost.
void learn_rows(Tree& tree, int64_t node, int64_t chosen, const Doubles& weights, double rate) {
    Hits hits{tree.logit_hits[node], tree.text_hits[node]};
    int note_kinds = tree.note_kinds[node];
    double gradient[END + 1] = {}, note_gradient[NOTE_KINDS] = {};
    const double* odds = odds_before(tree, node);
    for (int at = 0; at < tree.candidates[node]; ++at) {
        int32_t token = tree.tokens_of(node)[at];
        if (!takes_part(odds[at], token == chosen)) continue;
        double error = (token == chosen ? 1.0 : 0.0) - probability(odds[at]);
        for (int kind = 0; kind < END; ++kind)
            if (has_row(hits, kind))
                gradient[kind] += error * (FLOOR + SCALE * value_of(tree.rows_of(node) + kind * WIDTH, token));
        for (int kind = 0; kind < NOTE_KINDS; ++kind)
            if (note_kinds >> kind & 1)
                note_gradient[kind] += error * (FLOOR + SCALE * value_of(tree.note_rows_of(node) + kind * WIDTH, token));
        gradient[END] += error;
    }
    double* line = line_of(weights, hits);
    for (int kind = 0; kind <= END; ++kind) line[kind] += rate * gradient[kind];
    if (note_kinds == 0) return;
    double* notes = tree.note_line(note_kinds);
    for (int kind = 0; kind < NOTE_KINDS; ++kind) notes[kind] += rate * note_gradient[kind];
    notes[NOTE_KINDS] += rate * gradient[END];
}

}  // namespace

int64_t note_slot(const Tree& tree, int64_t place, int64_t token) {
    uint64_t state = lengthened(lengthened(SEED, place), token);
    return static_cast<int64_t>((state >> 40) % static_cast<uint64_t>(tree.note_slots));
}

void expand(Tree& tree, int64_t node, const Tables& tables) {
    if (tree.logit_hits[node] >= 0) return;
    Hits hits = find_rows(tables.young, tables.old, tree.tail(node), tree.rows_of(node));
    int kinds = recall(tree, tree.used[ROOT] + tree.depths[node], tree.ids[node], tree.note_rows_of(node)), line = -1;
    if (tree.match_counts[node] > 0)
        line = write_copy_rows(tree, node, tree.copy_rows_of(node)) + copy_set(tree, tree.matches_of(node)[0]);
    tree.logit_hits[node] = hits.logits;
    tree.text_hits[node] = hits.text;
    tree.note_kinds[node] = kinds;
    tree.copy_line[node] = line;
    Candidates found = mix(tree, node, hits, kinds, line, tables.weights);
    tree.candidates[node] = found.count;
    if (tree.predicted[node] >= 0) mix_prediction(tree, node, found);
}

int led_by_mtp(const Tree& tree, int64_t parent, int rank) {
    double layer = layer_odds(tree, tree.predicted[parent], tree.tokens_of(parent)[rank]);
    return layer > std::max(before(tree.memory_odds_of(parent)[rank], tree.bases[parent]), FLOOR) ? 1 : 0;
}

void bring_forward(Tree& tree, int64_t node, int rank) {
    const double* odds = tree.odds_of(node);
    int best = rank;
    for (int at = rank + 1; at < tree.candidates[node]; ++at)
        if (odds[at] > odds[best]) best = at;
    swap(tree, node, rank, best);
}

void learn_weights(Tree& tree, const Tables& tables, const Longs& path, const Longs& chosen, double rate) {
    for (int64_t step = 0; step < path.rows; ++step) {
        int64_t node = path[step];
        expand(tree, node, tables);
        learn_rows(tree, node, chosen[step], tables.weights, rate);
        if (tree.copy_line[node] >= 0) learn_copies(tree, node, chosen[step], rate);
        if (tree.predicted[node] >= 0) learn_mtp(tree, node, chosen[step], rate);
    }
}

}  // namespace lade
