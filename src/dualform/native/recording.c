/* Recording: the slots of a backward pass, and looks at gradients and weights. */
#include "loops.h"

enum { TILE = 8, TOP = 15, UNIT = 126 + TOP }; /* TOP, UNIT: as in store/encoding.py */

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

LOOP void halves(const float *restrict x, float scale, uint16_t *restrict out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = half(x[i] * scale);
}

/* sum[o] += Σ_i factor[i] x[i][o] over TILE vectors, or the fewer that there are. */
LOOP void add(const float *restrict x, const float *restrict factor, int64_t rows, double *restrict sum, int64_t n) {
    if (rows == TILE)
        for (int64_t o = 0; o < n; o++) {
            float here = 0;
            for (int i = 0; i < TILE; i++) here += factor[i] * x[i * n + o];
            sum[o] += here;
        }
    else
        for (int64_t i = 0; i < rows; i++)
            for (int64_t o = 0; o < n; o++) sum[o] += factor[i] * x[i * n + o];
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
        for (int64_t i = 0; i < rows; i++) {
            const float *key = s->keys + (low + i) * d_in, *error = some + i * d_out;
            const float key_square = dot(key, key, d_in), error_square = dot(error, error, d_out);
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
            float seen[TILE];
            for (int64_t i = 0; i < rows; i++) {
                seen[i] = dot(s->keys + (low + i) * d_in, s->random + column * d_in, d_in);
                squares[1] += (double)seen[i] * seen[i];
            }
            add(some, seen, rows, sums + column * d_out, d_out);
        }
        add(some, ones, rows, sums + k * d_out, d_out);
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

/* The slots of some calls are copied as they are stored, and of each call, one after the other,

     sums (k + 1, d_out) = Σ (key · R) ⊗ error, and in the last row Σ error; then ‖errors‖², ‖keys R‖², ‖keys‖².

   sums has room for as many of all these as there are threads. If a call's first square is not finite, something in it is not, and
   nothing that was written of it counts. */
void slots(int64_t count, Call *calls, double *sums, int64_t threads) {
    Calls all = {calls, count, threads, 0};
    int64_t work = 0;
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
}

/* A matrix (rows, columns) that is to be seen through R (columns, k), given as (k, columns); random NULL: a vector (rows), as it is.
   Of its parts of so many rows only the one whose turn it is, if that is one (turn >= 0). */
typedef struct {
    const float *matrix, *random;
    int64_t rows, columns, k;
    const double *known;
    int64_t part, turn;
    /* Found by looks(): its first row, how many there are, and where what is seen goes */
    int64_t first, some;
    double *out;
} Look;

typedef struct {
    int64_t count;
    const Look *looks;
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
        for (int64_t row = row_at(look, low); row < row_at(look, high); row++)
            for (int64_t column = 0; column < look->k; column++)
                look->out[row * look->k + column] =
                    look->random ? dot(matrix + row * look->columns, look->random + column * look->columns, look->columns)
                                 : matrix[row];
        low -= look->some * cost(look);
        high -= look->some * cost(look);
    }
}

LOOP void compare_sums(int64_t n, const double *restrict x, const double *restrict y, double *sums) {
    enum { WIDE = 8 };
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

/* matrix @ R of each, one after the other in out. sums (count, 4): out · out, out · known, known · known and ‖out − known‖²; zero
   where nothing is known to compare it with. */
void looks(int64_t count, Look *looks, double *out, double *sums, int64_t threads) {
    int64_t products = 0;
    for (Look *look = looks; look < looks + count; look++) {
        const int64_t most = look->turn < 0 ? look->rows : look->part, from = look->turn < 0 ? 0 : look->turn * look->part;
        look->first = from < look->rows ? from : look->rows;
        look->some = look->rows - look->first < most ? look->rows - look->first : most;
        look->out = out;
        out += look->some * look->k;
        products += look->some * cost(look);
    }
    Looks all = {count, looks};
    in_parts(some_rows, &all, products, products < WORTH ? 1 : threads);
    for (const Look *look = looks; look < looks + count; look++, sums += 4)
        compare_sums(look->known ? look->some * look->k : 0, look->out, look->known + look->first * look->k, sums);
}
