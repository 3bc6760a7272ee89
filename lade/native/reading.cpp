// Top-k of logits as entries: lade/decoding/readout.py, which documents it.
#include <algorithm>
#include <cstring>
#include <limits>

#include "drafting.h"

namespace lade {
namespace {

constexpr double FAR = -12.0;  // block maxima this far below the best score are negligible in the sum

// Maps the bits of a float to a signed integer of the same order, or back; `Bits` has as many bits as the float.
template <typename Bits>
inline Bits flipped(Bits bits) {
    constexpr int SIGN = 8 * sizeof(Bits) - 1;
    return static_cast<Bits>(bits ^ ((bits >> SIGN) & std::numeric_limits<Bits>::max()));
}

// Maps them to an order-preserving integer; NaN sorts above everything. Integer maxima are vectorised.
inline int32_t sortable(int32_t bits) { return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : flipped(bits); }
inline int16_t sortable(int16_t bits) { return (bits & 0x7FFF) > 0x7F80 ? 0x7FC0 : flipped(bits); }

// Returns the bits of a logit; of bfloat16 half as many, of which a vector holds twice as many.
inline int16_t bits_of(const uint16_t* logit) { return static_cast<int16_t>(*logit); }
inline int32_t bits_of(const float* logit) {
    int32_t bits;
    std::memcpy(&bits, logit, sizeof bits);
    return bits;
}

// Returns a logit as float32, given its bits or where it is.
inline float value_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline float value_of(int16_t bits) { return value_of(static_cast<int32_t>(static_cast<uint32_t>(bits) << 16)); }
inline float value_of(const float* logit) { return *logit; }
inline float value_of(const uint16_t* logit) { return value_of(bits_of(logit)); }

template <typename Logit>
__attribute__((always_inline)) inline void find_maxima_of(const Logit* logits, int64_t vocabulary, float* maxima) {
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        using Bits = decltype(bits_of(logits));
        Bits best = std::numeric_limits<Bits>::min();
        int64_t count = std::min<int64_t>(BLOCK, vocabulary - first);
        for (int64_t at = 0; at < count; ++at) {
            Bits ordered = sortable(bits_of(logits + first + at));
            best = ordered > best ? ordered : best;
        }
        maxima[first / BLOCK] = value_of(flipped(best));
    }
}

// Writes the maximum of each block of `BLOCK` logits.
LADE_CLONES void find_maxima(const float* logits, int64_t vocabulary, float* maxima) {
    find_maxima_of(logits, vocabulary, maxima);
}
LADE_CLONES void find_maxima(const uint16_t* logits, int64_t vocabulary, float* maxima) {
    find_maxima_of(logits, vocabulary, maxima);
}

// The `WIDTH` ids with the highest scores so far, in descending order; NaN ranks highest, as in argmax.
struct Best {
    int64_t ids[WIDTH];
    float scores[WIDTH];
    int used = 0;

    static bool above(float score, float other) { return score > other || (std::isnan(score) && !std::isnan(other)); }

    // Inserts an id by its score, after equal ones.
    void rank(int64_t id, float score) {
        if (used == WIDTH && score <= scores[WIDTH - 1]) return;
        int place = used < WIDTH ? used++ : WIDTH - 1;
        for (; place > 0 && above(score, scores[place - 1]); --place) {
            ids[place] = ids[place - 1];
            scores[place] = scores[place - 1];
        }
        ids[place] = id;
        scores[place] = score;
    }
};

// Returns a token and its quantised log-odds as an entry; the empty entry if its id does not fit.
int32_t entry_of(int64_t token, float weight, double total) {
    if (token >= TOKEN) return TOKEN;
    double odds = std::log(std::max<double>(weight, TINY) / std::max(total - weight, TINY));
    double value = std::isnan(odds) ? 0.0 : std::min(std::max((odds - FLOOR) / SCALE + 0.5, 0.0), 255.0);
    return static_cast<int32_t>(value) << BITS | static_cast<int32_t>(token);
}

template <typename Logit>
int64_t read_row(const Logit* logits, int64_t vocabulary, float* maxima, int32_t* entries) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
    find_maxima(logits, vocabulary, maxima);
    Best among, tokens;
    for (int64_t at = 0; at < blocks; ++at) among.rank(at, maxima[at]);
    float best = among.scores[0];
    double least = among.used == WIDTH ? among.scores[WIDTH - 1] : -std::numeric_limits<double>::infinity(), total = 0.0;
    for (int64_t at = 0; at < blocks; ++at)
        if (maxima[at] - best > FAR) total += std::exp(maxima[at] - best);
    std::sort(among.ids, among.ids + among.used);  // the first of equal scores wins
    for (int place = 0; place < among.used; ++place) {
        int64_t first = among.ids[place] * BLOCK;
        for (int64_t token = first; token < std::min(first + BLOCK, vocabulary); ++token)
            if (float score = value_of(logits + token); !(score < least)) tokens.rank(token, score);
    }
    for (int place = 0; place < WIDTH; ++place)
        entries[place] = place < tokens.used ? entry_of(tokens.ids[place], std::exp(tokens.scores[place] - best), total) : TOKEN;
    return tokens.ids[0];
}

template <typename Logit>
void read_rows(const Array<Logit>* logits, const Array<float>* maxima, const Longs* picks, const Ints* entries) {
    for (int64_t row = 0; row < logits->rows; ++row)
        (*picks)[row] = read_row(logits->row(row), logits->columns, maxima->data, entries->row(row));
}

}  // namespace
}  // namespace lade

using namespace lade;

LADE_KERNEL void lade_entries_of(const Array<float>* logits, const Array<float>* maxima, const Longs* picks,
                                 const Ints* entries) {
    read_rows(logits, maxima, picks, entries);
}

LADE_KERNEL void lade_entries_of_bfloat16(const Array<uint16_t>* logits, const Array<float>* maxima, const Longs* picks,
                                          const Ints* entries) {
    read_rows(logits, maxima, picks, entries);
}
