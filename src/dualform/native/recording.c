/* Recording: the slots of a backward pass, and looks at gradients and weights. */
#include "loops.h"
#ifdef BY_PROCESSOR
#include <immintrin.h>
#endif

enum { TILE = 8, TOP = 15, UNIT = 126 + TOP }; /* TOP, UNIT: as in store/encoding.py */
enum { WIDE = 8 };                             /* so many lanes, for sums of float64 */
enum { SLACK = 64 };                           /* as in record/audit.py */
static const double UNDERFLOW_BOUND = 1e-35;   /* UNDERFLOW there */

/* The nearest float16, ties to even; |x| < 65520. */
static inline uint16_t half(float x) {
    uint32_t bits, small, sign;
    float tiny;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    memcpy(&tiny, &bits, 4);
    tiny += 0.5f; /* its last bits are then those of a subnormal float16, rounded by the processor */
    memcpy(&small, &tiny, 4);
    uint32_t normal = (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
    return (uint16_t)(sign | (bits < 113u << 23 ? small - 0x3f000000u : normal));
}

LOOP float largest(const float *restrict x, int64_t n) {
    float found = 0;
    for (int64_t i = 0; i < n; i++) found = fabsf(x[i]) > found ? fabsf(x[i]) : found;
    return found;
}

LOOP void plain_halves(const float *restrict x, float scale, uint16_t *restrict out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = half(x[i] * scale);
}

#ifdef BY_PROCESSOR
/* The same by an instruction, where there is one; gives how many it has done. */
__attribute__((target("avx,f16c"))) static int64_t halves_at_once(const float *x, float scale, uint16_t *out, int64_t n) {
    const __m256 by = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(x + i), by), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#endif

static void halves(const float *x, float scale, uint16_t *out, int64_t n) {
    int64_t done = 0;
#ifdef BY_PROCESSOR
    if (__builtin_cpu_supports("avx2")) done = halves_at_once(x, scale, out, n);
#endif
    if (done < n) plain_halves(x + done, scale, out + done, n - done);
}

/* Flags which of the rows of x (n, d) are zero; returns how many. Most rows are left at their first number. */
int64_t zero_rows(int64_t n, int64_t d, const float *x, uint8_t *flags) {
    int64_t count = 0;
    for (int64_t row = 0; row < n; row++) {
        const float *own = x + row * d;
        int64_t i = 0;
        while (i < d && own[i] == 0) i++;
        flags[row] = i == d;
        count += flags[row];
    }
    return count;
}

/* sum[o] += Σ_i factor[i] x[i][o] and plain[o] += Σ_i x[i][o] over TILE vectors, or the fewer that there are. */
LOOP void add(const float *restrict x, const float *restrict factor, int64_t rows, double *restrict sum, double *restrict plain, int64_t n) {
    if (rows == TILE)
        for (int64_t o = 0; o < n; o++) {
            float here = 0, as_it_is = 0;
            for (int i = 0; i < TILE; i++) {
                here += factor[i] * x[i * n + o];
                as_it_is += x[i * n + o];
            }
            sum[o] += here;
            plain[o] += as_it_is;
        }
    else
        for (int64_t i = 0; i < rows; i++)
            for (int64_t o = 0; o < n; o++) {
                sum[o] += factor[i] * x[i * n + o];
                plain[o] += x[i * n + o];
            }
}

/* The same for a layer of few outputs, whose sums lie so many places apart. */
static void add_apart(const float *x, const float *factor, int64_t rows, double *sum, int64_t apart, int64_t n) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t o = 0; o < n; o++) sum[o * apart] += factor[i] * x[i * n + o];
}

/* Store a vector, given its squared norm: in float32 (exponent NULL) or in float16 with a power of two. */
static void store(const float *x, float square, int64_t n, int as_it_is, void *out, int16_t *exponent) {
    if (!exponent) {
        memcpy(out, x, sizeof(float) * (size_t)n);
        return;
    }
    float bound = sqrtf(square), scale;
    if (!(bound > 1e-15f && bound < 1e15f)) {
        bound = largest(x, n);
        bound = fminf(fmaxf(bound, 0x1p-100f), 0x1p127f);
    }
    uint32_t raised;
    memcpy(&raised, &bound, 4);
    raised >>= 23;
    if (as_it_is && raised >= 127 && raised < 127 + TOP) raised = UNIT;
    *exponent = (int16_t)((int32_t)raised - UNIT);
    uint32_t bits = (253u + TOP - raised) << 23;
    memcpy(&scale, &bits, 4);
    halves(x, scale, out, n);
}

/* A matrix (rows, columns) that is to be seen through R (columns, k), given as (k, columns); random NULL: a vector (rows), as it is;
   matrix NULL: nothing. */
typedef struct {
    const float *matrix, *random;
    int64_t rows, columns, k;
    int64_t at;             /* where what is seen goes */
    double *known;          /* what it is to be compared with, or NULL */
    int64_t part, turns;    /* it falls into so many parts of so many rows, of which one is looked at; turns 0: all of it */
    double scale, roundoff; /* a bound on the absolute terms of what is known, as an audit.Link has it, and the parameter's unit
                               roundoff; roundoff 0: no verdict is wanted */
    /* Found by looks(): its first row, and how many there are */
    int64_t first, some;
} Look;

/* The slots of one call: keys (n, d_in), error signals (n, d_out), and random, (k, d_in). stored_errors NULL: only keys are kept.
   exponents NULL: float32 is stored. */
typedef struct {
    int64_t n, d_in, d_out, k;
    const float *keys, *errors, *random;
    char *stored_keys;
    int16_t *key_exponents;
    char *stored_errors;
    int16_t *error_exponents;
    double *sums;
} Call;

typedef struct {
    const Call *calls;
    int64_t count, threads, size;
} Calls;

static const float ones[TILE] = {1, 1, 1, 1, 1, 1, 1, 1};

static int64_t size_of(const Call *s) { return (s->k + 1) * s->d_out + 3; }

static void some_slots(const Call *s, int64_t first, int64_t end, double *sums) {
    const int64_t d_in = s->d_in, d_out = s->d_out, k = s->k;
    const size_t width = s->key_exponents ? sizeof(uint16_t) : sizeof(float);
    double *squares = sums + (k + 1) * d_out;
    for (int64_t low = first; low < end; low += TILE) {
        const int64_t rows = end - low < TILE ? end - low : TILE;
        const float *some = s->errors + low * d_out;
        float seen[TILE];
        for (int64_t i = 0; i < rows; i++) {
            const float *key = s->keys + (low + i) * d_in, *error = some + i * d_out;
            const float error_square = dot(error, error, d_out);
            float key_square;
            dots(key, s->random, d_in, &key_square, seen + i);
            squares[0] += error_square;
            squares[2] += key_square;
            if (!(key_square <= FLT_MAX && error_square <= FLT_MAX)) {
                squares[0] = INFINITY;
                return;
            }
            store(key, key_square, d_in, 1, s->stored_keys + width * (size_t)((low + i) * d_in),
                  s->key_exponents ? s->key_exponents + low + i : NULL);
            if (s->stored_errors)
                store(error, error_square, d_out, 0, s->stored_errors + width * (size_t)((low + i) * d_out),
                      s->error_exponents ? s->error_exponents + low + i : NULL);
        }
        for (int64_t column = 0; column < k; column++) {
            for (int64_t i = 0; i < rows; i++) {
                if (column) seen[i] = dot(s->keys + (low + i) * d_in, s->random + column * d_in, d_in);
                squares[1] += (double)seen[i] * seen[i];
            }
            if (k == 1)
                add(some, seen, rows, sums, sums + d_out, d_out);
            else
                add_apart(some, seen, rows, sums + column, k, d_out);
        }
        if (k > 1) add_apart(some, ones, rows, sums + k * d_out, 1, d_out);
    }
}

/* Each thread's share of each call, into sums of its own. */
static void shares(void *what, int64_t low, int64_t high, int part) {
    const Calls *all = what;
    double *sums = all->calls->sums + part * all->size;
    for (const Call *s = all->calls; s < all->calls + all->count; sums += size_of(s++)) {
        const int64_t tiles = (s->n + TILE - 1) / TILE, end = tiles * high / all->threads * TILE;
        some_slots(s, tiles * low / all->threads * TILE, end < s->n ? end : s->n, sums);
    }
}

/* Whether the squares of a call's error signals vanish in float32, so that their norm says nothing. */
static int vanishes(const Call *s, double norm) {
    return norm < 1e-15 && largest(s->errors, s->n * s->d_out) > 0;
}

/* The slots of some calls are copied as they are stored, and of each call, one after the other,

     sums (d_out, k) = Σ error ⊗ (key · R), (d_out) = Σ error, ‖errors‖, and the norms of the keys of both: those seen through R (or
     as they are, if they nearly cancel in R), and ones.

   sums has room for as many of all these as there are threads. If ‖errors‖ is not finite, something in its call is not, or squares leave the
   range of float32: nothing that was written of it counts, and it is left to the plain way. Gives how many such calls there are. */
int64_t slots(int64_t count, Call *calls, double *sums, int64_t threads) {
    Calls all = {calls, count, threads, 0};
    int64_t work = 0, odd = 0;
    for (Call *s = calls; s < calls + count; s++) {
        s->sums = sums + all.size;
        all.size += size_of(s);
        work += s->n * (s->d_in + s->d_out);
    }
    if (work < WORTH) all.threads = 1;
    memset(sums, 0, sizeof(double) * (size_t)(all.size * all.threads));
    in_parts(shares, &all, all.threads, all.threads);
    for (int64_t part = 1; part < all.threads; part++)
        for (int64_t i = 0; i < all.size; i++) sums[i] += sums[part * all.size + i];
    for (const Call *s = calls; s < calls + count; s++) {
        double *norms = s->sums + (s->k + 1) * s->d_out;
        const double errors = sqrt(norms[0]), seen = sqrt(norms[1]), keys = sqrt(norms[2]);
        norms[0] = vanishes(s, errors) ? INFINITY : errors;
        norms[1] = keys > seen ? keys : seen;
        norms[2] = sqrt((double)s->n);
        odd += !isfinite(norms[0]);
    }
    return odd;
}

typedef struct {
    int64_t count;
    const Look *looks;
    double *out;
} Looks;

/* How many products a row takes. */
static int64_t cost(const Look *look) { return look->k * (look->random ? look->columns : 1); }

/* The first row that begins at a product or after it. */
static int64_t row_at(const Look *look, int64_t product) {
    const int64_t row = product <= 0 ? 0 : (product + cost(look) - 1) / cost(look);
    return row < look->some ? row : look->some;
}

/* From one product to another, as if all matrices were one. */
static void some_rows(void *what, int64_t low, int64_t high, int part) {
    const Looks *all = what;
    (void)part;
    for (const Look *look = all->looks; look < all->looks + all->count; look++) {
        const float *matrix = look->matrix + look->first * (look->random ? look->columns : 1);
        double *out = all->out + look->at;
        for (int64_t row = row_at(look, low); row < row_at(look, high); row++)
            for (int64_t column = 0; column < look->k; column++)
                out[row * look->k + column] =
                    look->random ? dot(matrix + row * look->columns, look->random + column * look->columns, look->columns)
                                 : matrix[row];
        low -= look->some * cost(look);
        high -= look->some * cost(look);
    }
}

/* x · x, x · y, y · y and ‖x − y‖². */
LOOP void compare_sums(int64_t n, const double *restrict x, const double *restrict y, double *sums) {
    double own[4][WIDE] = {{0}};
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE)
        for (int j = 0; j < WIDE; j++) {
            const double a = x[i + j], b = y[i + j], rest = a - b;
            own[0][j] += a * a;
            own[1][j] += a * b;
            own[2][j] += b * b;
            own[3][j] += rest * rest;
        }
    for (; i < n; i++) {
        const double a = x[i], b = y[i], rest = a - b;
        own[0][0] += a * a;
        own[1][0] += a * b;
        own[2][0] += b * b;
        own[3][0] += rest * rest;
    }
    for (int sum = 0; sum < 4; sum++) {
        sums[sum] = 0;
        for (int j = 0; j < WIDE; j++) sums[sum] += own[sum][j];
    }
}

/* ‖x − ratio y‖² */
LOOP double apart(int64_t n, const double *restrict x, double ratio, const double *restrict y) {
    double own[WIDE] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE)
        for (int j = 0; j < WIDE; j++) own[j] += (x[i + j] - ratio * y[i + j]) * (x[i + j] - ratio * y[i + j]);
    for (; i < n; i++) sum += (x[i] - ratio * y[i]) * (x[i] - ratio * y[i]);
    for (int j = 0; j < WIDE; j++) sum += own[j];
    return sum;
}

enum { VERDICT = 5 }; /* as in record/projections.py */

/* How a single backward pass explains a gradient, as audit.explain has it: its factor; the residual; whether what remains is rounding; the
   norm of the gradient; the signal. seen, added: the gradient and what the pass has added, through R. */
static void explain(int64_t n, const double *seen, const double *added, double scale, double roundoff, double verdict[VERDICT]) {
    double sums[4], ratio = 1, signal = 0;
    compare_sums(n, seen, added, sums);
    const double square = sums[0], both = sums[1], expected = sums[2], unit = SLACK * roundoff;
    double rest = sums[3];
    if (isfinite(expected) && expected != 0) {
        signal = sqrt(expected) / (unit * scale);
        if (square == 0)
            ratio = 0;
        else if (signal > 1) {
            ratio = both / expected;
            if (fabs(ratio - 1) <= 16 * roundoff) ratio = 1;
        }
    }
    if (ratio != 1) rest = ratio == 0 ? square : apart(n, seen, ratio, added);
    const double whole = sqrt(square), left = sqrt(rest), bound = ratio == 0 ? 0 : scale * fabs(ratio);
    verdict[0] = ratio;
    verdict[1] = !isfinite(square) ? NAN : whole != 0 ? left / whole : 0;
    verdict[2] = !isfinite(square) || left <= UNDERFLOW_BOUND || left <= unit * (whole > bound ? whole : bound);
    verdict[3] = whole;
    verdict[4] = isfinite(square) && signal > 0 ? signal : 0;
}

/* matrix @ R of each goes to out. found (count, VERDICT), of what is known: its verdict, if one is wanted; else x · x, x · y, y · y and
   ‖x − y‖², for what is seen and what is known. turn: which parts are looked at. Gives how many parts are not what is known. */
int64_t looks(int64_t count, Look *looks, double *out, double *found, int64_t turn, int64_t threads) {
    int64_t products = 0;
    for (Look *look = looks; look < looks + count; look++) {
        const int64_t rows = look->matrix ? look->rows : 0, from = look->turns ? turn % look->turns * look->part : 0;
        const int64_t most = look->turns ? look->part : rows;
        look->first = from < rows ? from : rows;
        look->some = rows - look->first < most ? rows - look->first : most;
        products += look->some * cost(look);
    }
    Looks all = {count, looks, out};
    in_parts(some_rows, &all, products, products < WORTH ? 1 : threads);
    int64_t changed = 0;
    for (const Look *look = looks; look < looks + count; look++, found += VERDICT) {
        const int64_t n = look->known ? look->some * look->k : 0;
        const double *seen = out + look->at;
        const double *known = look->known ? look->known + look->first * look->k : NULL;
        if (known && look->roundoff != 0)
            explain(n, seen, known, look->scale, look->roundoff, found);
        else
            compare_sums(n, seen, known, found);
        changed += look->turns && found[3] != 0; /* what is seen again is the same to the last bit */
    }
    return changed;
}
