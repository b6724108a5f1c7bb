/* The few loops that Python takes too long for. Each has a plain twin in Python: see docs/decisions/0017-compiled-loops.md.

   Sums run in lanes of their own, so that the compiler may use vectors without being told to be careless. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
/* The loader picks what the processor can do: the library may be built on one machine and run on another */
#define LOOP __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"))) static
#else
#define LOOP static
#endif

enum { LANES = 16, TILE = 8, TOP = 15, UNIT = 126 + TOP }; /* TOP, UNIT: as in store/encoding.py */
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));

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

LOOP float dot(const float *restrict x, const float *restrict y, int64_t n) {
    Lanes first = {0}, second = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        first += *(const Lanes *)(x + i) * *(const Lanes *)(y + i);
        second += *(const Lanes *)(x + i + LANES) * *(const Lanes *)(y + i + LANES);
    }
    for (; i < n; i++) sum += x[i] * y[i];
    first += second;
    for (int j = 0; j < LANES; j++) sum += first[j];
    return sum;
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

/* Work on some things, from low to high; part: the number of the thread. */
typedef void Work(void *what, int64_t low, int64_t high, int part);

#if defined(__gnu_linux__)
/* PyTorch's own threads, if its OpenMP is the common one: others beside them would be in their way. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

typedef struct {
    Work *work;
    void *what;
    int64_t count;
} Shared;

static void share(void *given) {
    const Shared *shared = given;
    const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
    shared->work(shared->what, shared->count * part / parts, shared->count * (part + 1) / parts, (int)part);
}

static void in_parts(Work *work, void *what, int64_t count, int64_t threads) {
    Shared shared = {work, what, count};
    if (threads > 1 && GOMP_parallel && omp_get_thread_num && omp_get_num_threads)
        GOMP_parallel(share, &shared, (unsigned)threads, 0);
    else
        work(what, 0, count, 0);
}
#else
static void in_parts(Work *work, void *what, int64_t count, int64_t threads) {
    (void)threads;
    work(what, 0, count, 0);
}
#endif

enum { WORTH = 1 << 16 }; /* so many products are worth a second thread */

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

enum { BLOCK = 2048 }; /* elements of a matrix, which stay in the first cache */

LOOP void scale(float *x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

LOOP void one_pass(int64_t n, float keep_v, float take_v, float take_m, float size, float eps, const float *gradient,
                   const float *kept, float *restrict v, float *restrict m, float *restrict w) {
    for (int64_t i = 0; i < n; i++) {
        v[i] = keep_v * v[i] + take_v * (gradient[i] * gradient[i]);
        m[i] += take_m * (kept[i] - m[i]);
        w[i] -= size * m[i] / (sqrtf(v[i]) + eps);
    }
}

/* One update of Adam or AdamW, n elements of a weight w and its moments m and v:

     v ← keep_v·v + take_v·gradient²;   m ← m + take_m·(kept − m);   w ← shrink·w − size·m / (√v + eps)

   gradient: what the optimizer saw; kept: the part of it that a mask keeps, or the same. take_m < 1/2. */
void adam(int64_t n, float keep_v, float take_v, float take_m, float shrink, float size, float eps, const float *gradient,
          const float *kept, float *v, float *m, float *w) {
    for (int64_t low = 0; low < n; low += BLOCK) {
        const int64_t some = n - low < BLOCK ? n - low : BLOCK;
        /* In a loop of its own, so that shrink·w is rounded, as it was in the training: most of the dual's gap comes from here */
        if (shrink != 1) scale(w + low, shrink, some);
        one_pass(some, keep_v, take_v, take_m, size, eps, gradient + low, kept + low, v + low, m + low, w + low);
    }
}

typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
enum { FLOAT32, FLOAT16, BFLOAT16 }; /* as in native/picked.py */
enum { SAMPLED = 16 }; /* one score in so many is looked at first, to see which are high */
enum { AHEAD = 2 }; /* so many vectors before it is needed, the processor is told of one */

/* sums += LANES stored numbers × scale × y */
static inline __attribute__((always_inline)) void add_product(Lanes *sums, const uint16_t *x, float scale, const float *y,
                                                              int kind) {
    const Bits bits = __builtin_convertvector(*(const Shorts *)x, Bits), rest = bits & 0x7fffu;
    const Bits small = (Bits)(__builtin_convertvector((Ints)rest, Lanes) * 0x1p-24f), is_small = (Bits)(rest < 0x400u);
    const Bits large = (rest << 13) + (112u << 23) + ((Bits)(rest >= 0x7c00u) & 112u << 23);
    const Bits half = (small & is_small) | (large & ~is_small) | (bits & 0x8000u) << 16;
    *sums += (Lanes)(kind == FLOAT16 ? half : bits << 16) * scale * *(const Lanes *)y;
}

static inline __attribute__((always_inline)) float dot_of(const uint16_t *x, float scale, const float *y, int64_t n, int kind) {
    Lanes sums = {0};
    uint16_t last_x[LANES] = {0};
    float last_y[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) add_product(&sums, x + i, scale, y + i, kind);
    memcpy(last_x, x + i, sizeof *x * (size_t)(n - i));
    memcpy(last_y, y + i, sizeof *y * (size_t)(n - i));
    add_product(&sums, last_x, scale, last_y, kind);
    for (int j = 0; j < LANES; j++) sum += sums[j];
    return sum;
}

LOOP float dot_halves(const uint16_t *x, float scale, const float *y, int64_t n) { return dot_of(x, scale, y, n, FLOAT16); }
LOOP float dot_brains(const uint16_t *x, float scale, const float *y, int64_t n) { return dot_of(x, scale, y, n, BFLOAT16); }

/* Queries (m, d), and n numbers of vectors in t tables, of which each goes on counting where the one before ends.

   ends (t): the number after each table's last; tables (t): where it begins; exponents (t): of its vectors' powers of
   two, or NULL. Numbers that ascend are found at once. */
typedef struct {
    int64_t n, t, d, m, kind;
    const int64_t *numbers, *ends;
    const char *const *tables;
    const int16_t *const *exponents;
    const float *queries;
    float *out;
    int missing;
} Picked;

static void some_picked(void *what, int64_t low, int64_t high, int part) {
    Picked *p = what;
    const int64_t n = p->n, d = p->d, bytes = d * (p->kind == FLOAT32 ? 4 : 2), *numbers = p->numbers, *ends = p->ends;
    (void)part;
    for (int64_t i = low, table = 0; i < high; i++) {
        const int64_t number = numbers[i], soon = i + AHEAD < n ? numbers[i + AHEAD] : number;
        if (number < 0 || !p->t || number >= ends[p->t - 1]) {
            p->missing = 1;
            return;
        }
        while (number >= ends[table]) table++;
        while (table && number < ends[table - 1]) table--;
        const int64_t row = number - (table ? ends[table - 1] : 0);
        const char *vector = p->tables[table] + row * bytes;
        const float scale = p->exponents[table] ? ldexpf(1, p->exponents[table][row]) : 1;
        /* Mostly in the same table; where not, a hint does no harm */
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(vector + (soon - number) * bytes + byte, 0, 2);
        for (int64_t q = 0; q < p->m; q++) {
            const float *query = p->queries + q * d;
            p->out[q * n + i] = p->kind == FLOAT32   ? dot((const float *)vector, query, d)
                                : p->kind == FLOAT16 ? dot_halves((const uint16_t *)vector, scale, query, d)
                                                     : dot_brains((const uint16_t *)vector, scale, query, d);
        }
    }
}

/* out (m, n) = queries · the vectors with these numbers; each is read from where it lies. Gives 0; 1: there is no such number. */
int picked(int64_t n, int64_t t, int64_t d, int64_t m, int64_t kind, const int64_t *numbers, const int64_t *ends,
           const char *const *tables, const int16_t *const *exponents, const float *queries, float *out, int64_t threads) {
    Picked all = {n, t, d, m, kind, numbers, ends, tables, exponents, queries, out, 0};
    in_parts(some_picked, &all, n, n * d < WORTH ? 1 : threads);
    return all.missing;
}

/* Scores in their order as whole numbers: NaN is above all, −0 is 0, and of equal scores that of the lower place is higher. */
static inline uint64_t standing(float score, int64_t place) {
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, 4);
    bits = score != score ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)place);
}

/* Bring the k highest of n numbers to the front, in any order; the lowest of them is then x[k - 1]. */
static void to_the_front(uint64_t *x, int64_t n, int64_t k) {
    for (int64_t low = 0, high = n - 1; low < high;) {
        const uint64_t middle = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > middle) i++;
            while (x[j] < middle) j--;
            if (i <= j) {
                const uint64_t other = x[i];
                x[i++] = x[j];
                x[j--] = other;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            return;
    }
}

typedef struct {
    int64_t groups, k, stride;
    const float *scores;
    const int32_t *codes;
    uint64_t *held;
    int64_t *counts;
    float *least;
} Highest;

static void keep_highest(uint64_t *mine, int64_t *count, int64_t k) {
    to_the_front(mine, *count, k);
    *count = k;
}

/* Of every stride-th score from low to high. least: what there is no need to look below. */
static void scan(const Highest *h, int64_t low, int64_t high, uint64_t *held, int64_t *counts, float *least) {
    const int64_t k = h->k;
    for (int64_t i = low; i < high; i += h->stride) {
        const int64_t group = h->codes ? h->codes[i] : 0;
        if (h->scores[i] < least[group]) continue;
        uint64_t *mine = held + group * 2 * k;
        mine[counts[group]++] = standing(h->scores[i], i);
        if (counts[group] == 2 * k) {
            keep_highest(mine, counts + group, k);
            least[group] = h->scores[UINT32_MAX - (uint32_t)mine[k - 1]];
        }
    }
    for (int64_t group = 0; group < h->groups; group++)
        if (counts[group] > k) keep_highest(held + group * 2 * k, counts + group, k);
}

static void some_highest(void *what, int64_t low, int64_t high, int part) {
    const Highest *h = what;
    scan(h, low, high, h->held + part * h->groups * 2 * h->k, h->counts + part * h->groups, h->least + part * h->groups);
}

/* What about twice as many as wanted reach, as far as one score in SAMPLED tells: if enough do, nothing below is of interest. Gives
   whether there is something to tell. */
static int guess_least(const Highest *all, int64_t n) {
    const int64_t wanted = 2 * all->k / SAMPLED;
    if (wanted < 8) return 0;
    Highest few = *all;
    few.k = wanted;
    few.stride = SAMPLED;
    for (int64_t group = 0; group < all->groups; group++) all->counts[group] = 0, all->least[group] = -INFINITY;
    scan(&few, 0, n, all->held, all->counts, all->least);
    for (int64_t group = 0; group < all->groups; group++) {
        const uint64_t *mine = all->held + group * 2 * wanted;
        all->least[group] = all->counts[group] < wanted ? -INFINITY : all->scores[UINT32_MAX - (uint32_t)mine[wanted - 1]];
    }
    memset(all->held, 0, sizeof *all->held * (size_t)(all->groups * 2 * wanted));
    return 1;
}

/* The k highest of n scores in each group, in any order, as their standing, whose low half is 2³² − 1 − place: in held
   (groups, 2k), of which the first counts[group] ≤ k are then filled. codes (n): the group of each; NULL: there is one.
   least (groups): memory to work in. Of all three there are as many as threads. n < 2³². */
void highest(int64_t n, int64_t groups, int64_t k, const float *scores, const int32_t *codes, uint64_t *held, int64_t *counts,
             float *least, int64_t threads) {
    Highest all = {groups, k, 1, scores, codes, held, counts, least};
    const int64_t parts = n < WORTH ? 1 : threads;
    for (int guessed = n >= WORTH && guess_least(&all, n);; guessed = 0) {
        for (int64_t i = 0; i < groups * parts; i++) least[i] = guessed ? least[i % groups] : -INFINITY;
        memset(counts, 0, sizeof *counts * (size_t)(groups * parts));
        in_parts(some_highest, &all, n, parts);
        int enough = 1;
        for (int64_t group = 0; group < groups; group++) {
            uint64_t *mine = held + group * 2 * k;
            for (int64_t part = 1; part < parts; part++) {
                const int64_t more = counts[part * groups + group];
                memcpy(mine + counts[group], held + (part * groups + group) * 2 * k, sizeof *held * (size_t)more);
                counts[group] += more;
                if (counts[group] > k) keep_highest(mine, counts + group, k);
            }
            enough = enough && (counts[group] == k || least[group] == -INFINITY);
        }
        if (enough || !guessed) return;
    }
}

LOOP void compare(int64_t n, const float *restrict bound, const int32_t *codes, const float *least, char *restrict out) {
    if (codes)
        for (int64_t i = 0; i < n; i++) out[i] = !(bound[i] < least[codes[i]]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = !(bound[i] < *least);
}

typedef struct {
    const float *bound, *least;
    const int32_t *codes;
    char *out;
} Reaching;

static void some_reaching(void *what, int64_t low, int64_t high, int part) {
    const Reaching *r = what;
    (void)part;
    compare(high - low, r->bound + low, r->codes ? r->codes + low : NULL, r->least, r->out + low);
}

/* out (n): whether what none of n scores ranks above reaches what its group needs, least (groups). codes (n): as above. */
void reaching(int64_t n, const float *bound, const int32_t *codes, const float *least, char *out, int64_t threads) {
    Reaching all = {bound, least, codes, out};
    in_parts(some_reaching, &all, n, n < WORTH ? 1 : threads);
}

/* A vector's name: 128 bits of its bytes and a seed (MurmurHash3's rounds). */
static void name_of(const unsigned char *x, int64_t bytes, uint64_t seed, uint64_t name[2]) {
    const uint64_t c = 0x87c37b91114253d5u, d = 0x4cf5ad432745937fu;
    uint64_t a = seed, b = seed, k[2] = {0, 0};
    for (int64_t left = bytes; left > 0; left -= 16, x += 16) {
        if (left >= 16)
            memcpy(k, x, 16); /* of a length that is known: no call */
        else {
            k[0] = k[1] = 0;
            memcpy(k, x, (size_t)left);
        }
        k[0] *= c;
        a ^= (k[0] << 31 | k[0] >> 33) * d;
        a = ((a << 27 | a >> 37) + b) * 5 + 0x52dce729;
        k[1] *= d;
        b ^= (k[1] << 33 | k[1] >> 31) * c;
        b = ((b << 31 | b >> 33) + a) * 5 + 0x38495ab5;
    }
    a += b;
    b += a;
    for (int j = 0; j < 2; j++) {
        uint64_t *h = j ? &b : &a;
        *h = (*h ^ *h >> 33) * 0xff51afd7ed558ccdu;
        *h = (*h ^ *h >> 33) * 0xc4ceb9fe1a85ec53u;
        *h ^= *h >> 33;
    }
    name[0] = a + b;
    name[1] = b + name[0];
}

/* Where a name is in a table of (name, name, number + 1), or where it would be. */
static uint64_t *found_in(uint64_t *table, int64_t capacity, const uint64_t name[2]) {
    for (int64_t i = (int64_t)(name[0] & (uint64_t)(capacity - 1));; i = (i + 1) & (capacity - 1)) {
        uint64_t *entry = table + 3 * i;
        if (!entry[2] || (entry[0] == name[0] && entry[1] == name[1])) return entry;
    }
}

/* The numbers of n vectors, by their content and seeds (NULL: none): those of the table, or new ones from `next` on, which are
   entered. in_place: a new one has the number next + its place, as if each had one.

   table: (capacity, 3), zero where empty, less than full; capacity: a power of two. places: of the new ones. Gives how many there are. */
int64_t numbered(int64_t n, int64_t bytes, const unsigned char *vectors, const int16_t *seeds, uint64_t *table, int64_t capacity,
                 int64_t next, int64_t in_place, int64_t *numbers, int64_t *places) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t name[2];
        name_of(vectors + i * bytes, bytes, seeds ? (uint64_t)(uint16_t)seeds[i] : 0, name);
        uint64_t *entry = found_in(table, capacity, name);
        if (!entry[2]) {
            entry[0] = name[0];
            entry[1] = name[1];
            entry[2] = (uint64_t)(next + (in_place ? i : count) + 1);
            places[count++] = i;
        }
        numbers[i] = (int64_t)entry[2] - 1;
    }
    return count;
}

/* Enter all of one table into a larger one. */
void moved(const uint64_t *old, int64_t size, uint64_t *table, int64_t capacity) {
    for (const uint64_t *entry = old; entry < old + 3 * size; entry += 3)
        if (entry[2]) memcpy(found_in(table, capacity, entry), entry, 3 * sizeof *entry);
}
