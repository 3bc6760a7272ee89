// The exponential function on vectors, and functions based on it, accurate to about one ulp.

// A polynomial in x by Horner's scheme, highest power first.
template <int count> INLINE Floats polynomial(Floats x, const float (&factors)[count]) {
    Floats found = broadcast(factors[0]);
    UNROLL for (int at = 1; at < count; at++) found = fma(found, x, broadcast(factors[at]));
    return found;
}

// exp(x): 2 ** n times a polynomial of the remainder; 0 below x = -87.
INLINE Floats exponential(Floats x) {
    constexpr float factors[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                 1.6666665459e-1f, 5.0000001201e-1f, 1.0f,             1.0f};
    constexpr float shift = 1.5f * (1 << 23);
    Floats shifted = fma(x, broadcast(1.44269504f), broadcast(shift));  // its lowest bits are n
    Floats n = shifted - shift;
    Floats rest = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
    Floats power = (Floats)(((Bits)shifted + 127) << 23);
    return x < -87.0f ? broadcast(0) : polynomial(rest, factors) * power;
}

// x / (1 + exp(slope * x + cubic * x ** 3)); the exponential overflows to infinity from 88.37 on.
INLINE Floats logistic_quotient(Floats x, Floats slope, Floats cubic) {
    Floats square = x * x;
    square = square < 1e30f ? square : broadcast(1e30f);
    Floats exponent = x * fma(cubic, square, slope);
    Floats power = exponent > 88.37f ? broadcast(INFINITY) : exponential(exponent);
    return x / (power + 1.0f);
}

// cap * tanh(x / cap), by a rational approximation.
INLINE Floats capped(Floats x, float cap) {
    constexpr float most = 7.90531110763549805f;  // beyond it, tanh rounds to 1
    constexpr float odd[] = {-2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                             5.12229709037114e-08f,  1.48572235717979e-05f, 6.37261928875436e-04f,
                             4.89352455891786e-03f};
    constexpr float even[] = {1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                              4.89352518554385e-03f};
    x = x / broadcast(cap);
    x = x > most ? broadcast(most) : x;
    x = x < -most ? broadcast(-most) : x;
    Floats square = x * x;
    return broadcast(cap) * ((x * polynomial(square, odd)) / polynomial(square, even));
}

struct LogisticProduct {
    const char* x;        // numbers of a dtype code, float32 or bfloat16
    const char* factors;  // as many numbers that the results are multiplied by; null for none
    char* found;          // the result, distinct from x
    int64_t kind;
    int64_t slope, cubic;  // coefficients of x and of x ** 3 in the exponent, as float32 bits
    int64_t count;         // numbers; each part has at least LANES
};

INLINE Floats rounded_to(Floats numbers, int64_t kind) {
    char spare[4 * LANES];
    store_as(spare, numbers, kind);
    return load_as(spare, kind);
}

// Writes x / (1 + exp(slope * x + cubic * x ** 3)) for the numbers from `first` to before `last`; with factors, that is
// rounded first, as by a product of its own. The last vector may overlap the one before it, and then writes the same bits
// again.
INLINE void logistic_products(const LogisticProduct& call, int64_t first, int64_t last, int64_t kind, bool gated) {
    const int64_t item = item_size(kind);
    const Floats slope = broadcast(load_one((const char*)&call.slope));
    const Floats cubic = broadcast(load_one((const char*)&call.cubic));
    for (int64_t begin = first; begin < last; begin += LANES) {
        const int64_t at = item * smaller(begin, last - LANES);
        Floats found = logistic_quotient(load_as(call.x + at, kind), slope, cubic);
        if (gated) found = rounded_to(found, kind) * load_as(call.factors + at, kind);
        store_as(call.found + at, found, kind);
    }
}

static void logistic_product(int64_t* fields) {
    const auto call = arguments_of<LogisticProduct>(fields);
    const int64_t parts = fields[1];
    for (int64_t part; (part = next_part(fields)) < parts;) {
        const int64_t first = call.count * part / parts, last = call.count * (part + 1) / parts;
        if (call.kind == BFLOAT16)
            call.factors ? logistic_products(call, first, last, BFLOAT16, true)
                         : logistic_products(call, first, last, BFLOAT16, false);
        else
            call.factors ? logistic_products(call, first, last, 0, true)
                         : logistic_products(call, first, last, 0, false);
    }
}
